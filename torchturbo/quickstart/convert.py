"""GGUF to a Hugging Face folder in fp32: the model that the quickstart trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from torchturbo.quickstart.gguf_speed import read_once

Stage = Callable[[str], None]
"""Called with what is being done, before it is done."""

STAGES = ("tokenizer", "weights", "save")


def convert(gguf_file: Path, folder: Path, on_stage: Stage = lambda stage: None, *, fast: bool = True) -> None:
    """Write model and tokenizer of a GGUF file as a folder that ``from_pretrained`` reads, weights in fp32.

    fp32 because a CPU without bf16 units trains bf16 weights more than ten times as slowly.

    Args:
        gguf_file: the file to read.
        folder: where to write; made if it is absent.
        on_stage: told each of :data:`STAGES` as it begins.
        fast: read the file once (:mod:`torchturbo.quickstart.gguf_speed`); same result, a third of the time.

    Raises:
        ImportError: torch, transformers or gguf is missing.
        ValueError: the file is no GGUF, or of an architecture that Transformers does not know.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with read_once() if fast else nullcontext():
        on_stage("tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
        on_stage("weights")
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32, **_dense()
        )
    on_stage("save")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dense() -> dict[str, object]:
    """Return what makes ``from_pretrained`` give plain weights.

    Newer versions of Transformers keep a GGUF's weights packed unless told otherwise, and such a model can neither be
    saved nor trained. Older ones (5.6) always unpack and have no such setting.
    """
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
