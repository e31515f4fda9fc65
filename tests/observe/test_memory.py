"""Memory: kinds of tensors against a count by hand, with accumulation, checkpointing and state made by the first step."""

from __future__ import annotations

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
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback

from torchturbo.observe.memory import MemorySnapshot
from torchturbo.observe.size import size, unit
from torchturbo.observe.tracker import KINDS, Moment, Summary, TensorTracker, summarised
from torchturbo.plugins.contract import Run
from torchturbo.train.run import train

IN, OUT, ROWS = 300, 200, 100
FLOAT = 4


class TwoLayers(nn.Module):
    """A linear layer and a sigmoid, whose output backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, OUT, bias=False)
        self.second = nn.Linear(OUT, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [ROWS, 1]."""
        return self.second(torch.sigmoid(self.first(x)))


WEIGHTS = (IN * OUT + OUT) * FLOAT


def track(steps: int, micro_batches: int = 1, **options: Any) -> tuple[TensorTracker, Summary]:
    torch.manual_seed(0)
    model = TwoLayers()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **options)
    tracker = TensorTracker(model, optimizer)
    for step in range(1, steps + 1):
        batches = [torch.randn(ROWS, IN) for _ in range(micro_batches)]
        tracker.step = step
        with tracker:
            for batch in batches:
                model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        del batch, batches
    summary = summarised(tracker, 500)
    assert summary is not None
    return tracker, summary


def at_most(summary: Summary, kind: str, step: int | None = None, phase: str | None = None) -> int:
    moments = [
        moment for moment in summary.timeline
        if step in (None, moment.step) and phase in (None, moment.phase)
    ]  # fmt: skip
    return max(moment.bytes[kind] for moment in moments)


def near(count: int) -> Any:
    return pytest.approx(count, abs=64)  # a loss, a step counter


def test_kinds_by_hand() -> None:
    """Parameters all the time; each other kind as large as it must be."""
    _, summary = track(1)

    assert {moment.bytes["parameters"] for moment in summary.timeline[2:]} == {WEIGHTS}
    assert near(WEIGHTS) == at_most(summary, "gradients")
    assert near(2 * WEIGHTS) == at_most(summary, "optimizer state")
    # the first layer's output lives until the sigmoid has its own, which backward needs
    assert near(2 * ROWS * OUT * FLOAT) == at_most(summary, "activations", phase="forward")
    assert at_most(summary, "other", phase="forward") == ROWS * IN * FLOAT


def test_the_optimizers_state_is_made_in_its_first_step_and_stays() -> None:
    """None before; from the second step on it is there all the time."""
    _, summary = track(2)

    assert at_most(summary, "optimizer state", step=1, phase="forward") == 0
    assert at_most(summary, "optimizer state", step=1, phase="backward") == 0
    second = {moment.bytes["optimizer state"] for moment in summary.timeline if moment.step == 2}
    assert [near(2 * WEIGHTS)] == list(second)


def test_accumulated_gradients_count_once() -> None:
    """What a later micro-batch adds to them is held for a moment, as something else."""
    _, one = track(1)
    _, four = track(1, micro_batches=4)

    assert at_most(one, "gradients") == at_most(four, "gradients") == near(WEIGHTS)
    assert at_most(four, "other") >= ROWS * IN * FLOAT * 4
    assert at_most(four, "activations") < 1.1 * at_most(one, "activations")


def test_what_has_gone_is_counted_no_more() -> None:
    """At the end of a step the parameters and the optimizer's state are left, a third and two thirds."""
    _, summary = track(3)

    last = summary.timeline[-1].bytes
    assert last["gradients"] == last["activations"] == 0
    assert near(3 * WEIGHTS) == last["parameters"] + last["optimizer state"]
    assert last["other"] < 64


def test_a_peak_is_the_sum_of_its_kinds_and_the_largest_there_was() -> None:
    """Of each step too."""
    tracker, summary = track(3)
    totals = [moment.total for moment in tracker.moments()]

    assert summary.peak.total == max(totals) == max(moment.total for moment in summary.peaks.values())
    assert sorted(summary.peaks) == [1, 2, 3]
    assert max(moment.total for moment in summary.timeline) == summary.peak.total


def test_checkpointing_keeps_fewer_activations_and_recomputes_them_as_such() -> None:
    """In backward they are activations again."""
    plain, checkpointed = (activations(on) for on in (False, True))

    assert checkpointed["forward"] < plain["forward"] / 2
    assert 0 < checkpointed["backward"] < plain["backward"]


def test_what_is_recomputed_in_backward_is_activations() -> None:
    """It is what forward made, once more; a gradient of an activation is not."""
    model = TwoLayers()
    tracker = TensorTracker(model)
    batch = torch.randn(ROWS, IN)
    with tracker:
        checkpoint(model, batch, use_reentrant=False).sum().backward()
    summary = summarised(tracker, 500)
    assert summary is not None

    assert near(2 * ROWS * OUT * FLOAT) == at_most(summary, "activations", phase="backward")
    assert at_most(summary, "other", phase="backward") >= ROWS * OUT * FLOAT


def activations(checkpointing: bool) -> dict[str, int]:
    model = tiny.model(num_hidden_layers=6).train()
    model.config.use_cache = False
    if checkpointing:
        tiny.checkpoint(model, reentrant=False)
    ids = torch.randint(5, 300, (2, 48))
    tracker = TensorTracker(model)
    with tracker:
        model(ids, labels=ids).loss.backward()
    summary = summarised(tracker, 5000)
    assert summary is not None
    return {phase: at_most(summary, "activations", phase=phase) for phase in ("forward", "backward")}


def test_tied_weights_count_once() -> None:
    """They are one storage."""
    model = tiny.model(tie_word_embeddings=True)
    tracker = TensorTracker(model)

    held = list(tracker.moments())[-1].bytes["parameters"]
    buffers = sum({buffer.data_ptr(): buffer.nbytes for buffer in model.buffers()}.values())
    assert held == sum(weight.nbytes for weight in model.parameters()) + buffers


def sharded_parameters(rank: int) -> int:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(IN, OUT), mesh, [Shard(0)]))
    return list(TensorTracker(model).moments())[-1].bytes["parameters"]


def test_of_a_sharded_tensor_the_local_shard_counts() -> None:
    """Each of two ranks holds half."""
    assert run_ranks(2, sharded_parameters) == [IN * OUT * FLOAT / 2] * 2


def test_tracking_changes_no_figure() -> None:
    """Loss and gradients are those of a run without it."""
    losses = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = TwoLayers()
        tracker = TensorTracker(model)
        batch = torch.randn(ROWS, IN)
        if watched:
            with tracker:
                loss = model(batch).sum()
                loss.backward()
        else:
            loss = model(batch).sum()
            loss.backward()
        losses.append((loss.item(), model.first.weight.grad))
    assert losses[0][0] == losses[1][0]
    assert torch.equal(losses[0][1], losses[1][1])


# ---- in a run ----


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    tiny.save(folder / "model")
    tiny.write_jsonl(folder / "rows.jsonl", tiny.rows(12))
    return folder


def command(material: Path, output: Path, *words: str) -> list[str]:
    return [
        "--model_name_or_path", str(material / "model"), "--dataset", str(material / "rows.jsonl"),
        "--output_dir", str(output), "--max_steps", "4", "--per_device_train_batch_size", "2", "--tt_gbs", "2",
        "--save_strategy", "no", "--use_cpu", *words,
    ]  # fmt: skip


def test_a_run_writes_figures_and_a_picture(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """Of the first two of four steps; AdamW holds two figures a parameter, in the second step from the beginning."""
    out = tmp_path / "out"
    result = train(command(material, out, "--tt_memory_snapshot_steps", "2"))
    folder = out / "memory_snapshot"

    assert sorted(path.name for path in folder.iterdir()) == ["steps_1-2_rank_0.json", "steps_1-2_rank_0.png"]
    assert (folder / "steps_1-2_rank_0.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((folder / "steps_1-2_rank_0.json").read_text())
    weights = sum(weight.nbytes for weight in result.model.parameters())
    assert found["steps"] == [1, 2]
    peak = found["peak"]
    assert peak["total"] == sum(peak["by_kind"].values())
    assert list(peak["by_kind"]) == list(KINDS)
    assert peak["step"] == 2
    assert peak["by_kind"]["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    assert peak["by_kind"]["gradients"] == pytest.approx(weights, rel=0.01)
    assert peak["by_kind"]["parameters"] == pytest.approx(weights, rel=0.02)
    lengths = {len(column) for column in found["timeline"].values()}
    assert len(lengths) == 1 and lengths.pop() > 100
    assert found["process_peak"] > peak["total"]
    assert any(line.startswith("memory: peak ") and "in step 2" in line for line in logged)
    assert not any("count of tensors" in line for line in logged)  # a warning for profiles, and there is none


def test_a_run_that_is_shorter_writes_what_there_is(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """And says so."""
    out = tmp_path / "out"
    train(command(material, out, "--tt_memory_snapshot_steps", "9"))

    assert (out / "memory_snapshot" / "steps_1-4_rank_0.json").is_file()
    assert "memory snapshot: 9 steps were asked for, the run had 4" in logged


def test_a_run_that_fails_writes_what_there_is(material: Path, tmp_path: Path) -> None:
    """Running out of memory is when it is wanted; no mode is left on, and no hook on the optimizer."""
    seen: list[Any] = []

    class Stop(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = kwargs["optimizer"]
            seen.append(getattr(optimizer, "optimizer", optimizer))
            assert len(seen[0]._optimizer_step_pre_hooks) == 2
            raise MemoryError("stop")

    out = tmp_path / "out"
    with pytest.raises(MemoryError):
        train(command(material, out, "--tt_memory_snapshot_steps", "2"), callbacks=[Stop()])

    found = json.loads((out / "memory_snapshot" / "step_1_rank_0.json").read_text())
    assert found["peak"]["by_kind"]["activations"] > 0
    assert not seen[0]._optimizer_step_pre_hooks and not seen[0]._optimizer_step_post_hooks  # nor the search for unused
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0  # type: ignore[attr-defined]


def test_a_resumed_run_counts_from_its_own_start(material: Path, tmp_path: Path) -> None:
    """The state that it loads is optimizer state from the first moment on."""
    out = tmp_path / "out"
    train(command(material, out, "--max_steps", "2", "--save_strategy", "steps", "--save_steps", "2"))
    words = ["--resume_from_checkpoint", str(out / "checkpoint-2"), "--tt_resume_allow", "max_steps"]
    train(command(material, out, *words, "--tt_memory_snapshot_steps", "1"))

    found = json.loads((out / "memory_snapshot" / "step_3_rank_0.json").read_text())
    state = found["timeline"]["optimizer state"]
    assert state[len(state) // 10] == pytest.approx(state[-1], rel=0.01)
    assert state[-1] > 0


def test_what_cannot_be_written_is_no_lost_run(material: Path, tmp_path: Path, logged: list[str]) -> None:
    """A file stands where the folder should be."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "memory_snapshot").write_text("not a folder")
    result = train(command(material, out, "--tt_memory_snapshot_steps", "1"))

    assert result.steps == 4
    assert any("step_1_rank_0 could not be written: File exists" in line for line in logged)


def run_two(rank: int, words: list[str]) -> None:
    from torchturbo.train.run import train

    train(words, quiet=True)


def test_each_rank_writes_its_own(material: Path, tmp_path: Path) -> None:
    """With the rank in the name."""
    out = tmp_path / "out"
    run_ranks(2, run_two, command(material, out, "--tt_memory_snapshot_steps", "1"))

    names = sorted(path.name for path in (out / "memory_snapshot").glob("*.json"))
    assert names == ["step_1_rank_0.json", "step_1_rank_1.json"]


def test_a_device_that_records_for_itself(tmp_path: Path, logged: list[str]) -> None:
    """Is asked to from the first step on, and asked for it after the last; torch.cuda and torch_npu offer this."""
    calls: list[Any] = []

    def dump(path: Path) -> None:
        calls.append("dump")
        path.write_bytes(b"snapshot")

    runtime: Any = SimpleNamespace(
        records_memory=True,
        record_memory=calls.append,
        dump_memory=dump,
        synchronize=lambda: calls.append("synchronize"),
    )
    plugin, run = MemorySnapshot(2), Run(config=None, runtime=runtime, output_dir=tmp_path, rank=3)  # type: ignore[arg-type]
    for step in range(3):
        plugin.step_begin([], run)
        run.step = step + 1
        plugin.step_end(run)
    plugin.end(run)

    assert calls == [1_000_000, "synchronize", "synchronize", "dump", None]
    assert (tmp_path / "memory_snapshot" / "steps_1-2_rank_3.pickle").read_bytes() == b"snapshot"


@pytest.mark.parametrize("hook", ["step_begin", "paused", "end"])
def test_files_are_written_when_the_step_is_over_for_all(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before evaluating, saving, and the next step; the time for it is no time of training."""
    from torchturbo.observe import memory

    paused: list[str] = []

    @contextmanager
    def not_training() -> Iterator[None]:
        paused.append("from here")
        yield
        paused.append("to here")

    monkeypatch.setattr(memory, "not_training", not_training)
    runtime: Any = SimpleNamespace(
        records_memory=True,
        record_memory=lambda entries: None,
        dump_memory=lambda path: (paused.append("dump"), path.write_bytes(b"snapshot")),
        synchronize=lambda: None,
    )
    plugin, run = MemorySnapshot(1), Run(config=None, runtime=runtime, output_dir=tmp_path)  # type: ignore[arg-type]
    plugin.step_begin([], run)
    plugin.paused(run)
    run.step = 1
    plugin.step_end(run)
    assert not paused
    getattr(plugin, hook)(*([[]] if hook == "step_begin" else []), run)
    assert paused == ["from here", "dump", "to here"]
    plugin.end(run)
    assert paused.count("dump") == 1


def test_a_profile_has_nothing_of_the_snapshots_files_in_it(
    material: Path, tmp_path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the other way round; that the count itself is in the profile is said once."""
    from torchturbo.observe import memory, profile

    order: list[str] = []

    def note(module: Any, name: str, word: str) -> None:
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: (order.append(word), plain(*given))[1])

    note(memory, "summarised", "snapshot's files")
    note(profile.StepProfiler, "_stopped", "profiler stops")
    note(profile, "_export", "profile's files")
    out = tmp_path / "out"
    train(command(material, out, "--tt_memory_snapshot_steps", "2", "--tt_profiling", "--max_steps", "3"))

    assert [word for word in order if word != "profiler stops"] == ["profile's files", "snapshot's files"]
    # step 1, step 2, and step 3 after the snapshot is written; the run's end
    assert order == ["profiler stops", "profiler stops", *order[2:4], "profiler stops", "profiler stops"]
    (line,) = (line for line in logged if "count of tensors" in line)
    assert line.startswith("the profile of step 2 includes the memory snapshot's count of tensors")
    found = json.loads((out / "memory_snapshot" / "steps_1-2_rank_0.json").read_text())
    assert found["steps"] == [1, 2]


def test_a_snapshot_of_the_first_step_alone_is_not_in_the_profile(
    material: Path, tmp_path: Path, logged: list[str]
) -> None:
    """Nothing to warn of."""
    train(command(material, tmp_path / "out", "--tt_memory_snapshot_steps", "1", "--tt_profiling", "--max_steps", "2"))

    assert not any("count of tensors" in line for line in logged)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_real_cuda_device_writes_its_snapshot(material: Path, tmp_path: Path) -> None:
    """With the stacks of the first step."""
    import pickle

    words = [word for word in command(material, tmp_path, "--tt_memory_snapshot_steps", "1") if word != "--use_cpu"]
    train(words)

    (path,) = (tmp_path / "memory_snapshot").glob("*.pickle")
    assert pickle.loads(path.read_bytes())["device_traces"][0]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (3 << 30, "3 GiB"), (5 << 40, "5,120 GiB")]
)
def test_sizes_as_people_say_them(count: int, text: str) -> None:
    """In units of 1,024."""
    assert size(count) == text
    assert unit(count)[1] == text.split()[1]


def test_a_moment_adds_up() -> None:
    """All kinds together."""
    assert Moment(1, 1, "forward", {"parameters": 3, "other": 4}).total == 7
