"""What is wrong in the environment. Only names are told of variables that are not TorchTurbo's own, never values."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from typing import NamedTuple

from torchturbo.adapters.base import environment_clashes
from torchturbo.cli.doctor.device import Device
from torchturbo.config.environment import read_environment


class Finding(NamedTuple):
    """One thing that is wrong."""

    severity: str
    """``error``: a run would stop at it; ``warning``: it would run, not as meant or not as fast."""
    place: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


def findings(device: Device | None, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return what a run in this environment would meet."""
    reading = read_environment(environ)
    found = [Finding("error", problem.place, problem.message, problem.remedy) for problem in reading.problems]
    found += [Finding("warning", warning.place, warning.message, warning.remedy) for warning in reading.warnings]
    found += [Finding("error", clash.place, clash.message, clash.remedy) for clash in environment_clashes(environ)]
    if device is not None and device.type == "cpu":
        found += _on_a_cpu(environ)
    return found


def _on_a_cpu(environ: Mapping[str, str]) -> list[Finding]:
    found = []
    if environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        message = "idle threads spin and take the cores from others, on a shared machine several times slower"
        found.append(Finding("warning", "OMP_WAIT_POLICY", message, "export OMP_WAIT_POLICY=PASSIVE"))
    if shutil.which("nvidia-smi") and platform.system() != "Darwin":
        message = "there is an NVIDIA driver, but this torch sees no GPU"
        remedy = "install the CUDA build: https://pytorch.org/get-started/locally"
        found.append(Finding("warning", "torch", message, remedy))
    return found
