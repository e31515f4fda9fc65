"""Which of the packages that a run may use are installed, in which version, and what installs the others.

No package is imported. The minimum versions are those of TorchTurbo's own metadata.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torchturbo

DISTRIBUTION = "torchturbo"
EXTRA = "train"
"""The extra that brings what training needs."""


class Known(NamedTuple):
    """One package that a run may use."""

    name: str
    """Name of its distribution; the module's is the same with underscores."""
    use: str
    needed: bool = False
    """Whether nothing can be trained without it."""
    command: str = ""
    """What installs it where that is not the extra and not ``pip install NAME``."""


# In one command with torch, or pip replaces it; its Transformers is older than the one of torchturbo train.
LLAMA_FACTORY = "pip install torch llamafactory, in an environment of its own"
KNOWN: tuple[Known, ...] = (
    Known("torch", "training", needed=True),
    Known("transformers", "training", needed=True),
    Known("accelerate", "training", needed=True),
    Known("jsonschema", "settings of plugins"),
    Known("matplotlib", "the loss curve as a picture"),
    Known("gguf", "the quickstart's model"),
    Known("peft", "LoRA and other adapters"),
    Known("liger-kernel", "fused operators on NVIDIA GPUs"),
    Known("llamafactory", "torchturbo llamafactory", command=LLAMA_FACTORY),
    Known("torch_npu", "Ascend NPUs", command="pip install torch_npu, in the release of your torch and CANN"),
)


class Package(NamedTuple):
    """What was found of a package."""

    name: str
    version: str | None
    """None where it is not installed."""
    minimum: str | None
    use: str
    needed: bool
    command: str
    """What installs it, or a newer version of it."""

    @property
    def too_old(self) -> bool:
        """Return whether it is installed in a version that TorchTurbo does not run with."""
        return self.version is not None and self.minimum is not None and _parts(self.version) < _parts(self.minimum)

    @property
    def usable(self) -> bool:
        """Return whether it is there, in a version that will do."""
        return self.version is not None and not self.too_old


def packages() -> list[Package]:
    """Return what is found of every known package."""
    lowest = minimums(requirements())
    found = []
    for known in KNOWN:
        in_extra = known.name in lowest
        command = known.command or (
            f"pip install '{DISTRIBUTION}[{EXTRA}]'" if in_extra else f"pip install {known.name}"
        )
        minimum = lowest.get(known.name)
        found.append(Package(known.name, version(known.name), minimum, known.use, known.needed, command))
    return found


def version(name: str) -> str | None:
    """Return the version of an installed package; None where its module can't be found."""
    try:
        if find_spec(name.replace("-", "_")) is None:
            return None
    except (ImportError, ValueError):
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def requirements() -> list[str]:
    """Return TorchTurbo's own requirements, those of a checkout where it is not installed."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        text = (Path(torchturbo.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return []
    project = tomllib.loads(text).get("project", {})
    extra = project.get("optional-dependencies", {}).get(EXTRA, [])
    return [f"{requirement}; extra == '{EXTRA}'" for requirement in extra]


def minimums(required: Iterable[str]) -> Mapping[str, str]:
    """Return the lowest version of each package that the extra brings; empty where any will do."""
    lowest = {}
    for requirement in required:
        text, _, marker = requirement.partition(";")
        match = re.match(r"\s*([\w.-]+)\s*(?:>=\s*([\w.]+))?", text)
        if match and re.search(rf"extra\s*==\s*['\"]{EXTRA}['\"]", marker):
            lowest[match[1]] = match[2] or ""
    return lowest


def _parts(text: str) -> list[int]:
    """Return a version's numbers; what follows them (``+cpu``, ``rc1``) does not decide."""
    match = re.match(r"[\d.]+", text)
    return [int(part) for part in match[0].split(".") if part] if match else []
