"""Calls the hooks of plugins and observers in order, and says whose hook failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchturbo.errors import ConfigError
from torchturbo.logging import get_logger
from torchturbo.plugins.contract import Plugin

if TYPE_CHECKING:
    from torchturbo.plugins.contract import Run

log = get_logger(__name__)


class PluginError(Exception):
    """A hook of a plugin failed; the cause is chained."""


class Hooks:
    """The plugins of one run, in order, and the run they look at.

    Parameters
    ----------
    run
        What the hooks see; None for a model that is prepared outside a run, which calls no hooks.
    plugins
        The user's first, in the order given, then the engine's own observers.

    """

    def __init__(self, run: Run | None = None, plugins: Sequence[Plugin] = ()) -> None:
        self.run = run
        self.plugins = tuple(plugins)
        self.end_errors: list[PluginError] = []
        """What plugins got wrong at the end of the last run that ended well."""

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of every plugin.

        Raises
        ------
        PluginError
            If one fails.

        """
        for plugin in self.plugins:
            self.call_one(plugin, hook, *args)

    def call_one(self, plugin: Plugin, hook: str, *args: Any) -> Any:
        """Call a hook of one plugin and return what it returned; see :meth:`call`."""
        known = dict(args[0]) if hook == "log" else {}
        try:
            found = getattr(plugin, hook)(*args, self.run)
        except ConfigError:  # a SystemExit too, and printed already
            raise
        except (Exception, SystemExit) as error:  # a plugin's sys.exit() would end the run without a word
            raise PluginError(f"plugin {name_of(plugin)}: {hook}: {type(error).__name__}: {error}") from error
        if hook == "log":
            _check_metrics(plugin, args[0], known)
        return found

    def overriding(self, hook: str) -> list[Plugin]:
        """Return the plugins that have a hook of their own."""
        return [plugin for plugin in self.plugins if getattr(type(plugin), hook) is not getattr(Plugin, hook)]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Tell the plugins that the loop leaves training for this block."""
        self.call("paused")
        try:
            yield
        finally:  # whoever catches an error of an evaluation goes on training
            self.call("resumed")

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Tell every plugin once that the run is over, when this block is left, however it is left.

        What a plugin gets wrong then is an error in the log and in ``end_errors``, and not raised: the run's model is
        still to be saved.
        """
        self.end_errors = []
        if self.run is not None:
            self.run.error = None
        try:
            yield
        except BaseException as cause:
            self.give_up(cause)
            raise
        self.end_errors = self._end()
        for error in self.end_errors:
            log.error("%s", error)

    def raise_end_errors(self) -> None:
        """Raise the first thing that a plugin got wrong at the end of a run, once the run's model is saved."""
        for error in self.end_errors:
            raise PluginError(f"{error}; the model is saved") from error

    def give_up(self, cause: BaseException) -> None:
        """Tell every plugin that the run is over because of an error, which is the one to be seen: theirs are warnings."""
        if self.run is not None:
            self.run.error = cause
        for error in self._end():
            log.warning("%s", error)

    def _end(self) -> list[PluginError]:
        errors = []
        for plugin in self.plugins:
            try:
                self.call_one(plugin, "end")
            except PluginError as error:
                errors.append(error)
        return errors


def _check_metrics(plugin: Plugin, metrics: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse what a plugin logs that is no number: the next save would fail for it, and name no plugin."""
    for name, value in metrics.items():
        if name in known and known[name] is value:
            continue
        what = f"plugin {name_of(plugin)}: log: the metric {name!r}"
        if not isinstance(name, str):
            raise PluginError(f"{what}: expected a text as its name, got {type(name).__name__}")
        if not isinstance(value, int | float):
            remedy = "; write float(...)" if hasattr(value, "__float__") else ""
            raise PluginError(f"{what}: expected a number, got {type(value).__name__} {value!r:.60}{remedy}")


def name_of(plugin: Plugin) -> str:
    """Return how messages call a plugin."""
    return plugin.name or type(plugin).__name__
