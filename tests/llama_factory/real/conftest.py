"""LLaMA-Factory itself, its own demo data, a tiny model, and runs of it with and without the engine in one process."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import yaml
from launching import said

from torchturbo.engine.args import set_torchturbo_args

SDIST = "LLAMAFACTORY_SDIST"
"""Variable that names the source distribution, in which the demo data is: its wheel has none."""
STOCK = {"use_cpu": True, "dataloader_pin_memory": False}


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``data/`` and ``model/``."""
    folder = tmp_path_factory.mktemp("material")
    with tarfile.open(os.environ[SDIST]) as archive:
        for member in archive:
            _, _, name = member.name.partition("/")
            if name.startswith("data/") and name.endswith((".json", ".txt")) and "mllm" not in name:
                member.name = name
                archive.extract(member, folder, filter="data")
    tiny.save(folder / "model")
    return folder


class Done(NamedTuple):
    """What a finished run left."""

    trainer_args: Any
    model: Any
    history: list[dict[str, Any]]
    output: Path

    @property
    def steps(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm by step, to five decimals."""
        return {
            entry["step"]: (round(entry["loss"], 5), round(entry["grad_norm"], 5))
            for entry in self.history
            if "loss" in entry
        }


def spy() -> Any:
    """Return a callback that keeps what it sees at the end of a training."""
    from transformers import TrainerCallback

    class Spy(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.args, self.model = args, model

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.history = state.log_history

    return Spy()


@pytest.fixture
def settings(material: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a training file, with changes, and returns its path."""

    def write(name: str = "train.yaml", **changes: Any) -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(base_settings(material, tmp_path / "out") | changes), encoding="utf-8")
        return path

    return write


def base_settings(material: Path, output: Path) -> dict[str, Any]:
    return {
        "model_name_or_path": str(material / "model"), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "identity", "dataset_dir": str(material / "data"), "template": "chatml", "cutoff_len": 64,
        "output_dir": str(output), "logging_steps": 1, "max_steps": 3, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip


@pytest.fixture
def engine() -> Any:
    """Return a function that runs words of ``torchturbo llamafactory`` in this process."""

    def run(*words: Any) -> Done:
        from torchturbo.adapters.llama_factory.command import read_command
        from torchturbo.adapters.llama_factory.run import run_command

        seen = spy()
        command = read_command([str(word) for word in words])
        run_command(command, [seen])
        return done(seen)

    yield run
    set_torchturbo_args(None)


@pytest.fixture(scope="session")
def stock() -> Callable[..., Done]:
    """Return a function that runs LLaMA-Factory alone on a training file."""

    def run(path: Path, **changes: Any) -> Done:
        from torchturbo.adapters.llama_factory.package import import_package

        seen = spy()
        values = STOCK | yaml.safe_load(path.read_text(encoding="utf-8")) | changes
        values["output_dir"] += "-alone"
        import_package().tuner.run_exp(args=values, callbacks=[seen])
        return done(seen)

    return run


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Return the lines of our logger."""
    with said() as found:
        yield found


def done(seen: Any) -> Done:
    return Done(seen.args, seen.model, getattr(seen, "history", []), Path(seen.args.output_dir))


@pytest.fixture
def error_lines(capfd: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """Return a function that returns the error lines since its last call."""

    def read() -> list[str]:
        printed = capfd.readouterr().err.splitlines()
        return [line.removeprefix("error: ") for line in printed if line.startswith("error: ")]

    return read
