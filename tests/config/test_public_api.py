"""torchturbo.engine.args: what parsing returns, what the two converters read, and how bad input ends a program."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import launch, python

from torchturbo.engine import args as api
from torchturbo.engine.args import (
    TorchTurboArgs,
    get_torchturbo_args,
    parse_log_level,
    parse_torchturbo_args,
    set_torchturbo_args,
    string_to_bool,
)
from torchturbo.engine.backends.fsdp2.config import CPUOffloadConfig
from torchturbo.engine.config import Layer, build_from_args
from torchturbo.errors import ConfigError, Problem, fail
from torchturbo.logging import LogLevel

TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


# -- parsing ----------------------------------------------------------------------------------------------------------


def test_overrides_hold_what_was_said_on_the_line() -> None:
    """Explicit options by their name without dashes; defaults, file, environment and launch inputs stay out."""
    line = ["--tt_sp_size", "2", "--tt_enable_mtp", "false", "--tt_profiling", "--tt_plugin", "a.py", "--tt_gbs=null"]
    env = {"TORCH_TURBO_EP_SIZE": "4"}
    args = launch([*line, "--tt_log_level", "error"], file="loss_chunk: {enabled: true}", env=env).args
    assert args is not None
    assert {"tt_sp_size": 2, "tt_enable_mtp": False, "tt_gbs": None} == args.config_overrides
    assert (2, None, False, ["a.py"], True) == (
        args.sp_size,
        args.ep_size,
        args.enable_chunk_loss,
        args.plugins,
        args.profiling,
    )
    assert (LogLevel.ERROR, "turbo.yaml") == (args.log_level, args.config_path)


def test_two_options_live_in_the_overrides_alone() -> None:
    """log_mfu and card_name have no field, and still take effect."""
    done = launch(["--tt_log_mfu", "--tt_card_name", "h100"])
    assert done.args is not None
    assert {"tt_log_mfu": True, "tt_card_name": "h100"} == done.args.config_overrides
    assert (True, "h100") == (done["mfu.enabled"], done["mfu.card"])
    assert not hasattr(done.args, "log_mfu") and not hasattr(done.args, "card_name")


def test_without_arguments_the_programs_own_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """None means sys.argv without the program's name."""
    monkeypatch.setattr(sys, "argv", ["--tt_gbs", "--tt_sp_size", "2", "left"])
    args, rest = parse_torchturbo_args()
    assert (2, ["left"]) == (args.sp_size, rest)


def test_parsing_changes_nothing_that_it_was_given() -> None:
    """The list of words and the environment are as they were."""
    words, before = ["--tt_gbs", "4", "x"], dict(os.environ)
    parse_torchturbo_args(words)
    assert (["--tt_gbs", "4", "x"], before) == (words, dict(os.environ))


def test_arguments_are_kept_for_the_process() -> None:
    """set returns nothing, get returns the same object, and build_from_args() reads it."""
    assert get_torchturbo_args() is None
    args, _ = parse_torchturbo_args(["--tt_gbs", "4"])
    try:
        set_torchturbo_args(args)
        assert args is get_torchturbo_args()
        assert 4 == build_from_args().gbs
    finally:
        set_torchturbo_args(None)
    assert get_torchturbo_args() is None
    assert build_from_args().gbs is None


# -- converters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [*TRUE, *FALSE, *(word.upper() for word in TRUE + FALSE), "tRuE", "No"])
def test_the_ten_boolean_words_in_any_case(word: str) -> None:
    """Each of the ten words, whatever its case, is a boolean."""
    assert (word.lower() in TRUE) is string_to_bool(word)


@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_passes_through(value: bool) -> None:
    """The converter is also argparse's for a default."""
    assert value is string_to_bool(value)


@pytest.mark.parametrize("word", ["", "on", "off", " true", "true ", "none", "2", "01", "ja", "TRUEE", "1.0"])
def test_other_words_are_refused_with_the_ten(word: str) -> None:
    """The error is argparse's own and lists what is allowed."""
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        string_to_bool(word)
    assert all(allowed in str(caught.value) for allowed in TRUE + FALSE)
    assert repr(word) in str(caught.value)


def test_booleans_are_read_as_transformers_reads_them() -> None:
    """Same words, same values, same exception."""
    theirs = pytest.importorskip("transformers.hf_argparser").string_to_bool
    for word in [True, False, *TRUE, *FALSE, "YES", "on", "", " true", "2", "None", "ı", "ﬀ"]:
        assert outcome(theirs, word) == outcome(string_to_bool, word), word


def outcome(read: Any, word: Any) -> Any:
    try:
        return read(word)
    except argparse.ArgumentTypeError:
        return argparse.ArgumentTypeError


@pytest.mark.parametrize("text", ["debug", "DEBUG", " Debug ", "\tdebug\n"])
def test_log_levels_in_any_case_with_blanks_around(text: str) -> None:
    """A level is found by its name alone."""
    assert LogLevel.DEBUG is parse_log_level(text)


def test_a_log_level_passes_through() -> None:
    """The converter is also argparse's for a default."""
    assert LogLevel.ERROR is parse_log_level(LogLevel.ERROR)


@pytest.mark.parametrize("text", ["warn", "", "10", "critical", "DE BUG", "__class__"])
def test_other_log_levels_are_refused_with_the_four(text: str) -> None:
    """The error is argparse's own and lists what is allowed."""
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        parse_log_level(text)
    assert "DEBUG, INFO, WARNING, ERROR" in str(caught.value)


# -- how bad input ends -----------------------------------------------------------------------------------------------


def test_everything_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A bad option makes file and environment be read too; each problem is a line, lowest layer first."""
    done = launch(
        ["--tt_gbs", "x", "--tt_nope"], file="gbs: y\nmpt: 1", env={"TORCH_TURBO_SP_SIZE": "z", "TORCH_TURBO_EP": "1"}
    )
    assert [
        'turbo.yaml:1:6: gbs: expected integer or null, got string "y"',
        "turbo.yaml:2:1: mpt: unknown key; did you mean mtp?",
        'TORCH_TURBO_SP_SIZE: expected integer, got "z"',
        '--tt_gbs: expected integer or null, got "x"',
        "--tt_nope: unknown option; --tt_help lists all options",
    ] == done.errors


def test_file_and_environment_are_judged_when_the_line_is_right() -> None:
    """Without a bad option parsing succeeds, and building reports the rest, rules included."""
    done = launch(file="diffusion: {bd_mask_low: 0.9}\ngbs: 0", env={"TORCH_TURBO_SP_SIZE": "0"})
    assert done.args is not None
    assert [
        "turbo.yaml:2:6: gbs: expected at least 1, got integer 0",
        "TORCH_TURBO_SP_SIZE: expected at least 1, got 0",
        "turbo.yaml:1:26: diffusion.bd_mask_low: expected <= diffusion.bd_mask_high (0.8, default), got 0.9; "
        "the noise ratio is drawn between the two bounds",
    ] == done.errors


def test_the_error_is_an_exit_with_status_2_that_knows_its_problems() -> None:
    """Code may catch it and read the problems."""
    with pytest.raises(SystemExit) as caught:
        parse_torchturbo_args(["--tt_gbs", "0"])
    assert isinstance(caught.value, ConfigError)
    assert 2 == caught.value.code
    assert (Problem("--tt_gbs", "", "expected at least 1, got 0"),) == caught.value.problems
    assert "--tt_gbs: expected at least 1, got 0" == str(caught.value)


@pytest.mark.parametrize(("rank", "lines"), [("", 1), ("0", 1), ("1", 0), ("7", 0)])
def test_problems_are_printed_once_a_node(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first process of a node prints; all of them end."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(ConfigError):
        fail([Problem("a.yaml:1:2", "gbs", "expected integer", "write 4")])
    assert ["error: a.yaml:1:2: gbs: expected integer; write 4"][:lines] == capsys.readouterr().err.splitlines()


def test_a_problem_is_one_line_whatever_it_is_about() -> None:
    """Line ends and control characters are shown as escapes; letters of any alphabet are shown as they are."""
    (error,) = launch(["--tt_x\ny\x1b[31m"]).errors
    assert error.startswith("--tt_x\\ny\\x1b[31m: unknown option")
    assert "a\\udc80b: gbs: ▁ é" == str(Problem("a\udc80b", "gbs", "▁ é"))


def test_help_is_printed_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    """Our help has every option; a wrong option beside it does not matter."""
    with pytest.raises(SystemExit) as caught:
        parse_torchturbo_args(["--tt_gbs", "x", "--tt_help"])
    assert 0 == caught.value.code and not isinstance(caught.value, ConfigError)
    text = capsys.readouterr().out
    for spec in api.get_arg_specs():
        assert spec.cli_name is None or f"\n  {spec.cli_name}" in text, spec.name
        assert spec.env_name is None or spec.cli_name is None or spec.env_name in text, spec.name
    assert max(map(len, text.splitlines())) <= 80


def test_the_help_option_of_the_framework_is_left_to_it() -> None:
    """--help and -h stay in the rest."""
    assert ["--help", "-h"] == launch(["--help", "-h"]).rest


# -- arguments that code sets -----------------------------------------------------------------------------------------


def test_fields_that_code_sets_take_effect_with_their_place() -> None:
    """A field changed after parsing counts as much as an option."""
    args, _ = parse_torchturbo_args(["--tt_gbs", "4"])
    args.sp_size = 4
    args.gbs = 8
    args.log_level = LogLevel.DEBUG
    args.plugins.append("b.py")
    config = build_from_args(args)
    assert (4, 8, LogLevel.DEBUG, ("b.py",)) == (
        config.parallel_plan.sp_size,
        config.gbs,
        config.runtime.log_level,
        tuple(config.runtime.plugins),
    )
    assert (Layer.COMMAND_LINE, "TorchTurboArgs.sp_size") == config.origin("parallel_plan.sp_size")
    assert "TorchTurboArgs.gbs" == config.origin("gbs").place


def test_falsy_fields_that_code_sets_beat_lower_layers() -> None:
    """False and 0 are values."""
    Path("turbo.yaml").write_text("mtp: {enabled: true}\ndiffusion: {cap_lambda: 2.0}", encoding="utf-8")
    args, _ = parse_torchturbo_args(["--tt_config", "turbo.yaml", "--tt_enable_mtp", "--tt_cap_lambda", "1"])
    args.enable_mtp = False
    args.cap_lambda = 0.0
    config = build_from_args(args)
    assert (False, 0.0) == (config.mtp.enabled, config.diffusion.cap_lambda)


def test_a_field_set_back_to_none_is_not_specified() -> None:
    """For a key that does not take null, None says "not given" and lower layers hold."""
    args, _ = parse_torchturbo_args(["--tt_sp_size", "2"])
    args.sp_size = None
    config = build_from_args(args, environ={"TORCH_TURBO_SP_SIZE": "8"})
    assert (8, "TORCH_TURBO_SP_SIZE") == (config.parallel_plan.sp_size, config.origin("parallel_plan.sp_size").place)


def test_a_section_that_code_sets_takes_effect() -> None:
    """A whole CPUOffloadConfig counts; the option of one of its keys has precedence."""
    args = TorchTurboArgs(cpu_offload=CPUOffloadConfig(enabled=True, mode="optimizer", optimizer_memory_fraction=0.0))
    config = build_from_args(args)
    assert CPUOffloadConfig(enabled=True, mode="optimizer", optimizer_memory_fraction=0.0) == (
        config.backend_config.cpu_offload
    )
    assert "TorchTurboArgs.cpu_offload.mode" == config.origin("backend_config.cpu_offload.mode").place
    args.cpu_offload_enabled = False
    assert build_from_args(args).backend_config.cpu_offload.enabled is False


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("sp_size", 0, "TorchTurboArgs.sp_size: expected at least 1, got integer 0"),
        ("gbs", "four", "TorchTurboArgs.gbs: expected integer or null, got string 'four'"),
        ("gbs", True, "TorchTurboArgs.gbs: expected integer or null, got boolean True"),
        ("cap_lambda", float("nan"), "TorchTurboArgs.cap_lambda: expected a finite number, got number nan"),
        ("plugins", ["a.txt"], "--tt_plugin: expected PATH.py or PATH.py:CONFIG"),
    ],
)
def test_bad_values_that_code_sets_are_errors(field: str, value: Any, expected: str) -> None:
    """Values from code pass the same checks, and the place names the field."""
    args = TorchTurboArgs()
    setattr(args, field, value)
    with pytest.raises(ConfigError) as caught:
        build_from_args(args)
    assert str(caught.value).startswith(expected)


def test_numbers_that_code_sets_get_the_type_of_their_key() -> None:
    """2 for a number is 2.0, and 4.0 for an integer is 4."""
    config = build_from_args(TorchTurboArgs(cap_lambda=2, gbs=4.0))  # type: ignore[arg-type]
    assert (2.0, float, 4, int) == (
        config.diffusion.cap_lambda,
        type(config.diffusion.cap_lambda),
        config.gbs,
        type(config.gbs),
    )


def test_unknown_overrides_are_errors() -> None:
    """config_overrides is checked too."""
    with pytest.raises(ConfigError) as caught:
        build_from_args(TorchTurboArgs(config_overrides={"tt_gsb": 4}))
    assert "TorchTurboArgs.config_overrides['tt_gsb']" in str(caught.value)


def test_overrides_that_code_sets_take_effect() -> None:
    """The two options without a field can be set from code."""
    config = build_from_args(TorchTurboArgs(config_overrides={"tt_log_mfu": True}))
    assert (True, "--tt_log_mfu") == (config.mfu.enabled, config.origin("mfu.enabled").place)


# -- what a parse imports ---------------------------------------------------------------------------------------------

HEAVY = ("torch", "transformers", "jsonschema", "numpy", "omegaconf", "pydantic")


def imported(code: str, *argv: str, unwanted: tuple[str, ...]) -> str:
    script = f"import sys\n{code}\nprint([name for name in {unwanted!r} if name in sys.modules])"
    done = python("-c", script, *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_parse_imports_nothing_heavy() -> None:
    """Options alone need neither argparse nor YAML, booleans with a value included."""
    code = "from torchturbo.engine.args import parse_torchturbo_args; parse_torchturbo_args(sys.argv[1:])"
    argv = ("--tt_enable_mtp", "true", "--tt_gbs", "4", "--tt_cap_lambda", "1e-5", "--tt_log_level", "debug", "x")
    assert "[]" == imported(
        code, *argv, unwanted=(*HEAVY, "argparse", "yaml", "logging", "torchturbo.generated.config")
    )


def test_building_a_configuration_imports_nothing_heavy() -> None:
    """File, environment and options together need a YAML parser and no more."""
    Path("t.yaml").write_text("gbs: 4\nmtp: {log_loss: true}\n", encoding="utf-8")
    code = (
        "from torchturbo.engine.args import parse_torchturbo_args\n"
        "from torchturbo.engine.config import build_from_args\n"
        "build_from_args(parse_torchturbo_args(sys.argv[1:])[0])"
    )
    assert "[]" == imported(code, "--tt_config", "t.yaml", unwanted=(*HEAVY, "argparse"))


@pytest.mark.parametrize(
    "words",
    [
        "config show --tt_gbs 4",
        "config show --format json",
        "config explain gbs",
        "config validate t.yaml",
        "config init -",
        "config schema",
        "completion bash",
        "--version",
        "--help",
        "config --help",
        "--tt_help",
    ],
)
def test_commands_import_nothing_heavy(words: str) -> None:
    """Help, completion and the configuration commands run without the training stack."""
    Path("t.yaml").write_text("gbs: 4\n", encoding="utf-8")
    code = (
        "from torchturbo.cli.main import main\n"
        "try:\n    status = main(sys.argv[1:])\nexcept SystemExit as error:\n    status = error.code\n"
        "assert not status, status"
    )
    assert "[]" == imported(code, *words.split(), unwanted=HEAVY)
