"""The live keys of routers: two values of each, and what the engine then does differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES: dict[str, tuple[Any, Any, Callable[[Any, Path], Any]]] = {}
