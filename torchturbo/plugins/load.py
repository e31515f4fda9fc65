"""From what a launch names, ``PATH.py[:CONFIG]`` or ``NAME[:CONFIG]``, to plugins with their settings, in that order.

Everything that is wrong with any of them is returned at once, before a weight is read. A plugin's code runs with all
rights of the training process: nothing here protects from it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchturbo.config.document.files import read_bytes
from torchturbo.config.document.nodes import Refused
from torchturbo.engine.hooks import name_of
from torchturbo.errors import Problem
from torchturbo.generated.keys import KEYS
from torchturbo.plugins import modules
from torchturbo.plugins.activate import Candidate, choose, make, registered_in, schema_of
from torchturbo.plugins.contract import Plugin
from torchturbo.plugins.schema import filled
from torchturbo.plugins.secrets import public
from torchturbo.plugins.settings import Document, read_settings

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig

FLAG = str(KEYS["plugins"].cli)
IN_CODE = "turbo_plugins"
"""Argument of the trainers that takes plugin objects: the place of what is wrong with them."""


class Given(NamedTuple):
    """One plugin as a launch names it."""

    text: str
    target: str
    """The path of a Python file, or the name of an installed plugin."""
    config: str | None
    """The path of its settings file."""

    @property
    def is_file(self) -> bool:
        """Return whether the target is a file."""
        return self.target.endswith(".py")


class Code(NamedTuple):
    """What a plugin's code registered, and which code that was."""

    candidates: list[Candidate]
    sha256: str


def split(text: str) -> Given:
    """Split ``PATH.py:CONFIG`` at the last colon that follows ``.py``, ``NAME:CONFIG`` at the first.

    A drive's colon (``C:\\plugin.py:D:\\settings.yaml``) is neither.
    """
    if match := re.match(r"(.*\.py)(?::(.+))?\Z", text, re.DOTALL):
        path, config = match[1], match[2]
        if config is None and (at := path.rfind(".py:")) >= 0:  # a CONFIG that ends in .py too
            path, config = path[: at + 3], path[at + 4 :]
        return Given(text, path, config)
    name, _, config = text.partition(":")
    return Given(text, name, config or None)


def load_plugins(config: EngineConfig, framework: str) -> tuple[list[Plugin], list[Problem]]:
    """Return the plugins that a configuration names, in its order, and everything that is wrong with them.

    Files are read anew by each call. Of the classes that a file registers those for ``framework`` are made, and those
    for any; each of them gets the file's CONFIG. Where there are problems the list of plugins is not complete.
    """
    modules.forget_files()
    plugins: list[Plugin] = []
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for given in map(split, config.runtime.plugins):
        document, wrong = _settings(given)
        identity = _identity(given)
        if identity in seen:  # two of a kind would overwrite each other's files and metrics
            message = f"{given.text} is the same plugin as {seen[identity]}"
            wrong.append(Problem(FLAG, "", message, "give each once"))
        else:
            seen[identity] = given.text
            made, more = _activate(given, document, framework, config_is_read=not wrong)
            plugins += made
            wrong = _unlike(wrong, more)
        problems += wrong
    return plugins, problems + equal_names(plugins)


def file_problems(texts: Iterable[str]) -> list[Problem]:
    """Return what is wrong with the files and names of plugins, looking no deeper: no code of theirs is run."""
    problems: list[Problem] = []
    for given in map(split, texts):
        if given.is_file:
            try:
                read_bytes(given.target, *modules.EXPECTED)
            except Refused as refused:
                problems.append(refused.problem)
        elif isinstance(point := modules.find_installed(given.target, FLAG), Problem):
            problems.append(point)
        problems += _settings(given)[1]
    return problems


def settings_schema(text: str) -> tuple[Mapping[str, Any] | None, list[Problem]]:
    """Run a plugin's code and return the JSON Schema of its settings file, or why there is none."""
    modules.forget_files()
    given = split(text)
    code = _run(given)
    if isinstance(code, Problem):
        return None, [code]
    schemas: list[Mapping[str, Any]] = []
    for candidate in code.candidates:
        schema, problems = schema_of(candidate)
        if problems:
            return None, problems
        if schema is not None and schema not in schemas:
            schemas.append(schema)
    if len(schemas) == 1:
        return schemas[0], []
    names = ", ".join(candidate.name for candidate in code.candidates)
    if schemas:
        message = f"{names} have settings of {len(schemas)} different kinds"
        return None, [Problem(given.target, "", message, "give each a file of its own")]
    if names:
        message = f"{names} has no settings_schema: settings are handed on as they are"
        return None, [Problem(given.target, "", message)]
    return None, choose(given.target, code.candidates, None)[1]


def settings_problems(path: str, schema: Mapping[str, Any]) -> list[Problem]:
    """Return what is wrong with a settings file; the schema is sound, as :func:`settings_schema` returns it."""
    from torchturbo.plugins.schema import check

    document, problems = read_settings(path)
    return problems if document is None else _unlike(problems, check(document, schema)[1])


def _unlike(problems: list[Problem], more: list[Problem]) -> list[Problem]:
    """Return problems and those further ones that stand elsewhere: a value that can't be read fits no schema either."""
    told = {problem.place for problem in problems}
    return problems + [problem for problem in more if problem.place not in told]


def plugin_facts(plugins: Iterable[Plugin]) -> dict[str, Any]:
    """Return what the record of a run says of its plugins: names and settings, and the hash of each file's code.

    The engine's own observers are no part of it: watching a run does not change it. A setting that the schema marks
    as ``writeOnly`` is left out. A plugin is recorded alike whether a launch named it or code made it.
    """
    known = [plugin for plugin in plugins if not _is_own(plugin)]
    code = {name_of(plugin): plugin.origin.sha256 for plugin in known if plugin.origin is not None}
    return {"plugins": [_described(plugin) for plugin in known], "plugin_code": code}


def equal_names(plugins: Sequence[Plugin]) -> list[Problem]:
    """Return a problem for each name that two plugins have: metrics, messages and the record go by it.

    The plugins may come from a launch, from code (``turbo_plugins``) or be the engine's own.
    """
    first: dict[str, Plugin] = {}
    problems = []
    for plugin in plugins:
        name = name_of(plugin)
        if name not in first:
            first[name] = plugin
            continue
        other = first[name]
        place = FLAG if plugin.origin or other.origin else IN_CODE
        if other is plugin:
            problems.append(
                Problem(place, "", f"the same {type(plugin).__name__} object is given twice", "give it once")
            )
            continue
        message = f"{_source(plugin)} and {_source(other)} are both called {name}"
        problems.append(Problem(place, "", message, "give one of the classes another name"))
    return problems


def _is_own(plugin: Plugin) -> bool:
    """Return whether a plugin is one of the engine's observers."""
    return type(plugin).__module__.partition(".")[0] == __name__.partition(".")[0]


def _source(plugin: Plugin) -> str:
    if plugin.origin is not None:
        return plugin.origin.given
    kind = type(plugin).__name__
    return f"the engine's own {kind}" if _is_own(plugin) else f"an object of {kind}"


def _described(plugin: Plugin) -> str:
    """Return a plugin's name and settings, completed and without secrets; what JSON does not have by its type."""
    schema = type(plugin).settings_schema or {}
    origin = plugin.origin
    if origin is None:
        settings: Any = getattr(
            plugin, "_given", getattr(plugin, "settings", None)
        )  # the base's __init__ may be left out
        settings = settings if isinstance(settings, Mapping) else {}
    else:
        settings = filled({}, schema) if origin.settings is None else origin.settings
    settings = public(settings, schema)
    text = json.dumps(settings, default=lambda value: type(value).__name__, skipkeys=True)
    return f"{name_of(plugin)} {text}" if settings else name_of(plugin)


def _settings(given: Given) -> tuple[Document | None, list[Problem]]:
    if given.config is None:
        return None, []
    if given.config.endswith(".py"):
        message = "expected a YAML or JSON file of settings, got a Python file"
        return None, [Problem(given.config, "", message, f"give {FLAG} once for each plugin")]
    return read_settings(given.config)


def _identity(given: Given) -> str:
    if not given.is_file or "\0" in given.target:
        return given.target
    return os.path.realpath(given.target)


def _activate(
    given: Given, document: Document | None, framework: str, *, config_is_read: bool
) -> tuple[list[Plugin], list[Problem]]:
    """Run a plugin's code and make what it registered for a framework."""
    code = _run(given)
    if isinstance(code, Problem):
        return [], [code]
    chosen, problems = choose(given.target, code.candidates, framework)
    plugins: list[Plugin] = []
    for candidate in chosen:
        made = make(candidate, given.text, code.sha256, document, config_is_read=config_is_read)
        if isinstance(made, Plugin):
            plugins.append(made)
        else:
            problems += made
    return plugins, problems


def _run(given: Given) -> Code | Problem:
    """Run the code of a file or an installed package and return what it registered."""
    if given.is_file:
        ran = modules.run_file(given.target)
        if isinstance(ran, Problem):
            return ran
        module, sha256 = ran
        return Code(registered_in(module.__name__, nested=False), sha256)
    point = modules.find_installed(given.target, FLAG)
    if isinstance(point, Problem):
        return point
    ran = modules.run_installed(point)
    if isinstance(ran, Problem):
        return ran
    module, sha256 = ran
    if not point.attr:
        return Code(registered_in(module.__name__, nested=True), sha256)
    plugin = modules.attribute(module, point)
    return plugin if isinstance(plugin, Problem) else Code([Candidate.of(plugin)], sha256)
