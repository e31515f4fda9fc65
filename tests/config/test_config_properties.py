"""Random command lines, documents and configurations against independent oracles."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from launching import launch, said

from torchturbo.config.file import read_file
from torchturbo.config.keys import Key
from torchturbo.engine.args import TorchTurboArgs, parse_log_level, parse_torchturbo_args, string_to_bool
from torchturbo.engine.config import EngineConfig, FrameworkValue, build_from_args, load_config
from torchturbo.engine.dump import to_json, to_yaml
from torchturbo.errors import ConfigError
from torchturbo.generated.keys import KEYS, SECTIONS

ROOT = Path(__file__).parents[2]
TABLE = json.loads((Path(__file__).parent / "contract.json").read_text(encoding="utf-8"))["inputs"]
EDITOR_SCHEMA = json.loads((ROOT / "generated" / "torchturbo.schema.json").read_text(encoding="utf-8"))
FILE_KEYS = {path: key for path, key in KEYS.items() if not key.runtime}
LIMITS = {"diffusion.bd_mask_low": 1.0, "diffusion.bd_mask_high": 1.0}

# The folder is a fixture's, but each example writes its own file into it.
often = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, database=None
)


# -- command lines against argparse -----------------------------------------------------------------------------------

CONVERTERS: dict[str, Any] = {"bool": string_to_bool, "int": int, "float": float, "LogLevel": parse_log_level}


def bare_argparse() -> argparse.ArgumentParser:
    """Return argparse's own parser of the table's options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for row in TABLE:
        if row["cli_name"]:
            options: dict[str, Any] = {"dest": row["cli_name"], "type": CONVERTERS.get(row["type"], str)}
            if row["type"] == "bool":
                options |= {"nargs": "?", "const": True}
            if row["choices"]:
                options |= {"choices": row["choices"]}
            if row["action"]:
                options |= {"action": row["action"]}
            parser.add_argument(row["cli_name"], **options)
    return parser


ARGPARSE = bare_argparse()
REST = st.sampled_from(
    ["train.yaml", "--lr", "1e-5", "-v", "--out=x", "--t", "--tt", "-tt", "a b", "", "--bf16", "x=1"]
)


def value_texts(row: dict[str, Any]) -> st.SearchStrategy[str]:
    values = row["documented_values"] or row["choices"]
    if values:
        lower = st.sampled_from([value.lower() for value in values])
        return st.one_of(st.sampled_from(values), lower) if row["type"] == "LogLevel" else st.sampled_from(values)
    fraction = st.floats(0.3, 0.8) if "bd_mask" in row["name"] else st.floats(0, 1e300)
    return {
        "bool": st.sampled_from(["yes", "No", "TRUE", "false", "t", "F", "y", "n", "1", "0"]),
        "int": st.integers(1, 2**31 - 1).map(str),
        "float": st.one_of(fraction.map(repr), fraction.map("{:e}".format)),
        "list[str]": st.sampled_from(["a.py", "b/c.py:d.yaml"]),
    }.get(row["type"], st.sampled_from(["turbo.yaml", "null.json", "x"]))


def option(row: dict[str, Any]) -> st.SearchStrategy[list[str]]:
    flag = row["cli_name"]
    texts = value_texts(row)
    return st.one_of(texts.map(lambda text: [flag, text]), texts.map(lambda text: [f"{flag}={text}"]))


def bare_booleans() -> st.SearchStrategy[list[str]]:
    """A bare boolean in front of an option, where argparse and we must agree."""
    flags = st.sampled_from([row["cli_name"] for row in TABLE if row["type"] == "bool" and row["cli_name"]])
    return flags.map(lambda flag: [flag, "--lr"])


PIECES = st.one_of(
    st.sampled_from([row for row in TABLE if row["cli_name"]]).flatmap(option), bare_booleans(), REST.map(lambda x: [x])
)


@given(st.lists(PIECES, max_size=12))
@settings(often, max_examples=300)
def test_command_lines_agree_with_bare_argparse(pieces: list[list[str]]) -> None:
    """The same options with the same values, and the same rest in the same order."""
    line = [word for piece in pieces for word in piece]
    theirs, their_rest = ARGPARSE.parse_known_args(line)
    args, rest = parse_torchturbo_args(line)
    expected = vars(theirs)
    assert their_rest == rest
    by_flag = {row["cli_name"]: row for row in TABLE}
    overrides = {flag[2:]: value for flag, value in expected.items() if by_flag[flag]["config_path"]}
    assert overrides == args.config_overrides
    assert {name: type(value) for name, value in overrides.items()} == {
        name: type(value) for name, value in args.config_overrides.items()
    }
    for row in TABLE:
        if row["args_name"] and row["cli_name"]:
            default = None if row["args_default"] is None else getattr(type(args)(), row["args_name"])
            assert expected.get(row["cli_name"], default) == getattr(args, row["args_name"]), row["name"]


OURS = st.sampled_from([key.cli for key in KEYS.values() if key.cli and key.path != "config_path"])
ANY_WORD = st.one_of(
    st.text(max_size=8),
    st.text(max_size=6).map(lambda text: f"--tt_{text}"),
    OURS,
    st.tuples(OURS, st.text(max_size=6)).map("=".join),
    st.sampled_from(["null", "1e999", "-inf", "0x", "٣", "9" * 5000, "True", "on", "--", "\0", "\udc80", "%s", "{}"]),
)


@given(st.lists(ANY_WORD, max_size=6))
@settings(often, max_examples=300)
def test_no_command_line_is_a_traceback(line: list[str]) -> None:
    """Whatever is typed: a result or a list of problems, each on one line, and nothing of ours is left over."""
    done = launch(line)
    ended = line.index("--") if "--" in line else len(line)
    assert (done.args is None) is bool(done.errors) or done.config is None
    assert not any(word.startswith(("--tt_", "--tt-")) for word in done.rest[: len(done.rest) - (len(line) - ended)])
    if not done.errors:
        assert line[ended:] == done.rest[len(done.rest) - (len(line) - ended) :]


@given(st.dictionaries(st.sampled_from([key.env for key in KEYS.values() if key.env]), st.text(max_size=8), max_size=4))
@settings(often, max_examples=150)
def test_no_variable_is_a_traceback(variables: dict[str, str]) -> None:
    """Whatever a variable holds: a configuration or problems that name the variable."""
    try:
        with said():
            build_from_args(TorchTurboArgs(), environ=variables)
    except ConfigError as error:
        assert {problem.place for problem in error.problems} <= set(variables)


# -- documents against jsonschema -------------------------------------------------------------------------------------


class Quoting(yaml.SafeDumper):
    """PyYAML, with every text in quotes: what is plain text by YAML 1.1, 1e-5 for one, is a number by 1.2."""


Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))
ORACLE = jsonschema.Draft202012Validator(EDITOR_SCHEMA)
NAMES = st.one_of(
    st.sampled_from(
        ["enabeld", "gsb", "mtp.enabled", "sp_size", "tt_gbs", "<<", "1", "true", "null", "~", "", "a b", "é"]
    ),
    st.text("abc_.-:#'\"[]{}é ", max_size=6),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.0, 1.0, -0.5, 0.5, 1e-5, 1e300, 2147483647, 2147483648, 10**30, 2.0**31]),
    st.sampled_from(["", "4", "true", "null", "None", "yes", "on", "1e-5", "bf16", "910b", "h100", "auto", "all", "é"]),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=2)),
    max_leaves=4,
)


def valid(key: Key) -> st.SearchStrategy[Any]:
    if key.type == "boolean":
        some: st.SearchStrategy[Any] = st.booleans()
    elif key.choices:
        some = st.sampled_from(key.choices)
    elif key.type == "integer":
        some = st.integers(1, 2**31 - 1)
    else:
        some = st.floats(
            0, LIMITS.get(key.path, 1.0 if key.maximum == 1 else None), allow_nan=False, allow_infinity=False
        )
    return st.one_of(st.none(), some) if key.nullable else some


def section(path: str) -> st.SearchStrategy[Any]:
    """A section with some of its keys, valid ones and others, and keys that it does not have."""
    known: dict[str, st.SearchStrategy[Any]] = {}
    for name in SECTIONS[path].names:
        child = f"{path}.{name}" if path else name
        good = section(child) if child in SECTIONS else valid(KEYS[child])
        known[name] = st.one_of(good, good, good, ANYTHING)
    table = st.tuples(
        st.fixed_dictionaries({}, optional=known), st.one_of(st.just({}), st.dictionaries(NAMES, ANYTHING, max_size=2))
    ).map(lambda pair: pair[1] | pair[0])
    return table if not path else st.one_of(table, table, table, st.none())


def oracle_paths(document: Any) -> set[str]:
    paths = set()
    for error in ORACLE.iter_errors(document):
        where = [str(part) for part in error.absolute_path]
        if error.validator == "additionalProperties":
            unknown = error.instance.keys() - error.schema["properties"].keys()
            paths |= {".".join([*where, name]) for name in unknown}
        else:
            paths.add(".".join(where))
    return paths


@given(st.one_of(section(""), section(""), section(""), ANYTHING))
@example({"gbs": 1.0, "mtp": {"enabled": 1}, "diffusion": {"cap_lambda": 2}})
@example({"mtp": None, "backend_config": {"cpu_offload": None, "prefetch_strategy": None}})
@settings(often, max_examples=250)
def test_documents_agree_with_jsonschema_on_the_paths_of_errors(document: Any) -> None:
    """Our validator finds an error exactly where the editor's schema has one, in JSON and in YAML."""
    expected = oracle_paths(document) if document is not None else set()
    for name, text in [
        ("t.json", json.dumps(document)),
        ("t.yaml", yaml.dump(document, Dumper=Quoting, allow_unicode=True)),
    ]:
        Path(name).write_text(text, encoding="utf-8")
        problems = read_file(name).problems
        assert expected == {problem.key for problem in problems}, (name, list(map(str, problems)))
        assert len(expected) == len(problems)
        assert all(problem.place.startswith(f"{name}:") for problem in problems)


# -- configurations, written and read back ----------------------------------------------------------------------------

SOME = st.fixed_dictionaries({}, optional={path: valid(key) for path, key in FILE_KEYS.items()})
ALL = st.fixed_dictionaries({path: valid(key) for path, key in FILE_KEYS.items()})


def built(values: dict[str, Any]) -> EngineConfig:
    low, high = (
        values.get(f"diffusion.bd_mask_{end}", KEYS[f"diffusion.bd_mask_{end}"].default) for end in ("low", "high")
    )
    ends = sorted([low, high])
    values = values | {"diffusion.bd_mask_low": ends[0], "diffusion.bd_mask_high": ends[1]}
    return build_from_args(
        framework=[FrameworkValue(path, value, "a test") for path, value in values.items()], environ={}
    )


def assert_reads_back(config: EngineConfig, text: str, name: str) -> None:
    Path(name).write_text(text, encoding="utf-8")
    with said() as warnings:
        again = load_config(name)
    assert config == again
    assert {path: type(config.get(path)) for path in FILE_KEYS} == {path: type(again.get(path)) for path in FILE_KEYS}
    # What is idle may only be warned of where it is no default.
    for warning in warnings:
        path = warning.split(": ")[1]
        assert config.get(path) != KEYS[path].default, warning


@given(st.one_of(ALL, SOME))
@settings(often, max_examples=100)
def test_a_dump_reads_back_to_an_equal_configuration(values: dict[str, Any]) -> None:
    """YAML and JSON, in full and the changes alone; readers of YAML 1.1 see the same values."""
    config = built(values)
    for changed_only in (False, True):
        assert_reads_back(config, to_yaml(config, changed_only=changed_only), "t.yaml")
        assert_reads_back(config, to_json(config, changed_only=changed_only), "t.json")
    assert json.loads(to_json(config)) == yaml.safe_load(to_yaml(config))


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False))
@example(1e-06)
@example(5e-324)
@example(1e16)
@example(1.7976931348623157e308)
@settings(often, max_examples=200)
def test_every_float_survives_a_file_and_an_option(value: float) -> None:
    """No digit is lost between a dump, a file, and a command line."""
    config = built({"moe.aux_loss_coeff": value})
    Path("t.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert value == load_config("t.yaml").moe.aux_loss_coeff
    assert value == launch([f"--tt_moe_aux_loss_coeff={value!r}"])["moe.aux_loss_coeff"]


@given(st.integers(1, 2**31 - 1))
@settings(often, max_examples=50)
def test_every_integer_survives_a_file_and_an_option(value: int) -> None:
    """Integers stay integers."""
    config = built({"gbs": value})
    Path("t.json").write_text(to_json(config), encoding="utf-8")
    assert (value, value) == (load_config("t.json").gbs, launch(["--tt_gbs", str(value)])["gbs"])


def test_the_default_configuration_dumps_without_warnings() -> None:
    """Idle keys at their default are left out, and everything else is there."""
    config = built({})
    assert_reads_back(config, to_yaml(config), "t.yaml")
    with said() as warnings:
        load_config("t.yaml")
    assert [] == warnings
    assert "# every key has its default\n" == to_yaml(config, changed_only=True)
    assert "{}\n" == to_json(config, changed_only=True)
    written = yaml.safe_load(to_yaml(config))
    assert {"enabled": False} == written["mtp"] and "gbs" in written


@pytest.mark.parametrize("key", FILE_KEYS.values(), ids=lambda key: key.path)
def test_every_example_and_default_is_valid(key: Key) -> None:
    """What the documentation shows can be written."""
    for value in (key.default, *key.examples):
        tree = value
        for name in reversed(key.path.split(".")):
            tree = {name: tree}
        Path("t.json").write_text(json.dumps(tree), encoding="utf-8")
        assert [] == read_file("t.json").problems
        assert set() == oracle_paths(tree)
