"""The losses of routers, family by family, against logits made anew of what each router is called with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mixtures
import parity
import pytest
import router_oracle as oracle
import tiny
import torch
from torch import Tensor, nn

from torchturbo.engine.context import Context
from torchturbo.engine.engine import Engine
from torchturbo.objectives import routers
from torchturbo.objectives.routers import HASH, ROUTERS, SCORES, Family, find_routers
from torchturbo.parallel.experts import FAMILIES

SETTINGS = {"aux_loss_coeff": 0.5, "z_loss_coeff": 0.25}
ROWS = [row for row in ROUTERS if row.score != HASH]
SCORED = {"cohere2_moe": "softmax", "deepseek_v4": "sqrtsoftplus"}
"""Scores of the tiny models whose router is told by their configuration."""
TOLERANCE = {"deepseek_v4": 5e-5}
"""Its iterated mixing of streams has gradients that are small differences."""


def batch() -> dict[str, Tensor]:
    made = parity.batches(1, 2, 12)[0]
    mask = torch.ones_like(made["input_ids"])
    mask[1, 8:] = 0
    return made | {"attention_mask": mask, "labels": made["labels"].masked_fill(mask == 0, -100)}


def test_every_family_has_a_row() -> None:
    """Whose experts can be divided has routers that are known."""
    assert [(row.name, row.model_type) for row in ROWS] == [(family.name, family.model_type) for family in FAMILIES]


@pytest.mark.parametrize("row", ROWS, ids=[row.model_type for row in ROWS])
def test_a_step_is_what_the_formula_says(row: Family) -> None:
    """Loss and every gradient. The row names the router, its score and its logits; a part of the tokens is padding."""
    model = mixtures.build(row.model_type)
    found = find_routers(model).found
    names = [name for name, module in model.named_modules() if type(module).__name__ == row.router]
    assert len(names) == len(found) > 0
    watched = oracle.Watched(model, names, 2, SCORED.get(row.model_type, row.score))
    engine = parity.prepared(model, parity.config(moe=SETTINGS))

    parity.assert_equal(
        parity.step(engine, model, [batch()]),
        oracle.step(watched, [batch()], 0.5, 0.25),
        TOLERANCE.get(row.model_type, 4e-6),
    )


# ---- probed ----


def without_row(monkeypatch: pytest.MonkeyPatch, kind: str) -> Any:
    monkeypatch.setattr(routers, "ROUTERS", [row for row in ROUTERS if row.model_type != kind])
    return mixtures.build(kind)


UNPROVEN = {
    "deepseek_v4": "missing 1 required positional argument: 'input_ids'",
    "afmoe": "missing 1 required positional argument: 'expert_bias'",
    "gemma4_text": "weighs experts by none of softmax, sigmoid, sqrtsoftplus of its logits",
    "hy_v3": "missing 1 required positional argument: 'e_score_correction_bias'",
    "minimax_m2": "missing 1 required positional argument: 'e_score_correction_bias'",
    "phimoe": "weighs experts by none of softmax, sigmoid, sqrtsoftplus of its logits",
}
"""Families whose routers only a row can tell of, and what the probe says."""


@pytest.mark.parametrize("row", ROWS, ids=[row.model_type for row in ROWS])
def test_a_router_without_a_row_is_believed_or_refused(row: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the probe believes it, it finds what the row says."""
    known = find_routers(mixtures.build(row.model_type))
    found = find_routers(without_row(monkeypatch, row.model_type))

    if row.model_type in UNPROVEN:
        assert row.model_type == "deepseek_v4" or [] == found.found  # its later layers choose by scores
        assert UNPROVEN[row.model_type] in "".join(found.unknown)
    else:
        assert [] == found.unknown
        given = torch.linspace(-3, 2, 8)
        assert [(one.name, one.top_k, one.output) for one in known.found] == [
            (one.name, one.top_k, one.output) for one in found.found
        ]
        assert all(torch.equal(known.found[0].score(given), one.score(given)) for one in found.found)


def test_the_probe_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the random state nor in the weights; it works without any."""
    model = without_row(monkeypatch, "qwen3_moe")
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    assert len(find_routers(model).found) == 2
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert len(find_routers(model.to("meta")).found) == 2


class Gated(nn.Module):
    """A block with a plain linear gate, as models with code of their own have it."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.experts, self.top_k = old.experts, 2
        self.gate = nn.Linear(32, 8, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Route by sigmoid scores."""
        rows = hidden.reshape(-1, 32)
        weights, chosen = self.gate(rows).sigmoid().topk(2, -1)
        return self.experts(rows, chosen, weights).view_as(hidden)  # type: ignore[no-any-return]


def with_linear_gate() -> Any:
    model = mixtures.build("qwen3_moe", mlp_only_layers=[0])
    model.model.layers[1].mlp = Gated(model.model.layers[1].mlp)
    return model


def problems(model: Any, **settings: Any) -> list[str]:
    engine = Engine(parity.config(**({"moe": SETTINGS} | settings)), Context())
    return [
        f"{Path(problem.place.split(':')[0]).name}: {problem.key}: {problem.message}; {problem.remedy}"
        for problem in engine.problems(model)
    ]


def test_an_unknown_router_is_refused_with_the_reason() -> None:
    """For each coefficient that is set, with what to do."""
    assert problems(with_linear_gate(), moe={"z_loss_coeff": 0.1}) == [
        "parity.json: moe.z_loss_coeff: Gated has no router of a known family: gate (Linear) is a plain linear map,"
        " which does not tell how its logits are scored; set it to 0, or register the router in a plugin"
        " (torchturbo.objectives.routers.register)"
    ]
    assert ["moe.aux_loss_coeff", "moe.z_loss_coeff"] == [one.split(": ")[1] for one in problems(with_linear_gate())]
    assert problems(with_linear_gate(), moe={}) == []


def test_a_registered_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a plugin; here of the block around a linear gate. An adapter around the gate is a part of it."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(routers, "ROUTERS", list(ROUTERS))
    routers.register("A model of its own", "Gated", "sigmoid", "gate")
    with pytest.raises(ValueError, match="Gated has a row already"):
        routers.register("Again", "Gated", "softmax")
    model = with_linear_gate()
    watched = oracle.Watched(model, ["model.layers.1.mlp.gate"], 2, "sigmoid")
    engine = parity.prepared(model, parity.config(moe=SETTINGS))
    parity.assert_equal(parity.step(engine, model, [batch()]), oracle.step(watched, [batch()], 0.5, 0.25))

    adapted = peft.get_peft_model(with_linear_gate(), peft.LoraConfig(r=2, target_modules=["gate"]))
    engine = parity.prepared(adapted, parity.config(moe=SETTINGS))
    plain = parity.prepared(other := adapted_again(peft), parity.config())
    found, without = parity.step(engine, adapted, [batch()]), parity.step(plain, other, [batch()])
    assert found.gradients.keys() == without.gradients.keys()
    assert math.isfinite(found.norm)
    assert abs(found.norm - without.norm) > 1e-4


def adapted_again(peft: Any) -> Any:
    return peft.get_peft_model(with_linear_gate(), peft.LoraConfig(r=2, target_modules=["gate"]))


class Loose(Gated):
    """A block whose experts nobody knows as such, so that checkpointing does not note how its tokens are routed."""

    def __init__(self, old: Any) -> None:
        super().__init__(old)
        self.linears = nn.ModuleDict({str(at): nn.Linear(32, 32) for at in range(8)})
        del self.experts

    def forward(self, hidden: Tensor) -> Tensor:
        """Let all experts see all tokens."""
        weights = self.gate(hidden).sigmoid()
        outputs = [linear(hidden) * weights[..., at, None] for at, linear in enumerate(self.linears.values())]
        return torch.stack(outputs).sum(0)


def test_layers_that_note_no_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reentrant checkpointing could not hand the gradient on: it is refused there, and only there."""
    monkeypatch.setattr(routers, "ROUTERS", list(ROUTERS))
    routers.register("A model of its own", "Loose", "sigmoid", "gate")
    model = tiny.model("qwen3")
    for layer in model.model.layers:
        layer.mlp = Loose(mixtures.build().model.layers[1].mlp)

    assert problems(model, activation_checkpointing={"enabled": True, "use_reentrant": True}) == [
        "parity.json: activation_checkpointing.use_reentrant: the router losses would get no gradient:"
        " Qwen3DecoderLayer does not note how it routes; set it to false"
    ]
    for settings in ({"enabled": True, "use_reentrant": False}, {"enabled": False, "use_reentrant": True}):
        assert problems(model, activation_checkpointing=settings) == []


def test_a_model_without_routers_is_refused() -> None:
    """A coefficient there would be ignored."""
    assert problems(tiny.model(), moe={"aux_loss_coeff": 0.1}) == [
        "parity.json: moe.aux_loss_coeff: LlamaForCausalLM has no layer in which a router chooses among experts; set it to 0"
    ]


def test_models_whose_loss_takes_no_term() -> None:
    """The model's own function says what its loss is."""
    model = mixtures.build("mixtral")
    model.loss_function = lambda **kwargs: torch.zeros(())
    found = problems(model, moe={"z_loss_coeff": 0.1})

    assert any(
        "MixtralForCausalLM computes a loss of its own, which takes no further term; set it to 0" in one
        for one in found
    )


def test_prompts_of_peft_are_refused() -> None:
    """Routers would see more tokens than the batch has."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(mixtures.build(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))

    assert problems(model, moe={"z_loss_coeff": 0.1}) == [
        "parity.json: moe.z_loss_coeff: PEFT puts a prompt before each sequence, of which a batch's mask does not tell;"
        " use LoRA"
    ]


def test_routers_that_look_experts_up() -> None:
    """DeepSeek-V4's first layers have nothing to balance; a model of nothing else is refused."""
    model = mixtures.build("deepseek_v4", mlp_layer_types=["hash_moe", "hash_moe"])

    assert problems(model, moe={"aux_loss_coeff": 0.1}) == [
        "parity.json: moe.aux_loss_coeff: the routers of DeepseekV4ForCausalLM look experts up by the token: there is"
        " nothing to balance; set it to 0"
    ]
    assert ["model.layers.0.mlp.gate"] == find_routers(mixtures.build("deepseek_v4")).hashed


def test_scores_of_the_table() -> None:
    """A name of a score, or an attribute that has it."""
    assert {row.score for row in ROUTERS} == {*SCORES, HASH, "expert_selection_fn", "score_fn"} - {"sqrtsoftplus"}
