"""The command line: what is ours, what is left, and which words an option takes."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from launching import ROOT, launch

from torchturbo.config.commandline import read_command_line
from torchturbo.generated.keys import KEYS

UNKNOWN = "unknown option; did you mean"
PLUGIN = "expected PATH.py or PATH.py:CONFIG, or an installed plugin's NAME or NAME:CONFIG"

# What is left of a line, and what was set.
TAKEN: list[tuple[str, list[str], dict[str, Any]]] = [
    ("", [], {}),
    ("train.yaml --lr 1e-5 -v", ["train.yaml", "--lr", "1e-5", "-v"], {}),
    # what only looks like ours
    ("--t 3", ["--t", "3"], {}),
    ("--tt 3", ["--tt", "3"], {}),
    ("--TT_gbs 3", ["--TT_gbs", "3"], {}),
    ("-tt_gbs 4", ["-tt_gbs", "4"], {}),
    ("tt_gbs=4", ["tt_gbs=4"], {}),
    ("--x=--tt_gbs", ["--x=--tt_gbs"], {}),
    # order of the rest
    ("--local_rank=0 --tt_sp_size 2 x.yaml", ["--local_rank=0", "x.yaml"], {"parallel_plan.sp_size": 2}),
    ("a --tt_gbs=4 b --tt_enable_mtp c", ["a", "b", "c"], {"gbs": 4, "mtp.enabled": True}),
    ("--run_name --tt_sp_size 2", ["--run_name"], {"parallel_plan.sp_size": 2}),
    ("--a= --b=c --d", ["--a=", "--b=c", "--d"], {}),
    # the end of options is handed on with what follows
    ("-- --tt_sp_size 2", ["--", "--tt_sp_size", "2"], {}),
    ("--tt_gbs 4 -- --tt_sp_size 2 --", ["--", "--tt_sp_size", "2", "--"], {"gbs": 4}),
    ("-- --tt_nope --tt_help", ["--", "--tt_nope", "--tt_help"], {}),
    ("--tt_enable_mtp -- true", ["--", "true"], {"mtp.enabled": True}),
    # one value each; the next word is not ours
    ("--tt_gbs 4 5", ["5"], {"gbs": 4}),
    ("--tt_gbs=4 5", ["5"], {"gbs": 4}),
    ("--tt_plugin a.py b.py", ["b.py"], {}),
    # repeated options
    ("--tt_sp_size 2 --tt_sp_size 4", [], {"parallel_plan.sp_size": 4}),
    ("--tt_sp_size 4 --tt_sp_size 1", [], {}),
    ("--tt_enable_mtp no --tt_enable_mtp", [], {"mtp.enabled": True}),
    ("--tt_enable_mtp --tt_enable_mtp=no", [], {}),
    # booleans
    ("--tt_enable_mtp", [], {"mtp.enabled": True}),
    ("--tt_enable_mtp true", [], {"mtp.enabled": True}),
    ("--tt_enable_mtp=false", [], {}),
    ("--tt_enable_mtp Y x", ["x"], {"mtp.enabled": True}),
    ("--tt_gradient_checkpointing 0", [], {"activation_checkpointing.enabled": False}),
    ("--tt_gradient_checkpointing F x", ["x"], {"activation_checkpointing.enabled": False}),
    ("--tt_enable_mtp train.yaml", ["train.yaml"], {"mtp.enabled": True}),
    ("--tt_enable_mtp flase.yaml", ["flase.yaml"], {"mtp.enabled": True}),
    ("--tt_enable_mtp --lr 1", ["--lr", "1"], {"mtp.enabled": True}),
    ("--tt_enable_mtp -1", ["-1"], {"mtp.enabled": True}),
    ("--tt_enable_mtp 2", ["2"], {"mtp.enabled": True}),
    ("--tt_enable_mtp data/true", ["data/true"], {"mtp.enabled": True}),
    ("--tt_enable_mtp trust", ["trust"], {"mtp.enabled": True}),
    ("--tt_enable_mtp fast", ["fast"], {"mtp.enabled": True}),
    ("--tt_enable_mtp ''", [""], {"mtp.enabled": True}),
    ("--tt_enable_mtp --tt_log_mfu", [], {"mtp.enabled": True, "mfu.enabled": True}),
    # numbers
    ("--tt_cap_lambda 1e-5", [], {"diffusion.cap_lambda": 1e-5}),
    ("--tt_cap_lambda=.5", [], {"diffusion.cap_lambda": 0.5}),
    ("--tt_cap_lambda 1E+2", [], {"diffusion.cap_lambda": 100.0}),
    ("--tt_cap_lambda 2", [], {"diffusion.cap_lambda": 2.0}),
    ("--tt_cap_lambda -0", [], {}),
    ("--tt_gbs 2.0", [], {"gbs": 2}),
    ("--tt_gbs 1e3", [], {"gbs": 1000}),
    ("--tt_gbs +4", [], {"gbs": 4}),
    ("--tt_gbs 0x10", [], {"gbs": 16}),
    ("--tt_gbs 0o10", [], {"gbs": 8}),
    # null
    ("--tt_gbs 4 --tt_gbs null", [], {}),
    (
        "--tt_enable_chunk_loss --tt_loss_chunk_size null",
        [],
        {"loss_chunk.enabled": True, "loss_chunk.chunk_size": None},
    ),
]


@pytest.mark.parametrize(("line", "rest", "settings"), TAKEN, ids=[case[0] for case in TAKEN])
def test_options_are_taken_and_the_rest_is_left(line: str, rest: list[str], settings: dict[str, Any]) -> None:
    """Every word that is not ours stays, in its order; what is ours is read by its key's type."""
    done = launch(words(line))
    assert [] == done.errors
    assert (rest, settings) == (done.rest, done.settings)
    assert {path: type(value) for path, value in settings.items()} == {
        path: type(value) for path, value in done.settings.items()
    }


REFUSED: list[tuple[str, str]] = [
    # abbreviations and other spellings
    ("--tt_forward 2", f"--tt_forward: {UNKNOWN} --tt_forward_prefetch_depth?"),
    ("--tt_bd_mask 0.1", f"--tt_bd_mask: {UNKNOWN} --tt_bd_mask_low or --tt_bd_mask_high?"),
    ("--tt_sp 2", f"--tt_sp: {UNKNOWN} --tt_sp_size?"),
    ("--tt_log INFO", f"--tt_log: {UNKNOWN} --tt_log_mfu or --tt_log_level?"),
    ("--tt_gbss 3", f"--tt_gbss: {UNKNOWN} --tt_gbs?"),
    ("--tt_gsb=3", f"--tt_gsb: {UNKNOWN} --tt_gbs?"),
    ("--tt_GBS 3", f"--tt_GBS: {UNKNOWN} --tt_gbs?"),
    ("--tt-gbs 3", f"--tt-gbs: {UNKNOWN} --tt_gbs?"),
    ("--tt-sp-size=2", f"--tt-sp-size: {UNKNOWN} --tt_sp_size or --tt_ep_size?"),
    ("--tt_sp_siez 2", f"--tt_sp_siez: {UNKNOWN} --tt_sp_size or --tt_ep_size?"),
    ("--tt_help_me", f"--tt_help_me: {UNKNOWN} --tt_help?"),
    # the key as a file has it
    ("--tt_mtp_enabled", f"--tt_mtp_enabled: {UNKNOWN} --tt_enable_mtp?"),
    ("--tt_mtp.enabled=true", f"--tt_mtp.enabled: {UNKNOWN} --tt_enable_mtp?"),
    ("--tt_dspark_enabled", f"--tt_dspark_enabled: {UNKNOWN} --tt_enable_dspark?"),
    ("--tt-diffusion.cap-lambda 2", f"--tt-diffusion.cap-lambda: {UNKNOWN} --tt_cap_lambda?"),
    ("--tt_parallel_plan_ep_sise 2", f"--tt_parallel_plan_ep_sise: {UNKNOWN} --tt_ep_size?"),
    ("--tt_set mtp.enabled=true", "--tt_set: unknown option; --tt_help lists all options"),
    ("--tt_", "--tt_: unknown option; --tt_help lists all options"),
    ("--tt_=3", "--tt_: unknown option; --tt_help lists all options"),
    # a value is missing
    ("--tt_gbs", "--tt_gbs: expected a value (integer or null)"),
    ("--tt_gbs --foo", "--tt_gbs: expected a value (integer or null), got the option --foo"),
    ("--tt_gbs --tt_log_mfu", "--tt_gbs: expected a value (integer or null), got the option --tt_log_mfu"),
    ("--tt_gbs -- 4", "--tt_gbs: expected a value (integer or null), got the option --"),
    ("--tt_mixed_precision", "--tt_mixed_precision: expected a value (one of bf16, fp32, null)"),
    ("--tt_gbs=", "--tt_gbs: expected integer or null, got nothing; did you mean null?"),
    ("--tt_gbs ''", "--tt_gbs: expected integer or null, got nothing; did you mean null?"),
    ("--tt_backend=", "--tt_backend: expected fsdp2, got nothing; leave it out for its default"),
    ("--tt_plugin=", f"--tt_plugin: {PLUGIN}, got nothing; leave it out for its default"),
    ("--tt_config=", "--tt_config: expected string or null, got nothing; did you mean null?"),
    (
        "--tt_enable_mtp=",
        "--tt_enable_mtp: expected boolean, got nothing; write true or false, or leave it out for its default",
    ),
    # booleans that were surely meant as a value
    ("--tt_enable_mtp on", '--tt_enable_mtp: expected boolean, got "on"; write true'),
    ("--tt_enable_mtp OFF", '--tt_enable_mtp: expected boolean, got "OFF"; write false'),
    ("--tt_enable_mtp none", '--tt_enable_mtp: expected boolean, got "none"; write false'),
    ("--tt_enable_mtp enabled", '--tt_enable_mtp: expected boolean, got "enabled"; write true'),
    ("--tt_enable_mtp disabled", '--tt_enable_mtp: expected boolean, got "disabled"; write false'),
    (
        "--tt_enable_mtp null",
        '--tt_enable_mtp: expected boolean, got "null"; write true or false, or leave it out for its default',
    ),
    ("--tt_enable_mtp=2", '--tt_enable_mtp: expected boolean, got "2"; write true or false'),
    ("--tt_enable_mtp=okay", '--tt_enable_mtp: expected boolean, got "okay"; write true or false'),
    *(
        (f"--tt_enable_mtp {slip}", f'--tt_enable_mtp: expected boolean, got "{slip}"; did you mean true?')
        for slip in (
            "ture",
            "treu",
            "rtue",
            "tru",
            "rue",
            "tue",
            "truee",
            "truue",
            "ttrue",
            "trie",
            "frue",
            "Treu",
            "true,",
        )
    ),
    *(
        (f"--tt_enable_mtp {slip}", f'--tt_enable_mtp: expected boolean, got "{slip}"; did you mean false?')
        for slip in ("flase", "fasle", "fales", "fals", "alse", "falsee", "faalse", "felse", "falze", "FLASE")
    ),
    (
        "--tt_cpu_offload '{\"enabled\": true}'",
        '--tt_cpu_offload: expected boolean, got "{\\"enabled\\": true}"; write true or false; '
        "a whole section belongs in a file",
    ),
    (
        "--tt_cpu_offload [1]",
        '--tt_cpu_offload: expected boolean, got "[1]"; write true or false; a whole section belongs in a file',
    ),
    # null and its lookalikes
    *(
        (f"--tt_gbs {word}", f'--tt_gbs: expected integer or null, got "{word}"; did you mean null?')
        for word in ("None", "none", "~")
    ),
    ("--tt_hf_export null", '--tt_hf_export: expected one of final, every, got "null"; leave it out for its default'),
    ("--tt_sp_size null", '--tt_sp_size: expected integer, got "null"; leave it out for its default'),
    # enums
    ("--tt_backend fsdp3", '--tt_backend: expected fsdp2, got "fsdp3"; did you mean fsdp2?'),
    (
        "--tt_mixed_precision BF16",
        '--tt_mixed_precision: expected one of bf16, fp32, null, got "BF16"; did you mean bf16?',
    ),
    (
        "--tt_prefetch_strategy typo",
        '--tt_prefetch_strategy: expected one of native, auto, expert_with_layer, expert_lookahead, got "typo"',
    ),
    (
        "--tt_log_level warn",
        '--tt_log_level: expected one of DEBUG, INFO, WARNING, ERROR, got "warn"; did you mean WARNING?',
    ),
    # numbers
    ("--tt_gbs -5", "--tt_gbs: expected at least 1, got -5"),
    ("--tt_sp_size 0", "--tt_sp_size: expected at least 1, got 0"),
    ("--tt_sp_size 2147483648", "--tt_sp_size: expected at most 2147483647, got 2147483648"),
    ("--tt_sp_size 1_6", '--tt_sp_size: expected integer, got "1_6"; write 16'),
    ("--tt_sp_size 2.5", "--tt_sp_size: expected integer, got 2.5; write a whole number"),
    ("--tt_gbs ٣", '--tt_gbs: expected integer or null, got "٣"; write the digits 0 to 9'),
    ("--tt_gbs ' 4'", '--tt_gbs: expected integer or null, got " 4"; write it without blanks'),
    ("--tt_mtp_loss_scaling_factor -1e-5", "--tt_mtp_loss_scaling_factor: expected at least 0, got -1e-05"),
    ("--tt_mtp_loss_scaling_factor -.5", "--tt_mtp_loss_scaling_factor: expected at least 0, got -0.5"),
    ("--tt_mtp_loss_scaling_factor=-3", "--tt_mtp_loss_scaling_factor: expected at least 0, got -3.0"),
    ("--tt_bd_mask_low 1.5", "--tt_bd_mask_low: expected at most 1, got 1.5"),
    *(
        (f"--tt_cap_lambda {word}", f"--tt_cap_lambda: expected a finite number, got {shown}")
        for word, shown in [("nan", "nan"), ("-inf", "-inf"), ("Infinity", "inf"), (".inf", "inf"), ("1e999", "inf")]
    ),
    # plugins
    (
        "--tt_plugin a.py, b.py",
        f'--tt_plugin: {PLUGIN}, got "a.py,"; give --tt_plugin once for each',
    ),
    ("--tt_plugin null", f'--tt_plugin: {PLUGIN}, got "null"; leave it out for its default'),
    ("--tt_plugin None:x", f'--tt_plugin: {PLUGIN}, got "None:x"'),
    ("--tt_plugin a.txt", f'--tt_plugin: {PLUGIN}, got "a.txt"'),
    ("--tt_plugin C:/a.txt", f'--tt_plugin: {PLUGIN}, got "C:/a.txt"'),
    ("--tt_plugin my_plugin:", f'--tt_plugin: {PLUGIN}, got "my_plugin:"'),
]


@pytest.mark.parametrize(("line", "error"), REFUSED, ids=[case[0] for case in REFUSED])
def test_wrong_options_are_refused(line: str, error: str) -> None:
    """The one error names the option, what was expected, what was found, and what to do."""
    assert [error] == launch(words(line)).errors


@pytest.mark.parametrize("text", ["foo:", "{a}", "[1]", "#x", "*x", "on", "null ", "${x}", "2026-01-01", "▁", "-x"])
def test_enum_values_are_shown_as_they_were_written(text: str) -> None:
    """No text is read as YAML or anything else before it is compared."""
    cards = "910b, 910c, h20, h100, h200, a100, 910b1, 910b3, 910b4, h100-pcie, h100-nvl, h200-nvl, b200, gb200"
    expected = f'--tt_card_name: expected one of {cards}, null, got "{text}"'
    assert [expected] == [error.partition(";")[0] for error in launch([f"--tt_card_name={text}"]).errors]


def test_long_values_are_cut_in_errors() -> None:
    """An error stays one readable line."""
    (error,) = launch(["--tt_gbs", "x" * 10_000]).errors
    assert len(error) < 160 and error.endswith('..."')


def test_plugins_and_resume_permissions_add_up() -> None:
    """Lists collect every occurrence in order."""
    line = "--tt_plugin a.py --tt_resume_allow gbs --tt_plugin=b.py:c.yaml --tt_plugin ema --tt_plugin my-own_1:d.json"
    done = launch(words(f"{line} --tt_resume_allow mtp.enabled"))
    assert ("a.py", "b.py:c.yaml", "ema", "my-own_1:d.json") == tuple(done["plugins"])
    assert ("gbs", "mtp.enabled") == tuple(done["resume_allow"])


def test_a_misspelt_option_takes_its_value_along() -> None:
    """The framework does not also complain about the value of an option that was meant for us."""
    for line, rest in [
        ("--tt_gbss -3 x --tt_nope --lr 1", ["x", "--lr", "1"]),
        ("--tt_gbss=3 x", ["x"]),
        ("--tt_enabel_mtp", []),
    ]:
        found = read_command_line(words(line))
        assert rest == found.rest
        assert all(problem.message == "unknown option" for problem in found.reading.problems)


def test_each_option_is_taken_in_both_forms() -> None:
    """``--x value`` and ``--x=value`` mean the same for every option."""
    for key in KEYS.values():
        if key.cli:
            value = "false" if key.type == "boolean" else text(key.examples[0])
            spaced, joined = launch([key.cli, value]), launch([f"{key.cli}={value}"])
            if key.path != "config_path":
                assert spaced.args == joined.args, key.cli
                assert [] == [*spaced.errors, *joined.errors]


def test_no_option_or_variable_is_written_by_hand() -> None:
    """Names of options and variables stand in the schema, and in what is generated from it, alone."""
    by_hand = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("torchturbo", "codegen")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".j2") and "generated" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "--tt_" in line or "TORCH_TURBO_" in line
    ]
    assert [] == by_hand


def words(line: str) -> list[str]:
    return shlex.split(line)


def text(value: Any) -> str:
    return value[0] if isinstance(value, list | tuple) else str(value)
