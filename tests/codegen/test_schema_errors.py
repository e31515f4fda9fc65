"""An invalid schema is refused with the key and the reason, before anything is written."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import codegen.__main__ as command
from codegen.model import Source
from codegen.source import SchemaError, read_source

ROOT = Path(__file__).parents[2]
META = ROOT / "schema" / "torchturbo.meta.schema.json"
SCHEMA: dict[str, Any] = json.loads((ROOT / "schema" / "torchturbo.schema.json").read_text(encoding="utf-8"))
Edit = Callable[[dict[str, Any]], object]
PLAIN = {
    "description": "Some text.",
    "type": "boolean",
    "default": False,
    "examples": [True],
    "x-torchturbo": {"since": "0.2.0"},
}


def leaf(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a key by ``Class.key``, or a key of the top level."""
    section, _, name = where.rpartition(".")
    found: dict[str, Any] = (schema["$defs"][section] if section else schema)["properties"][name]
    return found


def put(where: str, **values: Any) -> Edit:
    return lambda schema: leaf(schema, where).update(values)


def drop(where: str, name: str) -> Edit:
    return lambda schema: leaf(schema, where).pop(name)


def note(where: str, **values: Any) -> Edit:
    return lambda schema: leaf(schema, where)["x-torchturbo"].update(values)


def no_note(where: str, name: str) -> Edit:
    return lambda schema: leaf(schema, where)["x-torchturbo"].pop(name)


def new(section: str, name: str, **values: Any) -> Edit:
    body = copy.deepcopy(PLAIN) | values
    return lambda schema: (schema["$defs"][section] if section else schema)["properties"].update({name: body})


def rule(**values: Any) -> Edit:
    return lambda schema: schema["x-torchturbo"]["rules"][0].update(values)


def alias(where: str, **values: Any) -> Edit:
    return note(where, aliases=[{"since": "0.2", "removal": "1.0"} | values])


BROKEN: list[tuple[str, Edit, str]] = [
    # the dialect
    (
        "misspelt keyword",
        put("MTPConfig.enabled", minimun=1),
        "MTPConfig.enabled: Additional properties are not allowed ('minimun' was unexpected)",
    ),
    (
        "misspelt annotation",
        note("MTPConfig.enabled", clii="--tt_x"),
        "MTPConfig.enabled (x-torchturbo): Additional properties are not allowed ('clii' was unexpected)",
    ),
    *(
        (f"no {name}", drop("MTPConfig.enabled", name), f"MTPConfig.enabled: '{name}' is a required property")
        for name in ("description", "default", "examples", "x-torchturbo")
    ),
    (
        "no since",
        no_note("MTPConfig.enabled", "since"),
        "MTPConfig.enabled (x-torchturbo): 'since' is a required property",
    ),
    ("blank text", put("MTPConfig.enabled", description="  "), "MTPConfig.enabled (description): '  ' does not match"),
    (
        "two lines of text",
        put("MTPConfig.enabled", description="some\ntext"),
        "MTPConfig.enabled (description): 'some\\ntext' does not match",
    ),
    (
        "integer without bound",
        drop("ParallelPlan.sp_size", "minimum"),
        "ParallelPlan.sp_size: 'minimum' is a required property",
    ),
    ("null without bound", drop("gbs", "maximum"), "gbs: 'maximum' is a required property"),
    (
        "two types",
        put("MTPConfig.enabled", type=["boolean", "string"]),
        "MTPConfig.enabled (type.1): 'null' was expected",
    ),
    (
        "inline section",
        lambda schema: schema["properties"].update(foo={"type": "object"}),
        "foo (type): 'object' is not one of",
    ),
    (
        "open section",
        lambda schema: schema["$defs"]["MTPConfig"].pop("additionalProperties"),
        "MTPConfig: 'additionalProperties' is a required property",
    ),
    (
        "bad flag",
        note("MTPConfig.enabled", cli="--enable-mtp"),
        "MTPConfig.enabled (x-torchturbo.cli): '--enable-mtp' does not match",
    ),
    (
        "bad variable",
        note("ParallelPlan.sp_size", env="SP_SIZE"),
        "ParallelPlan.sp_size (x-torchturbo.env): 'SP_SIZE' does not match",
    ),
    ("capital in a name", new("MTPConfig", "Foo"), "MTPConfig (properties): 'Foo' does not match"),
    (
        "enum without texts",
        no_note("BackendConfig.prefetch_strategy", "values"),
        "BackendConfig.prefetch_strategy (x-torchturbo): 'values' is a required property",
    ),
    (
        "texts without enum",
        note("MTPConfig.enabled", values={"a": "text"}),
        "MTPConfig.enabled (x-torchturbo): values and choices: belong to an enum",
    ),
    ("null without text", no_note("gbs", "null"), "gbs (x-torchturbo): 'null' is a required property"),
    (
        "text without null",
        note("ParallelPlan.sp_size", null="text"),
        "ParallelPlan.sp_size (x-torchturbo): null: belongs to a type that allows null",
    ),
    (
        "field default without field",
        no_note("MTPConfig.enabled", "arg"),
        "MTPConfig.enabled (x-torchturbo): 'arg' is a dependency of 'arg_default'",
    ),
    (
        "alias of nothing",
        note("MTPConfig.log_loss", aliases=[{"since": "0.2", "removal": "1.0"}]),
        "MTPConfig.log_loss (x-torchturbo.aliases.0): 'path' is a required property",
    ),
    (
        "alias for ever",
        note("MTPConfig.log_loss", aliases=[{"path": "mtp.old", "since": "0.2"}]),
        "MTPConfig.log_loss (x-torchturbo.aliases.0): 'removal' is a required property",
    ),
    (
        "empty switch",
        note("MTPConfig.log_loss", active_when={"mtp.enabled": {}}),
        "MTPConfig.log_loss (x-torchturbo.active_when.mtp.enabled): {} should be non-empty",
    ),
    ("unknown relation", rule(op="=="), "x-torchturbo.rules.0.op: '==' is not one of"),
    (
        "no launch inputs",
        lambda schema: schema["$defs"].pop("RuntimeArgs"),
        "$defs: 'RuntimeArgs' is a required property",
    ),
    # names
    ("flag taken", note("MTPConfig.enabled", cli="--tt_gbs"), "mtp.enabled: flag --tt_gbs is already taken by gbs"),
    (
        "flag of the help",
        note("MTPConfig.enabled", cli="--tt_help"),
        "mtp.enabled: flag --tt_help is already taken by the help option",
    ),
    (
        "variable taken",
        note("ParallelPlan.sp_size", env="TORCH_TURBO_GBS"),
        "parallel_plan.sp_size: variable TORCH_TURBO_GBS is already taken by gbs",
    ),
    ("field taken", note("MTPConfig.enabled", arg="gbs"), "mtp.enabled: field gbs is already taken by gbs"),
    ("name taken", note("MFUConfig.enabled", name="gbs"), "mfu.enabled: name gbs is already taken by gbs"),
    ("position taken", note("MTPConfig.enabled", position=9), "mtp.enabled: position 9 is already taken by gbs"),
    (
        "field of a section taken",
        lambda schema: schema["$defs"]["CPUOffloadConfig"]["x-torchturbo"].update(arg="gbs"),
        "backend_config.cpu_offload: field gbs is already taken by gbs",
    ),
    ("keyword", new("MTPConfig", "lambda"), "lambda: a Python keyword or builtin cannot name a key"),
    ("builtin", new("MTPConfig", "id"), "id: a Python keyword or builtin cannot name a key"),
    (
        "keyword as field",
        note("MTPConfig.enabled", arg="class"),
        "class: a Python keyword or builtin cannot name a key",
    ),
    ("member of EngineConfig", new("", "origin"), "origin: EngineConfig has a member of that name"),
    (
        "member of TorchTurboArgs",
        note("MTPConfig.enabled", arg="config_overrides"),
        "mtp.enabled: arg: TorchTurboArgs has a member config_overrides of its own",
    ),
    (
        "attribute of TorchTurboArgs",
        note("MTPConfig.enabled", arg="warnings"),
        "mtp.enabled: arg: TorchTurboArgs has a member warnings of its own",
    ),
    (
        "key and launch input of one name",
        new("RuntimeArgs", "backend"),
        "RuntimeArgs.backend: an input of a launch cannot have a key's name",
    ),
    (
        "option without metavar",
        no_note("MTPConfig.enabled", "metavar"),
        "mtp.enabled: metavar: the help of an option names its value, or lists the enum",
    ),
    # values
    (
        "default below its bound",
        put("ParallelPlan.sp_size", default=0),
        "parallel_plan.sp_size: default: 0 is less than the minimum of 1",
    ),
    (
        "default of another type",
        put("ParallelPlan.sp_size", default="1"),
        "parallel_plan.sp_size: default: '1' is not of type 'integer'",
    ),
    (
        "integer default with a point",
        put("ParallelPlan.sp_size", default=1.0),
        "parallel_plan.sp_size: default: write 1, so that the generated default is an integer",
    ),
    (
        "number default without a point",
        put("DiffusionConfig.cap_lambda", default=1),
        "diffusion.cap_lambda: default: write 1.0, so that the generated default is a float",
    ),
    (
        "null default",
        put("ParallelPlan.sp_size", default=None),
        "parallel_plan.sp_size: default: null needs a type that allows null",
    ),
    (
        "default outside the enum",
        put("BackendConfig.prefetch_strategy", default="x"),
        "backend_config.prefetch_strategy: default: 'x' is not one of",
    ),
    (
        "example below its bound",
        put("ParallelPlan.sp_size", examples=[0]),
        "parallel_plan.sp_size: examples: 0 is less than the minimum of 1",
    ),
    (
        "field default below its bound",
        note("DiffusionConfig.cap_lambda", arg_default=-1.0),
        "diffusion.cap_lambda: arg_default: -1.0 is less than the minimum of 0",
    ),
    (
        "a value without text",
        lambda schema: leaf(schema, "BackendConfig.prefetch_strategy")["x-torchturbo"]["values"].pop("auto"),
        "backend_config.prefetch_strategy: values: expected one text for each of native, auto, expert_with_layer, expert_lookahead",
    ),
    (
        "a text without value",
        lambda schema: leaf(schema, "BackendConfig.prefetch_strategy")["x-torchturbo"]["values"].update(x="text"),
        "backend_config.prefetch_strategy: values: expected one text for each of",
    ),
    (
        "enum that forgot null",
        lambda schema: leaf(schema, "mixed_precision")["enum"].remove(None),
        "mixed_precision: enum: a key that takes null lists null",
    ),
    ("bounds of a boolean", put("MTPConfig.enabled", minimum=0), "mtp.enabled: minimum and maximum belong to numbers"),
    (
        "enum of a number",
        lambda schema: (
            put("ParallelPlan.sp_size", enum=["1"])(schema),
            note("ParallelPlan.sp_size", values={"1": "text"})(schema),
        ),
        "parallel_plan.sp_size: enum: only texts are listed",
    ),
    (
        "silent value that is none",
        note("MTPConfig.log_loss", idle_silent=["x"]),
        "mtp.log_loss: idle_silent: 'x' is no value of this key",
    ),
    (
        "list that does not append",
        no_note("RuntimeArgs.plugins", "action"),
        "plugins: action: append belongs to lists, and every list needs it",
    ),
    (
        "appending number",
        note("ParallelPlan.sp_size", action="append"),
        "parallel_plan.sp_size: action: append belongs to lists, and every list needs it",
    ),
    (
        "broken pattern",
        lambda schema: leaf(schema, "RuntimeArgs.plugins")["items"].update(pattern="("),
        "plugins: pattern: missing )",
    ),
    (
        "pattern without words",
        no_note("RuntimeArgs.plugins", "form"),
        "plugins: form: an item with a pattern says in words how it is written",
    ),
    (
        "list in a file",
        new("MTPConfig", "names", type="array", items={"type": "string"}, default=[], examples=[["a"]]),
        "mtp.names: lists and launcher options belong to RuntimeArgs",
    ),
    # references
    (
        "section that is missing",
        lambda schema: schema["properties"]["mtp"].update({"$ref": "#/$defs/Nope"}),
        "mtp: $ref to Nope, which does not exist",
    ),
    (
        "section inside itself",
        lambda schema: schema["$defs"]["MTPConfig"]["properties"].update(
            inner={"$ref": "#/$defs/MTPConfig", "default": {}}
        ),
        "mtp.inner: $ref to MTPConfig, which contains it",
    ),
    (
        "section in two places",
        lambda schema: schema["properties"].update(mtp2={"$ref": "#/$defs/MTPConfig", "default": {}}),
        "mtp2: class MTPConfig is already taken by mtp",
    ),
    (
        "section that nothing holds",
        lambda schema: schema["$defs"].update(
            Foo=copy.deepcopy(schema["$defs"]["MoEConfig"]) | {"x-torchturbo": {"class": "Foo"}}
        ),
        "Foo: no $ref leads here",
    ),
    (
        "section of another class",
        lambda schema: schema["$defs"]["MTPConfig"]["x-torchturbo"].update({"class": "Other"}),
        "mtp: the definition and its class must have one name, Other",
    ),
    (
        "section among launch inputs",
        lambda schema: schema["$defs"]["RuntimeArgs"]["properties"].update(
            a={"$ref": "#/$defs/MTPConfig", "default": {}}
        ),
        "RuntimeArgs.a: inputs of a launch are scalars or lists",
    ),
    (
        "rules of a section",
        lambda schema: schema["$defs"]["MTPConfig"]["x-torchturbo"].update(rules=[]),
        "mtp: rules stand at the top of the schema",
    ),
    (
        "rule about nothing",
        rule(left="diffusion.nope"),
        "rule diffusion.nope <= diffusion.bd_mask_high: there is no key diffusion.nope",
    ),
    (
        "rule about a launch input",
        rule(left="memory_snapshot_steps"),
        "rule memory_snapshot_steps <= diffusion.bd_mask_high: there is no key memory_snapshot_steps",
    ),
    ("rule about a text", rule(left="backend"), "rule backend <= diffusion.bd_mask_high: backend is no number"),
    (
        "rule that the defaults break",
        rule(op=">"),
        "rule diffusion.bd_mask_low > diffusion.bd_mask_high: the defaults break it",
    ),
    (
        "switch that is missing",
        note("MTPConfig.log_loss", active_when={"mtp.nope": {"const": True}}),
        "mtp.log_loss: active_when: there is no key mtp.nope",
    ),
    (
        "switch of a launch",
        note("MTPConfig.log_loss", active_when={"profiling": {"const": True}}),
        "mtp.log_loss: active_when: there is no key profiling",
    ),
    (
        "switch at itself",
        note("MTPConfig.log_loss", active_when={"mtp.log_loss": {"const": True}}),
        "mtp.log_loss: active_when: a key cannot switch itself",
    ),
    (
        "switch at an unknown value",
        note("MTPConfig.log_loss", active_when={"backend": {"const": "ddp"}}),
        "mtp.log_loss: active_when: backend never has the value 'ddp'",
    ),
    (
        "switch at a value of another type",
        note("MTPConfig.log_loss", active_when={"mtp.enabled": {"enum": [1]}}),
        "mtp.log_loss: active_when: mtp.enabled never has the value 1",
    ),
    (
        "switch at the size of a boolean",
        note("MTPConfig.log_loss", active_when={"mtp.enabled": {"minimum": 1}}),
        "mtp.log_loss: active_when: mtp.enabled is no number",
    ),
    (
        "alias that is a key",
        alias("MTPConfig.log_loss", path="mtp.enabled"),
        "an alias of mtp.log_loss: path mtp.enabled is already taken by mtp.enabled",
    ),
    (
        "alias that is a flag",
        alias("MTPConfig.log_loss", cli="--tt_gbs"),
        "an alias of mtp.log_loss: flag --tt_gbs is already taken by gbs",
    ),
    (
        "alias that is a variable",
        alias("MTPConfig.log_loss", env="TORCH_TURBO_GBS"),
        "an alias of mtp.log_loss: variable TORCH_TURBO_GBS is already taken by gbs",
    ),
    (
        "alias of two keys",
        lambda schema: (
            alias("MTPConfig.log_loss", path="mtp.old")(schema),
            alias("MTPConfig.enabled", path="mtp.old")(schema),
        ),
        "an alias of mtp.log_loss: path mtp.old is already taken by an alias of mtp.enabled",
    ),
    (
        "alias that is a section",
        alias("MTPConfig.log_loss", path="moe"),
        "mtp.log_loss: aliases: moe lies in no section, or is one",
    ),
    (
        "alias in no section",
        alias("MTPConfig.log_loss", path="nope.old"),
        "mtp.log_loss: aliases: nope.old lies in no section, or is one",
    ),
    (
        "alias of a launch input in a file",
        alias("RuntimeArgs.profiling", path="profile"),
        "profiling: aliases: an input of a launch stands in no file, under no name",
    ),
    (
        "successor that is missing",
        note("MTPConfig.log_loss", deprecated={"since": "0.2", "removal": "1.0", "successor": "nope"}),
        "mtp.log_loss: deprecated: there is no key nope",
    ),
    (
        "successor of itself",
        note("MTPConfig.log_loss", deprecated={"since": "0.2", "removal": "1.0", "successor": "mtp.log_loss"}),
        "mtp.log_loss: deprecated: a key cannot succeed itself",
    ),
]


def load(folder: Path, text: str) -> Source:
    path = folder / "torchturbo.schema.json"
    path.write_text(text, encoding="utf-8")
    return read_source(path, META)


@pytest.mark.parametrize(("edit", "reason"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_schema_is_refused_with_key_and_reason(edit: Edit, reason: str, tmp_path: Path) -> None:
    """One of the lines names the key and says what is wrong with it."""
    schema = copy.deepcopy(SCHEMA)
    edit(schema)
    with pytest.raises(SchemaError) as caught:
        load(tmp_path, json.dumps(schema))
    lines = str(caught.value).splitlines()
    assert any(line.startswith(reason) for line in lines), lines
    assert all(len(line) < 400 for line in lines)


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    """Two contradictions are two lines."""
    schema = copy.deepcopy(SCHEMA)
    put("ParallelPlan.sp_size", default=0)(schema)
    note("MTPConfig.enabled", cli="--tt_gbs")(schema)
    with pytest.raises(SchemaError) as caught:
        load(tmp_path, json.dumps(schema))
    assert [
        "mtp.enabled: flag --tt_gbs is already taken by gbs",
        "parallel_plan.sp_size: default: 0 is less than the minimum of 1",
    ] == str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "torchturbo.schema.json:1:2: "),
        ("[]", "torchturbo.schema.json: expected an object"),
        ('{"type": "object", "type": "object"}', "torchturbo.schema.json: type: key given twice"),
        ("{}", "top level: 'properties' is a required property"),
    ],
)
def test_a_schema_that_is_no_json_object(text: str, reason: str, tmp_path: Path) -> None:
    """The file itself may be broken."""
    with pytest.raises(SchemaError) as caught:
        load(tmp_path, text)
    assert any(line.startswith(reason) for line in str(caught.value).splitlines())


@pytest.mark.parametrize("arguments", [[], ["--check"]])
def test_an_invalid_schema_is_exit_status_2_and_writes_nothing(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says which file is invalid, and why."""
    schema = copy.deepcopy(SCHEMA)
    put("ParallelPlan.sp_size", default=0)(schema)
    (tmp_path / "schema").mkdir()
    (tmp_path / command.SCHEMA).write_text(json.dumps(schema), encoding="utf-8")
    (tmp_path / command.META).write_text(META.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert 2 == command.main(arguments)
    assert (
        "schema/torchturbo.schema.json is not valid:\nparallel_plan.sp_size: default: 0 is less than the minimum of 1\n"
    ) == capsys.readouterr().err
    assert ["schema"] == [path.name for path in tmp_path.iterdir()]


def test_the_schema_itself_is_valid() -> None:
    """Nothing is found where nothing is wrong."""
    source = read_source(ROOT / "schema" / "torchturbo.schema.json", META)
    assert 47 <= len(source.specs)
