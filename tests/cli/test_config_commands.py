"""`torchturbo config`: show, explain, validate, init, schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from torchturbo.engine.config import load_config
from torchturbo.generated.keys import KEYS, SECTIONS

Run = Callable[..., Any]
FILE_KEYS = [key for key in KEYS.values() if not key.runtime]


def write(text: str, name: str = "turbo.yaml") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def table(text: str) -> dict[str, list[str]]:
    """Return the rows of `config show`, cut into cells by the columns of its head."""
    head, *lines = text.split("\n\n")[0].splitlines()
    starts = [head.index(name) for name in ("KEY", "VALUE", "LAYER", "PLACE", "NOTE")] + [1000]
    cells = [[line[start:end].strip() for start, end in zip(starts, starts[1:], strict=False)] for line in lines]
    return {row[0]: row[1:] for row in cells}


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_has_a_row_for_every_key(torchturbo: Run) -> None:
    """Value, layer, place and note, in the schema's order."""
    done = torchturbo("config", "show")
    rows = table(done.out)
    assert (0, "") == (done.status, done.err)
    assert list(KEYS) == list(rows)
    assert ["fsdp2", "default", "", ""] == rows["backend"]
    assert ["null", "default", "", ""] == rows["gbs"]
    assert {""} == {row[3] for row in rows.values()}


def test_show_names_the_layer_and_the_place(torchturbo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's values with where they stand; what is set but not read is marked and warned of."""
    write("gbs: 4\nmtp: {log_loss: true}\n")
    monkeypatch.setenv("TORCH_TURBO_EP_SIZE", "2")
    done = torchturbo("config", "show", "--tt_config", "turbo.yaml", "--tt_mixed_precision=bf16")
    rows = table(done.out)
    assert ["4", "file", "turbo.yaml:1:6", ""] == rows["gbs"]
    assert ["2", "environment", "TORCH_TURBO_EP_SIZE", ""] == rows["parallel_plan.ep_size"]
    assert ["bf16", "command line", "--tt_mixed_precision", ""] == rows["mixed_precision"]
    assert ["true", "file", "turbo.yaml:2:17", "idle"] == rows["mtp.log_loss"]
    assert "idle: set, but another key keeps it from being read" in done.out
    assert "turbo.yaml:2:17: mtp.log_loss: set but not read" in done.err


def test_show_changed_lists_the_changes_alone(torchturbo: Run) -> None:
    """A value that equals its default is no change; without any it says so."""
    write("gbs: 4\nbackend: fsdp2\n")
    assert {"gbs", "config_path"} == set(
        table(torchturbo("config", "show", "--changed", "--tt_config", "turbo.yaml").out)
    )
    assert "every key has its default\n" == torchturbo("config", "show", "--changed").out


@pytest.mark.parametrize("size", [40, 60, 80, 200])
def test_show_fits_the_terminal(size: int, torchturbo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the table is too wide each key gets two lines, and nothing is left out; elsewhere than on a terminal
    the table stays a table."""
    write("parallel_plan:\n  sp_size: 2\n")
    words = ("config", "show", "--tt_config", "turbo.yaml")
    whole = torchturbo(*words).out
    assert whole.startswith("KEY ")
    monkeypatch.setenv("COLUMNS", str(size))
    monkeypatch.setenv("NO_COLOR", "1")
    assert whole == torchturbo(*words).out
    monkeypatch.setattr("torchturbo.cli.terminal.sys.stdout.isatty", lambda: True, raising=False)
    shown = torchturbo(*words).out
    assert ("KEY " in shown) is (size == 200)
    if size < 200:
        lines = shown.splitlines()
        assert list(KEYS) == [line.partition(" = ")[0] for line in lines if " = " in line]
        place = lines[lines.index("parallel_plan.sp_size = 2") + 1]
        assert place.startswith("  file, turbo.yaml:2:12")
        assert all(len(line) <= max(size, max(map(len, KEYS)) + 12) for line in lines)


@pytest.mark.parametrize(("name", "read"), [("yaml", yaml.safe_load), ("json", json.loads)])
def test_show_can_be_read_back(torchturbo: Run, name: str, read: Callable[[str], Any]) -> None:
    """What it prints for programs is a configuration file that gives the same configuration."""
    write("gbs: 4\nmtp: {enabled: true, loss_scaling_factor: 1e-5}\n")
    words = ("config", "show", "--tt_config", "turbo.yaml", "--format", name)
    changed = read(torchturbo(*words, "--changed").out)
    assert {"gbs": 4, "mtp": {"enabled": True, "loss_scaling_factor": 1e-5}} == changed
    write(torchturbo(*words).out, f"again.{name}")
    assert load_config("turbo.yaml") == load_config(f"again.{name}")


def test_show_prints_every_problem_and_no_table(torchturbo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 2, all layers at once."""
    write("gbs: x\n")
    monkeypatch.setenv("TORCH_TURBO_SP_SIZE", "0")
    done = torchturbo("config", "show", "--tt_config", "turbo.yaml", "--tt_nope")
    assert (2, "") == (done.status, done.out)
    assert ["turbo.yaml:1:6", "TORCH_TURBO_SP_SIZE", "--tt_nope"] == [
        re.sub(r": .*", "", line.removeprefix("error: ")) for line in done.err.splitlines()
    ]


def test_unknown_arguments_are_named(torchturbo: Run) -> None:
    """Each with the command that does not take it."""
    done = torchturbo("config", "show", "--x", "--y")
    assert (2, "") == (done.status, done.out)
    assert [
        "error: --x: not an argument of `torchturbo config show`; see `torchturbo config show --help`",
        "error: --y: not an argument of `torchturbo config show`; see `torchturbo config show --help`",
    ] == done.err.splitlines()
    done = torchturbo("config", "show", "x")
    assert ["error: x: not an argument of `torchturbo config show`; see `torchturbo config show --help`"] == (
        done.err.splitlines()
    )
    done = torchturbo("config", "validate", "a.yaml", "--tt_gbs=4")
    assert [
        "error: --tt_gbs=4: not an argument of `torchturbo config validate`; see `torchturbo config validate --help`"
    ] == (done.err.splitlines())


# -- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.path)
def test_every_key_is_explained_under_each_of_its_names(torchturbo: Run, key: Any) -> None:
    """Path, option with and without dashes, variable and field lead to one page with all there is to know."""
    page = torchturbo("config", "explain", key.path)
    assert 0 == page.status and page.out.startswith(f"{key.path}\n")
    words = " ".join(page.out.split())
    for text in (key.text, *key.values, key.null, key.cli or "", key.env or "", key.since, "> default"):
        assert " ".join(text.split()) in words, text
    for condition in key.active_when:
        assert f"{condition}" in words
    for name in filter(None, (key.cli, key.cli and key.cli[2:], key.env, key.arg, key.name)):
        assert page.out == torchturbo("config", "explain", name).out, name
    assert max(map(len, page.out.splitlines())) <= 100


def test_explain_shows_what_each_layer_says(torchturbo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer that holds is marked; the others keep their value and place."""
    write("gbs: 4\n")
    monkeypatch.setenv("TORCH_TURBO_GBS", "8")
    out = torchturbo("config", "explain", "gbs", "--tt_config", "turbo.yaml").out
    assert [
        ["command line", "-"],
        ["> environment", "8", "TORCH_TURBO_GBS"],
        ["file", "4", "turbo.yaml:1:6"],
        ["default", "null"],
    ] == [re.split("  +", line.strip()) for line in out.splitlines()[-4:]]
    out = torchturbo("config", "explain", "--tt_gbs", "--tt_config", "turbo.yaml", "--tt_gbs", "2").out
    assert "> command line  2     --tt_gbs" in out


def test_explain_says_why_a_layer_is_silent(torchturbo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable counts as unset, and some layers cannot set some keys."""
    monkeypatch.setenv("TORCH_TURBO_GBS", "")
    assert "TORCH_TURBO_GBS is empty and counts as unset" in torchturbo("config", "explain", "gbs").out
    assert re.search(r"environment +- +cannot set it", torchturbo("config", "explain", "mtp.enabled").out)
    assert re.search(r"command line +- +cannot set it", torchturbo("config", "explain", "reshard_after_forward").out)
    assert re.search(r"file +- +cannot set it", torchturbo("config", "explain", "profiling").out)


def test_explain_shows_how_a_file_holds_the_key(torchturbo: Run) -> None:
    """The line can be copied into a file."""
    for key in FILE_KEYS:
        line = re.findall(r"^  file +(.*)$", torchturbo("config", "explain", key.path).out, re.MULTILINE)[0]
        assert key.examples[0] == load_config(write(line)).get(key.path)


@pytest.mark.parametrize("name", [path for path in SECTIONS if path])
def test_a_section_is_explained_by_its_keys(torchturbo: Run, name: str) -> None:
    """Its text, and each key with a short one."""
    done = torchturbo("config", "explain", name)
    assert 0 == done.status
    words = done.out.split()
    assert [] == [child for child in SECTIONS[name].names if f"{name}.{child}" not in words]
    assert done.out == torchturbo("config", "explain", name.rpartition(".")[2]).out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("loss_scaling_factor", "did you mean mtp.loss_scaling_factor or dspark.loss_scaling_factor?"),
        ("card", None),
        ("mtp.enabeld", "mtp.enabled"),
        ("--tt_gbss", "did you mean gbs?"),
        ("MTP", "did you mean mtp?"),
        ("zzzz", "`torchturbo config show` lists them all"),
    ],
)
def test_explain_finds_what_was_meant(torchturbo: Run, name: str, said: str | None) -> None:
    """A last part that only one key has is enough; an unknown name gets the nearest ones."""
    done = torchturbo("config", "explain", name)
    assert (0 if said is None else 2) == done.status
    assert said is None or said in done.err
    assert len(done.err.splitlines()) == (said is not None)


def test_explain_answers_although_a_layer_is_wrong(torchturbo: Run) -> None:
    """The page, then the problems, status 2."""
    done = torchturbo("config", "explain", "gbs", "--tt_gbs", "x")
    assert 2 == done.status
    assert done.out.startswith("gbs\n")
    assert 'error: --tt_gbs: expected integer or null, got "x"\n' == done.err


# -- validate ---------------------------------------------------------------------------------------------------------


IDLE = "activation_checkpointing: {enabled: false, use_reentrant: false}"


def test_validate_for_people(torchturbo: Run) -> None:
    """One line a finding and one a file; status 1 if a file has an error."""
    write(f"gbs: 4\n{IDLE}\n", "good.yaml")
    write("mpt: 1\ngbs: x\n", "bad.yaml")
    write('{"gbs": 4}', "good.json")
    done = torchturbo("config", "validate", "good.yaml", "bad.yaml", "good.json", "none.yaml")
    assert (1, "") == (done.status, done.err)
    lines = done.out.splitlines()
    assert [
        "good.yaml:2:59: warning: activation_checkpointing.use_reentrant: set but not read"
        " (activation_checkpointing.enabled is false); it is read when activation_checkpointing.enabled is true",
        "good.yaml: ok",
        "bad.yaml:1:1: error: mpt: unknown key; did you mean mtp?",
        'bad.yaml:2:6: error: gbs: expected integer or null, got string "x"',
        "bad.yaml: 2 errors",
        "good.json: ok",
    ] == lines[:6]
    assert lines[6].startswith("none.yaml: error: no such file; ") and "none.yaml: 1 error" == lines[7]
    assert 0 == torchturbo("config", "validate", "good.yaml", "good.json").status


def test_validate_checks_rules_and_ignores_the_environment(torchturbo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is judged by itself, on every machine alike."""
    monkeypatch.setenv("TORCH_TURBO_GBS", "nonsense")
    write("diffusion: {bd_mask_low: 0.9}")
    done = torchturbo("config", "validate", "turbo.yaml")
    assert 1 == done.status
    assert (
        "turbo.yaml:1:26: error: diffusion.bd_mask_low: expected <= diffusion.bd_mask_high (0.8, default), got 0.9"
        in done.out
    )
    assert 0 == torchturbo("config", "validate", write("")).status


def test_validate_for_programs(torchturbo: Run) -> None:
    """JSON lists every finding with file, line and column as numbers; without findings it is an empty list."""
    write(f"gbs: x\n{IDLE}\n", "bad.yaml")
    done = torchturbo("config", "validate", "--format", "json", "bad.yaml")
    assert 1 == done.status
    assert [
        {
            "file": "bad.yaml",
            "line": 1,
            "column": 6,
            "key": "gbs",
            "severity": "error",
            "message": 'expected integer or null, got string "x"',
            "remedy": "",
        },
        {
            "file": "bad.yaml",
            "line": 2,
            "column": 59,
            "key": "activation_checkpointing.use_reentrant",
            "severity": "warning",
            "message": "set but not read (activation_checkpointing.enabled is false)",
            "remedy": "it is read when activation_checkpointing.enabled is true",
        },
    ] == json.loads(done.out)
    done = torchturbo("config", "validate", "--format=json", write("gbs: 4"), "turbo.yaml")
    assert (0, []) == (done.status, json.loads(done.out))
    (finding,) = json.loads(torchturbo("config", "validate", "--format=json", "none.yaml").out)
    assert (None, None, "error") == (finding["line"], finding["column"], finding["severity"])


def test_validate_for_github(torchturbo: Run) -> None:
    """Workflow commands, with what they give a meaning escaped."""
    write(f"gbs: '100%'\n{IDLE}\n", "a,b:c.yaml")
    done = torchturbo("config", "validate", "--format", "github", "a,b:c.yaml", "none.yaml")
    lines = done.out.splitlines()
    assert 1 == done.status
    assert '::error file=a%2Cb%3Ac.yaml,line=1,col=6::gbs: expected integer or null, got string "100%25"' == lines[0]
    assert lines[1].startswith(
        "::warning file=a%2Cb%3Ac.yaml,line=2,col=59::activation_checkpointing.use_reentrant: set but not read"
    )
    assert lines[2].startswith("::error file=none.yaml::no such file")


# -- init and schema --------------------------------------------------------------------------------------------------


def test_init_writes_a_file_that_says_nothing_yet(torchturbo: Run) -> None:
    """All keys are there, commented out, at their default, behind a line that editors understand."""
    done = torchturbo("config", "init")
    assert (0, "") == (done.status, done.err)
    assert "wrote turbo.yaml; " in done.out
    text = Path("turbo.yaml").read_text(encoding="utf-8")
    assert re.match(r"# (yaml-language-server: )?\$schema[:=] ?\S+torchturbo\.schema\.json\n", text)
    assert Path(text.split("\n")[0].replace("=", " ").split(" ")[-1]).is_file()
    assert [] == load_config("turbo.yaml").changed()
    assert 0 == torchturbo("config", "validate", "turbo.yaml").status
    assert max(map(len, text.splitlines()[1:])) <= 100


def test_init_with_everything_uncommented_is_the_default_configuration(torchturbo: Run) -> None:
    """Taking all the # off sets every key to its default."""
    text = torchturbo("config", "init", "-").out
    open_text = re.sub(r"^( *)# ([a-z0-9_]+: \S+)$", r"\1\2", text, flags=re.MULTILINE)
    tree = yaml.safe_load(open_text)
    assert {key.path: key.default for key in FILE_KEYS} == flat(tree)
    write(open_text)
    config = load_config("turbo.yaml")
    assert [] == config.changed()
    assert {"file"} == {config.origin(key.path).layer.label for key in FILE_KEYS}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def test_init_leaves_an_existing_file_alone(torchturbo: Run) -> None:
    """Status 2, the file untouched."""
    write("gbs: 4\n")
    done = torchturbo("config", "init")
    assert (2, "") == (done.status, done.out)
    assert "error: turbo.yaml: exists already; name another file, or - to print\n" == done.err
    assert "gbs: 4\n" == Path("turbo.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["no/such/folder.yaml", ".", "a\0b"])
def test_init_where_nothing_can_be_written(torchturbo: Run, name: str) -> None:
    """One line, no traceback."""
    done = torchturbo("config", "init", name)
    assert (2, 1) == (done.status, len(done.err.splitlines()))
    assert done.err.startswith("error: ")


def test_schema_prints_the_editors_schema(torchturbo: Run) -> None:
    """Valid JSON Schema, the same as the installed file that --path names."""
    schema = json.loads(torchturbo("config", "schema").out)
    jsonschema.Draft202012Validator.check_schema(schema)
    path = Path(torchturbo("config", "schema", "--path").out.strip())
    assert schema == json.loads(path.read_text(encoding="utf-8"))
