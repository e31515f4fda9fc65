"""The installed LLaMA-Factory: whether it is there, importing it, and the names in it that the engine needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from torchturbo.errors import ConfigError, Problem

NAME = "llamafactory"
TESTED = "0.9.5"
MEDIA = ("torchvision", "torchaudio")
"""What LLaMA-Factory depends on for pictures and sound. A wheel that was built for another torch fails to load, and
with it Transformers; text training needs neither."""
TRAINERS: Mapping[str, tuple[str, str]] = {
    "pt": ("llamafactory.train.pt.workflow", "CustomTrainer"),
    "sft": ("llamafactory.train.sft.workflow", "CustomSeq2SeqTrainer"),
}
"""By stage: the module whose function runs it, and the name by which that function makes its trainer."""


class Package(NamedTuple):
    """What is used of LLaMA-Factory."""

    tuner: ModuleType
    """Holds ``run_exp`` and calls ``get_train_args``."""
    workflows: Mapping[str, ModuleType]
    """By stage; each holds a trainer class and ``load_model``."""
    arguments: tuple[type, ...]
    """The dataclasses of its arguments."""


def missing_package() -> Problem | None:
    """Return a problem where LLaMA-Factory is not installed, without importing it."""
    if _is_there(NAME):
        return None
    # One command, or pip replaces torch by the newest and gigabytes of libraries with it.
    wanted = f"{NAME}=={TESTED}"
    try:
        wanted = f"'torch=={version('torch').partition('+')[0]}' {wanted}"
    except PackageNotFoundError:
        wanted = f"torch {wanted}"
    remedy = f"pip install {wanted}; where a torch for CPUs is installed, then also: {_without_media()}"
    return Problem("", "", "LLaMA-Factory is not installed", remedy)


def import_package() -> Package:
    """Import LLaMA-Factory, which takes seconds.

    Raises
    ------
    ConfigError
        Unprinted: a library of its that can't be loaded, a version that it refuses, a name that is not there.
    """
    for name in MEDIA:
        if _is_there(name):
            try:
                importlib.import_module(name)
            except Exception as error:  # OSError, RuntimeError, or what the library makes of them
                message = f"can't be loaded, and LLaMA-Factory with it: {_first_line(error)}"
                raise ConfigError([Problem(name, "", message, f"text needs neither: {_without_media()}")]) from error
    try:
        with _absent_torchaudio():
            tuner = importlib.import_module("llamafactory.train.tuner")
            workflows = {stage: importlib.import_module(module) for stage, (module, _) in TRAINERS.items()}
            parser = importlib.import_module("llamafactory.hparams.parser")
    except ImportError as error:  # its own version checks are of this type too
        raise ConfigError([Problem("LLaMA-Factory", "", *_told(error))]) from error
    arguments = getattr(parser, "_TRAIN_ARGS", ())
    if problems := _changed(tuner, workflows, arguments):
        raise ConfigError(problems)
    return Package(tuner, workflows, tuple(arguments))


def _changed(tuner: ModuleType, workflows: Mapping[str, ModuleType], arguments: Any) -> list[Problem]:
    """Return a problem for each name that the engine needs and this version does not have."""
    needed = [(tuner, name) for name in ("run_exp", "get_train_args")]
    for stage, (_, trainer) in TRAINERS.items():
        needed += [(workflows[stage], trainer), (workflows[stage], "load_model")]
    missing = [f"{module.__name__}.{name}" for module, name in needed if not callable(getattr(module, name, None))]
    missing += [] if arguments else ["llamafactory.hparams.parser._TRAIN_ARGS"]
    return [
        Problem("LLaMA-Factory", "", f"this version has no {name}", f"pip install {NAME}=={TESTED}") for name in missing
    ]


@contextmanager
def _absent_torchaudio() -> Iterator[None]:
    """Let LLaMA-Factory's unconditional ``import torchaudio`` pass where it is not installed.

    What it gets fails when sound is read, with the reason; nobody else gets to see it.
    """
    name = "torchaudio"
    if _is_there(name):
        yield
        return
    stand_in = _Absent(name)
    stand_in.__spec__ = ModuleSpec(name, None)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        sys.modules.pop(name, None)


class _Absent(ModuleType):
    """Stands for a module that is not installed."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{self.__name__} is not installed, and sound can't be read without it")


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _told(error: ImportError) -> tuple[str, str]:
    """Return what an import error says and what it says to do."""
    text = " ".join(str(error).split())
    message, _, remedy = text.partition(" To fix: ")
    return message.rstrip("."), remedy.rstrip(".") or f"pip install {NAME}=={TESTED}"


def _without_media() -> str:
    return f"pip uninstall -y {' '.join(MEDIA)}"


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]
