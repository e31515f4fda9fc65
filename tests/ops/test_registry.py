"""The registry: what its rows must say, and why an implementation is refused."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import stand_ins
from stand_ins import Device

from torchturbo.ops.registry import CC, COMPILERS, CPP, IMPLEMENTATIONS, NATIVE, OPS, Implementation, of

ROW = Implementation("rope", "fast", ("cuda",), ("bfloat16",), package="fast_kernels", offers=("rope", "norm"))
CUDA = Device("cuda")


def test_every_operator_ends_with_native() -> None:
    """Which needs nothing, runs everywhere and installs nothing."""
    assert set(OPS) == {row.op for row in IMPLEMENTATIONS}
    for op in OPS:
        assert [NATIVE] == [row.name for row in of(op) if not row.install]
        assert NATIVE == of(op)[-1].name


@pytest.mark.parametrize("row", [row for row in IMPLEMENTATIONS if row.install], ids=lambda row: f"{row.op}-{row.name}")
def test_a_row_can_be_loaded_and_tells_what_installs_it(row: Implementation) -> None:
    """A package or a tool without a command would be an error without a remedy."""
    assert callable(row.load())
    assert bool(row.package or row.tool) == bool(row.command)


def test_the_registry_imports_no_torch() -> None:
    """The doctor lists it first."""
    code = "import sys, torchturbo.ops.registry; print('torch' in sys.modules or 'transformers' in sys.modules)"

    assert "False" == subprocess.check_output([sys.executable, "-c", code], text=True, cwd=Path.cwd()).strip()


def test_device_and_format_are_asked_first() -> None:
    """They can't be installed."""
    assert "runs on cuda, not on cpu" == ROW.refusal(Device("cpu"))
    assert "computes in bfloat16, not in float32" == ROW.refusal(CUDA, "float32")


def test_a_package_that_is_missing_broken_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told apart."""
    assert "fast_kernels is not installed" == ROW.refusal(CUDA)
    module = stand_ins.put(monkeypatch, "fast_kernels", rope=1)
    assert "fast_kernels has no norm: too old" == ROW.refusal(CUDA)
    module.norm = 1  # type: ignore[attr-defined]
    assert ROW.refusal(CUDA) is None

    monkeypatch.delitem(sys.modules, "fast_kernels")
    monkeypatch.setattr("torchturbo.ops.registry.find_spec", lambda name: object())
    monkeypatch.setattr("torchturbo.ops.registry.import_module", lambda name: 1 / 0)
    assert "fast_kernels can't be imported (ZeroDivisionError: division by zero)" == ROW.refusal(CUDA)


def test_a_run_that_insists_on_the_same_bits() -> None:
    """FlashAttention's backward adds in any order."""
    flash = next(row for row in of("attention") if row.name == "flash_attention_2")

    assert "is not deterministic" == flash.refusal(CUDA, "bfloat16", deterministic=True)


@pytest.mark.parametrize("tool", [CPP, CC])
def test_a_compiler_that_is_missing(tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program, the one that the user's variable names, or Python's headers."""
    row = Implementation("rope", "compiled", ("cuda",), ("bfloat16",), tool=tool, command="x")
    variable, names = COMPILERS[tool]
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"needs {tool}: no {' or '.join(names)} on the PATH" == row.refusal(CUDA)
    monkeypatch.setenv(variable, "mycc -m64")
    assert f"needs {tool}: no mycc on the PATH" == row.refusal(CUDA)

    (tmp_path / "mycc").touch(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert f"needs {tool}: no {tmp_path / 'Python.h'}" == row.refusal(CUDA)
    (tmp_path / "Python.h").touch()
    assert row.refusal(CUDA) is None
