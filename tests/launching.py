"""Start a configuration the way a launch does, and keep what it returned and said."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from torchturbo.engine.args import TorchTurboArgs, parse_torchturbo_args
from torchturbo.engine.config import EngineConfig, FrameworkValue, build_from_args
from torchturbo.errors import ConfigError
from torchturbo.generated.keys import KEYS

ROOT = Path(__file__).parents[1]


class Outcome(NamedTuple):
    """What became of a launch: a configuration, or the lines of its errors."""

    args: TorchTurboArgs | None
    rest: list[str]
    config: EngineConfig | None
    errors: list[str]
    warnings: list[str]

    def __getitem__(self, path: Any) -> Any:
        """Return a value of the configuration by its path; where there is none the errors say why."""
        assert self.config is not None, self.errors
        return self.config.get(path)

    def place(self, path: str) -> str:
        """Return where a value comes from, with its layer: ``file turbo.yaml:1:6``."""
        assert self.config is not None, self.errors
        origin = self.config.origin(path)
        return f"{origin.layer.label} {origin.place}".rstrip()

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of the file that are not at their default."""
        assert self.config is not None, self.errors
        return {path: value for path, value, _ in self.config.changed() if not KEYS[path].runtime}


def launch(
    argv: Sequence[str] = (),
    *,
    file: str | None = None,
    name: str = "turbo.yaml",
    env: Mapping[str, str] | None = None,
    framework: Sequence[FrameworkValue] = (),
) -> Outcome:
    """Parse and merge; ``file`` is the text of a configuration that is written into the current folder first."""
    words = list(argv)
    if file is not None:
        Path(name).write_text(file, encoding="utf-8", newline="")
        words = [str(KEYS["config_path"].cli), name, *words]
    args, rest, config = None, [], None
    with said() as warnings, patch.dict(os.environ, env or {}), contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            args, rest = parse_torchturbo_args(words)
            config = build_from_args(args, framework=framework)
        except ConfigError as error:
            assert error.code == 2
            assert [f"error: {problem}" for problem in error.problems] == stderr.getvalue().splitlines()
    errors = [line.removeprefix("error: ") for line in stderr.getvalue().splitlines()]
    return Outcome(args, rest, config, errors, warnings)


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Collect the lines of our logger."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchturbo")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def python(*words: str, env: Mapping[str, str] | None = None, root: Path = ROOT, **options: Any) -> Any:
    """Run this Python on the package of a checkout, installed or not, and return the finished process."""
    environ = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
    options = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": 120, **options}
    return subprocess.run([sys.executable, *words], env=environ, **options)
