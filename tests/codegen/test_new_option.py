"""An option that is added, renamed or retired in the schema alone is added, renamed or retired everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import python


def edit(schema: dict[str, Any]) -> None:
    """Add a key with everything a key can have, rename one, retire one, and add a rule."""
    definitions = schema["$defs"]
    definitions["MTPConfig"]["properties"]["head_dropout"] = {
        "description": "Dropout in front of each extra head, 100% of the time.",
        "type": ["number", "null"],
        "minimum": 0,
        "maximum": 1,
        "default": 0.0,
        "examples": [0.1],
        "x-torchturbo": {
            "arg": "mtp_head_dropout",
            "cli": "--tt_mtp_head_dropout",
            "env": "TORCH_TURBO_MTP_HEAD_DROPOUT",
            "metavar": "FRACTION",
            "arg_default": 0.0,
            "null": "The model's own dropout.",
            "active_when": {"mtp.enabled": {"const": True}},
            "since": "0.2.0",
        },
    }
    definitions["TelemetryConfig"] = {
        "description": "A section that did not exist.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "sink": {
                "description": "Where it goes.",
                "type": "string",
                "enum": ["file", "socket"],
                "default": "file",
                "examples": ["socket"],
                "x-torchturbo": {
                    "cli": "--tt_telemetry_sink",
                    "values": {"file": "To a file.", "socket": "To a socket."},
                    "since": "0.2.0",
                },
            },
        },
        "x-torchturbo": {"class": "TelemetryConfig"},
    }
    schema["properties"]["telemetry"] = {"$ref": "#/$defs/TelemetryConfig", "default": {}}
    definitions["ParallelPlan"]["properties"]["sp_size"]["x-torchturbo"]["aliases"] = [
        {
            "path": "parallel_plan.ulysses_size",
            "cli": "--tt_ulysses_size",
            "env": "TORCH_TURBO_ULYSSES_SIZE",
            "since": "0.2.0",
            "removal": "1.0.0",
        }
    ]
    definitions["MoEConfig"]["properties"]["z_loss_coeff"]["x-torchturbo"]["deprecated"] = {
        "since": "0.2.0",
        "removal": "1.0.0",
        "successor": "moe.aux_loss_coeff",
    }
    schema["x-torchturbo"]["rules"].append(
        {
            "left": "backend_config.forward_prefetch_depth",
            "op": ">=",
            "right": "backend_config.backward_prefetch_depth",
            "text": "Backward mirrors forward.",
        }
    )


@pytest.fixture(scope="module")
def root(checkout: Callable[[Callable[[dict[str, Any]], object]], Path]) -> Path:
    return checkout(edit)


class Run:
    """Runs the changed package in a folder of its own."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder

    def __call__(self, *words: str, file: str | None = None, **env: str) -> tuple[int, dict[str, Any] | str, list[str]]:
        """Return status, shown configuration (or text), and the lines of stderr."""
        words = words or ("config", "show", "--changed", "--format", "json")
        if file is not None:
            (self.folder / "t.yaml").write_text(file, encoding="utf-8")
            words = (*words, "--tt_config", "t.yaml")
        done = python("-m", "torchturbo", *words, root=self.root, cwd=self.folder, env=env)
        shown = json.loads(done.stdout) if done.stdout.startswith("{") else done.stdout
        return done.returncode, shown, done.stderr.splitlines()


SHOW = ("config", "show", "--changed", "--format", "json")


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Run:
    return Run(root, tmp_path)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "config.py",
            ["head_dropout: float | None = 0.0", "class TelemetryConfig", "telemetry: TelemetryConfig = field"],
        ),
        ("args.py", ["mtp_head_dropout: float | None = 0.0"]),
        ("keys.py", ["mtp.head_dropout", '"TORCH_TURBO_MTP_HEAD_DROPOUT": "mtp.head_dropout"']),
        ("specs.py", ['cli_name="--tt_mtp_head_dropout"', "100%% of the time"]),
        ("validator.py", ['"mtp.head_dropout": number(minimum=0, maximum=1, nullable=True)', "RULES[1]"]),
        ("help.txt", ["\n  --tt_mtp_head_dropout FRACTION\n", "100% of the time"]),
        (
            "docs/reference.md",
            ["mtp.head_dropout", "--tt_mtp_head_dropout", "0.2.0", "parallel_plan.ulysses_size", "Backward mirrors"],
        ),
        ("docs/environment.md", ["TORCH_TURBO_MTP_HEAD_DROPOUT"]),
        ("completion/torchturbo.bash", ["--tt_mtp_head_dropout"]),
        ("completion/torchturbo.zsh", ["--tt_mtp_head_dropout"]),
        ("completion/torchturbo.fish", ["tt_mtp_head_dropout"]),
        ("surface.json", ['"name": "mtp_head_dropout"', "--tt_ulysses_size", "forward_prefetch_depth >= "]),
    ],
)
def test_every_output_has_the_new_option(root: Path, name: str, texts: list[str]) -> None:
    """Each generated file that lists options lists this one."""
    text = (root / "generated" / name).read_text(encoding="utf-8")
    assert [] == [wanted for wanted in texts if wanted not in text]


def test_the_editor_knows_the_new_option_and_the_former_name(root: Path) -> None:
    """Hover text with option, variable and default; the old name and the retired key are marked as deprecated."""
    schema = json.loads((root / "generated" / "torchturbo.schema.json").read_text(encoding="utf-8"))
    dropout = schema["$defs"]["MTPConfig"]["properties"]["head_dropout"]
    assert (["number", "null"], 0, 1, 0.0) == tuple(dropout[name] for name in ("type", "minimum", "maximum", "default"))
    for text in ("Dropout in front", "--tt_mtp_head_dropout", "TORCH_TURBO_MTP_HEAD_DROPOUT", "0.0"):
        assert text in dropout["markdownDescription"]
    former = schema["$defs"]["ParallelPlan"]["properties"]["ulysses_size"]
    assert (True, "integer", 1) == tuple(former[name] for name in ("deprecated", "type", "minimum"))
    assert "parallel_plan.sp_size" in former["deprecationMessage"]
    assert schema["$defs"]["MoEConfig"]["properties"]["z_loss_coeff"]["deprecated"] is True


def test_the_new_option_is_read_from_every_layer(run: Run) -> None:
    """File, environment and command line reach it, in this order of precedence, and null is a value."""
    on = {"mtp": {"enabled": True}}
    file = "mtp: {enabled: true, head_dropout: 0.25}"
    assert (0, {"mtp": {"enabled": True, "head_dropout": 0.25}}, []) == run(*SHOW, file=file)
    variable = {"TORCH_TURBO_MTP_HEAD_DROPOUT": "0.5"}
    assert (0, {"mtp": on["mtp"] | {"head_dropout": 0.5}}, []) == run(*SHOW, file=file, **variable)
    done = run(*SHOW, "--tt_mtp_head_dropout", "null", file=file, **variable)
    assert (0, {"mtp": on["mtp"] | {"head_dropout": None}}, []) == done


def test_the_new_option_is_checked_and_has_its_switch(run: Run) -> None:
    """Bounds, types, nearest names and the idle warning come with it."""
    assert ["error: --tt_mtp_head_dropout: expected at most 1, got 2.0"] == run(*SHOW, "--tt_mtp_head_dropout", "2")[2]
    assert ["error: t.yaml:1:7: mtp.head_dropuot: unknown key; did you mean head_dropout?"] == (
        run(*SHOW, file="mtp: {head_dropuot: 1}")[2]
    )
    status, shown, said = run(*SHOW, "--tt_mtp_head_dropout", "0.5")
    assert (0, {"mtp": {"head_dropout": 0.5}}) == (status, shown)
    assert [
        "[torchturbo] WARNING --tt_mtp_head_dropout: mtp.head_dropout: set but not read (mtp.enabled is false); "
        "it is read when mtp.enabled is true"
    ] == said


def test_the_new_option_is_explained_and_offered(run: Run) -> None:
    """`config explain` and `config init` know it."""
    _, text, _ = run("config", "explain", "mtp_head_dropout")
    assert isinstance(text, str)
    for wanted in ("mtp.head_dropout", "number or null, 0 to 1", "TORCH_TURBO_MTP_HEAD_DROPOUT"):
        assert wanted in text
    assert "# head_dropout: 0.0" in run("config", "init", "-")[1]


def test_a_new_section_is_read_without_a_field_of_its_own(run: Run) -> None:
    """A key needs neither a flat field nor a variable: its option goes by the overrides."""
    assert (0, {"telemetry": {"sink": "socket"}}, []) == run(*SHOW, "--tt_telemetry_sink", "socket")
    assert (0, {"telemetry": {"sink": "socket"}}, []) == run(*SHOW, file="telemetry: {sink: socket}")
    assert [
        'error: t.yaml:1:19: telemetry.sink: expected one of file, socket, got string "fil"; did you mean file?'
    ] == (run(*SHOW, file="telemetry: {sink: fil}")[2])
    assert "  telemetry.sink" in run("config", "explain", "telemetry")[1]


def test_the_new_rule_holds(run: Run) -> None:
    """A relation is one annotation."""
    assert [
        "error: --tt_backward_prefetch_depth: backend_config.backward_prefetch_depth: expected <= "
        "backend_config.forward_prefetch_depth (1, default), got 3; backward mirrors forward"
    ] == run(*SHOW, "--tt_backward_prefetch_depth", "3")[2]


RENAMED = "in 0.2.0; the former name is read until 1.0.0"


@pytest.mark.parametrize(
    ("words", "file", "env", "warning"),
    [
        (["--tt_ulysses_size", "2"], None, {}, f"--tt_ulysses_size: renamed to --tt_sp_size {RENAMED}"),
        (
            [],
            None,
            {"TORCH_TURBO_ULYSSES_SIZE": "2"},
            f"TORCH_TURBO_ULYSSES_SIZE: renamed to TORCH_TURBO_SP_SIZE {RENAMED}",
        ),
        (
            [],
            "parallel_plan: {ulysses_size: 2}",
            {},
            f"t.yaml:1:31: parallel_plan.ulysses_size: renamed to parallel_plan.sp_size {RENAMED}",
        ),
    ],
)
def test_a_renamed_key_is_read_with_one_warning(
    run: Run, words: list[str], file: str | None, env: dict[str, str], warning: str
) -> None:
    """The former spelling works in every layer, and says what to write."""
    assert (0, {"parallel_plan": {"sp_size": 2}}, [f"[torchturbo] WARNING {warning}"]) == run(
        *SHOW, *words, file=file, **env
    )


def test_an_empty_variable_of_a_former_name_counts_as_unset(run: Run) -> None:
    """Neither a value nor a warning, also beside the new name."""
    assert (0, {}, []) == run(*SHOW, TORCH_TURBO_ULYSSES_SIZE="")
    done = run(*SHOW, TORCH_TURBO_ULYSSES_SIZE=" ", TORCH_TURBO_SP_SIZE="2")
    assert (0, {"parallel_plan": {"sp_size": 2}}, []) == done


@pytest.mark.parametrize("new_first", [True, False])
@pytest.mark.parametrize("layer", ["line", "file", "environment"])
def test_a_key_given_under_both_names_is_an_error(run: Run, layer: str, new_first: bool) -> None:
    """Whichever comes first."""
    pairs = [
        ("--tt_sp_size", "TORCH_TURBO_SP_SIZE", "sp_size"),
        ("--tt_ulysses_size", "TORCH_TURBO_ULYSSES_SIZE", "ulysses_size"),
    ]
    pairs = pairs if new_first else pairs[::-1]
    if layer == "line":
        status, _, said = run(*SHOW, *(f"{flag}=2" for flag, _, _ in pairs))
    elif layer == "file":
        status, _, said = run(*SHOW, file=f"parallel_plan: {{{', '.join(f'{name}: 2' for _, _, name in pairs)}}}")
    else:
        status, _, said = run(*SHOW, **{name: "2" for _, name, _ in pairs})
    errors = [line for line in said if line.startswith("error: ")]
    assert (2, 1) == (status, len(errors))
    assert "given twice, " in errors[0] and errors[0].endswith("; keep the new name")


def test_a_retired_key_is_read_with_a_warning_and_never_beside_its_successor(run: Run) -> None:
    """The warning names the successor; both at once are an error in either order."""
    warning = "moe.z_loss_coeff: deprecated since 0.2.0, goes away in 1.0.0; use moe.aux_loss_coeff"
    status, shown, said = run(*SHOW, file="moe: {z_loss_coeff: 0.5}")
    assert (0, {"moe": {"z_loss_coeff": 0.5}}, [f"[torchturbo] WARNING t.yaml:1:21: {warning}"]) == (
        status,
        shown,
        said,
    )
    assert [
        "error: t.yaml:1:42: moe.aux_loss_coeff: given together with moe.z_loss_coeff, and one replaces the other; keep moe.aux_loss_coeff"
    ] == [line for line in run(*SHOW, file="moe: {z_loss_coeff: 0.5, aux_loss_coeff: 0.5}")[2] if "error" in line]
    assert [
        "error: t.yaml:1:42: moe.z_loss_coeff: given together with moe.aux_loss_coeff, and one replaces the other; keep moe.aux_loss_coeff"
    ] == [line for line in run(*SHOW, file="moe: {aux_loss_coeff: 0.5, z_loss_coeff: 0.5}")[2] if "error" in line]
