"""Checkpoints on two ranks: one rank's error ends both, best models, adapters, and a checkpoint of Trainer's own."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import mesh_runs
import pytest
import tiny
import torch
from ranks import run_ranks

SAVING = {"save_strategy": "steps", "save_steps": 1}


# ---- errors ----


def no_room(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")


def broken(rank: int, folder: str) -> dict[str, tuple[str, float, list[str]]]:
    """Train with a disk that is full for one rank; return what this rank raised, how long it took, and what is left."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystem

    import torchturbo.adapters.hf_checkpoints as adapter
    import torchturbo.checkpoint.hf_export as exporter
    from torchturbo.checkpoint.files import STAGING

    found = {}
    for case, (at, _) in CASES.items():
        out = f"{folder}/{case}"
        made = mesh_runs.trainer(out, [], "qwen3", **SAVING)
        with pytest.MonkeyPatch.context() as patch:
            if rank == at:
                places = {
                    "shards": (FileSystem, "create_stream"),
                    "random states": (made, "_save_rng_state"),
                    "record": (adapter, "write_record"),
                    "export": (exporter, "save_file"),
                }
                patch.setattr(*places[case], no_room)
            message, started = "nothing", time.monotonic()
            try:
                made.train()
            except (OSError, SystemExit) as error:
                message = str(error)
        seconds = time.monotonic() - started
        dist.barrier()  # the first rank has tidied up
        left = [path.name for path in Path(out).glob("checkpoint-*")]
        found[case] = message, seconds, left + [path.name for path in (Path(out) / STAGING).glob("*")]
    return found


CASES = {
    "shards": (1, "(rank 1)"),
    "random states": (1, "(rank 1)"),
    "record": (0, "(rank 0)"),
    "export": (0, "(rank 0)"),
}


def test_an_error_on_one_rank_ends_both_with_its_message(tmp_path: Path) -> None:
    """In the thread that writes and beside it; within seconds, and nothing that looks like a checkpoint is left."""
    for rank, found in enumerate(run_ranks(2, broken, str(tmp_path / "out"))):
        for case, (at, words) in CASES.items():
            message, seconds, left = found[case]
            assert "No space left on device" in message, (case, message)
            assert rank == at or words in message, (case, message)
            assert 60 > seconds, case
            assert [] == left, case


# ---- the best model ----


BEST = {
    "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "loss",
    "greater_is_better": True,
}  # fmt: skip
LIMITS = (1, 2)


def best(rank: int, folder: str) -> list[dict[str, Any]]:
    """Take the first of four checkpoints as the best; return the names that are left and what was loaded."""
    import torch.distributed as dist

    found = []
    for limit in LIMITS:
        out = f"{folder}/{limit}"
        changes = {**BEST, **SAVING, "save_total_limit": limit}
        made = mesh_runs.trainer(out, [], "qwen3", eval_dataset=mesh_runs.rows(4), **changes)
        made.train()
        dist.barrier()
        names = sorted(path.name for path in Path(out).glob("checkpoint-*"))
        found.append({"names": names, "best": made.state.best_model_checkpoint, "weights": mesh_runs.states(made)})
    return found


def stock_best(rank: int, folder: str) -> list[list[str]]:
    """Return what Trainer itself leaves of the same runs."""
    from transformers import Trainer

    from torchturbo.train.batches import Collator
    from torchturbo.train.examples import Examples

    found = []
    for limit in LIMITS:
        out = f"{folder}/{limit}"
        changes = {**BEST, **SAVING, "save_total_limit": limit, "gradient_accumulation_steps": 4}
        rows = Examples(mesh_runs.rows())
        model = tiny.model("qwen3", **mesh_runs.SIZES["qwen3"])
        args = mesh_runs.arguments(out, **changes)
        Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=Collator(0)).train()
        found.append(sorted(path.name for path in Path(out).glob("checkpoint-*")))
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_best_model_is_loaded_and_kept_as_trainer_does(tmp_path: Path) -> None:
    """From the native state, where every rank finds its shards."""
    from test_native_meshes import native

    (expected,) = run_ranks(1, stock_best, str(tmp_path / "stock"))
    for runs in run_ranks(2, best, str(tmp_path / "out")):
        for limit, names, found in zip(LIMITS, expected, runs, strict=True):
            checkpoint = tmp_path / "out" / str(limit) / "checkpoint-1"
            assert names == found["names"]
            assert str(checkpoint) == found["best"]
            saved = native(checkpoint / "native")
            weights = {name: tensor for name, tensor in found["weights"].items() if name.startswith("model.")}
            assert weights
            assert [name for name, tensor in weights.items() if not torch.equal(tensor, saved[name])] == []


# ---- adapters ----


def adapted() -> Any:
    """Return a model with LoRA adapters."""
    import peft

    torch.manual_seed(2)
    model = tiny.model("qwen3", **mesh_runs.SIZES["qwen3"])
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0))


def with_adapters(rank: int, folder: str) -> dict[str, Any]:
    import copy

    model = adapted()
    made = mesh_runs.trainer(folder, [], "qwen3", copy.deepcopy(model), save_strategy="steps", save_steps=2)
    made.train()
    made.save_model(f"{folder}/final")
    whole = {"history": mesh_runs.history(made), "weights": mesh_runs.weights(made.model)}
    rest = mesh_runs.resumed(rank, f"{folder}-again", [], "qwen3", f"{folder}/checkpoint-2", model)
    return {"whole": whole, "resumed": rest}


def adapters_alone(rank: int, folder: str, checkpoint: str) -> dict[str, Any]:
    return mesh_runs.resumed(rank, folder, [], "qwen3", checkpoint, adapted())


def test_adapters_are_saved_resumed_and_exported(tmp_path: Path) -> None:
    """On the same ranks bit for bit, on one process by the same numbers, and as PEFT's own files."""
    import peft
    from test_native_meshes import assert_bit_equal, assert_same

    out = tmp_path / "out"
    runs = run_ranks(2, with_adapters, str(out))
    for run in runs:
        assert_bit_equal(run)
    assert sum(path.stat().st_size for path in (out / "checkpoint-2" / "native").glob("*.distcp")) < 400_000
    (one,) = run_ranks(1, adapters_alone, str(tmp_path / "one"), str(out / "checkpoint-2"))
    assert_same(runs[0]["whole"], one)
    loaded = peft.PeftModel.from_pretrained(tiny.model("qwen3", **mesh_runs.SIZES["qwen3"]), str(out / "final"))
    weights = dict(loaded.named_parameters())
    assert any("lora_B" in name for name in runs[0]["whole"]["weights"])
    for name, tensor in runs[0]["whole"]["weights"].items():
        assert torch.equal(tensor, weights[name]), name


# ---- state in host memory ----


def offloaded(rank: int, folder: str) -> dict[str, Any]:
    found = {}
    for mode in ("all", "optimizer"):
        config = Path(folder) / f"{mode}.yaml"
        config.write_text(f"backend_config: {{cpu_offload: {{enabled: true, mode: {mode}}}}}\n")
        found[mode] = mesh_runs.saved(rank, f"{folder}/{mode}", ["--tt_config", str(config)], "qwen3")
    return found


def test_offloaded_states_resume_bit_for_bit(tmp_path: Path) -> None:
    """One process, with everything in host memory behind shards of its own, or the optimizer's state alone."""
    from test_native_meshes import assert_bit_equal

    (found,) = run_ranks(1, offloaded, str(tmp_path))
    for run in found.values():
        assert_bit_equal(run)


# ---- a checkpoint of Trainer's own ----


def refusal(rank: int, folder: str, checkpoint: str) -> str:
    made = mesh_runs.trainer(folder, [], "qwen3")
    try:
        made.train(resume_from_checkpoint=checkpoint)
    except SystemExit as error:
        return str(error)
    return "nothing"


def from_trainer(rank: int, folder: str) -> dict[str, Any]:
    """Resume a checkpoint that Trainer wrote, in one process with the engine."""
    stock = mesh_runs.arguments(
        f"{folder}/stock", save_strategy="steps", save_steps=2, gradient_accumulation_steps=4, bf16=False
    )
    from transformers import Trainer

    from torchturbo.train.batches import Collator
    from torchturbo.train.examples import Examples

    model = tiny.model("qwen3", **mesh_runs.SIZES["qwen3"])
    rows = Examples(mesh_runs.rows())
    made = Trainer(model=model, args=stock, train_dataset=rows, data_collator=Collator(0))
    made.train()
    whole = mesh_runs.history(made)
    resumed = mesh_runs.trainer(f"{folder}/out", [], "qwen3")
    resumed.train(resume_from_checkpoint=f"{folder}/stock/checkpoint-2")
    return {"whole": whole, "resumed": mesh_runs.history(resumed)}


def test_a_checkpoint_of_trainer_is_resumed_by_one_process_and_refused_by_shards(tmp_path: Path) -> None:
    """Its optimizer state lies in one pickle for a model that one process holds."""
    (found,) = run_ranks(1, from_trainer, str(tmp_path))
    assert found["whole"].keys() == found["resumed"].keys()
    for step, pair in found["whole"].items():
        assert found["resumed"][step] == pytest.approx(pair, rel=1e-6), step
    checkpoint = tmp_path / "stock" / "checkpoint-2"
    for message in run_ranks(2, refusal, str(tmp_path / "two"), str(checkpoint)):
        assert f"{checkpoint}: it was saved whole, by one process of Trainer" in message
        assert "resume in one process" in message
    shutil.rmtree(tmp_path / "stock")


# ---- after an evaluation ----


def after_a_forward(rank: int, folder: str) -> list[str]:
    """Save and load while the root's parameters are gathered; return what the states hold then."""
    import families

    from torchturbo.checkpoint import native

    model = tiny.model("llama")
    families.shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    place, kinds = Path(folder) / "native", set()

    def look() -> None:
        with torch.no_grad():
            model(input_ids=rows)
        kinds.add(f"{type(model.lm_head.weight).__name__} at first")

    look()
    native.save(native.capture(model, optimizer), place, torch.distributed.group.WORLD)
    kinds |= {f"{type(one).__name__} saved" for one in native.capture(model, None).tensors["model"].values()}
    look()
    native.load_model(model, place, torch.distributed.group.WORLD)
    look()
    native.load_optimizer(model, optimizer, place, torch.distributed.group.WORLD)
    kinds |= {f"{type(one['exp_avg']).__name__} loaded" for one in optimizer.state.values()}
    return sorted(kinds)


def test_states_are_saved_and_loaded_after_a_forward_pass(tmp_path: Path) -> None:
    """Without a backward the root's parameters stay gathered, and are none that the optimizer knows."""
    for kinds in run_ranks(2, after_a_forward, str(tmp_path)):
        assert ["DTensor loaded", "DTensor saved", "Parameter at first"] == kinds


# ---- what ranks must agree on ----


def disagreeing(rank: int, folder: str) -> dict[str, str]:
    """Train where one rank has something of its own; return what this rank raised."""
    from transformers import TrainerCallback

    from torchturbo.checkpoint import output

    class Told(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Look at what was saved."""

    def raised(out: str, callbacks: list[Any], spoil: bool = False) -> str:
        made = mesh_runs.trainer(out, [], "qwen3", callbacks=callbacks, **SAVING, max_steps=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(output, "SEEN_WITHIN", 0.0)
            if spoil:
                made.add_callback(Best())
                if rank == 1:
                    patch.setattr(Path, "mkdir", no_room)
            try:
                made.train()
            except (OSError, SystemExit) as error:
                return str(error)
        return "nothing"

    class Best(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.best_global_step = 1  # Trainer has a barrier for it

    return {
        "callback": raised(f"{folder}/callback", [Told()] if rank == 0 else []),
        "folder": raised(f"{folder}/folder{rank}", []),
        "staging": raised(f"{folder}/staging", [], spoil=True),
    }


def test_ranks_agree_before_they_wait_for_each_other(tmp_path: Path) -> None:
    """A callback of one rank alone, a folder that is not shared, and one that a rank can't make."""
    for found in run_ranks(2, disagreeing, str(tmp_path)):
        assert "nothing" == found["callback"]
        assert "folder1 is not the folder that the first rank saves in (rank 1); use a folder" in found["folder"]
        assert "No space left" in found["staging"]
    assert (tmp_path / "callback" / "checkpoint-2").is_dir()
    assert not list(tmp_path.glob("folder*/checkpoint-*"))
