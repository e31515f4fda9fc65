"""The places of Trainer's loop: where a step begins, what is logged, who owns a model, and an end in every run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import run_ranks
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.engine.hooks import PluginError
from torchturbo.errors import ConfigError
from torchturbo.objectives.chunked import ChunkedModel
from torchturbo.objectives.normalise import NormalisedLoss, scale
from torchturbo.plugins import Plugin, Run
from torchturbo.train.batches import Collator
from torchturbo.train.examples import Examples

IDS = torch.randint(3, 320, (8, 10), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(autouse=True)
def _no_arguments_of_the_process() -> Iterator[None]:
    set_torchturbo_args(None)
    yield
    set_torchturbo_args(None)


def made(
    folder: Path, *words: str, model: Any = None, plugins: tuple[Any, ...] = (), data: Any = None, **changes: Any
) -> TurboTrainer:
    """Return a trainer of four steps of one row, which logs every step."""
    set_torchturbo_args(parse_torchturbo_args(words)[0])
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 1, "max_steps": 4, "logging_steps": 1, "use_cpu": True, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    return TurboTrainer(
        model=tiny.model() if model is None else model,
        args=TrainingArguments(str(folder), **(settings | changes)),
        train_dataset=Examples([{"input_ids": row, "labels": row} for row in IDS]) if data is None else data,
        data_collator=Collator(0),
        turbo_plugins=plugins,
    )


class Constant(Plugin):
    """A loss term that is always 1."""

    name = "constant"

    def loss_term(self, outputs: Any, batch: Any, run: Run) -> Any:
        return torch.ones(())


class Noting(Plugin):
    """Notes the hooks that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def step_begin(self, micro_batches: Any, run: Run) -> None:
        self.notes.append(("begin", len(micro_batches)))

    def step_end(self, run: Run) -> None:
        self.notes.append(("end of step", run.step))

    def end(self, run: Run) -> None:
        self.notes.append("end")


def logged_terms(trainer: Any) -> list[float]:
    return [entry["constant"] for entry in trainer.state.log_history if "constant" in entry]


def test_a_terms_mean_begins_with_the_run(tmp_path: Path) -> None:
    """After a resume and in a second training it is a mean over the steps since then, not since step 0."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    made(tmp_path, plugins=(Constant(),), max_steps=2, **saving).train()
    resumed = made(tmp_path, "--tt_resume_allow", "max_steps", plugins=(Constant(),), **saving)
    resumed.train(resume_from_checkpoint=True)
    assert [1.0] * 4 == logged_terms(resumed)

    again = made(tmp_path / "again", plugins=(Constant(),), logging_steps=2)
    again.train()
    again.train()
    assert [1.0, 1.0] == logged_terms(again)[-2:]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "mfu"])
def test_a_term_is_logged_over_no_other_metric(name: str, tmp_path: Path) -> None:
    plugin = type("Named", (Constant,), {"name": name})()
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, plugins=(plugin,))

    (problem,) = caught.value.problems
    assert (f"plugin {name}", "rename it") == (problem.key, problem.remedy)


def test_weights_below_one_divide_as_they_are() -> None:
    """And none at all gives 0, not NaN."""
    assert 2.0 == float(scale(torch.tensor(1.0), torch.tensor(0.5), 1))
    assert 0.0 == float(scale(torch.tensor(0.0), torch.tensor(0.0), 1))


class Rows(IterableDataset):  # type: ignore[misc]
    """Five rows that don't say that they are five."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"input_ids": row, "labels": row} for row in IDS[:5]])


def test_a_window_without_a_batch_is_no_step(tmp_path: Path) -> None:
    """Trainer asks for one at each end of a dataset whose length it does not know."""
    plugin = Noting()
    made(tmp_path, plugins=(plugin,), data=Rows(), max_steps=7).train()

    steps = [note for note in plugin.notes if note != "end"]
    assert all(count for kind, count in steps if kind == "begin")
    assert ["begin", "end of step"] * 7 == [kind for kind, _ in steps]


def test_the_number_of_micro_batches_is_not_a_plugins(tmp_path: Path) -> None:
    class Longer(Plugin):
        def step_begin(self, micro_batches: Any, run: Run) -> None:
            micro_batches.append(micro_batches[0])

    with pytest.raises(PluginError, match="plugin Longer: step_begin: made 2 micro-batches of 1"):
        made(tmp_path, plugins=(Longer(),)).train()


def test_an_end_comes_in_a_run_whose_resume_is_refused(tmp_path: Path) -> None:
    """The model was built for it, so the plugin has something to close."""
    plugin = Noting()
    trainer = made(tmp_path, plugins=(plugin,))

    with pytest.raises(ConfigError):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))

    assert ["end"] == plugin.notes


def test_an_end_comes_in_a_run_whose_loss_has_two_owners(tmp_path: Path) -> None:
    plugin = Noting()
    set_torchturbo_args(parse_torchturbo_args(["--tt_enable_chunk_loss"])[0])
    with pytest.raises(ConfigError):
        TurboTrainer(
            model=tiny.model(),
            args=TrainingArguments(str(tmp_path), use_cpu=True),
            compute_loss_func=lambda *args, **kwargs: None,
            turbo_plugins=(plugin,),
        )
    assert "end" in plugin.notes


def test_what_is_no_plugin_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, plugins=("my_plugin.py",))
    assert "turbo_plugins: 'my_plugin.py' is no plugin" in str(caught.value)


def test_the_trainer_that_trains_owns_the_model(tmp_path: Path) -> None:
    """A second one made of the same model took its losses away; training takes them back."""
    model = tiny.model()
    first = made(tmp_path / "a", "--tt_enable_chunk_loss", model=model, plugins=(Constant(),))
    second = made(tmp_path / "b", model=model)
    assert not first.turbo.owns(model) and second.turbo.owns(model)

    first.train()

    assert (
        first.turbo.owns(model) and isinstance(model, ChunkedModel) and isinstance(model.loss_function, NormalisedLoss)
    )
    assert [1.0] * 4 == logged_terms(first)


def test_a_frozen_model_can_be_evaluated_and_not_trained(tmp_path: Path) -> None:
    model = tiny.model().requires_grad_(False)
    trainer = made(tmp_path, model=model)
    trainer.evaluate(eval_dataset=trainer.train_dataset)

    with pytest.raises(ConfigError, match="nothing is left to train"):
        trainer.train()


@pytest.mark.parametrize("reentrant", ["true", "false"])
def test_a_router_loss_needs_a_graph(reentrant: str, tmp_path: Path) -> None:
    """The reentrant kind runs layers without one, and router logits are collected there."""
    words = ("--tt_ac_use_reentrant", reentrant)
    model = tiny.model("mixtral", output_router_logits=True)
    if reentrant == "false":
        made(tmp_path, *words, model=model).train()
        return
    with pytest.raises(ConfigError, match="router loss would get no gradient"):
        made(tmp_path, *words, model=model)


def test_chunks_and_torch_compile_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torch.compile can't follow the logits of a chunked loss"):
        made(tmp_path, "--tt_enable_chunk_loss", torch_compile=True)


def test_bf16_where_the_device_has_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one's own script as in the command."""
    monkeypatch.setattr("torchturbo.runtime.cpu.CpuRuntime.supports_bf16", lambda self: False)
    with pytest.raises(ConfigError, match="does not compute in bf16"):
        made(tmp_path, "--tt_mixed_precision", "bf16")


class FullDisk(Plugin):
    """Fails to write on one rank alone."""

    def save_checkpoint(self, folder: Path, run: Run) -> None:
        if run.rank == 1:
            raise OSError("no space left")


def saving(rank: int, folder: str) -> str:
    trainer = made(Path(folder), plugins=(FullDisk(),), save_strategy="steps", save_steps=1)
    try:
        trainer.train()
    except (ConfigError, PluginError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_one_ranks_failing_save_ends_all(tmp_path: Path) -> None:
    """With its message on each, and nothing half-written left to resume from."""
    first, second = run_ranks(2, saving, str(tmp_path))

    assert "ConfigError" in first and "no space left" in first and "rank 1" in first
    assert "PluginError: plugin FullDisk: save_checkpoint: OSError: no space left" == second
    assert [] == list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("place", ["evaluate", "predict"])
def test_a_failed_evaluation_is_left_again(place: str, tmp_path: Path) -> None:
    """Whoever catches its error trains on with clocks that run."""

    class Pausing(Noting):
        def paused(self, run: Run) -> None:
            self.notes.append("paused")

        def resumed(self, run: Run) -> None:
            self.notes.append("resumed")

    plugin = Pausing()
    trainer = made(tmp_path, plugins=(plugin,))
    with pytest.raises(TypeError):
        getattr(trainer, place)(Examples([{"input_ids": None, "labels": None}]))

    assert ["paused", "resumed"] == plugin.notes
