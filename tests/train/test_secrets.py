"""What other programs keep in variables and tokens never turns up in what is printed or written."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import tiny
import torch

from torchturbo.adapters.base import environment_clashes
from torchturbo.adapters.hf_arguments import Unsaved

ROOT = Path(__file__).parents[2]
CANARY = "canary-5f0c"
NAMES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "WANDB_API_KEY", "WANDB_NAME", "COMET_API_KEY", "NEPTUNE_API_TOKEN", "CLEARML_API_SECRET_KEY", "MLFLOW_TRACKING_PASSWORD",
    "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GITHUB_TOKEN", "GH_TOKEN", "CI_JOB_TOKEN", "AZURE_CLIENT_SECRET",
    "GOOGLE_APPLICATION_CREDENTIALS", "DATABASE_URL", "REDIS_URL", "SSH_AUTH_SOCK", "SLACK_WEBHOOK", "SENTRY_DSN",
    "PASSWORD", "SECRET", "TORCH_TURBOX", "TORCH_TURBO_TOKEN", "TORCHTURBO_TOKEN", "MY_TORCH_TURBO_KEY",
    "ACCELERATE_TOKEN", "TRACKIO_TOKEN", "NPM_TOKEN", "PIP_EXTRA_INDEX_URL",
)  # fmt: skip
LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
"""Variables that an error names; their values are another program's all the same."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows, a good configuration and a bad one."""
    folder = tmp_path_factory.mktemp("secrets")
    tiny.save(folder / "model")
    tiny.write_jsonl(folder / "rows.jsonl", tiny.rows(4))
    (folder / "good.yaml").write_text("gbs: 2\n")
    (folder / "bad.yaml").write_text("gbs: two\nnothing: 1\n")
    (folder / "broken.py").write_text(
        "import torchturbo.train.run as run\nfrom torchturbo.cli.main import main\nimport sys\n"
        "def fail(*_): raise RuntimeError('no luck')\nrun.load_model = fail\nsys.exit(main(sys.argv[1:]))\n"
    )
    return folder


def train_words(*words: str) -> list[str]:
    return [
        "train", "--model_name_or_path", "model", "--dataset", "rows.jsonl", "--output_dir", "out", "--max_steps", "1",
        "--per_device_train_batch_size", "2", "--save_steps", "1", "--use_cpu", *words,
    ]  # fmt: skip


def run(folder: Path, start: Sequence[str], variables: Mapping[str, str], status: int) -> str:
    """Run a command with the canary in many variables; return what it printed."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    own = {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TORCHTURBO_DEBUG": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, *start], cwd=folder, env={**dict.fromkeys(NAMES, CANARY), **kept, **own, **variables},
        capture_output=True, text=True,
    )  # fmt: skip
    assert status == done.returncode, done.stderr
    return done.stdout + done.stderr


def assert_nothing_of(canary: str, printed: str, folder: Path) -> None:
    assert canary not in printed
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [] == [path for path in files if canary.encode() in path.read_bytes()]


MODULE = ["-m", "torchturbo"]
COMMAND_LINES: dict[str, tuple[list[str], int]] = {
    "show": ([*MODULE, "config", "show", "--tt_config", "good.yaml"], 0),
    "show, wrong": ([*MODULE, "config", "show", "--tt_config", "bad.yaml"], 2),
    "explain": ([*MODULE, "config", "explain", "gbs"], 0),
    "validate": ([*MODULE, "config", "validate", "good.yaml", "bad.yaml"], 1),
    "init": ([*MODULE, "config", "init", "new.yaml"], 0),
    "train": ([*MODULE, *train_words()], 0),
    "train, refused": ([*MODULE, *train_words("--tt_gbs", "x", "--learning_rate", "-1")], 2),
    "train, failing": (["broken.py", *train_words("--output_dir", "failed")], 1),
    "doctor": ([*MODULE, "doctor"], 0),
    "quickstart, refused": ([*MODULE, "quickstart", "--steps", "0"], 2),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_no_variable_of_others_is_printed_or_written(name: str, folder: Path) -> None:
    """Neither in output, tracebacks and warnings, nor in configurations, records and Trainer's own files."""
    words, status = COMMAND_LINES[name]
    printed = run(folder, words, {}, status)
    assert_nothing_of(CANARY, printed, folder)
    if name == "train, failing":
        assert "Traceback" in printed and "no luck" in printed
    if name == "train":
        assert (folder / "out" / "checkpoint-1" / "training_args.bin").is_file()


def test_the_values_of_launchers_variables_are_not_printed(folder: Path) -> None:
    """The error names the variables alone."""
    printed = run(folder, [*MODULE, *train_words()], dict.fromkeys(LAUNCHERS, CANARY), 2)
    assert CANARY not in printed
    assert all(f"error: {name}: its value: " in printed for name in LAUNCHERS)


@pytest.mark.parametrize("value", ["true", "BF16", "fp16", "32", "YES"])
def test_switches_formats_and_counts_are_shown(value: str) -> None:
    """They help, and hide nothing."""
    (problem,) = environment_clashes({"ACCELERATE_MIXED_PRECISION": value})
    assert problem.message.startswith(f"{value!r}: ")


def test_ranks_are_numbers(folder: Path) -> None:
    """Libraries would say what the variable holds, from deep inside."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    printed = run(folder, [*MODULE, *train_words("--output_dir", "failed")], dict.fromkeys(names, CANARY), 2)
    assert CANARY not in printed
    assert all(f"error: {name}: expected a number, as torchrun sets it" in printed for name in names)


def test_a_typed_token_is_not_saved(folder: Path) -> None:
    """Trainer pickles its arguments into each checkpoint, the token for the Hub among them."""
    token = "hf_canary77"
    printed = run(folder, [*MODULE, *train_words("--output_dir", "token", "--hub_token", token)], {}, 0)
    assert_nothing_of(token, printed, folder)
    args = torch.load(folder / "token" / "training_args.bin", weights_only=False)
    assert ("", 1) == (args.hub_token, args.max_steps)


def test_a_text_that_is_not_saved_is_itself_otherwise() -> None:
    """In requests, in comparisons and in copies."""
    token = Unsaved("secret")
    assert "secret" == token == copy.copy(token) == copy.deepcopy({"token": token})["token"]
    assert "Bearer secret" == f"Bearer {token}"
    assert isinstance(token, str)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert "" == pickle.loads(pickle.dumps(token, protocol))


def test_quickstart_shows_no_password_of_the_package_index(folder: Path) -> None:
    """Its download is pip's, whose index may be given with a password in its address."""
    address = f"http://user:{CANARY}@127.0.0.1:9/simple"
    variables = {"PIP_INDEX_URL": address, "PIP_EXTRA_INDEX_URL": "", "PIP_RETRIES": "0", "PIP_TIMEOUT": "1"}
    printed = run(folder, [*MODULE, "quickstart", "--output_dir", "quick"], variables, 1)
    assert "could not download" in printed
    assert_nothing_of(CANARY, printed, folder)
