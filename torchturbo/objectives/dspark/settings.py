"""The settings of a dense target's draft: which there are, what is wrong with them, and the configuration they make.

They are those of DeepSpec's draft configurations, under its names, beside those of Transformers' Qwen3.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from torchturbo.errors import shorten
from torchturbo.objectives.dspark.files import Found
from torchturbo.objectives.dspark.values import ascending, flag, number, one_of, slots, whole

ARCHITECTURE, MODEL_TYPE = "Qwen3DSparkModel", "qwen3"
"""Of the draft, whatever its target is."""
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


def draft_config(target: Any, found: Found) -> Any:
    """Return the configuration of a draft whose settings have no :func:`problems`.

    It is what is said of it, and for one made anew the target's sizes otherwise. What Transformers has against it, it
    raises.
    """
    from transformers import Qwen3Config

    said = _said(found)
    fixed = {
        "architectures": [ARCHITECTURE],
        "tie_word_embeddings": False,
        "num_target_layers": target.num_hidden_layers,
        "layer_types": ["full_attention"] * int(said["num_hidden_layers"]),
    }
    for name in ("model_type", "num_draft_layers"):
        said.pop(name, None)
    return Qwen3Config(**(_taken(target, found) | said | fixed))


def _said(found: Found) -> dict[str, Any]:
    """Return what is said of a draft, its layers under one name."""
    said = dict(found.said)
    if found.folder is None and "num_draft_layers" in said:
        said.setdefault("num_hidden_layers", said["num_draft_layers"])
    return said


def _taken(target: Any, found: Found) -> dict[str, Any]:
    """Return what a draft has of its target where nothing else is said: its sizes, if it is made anew."""
    from transformers import Qwen3Config

    if found.folder is not None:
        return {}
    plain = Qwen3Config().to_dict()
    taken = {name: value for name, value in target.to_dict().items() if name in plain and value is not None}
    taken.setdefault("head_dim", target.hidden_size // target.num_attention_heads)
    for name in ("layer_types", "max_window_layers", "sliding_window", "attention_bias"):
        taken.pop(name, None)
    return taken | {"use_sliding_window": False}


def problems(target: Any, found: Found) -> list[str]:
    """Return what is wrong with the settings of a draft of a target with this configuration, all at once.

    Nothing is built, so that a number of any size costs nothing.
    """
    said = _said(found)
    needed = [name for name in NEEDED if name not in said]
    needed += [name for switch, name in DEPENDENT.items() if said.get(switch) and name not in said]
    wrong = [f"lacks {', '.join(needed)}"] if needed else []
    return [*wrong, *_unknown(said, found), *_wrong_fields(said, target, found), *_wrong_sizes(said, target, found)]


def _unknown(said: Mapping[str, Any], found: Found) -> list[str]:
    """Return what is said under names that mean nothing; a draft's own config.json may hold more than is known here."""
    from transformers import Qwen3Config

    if found.folder is not None:
        kind = said.get("model_type", MODEL_TYPE)
        shown = shorten(kind) if isinstance(kind, str) else reprlib.repr(kind)
        return [] if kind == MODEL_TYPE else [f"is of model_type {shown}, and only {MODEL_TYPE} drafts are known"]
    known = {*NEEDED, *DEPENDENT.values(), *OTHERS, *Qwen3Config().to_dict()}
    others = sorted(map(str, set(said) - known))
    return [f"has {', '.join(map(shorten, others))}, which no draft has"] if others else []


def _wrong_fields(said: Mapping[str, Any], target: Any, found: Found) -> list[str]:
    """Return what is wrong with DeepSpec's fields, of those that are there."""
    from torchturbo.objectives.dspark.markov import KINDS

    layers, vocabulary = target.num_hidden_layers, target.vocab_size
    # Layers of a draft with weights are counted in its files.
    most = (layers, "the target's layers") if found.folder is None else (None, "")
    # DeepSpec's evaluation can't use the last layer: what it sees of it has been normalised.
    seen = f"of layers from -1, the embeddings, to {layers - 2}, the last but one"
    checks: dict[str, Any] = {
        "block_size": lambda name, value: slots(name, value, target),
        "num_hidden_layers": lambda name, value: whole(name, value, 1, *most),
        "target_layer_ids": lambda name, value: ascending(name, value, -1, layers - 2, seen),
        "mask_token_id": lambda name, value: whole(name, value, 0, vocabulary - 1, "the vocabulary's last"),
        "markov_rank": lambda name, value: whole(name, value, 0, vocabulary, "the vocabulary"),
        "enable_confidence_head": flag,
        "confidence_head_with_markov": flag,
    }
    wrong = [problem for name, check in checks.items() if name in said for problem in check(name, said[name])]
    if said.get("markov_rank") and "markov_head_type" in said:
        wrong += one_of("markov_head_type", said["markov_head_type"], KINDS)
    if said.get("confidence_head_with_markov") and said.get("enable_confidence_head") and not said.get("markov_rank"):
        wrong.append("confidence_head_with_markov: there is no Markov head, markov_rank is 0")
    return wrong


def _wrong_sizes(said: Mapping[str, Any], target: Any, found: Found) -> list[str]:
    """Return what is wrong with the sizes of a draft's layers, said or taken from elsewhere."""
    from transformers import Qwen3Config
    from transformers.activations import ACT2FN

    has = Qwen3Config().to_dict() | _taken(target, found) | dict(said)
    wrong = [
        f"{name} is {reprlib.repr(has[name])}, and the target's {getattr(target, name)}"
        for name in ("hidden_size", "vocab_size")
        if type(has[name]) is not int or has[name] != getattr(target, name)
    ]
    sizes = ("intermediate_size", "num_attention_heads", "max_position_embeddings")
    wrong += [problem for name in sizes for problem in whole(name, has[name], 1)]
    heads, keys = has["num_attention_heads"], has["num_key_value_heads"]
    if keys is not None:  # as many as heads
        wrong += whole("num_key_value_heads", keys, 1)
        if type(heads) is type(keys) is int and keys > 0 and heads % keys:
            wrong.append(f"num_key_value_heads: expected a divisor of num_attention_heads, {heads}, got {keys}")
    wrong += whole("head_dim", has["head_dim"], 2)
    if type(has["head_dim"]) is int and has["head_dim"] % 2:
        wrong.append(f"head_dim: expected an even number, whose halves turn together, got {has['head_dim']}")
    wrong += number("rms_norm_eps", has["rms_norm_eps"], 0, 1, above=True)
    wrong += number("attention_dropout", has["attention_dropout"], 0, 1)
    wrong += one_of("hidden_act", has["hidden_act"], ACT2FN)
    wrong += flag("attention_bias", has["attention_bias"])
    if (rope := has["rope_parameters"]) is not None and not isinstance(rope, Mapping):
        wrong.append(f"rope_parameters: expected a mapping, got {reprlib.repr(rope)}")
    return wrong
