"""The router losses in one process: added once, whatever is recomputed, instead of the model's own, and nothing at 0."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import parity
import pytest
import router_oracle as oracle
import tiny
import torch
from torch import Tensor, nn

from torchturbo.engine.steps import routers as step
from torchturbo.objectives import router_losses, routers
from torchturbo.objectives.heads import attach
from torchturbo.objectives.mtp.serial import SerialHeads
from torchturbo.objectives.routers import find_routers

AUX, Z = 0.5, 0.25
MOE = {"aux_loss_coeff": AUX, "z_loss_coeff": Z}
GATES = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
OWN = {"output_router_logits": True, "router_aux_loss_coef": 7.0}


def window(count: int = 1) -> list[dict[str, Tensor]]:
    """Return micro-batches, a third of whose second row is padding."""
    made = parity.batches(count, 2, 12)
    for batch in made:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, 8:] = 0
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return made


def settings(moe: Any = MOE, reentrant: bool | None = None, **others: Any) -> Any:
    checkpointing = {"enabled": reentrant is not None, "use_reentrant": bool(reentrant)}
    return parity.config(moe=moe, activation_checkpointing=checkpointing, **others)


def run(model: Any, count: int = 1, **changes: Any) -> tuple[parity.Step, dict[str, float]]:
    """Return a step of a prepared model, and what it logs of its terms."""
    engine = parity.prepared(model, settings(**changes))
    found = parity.step(engine, model, window(count))
    return found, engine.context.normaliser.term_metrics(1, torch.device("cpu"))


def installed(model: Any) -> Any:
    """Return what the step made of a prepared model."""
    return step.INSTALLED[model]()


def expected(model: Any, count: int = 1, aux: float = AUX, z: float = Z) -> parity.Step:
    found: parity.Step = oracle.step(oracle.Watched(model, GATES, 2, "softmax"), window(count), aux, z)
    return found


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed reentrantly"])
@pytest.mark.parametrize("count", [1, 2], ids=["one micro-batch", "two"])
def test_a_step_is_what_the_formula_says(reentrant: bool | None, count: int) -> None:
    """Loss and all gradients; over two micro-batches the mean of both. Layers that run twice count once."""
    model = tiny.model("qwen3_moe")
    formula = expected(model, count)
    found, logged = run(model, count, reentrant=reentrant)

    parity.assert_equal(found, formula)
    plain = expected(tiny.model("qwen3_moe"), count, 0, 0)
    assert found.loss - plain.loss == pytest.approx(2 * (AUX * logged["moe_aux_loss"] + Z * logged["moe_z_loss"]), 1e-5)
    assert 1 < logged["moe_aux_loss"] < 2


def test_a_step_in_float64() -> None:
    """To 1e-6, gradient by gradient."""
    model = tiny.model("qwen3_moe", norm_topk_prob=True).double()
    model.set_experts_implementation("eager")  # the grouped product has no float64
    formula = expected(model)
    found, _ = run(model)

    parity.assert_equal(found, formula, 1e-6)


@pytest.mark.parametrize("key", ["aux_loss_coeff", "z_loss_coeff"])
def test_one_without_the_other(key: str) -> None:
    """Only what is asked for is computed and logged."""
    model = tiny.model("qwen3_moe")
    formula = expected(model, aux=AUX if key[0] == "a" else 0, z=Z if key[0] == "z" else 0)
    found, logged = run(model, moe={key: MOE[key]})

    parity.assert_equal(found, formula)
    assert ["moe_aux_loss" if key[0] == "a" else "moe_z_loss"] == list(logged)


@pytest.mark.parametrize("reentrant", [False, True], ids=["recomputed", "recomputed reentrantly"])
def test_tied_scores(reentrant: bool) -> None:
    """A router whose scores are all alike chooses the same experts again, and its tokens are counted once."""
    steps = []
    for kind in (None, reentrant):
        model = tiny.model("qwen3_moe")
        with torch.no_grad():
            model.get_submodule(GATES[0]).weight.zero_()
        steps.append(run(model, reentrant=kind))

    parity.assert_equal(steps[1][0], steps[0][0])
    assert steps[0][1] == pytest.approx(steps[1][1])


def test_forwards_before_backwards() -> None:
    """Under reentrant checkpointing, too, each recomputation gets the gradient of its own forward."""
    found = {}
    for reentrant in (None, True):
        model = tiny.model("qwen3_moe")
        engine = parity.prepared(model, settings(reentrant=reentrant))
        engine.context.normaliser.open_window(window(2), torch.device("cpu"))
        with engine.context.normaliser.applied():
            losses = [model(**batch).loss for batch in window(2)]
            for loss in losses:
                loss.backward()
        found[reentrant] = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}

    assert all(torch.allclose(value, found[True][name], 1e-4, 1e-7) for name, value in found[None].items())


# ---- the model's own loss ----


def own(model: Any, **given: Any) -> float:
    """Return a model's loss of a micro-batch without labels that count: all that it adds to the cross-entropy."""
    return float(model(**window()[0], num_items_in_batch=1e12, **given).loss.detach())


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_the_models_own_loss_is_off(kind: str, logged: list[str]) -> None:
    """Set in its configuration, or asked for by who calls it; not in evaluation either. Undone, it is back."""
    model = tiny.model(kind, **OWN)
    formula = expected(tiny.model(kind))
    before = own(model.train())
    found, _ = run(model)

    parity.assert_equal(found, formula)
    assert before > 5
    (line,) = [line for line in logged if "its place" in line]
    assert "own one (output_router_logits) is off: moe.aux_loss_coeff and moe.z_loss_coeff in its place" in line
    assert max(own(model), own(model, output_router_logits=True), own(model.eval())) < 1e-6
    assert model.config.output_router_logits is True
    step.undo(model.train())
    assert before == own(model)
    assert before == pytest.approx(
        own(tiny.model(kind, **(OWN | {"output_router_logits": False})).train(), output_router_logits=True)
    )


def test_logits_for_their_own_sake() -> None:
    """Without labels there is no loss to keep them out of."""
    model = tiny.model("mixtral")
    parity.prepared(model, settings())
    found = model(input_ids=window()[0]["input_ids"], output_router_logits=True)

    assert len(found.router_logits) == 2
    assert model(input_ids=window()[0]["input_ids"]).router_logits is None


def test_both_at_0_change_nothing() -> None:
    """No hook, no term, bit for bit the same loss and gradients, with the model's own loss as it is."""
    steps = []
    for moe in ({}, {"aux_loss_coeff": 0, "z_loss_coeff": 0}):
        model = tiny.model("qwen3_moe", **OWN)
        engine = parity.prepared(model, settings(moe=moe))
        assert [] == engine.context.normaliser.terms
        assert not any(module._forward_hooks for name, module in model.named_modules() if name)
        steps.append(parity.step(engine, model, window()))

    assert steps[0].loss == steps[1].loss > 5
    assert all(torch.equal(value, steps[1].gradients[name]) for name, value in steps[0].gradients.items())


# ---- where else a model runs ----


def test_evaluation_and_training_without_gradients() -> None:
    """The losses are of training; what no gradient is wanted of has none."""
    model = tiny.model("qwen3_moe")
    engine = parity.prepared(model, settings())
    normaliser = engine.context.normaliser
    normaliser.open_window(window(), torch.device("cpu"))
    with torch.no_grad(), normaliser.applied():
        training = float(model(**window()[0]).loss)
        evaluating = float(model.eval()(**window()[0]).loss)
    assert training == evaluating
    assert {"moe_aux_loss": 0, "moe_z_loss": 0} == normaliser.term_metrics(1, torch.device("cpu"))


def test_copies_and_pickles_are_plain() -> None:
    """Neither adds anything, and a second engine finds the first one's hooks gone."""
    model = tiny.model("qwen3_moe")
    parity.prepared(model, settings())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(**window()[0]).loss.backward()
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    parity.prepared(model, settings())
    assert hooks == sum(len(module._forward_hooks) for module in model.modules())
    step.undo(model)
    step.undo(tiny.model())
    assert not any(module._forward_hooks for name, module in model.named_modules() if name)


def test_nothing_is_kept_after_a_step() -> None:
    """Logits and their graphs are let go of when the forward is over."""
    model = tiny.model("qwen3_moe")
    engine = parity.prepared(model, settings())
    parity.step(engine, model, window())
    losses = installed(model)

    assert [] == losses._taken
    assert losses._losses is None


def test_adapters() -> None:
    """The routers below adapters are frozen: said once, and the adapters before them are trained by the losses."""
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        model = peft.get_peft_model(tiny.model("qwen3_moe"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_B" in name:
                    value.fill_(0.1)
        return model

    with_losses, _ = run(adapted())
    without, _ = run(adapted(), moe={})
    same = [name for name, value in without.gradients.items() if torch.equal(value, with_losses.gradients[name])]
    assert with_losses.gradients.keys() == without.gradients.keys()
    assert [] == same


def test_a_router_that_peft_trains_whole() -> None:
    """PEFT keeps the old one beside it, which is not called and does not count."""
    peft = pytest.importorskip("peft")
    settled = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"])
    model = peft.get_peft_model(tiny.model("qwen3_moe"), settled)
    found, logged = run(model)
    _, plain = run(tiny.model("qwen3_moe"))

    assert plain == pytest.approx(logged, rel=1e-5)
    assert sum(name.endswith("gate.modules_to_save.default.weight") for name in found.gradients) == 2


WRAPPING = {"one": {"target_parameters": ["mlp.experts.gate_up_proj"]}, "all": {"target_modules": "all-linear"}}


@pytest.mark.parametrize("wanted", WRAPPING.values(), ids=WRAPPING)
def test_adapters_of_experts(wanted: dict[str, Any]) -> None:
    """PEFT wraps the experts, once for each parameter, and at times the router: the losses are those of the router."""
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(2)
        return peft.get_peft_model(tiny.model("qwen3_moe"), peft.LoraConfig(r=2, **wanted))

    found, logged = run(adapted())  # before its first step an adapter changes nothing
    without, _ = run(adapted(), moe={})
    plain, figures = run(tiny.model("qwen3_moe"))

    assert figures == pytest.approx(logged, rel=1e-5)
    assert plain.loss == pytest.approx(found.loss, rel=1e-5)
    assert found.norm != pytest.approx(without.norm, rel=1e-3)


def test_an_unknown_router_in_an_adapter_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PEFT has put around it tells nothing of how it scores."""
    peft = pytest.importorskip("peft")
    settled = peft.LoraConfig(r=2, target_parameters=["mlp.gate.weight", "mlp.experts.gate_up_proj"])
    model = peft.get_peft_model(tiny.model("qwen3_moe"), settled).get_base_model()
    known = find_routers(model)
    monkeypatch.setattr(routers, "ROUTERS", [])
    probed = find_routers(model)

    assert [f"{name}.base_layer" for name in GATES] == [one.name for one in probed.found]
    assert ([], []) == (known.unknown, probed.unknown)
    assert [one[:3] + one[4:] for one in known.found] == [one[:3] + one[4:] for one in probed.found]


def test_half_precision() -> None:
    """Logits in bfloat16 give the same figures, near enough, and a gradient."""
    found, logged = run(tiny.model("qwen3_moe"), mixed_precision="bf16")
    exact, figures = run(tiny.model("qwen3_moe"), mixed_precision="fp32")

    assert figures == pytest.approx(logged, rel=2e-2)
    assert exact.loss == pytest.approx(found.loss, rel=2e-2)
    assert all((found.gradients[f"{name}.weight"] - exact.gradients[f"{name}.weight"]).norm() < 0.1 for name in GATES)


def test_frozen_routers_are_told(logged: list[str]) -> None:
    """They are not trained, and what comes before them is."""
    model = tiny.model("qwen3_moe")
    model.get_submodule(GATES[1]).weight.requires_grad_(False)
    found, _ = run(model)

    assert GATES[1] + ".weight" not in found.gradients
    (line,) = [line for line in logged if "frozen" in line]
    assert "router losses: 1 of 2 routers are frozen (model.layers.1.mlp.gate)" in line


# ---- extra heads ----


class Heads(SerialHeads):
    """One more layer with experts, which runs in a term's value as the objectives' do."""

    depths = 1

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([copy.deepcopy(base.model.layers[1])])


class Draft(nn.Module):
    """A branch whose tokens are guesses."""


@pytest.mark.parametrize("trained", [True, False])
def test_routers_of_extra_heads(trained: bool) -> None:
    """They count with the others, unless the heads are only run to be logged."""
    model = tiny.model("qwen3_moe")
    heads = Heads(model)
    heads.requires_grad_(trained)
    engine = parity.prepared(model, settings())
    step.undo(model)
    attach(model, heads)  # as the step before it leaves them
    step.apply(model, engine.config, engine.context)

    assert (3 if trained else 2) == installed(model).layers


# ---- errors while it runs ----


def failing(change: Callable[[Any], None]) -> str:
    model = tiny.model("qwen3_moe")
    engine = parity.prepared(model, settings())
    change(model)
    with pytest.raises(RuntimeError, match="router losses") as caught:
        parity.step(engine, model, window())
    return str(caught.value)


def test_routers_that_are_not_called() -> None:
    """An implementation that chooses experts elsewhere is no reason to train without the losses."""

    def bypass(model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.forward = lambda hidden: hidden

    assert "none of the model's 2 routers was called" in failing(bypass)


def test_routers_with_other_tokens() -> None:
    """Which of them are padding is not known."""

    def shorten(model: Any) -> None:
        layer = model.model.layers[1]
        full = layer.mlp.forward
        layer.mlp.forward = lambda hidden: torch.cat((full(hidden[:, :4].contiguous()), hidden[:, 4:]), 1)

    assert "model.layers.1.mlp.gate was called with 8 tokens, and the micro-batch has 24" in failing(shorten)


# ---- learning ----


def test_an_uneven_router_becomes_even() -> None:
    """Without the balancing loss it stays uneven; the z-loss makes logits small."""
    ends = {}
    for moe in ({"aux_loss_coeff": 0.1}, {"z_loss_coeff": 0.1}, {"aux_loss_coeff": 1e-9, "z_loss_coeff": 1e-9}):
        model = tiny.model("qwen3_moe", num_experts=8)
        with torch.no_grad():
            for name in GATES:
                model.get_submodule(name).weight[:2] *= 30
        engine = parity.prepared(model, settings(moe=moe))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(40):
            parity.step(engine, model, window())
            optimizer.step()
        engine = parity.prepared(model, settings(moe={"aux_loss_coeff": 1e-9, "z_loss_coeff": 1e-9}))
        parity.step(engine, model, window())
        ends[next(iter(moe)) if len(moe) == 1 else "none"] = engine.context.normaliser.term_metrics(
            1, torch.device("cpu")
        )

    assert ends["aux_loss_coeff"]["moe_aux_loss"] < 1.05 < 1.15 < ends["none"]["moe_aux_loss"]
    assert ends["z_loss_coeff"]["moe_z_loss"] < 1 < 5 < ends["none"]["moe_z_loss"]


def test_the_names_of_the_metrics() -> None:
    """They are documented."""
    assert ("moe_aux_loss", "moe_z_loss") == (router_losses.AUX, router_losses.Z)
