"""Read the environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from torchturbo.config.layers import Layer, Reading, former_names
from torchturbo.config.names import did_you_mean
from torchturbo.config.scalars import Written
from torchturbo.errors import Problem
from torchturbo.generated.keys import ENVIRONMENT, KEYS, VARIABLE_PREFIX


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
            reading.warnings.append(Problem(name, "", "unknown variable, ignored", did_you_mean(name, ENVIRONMENT)))
    return reading
