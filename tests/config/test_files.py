"""Configuration files as a launch meets them: structure, keys, formats, and what is said of each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from launching import launch, python

from torchturbo.config.file import read_file
from torchturbo.engine.config import load_config
from torchturbo.engine.dump import to_json, to_yaml
from torchturbo.errors import ConfigError
from torchturbo.generated.keys import KEYS, SECTIONS

NOT_OURS = (
    "unknown key; options of the training framework go on the command line; "
    "`torchturbo config init -` lists the keys of a file"
)

GOOD: list[tuple[str, dict[str, Any]]] = [
    # nothing said
    ("", {}),
    ("\n \n", {}),
    ("# only a comment\n", {}),
    ("---\n", {}),
    ("---\n...\n", {}),
    ("null", {}),
    ("{}", {}),
    # sections that are empty or null mean their defaults
    ("mtp:\n  # enabled: true\ngbs: 7", {"gbs": 7}),
    ("mtp: null\ngbs: 7", {"gbs": 7}),
    ("mtp: ~\nmoe: {}", {}),
    ("backend_config:\n  cpu_offload:\n", {}),
    # falsy values are values
    ("activation_checkpointing: {enabled: false}", {"activation_checkpointing.enabled": False}),
    ("mtp: {enabled: true, loss_scaling_factor: 0}", {"mtp.enabled": True, "mtp.loss_scaling_factor": 0.0}),
    # line endings, mark, tab, document markers
    ("gbs: 4\r\nmtp:\r\n  enabled: true\r\n", {"gbs": 4, "mtp.enabled": True}),
    ("\ufeffgbs: 4", {"gbs": 4}),
    ("gbs:\t4", {"gbs": 4}),
    ("%YAML 1.2\n---\ngbs: 4\n", {"gbs": 4}),
    # aliases and merge keys
    ("mtp: &on {enabled: true}\nloss_chunk: *on", {"mtp.enabled": True, "loss_chunk.enabled": True}),
    ("mtp: {<<: {enabled: true}, log_loss: true}", {"mtp.enabled": True, "mtp.log_loss": True}),
    ("loss_chunk: &a {enabled: true}\nmtp: {enabled: false, <<: *a}", {"loss_chunk.enabled": True}),
    ("loss_chunk: &a {enabled: true}\nmtp: {<<: *a, enabled: false}", {"loss_chunk.enabled": True}),
    ("mtp: {<<: [{enabled: true}, {enabled: false, log_loss: true}]}", {"mtp.enabled": True, "mtp.log_loss": True}),
    # keys may be quoted
    ("'gbs': 4\n\"mtp\": {'enabled': true}", {"gbs": 4, "mtp.enabled": True}),
]


@pytest.mark.parametrize(("text", "settings"), GOOD)
def test_what_a_file_may_say(text: str, settings: dict[str, Any]) -> None:
    """The settings of the file and no others."""
    done = launch(file=text)
    assert ([], settings) == (done.errors, done.settings)


WRONG: list[tuple[str, list[str]]] = [
    # unknown keys
    ("mtp: {enabeld: true}", ["1:7: mtp.enabeld: unknown key; did you mean enabled?"]),
    ("mpt: {enabled: true}", ["1:1: mpt: unknown key; did you mean mtp?"]),
    ("GBS: 4", ["1:1: GBS: unknown key; did you mean gbs?"]),
    ("mtp.enabled: true", ["1:1: mtp.enabled: unknown key; nest it: enabled under mtp"]),
    (
        "backend_config.cpu_offload: {enabled: true}",
        ["1:1: backend_config.cpu_offload: unknown key; nest it: cpu_offload under backend_config"],
    ),
    ("mtp: {gbs: 4}", ["1:7: mtp.gbs: unknown key; in a file it is gbs"]),
    (
        "moe: {mtp: {enabled: true}}",
        ["1:7: moe.mtp: unknown key; the keys here are token_dispatcher, aux_loss_coeff, z_loss_coeff"],
    ),
    ("enable_mtp: true", ["1:1: enable_mtp: unknown key; in a file it is mtp.enabled"]),
    ("sp_size: 2", ["1:1: sp_size: unknown key; in a file it is parallel_plan.sp_size"]),
    ("tt_gbs: 4", ["1:1: tt_gbs: unknown key; in a file it is gbs"]),
    ("--tt_gbs: 4", ["1:1: --tt_gbs: unknown key; in a file it is gbs"]),
    ("TORCH_TURBO_GBS: 4", ["1:1: TORCH_TURBO_GBS: unknown key; in a file it is gbs"]),
    ("mfu: {card_name: h100}", ["1:7: mfu.card_name: unknown key; in a file it is mfu.card"]),
    (
        "backend_config: {reshard_after_fwd: false}",
        ["1:18: backend_config.reshard_after_fwd: unknown key; did you mean reshard_after_forward?"],
    ),
    (
        "freeze_policy: {mm_proj_only: true}",
        [
            "1:17: freeze_policy.mm_proj_only: unknown key; "
            "the keys here are vision_tower, multi_modal_projector, language_model"
        ],
    ),
    (
        "loss_scaling_factor: 1",
        ["1:1: loss_scaling_factor: unknown key; did you mean mtp.loss_scaling_factor or dspark.loss_scaling_factor?"],
    ),
    ("learning_rate: 1e-5", [f"1:1: learning_rate: {NOT_OURS}"]),
    ("1: 2", [f"1:1: 1: {NOT_OURS}"]),
    ("true: 1", [f"1:1: true: {NOT_OURS}"]),
    ("on: 1", [f"1:1: on: {NOT_OURS}"]),
    # inputs of a launch
    ("log_level: DEBUG", ["1:1: log_level: unknown key; it belongs to one launch: use --tt_log_level"]),
    ("config_path: x", ["1:1: config_path: unknown key; it belongs to one launch: use --tt_config"]),
    ("plugins: [a.py]", ["1:1: plugins: unknown key; it belongs to one launch: use --tt_plugin"]),
    ("profiling: true", ["1:1: profiling: unknown key; it belongs to one launch: use --tt_profiling"]),
    ("resume_allow: [gbs]", ["1:1: resume_allow: unknown key; it belongs to one launch: use --tt_resume_allow"]),
    # wrong shapes
    ("- 1", ["1:1: expected a mapping of keys, got a list; write one `key: value` a line"]),
    ("4", ["1:1: expected a mapping of keys, got 4; write one `key: value` a line"]),
    ("'x'", ['1:1: expected a mapping of keys, got string "x"; write one `key: value` a line']),
    (
        "mtp: true",
        ["1:6: mtp: expected the section mtp, got true; its keys are enabled, loss_scaling_factor, log_loss"],
    ),
    (
        "mtp: []",
        ["1:6: mtp: expected the section mtp, got a list; its keys are enabled, loss_scaling_factor, log_loss"],
    ),
    (
        "mtp: ''",
        ['1:6: mtp: expected the section mtp, got string ""; its keys are enabled, loss_scaling_factor, log_loss'],
    ),
    (
        "backend_config: {cpu_offload: true}",
        [
            "1:31: backend_config.cpu_offload: expected the section backend_config.cpu_offload, got true; "
            "its keys are enabled, mode, optimizer_memory_fraction"
        ],
    ),
    # given twice, with both places
    ("gbs: 1\ngbs: 2", ["2:1: gbs: key given twice (first at turbo.yaml:1:1); keep one of the two"]),
    (
        "mtp: {enabled: true, enabled: false}",
        ["1:22: mtp.enabled: key given twice (first at turbo.yaml:1:7); keep one of the two"],
    ),
    ("gbs: 1\n---\ngbs: 2", ["2:1: a second document starts here; keep one document in a file"]),
    # places count from where an editor counts
    ("\ufeffgbs: x", ['1:6: gbs: expected integer or null, got string "x"']),
    ("gbs: 4\r\nmtp: {enabled: yes}", ['2:16: mtp.enabled: expected boolean, got string "yes"; write true']),
    (
        "mfu: {card: ▁, enabled: 2}",
        [
            "1:13: mfu.card: expected one of 910b, 910c, h20, h100, h200, a100, 910b1, 91"
            '0b3, 910b4, h100-pcie, h100-nvl, h200-nvl, b200, gb200, null, got string "▁"',
            "1:25: mfu.enabled: expected boolean, got integer 2; write true or false",
        ],
    ),
    # an alias's value stands where it is written
    (
        "mtp: {loss_scaling_factor: &x -1}\nmoe: {z_loss_coeff: *x}",
        [
            "1:28: mtp.loss_scaling_factor: expected at least 0, got number -1",
            "1:28: moe.z_loss_coeff: expected at least 0, got number -1",
        ],
    ),
    # all problems, in the order of the file
    (
        "mtp: {enabled: yes}\ngbs: 1\ngbs: 2",
        [
            '1:16: mtp.enabled: expected boolean, got string "yes"; write true',
            "3:1: gbs: key given twice (first at turbo.yaml:2:1); keep one of the two",
        ],
    ),
    (
        "mtp: {enabled: yes}\nmixed_precision: fp8\nmpt: 1",
        [
            '1:16: mtp.enabled: expected boolean, got string "yes"; write true',
            '2:18: mixed_precision: expected one of bf16, fp32, null, got string "fp8"',
            "3:1: mpt: unknown key; did you mean mtp?",
        ],
    ),
]


@pytest.mark.parametrize(("text", "errors"), WRONG, ids=[repr(case[0])[:40] for case in WRONG])
def test_what_is_wrong_with_a_file(text: str, errors: list[str]) -> None:
    """Every problem with file, line and column, the key, and the way out."""
    assert [f"turbo.yaml:{error}" for error in errors] == launch(file=text).errors


JSON_WRONG = [
    ('{"gbs": 1, "gbs": 2}', "1:12: gbs: key given twice (first at turbo.json:1:2); keep one of the two"),
    ('{"mtp": {"enabled": "false"}}', '1:21: mtp.enabled: expected boolean, got string "false"; remove the quotes'),
    ('{"mtp.enabled": true}', "1:2: mtp.enabled: unknown key; nest it: enabled under mtp"),
    ('{"gbs": NaN}', "1:9: gbs: expected a value, got 'NaN'; JSON has no such number"),
    ('{"gbs": 4,}', "1:10: a comma before '}'; remove the comma"),
    ("[1]", "1:1: expected a mapping of keys, got a list; write one `key: value` a line"),
    ("// c", "1:1: expected a value, got '/'; JSON has no comments; remove it, or use a .yaml file"),
]


@pytest.mark.parametrize(("text", "error"), JSON_WRONG)
def test_what_is_wrong_with_a_json_file(text: str, error: str) -> None:
    """The same problems with the same places; the format's own are told in plain words."""
    assert [f"turbo.json:{error}"] == launch(file=text, name="turbo.json").errors


@pytest.mark.parametrize("text", ["", "  \n", "null", "{}", '{"mtp": null, "gbs": null}', "\ufeff{}"])
def test_empty_json_files_say_nothing(text: str) -> None:
    """JSON files follow the rules of YAML files."""
    done = launch(file=text, name="turbo.json")
    assert ([], {}) == (done.errors, done.settings)


EVERYTHING = {path: key.examples[0] for path, key in KEYS.items() if not key.runtime}


def test_json_and_yaml_give_the_same_configuration() -> None:
    """With every key set, and with places of their own."""
    tree: dict[str, Any] = {}
    for path, value in EVERYTHING.items():
        *sections, name = path.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    Path("t.json").write_text(json.dumps(tree), encoding="utf-8")
    config = load_config("t.json")
    Path("t.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert config == load_config("t.yaml")
    assert EVERYTHING == {path: config.get(path) for path in EVERYTHING}
    assert "t.json:1:13" == config.origin("backend").place
    assert to_json(config) == to_json(load_config("t.yaml"))


def test_a_file_that_is_no_file() -> None:
    """Nothing that a path can name is a traceback, and the environment is still read."""
    os.mkfifo("pipe")
    os.symlink("loop", "loop")
    Path("folder").mkdir()
    for name, said in [
        ("nowhere.yaml", "no such file"),
        ("folder", "expected a file, got a directory"),
        ("pipe", "expected a file, got a pipe"),
        ("loop", "cannot be read"),
        ("~/x.yaml", "the shell left ~ as it is"),
    ]:
        errors = launch(["--tt_config", name], env={"TORCH_TURBO_GBS": "0"}).errors
        assert errors[0].startswith(f"{name}: ") and said in errors[0]
        assert ["TORCH_TURBO_GBS: expected at least 1, got 0"] == errors[1:]


def test_the_locale_does_not_matter() -> None:
    """Files are UTF-8 always; a place that reads ASCII only still gets its error."""
    Path("t.yaml").write_text('mfu: {card: "▁"}', encoding="utf-8")
    code = "from torchturbo.engine.config import load_config; load_config('t.yaml')"
    done = python("-c", code, env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, encoding="ascii")
    assert 2 == done.returncode
    assert "error: t.yaml:1:13: mfu.card: expected one of" in done.stderr and "Traceback" not in done.stderr
    assert '"\\u2581"' in done.stderr or '"?"' in done.stderr


def test_load_config_reads_the_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither environment nor process-wide arguments enter."""
    Path("t.yaml").write_text("gbs: 4", encoding="utf-8")
    monkeypatch.setenv("TORCH_TURBO_GBS", "8")
    assert 4 == load_config("t.yaml").gbs
    with pytest.raises(ConfigError):
        load_config("nowhere.yaml")


@pytest.mark.parametrize("section", [path for path in SECTIONS if path])
def test_every_section_takes_null_and_nothing_else_but_keys(section: str) -> None:
    """A section that is null means its defaults; a scalar or a list is no section."""
    *parents, name = section.split(".")
    for text, wrong in [("null", False), ("", False), ("0", True), ("[]", True)]:
        file = f"{name}: {text}"
        for parent in reversed(parents):
            file = f"{parent}: {{{file}}}"
        assert wrong is bool(launch(file=file).errors), file


def test_a_wrong_file_gets_a_hundred_problems_and_an_end() -> None:
    """A file of ten thousand unknown keys is the wrong file; nobody reads ten thousand lines."""
    Path("t.yaml").write_text("gbs: 8\n" + "".join(f"key{i}: {i}\n" for i in range(10_000)), encoding="utf-8")
    reading = read_file("t.yaml")
    assert 101 == len(reading.problems)
    assert "t.yaml:101:1: 100 problems up to here; the rest is not read; is it the right file?" == str(
        reading.problems[-1]
    )
    assert 8 == reading.settings["gbs"].value
