"""The command line of a run: every problem at once, with its place and what to do, and nothing written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch

from torchturbo.cli.train import run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    tiny.save(folder / "model")
    tiny.save(folder / "plain", template=None)
    tiny.write_jsonl(folder / "rows.jsonl", tiny.rows(8))
    return folder


def errors(capsys: pytest.CaptureFixture[str], words: list[str], status: int = 2) -> list[str]:
    """Run a command that fails and return its error lines; anything else on stderr fails the test."""
    capsys.readouterr()
    assert run(words) == status
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert all(line.startswith("error: ") for line in lines), captured.err
    return [line.removeprefix("error: ") for line in lines]


def good(material: Path, out: Path) -> list[str]:
    return [
        "--model_name_or_path", str(material / "model"), "--dataset", str(material / "rows.jsonl"), "--use_cpu",
        "--output_dir", str(out), "--max_steps", "1",
    ]  # fmt: skip


# ---- arguments ----


def test_all_that_is_wrong_with_the_arguments_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown names with the nearest, bad values, missing ones, and TorchTurbo's own."""
    config = tmp_path / "turbo.yaml"
    config.write_text("gbs: four\n")
    words = [
        "--tt_sp_siez",
        "2",
        "--tt_config",
        str(config),
        "--lerning_rate",
        "1",
        "--max_steps",
        "many",
        "--optim",
        "adamm",
        "train.yaml",
    ]

    lines = errors(capsys, words)

    expected = [
        "--tt_sp_siez",
        f"{config}:1:6: gbs",
        "--lerning_rate: unknown argument; did you mean --learning_rate?",
        "--max_steps: invalid int value: 'many'",
        "--optim: invalid choice",
        "--model_name_or_path: required, but not given",
        "--dataset: required, but not given",
        "--output_dir: required, but not given",
        "train.yaml: unexpected argument; a TorchTurbo configuration is given with --tt_config",
    ]
    for part in expected:
        assert sum(part in line for line in lines) == 1, (part, lines)
    assert len(lines) == len(expected)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--learning_r", "1"], "--learning_r: unknown argument; did you mean --learning_rate?"),
        (["--warmup_ratioo=0.1"], "--warmup_ratioo: unknown argument"),
        (["--evaluation_strategy", "no"], "--evaluation_strategy: unknown argument; it is --eval_strategy now"),
        (["--stage", "sft"], "--stage: unknown argument; remove it"),
        (["--template", "qwen"], "--template: unknown argument; remove it: the tokenizer's own chat template"),
        (["--packing", "perhaps"], "--packing: Truthy value expected"),
        (
            ["--per_device_train_batch_size", "0"],
            "--per_device_train_batch_size: expected a number of at least 1, got 0",
        ),
        (["--learning_rate", "nan"], "--learning_rate: expected a number of at least 0, got nan"),
        (["--adam_beta1", "2"], "--adam_beta1: expected 0 to 1, got 2"),
        (["--cutoff_len", "1"], "--cutoff_len: expected at least 2 tokens, got 1"),
        (["--fp16"], "--fp16: loss scaling for fp16 has no place in the engine; use bf16, or fp32"),
        (["--bf16_full_eval"], "--bf16_full_eval: it would cast the fp32 parameters"),
        (["--deepspeed", "ds.json"], "--deepspeed: DeepSpeed is another engine"),
        (["--use_liger_kernel"], "--use_liger_kernel: kernels have one owner"),
        (["--auto_find_batch_size"], "--auto_find_batch_size: it would change the micro-batch"),
        (
            ["--gradient_checkpointing_kwargs", "{x"],
            "--gradient_checkpointing_kwargs: expected a JSON object, got '{x'",
        ),
        (["--no_average_tokens_across_devices"], "--average_tokens_across_devices: the engine always counts"),
        (["--accelerator_config", '{"split_batches": true}'], "--accelerator_config: split_batches would divide"),
        (["--tt_plugin", "x.py"], "x.py: no such file; the path is taken from "),
        (["--logging_steps", "0"], "logging strategy"),
        (["--", "--tt_gbs", "2"], "--tt_gbs: unknown argument"),
    ],
)
def test_an_argument_that_is_wrong(
    words: list[str], line: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, with its place."""
    (found, *rest) = errors(capsys, [*good(material, tmp_path / "out"), *words])

    assert line in found
    assert rest == []
    assert not (tmp_path / "out").exists()


def test_args_files_are_not_read(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HfArgumentParser would read `<script>.args` next to the program without a word."""
    (tmp_path / "script.args").write_text("--max_steps 99")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py")])
    from torchturbo.train.commandline import read_command

    assert read_command(good(material, tmp_path / "out")).parsed.training["max_steps"] == 1


def test_help_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    """The framework's options and ours."""
    assert run(["--help"]) == 0

    text = capsys.readouterr().out
    for name in ("--model_name_or_path", "--cutoff_len", "--learning_rate", "--tt_mixed_precision"):
        assert name in text


# ---- files and folders ----


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"--model_name_or_path": "{folder}/modle"}, "there is no folder {folder}/modle; did you mean {folder}/model?"),
        ({"--model_name_or_path": "{folder}"}, "{folder} is no model: no config.json in it; use {folder}/"),
        ({"--model_name_or_path": "{folder}/rows.jsonl"}, "rows.jsonl is a file, expected the folder of a model"),
        ({"--model_name_or_path": "nobody/nothing"}, "nobody/nothing is no local folder, and the Hub did not give it"),
        ({"--dataset": "{folder}/row.jsonl"}, "--dataset: there is no file {folder}/row.jsonl; did you mean"),
        ({"--output_dir": "{folder}/rows.jsonl"}, "--output_dir: {folder}/rows.jsonl is a file, expected a folder"),
        ({"--output_dir": "{folder}/rows.jsonl/x"}, "--output_dir: {folder}/rows.jsonl is a file, expected a folder"),
        (
            {"--model_name_or_path": "{folder}/plain"},
            "rows.jsonl:1: is a conversation, but the model's tokenizer has no chat template",
        ),
        ({"--chat_template": "{folder}/none.jinja"}, "--chat_template: {folder}/none.jinja can't be read"),
        ({"--tokenizer_name": "{folder}/none"}, "--tokenizer_name: there is no folder {folder}/none"),
        ({"--cutoff_len": "3"}, "--dataset: none of its 8 rows holds a token to train on; raise --cutoff_len"),
        ({"--eval_strategy": "steps"}, "--eval_strategy: there is nothing to evaluate on; give --eval_dataset"),
        ({"--eval_dataset": "{folder}/none.jsonl"}, "--eval_dataset: there is no file"),
        ({"--resume_from_checkpoint": "true"}, "--resume_from_checkpoint: no complete checkpoint in"),
    ],
)
def test_a_file_that_is_wrong(
    change: dict[str, str], line: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found before a weight is read, on one line, and nothing is written."""
    words = [*good(material, tmp_path / "out")]
    for name, value in change.items():
        words += [name, value.replace("{folder}", str(material))]

    (found, *rest) = errors(capsys, words)

    assert line.replace("{folder}", str(material)) in found
    assert rest == []
    assert not (tmp_path / "out").exists()


def test_broken_models_are_told_apart(material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By what is broken in them."""
    import shutil

    cases = {
        "config.json": ("{", "config.json: can't be read as JSON"),
        "tokenizer.json": ("{", "no usable tokenizer"),
        "model.safetensors": ("x", "model.safetensors is broken: "),
    }
    for name, (content, words) in cases.items():
        folder = Path(shutil.copytree(material / "model", tmp_path / name))
        (folder / name).write_text(content)
        (found,) = errors(capsys, [*good(material, tmp_path / "out"), "--model_name_or_path", str(folder)])
        assert words in found
    (tmp_path / "model.safetensors" / "model.safetensors").unlink()
    (found,) = errors(
        capsys, [*good(material, tmp_path / "out"), "--model_name_or_path", str(tmp_path / "model.safetensors")]
    )
    assert "holds no weights" in found
    config = tmp_path / "config.json" / "config.json"
    config.write_text('{"model_type": "vit"}')
    (found,) = errors(capsys, [*good(material, tmp_path / "out"), "--model_name_or_path", str(config.parent)])
    assert "vit is no causal language model" in found
    config.write_text('{"model_type": "nothing"}')
    (found,) = errors(capsys, [*good(material, tmp_path / "out"), "--model_name_or_path", str(config.parent)])
    assert "nothing" in found


def test_a_tokenizer_of_another_model(material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its ids would index past the embeddings, deep inside the first step."""
    tiny.save(tmp_path / "small", vocab_size=50)

    (found,) = errors(capsys, [*good(material, tmp_path / "out"), "--model_name_or_path", str(tmp_path / "small")])

    assert "the model has 50; they belong to different models" in found


def test_problems_of_several_files_come_together(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model, rows, folder and batch."""
    bad = tiny.write_jsonl(tmp_path / "bad.jsonl", [{"text": 1}, {"x": 1}])
    words = [
        *good(material, material / "rows.jsonl"),
        "--model_name_or_path",
        str(material / "none"),
        "--dataset",
        str(bad),
    ]

    assert len(errors(capsys, words)) == 4


class Leaky(torch.nn.Module):
    """A model whose rows see everything before them: each position's logits are the sum of all tokens up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(512, 8)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table(input_ids).cumsum(1))


def test_packing_is_refused_where_rows_would_see_each_other(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on the model itself, before anything is written."""
    monkeypatch.setattr("torchturbo.train.run.load_model", lambda arguments, config, source: leaky)
    leaky = Leaky()
    leaky.config = SimpleNamespace(use_cache=True)

    assert run([*good(material, tmp_path / "out"), "--packing"]) == 2
    assert "--packing: Leaky lets packed rows see each other (logits move by " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_options_and_paths_are_told_together(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What each layer says wrong, what clashes, and what is not there."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    words = ["--tt_sp_siez", "2", "--fp16", "--lerning_rate", "3", "--dataset", str(tmp_path / "no")]
    words += ["--model_name_or_path", str(tmp_path / "none"), "--output_dir", str(blocked / "out")]

    lines = errors(capsys, words)

    places = ["--tt_sp_siez", "--lerning_rate", "--fp16"]
    places += ["--model_name_or_path", "--dataset", "--output_dir"]
    assert [line.partition(":")[0] for line in lines] == places


def test_a_schedule_that_cannot_be_made_is_told_at_start(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not after the weights are read."""
    (line,) = errors(capsys, [*good(material, tmp_path / "out"), "--lr_scheduler_type", "cosine_with_min_lr"])

    assert line.startswith("--lr_scheduler_type: ")
    assert "min_lr" in line
    assert not (tmp_path / "out").exists()


LATE = [
    (["--optim", "adamw_bnb_8bit"], "--optim: "),
    (["--optim_args", "x"], "--optim_args: adamw_torch_fused: not enough values to unpack"),
    (["--report_to", "wandb"], "--report_to: the package of wandb is not installed; pip install wandb"),
    (["--report_to", "wandbb"], "--report_to: unknown logger 'wandbb'; did you mean wandb?"),
    (
        ["--attn_implementation", "flex_attention"],
        "--attn_implementation: flex_attention has no backward pass on a CPU",
    ),
    (["--output_dir", "~nobody-here/x"], "--output_dir: ~nobody-here/x begins with a user who has no home folder"),
    (["--dataset", "~nobody-here/x.jsonl"], "--dataset: ~nobody-here/x.jsonl begins with a user"),
    (["--eval_dataset", "~nobody-here/x.jsonl"], "--eval_dataset: ~nobody-here/x.jsonl begins with a user"),
    (["--model_name_or_path", "~nobody-here/x"], "--model_name_or_path: ~nobody-here/x begins with a user"),
    (["--tokenizer_name", "~nobody-here/x"], "--tokenizer_name: ~nobody-here/x begins with a user"),
    (["--chat_template", "~nobody-here/x"], "--chat_template: ~nobody-here/x begins with a user"),
    (["--resume_from_checkpoint", "~nobody-here/x"], "--resume_from_checkpoint: ~nobody-here/x begins with a user"),
    (["--output_dir", "x" * 300], "--output_dir: " + "x" * 60 + "... can't be used: File name too long"),
    (["--dataset", "x" * 300 + ".jsonl"], "--dataset: " + "x" * 60 + "... can't be used: File name too long"),
    (["--model_name_or_path", "x" * 300], "--model_name_or_path: " + "x" * 60 + "... can't be used"),
    (["--resume_from_checkpoint", "x" * 300], "--resume_from_checkpoint: " + "x" * 60 + "... can't be used"),
]


@pytest.mark.parametrize(("words", "line"), LATE, ids=[" ".join(words)[:40] for words, _ in LATE])
def test_what_would_fail_late_is_told_at_start(
    words: list[str], line: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packages, devices, and paths that no operating system takes: one line with its place, status 2."""
    (found,) = errors(capsys, [*good(material, tmp_path / "out"), *words])
    assert found.startswith(line)
    assert not (tmp_path / "out").exists()


def test_unusable_paths_are_told_with_all_else(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each once."""
    words = ["--output_dir", "~nobody-here", "--dataset", "x" * 300 + ".jsonl", "--tt_gbs", "x", "--max_steps", "many"]
    lines = errors(capsys, [*good(material, tmp_path / "out"), *words])
    places = ["--dataset", "--max_steps", "--output_dir", "--tt_gbs"]
    assert places == sorted(line.partition(":")[0] for line in lines)


@pytest.mark.parametrize("text", ["\\ud800", "a\\uDFFFb"])
def test_half_a_character_is_told_with_its_line(
    text: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON can write it, a tokenizer would end the run; a whole pair is a character."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"text": "\\ud83d\\ude00"}}\n{{"prompt": "x", "completion": "{text}"}}\n')
    (line,) = errors(capsys, [*good(material, tmp_path / "out"), "--dataset", str(rows)])
    assert line.startswith(f"{rows}:2: ")
    assert line.endswith("is half of a surrogate pair and stands for no character")


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_rows_longer_than_the_learned_positions(
    kind: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of positions has an end; rows that fit are trained on, whatever cutoff_len allows."""
    from transformers import AutoModelForCausalLM, GPT2Config, OPTConfig

    sizes = {"vocab_size": 400, "max_position_embeddings": 64}
    made = {
        "gpt2": GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, vocab_size=400, bos_token_id=0, eos_token_id=0),
        "opt": OPTConfig(hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16, **sizes),
    }[kind]  # fmt: skip
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "' + "ab" * 200 + '"}\n')
    words = [
        *good(material, tmp_path / "out"),
        "--model_name_or_path",
        str(folder),
        "--dataset",
        str(rows),
        "--max_steps",
        "1",
    ]
    (line,) = errors(capsys, words)
    assert line.startswith("--cutoff_len: a row of ")
    assert line.endswith(" is longer than the 64 positions that the model has learned; use --cutoff_len 64")
    assert run([*words, "--cutoff_len", "64"]) == 0


def test_attention_that_is_not_installed_is_told_by_its_option(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to use instead."""
    assert run([*good(material, tmp_path / "out"), "--attn_implementation", "flash_attention_2"]) == 2

    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: --attn_implementation: flash_attention_2: ")
    assert line.endswith("; install it, or use sdpa")


# ---- the process ----


def test_an_unexpected_error_is_one_line(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its type and message are never hidden; the traceback is there for who asks."""
    import torchturbo.train.run

    def broken(job: object) -> None:
        raise RuntimeError("the machine\nis on fire")

    monkeypatch.setattr(torchturbo.train.run, "_clear_output", broken)
    assert run(good(material, tmp_path / "out")) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "error: RuntimeError: the machine is on fire; set TORCHTURBO_DEBUG=1 to see where it happened"

    monkeypatch.setenv("TORCHTURBO_DEBUG", "1")
    assert run(good(material, tmp_path / "out")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_rank_that_lost_another_says_so(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause is on the other rank; this one's own words only follow from it."""
    from torchturbo.cli.train import _report

    monkeypatch.setenv("RANK", "0")
    _report(RuntimeError("gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert "another rank" not in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    _report(RuntimeError("gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("error: rank 0: another rank ended, its message says why (RuntimeError: gloo/")


def launch(words: list[str], **environment: str) -> subprocess.Popen[str]:
    code = "import sys; from torchturbo.cli.train import run; sys.exit(run(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip


def test_ctrl_c_prints_one_line(material: Path, tmp_path: Path) -> None:
    """Status 130; the last checkpoint is whole and the run goes on from it."""
    words = [
        *good(material, tmp_path / "out"),
        "--max_steps",
        "100000",
        "--logging_steps",
        "1",
        "--save_steps",
        "5",
        "--save_total_limit",
        "2",
    ]
    process = launch(words)
    deadline = time.monotonic() + 100
    while not list((tmp_path / "out").glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert output.rstrip().endswith("interrupted; the last checkpoint is as it was")
    assert (tmp_path / "out" / "loss_curve.png").is_file()
    for folder in (tmp_path / "out").glob("checkpoint-*"):
        assert (folder / "torchturbo_run.json").is_file()
        assert (folder / "trainer_state.json").is_file()


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("no torch", name="torch")

sys.meta_path.insert(0, NoTorch())
from torchturbo.cli.train import run

sys.exit(run(sys.argv[1:]))
"""


def test_own_problems_are_told_without_torch() -> None:
    """A mistyped option is told also where torch is not installed; where nothing is wrong its absence is."""
    done = [
        subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, cwd=ROOT)
        for words in (["--tt_sp_siez", "2"], ["--tt_gbs", "2"])
    ]

    assert [process.returncode for process in done] == [2, 2]
    (first,), (second,) = (process.stderr.splitlines() for process in done)
    assert "--tt_sp_siez" in first
    assert second == "error: torch is not installed; pip install 'torchturbo[train]'"
