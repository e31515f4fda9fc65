"""The router losses on a GPU: a step with recomputation of either kind is the step without."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import tiny
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


def step(precision: str, checkpointing: dict[str, Any]) -> tuple[parity.Step, dict[str, float]]:
    settings = parity.config(
        moe={"aux_loss_coeff": 0.5, "z_loss_coeff": 0.25},
        mixed_precision=precision,
        activation_checkpointing=checkpointing,
        use_deterministic_algorithms=True,
    )
    model = tiny.model("qwen3_moe").cuda()
    engine = parity.prepared(model, settings)
    batches = [{name: value.cuda() for name, value in batch.items()} for batch in parity.batches(2)]
    found = parity.step(engine, model, batches)
    return found, engine.context.normaliser.term_metrics(1, torch.device("cuda"))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-2)])
@pytest.mark.parametrize("reentrant", [False, True], ids=["recomputed", "recomputed reentrantly"])
def test_recomputation(precision: str, tolerance: float, reentrant: bool) -> None:
    """The first pass of the reentrant kind has no graph; its gradient is there when the second one asks for it."""
    expected, figures = step(precision, {"enabled": False})
    found, logged = step(precision, {"enabled": True, "use_reentrant": reentrant})

    assert figures == pytest.approx(logged, rel=tolerance)
    gates = [name for name in expected.gradients if name.endswith("gate.weight")]
    assert len(gates) == 2
    for name in gates:
        parity.assert_equal(
            parity.Step(found.loss, found.norm, {name: found.gradients[name]}),
            parity.Step(expected.loss, expected.norm, {name: expected.gradients[name]}),
            tolerance,
        )
