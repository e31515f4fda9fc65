"""`torchturbo plan`: what it prints, its JSON, its exit status, and that it finds what the launch would find."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from launching import python

from torchturbo.plan.examine import ACCUMULATION, MICRO_BATCH

Run = Callable[..., Any]


# ---- without a model ----


def test_mesh_and_batch_need_no_library(tmp_path: Path) -> None:
    """TorchTurbo's own options alone: neither torch nor transformers is imported, for any number of ranks."""
    code = (
        "import sys; from torchturbo.cli.main import main\n"
        "assert main(['plan', '--world_size', '16384', '--tt_sp_size', '4', '--tt_gbs', '8192']) == 0\n"
        "assert main(['plan', '--help']) == 0\n"
        "assert not {'torch', 'transformers', 'jsonschema'} & set(sys.modules)"
    )
    done = python("-c", code, cwd=tmp_path, env={"COLUMNS": "80"})
    assert (0, "") == (done.returncode, done.stderr)
    assert "plan for 16,384 ranks on 2,048 nodes of 8, no errors" in done.stdout
    for line in ("dp    4,096       4  0, 4, 8 … 16380  yes", "sp        4   4,096  0-3              no"):
        assert line in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_defaults_are_those_of_transformers() -> None:
    """A plan without training options assumes what TrainingArguments would."""
    transformers = pytest.importorskip("transformers")
    fields = transformers.TrainingArguments.__dataclass_fields__
    assert fields["per_device_train_batch_size"].default == MICRO_BATCH
    assert fields["gradient_accumulation_steps"].default == ACCUMULATION


def test_json_keys_are_those_of_the_guide(plan: Run) -> None:
    """Keys stay: a document without a model has the same, with null."""
    done = plan("--world_size", 12, "--tt_sp_size", 2, "--format", "json")
    assert (0, "") == (done.status, done.err)
    tree = done.json
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "plan.md").read_text("utf-8")
    assert [] == [key for key in _keys(tree) if f"`{key}`" not in guide]
    assert (12, 2, None, None) == (tree["world_size"], tree["nodes"], tree["model"], tree["memory"])
    assert [("dp", 6), ("sp", 2), ("ep_fsdp", 12), ("ep", 1)] == [(row["axis"], row["size"]) for row in tree["mesh"]]


def _keys(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        return [*tree, *(key for value in tree.values() for key in _keys(value))]
    return [key for value in tree for key in _keys(value)] if isinstance(tree, list) else []


def test_a_mesh_that_can_not_be(plan: Run) -> None:
    """Both axes and the batch, each with its factors and the nearest values, in the launch's own words."""
    done = plan("--world_size", 12, "--tt_sp_size", 5, "--tt_ep_size", 7)
    assert 2 == done.status
    assert [
        "--tt_sp_size: parallel_plan.sp_size: 5 ranks share a sequence, but dp_size = world_size / sp_size"
        " = 12 / 5 = 2.4 is no whole number; use 4 or 6, or 10 or 15 ranks",
        "--tt_ep_size: parallel_plan.ep_size: 7 ranks share a set of experts, but ep_fsdp_size = world_size / ep_size"
        " = 12 / 7 = 1.71429 is no whole number; use 6 or 12, or 7 or 14 ranks",
    ] == done.errors
    assert "error: the launch would stop at 2 errors: the plan tells them\n" == done.err
    assert "2 errors" in done.out and "\nmesh" not in done.out and max(map(len, done.out.splitlines())) <= 80
    assert done.out.endswith("\n\nnot worked out because of the errors: mesh, batch\n")
    done = plan("--world_size", 12, "--tt_gbs", 7, "--format", "json")
    assert (2, "", ["gbs"]) == (done.status, done.err, [error["key"] for error in done.json["errors"]])


def test_the_configuration_is_read_as_a_launch_reads_it(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, environment and options; idle keys are warned of, another engine's variables refused."""
    Path("turbo.yaml").write_text("parallel_plan: {sp_size: 2}\nloss_chunk: {chunk_size: 8}\n")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("TORCH_TURBO_GBS", "16")
    done = plan("--world_size", 8, "--tt_config", "turbo.yaml", "--format", "json")
    assert 2 == done.status and ["ACCELERATE_USE_FSDP"] == [error["place"] for error in done.json["errors"]]
    assert (4, 16) == (done.json["batch"]["accumulation"], done.json["batch"]["gbs"])
    assert "turbo.yaml:2:26: loss_chunk.chunk_size: set but not read" in done.json["warnings"][0]["message"]
    assert 2 == plan("--world_size", 8, "--tt_gbs", 0).status


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "error: --world_size: required, but not given; say how many ranks the launch would have"),
        (("--world_size", "0"), "error: --world_size: expected a whole number from 1 to 1,000,000, got '0'"),
        (("--world_size",), "error: --world_size: expected a value"),
        (("--world_size", "8", "--memory", "80 apples"), "error: --memory: expected a size such as 80GiB or 64GB, got '80 apples'"),
        (
            ("--world_size=8", "--model", "a", "--model_name_or_path", "b"),
            "error: --model: is --model_name_or_path, which is given too; leave one of them out",
        ),
    ],
)  # fmt: skip
def test_its_own_options(plan: Run, words: tuple[str, ...], line: str) -> None:
    """Each with what is expected."""
    done = plan(*words)
    assert (2, "", [line]) == (done.status, done.out, done.err.splitlines())


# ---- with a model ----


def test_a_whole_training_command_line(plan: Run, models: Path) -> None:
    """The word is replaced, nothing else: batch and length are the training's, the dataset gives the steps."""
    tiny.write_jsonl(Path("rows.jsonl"), tiny.rows(50))
    line = [
        "--model_name_or_path",
        models / "moe",
        "--dataset",
        "rows.jsonl",
        "--output_dir",
        "out",
        "--cutoff_len",
        64,
    ]
    line += ["--per_device_train_batch_size", 2, "--num_train_epochs", 2, "--tt_ep_size", 2]
    done = plan(*line, "--world_size", 4, "--memory", "1GiB")
    assert (0, "") == (done.status, done.err)
    assert not Path("out").exists()
    assert max(map(len, done.out.splitlines())) <= 80
    for text in (
        "plan for 4 ranks, no errors",
        "sequences       8  in one optimizer step",
        "steps          14  of the whole run",
        "Qwen3MoeForCausalLM: 58,000 parameters, all of them trained, 3 layers, fp32",
        "optimizer state   113 KiB  two fp32 moments",
        "attention mask      8 KiB",
        "fits into 1 GiB",
        "experts 1  experts 2",
        "layer 1    experts 1, layer 2",
    ):
        assert text in done.out, done.out
    tree = plan(*line, "--world_size", 4, "--format", "json").json
    memory = tree["memory"]
    parts = ("parameters", "gradients", "buffers", "gathered", "reducing", "activations", "attention_mask")
    assert memory["total"] == sum(memory[part] for part in parts) + memory["optimizer"]["most"]
    first = tree["prefetch"]["units"][0]
    assert {
        "unit": "model.layers.0",
        "forward": ["model.layers.0.mlp.experts", "model.layers.1"],
        "backward": ["model.layers.0.mlp.experts"],
    } == first
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "plan.md").read_text("utf-8")
    assert [] == [key for key in _keys(tree) if f"`{key}`" not in guide]


def test_everything_wrong_is_told_at_once(plan: Run, models: Path) -> None:
    """Options, numbers, the model's heads, the dataset: each by the check of the launch, in one go."""
    Path("bad.jsonl").write_text('{"text": 3}\n')
    done = plan(
        "--world_size", 12, "--model", models / "dense", "--dataset", "bad.jsonl", "--fp16", "true", "--warmup_ratio", 1,
        "--tt_sp_size", 3, "--tt_gbs", 7, "--report_to", "nobody", "--tt_enable_mtp", "true",
    )  # fmt: skip
    assert 2 == done.status
    for text in (
        "--fp16",
        "--warmup_ratio",
        "--report_to",
        "gbs: accumulation",
        "attention heads",
        "mtp.enabled",
    ):
        assert any(text in error for error in done.errors), done.out
    assert len(set(done.errors)) == len(done.errors)
    assert done.out.endswith("not worked out because of the errors: batch, model, memory\n")


def test_errors_of_one_kind_do_not_hide_those_of_another(plan: Run, models: Path) -> None:
    """A batch or a model that can't be leaves the files to be read, a mistyped option the sizes of the mesh."""
    Path("bad.jsonl").write_text('{"text": 3}\n')
    for words in (("--tt_gbs", 3, "--model", models / "dense"), ("--model", "./nowhere"), ()):
        for file, told in (("none.jsonl", "no file none.jsonl"), ("bad.jsonl", "bad.jsonl:1")):
            done = plan("--world_size", 2, *words, "--dataset", file)
            assert told in str(done.errors) and bool(words) + 1 == len(done.errors), done.out
    # The dataset's tokens are looked at with a wrong batch, too.
    tiny.write_jsonl(Path("rows.jsonl"), [{"prompt": "x" * 99, "completion": "y"}])
    done = plan(
        "--world_size", 2, "--tt_gbs", 3, "--model", models / "dense", "--dataset", "rows.jsonl", "--cutoff_len", 8
    )
    assert ["gbs", "--dataset"] == [error.split(": ")[1 if "gbs" in error else 0] for error in done.errors]
    line = ("--world_size", 8, "--tt_ep_size", 3, "--tt_spsize", 2, "--leraning_rate", 1, "--tt_gbs", 3)
    done = plan(*line)
    assert ["--leraning_rate", "--tt_spsize", "--tt_ep_size"] == [error.partition(":")[0] for error in done.errors]


def test_a_mistyped_model_is_told_without_a_wait(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that only the Hub could have is asked for once, and a folder with a name like it is offered."""
    from torchturbo.train import model

    asked = []

    def unreachable() -> None:
        asked.append(1)
        raise OSError("Name or service not known")

    monkeypatch.setattr(model, "get_session", unreachable)
    monkeypatch.setattr(model.constants, "HF_HUB_OFFLINE", False)
    Path("model").mkdir()
    done = plan("--world_size", 2, "--model", "mo")
    assert (2, [1]) == (done.status, asked)
    assert [
        "--model_name_or_path: mo is no local folder, and https://huggingface.co can't be reached: "
        "Name or service not known; did you mean the folder model?"
    ] == done.errors


def test_sequences_longer_than_the_model_s_positions_are_warned_of(plan: Run, models: Path) -> None:
    """The default length counts, unless rows that were read are shorter."""
    tiny.write_jsonl(Path("rows.jsonl"), tiny.rows(8))
    line = ("--world_size", 1, "--model", models / "dense", "--format", "json")
    text = "a sequence can have 2,048 tokens, and the model was made for 128 positions"
    assert [("--cutoff_len", text)] == [(one["place"], one["message"]) for one in plan(*line).json["warnings"]]
    for more in (("--cutoff_len", 128), ("--dataset", "rows.jsonl")):
        assert [] == plan(*line, *more).json["warnings"]


def test_axes_of_experts_are_shown_where_there_are_experts(plan: Run, models: Path) -> None:
    """A dense model has none to divide; JSON tells every axis."""
    for name, rows in (("dense", 0), ("moe", 2)):
        line = ("--world_size", 2, "--cutoff_len", 64, "--model", models / name)
        assert rows == len([row for row in plan(*line).out.splitlines() if row.startswith("  ep")])
        assert 4 == len(plan(*line, "--format", "json").json["mesh"])


def test_a_dataset_is_checked_row_by_row(plan: Run, models: Path) -> None:
    """As the launch does before it reads a weight."""
    Path("bad.jsonl").write_text('{"text": 3}\n')
    done = plan("--world_size", 2, "--model", models / "dense", "--dataset", "bad.jsonl")
    assert 2 == done.status and "bad.jsonl:1" in done.out


def test_a_configuration_is_model_enough(plan: Run, models: Path) -> None:
    """No weight is read, so a folder without weights does; the launch's complaint is a warning here."""
    done = plan(
        "--world_size",
        2,
        "--model",
        models / "config",
        "--format",
        "json",
        "--per_device_train_batch_size",
        1,
        "--cutoff_len",
        128,
    )
    assert (0, 0) == (done.status, done.json["memory"]["attention_mask"])
    assert ["holds no weights" in warning["message"] for warning in done.json["warnings"]] == [True]
    done = plan("--world_size", 2, "--model", "./nowhere")
    assert (2, ["--model_name_or_path: there is no folder nowhere"]) == (done.status, done.errors)


def test_weight_files_are_held_against_the_model(plan: Run, models: Path, tmp_path: Path) -> None:
    """By their headers, where the run would read slices of them; and the tokenizer is the run's."""
    folder = tmp_path / "wrong"
    shutil.copytree(models / "dense", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"intermediate_size": 64}))
    (folder / "tokenizer.json").write_text("{}")
    done = plan("--world_size", 2, "--model", folder)
    assert 2 == done.status
    assert "model.layers.0.mlp.down_proj.weight as [32, 48], the model expects [32, 64]" in str(done.errors)
    assert "no usable tokenizer" in str(done.errors)
    assert "model.layers.0.mlp" not in plan("--world_size", 1, "--model", folder).out  # one process reads it whole


def test_a_checkpoint_that_can_not_be_resumed(plan: Run, models: Path) -> None:
    """Found before the launch, beside everything else; rows and checkpoint are compared where both are named."""
    tiny.write_jsonl(Path("rows.jsonl"), tiny.rows(8))
    line = ("--world_size", 2, "--model", models / "dense", "--dataset", "rows.jsonl", "--output_dir", "out")
    done = plan(*line, "--resume_from_checkpoint", "true")
    assert 2 == done.status and "--resume_from_checkpoint" in done.out
    Path("out/checkpoint-1").mkdir(parents=True)
    Path("out/checkpoint-1/trainer_state.json").write_text("{}")
    assert "--output_dir" in plan(*line).out
    done = plan("--world_size", 2, "--model", models / "dense", "--dataset", "rows.jsonl", "--tt_resume_allow", "gbs")
    assert "says nothing to a run that resumes nothing" in done.out


def test_a_shell_inside_a_launch_waits_for_nobody(plan: Run, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables of torchrun around, TrainingArguments would join its process group."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    from torchturbo.plan import training

    def make(*args: Any, **kwargs: Any) -> Any:
        assert "WORLD_SIZE" not in os.environ and "RANK" not in os.environ
        return make_training_arguments(*args, **kwargs)

    make_training_arguments = training.make_training_arguments
    monkeypatch.setattr(training, "make_training_arguments", make)
    assert 0 == plan("--world_size", 2, "--model", models / "config").status
    assert "8" == os.environ["WORLD_SIZE"]


# ---- advice ----


def test_too_little_memory_is_warned_of_with_remedies(plan: Run, models: Path) -> None:
    """What helps depends on what is large: here activations."""
    done = plan("--world_size", 2, "--model", models / "dense", "--memory", "1M")
    assert 0 == done.status and "does not fit into 1 MiB" in done.out
    told = " ".join(done.out.split())
    assert "a smaller --per_device_train_batch_size (with a larger gbs) or loss_chunk.enabled or a larger" in told
    small = ("--cutoff_len", 2, "--per_device_train_batch_size", 1, "--memory", "10k")
    tree = plan("--world_size", 2, "--model", models / "dense", "--format", "json", *small).json
    assert tree["memory"]["fits"] is False
    assert "more ranks than 2 or backend_config.cpu_offload" in [warning["remedy"] for warning in tree["warnings"]]


def test_hybrid_sharding_is_advised_where_it_would_pay(plan: Run, models: Path) -> None:
    """Several nodes, each large enough for a replica; not on one node, and not where a replica would not fit."""
    line = ("--model", models / "dense", "--gradient_accumulation_steps", 4, "--memory", "1GiB", "--cutoff_len", 32)

    def advised(*words: object) -> bool:
        return any(
            "hybrid sharding would pay" in one["message"]
            for one in plan(*line, "--format", "json", *words).json["warnings"]
        )

    assert advised("--world_size", 16)
    assert not advised("--world_size", 8)
    tree = plan(*line, "--world_size", 16, "--format", "json").json
    barely = tree["memory"]["total"] + 1024
    assert not advised("--world_size", 16, "--memory", barely)


def test_offload_moves_state_to_the_host(plan: Run, models: Path) -> None:
    """All of it, or a share of the optimizer's."""
    line = ("--world_size", 2, "--model", models / "dense", "--format", "json", "--tt_config", "turbo.yaml")

    def host(mode: str, fraction: float) -> tuple[int, Any]:
        offload = {"enabled": True, "mode": mode, "optimizer_memory_fraction": fraction}
        Path("turbo.yaml").write_text(json.dumps({"backend_config": {"cpu_offload": offload}}))
        memory = plan(*line).json["memory"]
        return memory["host"]["most"], memory

    everything, memory = host("all", 1)
    assert memory["parameters"] + memory["gradients"] + memory["optimizer"]["most"] == everything
    half, memory = host("optimizer", 0.5)
    assert half == pytest.approx(memory["optimizer"]["most"] / 2, rel=0.1)
    assert host("optimizer", 0)[0] == 0
