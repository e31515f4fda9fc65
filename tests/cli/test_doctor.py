"""`torchturbo doctor`: what it says of this machine, of others, of one without torch, and what it keeps to itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from launching import ROOT

from torchturbo.adapters.base import RANK_VARIABLES, SECOND_OWNERS
from torchturbo.cli.doctor import device as device_module
from torchturbo.cli.doctor import environment, packages, report
from torchturbo.cli.doctor.device import Device, Operator, operator
from torchturbo.cli.doctor.keys import HERE, effects
from torchturbo.generated.keys import KEYS
from torchturbo.ops.registry import IMPLEMENTATIONS, OPS
from torchturbo.runtime.cpu import CpuRuntime

Run = Callable[..., Any]
QUIET = {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which nothing is wrong."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    for name in (*SECOND_OWNERS, *RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def a_device(**changes: Any) -> Device:
    fields: dict[str, Any] = {
        "type": "cuda",
        "name": "NVIDIA H200",
        "number": 8,
        "memory": 141 * 2**30,
        "backend": "nccl",
        "bf16": "fast",
        "mfu": "MFU against 989 TFLOPS",
        "deterministic": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        "activities": ("CPU", "CUDA"),
        "records_memory": True,
        "operators": (Operator("rms_norm", "liger", ()), Operator("attention", "native", ())),
    }
    return Device(**(fields | changes))


# ---- this machine ----


with_torch = pytest.mark.skipif(find_spec("torch") is None, reason="says what torch finds")


@with_torch
def test_it_says_what_is_here(torchturbo: Run) -> None:
    """Versions, the device, every live key, in 80 columns however wide the terminal is."""
    import torch

    done = torchturbo("doctor")

    assert (0, "") == (done.status, done.err)
    assert "training can run here" in done.out
    assert f"\n  torch                 {torch.__version__}\n" in done.out
    assert "\n  ranks talk over       gloo\n" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\033" not in done.out
    for path in KEYS:
        assert 1 == [line.split()[0] for line in done.out.splitlines() if line.startswith("  ")].count(path), path


@with_torch
def test_programs_get_the_same_as_json(torchturbo: Run) -> None:
    """One document; names in it are the contract's."""
    done = torchturbo("doctor", "--format", "json")

    found = json.loads(done.out)
    assert (0, "", True) == (done.status, done.err, found["can_train"])
    assert list(KEYS) == list(found["keys"])
    assert ("cpu", "gloo") == (found["device"]["type"], found["device"]["backend"])
    assert list(OPS) == [row["op"] for row in found["device"]["operators"]]
    assert {known.name for known in packages.KNOWN} == {row["name"] for row in found["packages"]}
    assert [] == found["problems"]


def test_transformers_is_not_imported() -> None:
    """It takes seconds; its version stands in its metadata."""
    code = "import sys; from torchturbo.cli.main import main; main(['doctor']); print('transformers' in sys.modules)"

    out = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)

    assert out.splitlines()[-1] == "False"


# ---- a machine without torch ----

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "accelerate", "jsonschema", "matplotlib", "gguf", "peft"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from torchturbo.cli.main import main

sys.exit(main(sys.argv[1:]))
"""


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, "doctor", *words]
    return subprocess.run(command, text=True, capture_output=True, cwd=ROOT, check=False)


def test_without_torch_it_says_what_to_install() -> None:
    """One command for all that the extra brings, another for what it doesn't; status 1."""
    done = without_torch()

    assert (1, "") == (done.returncode, done.stderr)
    assert "training can't run here: 3 problems" in done.stdout
    assert "  error:   torch: is not installed, and training needs it; pip install" in done.stdout
    assert "\n  torch                 not installed: training\n" in done.stdout
    text = " ".join(done.stdout.split())
    assert "pip install 'torchturbo[train]' torch (training), transformers (training), accelerate (training)" in text
    assert "\n  pip install peft\n      peft (LoRA and other adapters)" in done.stdout
    assert "\ndevice\n" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_without_torch_every_key_has_its_own_text() -> None:
    """What depends on no device is told all the same."""
    found = json.loads(without_torch("--format", "json").stdout)

    assert (None, False) == (found["device"], found["can_train"])
    assert KEYS.keys() == found["keys"].keys()


# ---- other machines ----


@with_torch
def test_a_package_that_is_too_old_is_a_problem(torchturbo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The minimum is that of TorchTurbo's own metadata."""
    monkeypatch.setattr(packages, "requirements", lambda: ["transformers>=99.1; extra == 'train'"])

    done = torchturbo("doctor")

    assert done.status == 1
    assert "transformers: " in done.out
    assert "is too old, 99.1 is needed" in " ".join(done.out.split())


def test_minimum_versions_are_those_of_the_project() -> None:
    """Read from the metadata, or from the checkout; bounds of other extras do not count."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["train"]

    assert dict(line.split(">=") for line in extra) == packages.minimums(packages.requirements())
    assert {"a": "1.2", "b": ""} == packages.minimums(
        ['a>=1.2; extra == "train"', "b ; extra=='train'", "c>=3", "d>=4; extra == 'other'"]
    )


@pytest.mark.parametrize(
    ("found", "minimum", "old"),
    [("2.13.0+cpu", "2.13", False), ("2.9.1", "2.13", True), ("5.10", "5.6", False), ("unknown", "1.0", True)],
)
def test_versions_compare_by_number(found: str, minimum: str, old: bool) -> None:
    """2.9 is older than 2.13."""
    assert old == packages.Package("x", found, minimum, "", True, "").too_old


@with_torch
def test_a_broken_torch_is_a_problem(torchturbo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one line, without a traceback, and the rest of the report is there."""

    def broken() -> Device:
        raise OSError("libcudart.so.12: cannot open\nshared object file")

    monkeypatch.setattr(report, "current_device", broken)

    done = torchturbo("doctor")

    text = " ".join(done.out.split())
    assert done.status == 1
    assert "torch: can't be used: OSError: libcudart.so.12: cannot open shared object file; install it anew" in text
    assert "what each key would do here" in done.out


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        ({}, "mixed_precision", "both at the hardware's speed"),
        ({"bf16": "emulated"}, "mixed_precision", "slowly in bf16"),
        ({"bf16": "none"}, "mixed_precision", "bf16 is refused"),
        ({}, "use_deterministic_algorithms", "CUBLAS_WORKSPACE_CONFIG=:4096:8"),
        ({"deterministic": {}}, "use_deterministic_algorithms", "no variable"),
        ({}, "backend", "over nccl"),
        ({}, "ops.policy", "Takes rms_norm liger; all else is native"),
        ({"operators": ()}, "ops.policy", "Leaves every operator native"),
        ({}, "mfu.enabled", "MFU against 989 TFLOPS"),
        ({}, "profiling", "CPU and CUDA activities"),
        ({}, "memory_snapshot_steps", "allocator's own history"),
        ({"records_memory": False}, "memory_snapshot_steps", "Counts tensors"),
    ],
)
def test_what_a_key_would_do_depends_on_the_device(
    changes: dict[str, Any], path: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sentence follows its fact."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert text in effects(a_device(**changes))[path]


def test_a_variable_that_is_set_is_kept_and_its_value_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic runs keep the user's value of what is the device library's variable."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "s3cret")

    text = effects(a_device())["use_deterministic_algorithms"]

    assert "CUBLAS_WORKSPACE_CONFIG (already set, kept)" in text
    assert "s3cret" not in text


def test_sentences_of_the_device_are_of_keys() -> None:
    """A renamed key would lose its sentence."""
    assert HERE.keys() <= KEYS.keys()


@pytest.mark.parametrize("op", OPS)
def test_an_operator_gets_what_the_policy_would_take(op: str) -> None:
    """The first row that is not refused and not held back; rows for other devices are not told of."""
    found = operator(op, CpuRuntime())

    rows = [row for row in IMPLEMENTATIONS if row.op == op]
    taken = [row for row in rows if row.refusal(CpuRuntime()) is None and (row.name == "native" or not row.held_back)]
    assert taken[0].name == found.chosen
    assert all(reason for _, reason in found.others)
    assert {"liger", "torch_npu", "flash_attention_2"}.isdisjoint(dict(found.others))


def test_what_the_device_could_use_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger on a GPU and not on a CPU; a compiler where torch.compile lacks one."""
    absent = packages.Package("liger-kernel", None, None, "fused operators", False, "pip install liger-kernel")
    lacking = Operator("rope", "native", (("torch.compile", "needs a C++ compiler: no g++ on the PATH"),))
    compiler = next(row.command for row in IMPLEMENTATIONS if row.name == "torch.compile")

    assert ["pip install liger-kernel"] == list(report._missing([absent], a_device()))
    assert [] == list(report._missing([absent], a_device(type="cpu", operators=())))
    found = report._missing([absent], a_device(type="cpu", operators=(lacking,)))
    assert {compiler: "torch.compile operators (needs a C++ compiler: no g++ on the PATH)"} == found


@with_torch
def test_the_device_section_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several devices of one kind are one line."""
    monkeypatch.setattr(report, "current_device", a_device)

    text = report.as_text(report.examine())

    assert "cuda: 8 x NVIDIA H200" in text
    assert "141 GiB" in text


@with_torch
def test_emulated_and_missing_bf16_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the runtime's own answers."""
    monkeypatch.setattr(CpuRuntime, "emulates_bf16", lambda self: True)
    assert "emulated" == device_module.current_device().bf16
    monkeypatch.setattr(CpuRuntime, "supports_bf16", lambda self: False)
    assert "none" == device_module.current_device().bf16


# ---- the environment ----


def found(environ: dict[str, str], device: Device | None = None) -> list[tuple[str, str]]:
    return [(item.severity, item.place) for item in environment.findings(device, QUIET | environ)]


def test_problems_of_the_environment() -> None:
    """Unknown variables, values that can't be, second owners; none of it in a clean one."""
    assert [] == found({}, a_device(type="cpu"))
    assert [("warning", "TORCH_TURBO_GBZ")] == found({"TORCH_TURBO_GBZ": "2"})
    assert [("error", "TORCH_TURBO_GBS")] == found({"TORCH_TURBO_GBS": "many"})
    assert [("error", "ACCELERATE_USE_FSDP")] == found({"ACCELERATE_USE_FSDP": "true"})
    assert [("warning", "OMP_WAIT_POLICY")] == found({"OMP_WAIT_POLICY": "ACTIVE"}, a_device(type="cpu"))
    assert [] == found({"OMP_WAIT_POLICY": "ACTIVE"}, a_device())


def test_a_driver_without_a_cuda_build_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commonest reason for a GPU that is not used."""
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")

    assert [("warning", "torch")] == found({}, a_device(type="cpu"))
    assert [] == found({}, a_device())


def test_a_clash_is_status_1(torchturbo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would stop at it; errors stand before warnings."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("TORCH_TURBO_GBZ", "2")

    done = torchturbo("doctor")

    assert done.status == 1
    assert done.out.index("error:   ACCELERATE_USE_FSDP") < done.out.index("warning: TORCH_TURBO_GBZ")


@pytest.mark.parametrize("form", ["text", "json"])
def test_values_of_other_variables_are_never_printed(
    form: str, torchturbo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report is made to be pasted into an issue."""
    names = ["HF_TOKEN", "WANDB_API_KEY", "OMP_WAIT_POLICY", "CUBLAS_WORKSPACE_CONFIG", *SECOND_OWNERS, *RANK_VARIABLES]
    for name in names:
        monkeypatch.setenv(name, "s3cret")

    done = torchturbo("doctor", "--format", form)

    assert "ACCELERATE_MIXED_PRECISION" in done.out
    assert "s3cret" not in done.out + done.err


def test_plugins_of_installed_packages_are_listed(torchturbo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name and place; their code is not run."""
    from importlib.metadata import EntryPoint

    point = EntryPoint("shout", "no_such_module:Shout", "torchturbo.plugins")
    monkeypatch.setattr(report, "entry_points", lambda group: [point] if group == "torchturbo.plugins" else [])

    assert "\nplugins of installed packages\n  shout (no_such_module:Shout)\n" in torchturbo("doctor").out
