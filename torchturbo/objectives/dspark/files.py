"""A dense target's draft on disk: DeepSpec's settings, and its checkpoint in the subfolder ``dspark`` of the target's.

The settings are those of DeepSpec's draft configurations, under its names. They come from ``dspark/config.json`` of a
model's folder, beside which its weights are, or from a mapping ``dspark_config`` in the target's own ``config.json``,
of which a draft is made anew. An export of the target writes the subfolder again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FOLDER, MAPPING, ARCHITECTURE = "dspark", "dspark_config", "Qwen3DSparkModel"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MODEL_TYPE = "qwen3"
"""Of the draft, whatever its target is."""
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
"""What DeepSpec's checkpoints repeat of the target, and its names there; a tied head is the embeddings."""
NEEDED = (
    "block_size",
    "num_hidden_layers",
    "target_layer_ids",
    "mask_token_id",
    "markov_rank",
    "enable_confidence_head",
)
"""Fields that DeepSpec asks for; ``num_draft_layers`` is its name for the layers where a draft is made anew."""
DEPENDENT = {"markov_rank": "markov_head_type", "enable_confidence_head": "confidence_head_with_markov"}
"""Fields that are asked for where another one is not 0 or false."""
OTHERS = ("num_anchors", "num_target_layers", "num_draft_layers")
"""Further fields of DeepSpec's."""


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

    Raises
    ------
    ValueError
        If ``dspark/config.json`` is no JSON.

    """
    place = speaks(base)
    if place is None:
        return None
    if place == MAPPING:
        return Found(place, getattr(base.config, MAPPING), None)
    file = _file(base.config, CONFIG)
    assert file is not None
    return Found(place, json.loads(file.read_text(encoding="utf-8")), file.parent)


def speaks(base: Any) -> str | None:
    """Return where something speaks of a draft of a Transformers model; None where nothing does."""
    if _file(base.config, CONFIG) is not None:
        return f"{FOLDER}/{CONFIG}"
    return MAPPING if isinstance(getattr(base.config, MAPPING, None), Mapping) else None


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


def weights(config: Any) -> list[Path]:
    """Return the files with a draft's weights, of a target with this configuration."""
    if (single := _file(config, WEIGHTS)) is not None:
        return [single]
    if (index := _file(config, INDEX)) is None:
        return []
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return [path for name in names if (path := _file(config, name)) is not None]


def draft_config(target: Any, found: Found) -> Any:
    """Return the configuration of a draft: what is said of it, and for one made anew the target's sizes otherwise."""
    from transformers import Qwen3Config

    plain, said = Qwen3Config().to_dict(), dict(found.said)
    layers = said.pop("num_draft_layers", None)
    said.setdefault("num_hidden_layers", layers)
    taken: dict[str, Any] = {}
    if found.folder is None:
        taken = {name: value for name, value in target.to_dict().items() if name in plain and value is not None}
        taken.setdefault("head_dim", target.hidden_size // target.num_attention_heads)
        for name in ("layer_types", "max_window_layers", "sliding_window", "attention_bias"):
            taken.pop(name, None)
        taken |= {"use_sliding_window": False}
    fixed = {
        "architectures": [ARCHITECTURE],
        "tie_word_embeddings": False,
        "num_target_layers": target.num_hidden_layers,
        "layer_types": ["full_attention"] * int(said["num_hidden_layers"]),
    }
    said.pop("model_type", None)
    return Qwen3Config(**(taken | said | fixed))


def problems(target: Any, found: Found) -> list[str]:
    """Return what is wrong with the settings of a draft of a target with this configuration, all at once."""
    said = dict(found.said)
    if found.folder is None and "num_draft_layers" in said:
        said.setdefault("num_hidden_layers", said["num_draft_layers"])
    needed = [name for name in NEEDED if name not in said]
    needed += [name for switch, name in DEPENDENT.items() if said.get(switch) and name not in said]
    wrong = [f"lacks {', '.join(needed)}"] if needed else []
    wrong += _unknown(said, found)
    return wrong + _wrong_values(said) + _unlike_target(said, target)


def _unknown(said: Mapping[str, Any], found: Found) -> list[str]:
    """Return what is said under names that mean nothing; a draft's own config.json may hold more than is known here."""
    from transformers import Qwen3Config

    if found.folder is not None:
        kind = said.get("model_type", MODEL_TYPE)
        return [] if kind == MODEL_TYPE else [f"is of model_type {kind}, and only {MODEL_TYPE} drafts are known"]
    known = {*NEEDED, *DEPENDENT.values(), *OTHERS, *Qwen3Config().to_dict()}
    others = sorted(set(said) - known)
    return [f"has {', '.join(others)}, which no draft has"] if others else []


def _wrong_values(said: Mapping[str, Any]) -> list[str]:
    from torchturbo.objectives.dspark.markov import KINDS

    least = {"block_size": 1, "num_hidden_layers": 1, "mask_token_id": 0, "markov_rank": 0}
    wrong = [
        f"{name}: expected a whole number of at least {bound}, got {said[name]!r}"
        for name, bound in least.items()
        if name in said and not (type(said[name]) is int and said[name] >= bound)
    ]
    if said.get("markov_rank") and (kind := said.get("markov_head_type", "vanilla")) not in KINDS:
        wrong.append(f"markov_head_type: expected one of {', '.join(KINDS)}, got {kind!r}")
    if said.get("confidence_head_with_markov") and said.get("enable_confidence_head") and not said.get("markov_rank"):
        wrong.append("confidence_head_with_markov: there is no Markov head, markov_rank is 0")
    return wrong


def _unlike_target(said: Mapping[str, Any], target: Any) -> list[str]:
    """Return where a draft does not fit its target."""
    wrong = [
        f"{name} is {said[name]}, and the target's {getattr(target, name)}"
        for name in ("hidden_size", "vocab_size")
        if name in said and said[name] != getattr(target, name)
    ]
    token = said.get("mask_token_id")
    if type(token) is int and token >= target.vocab_size:
        wrong.append(f"mask_token_id: expected less than {target.vocab_size}, the vocabulary, got {token}")
    ids, last = said.get("target_layer_ids"), target.num_hidden_layers - 1
    if ids is None:
        return wrong
    whole = isinstance(ids, list) and ids and all(type(one) is int for one in ids)
    if not whole or ids != sorted(set(ids)) or ids[0] < -1 or ids[-1] >= last:
        # DeepSpec's evaluation can't use the last layer: what it sees of it has been normalised.
        reason = f"expected ascending numbers of layers from -1, the embeddings, to {last - 1}, the last but one"
        wrong.append(f"target_layer_ids: {reason}, got {ids!r}")
    return wrong


def unlike_files(draft: Any, weights: list[Path]) -> list[str]:
    """Return where the files of a draft's weights do not fit it; reads headers alone."""
    if not weights:
        return [f"has no {WEIGHTS} beside its {CONFIG}"]
    shapes: dict[str, list[int]] = {}
    for path in weights:
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    expected = {name: list(one.shape) for name, one in draft.state_dict().items()}
    missing = [name for name in expected if name not in shapes]
    wrong = [f"its weights lack {len(missing)} of {len(expected)}: {', '.join(missing[:3])}"] if missing else []
    for name in sorted(shapes.keys() - expected.keys() - COPIES.keys())[:3]:
        wrong.append(f"its weights have {name}, which its {CONFIG} does not ask for")
    wrong += [
        f"its weights have {name} as {shapes[name]}, and its {CONFIG} asks for {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ][:3]
    return wrong


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
