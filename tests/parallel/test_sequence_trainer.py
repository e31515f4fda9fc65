"""Hugging Face's Trainer where ranks share sequences: losses, predictions and counts of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import parity
import pytest
import tiny
import torch
from ranks import run_ranks
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from torchturbo.adapters.hf_trainer import TurboTrainer


def rows(count: int) -> list[dict[str, Any]]:
    """Return rows of different lengths, of whose tokens some are targets."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for at in range(count):
        ids = torch.randint(3, 320, (5 + at * 3 % 8,), generator=generator)
        made.append({"input_ids": ids.tolist(), "labels": [-100] * (at % 4) + ids.tolist()[at % 4 :]})
    return made


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows whose number nobody knows before."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad on the right, to one length: predictions of several batches are put together."""
    longest = 13

    def padded(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([item[name] + [filler] * (longest - len(item[name])) for item in items])

    mask = [[1] * len(item["input_ids"]) + [0] * (longest - len(item["input_ids"])) for item in items]
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": torch.tensor(mask)}


def accuracy(prediction: Any) -> dict[str, float]:
    """Return a metric of whole logits and label ids."""
    guess = numpy.argmax(prediction.predictions[:, :-1], -1)
    target = prediction.label_ids[:, 1:]
    return {"accuracy": float((guess == target)[target != -100].mean()), "rows": float(len(guess))}


def trainer(folder: str, settings: Any, **arguments: Any) -> TurboTrainer:
    words = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "all",
    }
    data = {
        name: arguments.pop(name) for name in ("train_dataset", "eval_dataset", "compute_metrics") if name in arguments
    }
    return TurboTrainer(
        model=arguments.pop("model", None) or tiny.model(),
        args=TrainingArguments(folder, **(words | arguments)),
        data_collator=collate,
        turbo_config=settings,
        **({"train_dataset": rows(20), "eval_dataset": rows(7), "compute_metrics": accuracy} | data),
    )


def run(
    rank: int, folder: str, settings: Any, streamed: bool = False, count: int = 20, **arguments: Any
) -> dict[str, Any]:
    torch.manual_seed(100 + rank)  # a launch whose ranks are seeded apart must still read the same rows
    if streamed:
        arguments |= {"train_dataset": Stream(rows(20)), "eval_dataset": Stream(rows(7))}
    else:
        arguments |= {"train_dataset": rows(count)}
    made = trainer(folder, settings, **arguments)
    torch.manual_seed(100 + rank)
    made.train()
    evaluated, predicted = made.evaluate(), made.predict(made.eval_dataset)
    loss_alone = made.evaluate(metric_key_prefix="alone") if made.compute_metrics is None else {}
    history = [entry for entry in made.state.log_history if "loss" in entry]
    return {
        "train": [(entry["loss"], entry["grad_norm"]) for entry in history],
        "eval": {name: value for name, value in evaluated.items() if "time" not in name and "per_second" not in name},
        "logits": predicted.predictions,
        "labels": predicted.label_ids,
        "tokens": made.state.num_input_tokens_seen,
        "flos": made.state.total_flos,
        "epoch": made.state.epoch,
        "sequences": made.get_total_train_batch_size(made.args),
        **loss_alone,
    }


def compare(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for name in ("tokens", "flos", "epoch", "sequences"):
        assert expected[name] == found[name], name
    assert len(expected["train"]) == len(found["train"])
    for one, several in zip(expected["train"], found["train"], strict=True):
        assert several == pytest.approx(one, rel=2e-5)
    assert expected["eval"].keys() == found["eval"].keys()
    for name, value in expected["eval"].items():
        assert found["eval"][name] == pytest.approx(value, rel=2e-5), name
    assert expected["logits"].shape == found["logits"].shape
    numpy.testing.assert_allclose(found["logits"], expected["logits"], atol=2e-5)
    numpy.testing.assert_array_equal(found["labels"], expected["labels"])


EPOCH = {"max_steps": -1, "num_train_epochs": 1}
CASES = {
    "dp 1, a last batch that is no full one": (2, {}),
    "dp 2, a whole epoch": (4, EPOCH),
    "dp 2, rows whose number is unknown": (4, {"streamed": True}),
    "dp 1, grouped by length": (2, {"train_sampling_strategy": "group_by_length"}),
    "dp 1, the last rows dropped": (2, EPOCH | {"dataloader_drop_last": True, "count": 9, "compute_metrics": None}),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_sequences_train_evaluate_and_predict_as_one(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Losses, grad norms, metrics, logits, label ids, and what is counted: steps, tokens, operations, rows of a step."""
    monkeypatch.chdir(tmp_path)
    world_size, arguments = CASES[name]
    one = {"gradient_accumulation_steps": world_size // 2}
    (expected,) = run_ranks(1, call, str(tmp_path / "one"), parity.config(), arguments | one | {"data_seed": 5})
    settings = parity.config(parallel_plan={"sp_size": 2})

    for found in run_ranks(world_size, call, str(tmp_path / "several"), settings, arguments | {"data_seed": 5}):
        compare(expected, found)


def call(rank: int, folder: str, settings: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return run(rank, folder, settings, **arguments)
