"""A dense target's draft on disk: DeepSpec's settings, and its checkpoint in the subfolder ``dspark`` of the target's.

The settings are those of DeepSpec's draft configurations, under its names. They come from ``dspark/config.json`` of a
model's folder, beside which its weights are, or from a mapping ``dspark_config`` in the target's own ``config.json``,
of which a draft is made anew. An export of the target writes the subfolder again.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchturbo.checkpoint.damage import safetensors_problem
from torchturbo.checkpoint.fingerprints import is_name
from torchturbo.checkpoint.slices import Stored, headers

FOLDER, MAPPING = "dspark", "dspark_config"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LAYER = re.compile(r"layers\.([0-9]+)\.")
"""A layer's tensors in a draft's files, and its number."""
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
"""What DeepSpec's checkpoints repeat of the target, and its names there; a tied head is the embeddings."""


class Found(NamedTuple):
    """What a model's folder says of its draft."""

    place: str
    """Where it says so."""
    said: Mapping[str, Any]
    """The settings."""
    folder: Path | None
    """Where the draft's own files are; None for one that is made anew."""


def find(base: Any) -> Found | None:
    """Return what the folder or the configuration of a Transformers model says of a draft; None where they say nothing.

    What it says under each name may be anything: see :func:`torchturbo.objectives.dspark.settings.problems`.

    Raises
    ------
    ValueError
        If ``dspark/config.json`` can't be read, or is no JSON; if it or ``dspark_config`` is no mapping. Its text says
        which, and what was found.

    """
    place = speaks(base)
    if place is None:
        return None
    if place == MAPPING:
        return Found(place, _mapping(place, getattr(base.config, MAPPING)), None)
    file = _file(base.config, CONFIG)
    assert file is not None
    return Found(place, _mapping(place, _json(place, file)), file.parent)


def _json(place: str, file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{place} can't be read: {error}") from error


def _mapping(place: str, said: Any) -> Mapping[str, Any]:
    if not isinstance(said, Mapping):
        raise ValueError(f"{place}: expected a mapping of names to values, got {reprlib.repr(said)}")
    return said


def speaks(base: Any) -> str | None:
    """Return where something speaks of a draft of a Transformers model; None where nothing does."""
    if _file(base.config, CONFIG) is not None:
        return f"{FOLDER}/{CONFIG}"
    return None if getattr(base.config, MAPPING, None) is None else MAPPING


def _file(config: Any, name: str) -> Path | None:
    """Return a file of the subfolder of a model that was loaded from a folder or the Hub; None where it has none."""
    from transformers.utils.hub import cached_file

    source = getattr(config, "_name_or_path", "")
    if not source:
        return None
    if Path(source).is_dir():
        local = Path(source, FOLDER, name)
        return local if local.is_file() else None
    settings = {"subfolder": FOLDER, "revision": getattr(config, "_commit_hash", None)}
    missing: Any = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(source, name, **settings, **missing)
    return None if found is None else Path(found)


def weights(config: Any) -> dict[str, Stored]:
    """Return what the files of a draft's weights hold, of a target with this configuration; reads headers alone.

    Empty where the folder has no weights. No file outside of the folder is opened.

    Raises
    ------
    ValueError
        If a file is damaged or missing, or the index names one elsewhere. Its text says which.

    """
    if (single := _file(config, WEIGHTS)) is not None:
        return _headers(single)
    found: dict[str, Stored] = {}
    if (index := _file(config, INDEX)) is not None:
        for name in _indexed(index):
            if (path := _file(config, name)) is None:
                raise ValueError(f"{FOLDER}/{INDEX} names {name}, which is missing")
            found |= _headers(path)
    return found


def _headers(path: Path) -> dict[str, Stored]:
    if problem := safetensors_problem(path):
        raise ValueError(f"{FOLDER}/{path.name} {problem}")
    return headers([path])


def _indexed(index: Path) -> list[str]:
    """Return the names of the files in an index, all of them in its own folder."""
    place = f"{FOLDER}/{INDEX}"
    said = _json(place, index)
    shards = said.get("weight_map") if isinstance(said, Mapping) else None
    if not isinstance(shards, Mapping):
        raise ValueError(f"{place}: expected a mapping weight_map of tensors to files, got {reprlib.repr(said)}")
    for name in shards.values():
        if not isinstance(name, str) or not is_name(name):
            raise ValueError(f"{place} names {reprlib.repr(name)}, which is no file of this folder")
    return sorted(set(shards.values()))


def other_layers(layers: Any, stored: Mapping[str, Stored]) -> list[str]:
    """Return where the files of a draft's weights hold another number of layers than it is said to have."""
    held = {match[1] for match in map(LAYER.match, stored) if match}
    if not stored or type(layers) is not int or len(held) == layers:
        return []
    return [f"its weights are those of {len(held)} layers, and its {CONFIG} asks for num_hidden_layers {layers}"]


def unlike_files(draft: Any, stored: Mapping[str, Stored]) -> list[str]:
    """Return where the files of a draft's weights do not fit it."""
    if not stored:
        return [f"has no {WEIGHTS} beside its {CONFIG}"]
    expected = {name: tuple(one.shape) for name, one in draft.state_dict().items()}
    missing = [name for name in expected if name not in stored]
    wrong = [f"its weights lack {len(missing)} of {len(expected)}: {', '.join(missing[:3])}"] if missing else []
    for name in sorted(stored.keys() - expected.keys() - COPIES.keys())[:3]:
        wrong.append(f"its weights have {name}, which its {CONFIG} does not ask for")
    wrong += [
        f"its weights have {name} as {list(stored[name].shape)}, and its {CONFIG} asks for {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ][:3]
    strange = sorted(name for name in expected if name in stored and stored[name].dtype is None)
    return wrong + [f"its weights have {name} in a format that torch has not" for name in strange[:3]]


def write(folder: Path, config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write a draft into the subfolder of a target's folder, where the target's own files are already."""
    inside = folder / FOLDER
    inside.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    config.dtype = next(iter(held.values())).dtype
    config.save_pretrained(inside)
    save_file(held | _copies(folder), inside / WEIGHTS, metadata={"format": "pt"})


def _copies(folder: Path) -> dict[str, Tensor]:
    """Return the embeddings and the head of the target in a folder, by DeepSpec's names."""
    index = folder / INDEX
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else None

    def read(name: str) -> Tensor | None:
        file = WEIGHTS if shards is None else shards.get(name)
        if file is None:
            return None
        with safe_open(folder / file, framework="pt") as held:
            return held.get_tensor(name) if name in held.keys() else None  # noqa: SIM118

    found = {own: read(name) for own, name in COPIES.items()}
    embeddings = found["embed_tokens.weight"]
    kept = {own: embeddings if value is None else value for own, value in found.items()}
    return {own: value.clone() for own, value in kept.items() if value is not None}
