"""Profiling: exactly the second step of a launch, on every rank, and a table that agrees with torch's own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from torchturbo.observe import profile as module
from torchturbo.observe import trace
from torchturbo.observe.profile import StepProfiler
from torchturbo.plugins.contract import Run
from torchturbo.runtime import current_runtime
from torchturbo.train.run import train


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    tiny.save(folder / "model")
    tiny.write_jsonl(folder / "rows.jsonl", tiny.rows(12))
    return folder


def command(material: Path, output: Path, *words: str) -> list[str]:
    return [
        "--model_name_or_path", str(material / "model"), "--dataset", str(material / "rows.jsonl"),
        "--output_dir", str(output), "--max_steps", "4", "--per_device_train_batch_size", "2", "--tt_gbs", "2",
        "--save_strategy", "no", "--use_cpu", "--tt_profiling", *words,
    ]  # fmt: skip


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("ph") == "X" and str(event.get("name")).startswith(name)]


def traces(output: Path) -> list[Path]:
    return sorted((output / "profiling").glob("*.json*"))


def test_the_second_step_is_in_the_trace_and_no_other(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """One mark, one optimizer step, and the losses of its two micro-batches."""
    out = tmp_path / "out"
    train(command(material, out))

    (path,) = traces(out)
    assert path.name == "step_2_rank_0.pt.trace.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [event["name"] for event in named(events, "optimizer step")] == ["optimizer step 2"]
    assert len(named(events, "Optimizer.step#AdamW.step")) == 1
    assert len(named(events, "aten::nll_loss_forward")) == 2
    assert len(named(events, "aten::nll_loss_backward")) == 2
    (mark,) = named(events, "optimizer step")
    inside = [mark["ts"] <= event["ts"] <= mark["ts"] + mark["dur"] for event in named(events, "aten::mm")]
    assert len(inside) > 20 and all(inside)
    assert not list((out / "profiling").glob(".*"))

    text = (out / "profiling" / "step_2_operators.txt").read_text()
    assert text.startswith("optimizer step 2, rank 0: the 10 most expensive of ")
    assert len(text.splitlines()) == 12
    assert any(text.rstrip() in line for line in logged)


def test_a_resumed_run_profiles_its_own_second_step(material: Path, tmp_path: Path) -> None:
    """Which is the fourth of the run."""
    out = tmp_path / "out"
    train(command(material, out, "--tt_profiling", "false", "--save_strategy", "steps", "--save_steps", "2"))
    train(command(material, out, "--resume_from_checkpoint", str(out / "checkpoint-2")))

    assert [path.name for path in traces(out)] == ["step_4_rank_0.pt.trace.json.gz"]


def test_a_run_of_one_step_has_no_second(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """Which is said, and nothing is written."""
    out = tmp_path / "out"
    train(command(material, out, "--max_steps", "1"))

    assert "no profile: the run had 1 of the two optimizer steps that it takes; train for longer" in logged
    assert not (out / "profiling").exists()


def test_a_run_that_ends_inside_the_second_step(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """Leaves no half of a trace, and no profiler that goes on."""

    class Stop(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                raise ArithmeticError("stop")

    with pytest.raises(ArithmeticError):
        train(command(material, tmp_path / "out"), callbacks=[Stop()])

    assert "no profile: the run ended inside its second optimizer step" in logged
    assert not (tmp_path / "out" / "profiling").exists()
    train(command(material, tmp_path / "again"))  # another profiler can start
    assert len(traces(tmp_path / "again")) == 1


def test_a_run_that_failed_has_other_news(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """Than that it had no second step."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ArithmeticError("stop")

    with pytest.raises(ArithmeticError):
        train(command(material, tmp_path / "out"), callbacks=[Stop()])

    assert not any(line.startswith("no profile") for line in logged)


def test_a_trace_that_cannot_be_written_is_no_lost_run(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """A file stands where the folder should be."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "profiling").write_text("not a folder")
    result = train(command(material, out))

    assert result.steps == 4
    assert any("step_2_rank_0.pt.trace.json.gz could not be written: File exists" in line for line in logged)
    assert (out / "profiling").read_text() == "not a folder"


def run_two(rank: int, words: list[str]) -> None:
    from torchturbo.train.run import train

    train(words, quiet=True)


def test_two_ranks_write_one_trace_each(material: Path, tmp_path: Path) -> None:
    """With the rank in the name, and one table."""
    out = tmp_path / "out"
    run_ranks(2, run_two, command(material, out))

    assert [path.name for path in traces(out)] == [f"step_2_rank_{rank}.pt.trace.json.gz" for rank in (0, 1)]
    for path in traces(out):
        assert len(named(trace.read(path), "optimizer step")) == 1
    assert [path.name for path in (out / "profiling").glob("*.txt")] == ["step_2_operators.txt"]


def test_under_trainer_too(tmp_path: Path) -> None:
    """Any script with TurboTrainer."""
    from transformers import TrainingArguments

    from torchturbo.adapters.hf_trainer import TurboTrainer
    from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
    from torchturbo.train.batches import Collator
    from torchturbo.train.examples import Examples

    rows = Examples([{"input_ids": list(range(5, 15)), "labels": list(range(5, 15))}] * 6)
    set_torchturbo_args(parse_torchturbo_args(["--tt_profiling", "--tt_log_mfu"])[0])
    try:
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, use_cpu=True, report_to="none", logging_steps=1, save_strategy="no"
        )
        trainer = TurboTrainer(tiny.model(), arguments, train_dataset=rows, data_collator=Collator(0))
        trainer.train()
    finally:
        set_torchturbo_args(None)

    assert [path.name for path in traces(tmp_path)] == ["step_2_rank_0.pt.trace.json.gz"]
    assert all(entry["tokens_per_second"] > 0 for entry in trainer.state.log_history if "loss" in entry)


# ---- the table ----


def test_host_times_are_those_of_torchs_own_table(tmp_path: Path) -> None:
    """Self time of every operator, and its calls; torch counts some that call themselves as one."""
    model = tiny.model()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))

    found = {cost.name: cost for cost in trace.costs(trace.read(tmp_path / "trace.json"))}
    expected = {item.key: item for item in profiler.key_averages() if item.key in found}
    assert len(expected) == len(found) > 30
    for name, item in expected.items():
        assert item.count <= found[name].calls <= 2 * item.count, name
        assert found[name].host == pytest.approx(item.self_cpu_time_total, rel=0.02, abs=2), name


def op(name: str, start: float, length: float, number: int, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": length, "pid": 1, "tid": tid,
            "args": {"External id": number}}  # fmt: skip


def test_kernels_are_put_down_to_the_operators_that_launched_them() -> None:
    """By the number that both carry; threads do not lie in one another."""
    events = [
        op("outer", 0, 10, 1), op("inner", 2, 4, 2), op("inner", 6, 1, 3), op("other", 3, 5, 4, tid=2),
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 20, "dur": 30, "args": {"External id": 2}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 60, "dur": 8, "args": {"External id": 4}},
        {"ph": "X", "cat": "kernel", "name": "lonely", "ts": 70, "dur": 1, "args": {}},
        {"ph": "i", "name": "mark", "ts": 1},
    ]  # fmt: skip

    assert trace.costs(events) == [
        ("inner", 2, 5.0, 30.0), ("other", 1, 5.0, 8.0), ("lonely", 0, 0.0, 1.0), ("outer", 1, 5.0, 0.0),
    ]  # fmt: skip
    text = trace.table(trace.costs(events), "a step", rows=2)
    assert "the 2 most expensive of 4 operators, 0.04 ms on the device in all" in text
    assert text.splitlines()[2].split() == ["inner", "2", "0.005", "0.030", "76.9%"]


def test_an_npus_tasks_are_found_by_the_name_of_their_process() -> None:
    """As torch_npu's traces have it; made after its documentation, no such device was at hand."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "Ascend Hardware"}},
        op("aten::mm", 0, 10, 1),
        {"ph": "X", "name": "MatMulV2", "ts": 20, "dur": 30, "pid": 7, "tid": 1, "args": {}},
    ]

    assert trace.costs(events)[0] == ("MatMulV2", 0, 0.0, 30.0)


def test_a_device_is_waited_for_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step before left behind is not this step's, and what this one began is. The rest is no training."""
    calls: list[str] = []

    @contextmanager
    def not_training() -> Iterator[None]:
        calls.append("(")
        yield
        calls.append(")")

    def export(path: str) -> None:
        calls.append("export")
        Path(path).write_text('{"traceEvents": []}')

    fake = SimpleNamespace(
        start=lambda: calls.append("start"),
        stop=lambda: calls.append("stop"),
        export_chrome_trace=export,
    )
    runtime: Any = SimpleNamespace(synchronize=lambda: calls.append("synchronize"), profiler=lambda: fake)
    monkeypatch.setattr(module, "not_training", not_training)
    plugin, run = StepProfiler(), Run(config=None, runtime=runtime, output_dir=tmp_path, rank=1)  # type: ignore[arg-type]
    for run.step in (1, 2, 3):
        plugin.step_begin([], run)
        plugin.step_end(run)

    assert calls == ["synchronize", "(", "start", ")", "synchronize", "(", "stop", ")", "(", "export", ")"]
    assert [path.name for path in (tmp_path / module.FOLDER).iterdir()] == ["step_2_rank_1.pt.trace.json.gz"]


@pytest.mark.parametrize("text", ["{", None])
def test_a_trace_that_is_cut_off_is_no_lost_run(text: str | None, tmp_path: Path, logged: list[str]) -> None:
    """As a full disk leaves it, or a profiler that can't export."""

    def export(path: str) -> None:
        if text is None:
            raise RuntimeError("no trace")
        Path(path).write_text(text)

    profiler = SimpleNamespace(start=lambda: None, stop=lambda: None, export_chrome_trace=export)
    runtime: Any = SimpleNamespace(synchronize=lambda: None, profiler=lambda: profiler)
    plugin, run = StepProfiler(), Run(config=None, runtime=runtime, output_dir=tmp_path)  # type: ignore[arg-type]
    for run.step in (1, 2):
        plugin.step_begin([], run)
        plugin.step_end(run)

    assert any("step_2_rank_0.pt.trace.json.gz could not be written: " in line for line in logged)
    assert not list((tmp_path / "profiling").glob(".*"))


def test_without_the_option_there_is_no_profiler(material: Path, tmp_path: Path) -> None:
    """Nothing is recorded that nobody asked for."""
    train(command(material, tmp_path / "out", "--tt_profiling", "false", "--max_steps", "2"))

    assert not (tmp_path / "out" / "profiling").exists()
    assert current_runtime(use_cpu=True).profiler_activities() == ("CPU",)


def test_another_profiler_is_left_alone(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """Torch has one a process: ours would end the user's without a word."""
    with profile(activities=[ProfilerActivity.CPU]) as others:
        train(command(material, tmp_path / "out"))

    assert len(others.events()) > 100
    assert [] == traces(tmp_path / "out")
    assert any("another profiler is recording" in line for line in logged)


def test_a_trace_that_kineto_gave_up_leaves_nothing(tmp_path: Path) -> None:
    """A full disk: it writes beside the file, tells nobody, and leaves what it had."""

    class FullDisk:
        def export_chrome_trace(self, path: str) -> None:
            Path(f"{path}.tmp").write_text("{")

    with pytest.raises(OSError, match="is there space left"):
        module._export(FullDisk(), tmp_path / "trace.json.gz")  # type: ignore[arg-type]
    assert [] == list(tmp_path.iterdir())
