"""Flops of what objectives add: by hand, and against torch's own counter on steps that the engine has prepared."""

from __future__ import annotations

from typing import Any

import draft_models
import mtp_models
import parity
import pytest
import torch
from counts import close, counted

from torchturbo.observe.flops import Beside
from torchturbo.observe.objectives import Sizes, count, sizes
from torchturbo.observe.tokens import doubled, drafted, tally

B, T, V, H = 2, 24, mtp_models.VOCABULARY, 32


def batch(rows: int = B, length: int = T) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, V, (rows, length))
    return {"input_ids": ids, "labels": ids.clone()}


class OtherLinear(torch.nn.Linear):
    """A head that a chunked loss computes again in backward: the counter does not know ``addmm_`` of the other way."""


def prepared(kind: str, settings: dict[str, Any], **changes: Any) -> tuple[Any, Any, Any]:
    """Return the engine, its configuration and the model of a tiny family, prepared to be counted."""
    model = mtp_models.model(kind, **changes)
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("eager")  # the counter knows no grouped product
    if "loss_chunk" in settings:
        model.lm_head.__class__ = OtherLinear
    config = parity.config(**settings)
    return parity.prepared(model, config), config, model


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_chunk": {"enabled": True, "chunk_size": 16}},
        {"activation_checkpointing": {"enabled": True, "use_reentrant": False}},
    ],
    ids=["plain", "chunked", "checkpointed"],
)
def test_depths_are_what_torch_counts(kind: str, settings: dict[str, Any]) -> None:
    """Join, layer and head of each of two, in all figures."""
    engine, config, model = prepared(kind, {"mtp": {"enabled": True}, **settings}, num_nextn_predict_layers=2)
    found = counted(lambda: parity.step(engine, model, [batch(1, 120)]))
    flops = count(model, config)
    assert close(found) == flops.hardware(120, 120 * 120)
    if settings:
        assert flops.hardware(120, 120 * 120) > flops.model(120, 120 * 120)


def test_a_depth_by_hand() -> None:
    """Its join is [H, 2H], its head [V, H], and its layer the model's last one; three times forward in training."""
    _, config, model = prepared("glm4_moe", {"mtp": {"enabled": True}}, num_nextn_predict_layers=2)
    parts = {part.name: part for part in count(model, config).parts}
    for at in (1, 2):
        assert parts[f"mtp {at} join"].forward == H * 2 * H
        assert parts[f"mtp {at} head"].forward == V * H
        layer, like = parts[f"mtp {at}"], parts["layer 1"]
        assert layer._replace(name="") == like._replace(name="")
        for part in (layer, parts[f"mtp {at} join"], parts[f"mtp {at} head"]):
            assert (part.forward, part.forward) == (part.inputs, part.weights)


def test_depths_of_weight_0_run_forward_alone() -> None:
    """And the model's own figures are those without heads."""
    engine, config, model = prepared("glm4_moe", {"mtp": {"enabled": True, "loss_scaling_factor": 0}})
    found = counted(lambda: parity.step(engine, model, [batch()]))
    assert close(found) == count(model, config).model(B * T, B * T * T)
    mtp = [part for part in count(model, config).parts if part.name.startswith("mtp")]
    assert [0] * 3 == [part.inputs + part.weights + part.pair_backward for part in mtp]
    _, off, plain = prepared("glm4_moe", {})
    own = [part for part in count(model, config).parts if part not in mtp]
    assert list(count(plain, off).parts) == own
    assert count(model, config).left_out == ""


# ---- a draft ----


def drafting(**dspark: Any) -> tuple[Any, Any, Any]:
    """Return a Qwen3 with a draft of two layers."""
    model = draft_models.target(vocab_size=V)
    model.set_attn_implementation("sdpa")
    config = parity.config(mtp={"enabled": True}, dspark={"num_anchors": 4, **dspark})
    return parity.prepared(model, config), config, model


def amounts(window: list[Any], config: Any, model: Any) -> Beside:
    found = sizes(model, config)
    assert found == Sizes(anchors=4, slots=3)
    slots, squared, pairs = torch.stack([drafted(one, 4, 3) for one in window]).sum(0).tolist()
    return Beside(None, slots, squared, pairs)


def test_a_draft_is_what_torch_counts() -> None:
    """Its slots, the context's features, keys and values, both logits once; attention over the row and all slots."""
    engine, config, model = drafting()
    window = [batch(2, 60)]
    beside = amounts(window, config, model)
    assert 2 * 4 * 3 == beside.slots
    assert 2 * 12 * (60 + 12) == beside.slot_squared
    found = counted(lambda: parity.step(engine, model, window))
    flops = count(model, config)
    assert close(found) == flops.hardware(120, 2 * 60 * 60, beside)
    assert flops.model(120, 7200, beside) == flops.hardware(120, 7200, beside)  # nothing is computed twice
    assert flops.causal(120, {}.fromkeys(flops.spans, 0), beside) < flops.model(120, 7200, beside)


def test_a_draft_of_weight_0_and_one_that_is_off() -> None:
    """Forward alone, and nothing."""
    engine, config, model = drafting(loss_scaling_factor=0)
    window = [batch(2, 60)]
    beside = amounts(window, config, model)
    found = counted(lambda: parity.step(engine, model, window))
    assert close(found) == count(model, config).hardware(120, 7200, beside)
    _, off, other = drafting(enabled=False)
    assert [] == [part.name for part in count(other, off).parts if part.name.startswith("draft")]
    assert sizes(other, off) == Sizes()


def test_slots_by_hand() -> None:
    """Of two rows: one with two tokens that can be anchors, one padded with more than are drawn."""
    ids = torch.arange(20).view(2, 10)
    labels = torch.full((2, 10), -100)
    labels[0, 4:7], labels[1, :8] = 1, 1  # anchors 4, 5; and 0 ... 6
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 8:] = 0
    found = drafted({"input_ids": ids, "labels": labels, "attention_mask": mask}, 4, 3)
    assert found is not None
    slots = [2 * 3, 4 * 3]
    sees = [3 * (4 + 5) + 6 * 3, 3 * 4 * (0 + 1 + 2 + 3 + 4 + 5 + 6) // 7 + 12 * 3]
    assert [sum(slots), slots[0] * (10 + 6) + slots[1] * (8 + 12), sum(sees)] == found.tolist()


# ---- block diffusion ----


def test_a_doubled_sequence_by_hand() -> None:
    """A row of 5 and 3 tokens packed, and one of 8 and 2 of padding, in blocks of 4."""
    ids = torch.ones(2, 10, dtype=torch.long)
    mask = torch.tensor([[1] * 5 + [2] * 3 + [0] * 2, [1] * 8 + [0] * 2])
    one = {"input_ids": ids, "attention_mask": mask}
    spans = count(*prepared("glm4_moe", {})[:0:-1]).spans
    found, plain = doubled(one, spans, 4), tally(one, spans)
    assert found is not None and plain is not None
    lengths = [8, 4, 8]
    expected = [16, sum(4 * length**2 for length in lengths), sum(length * (length + 4) for length in lengths), 20]
    assert expected == found.tolist()
    assert plain.tolist()[0] == 16


@pytest.mark.parametrize("cap", [0.0, 1.0])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_a_doubled_sequence_is_what_torch_counts(cap: float, chunked: bool) -> None:
    """All of it in the layers, its noisy half in the head; CAP looks at logits once more where they come in chunks."""
    import tiny

    from torchturbo.objectives.diffusion.noise import Noise

    model = tiny.model("qwen3", vocab_size=V)
    model.set_attn_implementation("sdpa")
    model.config.is_diffusion_model = True
    if chunked:
        model.lm_head.__class__ = OtherLinear
    settings: dict[str, Any] = {"diffusion": {"cap_lambda": cap, "bd_block_size": 4}}
    settings |= {"loss_chunk": {"enabled": True, "chunk_size": 16}} if chunked else {}
    config = parity.config(**settings)
    engine = parity.prepared(model, config)
    plain = batch(2, 40)
    one = Noise(1.0, 1.0, 4, mask_token=3, fill_token=0)(plain, 0)

    def step() -> None:
        normaliser = engine.context.normaliser
        normaliser.open_window([one], torch.device("cpu"))
        with normaliser.applied():
            model(**one).loss.backward()

    assert Sizes(block=4) == sizes(model, config)
    found, flops = counted(step), count(model, config)
    _, squared, *_, targets = doubled(plain, flops.spans, 4).tolist()  # type: ignore[union-attr]
    assert (80, 4 * 2 * 40 * 40) == (targets, squared)
    assert close(found) == flops.hardware(160, squared, Beside(targets))
    assert (flops.hardware(160, squared, Beside(targets)) > flops.model(160, squared, Beside(targets))) is chunked


def logged(meter: Any, run: Any, *window: Any) -> dict[str, float]:
    """Return what a meter says of one step that took a second."""
    metrics: dict[str, float] = {}
    meter.step_begin(window, run)
    meter.step_end(run)
    meter.clock.lap = lambda: 1.0
    meter.log(metrics, run)
    return metrics


def test_the_meter_counts_real_tokens_and_computed_flops() -> None:
    """A diffusion model's tokens are those of its data; a draft's slots are no tokens."""
    from pathlib import Path

    import tiny

    from torchturbo.observe.mfu import Meter
    from torchturbo.plugins.contract import Run
    from torchturbo.runtime import current_runtime

    model = tiny.model("qwen3", vocab_size=V)
    model.config.is_diffusion_model = True
    config, runtime = parity.config(diffusion={"bd_block_size": 4}), current_runtime(use_cpu=True)
    found = logged(Meter("a100"), Run(config, runtime, model=model, output_dir=Path()), batch(2, 37))
    flops, squared = count(model, config), 2 * (2 * 40) ** 2
    assert 2 * 37 == found["tokens_per_second"]
    assert flops.model(160, squared, Beside(80)) / 312e12 == pytest.approx(found["mfu"])
    causal = flops.causal(160, dict.fromkeys(flops.spans, 2 * 40 * 44), Beside(80))
    assert causal / 312e12 == pytest.approx(found["mfu_causal"])

    _, config, model = drafting()
    found = logged(Meter("a100"), Run(config, runtime, model=model, output_dir=Path()), batch(2, 60))
    beside = amounts([batch(2, 60)], config, model)
    assert 120 == found["tokens_per_second"]
    assert count(model, config).model(120, 7200, beside) / 312e12 == pytest.approx(found["mfu"])
