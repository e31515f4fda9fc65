"""The registry of operator implementations, best first for each operator, and why one can't be used here.

Add one: a row in its operator's place below, and the function that the row names: ``install(sites, situation)`` puts
the implementation into a model and returns what undoes it (``torchturbo/ops/replace.py``). ``torchturbo doctor`` and
the table in docs/guides/operators.md read these rows. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

OPS = ("attention", "rms_norm", "rope", "swiglu", "grouped_mm", "cross_entropy")
"""The operators that a policy rules, in the order of the table."""
NATIVE = "native"
"""The implementation that is the model as Transformers wrote it."""

CPP = "a C++ compiler with Python's headers"
CC = "a C compiler with Python's headers"
COMPILERS = {CPP: ("CXX", ("g++", "clang++", "c++")), CC: ("CC", ("gcc", "clang", "cc"))}
"""What compiles at run time: torch.compile's kernels for a CPU, Triton's launchers for a GPU."""


class Device(Protocol):
    """The part of a device runtime (``torchturbo.runtime``) that the registry asks."""

    device_type: str


@dataclass(frozen=True)
class Implementation:
    """One implementation of one operator."""

    op: str
    name: str
    devices: tuple[str, ...]
    """torch's names of the device types it runs on."""
    dtypes: tuple[str, ...]
    """torch's names of the formats that it computes in."""
    install: str = ""
    """``module:function(sites, situation) -> list of handles``; native has none."""
    package: str = ""
    """Module that must be there, or empty."""
    command: str = ""
    """What installs the package or the tool that it needs."""
    offers: tuple[str, ...] = ()
    """Names that the package must have: an older release lacks them."""
    tool: str = ""
    """A compiler it needs at run time (a key of ``COMPILERS``)."""
    deterministic: bool = True
    """Whether two runs give the same bits."""
    held_back: str = ""
    """Why auto doesn't take it on these devices although it runs; empty where auto does."""

    def refusal(self, runtime: Device, dtype: str | None = None, *, deterministic: bool = False) -> str | None:
        """Return why this implementation can't be used here, or None.

        ``dtype`` is the name of the format that the model computes in, None where no model is at hand;
        ``deterministic`` says whether the run insists on the same bits each time.
        """
        if runtime.device_type not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {runtime.device_type}"
        if dtype is not None and dtype not in self.dtypes:
            return f"computes in {' and '.join(self.dtypes)}, not in {dtype}"
        if deterministic and not self.deterministic:
            return "is not deterministic"
        return self._missing_package() or self._missing_tool()

    def load(self) -> Any:
        """Import and return the function that installs it."""
        module, _, name = self.install.partition(":")
        return getattr(import_module(module), name)

    def _missing_package(self) -> str | None:
        if not self.package:
            return None
        if not _installed(self.package):
            return f"{self.package} is not installed"
        if not self.offers:
            return None
        try:
            module = import_module(self.package)
        except Exception as error:  # a broken installation may raise anything
            return f"{self.package} can't be imported ({type(error).__name__}: {str(error).splitlines()[0][:120]})"
        absent = [name for name in self.offers if not hasattr(module, name)]
        return f"{self.package} has no {', '.join(absent)}: too old" if absent else None

    def _missing_tool(self) -> str | None:
        if not self.tool:
            return None
        variable, names = COMPILERS[self.tool]
        chosen = os.environ.get(variable, "").split()
        if not any(map(shutil.which, chosen[:1] or names)):
            return f"needs {self.tool}: no {' or '.join(chosen[:1] or names)} on the PATH"
        headers = Path(sysconfig.get_path("include"), "Python.h")
        return None if headers.is_file() else f"needs {self.tool}: no {headers}"


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a parent that is missing; a stand-in module without a spec
        return False


LIGER = "pip install liger-kernel"
NPU = "pip install torch_npu (the release of your torch and CANN: https://gitee.com/ascend/pytorch)"
COMPILER = "apt-get install g++ python3-dev (or your system's names for them)"
BOTH = ("float32", "bfloat16")
ALL = ("cpu", "cuda", "npu")
NO_GAIN = "held back on a CPU: it takes long to compile and no gain was measured"


def _liger(op: str, function: str, offers: tuple[str, ...]) -> Implementation:
    """Return a row of Liger's Triton kernels: https://github.com/linkedin/Liger-Kernel."""
    install = f"torchturbo.ops.liger:{function}"
    return Implementation(op, "liger", ("cuda",), BOTH, install, "liger_kernel.ops", LIGER, offers, CC)


def _npu(op: str, offers: tuple[str, ...], dtypes: tuple[str, ...] = BOTH) -> Implementation:
    """Return a row of torch_npu's fused operators: https://www.hiascend.com/document (torch_npu API list)."""
    return Implementation(op, "torch_npu", ("npu",), dtypes, f"torchturbo.ops.npu:{op}", "torch_npu", NPU, offers)


def _compiled(op: str) -> Implementation:
    """Return a row of torch.compile's fused CPU kernels."""
    install = f"torchturbo.ops.compiled:{op}"
    return Implementation(op, "torch.compile", ("cpu",), BOTH, install, command=COMPILER, tool=CPP, held_back=NO_GAIN)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        "attention",
        "flash_attention_2",
        ("cuda",),
        ("bfloat16",),
        "torchturbo.ops.switches:flash_attention_2",
        "flash_attn",
        "pip install flash-attn --no-build-isolation",
        ("flash_attn_func", "flash_attn_varlen_func"),
        deterministic=False,
    ),
    Implementation(
        "attention",
        "torch_npu",
        ("npu",),
        ("bfloat16",),
        "torchturbo.ops.switches:flash_attention_2",
        "torch_npu",
        NPU,
        ("npu_fusion_attention",),
    ),
    Implementation("attention", "sdpa", ALL, BOTH, "torchturbo.ops.switches:sdpa"),
    _liger("rms_norm", "rms_norm", ("LigerRMSNormFunction",)),
    _npu("rms_norm", ("npu_rms_norm",)),
    _compiled("rms_norm"),
    _liger("rope", "rope", ("LigerRopeFunction",)),
    _npu("rope", ("npu_rotary_mul",)),
    _compiled("rope"),
    _liger("swiglu", "swiglu", ("LigerSiLUMulFunction",)),
    _npu("swiglu", ("npu_swiglu",)),
    _compiled("swiglu"),
    _npu("grouped_mm", ("npu_grouped_matmul",), ("bfloat16",)),
    Implementation("grouped_mm", "grouped_mm", ("cpu", "cuda"), BOTH, "torchturbo.ops.switches:grouped_mm"),
    _liger("cross_entropy", "cross_entropy", ("LigerCrossEntropyFunction",)),
    _npu("cross_entropy", ("npu_cross_entropy_loss",)),
    _compiled("cross_entropy"),
    *(Implementation(op, NATIVE, ALL, (*BOTH, "float16", "float64")) for op in OPS),
)
"""Every implementation; of one operator the earlier is the better where both run, native is the last."""


def of(op: str) -> tuple[Implementation, ...]:
    """Return the implementations of an operator, best first."""
    return tuple(row for row in IMPLEMENTATIONS if row.op == op)
