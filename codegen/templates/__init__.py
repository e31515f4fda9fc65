"""The templates and how they are rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

HEADER = "Generated from schema/torchturbo.schema.json by `nox -s codegen`. Do not edit."

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,
)
_ENVIRONMENT.filters["py"] = repr


def render(template: str, **values: Any) -> str:
    """Return a rendered template; a name that the template uses and nobody gave is an error."""
    return _ENVIRONMENT.get_template(template).render(header=HEADER, **values)
