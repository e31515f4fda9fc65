"""What an editor shows for a TorchTurbo configuration, asked of the YAML language server that editors run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).parent / "node_modules" / ".bin" / "yaml-language-server"
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))

if os.environ.get("CI") and not SERVER.exists():
    pytest.fail("CI must install the language server: npm ci --prefix tests/ide", pytrace=False)
if not SERVER.exists():
    pytest.skip("no language server here; npm ci --prefix tests/ide installs it", allow_module_level=True)

pytest_lsp = pytest.importorskip("pytest_lsp", reason="the ide group is not installed; nox -s ide does it")
from lsprotocol import types  # noqa: E402, I001  (only there with pytest-lsp)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {
    "yaml": {"schemaStore": {"enable": False}, "validate": True, "hover": True, "completion": True},
    "[yaml]": {"editor.tabSize": 2, "editor.insertSpaces": True},
    "http": {"proxy": "", "proxyStrictSSL": False},
    "editor": {},
    "files": {},
}


def make_client() -> Any:
    """Return a client that answers the server's questions about the editor's settings."""
    client = pytest_lsp.make_test_lsp_client()
    client.set_configuration(SETTINGS)
    client.feature("client/registerCapability")(lambda _: None)  # VS Code agrees; pytest-lsp leaves it to the client
    return client


CONFIG = pytest_lsp.ClientServerConfig(server_command=[str(SERVER), "--stdio"], client_factory=make_client)


@pytest_lsp.fixture(config=CONFIG, scope="module")
async def editor(lsp_client: pytest_lsp.LanguageClient):
    folder = types.WorkspaceFolder(uri=ROOT.as_uri(), name=ROOT.name)
    capabilities = pytest_lsp.client_capabilities("visual-studio-code")
    await lsp_client.initialize_session(
        types.InitializeParams(capabilities=capabilities, root_uri=ROOT.as_uri(), workspace_folders=[folder])
    )
    lsp_client.workspace_did_change_configuration(types.DidChangeConfigurationParams(settings=SETTINGS))
    yield
    await lsp_client.shutdown_session()


def open_text(editor: Any, name: str, text: str) -> str:
    """Open a text as if it were saved under examples/ with our modeline; return its address."""
    return open_file(editor, ROOT / "examples" / name, "# $schema: ../generated/torchturbo.schema.json\n" + text)


def open_file(editor: Any, path: Path, text: str) -> str:
    document = types.TextDocumentItem(uri=path.as_uri(), language_id="yaml", version=1, text=text)
    editor.text_document_did_open(types.DidOpenTextDocumentParams(text_document=document))
    return document.uri


async def problems(editor: Any, uri: str) -> list[tuple[int, int, str]]:
    """Return the marked problems as (line, column, message), counted from 1 as an editor does."""
    while uri not in editor.diagnostics:
        await asyncio.wait_for(editor.wait_for_notification("textDocument/publishDiagnostics"), 20)
    found = editor.diagnostics[uri]
    return [(item.range.start.line + 1, item.range.start.character + 1, item.message) for item in found]


async def completion(editor: Any, uri: str, line: int, column: int) -> dict[str, Any]:
    """Return what is offered at a place, by label."""
    where = types.CompletionParams(types.TextDocumentIdentifier(uri), types.Position(line - 1, column - 1))
    offered = await editor.text_document_completion_async(where)
    return {item.label: item for item in (offered.items if hasattr(offered, "items") else offered)}


async def hover(editor: Any, uri: str, line: int, column: int) -> str:
    where = types.HoverParams(types.TextDocumentIdentifier(uri), types.Position(line - 1, column - 1))
    shown = await editor.text_document_hover_async(where)
    return shown.contents.value if shown else ""


def text_of(item: Any) -> str:
    """Return the documentation of an offered item."""
    return getattr(item.documentation, "value", item.documentation) or ""


def leaves(
    schema: dict[str, Any], node: dict[str, Any], path: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], Any]]:
    """Return every key of the source schema as (path, its subschema)."""
    found = []
    for name, child in node["properties"].items():
        if reference := child.get("$ref"):
            found += leaves(schema, schema["$defs"][reference.rpartition("/")[2]], (*path, name))
        else:
            found.append(((*path, name), child))
    return found


SOURCE = json.loads((ROOT / "schema" / "torchturbo.schema.json").read_text("utf-8"))
KEYS = leaves(SOURCE, SOURCE)


async def test_every_shipped_example_is_clean(editor):
    assert len(EXAMPLES) >= 3
    for path in EXAMPLES:
        assert await problems(editor, open_file(editor, path, path.read_text("utf-8"))) == [], path.name


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("parallel_plan:\n  tp_size: 2\n", (3, 3), "Property tp_size is not allowed."),
        ("backend: fsdp3\n", (2, 10), 'Value is not accepted. Valid values: "fsdp2".'),
        ("parallel_plan:\n  sp_size: four\n", (3, 12), 'Incorrect type. Expected "integer".'),
        ("parallel_plan:\n  sp_size: 0\n", (3, 12), "Value is below the minimum of 1."),
        ("mtp:\n  enabled: yes\n", (3, 12), 'Incorrect type. Expected "boolean".'),
        ("profiling: true\n", (2, 1), "Property profiling is not allowed."),
    ],
    ids=["unknown key", "bad value", "wrong type", "below minimum", "YAML 1.1 boolean", "run-time input"],
)
async def test_a_mistake_is_marked_where_it_stands(editor, request, text, place, message):
    uri = open_text(editor, f"{request.node.callspec.id}.yaml", text)
    assert await problems(editor, uri) == [(*place, message)]


async def test_keys_are_offered_with_their_texts(editor):
    uri = open_text(editor, "keys.yaml", "parallel_plan:\n  \n")
    offered = await completion(editor, uri, 3, 3)
    section = SOURCE["$defs"]["ParallelPlan"]["properties"]
    assert set(offered) >= set(section)
    for name, key in section.items():
        assert key["description"] in text_of(offered[name])


async def test_values_are_offered_with_their_texts(editor):
    uri = open_text(editor, "values.yaml", "mixed_precision: \n")
    offered = await completion(editor, uri, 2, 18)
    values = SOURCE["properties"]["mixed_precision"]["x-torchturbo"]["values"]
    assert {name: text_of(offered[name]) for name in values} == values


async def test_hovering_any_key_shows_its_text_flag_variable_and_default(editor):
    for path, key in KEYS:
        lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(path)]
        uri = open_text(editor, f"hover-{'-'.join(path)}.yaml", "\n".join(lines) + "\n")
        shown = await hover(editor, uri, 1 + len(path), 2 * len(path))
        names = key["x-torchturbo"]
        parts = [names.get("cli"), names.get("env"), json.dumps(key["default"]).strip('"')]
        missing = [part for part in parts if part and part not in shown]
        assert not missing, f"{'.'.join(path)}: no {missing} in {shown!r}"


@pytest.mark.parametrize("uncommented", [False, True], ids=["as written", "every key uncommented"])
async def test_what_config_init_writes_is_clean(editor, tmp_path, uncommented):
    path = tmp_path / f"turbo-{uncommented}.yaml"
    subprocess.run([sys.executable, "-m", "torchturbo", "config", "init", str(path)], cwd=ROOT, check=True)
    text = path.read_text("utf-8")
    if uncommented:
        text = re.sub(r"^( *)# (\w+: \S+)$", r"\1\2", text, flags=re.M)
        assert len(re.findall(r"^ *\w+: \S", text, re.M)) == len(KEYS)
    assert "# $schema: " in text.splitlines()[0]
    assert await problems(editor, open_file(editor, path, text)) == []
