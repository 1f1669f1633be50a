"""EngineConfig and its parts: every constant of the engine, with its unit, bound and default.

Owns: the knobs and their checks. Knows nothing of what they do beyond one line each. Frozen after construction (values
computed from them, such as the size of the KV pool, are other types). docs/configuration.md is compared with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..ipc.errors import ConfigError
from .settings import Checked, bounded, from_dict, to_dict

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class CacheConfig(Checked):
    """The KV pool and the prefix index."""

    strategy: str = bounded("paged", choices=("paged", "contiguous"))
    """How slots are given out: blocks on demand, or one run of slots per sequence."""
    block_size_tokens: int = bounded(16, 1, 1024)
    """Slots per block (paged); the unit of sharing in the prefix index."""
    num_tokens: int | None = bounded(None, 1, INT32_MAX)
    """Slots of the whole pool; None sizes it from memory."""
    memory_fraction: float = bounded(0.25, 0.01, 0.95)
    """Share of the memory that is free after the weights, given to the pool when `num_tokens` is None."""
    prefix_caching: bool = bounded(True)
    """Share the KV of equal prompt beginnings under the same policy version."""


@dataclass(frozen=True)
class SchedulerConfig(Checked):
    """What one step may hold, and who waits."""

    max_num_seqs: int = bounded(128, 1, 65536)
    """Sequences that may run at once: rows of the block table."""
    max_step_tokens: int = bounded(512, 1, 65536)
    """Tokens of one forward pass, shared by decodes and prefill chunks."""
    prefill_chunk_tokens: int = bounded(256, 1, 65536)
    """Most prompt tokens of one sequence in one step."""
    max_waiting: int = bounded(100_000, 1, 10_000_000)
    """Requests that may wait for admission; one more is refused with `no_capacity`."""
    watermark_fraction: float = bounded(0.02, 0.0, 0.5)
    """Share of the blocks kept free at admission, so that running sequences can grow without preemption."""
    max_bypass_steps: int = bounded(32, 0, 1_000_000)
    """Steps for which smaller requests may overtake one that doesn't fit; after that it is next."""


@dataclass(frozen=True)
class AttentionConfig(Checked):
    """How attention is cut up."""

    max_kv_splits: int = bounded(32, 1, 1024)
    """Most partitions of one sequence's KV; their length follows from the model's context. Results depend on it."""
    query_tile_rows: int = bounded(64, 1, 1024)
    """Query rows that share one read of the KV in prefill; results don't depend on it."""


@dataclass(frozen=True)
class SamplingConfig(Checked):
    """Defaults of sampling that are the engine's, not the request's."""

    penalty_window_tokens: int = bounded(64, 0, INT32_MAX)
    """Last tokens that penalties look at where the request names no window; 0 means all."""


@dataclass(frozen=True)
class RuntimeConfig(Checked):
    """How forward passes are run."""

    kernels: str = bounded("auto", choices=("auto", "native", "torch"))
    """Which kernels compute: native where they can be built, else torch."""
    exact: bool = bounded(True)
    """A row's result never depends on its company; False takes the fastest path that torch offers."""
    num_threads: int | None = bounded(None, 1, 1024)
    """CPU threads of the forward pass; None takes every core that this process may use."""
    prefill_warmup_tokens: int = bounded(64, 0, 65536)
    """Length of the prompt that `Engine.warm_up` runs before the first request; 0 runs none."""
    cuda_graphs: bool = bounded(True)
    """Capture steady decode in CUDA graphs (CUDA only)."""
    tapes: bool = bounded(True)
    """Record steady decode as a list of native calls and replay it without Python (CPU only)."""


@dataclass(frozen=True)
class VersionConfig(Checked):
    """Policy versions held at once."""

    max_installed: int = bounded(2, 2, 16)
    """Weight sets that may be installed together: the live one, those still pinned, and the pending one."""
    lock_timeout_s: float = bounded(60.0, 0.001, 86_400.0)
    """Seconds that an update waits for a synchronous batch (and a batch for an update) before it gives up."""


@dataclass(frozen=True)
class MetricsConfig(Checked):
    """What the engine remembers about itself."""

    recent_requests: int = bounded(128, 1, 1_000_000)
    """Finished requests behind the percentiles in `Engine.stats()`."""


@dataclass(frozen=True)
class EngineConfig(Checked):
    """All of the engine's configuration."""

    device: str = bounded("cpu")
    """A torch device: `cpu`, `cuda` or `cuda:N`."""
    dtype: str = bounded("bfloat16", choices=("bfloat16", "float32"))
    """Element type of weights, activations and KV."""
    max_model_len: int | None = bounded(None, 1, INT32_MAX)
    """Most tokens (prompt and completion) of one sequence; None takes the model's context."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """The KV pool and the prefix index."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """What one step may hold, and who waits."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """How attention is cut up."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Defaults of sampling."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """How forward passes are run."""
    versions: VersionConfig = field(default_factory=VersionConfig)
    """Policy versions held at once."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """What the engine remembers about itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduler.max_num_seqs > self.scheduler.max_step_tokens:
            raise ConfigError(
                "scheduler.max_num_seqs",
                f"is {self.scheduler.max_num_seqs}, above scheduler.max_step_tokens={self.scheduler.max_step_tokens}; "
                "a step holds at least one token of every running sequence",
            )

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> EngineConfig:
        """Build from nested mappings (as TOML gives them).

        Raises:
            ConfigError: an unknown key or a value out of bounds, with its dotted name (P4).
        """
        return from_dict(EngineConfig, values, "")

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values; `from_dict` gives an equal configuration back."""
        return to_dict(self)


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
