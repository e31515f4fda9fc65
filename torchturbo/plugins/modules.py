"""A plugin's code, from a file or an installed package, as a module of its own; what fails is told with its line."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, NamedTuple

from torchturbo.config.document.files import read_bytes
from torchturbo.config.document.nodes import Refused
from torchturbo.config.names import did_you_mean
from torchturbo.errors import Problem, shorten
from torchturbo.plugins.contract import REGISTERED

GROUP: Final = "torchturbo.plugins"
"""Entry point group by which an installed package offers plugins."""
_PREFIX: Final = "torchturbo_plugins_"
"""Begins the names of the packages that stand for the folders of plugin files."""
_LONGEST_MESSAGE: Final = 300
EXPECTED: Final = ("a Python file", "a plugin is a few kilobytes")
"""What a file has to be, and what to think of one that is too large, for :func:`read_bytes`."""


class _Ran(NamedTuple):
    """The file of a module as it was run."""

    path: Path
    sha256: str


_RAN: dict[str, _Ran] = {}
"""The modules of plugin files and of their siblings, by name."""


def forget_files() -> None:
    """Drop what earlier launches of this process ran of folders that have changed: a launch gets the files as they are.

    Unchanged modules stay, since the objects of a run that goes on are pickled by them. The modules of a folder go
    together: they may have taken values from each other.
    """
    changed = {_package(name) for name, ran in _RAN.items() if _hash_of(ran.path) != ran.sha256}
    for name in [name for name in sys.modules if name.startswith(_PREFIX)]:
        if _package(name) in changed:
            del sys.modules[name]
    for name in [name for name in _RAN if name not in sys.modules]:
        del _RAN[name]
    homes = [(entry, _home(entry.plugin)) for entry in REGISTERED]
    # A file that failed half-way is no module any more; what it registered before is not its next run's.
    REGISTERED[:] = [entry for entry, home in homes if not home.startswith(_PREFIX) or home in sys.modules]
    importlib.invalidate_caches()


def _package(module: str) -> str:
    return module.partition(".")[0]


def _hash_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_bytes(str(path), *EXPECTED)).hexdigest()
    except Refused:  # gone, or a pipe by now
        return None


class _Source(SourceFileLoader):
    """Runs a sibling from its source, never from bytecode that is older by less than a second, and keeps which it was."""

    def get_code(self, fullname: str) -> CodeType:
        data = self.get_data(self.path)
        _RAN[fullname] = _Ran(Path(self.path), hashlib.sha256(data).hexdigest())
        code: CodeType = self.source_to_code(data, self.path)
        return code


class _Siblings:
    """Finds what a plugin file imports from its folder."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the import system finds in the folder, with a loader of our own for source files."""
        if not fullname.startswith(_PREFIX):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Source(spec.loader.name, spec.loader.path)
        return spec


def run_file(path: str) -> tuple[ModuleType, str] | Problem:
    """Run a plugin file as a module that no other file shares.

    Its folder becomes a package, so that ``from .helper import f`` finds ``helper.py`` beside it; nothing is added
    to ``sys.path``. Two files in one folder share the siblings they import.

    Returns
    -------
    tuple or Problem
        The module and the SHA-256 of the file as it was run, or what is wrong.

    """
    try:
        data = read_bytes(path, *EXPECTED)
    except Refused as refused:
        return refused.problem
    digest = hashlib.sha256(data).hexdigest()
    name = module_name(path)
    if name in sys.modules:  # of an earlier launch, or an earlier plugin of this one imported it as its sibling
        return sys.modules[name], _RAN[name].sha256 if name in _RAN else digest
    code = _compiled(data, path)
    if isinstance(code, Problem):
        return code
    spec = spec_from_file_location(name, path, loader=SourceFileLoader(name, path))
    assert spec is not None  # the loader was given
    module = module_from_spec(spec)
    sys.modules[name] = module
    _RAN[name] = _Ran(Path(path).resolve(), digest)
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        return failure(error, path, name.rpartition(".")[0])
    return module, digest


def _home(registered: object) -> str:
    return str(getattr(registered, "__module__", ""))


def module_name(path: str) -> str:
    """Return the name of a plugin file's module: the same on every rank and in every run, so that pickles find it."""
    file = Path(path).resolve()
    package = _PREFIX + _short_hash(str(file.parent))
    if package not in sys.modules:
        if _Siblings not in sys.meta_path:
            sys.meta_path.insert(0, _Siblings)
        parent = ModuleType(package, f"The folder {file.parent} of plugin files.")
        parent.__path__ = [str(file.parent)]
        parent.__spec__ = ModuleSpec(package, None, is_package=True)
        parent.__spec__.submodule_search_locations = parent.__path__
        sys.modules[package] = parent
    stem = file.stem if file.stem.isidentifier() else f"file_{_short_hash(file.stem)}"
    return f"{package}.{stem}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _compiled(data: bytes, path: str) -> CodeType | Problem:
    try:
        return compile(data, os.path.abspath(path), "exec", dont_inherit=True)
    except SyntaxError as error:  # also of an encoding that is not declared
        place = f"{path}:{error.lineno}:{error.offset or 1}" if error.lineno else path
        return Problem(place, "", f"is no Python: {error.msg}")
    except (
        RecursionError,
        MemoryError,
        OverflowError,
        ValueError,
    ) as error:  # too deep; NUL in Python 3.11.0 to 3.11.3
        return Problem(path, "", f"is no Python that can be read: {type(error).__name__}")


def installed() -> dict[str, list[EntryPoint]]:
    """Return the plugins that installed packages offer, by name; nothing of theirs is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        known = found.setdefault(point.name, [])
        if point.value not in [other.value for other in known]:  # one package can be found twice on the path
            known.append(point)
    return found


def find_installed(name: str, flag: str) -> EntryPoint | Problem:
    """Return the entry point of a name, or what is wrong with the name."""
    known = installed()
    points = known.get(name, [])
    if len(points) == 1:
        return points[0]
    if points:
        offers = " and ".join(sorted(f"{distribution(point)} ({point.value})" for point in points))
        return Problem(flag, "", f"two plugins are called {name}: of {offers}", "uninstall one, or give its file")
    remedy = did_you_mean(name, known)
    if not remedy and Path(f"{name}.py").is_file():
        remedy = f"did you mean {name}.py?"
    if not remedy:
        names = ", ".join(sorted(known))
        remedy = f"installed are {names}" if names else "none is installed; a plugin file is named with its .py"
    return Problem(flag, "", f"no installed plugin is called {shorten(name)}", remedy)


def distribution(point: EntryPoint) -> str:
    """Return the name and version of the package that offers an entry point."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unnamed package"


def run_installed(point: EntryPoint) -> tuple[ModuleType, str] | Problem:
    """Import the module of an entry point; returns what :func:`run_file` does."""
    try:
        module = importlib.import_module(point.module)
        file = getattr(module, "__file__", None)
        data = Path(file).read_bytes() if file else b""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return failure(error, point.name, point.module.partition(".")[0])
    return module, hashlib.sha256(data).hexdigest()


def attribute(module: ModuleType, point: EntryPoint) -> Any:
    """Return the class that an entry point ``module:Class`` names, or what is wrong."""
    found: Any = module
    for name in point.attr.split("."):
        if not hasattr(found, name):
            offered = f"{distribution(point)} offers {point.value}, and {point.module} has no {point.attr}"
            return Problem(point.name, "", offered, did_you_mean(point.attr, vars(module)))
        found = getattr(found, name)
    return found


def failure(error: BaseException, place: str, package: str) -> Problem:
    """Return what a plugin's own code raised, at the line of that code which it came from.

    ``package`` tells whose code it is; ``place`` stands in where none of the plugin's own lines was running.
    """
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module == package or module.startswith(f"{package}."):
            place = f"{shown_path(frame.f_code.co_filename)}:{line}"
    if isinstance(error, SyntaxError) and error.filename and error.lineno:  # of a module that it imports
        place = f"{shown_path(error.filename)}:{error.lineno}:{error.offset or 1}"
    if isinstance(error, SystemExit):
        return Problem(place, "", "the plugin ends the program instead of registering", "remove the call of exit")
    text = shorten(" ".join(str(error).split()), _LONGEST_MESSAGE)
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Problem(place, "", message, _import_remedy(error, place))


def _import_remedy(error: BaseException, place: str) -> str:
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    name = error.name.rpartition(".")[2]
    beside = Path(place.rpartition(":")[0]).parent
    if (beside / f"{name}.py").is_file() or (beside / name).is_dir():
        return f"write `from . import {name}`: files beside a plugin are its siblings"
    return "" if error.name.startswith(_PREFIX) else f"install {error.name} into this environment"


def shown_path(path: str) -> str:
    """Return a path as short as it can be told: from the working directory where it lies below."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path
