"""DeepSeek-V4 with its heads under the engine: which parameters they train, and what is there when they are off."""

from __future__ import annotations

import logging
import math
from typing import Any

import parity
import pytest
import torch
import v4

from torchturbo.engine.steps.heads import KEPT
from torchturbo.objectives.dspark.anchors import Sequences, draw_blocks
from torchturbo.objectives.dspark.deepseek_v4 import DeepseekV4Draft
from torchturbo.objectives.dspark.visibility import Visibility
from torchturbo.objectives.heads import extra_heads
from torchturbo.objectives.mtp.deepseek_v4 import DeepseekV4Heads

ON: dict[str, Any] = {"mtp": {"enabled": True}}
STAGES: dict[str, Any] = ON | {"dspark": {"num_anchors": 4, "loss_scaling_factor": 0.5}}
WINDOW = [v4.batch(), v4.batch(1, 9, 5, seed=9)]


def prepared(settings: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    """Return a model with heads under which everything weighs, and its engine."""
    model = v4.model(**changes)
    engine = parity.prepared(model, parity.config(**settings))
    if model in KEPT:
        v4.stir(KEPT[model], 3)
    return model, engine


def metrics(engine: Any) -> dict[str, float]:
    found: dict[str, float] = engine.context.normaliser.term_metrics(1, torch.device("cpu"))
    return found


def test_stages_train_themselves_alone() -> None:
    """Every other gradient is that of a run without them, to the bit, and each of the stages' parameters has one."""
    plain, first = prepared({}, **v4.DSPARK)
    expected = parity.step(first, plain, WINDOW)
    model, engine = prepared(STAGES, **v4.DSPARK)
    found = parity.step(engine, model, WINDOW)
    heads = {f"mtp.{name}" for name, _ in model.mtp.named_parameters()}

    assert isinstance(extra_heads(model), DeepseekV4Draft)
    assert heads == found.gradients.keys() - expected.gradients.keys()
    assert {} == {n: g for n, g in found.gradients.items() if n in heads and not g.abs().max() > 0}
    assert [] == [n for n, g in expected.gradients.items() if not torch.equal(g, found.gradients[n])]
    assert found.loss == pytest.approx(expected.loss + 0.5 * metrics(engine)["dspark_loss"], rel=1e-6)


def drafted(model: Any, ids: torch.Tensor, anchor: int, labels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [K, V] and confidences [K] of one block as inference makes them: from a prefix, token by token."""
    draft, taps = model.mtp, []
    handles = [
        model.model.layers[at].register_forward_hook(lambda module, args, output: taps.append(output.mean(2)))
        for at in v4.DSPARK["dspark_target_layer_ids"]
    ]
    model(input_ids=ids[:, :anchor])
    for handle in handles:
        handle.remove()
    features = torch.cat([torch.cat(taps, -1), torch.full((1, 1, 3 * v4.HIDDEN), 1e6, dtype=torch.float64)], 1)
    positions, size = torch.arange(anchor + 1)[None], draft.block_size
    slots = (anchor + torch.arange(size)).view(1, 1, size)
    one = torch.tensor([[anchor]])
    visibility = Visibility(one, one.ge(0), torch.zeros_like(positions), positions, slots)
    block = torch.tensor([[[int(ids[0, anchor]), *[draft.mask_token_id] * (size - 1)]]])
    states = draft(features, model.model.embed_tokens(block), visibility)
    logits, confidences, before = [], [], int(ids[0, anchor])
    for slot in range(size):
        known = draft.markov_head.markov_w1.weight[before]
        logits.append(model.lm_head(states.head[0, 0, slot]) + draft.markov_head.markov_w2.weight @ known)
        confidences.append(draft.confidence_head.proj.weight[0] @ torch.cat([states.confidence[0, 0, slot], known]))
        before = labels[slot]
    return torch.stack(logits), torch.stack(confidences)


def test_the_loss_of_stages_is_that_of_drafting_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block at a time, of the prefix before its anchor alone, held to the three terms' formula.

    The model's indexer takes all compressed keys here: with fewer it may choose otherwise among ties in a prefix.
    """
    model, engine = prepared(STAGES, index_topk=8, **v4.DSPARK)
    v4.double(model)
    batch = v4.batch(1, 12, 3)
    with v4.in_double(monkeypatch):
        parity.step(engine, model, [batch])
        found = metrics(engine)["dspark_loss"]
        engine.release(model)
        model.mtp = KEPT[model].eval()
        ids, most, size = batch["input_ids"], STAGES["dspark"]["num_anchors"], v4.DSPARK["dspark_block_size"]
        blocks = draw_blocks(Sequences.of(batch), most, 0, 0, size=size, mask_token_id=63)
        with torch.no_grad():
            teacher = model(input_ids=ids).logits[0].softmax(-1)
            total, weights = 0.0, 0.0
            for anchor in blocks.anchors[0].tolist():
                labels = ids[0, anchor + 1 : anchor + 1 + size].tolist()
                logits, confidences = drafted(model, ids, anchor, [*labels, *[0] * size])
                for slot, label in enumerate(labels):
                    draft, weight = logits[slot].softmax(-1), math.exp(-slot / 4)
                    distance = (draft - teacher[anchor + slot]).abs().sum()
                    accepted, sure = 1 - distance / 2, confidences[slot].sigmoid()
                    unsure = -(accepted * sure.log() + (1 - accepted) * (1 - sure).log())
                    total += weight * float(0.1 * -draft[label].log() + 0.9 * distance + unsure)
                    weights += weight

    assert most == len(blocks.anchors[0])
    assert found == pytest.approx(total / weights, rel=1e-6)


def test_stages_with_a_weight_of_zero_are_logged_alone() -> None:
    settings = ON | {"dspark": {"num_anchors": 4, "loss_scaling_factor": 0.0}}
    model, engine = prepared(settings, **v4.DSPARK)
    found = parity.step(engine, model, WINDOW)

    assert [] == [name for name in found.gradients if name.startswith("mtp.")]
    assert metrics(engine)["dspark_loss"] > 0


def test_stages_that_are_off_are_kept_and_no_serial_heads_run(caplog: pytest.LogCaptureFixture) -> None:
    """The configuration counts a serial head, the checkpoint has none."""
    with caplog.at_level(logging.INFO):
        model, engine = prepared(ON | {"dspark": {"enabled": False}}, **v4.DSPARK)
    found = parity.step(engine, model, WINDOW)

    assert isinstance(extra_heads(model), DeepseekV4Draft)
    assert [] == [name for name in found.gradients if name.startswith("mtp.")]
    assert {} == metrics(engine)
    assert 3 == len(model.mtp.layers)


def test_serial_heads_train_the_model_too() -> None:
    """Their loss reaches embeddings, head and every layer, but not what joins the streams for the model's own head.

    The total is weighted, the metrics are not.
    """
    plain, first = prepared({})
    expected = parity.step(first, plain, WINDOW)
    model, engine = prepared({"mtp": {"enabled": True, "loss_scaling_factor": 0.25}}, num_nextn_predict_layers=2)
    found = parity.step(engine, model, WINDOW)
    logged = metrics(engine)

    assert isinstance(extra_heads(model), DeepseekV4Heads)
    assert {
        f"mtp.{name}" for name, _ in model.mtp.named_parameters()
    } == found.gradients.keys() - expected.gradients.keys()
    same = {name for name, gradient in expected.gradients.items() if torch.equal(gradient, found.gradients[name])}
    assert {"model.norm.weight", *(f"model.hc_head.hc_{name}" for name in ("fn", "base", "scale"))} == same
    assert found.loss == pytest.approx(expected.loss + 0.25 * (logged["mtp_1_loss"] + logged["mtp_2_loss"]), rel=1e-6)


def test_without_multi_token_prediction_nothing_is_built() -> None:
    """Neither of stages nor of serial heads, and the configuration says that there are none while the engine holds it."""
    model, engine = prepared({}, **v4.DSPARK)

    assert extra_heads(model) is None
    assert 0 == model.config.num_nextn_predict_layers
    engine.release(model)
    assert 1 == model.config.num_nextn_predict_layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dspark_markov_rank": None}, "its config.json says nothing of dspark_markov_rank"),
        ({"dspark_target_layer_ids": [0, 2, 3]}, "dspark_target_layer_ids: expected ascending numbers"),
        (
            {"dspark_target_layer_ids": [2, 1], "dspark_noise_token_id": 64, "dspark_block_size": 0},
            "dspark_block_size: expected a whole number from 1 to 128, the target's max_position_embeddings, got 0;"
            " dspark_noise_token_id: expected a whole number from 0 to 63, the vocabulary's last, got 64;"
            " dspark_target_layer_ids: expected ascending numbers from 0 to 2, got [2, 1]",
        ),
        (
            {"dspark_block_size": "3", "dspark_noise_token_id": "a", "dspark_markov_rank": None},
            "its config.json says nothing of dspark_markov_rank; dspark_block_size: expected a whole number from 1 to"
            " 128, the target's max_position_embeddings, got '3'; dspark_noise_token_id: expected a whole number from"
            " 0 to 63, the vocabulary's last, got 'a'",
        ),
        ({"dspark_block_size": 3.0}, "got 3.0"),
        ({"dspark_block_size": 10**9}, "got 1000000000"),
        ({"dspark_markov_rank": True}, "dspark_markov_rank: expected a whole number from 1 to 64, the vocabulary, got"),
        ({"dspark_target_layer_ids": 3}, "dspark_target_layer_ids: expected ascending numbers from 0 to 2, got 3"),
        (
            {"dspark_target_layer_ids": ["0"]},
            "dspark_target_layer_ids: expected ascending numbers from 0 to 2, got ['0']",
        ),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids: expected ascending numbers from 0 to 2, got []"),
        ({"dspark_n_routed_experts": 2}, "DeepSeek-V4.1's stages are of another architecture"),
    ],
    ids=["lacking", "beyond", "several", "words", "fraction", "billion", "truth", "number", "texts", "empty", "v4.1"],
)
def test_what_keeps_a_model_from_having_stages_is_told(changes: dict[str, Any], message: str) -> None:
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    with torch.device("meta"):
        model = v4.model(**(v4.DSPARK | changes))
    (problem,) = Engine(parity.config(**ON), Context()).problems(model)

    assert "mtp.enabled" == problem.key
    assert message in problem.message


def test_stages_are_counted_by_their_names_in_the_files() -> None:
    """And a checkpoint whose last stage joins no streams is one of DeepSeek-V4.1."""
    from torchturbo.objectives.dspark.deepseek_v4 import find

    model = v4.model(**(v4.DSPARK | {"dspark_target_layer_ids": [1, 2]}))
    four = find(model, v4.stage_names(4))
    other = find(model, {name for name in v4.stage_names(3) if "hc_head" not in name})
    none = find(model, {"model.norm.weight"})

    assert four is not None and four.build is not None and other is not None and none is not None
    assert 4 == len(four.build(model).layers)  # type: ignore[arg-type]
    assert "mtp.2.hc_head_fn: DeepSeek-V4.1's stages" in other.obstacle
    assert "its files hold no tensor mtp.0.*" == none.obstacle
    assert find(v4.model(), None) is None


@pytest.mark.parametrize(
    ("more", "less", "message"),
    [
        ("mtp.10000000.hc_head_fn", "-", "mtp.10000000.hc_head_fn and no tensor mtp.3.*"),
        (f"mtp.{'9' * 5000}.hc_head_fn", "-", f"mtp.{'9' * 56}... and no tensor mtp.3.*"),
        ("mtp.01.norm.weight", "-", "mtp.01.norm.weight and no tensor mtp.3.*"),
        ("mtp.2.norm.weight", "mtp.1.", "mtp.2.attn.attn_sink and no tensor mtp.1.*"),
        ("mtp.2.norm.weight", "mtp.0.", "mtp.1.attn.attn_sink and no tensor mtp.0.*"),
    ],
    ids=["far", "long", "zero before", "no second", "no first"],
)
def test_stages_whose_numbers_have_a_gap_are_refused(more: str, less: str, message: str) -> None:
    """Nothing is built for a number in a name alone."""
    from torchturbo.objectives.dspark.deepseek_v4 import find

    names = {name for name in v4.stage_names(3) if not name.startswith(less)} | {more}
    with torch.device("meta"):
        found = find(v4.model(**v4.DSPARK), names)

    assert found is not None and found.build is None
    assert f"its files hold {message}, expected numbers from 0 on without a gap" == found.obstacle
