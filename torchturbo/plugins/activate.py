"""From registered classes to plugin objects: which are meant, with which settings, and whether their hooks can run."""

from __future__ import annotations

import copy
import difflib
import inspect
from importlib.util import find_spec
from typing import Any, NamedTuple

from torchturbo.config.document.nodes import MAX_PROBLEMS
from torchturbo.errors import Problem
from torchturbo.logging import get_logger
from torchturbo.plugins.contract import HOOKS, REGISTERED, Origin, Plugin
from torchturbo.plugins.modules import failure, shown_path
from torchturbo.plugins.settings import Document

log = get_logger(__name__)

_CLOSE = 0.8
"""Likeness from which a method is taken for a misspelt hook."""


class Candidate(NamedTuple):
    """A class, or what was registered as one."""

    plugin: Any
    framework: str | None = None

    @classmethod
    def of(cls, plugin: Any) -> Candidate:
        """Return a class that an entry point names, with the framework that it registered for."""
        entries = [entry for entry in REGISTERED if entry.plugin is plugin]
        return cls(plugin, entries[-1].framework if entries else None)

    @property
    def name(self) -> str:
        """Return how messages call it."""
        named = getattr(self.plugin, "name", None)
        return named if named and isinstance(named, str) else getattr(self.plugin, "__name__", repr(self.plugin))

    def place(self, method: str = "") -> str:
        """Return ``file:line`` of the class, or of one of its methods."""
        subject = getattr(self.plugin, method) if method else self.plugin
        if method and not inspect.isroutine(subject):
            return self.place()
        try:
            return f"{shown_path(inspect.getsourcefile(subject) or '')}:{inspect.getsourcelines(subject)[1]}"
        except (OSError, TypeError):
            return self.name


def registered_in(module: str, *, nested: bool) -> list[Candidate]:
    """Return what a module registered, in order; ``nested`` counts the modules of its package in.

    What a file imports from a sibling is the sibling's, also where that registers it.
    """
    found: dict[int, Candidate] = {}
    for plugin, framework in ((entry.plugin, entry.framework) for entry in REGISTERED):
        home = getattr(plugin, "__module__", "")
        if home == module or (nested and home.startswith(f"{module}.")):
            found.setdefault(id(plugin), Candidate(plugin, framework))
    return list(found.values())


def choose(target: str, candidates: list[Candidate], framework: str | None) -> tuple[list[Candidate], list[Problem]]:
    """Return the classes for a framework and those for any; none at all is a problem."""
    chosen = [candidate for candidate in candidates if candidate.framework in (None, framework)]
    if chosen:
        return chosen, []
    if not candidates:
        remedy = "put @register() from torchturbo.plugins above its Plugin class"
        return [], [Problem(target, "", "registers no plugin", remedy)]
    others = ", ".join(sorted({str(candidate.framework) for candidate in candidates}))
    return [], [Problem(target, "", f"is a plugin for {others}, and this run is under {framework}")]


def schema_of(candidate: Candidate) -> tuple[Any, list[Problem]]:
    """Return the schema of a class's settings, None where it has none, and what is wrong with it."""
    schema = getattr(candidate.plugin, "settings_schema", None)
    if schema is None:
        return None, []
    if find_spec("jsonschema") is None:
        message = "its settings_schema is checked by jsonschema, which is not installed"
        return schema, [Problem(candidate.place(), "", message, "pip install 'torchturbo[train]'")]
    from torchturbo.plugins.schema import schema_problems

    return schema, schema_problems(schema, candidate.place())


def make(
    candidate: Candidate, given: str, sha256: str, document: Document | None, *, config_is_read: bool
) -> Plugin | list[Problem]:
    """Return a plugin with its settings, or everything that is wrong with it.

    ``config_is_read`` is false where its CONFIG has problems of its own: then nothing is made.
    """
    if not isinstance(candidate.plugin, type) or not issubclass(candidate.plugin, Plugin):
        remedy = "derive it from torchturbo.plugins.Plugin"
        return [Problem(candidate.place(), "", f"{candidate.name} is registered and no Plugin class", remedy)]
    problems = _hook_problems(candidate)
    settings, wrong = _checked(candidate, document, config_is_read=config_is_read)
    problems += wrong
    if problems or not config_is_read:
        return problems
    try:
        plugin: Plugin = candidate.plugin(copy.deepcopy(settings))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problem = failure(error, candidate.place(), candidate.plugin.__module__)
        return [problem._replace(message=f"{candidate.name}.__init__: {problem.message}")]
    plugin.origin = Origin(given, sha256, settings)
    return plugin


def _checked(
    candidate: Candidate, document: Document | None, *, config_is_read: bool
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Hold the settings against the plugin's own schema, and that schema against its draft."""
    schema, problems = schema_of(candidate)
    if schema is None or problems:
        return (document.values if document else None), problems
    from torchturbo.plugins.schema import check, required_keys

    if document is not None:
        values, problems = check(document, schema)
        return values, problems[:MAX_PROBLEMS]
    if config_is_read and (missing := required_keys(schema)):
        message = f"{candidate.name} needs settings: {', '.join(missing)}"
        return None, [Problem(candidate.place(), "", message, "name its YAML or JSON file behind it, with a colon")]
    return None, []


# ---- hooks that could not be called ----


def _hook_problems(candidate: Candidate) -> list[Problem]:
    """Return a problem for each hook that does not take what it is called with: known now, not after an hour."""
    problems = []
    for hook in HOOKS:
        own, base = getattr(candidate.plugin, hook), getattr(Plugin, hook)
        if own is base:
            continue
        expected = inspect.signature(base)
        if not callable(own) or not _takes(candidate.plugin, hook, len(expected.parameters) - 1):
            found = f"{hook}{inspect.signature(own)}" if callable(own) else f"{hook} = {own!r}"
            wanted = f"{hook}({', '.join(expected.parameters)})"
            problems.append(Problem(candidate.place(hook), candidate.name, f"expected {wanted}, got {_bare(found)}"))
    for name in _own_methods(candidate.plugin):
        if near := difflib.get_close_matches(name, HOOKS, n=1, cutoff=_CLOSE):
            place = candidate.place(name)
            log.warning_rank0(
                "%s: %s.%s is no hook and never called; did you mean %s?", place, candidate.name, name, near[0]
            )
    return problems


def _takes(plugin: type, hook: str, count: int) -> bool:
    """Return whether a hook, called on an instance, takes so many arguments."""
    static = inspect.getattr_static(plugin, hook)
    given = [None] * (count if isinstance(static, staticmethod | classmethod) else count + 1)
    try:
        inspect.signature(getattr(plugin, hook)).bind(*given)
    except TypeError:
        return False
    except ValueError:  # compiled code that does not say what it takes
        return True
    return True


def _bare(signature: str) -> str:
    """Return a signature without annotations' quotes, as a person writes it."""
    return signature.replace("'", "")


def _own_methods(plugin: type) -> list[str]:
    return [
        name
        for kind in plugin.__mro__
        if kind not in Plugin.__mro__
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in HOOKS
    ]
