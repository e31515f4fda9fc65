"""A dense target's draft: it equals one that runs block by block, and touches nothing but its own parameters."""

from __future__ import annotations

import copy
from typing import Any

import dspark_models
import parity
import pytest
import torch
from torch import Tensor

from torchturbo.generated.keys import KEYS
from torchturbo.objectives.dspark.anchors import Sequences, make_blocks
from torchturbo.objectives.dspark.draft import DenseDraft
from torchturbo.objectives.dspark.visibility import Visibility
from torchturbo.objectives.heads import extra_heads


def prepared(model: Any, *, alone: bool = True, **settings: Any) -> Any:
    """Return the engine that has prepared a model, which then computes in float64.

    Transformers' norms are float32 inside whatever they are given, in the oracle too.
    """
    engine = parity.prepared(model, dspark_models.settings(**settings))
    model.double()
    if alone:
        engine.context.normaliser.token_term = lambda numerator: numerator * 0  # the draft's term alone
    return engine


def assert_is(found: parity.Step, expected: dict[str, Tensor]) -> None:
    """Hold the draft's loss and gradients against the oracle's."""
    assert float(expected.pop("loss")) == pytest.approx(found.loss, rel=1e-6)
    assert expected.keys() == {name for name in found.gradients if name.startswith("mtp.")}
    scale = max(float(one.norm()) for one in expected.values())
    for name, gradient in expected.items():
        assert float((found.gradients[name] - gradient).norm()) <= 1e-6 * max(float(gradient.norm()), 1e-3 * scale), (
            name
        )


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("qwen3", {}),
        ("qwen3", {"markov_head_type": "gated"}),
        ("qwen3", {"markov_head_type": "rnn", "confidence_head_with_markov": False}),
        ("qwen3", {"markov_rank": 0, "confidence_head_with_markov": False}),
        ("qwen3", {"enable_confidence_head": False, "block_size": 1}),
        ("llama", {}),
        ("qwen2", {}),
        ("mistral", {}),
    ],
)
def test_the_loss_is_that_of_blocks_alone(kind: str, spec: dict[str, Any]) -> None:
    """Value and gradient: each block after its own prefix, as the draft runs in inference, two micro-batches."""
    model, window = dspark_models.model(kind, spec=spec), parity.batches(2)
    engine = prepared(model)

    found = parity.step(engine, model, window)

    assert_is(found, dspark_models.expected(model, window))


def test_packed_documents_never_meet() -> None:
    model, window = dspark_models.model(), dspark_models.packed(2)
    engine = prepared(model)

    assert_is(parity.step(engine, model, window), dspark_models.expected(model, window))


def test_padding_is_no_context() -> None:
    """On the left, where it stands before every anchor."""
    model, (batch,) = dspark_models.model(), parity.batches(1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :5] = 0
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"].eq(0), -100)
    engine = prepared(model)

    assert_is(parity.step(engine, model, [batch]), dspark_models.expected(model, [batch]))


@pytest.mark.parametrize(
    ("dspark", "official"),
    [
        ({"loss_decay_gamma": 0.0}, {"gamma": 0.0}),
        ({"ce_loss_alpha": 0.7, "l1_loss_alpha": 0.0, "confidence_loss_alpha": 0.3}, {"ce": 0.7, "l1": 0.0, "confidence": 0.3}),
        ({"num_anchors": None, "loss_decay_gamma": None, "ce_loss_alpha": None, "l1_loss_alpha": None, "confidence_loss_alpha": None}, {}),
    ],
)  # fmt: skip
def test_keys_set_the_loss(dspark: dict[str, Any], official: dict[str, float]) -> None:
    """Null is DeepSpec's value, and there all candidates of a short row are anchors."""
    model, window = dspark_models.model(), parity.batches(1)
    engine = prepared(model, dspark=dspark)
    most = dspark.get("num_anchors", 4) or 512

    assert_is(parity.step(engine, model, window), dspark_models.expected(model, window, most, **official))


def test_unset_values_are_deepspecs() -> None:
    names = {"num_anchors": "num_anchors", "gamma": "loss_decay_gamma", "ce": "ce_loss_alpha", "l1": "l1_loss_alpha"}
    names["confidence"] = "confidence_loss_alpha"
    assert {name: KEYS[f"dspark.{key}"].default for name, key in names.items()} == dspark_models.OFFICIAL


# ---- what a slot sees ----


def seeing(window: int | None = None) -> Any:
    """Return a function from features to the states of two blocks."""
    model = dspark_models.model(spec={"num_hidden_layers": 1})
    prepared(model)
    draft: Any = extra_heads(model)
    assert isinstance(draft, DenseDraft)
    ids = torch.randint(3, 300, (1, 12))
    labels = ids.clone()
    sequences = Sequences.of({"input_ids": ids, "labels": labels})
    keep = torch.ones(1, 2, dtype=torch.bool)

    def states(features: Tensor, anchors: tuple[int, int] = (4, 8), changed: int | None = None) -> Tensor:
        blocks = make_blocks(sequences, torch.tensor([anchors]), keep, 3, 319)
        embedded = model.get_input_embeddings()(blocks.ids)
        if changed is not None:
            embedded[0, changed] += 1
        visibility = Visibility.of(blocks, sequences)
        if window is not None:
            dense = visibility.dense
            visibility.dense = lambda given=None: dense(window)  # type: ignore[method-assign]
        return draft(features, embedded, visibility).head[0].detach()  # type: ignore[no-any-return]

    return states


@pytest.mark.parametrize("window", [None, 2])
def test_a_block_sees_the_features_before_its_anchor_alone(window: int | None) -> None:
    """Not that at the anchor, and none further back than a window."""
    states = seeing(window)
    features = torch.randn(1, 12, 64).double()
    before = states(features)
    for at in range(12):
        other = features.clone()
        other[0, at] += 1
        moved = (states(other) - before).abs().amax((1, 2)) > 0
        assert [anchor - (window or anchor) <= at < anchor for anchor in (4, 8)] == moved.tolist()


def test_blocks_do_not_see_each_other() -> None:
    """A token of another block changes nothing, one of the own block every slot; the order of blocks is of no matter."""
    states = seeing()
    features = torch.randn(1, 12, 64).double()
    before, changed = states(features), states(features, changed=0)

    assert torch.equal(before[1], changed[1])
    assert ((before[0] - changed[0]).abs().amax(-1) > 0).all()
    assert torch.allclose(before.flip(0), states(features, anchors=(8, 4)), rtol=0, atol=1e-12)


# ---- gradients, freezing, off ----


def test_no_gradient_leaves_the_draft() -> None:
    """Not a small one: none, or exactly zero."""
    model = dspark_models.model()
    engine = prepared(model)
    engine.context.normaliser.open_window(window := parity.batches(2), torch.device("cpu"))
    with engine.context.normaliser.applied():
        outputs = model(**window[0])
        for name, gradient in zip(
            (names := dict(model.named_parameters())),
            torch.autograd.grad(outputs.loss, list(names.values()), allow_unused=True),
            strict=True,
        ):
            if name.startswith("mtp."):
                assert gradient is not None, name
                assert float(gradient.abs().sum()) > 0, name
            else:
                assert gradient is None or float(gradient.abs().sum()) == 0, name


def test_a_frozen_target_trains_its_draft_alone() -> None:
    model = dspark_models.model()
    engine = prepared(model, alone=False, freeze_policy={"language_model": True})

    found = parity.step(engine, model, window := parity.batches(2))

    assert {name.startswith("mtp.") for name in found.gradients} == {True}
    gradients = dspark_models.expected(model, window)
    assert_is(found._replace(loss=float(gradients["loss"])), gradients)  # of the sum, the gradients are the draft's


@pytest.mark.parametrize(("key", "value"), [("loss_scaling_factor", 0.0), ("enabled", False)])
def test_off_and_weightless(key: str, value: Any) -> None:
    """The draft stays in the model and out of training; with weight 0 its loss is still logged."""
    plain = dspark_models.model()
    model = copy.deepcopy(plain)
    window = parity.batches(2)
    engine = prepared(model, alone=False, dspark={key: value})

    found = parity.step(engine, model, window)

    other = parity.prepared(plain, parity.config())
    plain.double()
    alone = parity.step(other, plain, window)
    assert alone.loss == found.loss
    assert alone.gradients.keys() == found.gradients.keys()
    assert all(torch.equal(alone.gradients[name], one) for name, one in found.gradients.items())
    assert any(name.startswith("mtp.layers.1.") for name in model.state_dict())
    metrics = engine.context.normaliser.term_metrics(1, torch.device("cpu"))
    assert ("dspark_loss" in metrics) == (key == "loss_scaling_factor")
    if metrics:
        assert metrics["dspark_loss"] == pytest.approx(float(dspark_models.expected(trained(model), window)["loss"]))
    assert not any(one.requires_grad for one in extra_heads(model).parameters())  # type: ignore[union-attr]
    draft = extra_heads(model)
    engine.release(model)
    assert extra_heads(model) is draft
    assert all(one.requires_grad for one in draft.parameters())  # type: ignore[union-attr]


def trained(model: Any) -> Any:
    copied = copy.deepcopy(model)
    copied.mtp.requires_grad_(True)
    return copied


def test_nothing_left_to_train_is_refused() -> None:
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    changes: dict[str, Any] = {"freeze_policy": {"language_model": True}, "dspark": {"loss_scaling_factor": 0}}
    (problem,) = Engine(dspark_models.settings(**changes), Context()).problems(dspark_models.model())
    assert ("dspark.loss_scaling_factor", True) == (problem.key, "nothing but the draft is left" in problem.message)


# ---- metrics ----


def test_metrics_are_quotients_of_sums() -> None:
    model, window = dspark_models.model(), parity.batches(2)
    engine = prepared(model)
    parity.step(engine, model, window)
    metrics = engine.context.normaliser.term_metrics(1, torch.device("cpu"))

    found = [dspark_models.oracle(model, batch, dspark_models.drawn(batch)) for batch in window]
    blocks = [chances for one in found for chances in one.accepted if chances]
    for slot in range(3):
        rates = [chances[slot] for chances in blocks if len(chances) > slot]
        assert sum(rates) / len(rates) == pytest.approx(metrics[f"dspark_accept_rate_{slot + 1}"], rel=1e-5)
    lengths = [
        1 + sum(float(torch.tensor(chances[: at + 1]).prod()) for at in range(len(chances))) for chances in blocks
    ]
    assert sum(lengths) / len(lengths) == pytest.approx(metrics["dspark_accepted_length"], rel=1e-5)
    assert 0 < metrics["dspark_confidence_error"] < 1


# ---- a draft learns ----


def test_a_draft_learns() -> None:
    """A frozen target that repeats a text: the loss falls, the target would accept more, and the draft knows it."""
    model = dspark_models.model(spec={"block_size": 2, "num_hidden_layers": 1}, initializer_range=0.05)
    ids = torch.randint(3, 300, (1, 12)).repeat(2, 2)
    batch = {"input_ids": ids, "labels": ids.clone()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(25):  # the target first
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    changes: dict[str, Any] = {"freeze_policy": {"language_model": True}, "dspark": {"num_anchors": 8}}
    engine = parity.prepared(model, dspark_models.settings(**changes))
    optimizer = torch.optim.AdamW(extra_heads(model).parameters(), lr=1e-2)  # type: ignore[union-attr]
    seen = []
    for _ in range(40):
        parity.step(engine, model, [batch])
        seen.append(engine.context.normaliser.term_metrics(1, torch.device("cpu")))
        optimizer.step()

    assert seen[-1]["dspark_loss"] < 0.5 * seen[0]["dspark_loss"]
    assert seen[-1]["dspark_accept_rate_1"] > max(0.5, 2 * seen[0]["dspark_accept_rate_1"])
    assert seen[-1]["dspark_accept_rate_2"] > max(0.5, 2 * seen[0]["dspark_accept_rate_2"])
    assert seen[-1]["dspark_accepted_length"] > seen[0]["dspark_accepted_length"] + 0.8
    assert seen[-1]["dspark_confidence_error"] < 0.5 * seen[0]["dspark_confidence_error"]


def test_a_micro_batch_without_tokens_is_refused() -> None:
    model = dspark_models.model()
    engine = prepared(model)
    embedded = model.get_input_embeddings()(torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="expected input_ids"):
        engine.context.normaliser.open_window(
            [{"inputs_embeds": embedded, "labels": torch.ones(1, 4)}], torch.device("cpu")
        )
