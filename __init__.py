"""Unison: a rollout-and-serving engine for reinforcement learning of language models.

The public face. Names are loaded when they are first used, so `import unison` costs nothing and imports no torch.

Example:
    from unison import Engine, EngineConfig, SamplingParams
    engine = Engine.from_pretrained("DIR", EngineConfig())
    outputs = engine.run_batch([[1, 2, 3]], SamplingParams(max_tokens=16, seed=7), n=8)

    with Client.connect("RUN_DIR") as client:  # of a running bin/serve
        output = client.generate([1, 2, 3], SamplingParams(max_tokens=16, seed=7), n=8)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.config import EngineConfig
    from .engine.engine import Engine
    from .ipc.client import AsyncClient, Client
    from .ipc.types import SamplingParams

__all__ = ["AsyncClient", "Client", "Engine", "EngineConfig", "SamplingParams"]

_MODULE_BY_NAME = {
    "AsyncClient": ".ipc.client", "Client": ".ipc.client", "Engine": ".engine.engine",
    "EngineConfig": ".engine.config", "SamplingParams": ".ipc.types",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name at its first use (PEP 562); afterwards it is an ordinary attribute."""
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names are {', '.join(__all__)}")
    value = getattr(import_module(_MODULE_BY_NAME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
