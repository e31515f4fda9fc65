"""Read the environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from torchturbo.config.layers import Layer, Reading, former_names
from torchturbo.config.names import nearest
from torchturbo.config.scalars import Written
from torchturbo.errors import Problem, shorten
from torchturbo.generated.keys import ENVIRONMENT, FLAG_PREFIX, KEYS, VARIABLE_PREFIX


def read_environment(environ: Mapping[str, str]) -> Reading:
    """Return what the variables say. An empty one counts as unset, an unknown one of ours is a warning."""
    reading = Reading(Layer.ENVIRONMENT)
    former = None
    for name, text in environ.items():
        if not name.startswith(VARIABLE_PREFIX):
            continue
        written = Written(text.strip())
        if name in ENVIRONMENT:
            if written.text:
                reading.take(KEYS[ENVIRONMENT[name]], written, name, spelling=name)
            continue
        former = former_names(KEYS, "env") if former is None else former
        if name in former:
            key, alias = former[name]
            if written.text:
                reading.take(key, written, name, spelling=name, alias=alias)
        else:
            # A warning, not an error: another version's variable in a shared shell profile must not stop a run.
            reading.warnings.append(Problem(shorten(name), "", "unknown variable, ignored", _remedy(name)))
    return reading


def _remedy(name: str) -> str:
    """Return what may have been meant. What all variables begin with says nothing about that."""
    stem = name.removeprefix(VARIABLE_PREFIX).lower()
    for key in KEYS.values():
        others = (key.path.replace(".", "_"), key.name, key.cli and key.cli.removeprefix(FLAG_PREFIX))
        if key.cli and not key.env and stem in others:
            return f"it has no variable; use {key.cli}"
    by_stem = {known.removeprefix(VARIABLE_PREFIX): known for known in ENVIRONMENT}
    names = [by_stem[close] for close in nearest(stem, by_stem)]
    return f"did you mean {' or '.join(names)}?" if names else ""
