"""The parts of each model family as data: which parameters are vision tower, projector and language model.

Add a family: one row of :data:`FAMILIES`, or :func:`register` from a program or a plugin. A row holds dotted prefixes
of module names without a leading ``model.``: model classes of one family differ in it, and so do versions of
Transformers. This module imports neither torch nor transformers until a model is looked at.

Decided once for every family, and told in docs/guides/freezing.md:

* An audio tower goes with the vision tower and its last projection with the projector, as in LLaMA-Factory.
* What merges deep vision features (``deepstack_merger_list``) is vision tower, as in LLaMA-Factory.
* A learned row separator (``image_newline``) is projector: it lives in the language model's space.
* A head that is tied to the embeddings is one parameter with them, and so language model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

GROUPS = ("vision_tower", "multi_modal_projector", "language_model")
"""The three groups, by their keys of the section ``freeze_policy``."""
EXTRA_HEADS = ("mtp",)
"""Prefixes of heads that the engine adds to a model; they belong to no group and are never frozen."""


class Parts(NamedTuple):
    """Prefixes of the three groups, in the order of :data:`GROUPS`. A projector inside a tower is no part of it."""

    vision: tuple[str, ...]
    projector: tuple[str, ...]
    language: tuple[str, ...] = ("language_model", "lm_head")

    def group(self, name: str) -> str | None:
        """Return the group of a parameter, by its name without ``model.``; None where it falls in none or in two."""
        inside = [any(_under(name, prefix) for prefix in prefixes) for prefixes in self]
        inside[0] = inside[0] and not inside[1]
        return GROUPS[inside.index(True)] if inside.count(True) == 1 else None


_LLAVA = Parts(("vision_tower",), ("multi_modal_projector",))
_LLAVA_NEWLINE = Parts(("vision_tower",), ("multi_modal_projector", "image_newline"))
_QWEN = Parts(("visual",), ("visual.merger",))
_IDEFICS = Parts(("vision_model",), ("connector",), ("text_model", "lm_head"))
_MINICPM = Parts(("vision_tower",), ("merger",))
# Transformers before 5.7 has the thinkers' decoder as `model.layers`, without a `language_model` around it.
_THINKER = ("language_model", "lm_head", "embed_tokens", "layers", "norm")

FAMILIES: dict[str, Parts] = {
    "aya_vision": _LLAVA,
    "cohere2_vision": _LLAVA,
    "gemma3": _LLAVA,
    "gemma4": Parts(("vision_tower", "audio_tower"), ("embed_vision", "embed_audio")),
    "gemma4_unified": Parts(("embed_vision",), ("embed_vision.multimodal_embedder", "embed_audio")),
    "glm46v": _QWEN,
    "glm4v": _QWEN,
    "glm4v_moe": _QWEN,
    "glm_ocr": _QWEN,
    "idefics2": _IDEFICS,
    "idefics3": _IDEFICS,
    "internvl": _LLAVA,
    "kimi_k25": Parts(("vision_tower",), ("mm_projector",)),
    "lfm2_vl": _LLAVA,
    "llama4": Parts(("vision_model",), ("multi_modal_projector",)),
    "llava": _LLAVA,
    "llava_next": _LLAVA_NEWLINE,
    "llava_next_video": _LLAVA_NEWLINE,
    "llava_onevision": _LLAVA_NEWLINE,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
    "mistral3": _LLAVA,
    "mllama": Parts(("vision_model",), ("multi_modal_projector",)),
    "paligemma": _LLAVA,
    "qwen2_5_omni_thinker": Parts(("visual", "audio_tower"), ("visual.merger", "audio_tower.proj"), _THINKER),
    "qwen2_5_vl": _QWEN,
    "qwen2_audio": Parts(("audio_tower",), ("multi_modal_projector",)),
    "qwen2_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_omni_moe_thinker": Parts(
        ("visual", "audio_tower"), ("visual.merger", "audio_tower.proj1", "audio_tower.proj2"), _THINKER
    ),
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "smolvlm": _IDEFICS,
    "video_llava": Parts(("image_tower", "video_tower"), ("multi_modal_projector",)),
    "vipllava": _LLAVA,
}
"""The parts of every known multi-modal family, by ``config.model_type``."""

TEXT_ONLY = Parts((), (), ("",))
"""A model that is a language model and nothing else."""


def register(
    model_type: str,
    *,
    vision: Iterable[str],
    projector: Iterable[str],
    language: Iterable[str] = Parts((), ()).language,
) -> None:
    """Make a family known to ``freeze_policy``, by dotted prefixes of module names without a leading ``model.``.

    Raises
    ------
    ValueError
        If the family has a row already.

    """
    if model_type in FAMILIES:
        raise ValueError(f"{model_type} has its parts already: {FAMILIES[model_type]}")
    FAMILIES[model_type] = Parts(tuple(vision), tuple(projector), tuple(language))


def parts_of(model: Any) -> Parts | None:
    """Return the parts of a Transformers model; None for a family that nobody has told of."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", "")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as REGISTERED
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    # The mapping also leads to multi-modal models; those have a configuration for each of their parts.
    alone = not getattr(config, "sub_configs", None)
    known = model_type in CAUSAL or type(model).__name__ in CAUSAL.values() or type(config) in REGISTERED
    return TEXT_ONLY if alone and known else None


class Partition(NamedTuple):
    """The parameters of a model by group."""

    groups: Mapping[str, Mapping[str, Any]]
    """For each of :data:`GROUPS` its parameters by name; extra heads are in none."""
    unplaced: tuple[str, ...]
    """Names that fall in no group, or in two; a parameter that two groups share is here by all its names."""


def partition(model: Any, parts: Parts) -> Partition:
    """Return the parameters of a model by group, each under the first of its names."""
    names: dict[int, list[str]] = {}
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    unplaced: list[str] = []
    for key, known in names.items():
        own = [name for name in known if not any(_under(_stem(name), head) for head in EXTRA_HEADS)]
        found = {parts.group(_stem(name)) for name in own}
        if len(found) == 1 and (group := found.pop()) is not None:
            groups[group][own[0]] = parameters[key]
        else:
            unplaced += own
    return Partition(groups, tuple(unplaced))


def _stem(name: str) -> str:
    return name.removeprefix("model.")


def _under(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")
