"""The normaliser: the mean over all tokens, however they are spread over micro-batches and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from parity import whole
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional

from torchturbo.objectives.normalise import IGNORE_INDEX, Normaliser, scale, valid_targets

LENGTH = 12
RELATIVE, ABSOLUTE = 2e-6, 2e-7  # DESIGN's tolerance in fp32, and a floor for gradients near zero


def ragged_rows(count: int, masked: set[int] = frozenset()) -> list[dict[str, list[int]]]:  # type: ignore[assignment]
    """Return rows of one length with 2 to 11 targets each; the ``masked`` ones have none."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for at in range(count):
        ids = torch.randint(3, 320, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: LENGTH if at in masked else 1 + at % 9] = IGNORE_INDEX
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist(), "attention_mask": [1] * LENGTH})
    return rows


def oracle(
    kind: str, rows: list[dict[str, list[int]]], micro_batch: int, **changes: Any
) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of one step by the formula: sum over all tokens / their number, plus mean router loss."""
    model = tiny.model(kind, **changes)
    batches = [rows[at : at + micro_batch] for at in range(0, len(rows), micro_batch)]
    total = sum(label != IGNORE_INDEX for row in rows for label in row["labels"][1:])
    loss = torch.zeros(())
    for batch in batches:
        inputs = {name: torch.tensor([row[name] for row in batch]) for name in ("input_ids", "attention_mask")}
        labels = torch.tensor([row["labels"] for row in batch])
        output = model(**inputs)
        targets = functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
        numerator = functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss + numerator / max(1, total)
        if changes.get("output_router_logits"):
            loss = loss + model.config.router_aux_loss_coef * output.aux_loss / len(batches)
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def trained_step(
    rank: int, kind: str, rows: list[dict[str, list[int]]], folder: str, gbs: int, changes: dict[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    """Run one optimizer step of a TurboTrainer and return its logged loss and the gradients before it."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from torchturbo.adapters.hf_trainer import turbo
    from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
    from torchturbo.train.examples import Examples

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    gradients: dict[str, Tensor] = {}

    class Catch(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients.update((name, whole(parameter.grad)) for name, parameter in kwargs["model"].named_parameters())

    set_torchturbo_args(parse_torchturbo_args(["--tt_gbs", str(gbs)])[0])
    args = TrainingArguments(
        folder, per_device_train_batch_size=2, max_steps=1, logging_steps=1, use_cpu=True, max_grad_norm=0,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = turbo(InOrder)(
        model=tiny.model(kind, **changes), args=args, train_dataset=Examples(rows), callbacks=[Catch()]
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] is not None
    return trainer.state.log_history[0]["loss"], gradients


def assert_equal(expected: tuple[float, dict[str, Tensor]], actual: tuple[float, dict[str, Tensor]]) -> None:
    """Compare loss and every gradient."""
    assert actual[0] == pytest.approx(expected[0], rel=RELATIVE)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = float((actual[1][name] - gradient).norm())
        assert error <= RELATIVE * float(gradient.norm()) + ABSOLUTE, name


def own_loss_step(rank: int, rows: list[dict[str, list[int]]], folder: str) -> tuple[float, dict[str, Tensor]]:
    """Train a model whose forward computes its loss past ``loss_function``, as fused kernels do."""

    def forward(self: Any, input_ids: Any, labels: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        output = original(input_ids=input_ids, **kwargs)
        targets = functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
        total = functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
        output["loss"] = total / num_items_in_batch
        return output

    fused = tiny.model()
    original, fused.forward = fused.forward, forward.__get__(fused)
    tiny.model = lambda *args, **changes: fused  # this process is the test's own
    return trained_step(rank, "llama", rows, folder, 2, {})


CASES = [
    pytest.param("llama", 1, 1, set(), {}, id="one process"),
    pytest.param("llama", 1, 3, set(), {}, id="one process, accumulated"),
    pytest.param("llama", 2, 1, set(), {}, id="two ranks"),
    pytest.param("llama", 2, 3, set(), {}, id="two ranks, accumulated"),
    pytest.param("llama", 2, 1, {2, 3}, {}, id="a rank without a target"),
    pytest.param("llama", 2, 3, {2, 3, 6, 7, 10, 11}, {}, id="a rank without a target, accumulated"),
    pytest.param("llama", 2, 1, {0, 1, 2, 3}, {}, id="no target anywhere"),
    pytest.param("qwen3", 2, 3, set(), {}, id="qwen3"),
    pytest.param("mixtral", 2, 3, set(), {"output_router_logits": True, "router_aux_loss_coef": 0.5}, id="mixtral"),
    pytest.param(
        "qwen3_moe", 2, 3, {2, 3}, {"output_router_logits": True, "router_aux_loss_coef": 0.5}, id="qwen3_moe"
    ),
    pytest.param("qwen3_moe", 1, 3, set(), {"output_router_logits": True, "router_aux_loss_coef": 0.5}, id="one moe"),
]


@pytest.mark.parametrize(("kind", "world", "accumulation", "masked", "changes"), CASES)
def test_one_step_equals_the_formula_on_any_layout(
    kind: str, world: int, accumulation: int, masked: set[int], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Loss and every gradient are those of one pass over all tokens, as the logged loss is."""
    rows = ragged_rows(2 * world * accumulation, masked)
    expected = oracle(kind, rows, 2, **changes)

    results = run_ranks(world, trained_step, kind, rows, str(tmp_path), world * accumulation, changes)

    for result in results:
        assert_equal(expected, result)


def test_a_loss_past_the_normaliser_is_scaled_by_the_trainer(tmp_path: Path) -> None:
    """Once, as without the engine: a fused loss divides by the global count, and the ranks are averaged."""
    rows = ragged_rows(4)
    expected = oracle("llama", rows, 2)

    for result in run_ranks(2, own_loss_step, rows, str(tmp_path)):
        assert_equal(expected, result)


def test_a_token_counts_once_wherever_it_stands() -> None:
    """Column 0 predicts nothing; shifted labels are counted as they are."""
    labels = torch.tensor([[5, 6, IGNORE_INDEX], [IGNORE_INDEX, IGNORE_INDEX, 7]])

    assert valid_targets({"labels": labels}) == 2
    assert valid_targets({"labels": labels, "shift_labels": labels}) == 3
    assert valid_targets({"input_ids": labels}) == 0


def test_the_scale_is_the_contract() -> None:
    """R * numerator / denominator, and 0 for an empty window."""
    assert float(scale(torch.tensor(6.0), torch.tensor(4.0), 2)) == 3.0
    assert float(scale(torch.tensor(0.0), torch.tensor(0.0), 2)) == 0.0


def test_outside_a_step_the_model_computes_its_own_loss() -> None:
    """The user's own call of the model is the mean over its own tokens, as before."""
    plain, prepared = tiny.model(), tiny.model()
    normaliser = Normaliser(ranks=2)
    normaliser.install(prepared, prepared)
    ids = torch.arange(3, 15)[None]
    normaliser.denominator = torch.tensor(99.0)

    expected = float(plain(input_ids=ids, labels=ids).loss)

    assert float(prepared(input_ids=ids, labels=ids).loss) == expected
    with normaliser.applied():
        assert float(prepared(input_ids=ids, labels=ids).loss) == pytest.approx(expected * 11 * 2 / 99, rel=1e-6)


def test_a_tuple_output_keeps_its_router_loss() -> None:
    """Models that return tuples get the same scaling."""
    model = tiny.model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    normaliser = Normaliser()
    normaliser.install(model, model)
    normaliser.denominator, normaliser.micro_batches = torch.tensor(11.0), 4
    ids = torch.arange(3, 15)[None]
    own = model(input_ids=ids, labels=ids)

    with normaliser.applied():
        loss = model(input_ids=ids, labels=ids, return_dict=False)[0]

    assert float(loss) == pytest.approx(float(own.loss - 0.5 * own.aux_loss + 0.5 * own.aux_loss / 4), rel=1e-6)


def evaluated(
    rank: int, kind: str, rows: list[dict[str, list[int]]], folder: str, batch: int, changes: dict[str, Any]
) -> float:
    """Return the evaluation loss of a TurboTrainer."""
    from transformers import TrainingArguments

    from torchturbo.adapters.hf_trainer import TurboTrainer
    from torchturbo.train.examples import Examples

    args = TrainingArguments(
        folder, per_device_eval_batch_size=batch, use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = TurboTrainer(model=tiny.model(kind, **changes), args=args, eval_dataset=Examples(rows))
    return float(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("count", [1, 5, 8, 11])
@pytest.mark.parametrize(("world", "batch"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_the_evaluation_loss_is_the_mean_over_tokens_on_any_layout(
    count: int, world: int, batch: int, tmp_path: Path
) -> None:
    """Rows that fill up the last round of ranks are not counted twice."""
    rows = ragged_rows(count)
    expected = oracle("llama", rows, count)[0]

    for loss in run_ranks(world, evaluated, "llama", rows, str(tmp_path), batch, {}):
        assert loss == pytest.approx(expected, rel=RELATIVE)


def test_an_evaluation_with_a_router_loss_is_the_models_own(tmp_path: Path) -> None:
    """It is no mean over tokens alone, so Trainer's figure stays: the mean over batches."""
    rows, changes = ragged_rows(4), {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    batches = [rows[:2], rows[2:]]
    expected = sum(oracle("mixtral", batch, 2, **changes)[0] for batch in batches) / 2

    assert evaluated(0, "mixtral", rows, str(tmp_path), 2, changes) == pytest.approx(expected, rel=RELATIVE)


def test_a_second_trainer_of_a_model_normalises_too() -> None:
    """The first one's normaliser is taken out of the way."""
    from torchturbo.engine.steps.losses import computes_causal_cross_entropy

    model = tiny.model()
    first, second = Normaliser(ranks=3), Normaliser(ranks=2)
    ids = torch.arange(3, 15)[None]
    mean = model(input_ids=ids, labels=ids).loss.detach()
    for normaliser in (first, second):
        assert computes_causal_cross_entropy(model)
        normaliser.install(model, model)
        normaliser.denominator = torch.tensor(11.0)

    with second.applied():
        assert float(model(input_ids=ids, labels=ids).loss.detach()) == pytest.approx(2 * float(mean), rel=1e-6)
