"""The registry of model parts against the real model of each family, at its default size, on the meta device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as CLASSES

from torchturbo.engine.parts import FAMILIES, GROUPS, TEXT_ONLY, Parts, partition, parts_of, register

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "freezing.md"
EVERYWHERE = [
    "gemma3",
    "gemma4",
    "glm4v",
    "glm4v_moe",
    "idefics3",
    "internvl",
    "llama4",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "mllama",
    "paligemma",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_omni_moe_thinker",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
]
HERE = [family for family in FAMILIES if family in CONFIG_MAPPING]
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": SIGLIP},
    "gemma4": {"vision_config": {}, "audio_config": {}},
    "gemma4_unified": {"vision_config": {}, "audio_config": {}},
    "idefics3": {"pad_token_id": 0},  # in Transformers 5.6 their own lies outside the vocabulary
    "smolvlm": {"pad_token_id": 0},
}
"""What a family needs beyond its defaults to have all its parts."""


def model_of(family: str) -> Any:
    """Return a family's model without weights."""
    with torch.device("meta"):
        return getattr(transformers, CLASSES[family])(AutoConfig.for_model(family, **CHANGES.get(family, {})))


def decoder_of(model: Any) -> Any:
    """Return what Transformers calls the decoder; before 5.7 a thinker calls itself so, and its decoder ``model``."""
    found = model.get_decoder()
    return model.model if found is model else found


def tensors(*modules: Any) -> set[int]:
    return {id(parameter) for module in modules if module is not None for parameter in module.parameters()}


@pytest.mark.parametrize("family", HERE)
def test_the_three_groups_partition_the_parameters(family: str) -> None:
    """Every parameter is in one group, and Transformers' own accessors agree on which."""
    model = model_of(family)
    parts = parts_of(model)
    assert parts is not None

    groups, unplaced = partition(model, parts)

    assert () == unplaced
    ids = {group: {id(parameter) for parameter in members.values()} for group, members in groups.items()}
    assert all(ids.values())
    assert tensors(model) == set.union(*ids.values())
    assert sum(map(len, ids.values())) == len(tensors(model))
    assert tensors(decoder_of(model), model.get_output_embeddings()) == ids["language_model"]
    # What sees pixels or sound first is tower; what has the language model's width at its end is projector.
    assert id(next(iter(parameters_of_towers(model)))) in ids["vision_tower"]
    shapes = [parameter.shape for parameter in groups["multi_modal_projector"].values()]
    assert any(width in shape for width in widths(model.config) for shape in shapes)


def widths(config: Any) -> set[int]:
    """Return the language model's width; default configurations of some families give the tower another one."""
    vision = getattr(config, "vision_config", None)
    inner = ["hidden_size"] if hasattr(vision, "embed_dim") else []  # Qwen2-VL's outer width, then
    found = [getattr(vision, name, None) for name in ("out_hidden_size", *inner)]
    return {config.get_text_config().hidden_size, *filter(None, found)}


def parameters_of_towers(model: Any) -> list[Any]:
    """Return the parameters of the modules that Transformers itself calls encoders, the whole rest where none."""
    language = tensors(decoder_of(model), model.get_output_embeddings())
    towers = [
        module
        for module in model.modules()
        if isinstance(module, transformers.PreTrainedModel) and module.main_input_name != "input_ids"
    ]
    return [p for tower in (towers or [model]) for p in tower.parameters() if id(p) not in language]


def test_the_families_of_the_contract_are_there() -> None:
    """Some rows are of models that only newer versions of Transformers have; these are in every one."""
    assert set(EVERYWHERE) <= set(HERE)


@pytest.mark.parametrize(
    ("family", "name", "group"),
    [
        ("qwen3_vl", "visual.deepstack_merger_list.0.norm.weight", "vision_tower"),
        ("qwen3_vl", "visual.merger.norm.weight", "multi_modal_projector"),
        ("qwen3_omni_moe_thinker", "visual.merger_list.0.ln_q.weight", "vision_tower"),
        ("qwen3_omni_moe_thinker", "audio_tower.proj1.weight", "multi_modal_projector"),
        ("qwen2_5_omni_thinker", "audio_tower.conv1.weight", "vision_tower"),
        ("qwen2_5_omni_thinker", "audio_tower.proj.weight", "multi_modal_projector"),
        ("qwen2_5_omni_thinker", "layers.0.mlp.up_proj.weight", "language_model"),  # Transformers before 5.7
        ("llava_next", "image_newline", "multi_modal_projector"),
        ("glm4v", "visual.downsample.weight", "vision_tower"),
        ("minicpmv4_6", "vision_tower.vit_merger.linear_1.weight", "vision_tower"),
        ("gemma4", "embed_audio.embedding_projection.weight", "multi_modal_projector"),
        ("llava", "vision_tower_2.weight", None),
    ],
)
def test_what_was_decided_for_all_families(family: str, name: str, group: str | None) -> None:
    """The cases that other trainers treat differently; docs/guides/freezing.md tells them."""
    assert group == FAMILIES[family].group(name)


@pytest.mark.parametrize("family", ["paligemma", "gemma3", "internvl", "mistral3"])
def test_a_tied_head_is_language_model(family: str) -> None:
    """It is the embeddings' own parameter, and appears once."""
    model = model_of(family)

    groups = partition(model, FAMILIES[family]).groups

    head = id(model.get_output_embeddings().weight)
    assert [head] == [id(p) for members in groups.values() for p in members.values() if id(p) == head]
    assert head in {id(parameter) for parameter in groups["language_model"].values()}


def test_a_parameter_of_two_groups_is_in_none() -> None:
    """Freezing one of them would freeze part of the other."""
    model = model_of("llava")
    model.model.multi_modal_projector.linear_1.weight = model.lm_head.weight

    unplaced = partition(model, FAMILIES["llava"]).unplaced

    assert ("model.multi_modal_projector.linear_1.weight", "lm_head.weight") == unplaced


def test_extra_heads_are_in_no_group() -> None:
    """They are trained against a frozen language model; embeddings they share are the language model's still."""
    model = tiny.model()
    model.mtp = torch.nn.ModuleDict({"proj": torch.nn.Linear(2, 2), "embed": model.model.embed_tokens})

    groups, unplaced = partition(model, TEXT_ONLY)

    names = set(groups["language_model"])
    assert () == unplaced
    assert not any(name.startswith("mtp") for name in names)
    assert "model.embed_tokens.weight" in names


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5", "llama4", "mllama"])
def test_a_text_model_is_all_language_model(family: str) -> None:
    """Also the text half of a multi-modal family, which Transformers makes where a causal model is asked for."""
    config = AutoConfig.for_model(family)
    text = config.get_text_config()  # newer versions take it by themselves
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text if type(text) in AutoModelForCausalLM._model_mapping else config)
    assert TEXT_ONLY == parts_of(model)

    groups, unplaced = partition(model, TEXT_ONLY)

    assert () == unplaced
    assert [0, 0, len(tensors(model))] == [len(groups[group]) for group in GROUPS]


@pytest.mark.parametrize("family", ["fuyu", "blip-2", "clip"])
def test_other_families_are_unknown(family: str) -> None:
    """A multi-modal model without a row is not taken for a text model."""
    config = AutoConfig.for_model(family)

    assert parts_of(type("Model", (), {"config": config})()) is None
    assert parts_of(torch.nn.Linear(2, 2)) is None


def test_a_family_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a program or a plugin, once."""
    monkeypatch.setattr("torchturbo.engine.parts.FAMILIES", dict(FAMILIES))
    register("minicpmv", vision=["vpm"], projector=["resampler"], language=["llm"])

    found = parts_of(type("Model", (), {"config": type("Config", (), {"model_type": "minicpmv"})})())

    assert Parts(("vpm",), ("resampler",), ("llm",)) == found
    with pytest.raises(ValueError, match="minicpmv has its parts already"):
        register("minicpmv", vision=["vpm"], projector=["resampler"])


def test_the_guide_shows_every_row() -> None:
    """The table of docs/guides/freezing.md is the registry."""
    rows = [
        [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        for line in GUIDE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `") and "tt_" not in line
    ]

    assert [[[family], *map(list, parts)] for family, parts in FAMILIES.items()] == rows
