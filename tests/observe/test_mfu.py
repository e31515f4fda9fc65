"""The meter: figures that can be worked out by hand, over ranks and accumulation, and where they are logged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from counts import causal_pairs
from ranks import run_ranks
from transformers import TrainerCallback

from torchturbo.engine.config import EngineConfig
from torchturbo.generated.config import ParallelPlan
from torchturbo.observe import clock as clock_module
from torchturbo.observe.clock import Clock, not_training
from torchturbo.observe.flops import FULL
from torchturbo.observe.matmuls import count
from torchturbo.observe.mfu import Meter
from torchturbo.plugins.contract import Run
from torchturbo.runtime import current_runtime
from torchturbo.train.run import train

FIGURES = ("tokens_per_second", "mfu", "mfu_causal", "hfu")


class Time:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(clock_module, "time", found)
    return found


def a_run(**changes: Any) -> Run:
    settings: dict[str, Any] = {
        "config": EngineConfig(),
        "runtime": current_runtime(use_cpu=True),
        "model": tiny.model(),
    }
    return Run(**(settings | changes))


def batch(*lengths: int) -> dict[str, torch.Tensor]:
    longest = max(lengths)
    mask = torch.tensor([[1] * length + [0] * (longest - length) for length in lengths])
    return {"input_ids": torch.ones_like(mask), "attention_mask": mask}


def step(meter: Meter, run: Run, *micro_batches: Any) -> None:
    meter.step_begin(micro_batches, run)
    meter.step_end(run)


def logged_by(meter: Meter, run: Run) -> dict[str, float]:
    metrics: dict[str, float] = {}
    meter.log(metrics, run)
    return metrics


def test_the_figures_by_hand(clock: Time) -> None:
    """Two steps of two micro-batches in four seconds, against an A100."""
    meter, run = Meter("a100"), a_run()
    step(meter, run, batch(5, 3), batch(7))
    clock.now += 4
    step(meter, run, batch(2), batch(4))
    lengths = [5, 3, 7, 2, 4]
    tokens, squared = sum(lengths), sum(length**2 for length in lengths)
    possible = 312e12 * 4
    flops = count(run.model)

    metrics = logged_by(meter, run)
    assert metrics["tokens_per_second"] == tokens / 4
    assert metrics["mfu"] == pytest.approx(flops.model(tokens, squared) / possible)
    pairs = {FULL: sum(causal_pairs(length, FULL) for length in lengths)}
    assert metrics["mfu_causal"] == pytest.approx(flops.causal(tokens, pairs) / possible)
    assert metrics["hfu"] == metrics["mfu"] > metrics["mfu_causal"]


def test_hfu_is_higher_where_activations_are_recomputed(clock: Time) -> None:
    """By nearly a third, for a model that is mostly layers."""
    run = a_run(model=tiny.model(num_hidden_layers=8))
    run.model.train()
    tiny.checkpoint(run.model, reentrant=True)
    meter = Meter("a100")
    step(meter, run, batch(9))
    clock.now += 1

    metrics = logged_by(meter, run)
    assert 1.2 < metrics["hfu"] / metrics["mfu"] < 4 / 3


def test_hfu_is_higher_where_the_loss_turns_out_to_recompute_the_head(clock: Time) -> None:
    """As in fp16, which a chunked loss finds out in its first forward."""
    from torchturbo.objectives import chunked

    run, rows = a_run(), torch.arange(9)[None] + 5
    chunked.install(run.model.train(), 4)
    meter = Meter("a100")
    meter.step_begin([batch(9)], run)
    with torch.autocast("cpu", torch.float16):
        run.model(input_ids=rows, labels=rows, num_items_in_batch=1)
    meter.step_end(run)
    clock.now += 1

    metrics = logged_by(meter, run)
    assert metrics["hfu"] - metrics["mfu"] == pytest.approx(2 * 9 * 32 * 320 / 312e12)


def test_a_log_starts_the_next_interval(clock: Time) -> None:
    """Its tokens and its seconds."""
    meter, run = Meter(), a_run()
    step(meter, run, batch(5))
    clock.now += 1
    assert logged_by(meter, run) == {"tokens_per_second": 5.0}
    step(meter, run, batch(8))
    clock.now += 2
    assert logged_by(meter, run) == {"tokens_per_second": 4.0}
    assert logged_by(meter, run) == {}


def test_a_step_that_has_not_finished_does_not_count(clock: Time) -> None:
    """A log in the middle of one sees those before it."""
    meter, run = Meter(), a_run()
    step(meter, run, batch(5))
    meter.step_begin([batch(50)], run)
    clock.now += 1

    assert logged_by(meter, run) == {"tokens_per_second": 5.0}


def test_time_outside_training_does_not_count(clock: Time) -> None:
    """An evaluation inside a save, and both between two steps."""
    meter, run = Meter(), a_run()
    step(meter, run, batch(6))
    clock.now += 1
    meter.paused(run)
    clock.now += 10
    meter.paused(run)
    clock.now += 100
    meter.resumed(run)
    clock.now += 1000
    meter.resumed(run)
    clock.now += 2

    assert logged_by(meter, run) == {"tokens_per_second": 2.0}


def test_a_pause_before_the_first_step(clock: Time) -> None:
    """Evaluation can come first (``--eval_on_start``); its end starts nothing."""
    timer = Clock()
    timer.pause()
    clock.now += 5
    timer.resume()
    clock.now += 100
    timer.start()
    clock.now += 3
    assert timer.lap() == 3.0


def test_a_start_inside_a_pause(clock: Time) -> None:
    """Takes effect at the pause's end."""
    timer = Clock()
    timer.pause()
    timer.start()
    clock.now += 5
    timer.resume()
    clock.now += 3
    assert timer.lap() == 3.0


def test_what_observers_do_beside_training_does_not_count(clock: Time) -> None:
    """Nor where it fails; a clock that was not started stays so."""
    started, other = Clock(), Clock()
    started.start()
    clock.now += 1
    with pytest.raises(ArithmeticError), not_training():
        clock.now += 10
        raise ArithmeticError
    clock.now += 2
    assert (started.lap(), other.lap()) == (3.0, 0.0)
    started.stop()
    with not_training():
        clock.now += 1
    clock.now += 1
    assert started.lap() == 0.0


def test_a_second_training_begins_anew(clock: Time) -> None:
    """The first one's last steps, which no log took up, and the time between both are none of its own."""
    meter, run = Meter("a100"), a_run()
    step(meter, run, batch(50))
    clock.now += 1
    meter.step_begin([batch(50)], run)
    meter.end(run)
    clock.now += 1000
    run.model = tiny.model(num_hidden_layers=1)
    meter.step_end(run)
    assert logged_by(meter, run) == {}

    step(meter, run, batch(6))
    clock.now += 2
    metrics = logged_by(meter, run)
    assert metrics["tokens_per_second"] == 3.0
    assert metrics["mfu"] == pytest.approx(count(run.model).model(6, 36) / (312e12 * 2))


def test_ranks_that_share_a_sequence_count_it_once(clock: Time) -> None:
    """Each of a sequence-parallel group is handed the same rows, and the sum goes over all ranks."""
    config = EngineConfig(parallel_plan=ParallelPlan(sp_size=2))
    meter, run = Meter("a100"), a_run(config=config)
    step(meter, run, batch(5), batch(5))  # as two ranks would add up
    clock.now += 1

    assert logged_by(meter, run)["tokens_per_second"] == 5.0


def test_an_epochs_end_without_micro_batches(clock: Time) -> None:
    """Counts nothing and raises nothing."""
    meter, run = Meter(), a_run()
    step(meter, run)
    clock.now += 1

    assert logged_by(meter, run) == {"tokens_per_second": 0.0}


def test_a_cpu_gives_tokens_and_says_why_there_is_no_mfu(logged: list[str]) -> None:
    """Once."""
    meter, run = Meter(), a_run()
    step(meter, run, batch(5))
    step(meter, run, batch(5))

    assert set(logged_by(meter, run)) == {"tokens_per_second"}
    (line,) = logged
    assert line.startswith("no MFU: there is no peak to compare CPU (")


def test_a_device_that_is_not_in_the_table(logged: list[str]) -> None:
    """Is compared with its runtime's default card, which is said."""
    runtime = SimpleNamespace(device_type="cpu", default_card="h20", device_name=lambda: "NVIDIA X1")
    meter, run = Meter(), a_run(runtime=runtime)
    step(meter, run, batch(5))

    assert set(FIGURES) == set(logged_by(meter, run))
    assert logged[0].startswith("no peak is known for NVIDIA X1: MFU against 148 TFLOPS of h20")


def test_a_model_that_cannot_be_counted(logged: list[str]) -> None:
    """Tokens/s alone, with the reason."""
    meter, run = Meter("a100"), a_run(model=torch.nn.Linear(2, 2))
    step(meter, run, batch(5))

    assert set(logged_by(meter, run)) == {"tokens_per_second"}
    assert logged == ["no MFU: Linear is no decoder of Transformers; tokens/s are logged"]


def meter_on_rank(rank: int) -> dict[str, float]:
    timer = Time()
    clock_module.time = timer  # type: ignore[assignment]
    meter, run = Meter("a100"), a_run(world_size=2, rank=rank)
    step(meter, run, *([batch(5, 3)] if rank == 0 else []))  # one rank has nothing to do, and calls all the same
    step(meter, run, batch(4) if rank == 0 else batch(8))
    timer.now += 2
    return logged_by(meter, run)


def test_tokens_are_those_of_all_ranks() -> None:
    """And so is the peak."""
    one, other = run_ranks(2, meter_on_rank)

    flops = count(tiny.model())
    assert one == other
    assert one["tokens_per_second"] == 20 / 2
    assert one["mfu"] == pytest.approx(flops.model(20, 25 + 9 + 16 + 64) / (2 * 312e12 * 2))


# ---- in a run ----


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meter")
    tiny.save(folder / "model")
    tiny.write_jsonl(folder / "rows.jsonl", tiny.rows(12))
    return folder


def command(material: Path, output: Path, *words: str) -> list[str]:
    return [
        "--model_name_or_path", str(material / "model"), "--dataset", str(material / "rows.jsonl"),
        "--output_dir", str(output), "--max_steps", "4", "--per_device_train_batch_size", "2", "--logging_steps", "2",
        "--save_strategy", "no", "--use_cpu", *words,
    ]  # fmt: skip


class Keep(TrainerCallback):
    """Keeps what an integration such as W&B or Trackio is given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


def test_a_run_logs_the_figures_everywhere(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """History, integrations, TensorBoard's event file, and the console."""
    out, keep = tmp_path / "out", Keep()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    words = ["--tt_log_mfu", "--tt_card_name", "h100", "--tt_gbs", "2", "--report_to", "tensorboard"]
    result = train(command(material, out, *words), callbacks=[keep])

    entries = [entry for entry in result.log_history if "loss" in entry]
    assert len(entries) == 2
    given = [logs for logs in keep.seen if "loss" in logs]
    for entry, logs in zip(entries, given, strict=True):
        for name in FIGURES:
            assert logs[name] == entry[name] > 0
    (events,) = (tmp_path / "events").rglob("events.*")
    scalars = read_scalars(events)
    for name in FIGURES:
        assert scalars[f"train/{name}"] == pytest.approx([entry[name] for entry in entries], rel=1e-5)
    shown = capsys.readouterr().err
    assert f"tokens/s {entries[-1]['tokens_per_second']:,.0f}" in shown and "mfu 0.0%" in shown


def read_scalars(path: Path) -> dict[str, list[float]]:
    """Return the scalars of a TensorBoard event file: records of a length, a checksum, an event, a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, at, found = path.read_bytes(), 0, dict[str, list[float]]()
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += 12 + length + 4
        for value in event.summary.value:
            found.setdefault(value.tag, []).append(value.simple_value)
    return found


def test_without_the_key_nothing_is_added(material: Path, tmp_path: Path) -> None:
    """Names stand in the log where they are asked for alone."""
    result = train(command(material, tmp_path / "out"))

    assert not any(name in entry for entry in result.log_history for name in FIGURES)


def test_an_evaluation_in_between_slows_nothing_down(material: Path, tmp_path: Path) -> None:
    """A callback that sleeps in each evaluation."""
    from time import sleep

    class Slow(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            sleep(0.2)

    words = ["--eval_dataset", str(material / "rows.jsonl"), "--eval_strategy", "steps", "--eval_steps", "1"]
    words += ["--per_device_eval_batch_size", "2", "--logging_steps", "1", "--tt_log_mfu"]
    result = train(command(material, tmp_path / "out", *words), callbacks=[Slow()])

    entries = [entry for entry in result.log_history if "loss" in entry]
    rates = [entry["tokens_per_second"] for entry in entries[1:]]
    assert min(rates) > 60 / (6 * 0.2)  # six sleeps between two steps of at least 60 tokens


def run_two(rank: int, words: list[str]) -> list[dict[str, Any]]:
    from torchturbo.train.run import train

    return [entry for entry in train(words, quiet=True).log_history if "loss" in entry]


def test_two_ranks_log_the_tokens_of_both(material: Path, tmp_path: Path) -> None:
    """The same figure on each."""
    words = ["--tt_log_mfu", "--tt_card_name", "h100", "--tt_gbs", "4", "--logging_steps", "1"]
    one, other = run_ranks(2, run_two, command(material, tmp_path / "out", *words))

    for entry, twin in zip(one, other, strict=True):
        assert set(FIGURES) <= entry.keys()
        # each rank has a clock of its own; what both count is in the ratio of flops to tokens
        assert entry["mfu"] / entry["tokens_per_second"] == pytest.approx(
            twin["mfu"] / twin["tokens_per_second"], rel=1e-9
        )


def test_the_history_of_a_checkpoint_holds_them(material: Path, tmp_path: Path) -> None:
    """So does the state that a resumed run starts from."""
    out = tmp_path / "out"
    train(command(material, out, "--save_strategy", "steps", "--save_steps", "2", "--tt_log_mfu"))

    history = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert history[0]["tokens_per_second"] > 0
