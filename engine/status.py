"""EngineStatus: what an engine is at this moment, as opposed to what it has done (metrics).

Owns: the snapshot type and how it is read off the parts. Called by `Engine.status`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .assembly import EngineParts
from .guard import InstalledVersion
from .runtime.exactness import Exactness


@dataclass(frozen=True)
class EngineStatus:
    """Gauges and identity of one engine; a snapshot."""

    num_waiting: int
    """Sequences without a row: not started, or preempted."""
    num_running: int
    """Sequences with a row and KV."""
    num_blocks: int
    """KV blocks of the pool."""
    num_free_blocks: int
    """Blocks that a sequence could take now, those that only the prefix index holds included."""
    block_size_tokens: int
    """Slots per block."""
    max_len: int
    """Most tokens of one sequence."""
    versions: tuple[InstalledVersion, ...]
    """Installed policy versions with state and pins."""
    exact: Exactness
    """Whether engine and packed forward agree to the bit here, and why."""
    kernels: dict[str, object]
    """Which kernels compute, and why these."""


def status_of(parts: EngineParts) -> EngineStatus:
    """Read the present state off the parts."""
    strategy = parts.caches.pool.strategy
    return EngineStatus(
        num_waiting=parts.scheduler.num_waiting,
        num_running=parts.scheduler.num_running,
        num_blocks=strategy.num_blocks,
        num_free_blocks=parts.caches.num_free_blocks,
        block_size_tokens=strategy.block_size,
        max_len=parts.limits.max_len,
        versions=parts.guard.installed,
        exact=parts.exactness,
        kernels=parts.decoder.kernels.describe() | {"decode": parts.stepper.decode_path},
    )
