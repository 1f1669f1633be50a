"""One generation engine in one process, usable alone: `Engine.from_pretrained(dir).run_batch(prompts, params)`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine import Engine

__all__ = ["Engine", "EngineConfig"]
_HOMES = {"Engine": ".engine", "EngineConfig": ".config"}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for, so that one part can be imported without all the others."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
