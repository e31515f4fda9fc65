"""Multi-token prediction, family by family: what heads are built, what their tensors are called, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mtp_models as tiny_mtp
import parity
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from torchturbo.checkpoint.heads import in_checkpoint, names_in_checkpoint
from torchturbo.checkpoint.weights import WeightSource
from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.engine.steps import heads as step
from torchturbo.errors import Problem
from torchturbo.objectives.heads import extra_heads
from torchturbo.objectives.mtp.families import BUILD, FAMILIES, find, held_by, layer_of, said_by

MTP = {"mtp": {"enabled": True}}


def known(model_type: str) -> bool:
    """Return whether the Transformers that is installed has a family; older ones lack some."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


BUILT = [family.model_type for family in FAMILIES if family.build == BUILD and not family.refused]
HERE = [model_type for model_type in BUILT if known(model_type)]
# Versions without DeepSeek-V3.2 add GLM-5's masks to scores as they are, those of True and False, too.
EXACT = [model_type for model_type in HERE if model_type != "glm_moe_dsa" or known("deepseek_v32")]


def test_every_family_is_tried() -> None:
    """A row without a tiny model has no test."""
    assert set(BUILT) == tiny_mtp.SETTINGS.keys()
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("kind", EXACT)
def test_loss_and_gradients_are_those_of_the_oracle(kind: str) -> None:
    """With padding and with documents, at a weight beside which the model's own loss is small."""
    model = tiny_mtp.headed(kind)
    # Recurrent layers compute in fp32 whatever they are given.
    tolerance = 1e-5 if "linear_attention" in (getattr(model.config, "layer_types", None) or ()) else 1e-6
    for batch in (tiny_mtp.batch(), tiny_mtp.packed((7, 5), (4, 8))):
        found, expected = (run(model, [batch], 100.0) for run in (tiny_mtp.fast, tiny_mtp.slow))

        assert expected.depths == pytest.approx(found.depths, rel=1e-6)
        assert float(expected.loss) == pytest.approx(float(found.loss), rel=1e-6)
        assert max(tiny_mtp.errors(found.gradients, expected.gradients).values()) < tolerance


def written(kind: str, folder: Path, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Write a model folder as its makers publish it, heads included; return the heads and their tensors there."""
    model = tiny_mtp.headed(kind, torch.float32, **changes)
    published = in_checkpoint(model, {f"mtp.{name}": value for name, value in model.mtp.state_dict().items()})
    heads = model.mtp
    del model.mtp
    model.save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | published, folder / "model.safetensors", {"format": "pt"})
    return heads, published


@pytest.mark.parametrize("kind", HERE)
def test_heads_are_loaded_from_a_published_checkpoint(kind: str, tmp_path: Path) -> None:
    """Bit for bit, all of them, by the names that they have there; and they are told from the model's own layers."""
    from transformers import AutoModelForCausalLM

    heads, published = written(kind, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)

    parity.prepared(model, parity.config(**MTP))

    found = extra_heads(model)
    assert found is not None
    assert sorted(published) == names_in_checkpoint(model, found)
    assert all(found.owns(name) for name in published)
    assert not any(found.owns(name) for name in load_file(tmp_path / "model.safetensors").keys() - published.keys())
    for name, value in heads.state_dict().items():
        assert torch.equal(value, found.state_dict()[name]), name


EXPERT = ("gate_proj", "up_proj", "down_proj")
LAYERS_LAYOUT = {
    *(f"model.layers.2.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    *(f"model.layers.2.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
    *(f"model.layers.2.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"model.layers.2.mlp.experts.{expert}.{name}.weight" for expert in range(4) for name in EXPERT),
    *(f"model.layers.2.mlp.shared_experts.{name}.weight" for name in EXPERT),
    *("model.layers.2.mlp.gate.weight", "model.layers.2.mlp.gate.e_score_correction_bias"),
}
MTP_LAYOUT = {
    *(f"mtp.{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
    *(f"mtp.layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
    *(f"mtp.layers.0.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mtp.layers.0.mlp.{name}.weight" for name in EXPERT),
}


@pytest.mark.parametrize(("kind", "expected"), [("glm4_moe", LAYERS_LAYOUT), ("qwen3_5_text", MTP_LAYOUT)])
def test_tensors_have_the_names_that_are_published(kind: str, expected: set[str]) -> None:
    """Behind the last layer, or under mtp: written out here as serving engines read them."""
    model = tiny_mtp.headed(kind)

    assert sorted(expected) == names_in_checkpoint(model, model.mtp)


@pytest.mark.parametrize("fused", [True, False])
def test_experts_of_heads_are_fused_or_not_as_the_files_have_them(fused: bool) -> None:
    """Both are published, in one family; an export is like what was loaded."""
    model = tiny_mtp.model("qwen3_5_moe_text")
    names = ["gate_up_proj", "down_proj"] if fused else [f"0.{name}.weight" for name in EXPERT]
    stored = frozenset(f"mtp.layers.0.mlp.experts.{name}" for name in names)
    planned = find(model, stored)
    assert planned is not None and planned.build is not None
    model.add_module("mtp", planned.build(model))

    experts = {name for name in names_in_checkpoint(model, model.mtp) if ".experts." in name}

    assert stored <= experts
    assert (2 if fused else 12) == len(experts)


def test_copies_of_embeddings_and_head_are_the_heads() -> None:
    """Files may repeat them with each head; nothing is loaded from them, and exports know what they repeat."""
    model = tiny_mtp.headed("deepseek_v3", num_nextn_predict_layers=2)

    assert {
        "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight": "lm_head.weight",
        "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight": "lm_head.weight",
    } == model.mtp.copies
    assert all(model.mtp.owns(name) for name in model.mtp.copies)


def test_heads_are_units_of_sharding_in_the_order_in_which_they_run() -> None:
    """What all depths share belongs to no unit of its own: it runs more than once."""
    own = tiny_mtp.headed("deepseek_v3", num_nextn_predict_layers=2).mtp
    shared = tiny_mtp.headed("qwen3_next", num_nextn_predict_layers=2).mtp

    assert ("joins.0", "layers.0", "joins.1", "layers.1") == own.units
    assert ("layers.0", "layers.1") == shared.units
    assert (1, 1) == (len(shared.joins), len(shared.norms))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, 3),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]}, 2),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "mtp_layer_types": ["sliding_attention"]}, 2),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "dense"], "mtp_mlp_layer_types": ["sparse"]}, 1),
        ({"indexer_types": ["full", "full", "shared", "shared"]}, 1),
        ({"layer_types": ["indexed_attention"] * 4}, 3),
    ],
)
def test_heads_are_like_the_last_layer_of_their_kind(said: dict[str, Any], expected: int) -> None:
    """Full attention, unless the configuration names another kind for them."""
    assert expected == layer_of(SimpleNamespace(num_hidden_layers=4, **said))


def test_a_model_without_a_layer_of_the_heads_kind_is_told() -> None:
    """And which kind that is."""
    with pytest.raises(ValueError, match="expected layer_types full_attention or indexed_attention"):
        layer_of(SimpleNamespace(num_hidden_layers=2, layer_types=["linear_attention", "sliding_attention"]))


# ---- how many ----


def test_the_number_of_heads_is_read_under_any_of_its_names() -> None:
    """Families call it differently."""
    deepseek, qwen = tiny_mtp.config("deepseek_v3", num_nextn_predict_layers=2), tiny_mtp.config("qwen3_5_text")

    assert ("num_nextn_predict_layers", 2) == said_by(deepseek)
    assert ("mtp_num_hidden_layers", 1) == said_by(qwen)
    assert said_by(tiny_mtp.config("qwen3_next")) is None


def test_a_configuration_that_names_no_number_leaves_it_to_the_files() -> None:
    """Qwen3-Next's names none."""
    model = tiny_mtp.model("qwen3_next")
    stored = frozenset({"mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", "mtp.layers.1.mlp.gate.weight"})

    assert 2 == held_by(FAMILIES[[family.model_type for family in FAMILIES].index("qwen3_next")], model.config, stored)
    for files, expected in ((stored, 2), (None, 1)):
        planned = find(model, files)
        assert planned is not None and planned.build is not None
        assert expected == planned.build(model).depths


# ---- what is refused, before a weight is read ----


def problems(model: Any, context: Context | None = None, **settings: Any) -> list[Problem]:
    return Engine(parity.config(**(MTP | settings)), context or Context()).problems(model)


def test_a_model_without_heads_is_refused() -> None:
    """With the key, its place, what was found and what to do."""
    (problem,) = problems(tiny.model("mixtral"))

    assert problem.key == "mtp.enabled"
    assert problem.place.endswith("parity.json:1:98")
    assert problem.message == "MixtralForCausalLM (mixtral) has no extra heads: none are known for this kind of model"
    assert problem.remedy.startswith("use one of DeepSeek-V3 and R1, DeepSeek-V3.2, ")
    assert problem.remedy.endswith(", or set it to false")
    assert "MiMo" not in problem.remedy


def test_a_model_that_could_have_a_draft_is_told_how() -> None:
    """DSpark's families have no heads of their own."""
    (problem,) = problems(tiny.model())

    assert problem.message.endswith("nothing says which DSpark draft it is to get")
    assert problem.remedy.startswith("add dspark_config to its config.json, or a folder dspark/ with a draft")


def test_heads_that_are_left_aside_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They would be missed in serving alone."""
    from transformers import AutoModelForCausalLM

    written("deepseek_v3", tmp_path)
    Engine(parity.config(), Context()).prepare(AutoModelForCausalLM.from_pretrained(tmp_path))

    assert re.search(r"the checkpoint has \d extra heads? \(mtp\), not trained", "".join(capfd.readouterr()))


def test_what_is_no_model_of_transformers_is_refused() -> None:
    """There is no family to look up."""
    found = step.check(torch.nn.Linear(2, 2), parity.config(**MTP), Context())

    assert ["Linear is no Transformers model, whose layers heads could be like"] == [one.message for one in found]


def test_a_configuration_of_no_heads_is_refused() -> None:
    """As an export of a run without them says."""
    (problem,) = problems(tiny_mtp.model("glm4_moe", num_nextn_predict_layers=0))

    assert "num_nextn_predict_layers is 0 in its config.json" in problem.message
    assert problem.remedy == "use a model that has some, or set it to false"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mtp_use_dedicated_embeddings": True}, "they have embeddings of their own (mtp_use_dedicated_embeddings)"),
        ({"layer_types": ["linear_attention"] * 2}, "none of the model's layers is like theirs"),
    ],
)
def test_heads_that_can_not_be_built_are_refused(changes: dict[str, Any], reason: str) -> None:
    """And not built otherwise than the configuration says."""
    (problem,) = problems(tiny_mtp.model("qwen3_5_text", **changes))

    assert f"has no multi-token prediction heads of Qwen3.5: {reason}" in problem.message
    assert problem.remedy == "train it without, or set it to false"


@pytest.mark.parametrize("loaded", [True, False])
def test_files_without_the_heads_weights_are_refused(loaded: bool, tmp_path: Path) -> None:
    """Also while the model has no weights yet; a name is given that the files lack."""
    from transformers import AutoModelForCausalLM

    tiny_mtp.model("glm4_moe").save_pretrained(tmp_path)
    context = Context()
    if loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    else:
        context.weights = WeightSource.find(str(tmp_path))
        with torch.device("meta"):
            model = tiny_mtp.model("glm4_moe")

    (problem,) = problems(model, context)

    assert problem.key == "mtp.enabled"
    found = "num_nextn_predict_layers is 1 in its config.json, and its files hold no tensor model.layers.2.*"
    assert problem.message.endswith(found)
    assert "use a checkpoint with the heads' weights" in problem.remedy


def test_files_with_fewer_heads_than_the_configuration_says_are_refused(tmp_path: Path) -> None:
    """Both numbers are told."""
    from transformers import AutoModelForCausalLM

    written("deepseek_v3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, num_nextn_predict_layers=2)

    (problem,) = problems(model)

    assert problem.message.endswith("num_nextn_predict_layers is 2 in its config.json, and its files hold 1")


@pytest.mark.parametrize("said", [-1, True, "1", 1.0])
def test_what_is_no_number_of_heads_is_refused(said: Any) -> None:
    """With what was found and what was expected."""
    model = tiny_mtp.model("glm4_moe")
    model.config.__dict__["num_nextn_predict_layers"] = said

    (problem,) = problems(model)

    expected = f"num_nextn_predict_layers is {said!r} in its config.json; expected a whole number, 0 or more"
    assert expected in problem.message


def test_heads_without_a_weight_beside_a_frozen_model_are_refused() -> None:
    """Nothing would be left to train; it is told with the key of the weight."""
    settings = {"mtp": {"enabled": True, "loss_scaling_factor": 0}, "freeze_policy": {"language_model": True}}

    found = Engine(parity.config(**settings), Context()).problems(tiny_mtp.model("glm4_moe"))

    assert ["mtp.loss_scaling_factor"] == [problem.key for problem in found if "left to train" in problem.message]


def test_a_model_with_a_module_in_the_heads_place_is_refused() -> None:
    """Of its own class's making."""
    model = tiny_mtp.model("glm4_moe")
    model.mtp = torch.nn.Linear(2, 2)

    (problem,) = problems(model)

    assert "has a module mtp of its own (Linear)" in problem.message


def test_a_head_that_the_files_hold_in_part_is_refused(tmp_path: Path) -> None:
    """Nothing of it is made up."""
    from transformers import AutoModelForCausalLM

    written("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    found = problems(AutoModelForCausalLM.from_pretrained(tmp_path))

    assert any("model.layers.2.eh_proj.weight" in problem.message for problem in found)


@pytest.mark.parametrize(
    ("kind", "reason"), [("mimo", "Transformers has no model of this kind"), ("mimo_v2_flash", "is not published")]
)
def test_mimo_is_refused_by_name(kind: str, reason: str) -> None:
    """Its heads take the hidden state first, among other things; the reason is that of its row."""
    config = SimpleNamespace(model_type=kind, num_nextn_predict_layers=1, num_hidden_layers=2)
    config.get_text_config = lambda decoder: config

    planned = find(SimpleNamespace(config=config), None)

    assert planned is not None and planned.build is None
    assert "MiMo" in planned.kind
    assert reason in planned.obstacle


def test_adapters_are_refused() -> None:
    """Their exports hold no heads."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_mtp.model("glm4_moe"), LoraConfig(target_modules=["q_proj"]))

    (problem,) = problems(model)

    assert problem.message == "adapters are saved without the model, and the heads would be lost"


def test_a_model_with_a_loss_of_its_own_is_refused() -> None:
    """The heads' losses have no place there."""
    model = tiny_mtp.model("glm4_moe")
    model.accepts_loss_kwargs = False

    (problem,) = problems(model)

    assert "computes a loss of its own" in problem.message


def test_the_first_finder_that_knows_a_model_has_the_say() -> None:
    """DSpark's stages stand in place of serial heads."""
    assert step.FINDERS[0].startswith("torchturbo.objectives.dspark")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_models_number_formats_are_its_heads(dtype: torch.dtype, tmp_path: Path) -> None:
    """Tensor by tensor as in the layer that a head is like: parts of an indexer may be fp32. All is trained in fp32."""
    from transformers import AutoModelForCausalLM

    written("glm_moe_dsa", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    context = Context()
    engine = Engine(parity.config(**MTP), context)
    assert engine.problems(model) == []
    engine.prepare(model.train())

    formats = context.saved_dtypes
    inside = [name for name in formats if name.startswith("mtp.layers.0.")]
    assert dtype == formats["mtp.joins.0.eh_proj.weight"]
    assert {dtype, torch.float32} == {formats[name] for name in inside} or dtype == torch.bfloat16
    assert all(formats[name.replace("mtp.layers.0.", "model.layers.1.")] == formats[name] for name in inside)
    assert {torch.float32} == {parameter.dtype for parameter in model.mtp.parameters()}
