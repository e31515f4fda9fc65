"""Values of files and variables: each scalar is read by its key's type, and says where it went wrong."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from launching import launch

MIXED, CARD = "mixed_precision", "mfu.card"

# Key, plain YAML scalar, value.
READ: list[tuple[str, str, Any]] = [
    # numbers as YAML 1.2 writes them
    ("diffusion.cap_lambda", "1e-5", 1e-5),
    ("diffusion.cap_lambda", "1E3", 1000.0),
    ("diffusion.cap_lambda", "1.e1", 10.0),
    ("diffusion.cap_lambda", ".5", 0.5),
    ("diffusion.cap_lambda", "+0.5", 0.5),
    ("diffusion.cap_lambda", "2", 2.0),
    ("diffusion.cap_lambda", "0x10", 16.0),
    ("diffusion.cap_lambda", "5e-324", 5e-324),
    ("diffusion.cap_lambda", "-0", 0.0),
    ("gbs", "7", 7),
    ("gbs", "1.0", 1),
    ("gbs", "1e3", 1000),
    ("gbs", "0o10", 8),
    ("gbs", "0x10", 16),
    ("gbs", "+4", 4),
    ("gbs", "2147483647", 2147483647),
    ("gbs", "4 # four", 4),
    ("gbs", "!!int 4", 4),
    ("gbs", "!!int '4'", 4),
    # booleans and null
    *(("mtp.enabled", word, True) for word in ("true", "True", "TRUE")),
    *(("activation_checkpointing.enabled", word, False) for word in ("false", "False", "FALSE")),
    *(("gbs", word, None) for word in ("null", "Null", "NULL", "~", "", "!!null null")),
    (CARD, "null", None),
    ("loss_chunk.chunk_size", "null", None),
    # texts
    (CARD, "910b", "910b"),
    (CARD, "'910b'", "910b"),
    (CARD, '"910b"', "910b"),
    (CARD, "!!str 910b", "910b"),
    (MIXED, "bf16", "bf16"),
]


@pytest.mark.parametrize(("key", "text", "value"), READ)
def test_a_scalar_is_read_by_its_keys_type(key: str, text: str, value: Any) -> None:
    """The value and its Python type do not depend on what YAML would guess."""
    found = launch(file=nested(key, text))[key]
    assert (value, type(value)) == (found, type(found))


INTEGER, NUMBER, BOOLEAN = "expected integer or null, got", "expected number, got", "expected boolean, got"
CARDS = (
    "expected one of 910b, 910c, h20, h100, h200, a100, 910b1, 910b3, 910b4, h100-pcie, h100-nvl, h200-nvl, b200, "
    "gb200, null, got"
)
WRONG: list[tuple[str, str, str]] = [
    ("gbs", "010", f'{INTEGER} string "010"; write 10, or 0o10 for an octal number'),
    ("gbs", "08", f'{INTEGER} string "08"; write 8'),
    ("gbs", "-010", f'{INTEGER} string "-010"; write -10'),
    ("gbs", "1_000", f'{INTEGER} string "1_000"; write 1000'),
    ("gbs", "1_000_", f'{INTEGER} string "1_000_"; write 1000'),
    ("gbs", "1,000", f'{INTEGER} string "1,000"; write 1000'),
    ("gbs", "1:30", f'{INTEGER} string "1:30"'),
    ("gbs", "0b1", f'{INTEGER} string "0b1"'),
    ("gbs", "four", f'{INTEGER} string "four"'),
    ("gbs", "2026-01-01", f'{INTEGER} string "2026-01-01"'),
    ("gbs", "'4'", f'{INTEGER} string "4"; remove the quotes'),
    ("gbs", "'null'", f'{INTEGER} string "null"; remove the quotes'),
    ("gbs", "!!str 4", f'{INTEGER} string "4"; remove the quotes'),
    ("gbs", "None", f'{INTEGER} string "None"; did you mean null?'),
    ("gbs", "none", f'{INTEGER} string "none"; did you mean null?'),
    ("gbs", "''", f'{INTEGER} string ""; did you mean null?'),
    ("gbs", "true", f"{INTEGER} boolean true"),
    ("gbs", "1.5", f"{INTEGER} number 1.5; write a whole number"),
    ("gbs", ".inf", f"{INTEGER} number .inf; write a whole number"),
    ("gbs", ".nan", f"{INTEGER} number .nan; write a whole number"),
    ("gbs", "0", "expected at least 1, got integer 0"),
    ("gbs", "0.0", "expected at least 1, got integer 0.0"),
    ("gbs", "-5", "expected at least 1, got integer -5"),
    ("gbs", "1" * 30, f"expected at most 2147483647, got integer {'1' * 30}"),
    ("gbs", "9" * 400, f"expected at most 2147483647, got integer {'9' * 60}..."),
    ("gbs", "9" * 5000, f'{INTEGER} string "{"9" * 60}..."'),
    ("gbs", "1e400", f"{INTEGER} number 1e400; write a whole number"),
    ("gbs", "٣", f'{INTEGER} string "٣"; write the digits 0 to 9'),
    ("gbs", "[1]", f"{INTEGER} a list"),
    ("gbs", "{a: 1}", f"{INTEGER} a section"),
    ("parallel_plan.sp_size", "null", "expected integer, got null; leave it out for its default"),
    ("parallel_plan.sp_size", "None", 'expected integer, got string "None"; leave it out for its default'),
    ("diffusion.cap_lambda", ".nan", "expected a finite number, got number .nan"),
    ("diffusion.cap_lambda", ".inf", "expected a finite number, got number .inf"),
    ("diffusion.cap_lambda", "-.INF", "expected a finite number, got number -.INF"),
    ("diffusion.cap_lambda", "1e999", "expected a finite number, got number 1e999"),
    ("diffusion.cap_lambda", "nan", f'{NUMBER} string "nan"'),
    ("diffusion.cap_lambda", "'0.1'", f'{NUMBER} string "0.1"; remove the quotes'),
    ("diffusion.cap_lambda", "1_0.5", f'{NUMBER} string "1_0.5"; write 10.5'),
    ("diffusion.cap_lambda", "true", f"{NUMBER} boolean true"),
    ("diffusion.cap_lambda", "-0.5", "expected at least 0, got number -0.5"),
    ("diffusion.bd_mask_low", "1.5", "expected at most 1, got number 1.5"),
    ("mtp.loss_scaling_factor", ".nan", "expected a finite number or null, got number .nan"),
    *(
        ("mtp.enabled", word, f'{BOOLEAN} string "{word}"; write true')
        for word in ("yes", "on", "y", "t", "tRue", "enabled")
    ),
    *(
        ("mtp.enabled", word, f'{BOOLEAN} string "{word}"; write false')
        for word in ("no", "off", "N", "f", "none", "disabled")
    ),
    ("mtp.enabled", "1", f"{BOOLEAN} integer 1; write true"),
    ("mtp.enabled", "0", f"{BOOLEAN} integer 0; write false"),
    ("mtp.enabled", "2", f"{BOOLEAN} integer 2; write true or false"),
    ("mtp.enabled", "'false'", f'{BOOLEAN} string "false"; remove the quotes'),
    ("mtp.enabled", "treu", f'{BOOLEAN} string "treu"; did you mean true?'),
    ("mtp.enabled", "", f"{BOOLEAN} null; write true or false, or leave it out for its default"),
    ("mtp.enabled", "null", f"{BOOLEAN} null; write true or false, or leave it out for its default"),
    (CARD, "910", f'{CARDS} string "910"; did you mean 910b or 910c or 910b1 or 910b3?'),
    (CARD, "on", f'{CARDS} string "on"'),
    (CARD, "2026-01-01", f'{CARDS} string "2026-01-01"'),
    (CARD, "H100", f'{CARDS} string "H100"; did you mean h100?'),
    (CARD, "▁", f'{CARDS} string "▁"'),
    (CARD, "None", f'{CARDS} string "None"; did you mean null?'),
    (CARD, "'null'", f'{CARDS} string "null"; remove the quotes'),
    (CARD, "[h100]", f"{CARDS} a list"),
    (MIXED, "fp8", 'expected one of bf16, fp32, null, got string "fp8"'),
    ("backend", "null", "expected fsdp2, got null; leave it out for its default"),
]


IDS = [f"{key} {text[:20]}" for key, text, _ in WRONG]


@pytest.mark.parametrize(("key", "text", "error"), WRONG, ids=IDS)
def test_a_wrong_scalar_is_refused_at_its_place(key: str, text: str, error: str) -> None:
    """File, line and column of the value, its key, what was expected and found, and the remedy."""
    file = nested(key, text)
    (found,) = launch(file=file).errors
    place, _, said = found.partition(": ")
    assert f"{key}: {error}" == said
    if text:  # where nothing is written, the place is near by
        assert f"turbo.yaml:1:{file.index(f': {text}') + 3}" == place


def as_json(text: str) -> str | None:
    """Return the JSON of a plain or quoted YAML scalar, or None where JSON has no such thing."""
    if text[:1] in ("'", '"'):
        return json.dumps(text[1:-1])
    if re.fullmatch(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?(e-?[0-9]+)?", text):
        return text
    return None if text[:1] in ("", "!", "[", "{", ".", "-") else json.dumps(text, ensure_ascii=False)


IN_JSON = [(key, as_json(text), error) for key, text, error in WRONG if as_json(text)]


@pytest.mark.parametrize(("key", "text", "error"), IN_JSON, ids=[f"{key} {str(text)[:20]}" for key, text, _ in IN_JSON])
def test_json_gives_the_errors_of_yaml(key: str, text: str, error: str) -> None:
    """What can be written in both formats is judged alike; the remedy may be another."""
    *sections, name = key.split(".")
    file = "".join(f'{{"{part}": ' for part in [*sections, name]) + text + "}" * (len(sections) + 1)
    (found,) = launch(file=file, name="turbo.json").errors
    assert f"turbo.json:1:{file.rindex(text) + 1}: {key}: {error}".partition("; ")[0] == found.partition("; ")[0]


# Variables: the words of a command line, and blanks around do not count.
FROM_VARIABLES: list[tuple[str, str, str, Any]] = [
    ("TORCH_TURBO_GBS", " 4 ", "gbs", 4),
    ("TORCH_TURBO_GBS", "\t4\n", "gbs", 4),
    ("TORCH_TURBO_GBS", "1e3", "gbs", 1000),
    ("TORCH_TURBO_GBS", "null", "gbs", None),
    ("TORCH_TURBO_LOG_MFU", " True ", "mfu.enabled", True),
    ("TORCH_TURBO_LOG_MFU", "YES", "mfu.enabled", True),
    ("TORCH_TURBO_LOG_MFU", "1", "mfu.enabled", True),
    ("TORCH_TURBO_GRADIENT_CHECKPOINTING", "0", "activation_checkpointing.enabled", False),
    ("TORCH_TURBO_GRADIENT_CHECKPOINTING", "n", "activation_checkpointing.enabled", False),
    ("TORCH_TURBO_RESHARD_AFTER_FWD", "f", "backend_config.reshard_after_forward", False),
    ("TORCH_TURBO_MIXED_PRECISION", "bf16 ", "mixed_precision", "bf16"),
    ("TORCH_TURBO_MIXED_PRECISION", "null", "mixed_precision", None),
]


@pytest.mark.parametrize(("name", "text", "key", "value"), FROM_VARIABLES)
def test_a_variable_is_read_like_an_option(name: str, text: str, key: str, value: Any) -> None:
    """The value comes from the variable, with its name as the place."""
    done = launch(env={name: text})
    assert (value, type(value), f"environment {name}") == (done[key], type(done[key]), done.place(key))


@pytest.mark.parametrize("text", ["", "   ", "\t\n"])
@pytest.mark.parametrize("name", ["TORCH_TURBO_GBS", "TORCH_TURBO_BACKEND", "TORCH_TURBO_LOG_MFU", "TORCH_TURBO_NOPE"])
def test_an_empty_variable_counts_as_unset(name: str, text: str) -> None:
    """It neither sets a value nor hides the file's, for every type alike."""
    done = launch(file="gbs: 7\nmfu: {enabled: true}", env={name: text})
    assert ([], 7, "fsdp2", True) == (done.errors, done["gbs"], done["backend"], done["mfu.enabled"])
    assert [] == [warning for warning in done.warnings if "NOPE" not in name]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("TORCH_TURBO_LOG_MFU", "on", 'expected boolean, got "on"; write true'),
        ("TORCH_TURBO_LOG_MFU", "treu", 'expected boolean, got "treu"; did you mean true?'),
        (
            "TORCH_TURBO_LOG_MFU",
            "[",
            'expected boolean, got "["; write true or false; a whole section belongs in a file',
        ),
        ("TORCH_TURBO_GBS", "None", 'expected integer or null, got "None"; did you mean null?'),
        ("TORCH_TURBO_GBS", "4 5", 'expected integer or null, got "4 5"'),
        ("TORCH_TURBO_GBS", "1_0", 'expected integer or null, got "1_0"; write 10'),
        ("TORCH_TURBO_SP_SIZE", "nan", "expected integer, got nan"),
        ("TORCH_TURBO_SP_SIZE", "0", "expected at least 1, got 0"),
        ("TORCH_TURBO_BACKEND", "fsdp1", 'expected fsdp2, got "fsdp1"; did you mean fsdp2?'),
        ("TORCH_TURBO_CARD_NAME", "910", f'{CARDS} "910"; did you mean 910b or 910c or 910b1 or 910b3?'),
    ],
)
def test_a_wrong_variable_is_an_error(name: str, text: str, error: str) -> None:
    """The place is the variable's name."""
    assert [f"{name}: {error}"] == launch(env={name: text}).errors


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("TORCH_TURBO_GSB", "did you mean TORCH_TURBO_GBS?"),
        ("TORCH_TURBO_gbs", "did you mean TORCH_TURBO_GBS?"),
        ("TORCH_TURBO_RESHARD_AFTER_FORWARD", "did you mean TORCH_TURBO_RESHARD_AFTER_FWD?"),
        ("TORCH_TURBO_LOG_LEVEL", "it has no variable; use --tt_log_level"),
        ("TORCH_TURBO_CPU_OFFLOAD", "it has no variable; use --tt_cpu_offload"),
        ("TORCH_TURBO_MTP_ENABLED", "it has no variable; use --tt_enable_mtp"),
        ("TORCH_TURBO_ENABLE_MTP", "it has no variable; use --tt_enable_mtp"),
        ("TORCH_TURBO_QQQQ", ""),
        ("TORCH_TURBO_", ""),
    ],
)
def test_an_unknown_variable_is_a_warning(name: str, remedy: str) -> None:
    """It says so once, with the nearest name or the option, and changes nothing."""
    done = launch(env={name: "4"})
    assert [f"{name}: unknown variable, ignored" + (f"; {remedy}" if remedy else "")] == done.warnings
    assert ([], {}) == (done.errors, done.settings)


def test_other_programs_variables_are_left_alone() -> None:
    """Only the prefix is ours."""
    assert (
        [] == launch(env={"TORCHTURBO_GBS": "x", "TORCH_TURBOGBS": "x", "TORCH": "x", "torch_turbo_gbs": "x"}).warnings
    )


def nested(key: str, text: str) -> str:
    """Return a one-line YAML file that sets a key to a scalar as it stands."""
    *sections, name = key.split(".")
    text = f"{name}: {text}"
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    return text
