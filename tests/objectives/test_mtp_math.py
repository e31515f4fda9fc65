"""Multi-token prediction in one process: values and gradients against loops over positions, and the switches around it."""

from __future__ import annotations

import copy
from typing import Any

import mtp_models as tiny_mtp
import parity
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torchturbo.objectives.chunked import ChunkedHead
from torchturbo.objectives.heads import extra_heads

WINDOWS: dict[str, list[dict[str, Tensor]]] = {
    "padded rows": [tiny_mtp.batch()],
    "packed documents": [tiny_mtp.packed((7, 5), (2, 10)), tiny_mtp.packed((4, 4, 4), seed=5)],
    "accumulation": [tiny_mtp.batch(), tiny_mtp.batch((5, 3), 9), tiny_mtp.batch((4,), masked=4)],
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("depths", [1, 2])
def test_loss_and_gradients_are_those_of_the_oracle(depths: int, window: str) -> None:
    """In float64: the total, the loss of each depth, and the gradient of every parameter, embeddings and head included."""
    model = tiny_mtp.headed("deepseek_v3", num_nextn_predict_layers=depths)

    found, expected = (run(model, WINDOWS[window], 2.0) for run in (tiny_mtp.fast, tiny_mtp.slow))

    assert expected.depths == pytest.approx(found.depths, rel=1e-6)
    assert float(expected.loss) == pytest.approx(float(found.loss), rel=1e-6)
    assert max(tiny_mtp.errors(found.gradients, expected.gradients).values()) < 1e-6
    assert len(expected.depths) == depths


def test_each_depth_is_a_mean_over_its_own_targets() -> None:
    """NVIDIA/Megatron-LM#2417: three heads over eight tokens have six, five and four targets, and not eight each."""
    model = tiny_mtp.headed("deepseek_v3", num_nextn_predict_layers=3)
    batch = tiny_mtp.batch((8,), masked=0)
    for depth in (1, 2, 3):
        model.zero_grad()
        with tiny_mtp.objective(model, 1.0) as (normaliser, task):
            normaliser.terms = task.terms(1.0)[:depth]
            normaliser.open_window([batch], CPU)
            with normaliser.applied():
                model(**batch, use_cache=False).loss.backward()
            weights = [float(normaliser._weights[f"mtp_{at}_loss"]) for at in range(1, depth + 1)]
        assert [6.0, 5.0, 4.0][:depth] == weights
        # The last norm is reached by its own depth's loss alone: what one process computes as a plain mean.
        found = model.mtp.norms[depth - 1].weight.grad.clone()
        assert torch.allclose(_mean_gradient(model, batch, depth), found, rtol=1e-6)


def _mean_gradient(model: Any, batch: dict[str, Tensor], depth: int) -> Tensor:
    """Return the gradient of a depth's norm by the plain mean of ``torch.nn.functional.cross_entropy``."""
    model.zero_grad()
    ids = batch["input_ids"][0]
    hidden = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    for k in range(1, depth + 1):
        hidden = tiny_mtp._depth(model, k, hidden, ids)
    functional.cross_entropy(model.lm_head(hidden[:-1]), ids[depth + 1 :]).backward()  # type: ignore[no-untyped-call]
    gradient: Tensor = model.mtp.norms[depth - 1].weight.grad
    return gradient


def test_the_total_is_the_main_loss_and_the_weighted_sum_of_the_depths() -> None:
    """A sum over depths: Megatron-LM's factor, which is divided by their number, is twice ours at two depths."""
    model = tiny_mtp.headed("glm4_moe", num_nextn_predict_layers=2)
    window = WINDOWS["accumulation"]

    plain, weighted = (tiny_mtp.fast(model, window, weight) for weight in (0.0, 0.3))

    assert plain.depths == pytest.approx(weighted.depths)
    assert float(plain.loss) + 0.3 * sum(plain.depths) == pytest.approx(float(weighted.loss), rel=1e-6)


def test_the_hidden_state_alone_is_what_a_projection_of_it_sees() -> None:
    """With eh_proj taking the second half, the loss is the cross-entropy of the block of the normed hidden states."""
    model, batch = tiny_mtp.headed(), tiny_mtp.batch((10,), masked=0)
    _set_projection(model, embedding=0.0, hidden=1.0)
    ids = batch["input_ids"]

    found = tiny_mtp.fast(model, [batch], 1.0)

    decoder, heads = model.get_decoder(), model.mtp
    hidden = heads.joins[0].hnorm(decoder(input_ids=ids, use_cache=False).last_hidden_state)
    mask = torch.ones(10, 10).tril().bool()[None, None]
    at = torch.arange(10)[None]
    left = heads.layers[0](
        hidden, attention_mask=mask, position_embeddings=decoder.rotary_emb(hidden, at), position_ids=at
    )
    logits = model.lm_head(heads.norms[0](left))
    assert functional.cross_entropy(logits[0, :-2], ids[0, 2:]).item() == pytest.approx(found.depths[0], rel=1e-6)


def test_the_embedding_comes_first() -> None:
    """The first half of eh_proj sees the next token, the second the state that knows only the tokens up to here."""
    model, batch = tiny_mtp.headed(), tiny_mtp.batch((10,), masked=0)
    other = {name: value.clone() for name, value in batch.items()}
    other["input_ids"][0, 0] = 5  # no target, and no depth's input: only hidden states know of it
    losses = {}
    for half, sides in {"embedding": (1.0, 0.0), "hidden": (0.0, 1.0)}.items():
        _set_projection(model, *sides)
        losses[half] = [tiny_mtp.fast(model, [given], 1.0).depths[0] for given in (batch, other)]

    assert losses["embedding"][0] == losses["embedding"][1]
    assert abs(losses["hidden"][0] - losses["hidden"][1]) > 1e-4


def _set_projection(model: Any, embedding: float, hidden: float) -> None:
    one = torch.eye(32, dtype=torch.float64)
    with torch.no_grad():
        model.mtp.joins[0].eh_proj.weight.copy_(torch.cat([embedding * one, hidden * one], 1))


def test_weight_zero_gives_the_gradients_of_the_main_loss_alone() -> None:
    """To the bit, and none to the heads; their losses are there to be logged."""
    model, window = tiny_mtp.headed(), WINDOWS["accumulation"]
    plain = copy.deepcopy(model)
    del plain.mtp

    found = tiny_mtp.fast(model, window, 0.0)
    targets = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in window)
    loss = torch.stack([plain(**batch, use_cache=False, num_items_in_batch=targets).loss for batch in window]).sum()
    loss.backward()  # type: ignore[no-untyped-call]

    assert found.gradients.keys() == dict(plain.named_parameters()).keys()
    assert float(loss) == pytest.approx(float(found.loss), rel=1e-6)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(parameter.grad, found.gradients[name], rtol=1e-6, atol=1e-12), name
    assert found.depths == pytest.approx(tiny_mtp.slow(model, window, 0.0).depths, rel=1e-6)


def test_embeddings_in_place_of_tokens_give_the_same() -> None:
    """A caller that embeds by itself is served alike."""
    model, batch = tiny_mtp.headed(), tiny_mtp.packed((7, 5))
    embedded = {name: value for name, value in batch.items() if name != "input_ids"}
    embedded["inputs_embeds"] = model.get_input_embeddings()(batch["input_ids"]).detach()

    found, expected = (tiny_mtp.fast(model, [given], 1.0) for given in (embedded, batch))

    assert expected.depths == pytest.approx(found.depths, rel=1e-9)
    assert float(expected.loss) == pytest.approx(float(found.loss), rel=1e-6)


# ---- in the engine ----


def stepped(window: list[dict[str, Tensor]], kind: str = "deepseek_v3", depths: int = 2, **settings: Any) -> Any:
    """Return what one step of a model that the engine prepared gave, and the metrics of its depths."""
    model = tiny_mtp.model(kind, num_nextn_predict_layers=depths)
    engine = parity.prepared(model, parity.config(**({"mtp": {"enabled": True}} | settings)))
    found = parity.step(engine, model, window)
    return found, engine.context.normaliser.term_metrics(1, CPU)


def test_the_engine_computes_what_the_objective_does() -> None:
    """In fp32, with the weight that the schema has as its default."""
    model = tiny_mtp.model(num_nextn_predict_layers=2)
    engine = parity.prepared(model, parity.config(mtp={"enabled": True}))
    found = parity.step(engine, model, WINDOWS["accumulation"])
    wide = tiny_mtp.headed(num_nextn_predict_layers=2)
    wide.load_state_dict(model.state_dict())

    expected = tiny_mtp.slow(wide, WINDOWS["accumulation"], 0.1)

    assert float(expected.loss) == pytest.approx(found.loss, rel=1e-6)
    assert max(tiny_mtp.errors(found.gradients, expected.gradients).values()) < 1e-5


@pytest.mark.parametrize("rows", [1, 7, 1024])
def test_a_chunked_loss_is_the_same(rows: int) -> None:
    """For every depth, with documents and accumulation."""
    for window in ("packed documents", "accumulation"):
        found, metrics = stepped(WINDOWS[window], loss_chunk={"enabled": True, "chunk_size": rows})
        expected, plain = stepped(WINDOWS[window])

        parity.assert_equal(found, expected)
        assert plain == pytest.approx(metrics, rel=1e-6)


def test_a_chunked_loss_holds_no_more_rows_of_logits_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every depth goes through the head's own loss."""
    rows: list[int] = []
    own = ChunkedHead.loss

    def loss(self: Any, hidden: Tensor, *args: Any) -> Tensor:
        rows.append(len(hidden))
        return own(self, hidden, *args)

    monkeypatch.setattr(ChunkedHead, "loss", loss)
    stepped(WINDOWS["padded rows"], loss_chunk={"enabled": True, "chunk_size": 4})

    assert [24, 24, 24] == rows[-3:]  # before them, a look at how the model computes its loss


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_activation_checkpointing_changes_nothing(kind: str, reentrant: bool) -> None:
    """The heads' layers are recomputed, too, and route as they did."""
    depths = 2 if kind == "deepseek_v3" else 1
    checkpointing = {"enabled": True, "use_reentrant": reentrant}
    found, metrics = stepped(WINDOWS["padded rows"], kind, depths, activation_checkpointing=checkpointing)
    expected, plain = stepped(WINDOWS["padded rows"], kind, depths)

    parity.assert_equal(found, expected)
    assert plain == pytest.approx(metrics, rel=1e-6)


def test_a_step_of_several_micro_batches_is_that_of_one() -> None:
    """However unevenly the targets of each depth are spread."""
    parts = [tiny_mtp.batch((12, 9)), tiny_mtp.batch((12, 5), 9, masked=9)]
    one = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    found, metrics = stepped(parts)
    expected, plain = stepped([one])

    parity.assert_equal(found, expected)
    assert plain == pytest.approx(metrics, rel=1e-6)


def test_a_window_without_a_target_has_loss_zero() -> None:
    """And finite gradients."""
    batch = tiny_mtp.batch((6, 4), masked=6)

    found, metrics = stepped([batch])

    assert (0.0, 0.0) == (found.loss, found.norm)
    assert {"mtp_1_loss": 0.0, "mtp_2_loss": 0.0} == metrics


def test_bf16_is_near_fp32() -> None:
    """Under autocast."""
    found, metrics = stepped(WINDOWS["padded rows"], mixed_precision="bf16")
    expected, plain = stepped(WINDOWS["padded rows"], mixed_precision="fp32")

    assert expected.loss == pytest.approx(found.loss, rel=2e-2)
    assert plain == pytest.approx(metrics, rel=2e-2)


def test_weight_zero_leaves_the_heads_where_they_are() -> None:
    """AdamW with weight decay, which moves a parameter whose gradient is zero; the model itself is trained."""
    model = tiny_mtp.model()
    engine = parity.prepared(model, parity.config(mtp={"enabled": True, "loss_scaling_factor": 0}))
    assert not any(parameter.requires_grad for parameter in model.mtp.parameters())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    for _ in range(2):
        parity.step(engine, model, WINDOWS["padded rows"])
        optimizer.step()

    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert not [name for name in moved if name.startswith("mtp.")]
    assert "model.layers.1.self_attn.o_proj.weight" in moved
    assert engine.context.normaliser.term_metrics(2, CPU)["mtp_1_loss"] > 1
    engine.release(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not [module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks]


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_heads_alone_are_trained_beside_a_frozen_model(reentrant: bool) -> None:
    """Their gradients are those beside a trained one."""
    settings = {"activation_checkpointing": {"enabled": True, "use_reentrant": reentrant}}
    found, metrics = stepped(WINDOWS["packed documents"], freeze_policy={"language_model": True}, **settings)
    expected, plain = stepped(WINDOWS["packed documents"])

    assert {name for name in expected.gradients if name.startswith("mtp.")} == found.gradients.keys()
    assert expected.loss == pytest.approx(found.loss, rel=1e-6)
    assert plain == pytest.approx(metrics, rel=1e-6)
    ours = {name: expected.gradients[name] for name in found.gradients}
    assert max(tiny_mtp.errors(found.gradients, ours).values()) < 1e-6


def test_null_is_the_default_weight() -> None:
    """It may be written."""
    found, _ = stepped(WINDOWS["padded rows"], mtp={"enabled": True, "loss_scaling_factor": None})
    expected, _ = stepped(WINDOWS["padded rows"], mtp={"enabled": True, "loss_scaling_factor": 0.1})

    assert expected.loss == found.loss


def test_off_the_model_says_that_it_has_no_heads() -> None:
    """Nothing is built, the numbers are the plain model's to the bit, and the configuration comes back as it was."""
    model, plain = tiny_mtp.model(), tiny_mtp.model()
    engine = parity.prepared(model, parity.config())
    window = WINDOWS["padded rows"]

    assert 0 == model.config.num_nextn_predict_layers
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert extra_heads(model) is None

    found = parity.step(engine, model, window)
    expected = parity.reference(plain, window)
    assert all(torch.equal(found.gradients[name], value) for name, value in expected.gradients.items())

    engine.release(model)
    assert 1 == model.config.num_nextn_predict_layers


def test_an_evaluation_is_without_the_heads() -> None:
    """Its loss is the model's own."""
    model = tiny_mtp.model()
    engine = parity.prepared(model, parity.config(mtp={"enabled": True}))
    model.eval()
    batch = tiny_mtp.batch()
    plain = tiny_mtp.model().eval()

    engine.context.normaliser.open_window([batch], CPU, with_terms=False)
    with engine.context.normaliser.applied(), torch.no_grad():
        found = model(**batch).loss

    assert float(plain(**batch).loss) == pytest.approx(float(found), rel=1e-6)


def test_a_later_engine_goes_on_with_the_same_heads() -> None:
    """What was trained is not built anew, and nothing is counted twice."""
    model = tiny_mtp.model()
    settings = parity.config(mtp={"enabled": True})
    first = parity.prepared(model, settings)
    heads = extra_heads(model)
    expected = parity.step(first, model, WINDOWS["padded rows"])

    second = parity.prepared(model, settings)

    assert heads is extra_heads(model)
    parity.assert_equal(parity.step(second, model, WINDOWS["padded rows"]), expected)
    assert ["mtp_1_loss"] == list(second.context.normaliser.term_metrics(1, CPU))


def test_a_copy_of_a_prepared_model_runs_by_itself() -> None:
    """Its heads are there, and no hook of ours reaches back."""
    model = tiny_mtp.model()
    parity.prepared(model, parity.config(mtp={"enabled": True}))

    copied = copy.deepcopy(model)

    batch = tiny_mtp.batch()
    assert torch.isfinite(copied(**batch).loss)
    assert copied.state_dict().keys() == model.state_dict().keys()
