"""Read a GGUF file once instead of at every step of a conversion.

Transformers parses the whole file anew for the configuration, the tokenizer and the weights, and builds the map of
tensor names once for every module of the model (397 times for SmolLM2). Within :func:`read_once` both are kept. The
converted files are the same to the byte; ``benchmarks/quickstart.py`` measures the gain.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("GGUFReader", "get_tensor_name_map")
"""What Transformers imports from ``gguf`` at each use, and what depends on nothing but its arguments."""


@contextmanager
def read_once() -> Iterator[tuple[str, ...]]:
    """Let ``gguf`` answer a repeated question from memory within the block; give the names that are kept.

    A name that this version of ``gguf`` does not have is left out: the conversion is then slower, not wrong.
    """
    import gguf

    originals: dict[str, Any] = {name: getattr(gguf, name) for name in NAMES if callable(getattr(gguf, name, None))}
    for name, original in originals.items():
        setattr(gguf, name, functools.cache(original))
    try:
        yield tuple(originals)
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)
