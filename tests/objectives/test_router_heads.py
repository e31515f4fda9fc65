"""The router losses beside the other objectives: which routers count there, and which of the tokens."""

from __future__ import annotations

from typing import Any

import diffusing
import dspark_models
import mtp_models
import parity
import pytest
import router_oracle as oracle
import torch
import v4
from torch import Tensor

from torchturbo.engine.steps import routers as step

MOE = {"aux_loss_coeff": 0.5, "z_loss_coeff": 0.25}
MTP = {"mtp": {"enabled": True, "loss_scaling_factor": 0.3}}


def layers_of(model: Any) -> int:
    """Return how many routers count in a prepared model."""
    losses = step.INSTALLED[model]()
    assert losses is not None
    return losses.layers


def by_hand(model: Any, batch: dict[str, Any], valid: Tensor, score: str, settings: Any) -> parity.Step:
    """Return a step without the engine's router losses, to which a test adds its own, of what its hooks saw."""
    engine = parity.prepared(model, parity.config(**settings))
    seen: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_pre_hook(lambda router, args: seen.append(oracle.recomputed(router, args[0])))
    engine.context.normaliser.open_window([batch], torch.device("cpu"))
    with engine.context.normaliser.applied():
        loss = model(**batch).loss
    flat = valid.flatten()
    for logits in seen:
        loss = loss + 0.5 * oracle.aux(logits, flat, 2, score) + 0.25 * oracle.z(logits, flat)
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([value.norm() for value in gradients.values()]))
    return parity.Step(float(loss.detach()), float(norm), gradients)


@pytest.mark.parametrize(("kind", "score"), [("deepseek_v3", "sigmoid"), ("qwen3_next", "softmax")])
def test_heads_for_multi_token_prediction(kind: str, score: str) -> None:
    """Their routers count like the model's, and are trained by it."""
    batch = mtp_models.batch((9, 6))
    valid = batch["attention_mask"].bool()
    model = mtp_models.model(kind)
    engine = parity.prepared(model, parity.config(moe=MOE, **MTP))
    layers = layers_of(model)
    found = parity.step(engine, model, [batch])

    assert layers == (2 if kind == "deepseek_v3" else 3)  # of two layers, one of which is dense
    expected = by_hand(mtp_models.model(kind), batch, valid, score, MTP)
    parity.assert_equal(found, expected, 1e-5)
    plain = parity.prepared(other := mtp_models.model(kind), parity.config(**MTP))
    without = parity.step(plain, other, [batch])
    (gate,) = (name for name in found.gradients if name.startswith("mtp.") and name.endswith("mlp.gate.weight"))
    assert (found.gradients[gate] - without.gradients[gate]).norm() > 1e-3


def test_heads_that_are_recomputed() -> None:
    """Both kinds of checkpointing: two depths, whose gradients come together with the model's."""
    steps = []
    for checkpointing in ({"enabled": False}, {"enabled": True}, {"enabled": True, "use_reentrant": True}):
        model = mtp_models.model("deepseek_v3", num_nextn_predict_layers=2)
        engine = parity.prepared(model, parity.config(moe=MOE, activation_checkpointing=checkpointing, **MTP))
        steps.append(parity.step(engine, model, [mtp_models.batch((9, 6)), mtp_models.batch((5, 5))]))

    assert layers_of(model) == 3
    for found in steps[1:]:
        parity.assert_equal(found, steps[0])


def test_heads_that_only_run_to_be_logged() -> None:
    """With weight 0 they are out of training, and train nothing before them either."""
    model = mtp_models.model("deepseek_v3")
    settings = {"mtp": {"enabled": True, "loss_scaling_factor": 0}}
    engine = parity.prepared(model, parity.config(moe=MOE, **settings))
    found = parity.step(engine, model, [batch := mtp_models.batch((9, 6))])
    alone = mtp_models.model("deepseek_v3")
    expected = parity.step(parity.prepared(alone, parity.config(moe=MOE)), alone, [batch])

    assert layers_of(alone) == layers_of(model) == 1
    parity.assert_equal(found, expected)


def test_a_draft_has_no_part_in_it() -> None:
    """DeepSeek-V4's stages route guesses. Its first layers look experts up, and are left out, too."""
    model = v4.model(**v4.DSPARK)
    parity.prepared(model, parity.config(moe=MOE, mtp={"enabled": True}, dspark={"num_anchors": 4}))
    names = [name for name, module in model.named_modules() if type(module).__name__.endswith("Router")]

    assert sum(name.startswith("mtp.") for name in names) == 3
    assert len([name for name in names if not name.startswith("mtp.")]) == 3
    assert layers_of(model) == 2
    model.train()(**v4.batch(1, 10)).loss.backward()


def test_a_dense_target_with_a_draft_has_none() -> None:
    """Its draft's layers are dense as well: the coefficient would be ignored."""
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    settings = parity.config(moe=MOE, mtp={"enabled": True})
    found = Engine(settings, Context()).problems(dspark_models.model())
    assert ["moe.aux_loss_coeff", "moe.z_loss_coeff"] == [problem.key for problem in found]


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_block_diffusion(kind: str) -> None:
    """Noisy and clean tokens count, and padding does not, which this mask lets attend to itself."""
    batch = diffusing.noise()(diffusing.ragged([12, 7]), 0)
    valid = batch["attention_mask"].ne(0)
    assert not valid.all()

    def model() -> Any:
        made = diffusing.model("qwen3_moe")
        made.set_attn_implementation(kind)
        return made

    other = model()
    engine = parity.prepared(other, parity.config(moe=MOE))
    normaliser = engine.context.normaliser
    normaliser.open_window([batch], torch.device("cpu"))
    with normaliser.applied():
        loss = other(**batch).loss
        loss.backward()
    gradients = {name: value.grad for name, value in other.named_parameters() if value.grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([value.norm() for value in gradients.values()]))

    expected = by_hand(model(), batch, valid, "softmax", {})
    parity.assert_equal(parity.Step(float(loss.detach()), float(norm), gradients), expected, 4e-6)
