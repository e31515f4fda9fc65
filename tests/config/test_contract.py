"""The public names: the schema's surface against a committed copy of the table that it has to keep."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from torchturbo.engine.args import TorchTurboArgs, TurboArgSpec, get_arg_specs, parse_log_level, string_to_bool
from torchturbo.engine.backends.fsdp2.config import CPUOffloadConfig
from torchturbo.generated.keys import ENVIRONMENT, KEYS
from torchturbo.logging import LogLevel

CONTRACT = json.loads((Path(__file__).parent / "contract.json").read_text(encoding="utf-8"))
SURFACE = json.loads((Path(__file__).parents[2] / "generated" / "surface.json").read_text(encoding="utf-8"))
INPUTS: list[dict[str, Any]] = CONTRACT["inputs"]
CONVERTERS = {"bool": string_to_bool, "int": int, "float": float, "LogLevel": parse_log_level}
CONVERTED = {"bool": ("yes", True), "int": ("2", 2), "float": ("1e-5", 1e-5), "LogLevel": ("info", LogLevel.INFO)}

by_name = pytest.mark.parametrize("row", INPUTS, ids=lambda row: row["name"])


def test_the_surface_lists_the_47_inputs_in_order() -> None:
    """No input is missing and none has moved; what a version adds follows behind them."""
    assert len(INPUTS) == 47
    assert [row["name"] for row in INPUTS] == [item["name"] for item in SURFACE["inputs"][:47]]


@by_name
def test_an_input_has_exactly_the_names_of_the_table(row: dict[str, Any]) -> None:
    """Every name column, type and default of an input is what the table says."""
    item = next(item for item in SURFACE["inputs"] if item["name"] == row["name"])
    columns = row.keys() - {"documented_values"}
    assert {name: row[name] for name in columns} == {name: item[name] for name in columns}


@by_name
def test_documented_values_are_values_of_the_key(row: dict[str, Any]) -> None:
    """What the table documents as a value, the key accepts."""
    if row["documented_values"]:
        item = next(item for item in SURFACE["inputs"] if item["name"] == row["name"])
        assert set(row["documented_values"]) <= set(item["values"])


def test_two_keys_stand_in_files_alone() -> None:
    """The keys without option and variable are the two that are listed, with their types and defaults."""
    columns = ("config_path", "type", "engine_default", "nullable")
    expected = [{name: row[name] for name in columns} for row in CONTRACT["file_only"]]
    assert expected == [{name: item[name] for name in columns} for item in SURFACE["file_only"]]
    assert ["all", "optimizer"] == SURFACE["file_only"][0]["values"]
    assert [0, 1] == [SURFACE["file_only"][1][name] for name in ("minimum", "maximum")]


def test_two_options_stand_beside_the_inputs() -> None:
    """Only the help and the resume option are options without an input."""
    assert ["--tt_help", "--tt_resume_allow"] == SURFACE["launcher_options"]
    flags = {item["cli_name"] for item in SURFACE["inputs"]} - {None}
    assert flags | {"--tt_resume_allow"} == {key.cli for key in KEYS.values() if key.cli}


def test_the_environment_map_is_the_tables() -> None:
    """Each variable of the table leads to its key."""
    assert {row["env_name"]: row["config_path"] for row in INPUTS if row["env_name"]}.items() <= ENVIRONMENT.items()


def test_specs_come_in_the_order_of_the_table() -> None:
    """get_arg_specs() returns a tuple that begins with the 47 in order."""
    specs = get_arg_specs()
    assert isinstance(specs, tuple)
    assert [row["name"] for row in INPUTS] == [spec.name for spec in specs[:47]]


@by_name
def test_a_spec_holds_the_names_of_the_table(row: dict[str, Any]) -> None:
    """A spec has the table's names, the choices as a tuple, and help that argparse can format."""
    spec = next(spec for spec in get_arg_specs() if spec.name == row["name"])
    for column in ("config_path", "args_name", "cli_name", "env_name", "metavar", "action"):
        assert row[column] == getattr(spec, column), column
    assert (None if row["choices"] is None else tuple(row["choices"])) == spec.choices
    assert spec.help and (spec.help % {}).strip()


@by_name
def test_a_spec_converts_text_to_the_type_of_the_table(row: dict[str, Any]) -> None:
    """The converter is the public one of the value's type; text needs none."""
    spec = next(spec for spec in get_arg_specs() if spec.name == row["name"])
    assert CONVERTERS.get(row["type"]) is spec.type
    if spec.type is not None:
        text, value = CONVERTED[row["type"]]
        assert value == spec.type(text)


def test_a_spec_needs_a_name_only() -> None:
    """All fields but the name default to None."""
    names = ["name", "config_path", "args_name", "cli_name", "env_name", "type", "metavar", "choices", "action", "help"]
    assert names == [field.name for field in dataclasses.fields(TurboArgSpec)]
    assert ("x", *[None] * 9) == dataclasses.astuple(TurboArgSpec("x"))


def test_the_flat_arguments_have_the_fields_of_the_table() -> None:
    """The 44 fields, those that a version added, and the overrides behind them."""
    expected = [row["args_name"] for row in INPUTS if row["args_name"]]
    assert 44 == len(expected)
    found = [field.name for field in dataclasses.fields(TorchTurboArgs)]
    assert "config_overrides" == found[-1]
    added = [item["args_name"] for item in SURFACE["inputs"][47:] if item["args_name"]]
    assert sorted([*expected, *added, "config_overrides"]) == sorted(found)


@pytest.mark.parametrize("row", [row for row in INPUTS if row["args_name"]], ids=lambda row: row["name"])
def test_a_field_has_the_default_and_the_type_of_the_table(row: dict[str, Any]) -> None:
    """Defaults are the flat ones, of which None means "not specified"; types are what the value may be."""
    named = {"CPUOffloadConfig": CPUOffloadConfig(), "INFO": LogLevel.INFO}
    default = row["args_default"]
    expected = named.get(default, default) if isinstance(default, str) else default
    found = getattr(TorchTurboArgs(), row["args_name"])
    assert (expected, type(expected)) == (found, type(found))
    hint = get_type_hints(TorchTurboArgs)[row["args_name"]]
    assert ("None" in row["args_type"]) == (type(None) in get_args(hint))


def test_the_flat_arguments_can_be_changed_and_share_nothing() -> None:
    """They are mutable, need no arguments, and their lists are each instance's own."""
    one, other = TorchTurboArgs(), TorchTurboArgs()
    one.sp_size = 4
    one.plugins.append("a.py")
    one.config_overrides["tt_gbs"] = 1
    assert (None, [], {}) == (other.sp_size, other.plugins, other.config_overrides)
    assert 4 == one.sp_size


def test_the_import_paths_of_the_public_names() -> None:
    """The three fixed modules offer what integrators import."""
    import torchturbo.engine.args as args
    from torchturbo.logging import get_logger

    names = "parse_torchturbo_args set_torchturbo_args get_torchturbo_args TorchTurboArgs TurboArgSpec get_arg_specs"
    for name in (*names.split(), "string_to_bool", "parse_log_level"):
        assert callable(getattr(args, name)), name
    assert callable(get_logger().info_rank0)
    assert {"enabled", "mode", "optimizer_memory_fraction"} == {
        field.name for field in dataclasses.fields(CPUOffloadConfig)
    }
