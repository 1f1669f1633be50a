"""MemoryPlan: what a configuration will take, worked out without loading anything; shown by `--dry-run`.

Owns: the arithmetic over the parts' own sizes. Called by the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..engine.cache.buffer import KVBuffer
from ..engine.cache.sizing import free_bytes, pool_tokens
from ..engine.models.layout import WeightLayout
from ..engine.models.spec import ModelSpec
from .config import ServeConfig


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose."""

    parameters: int
    """Parameters of the model."""
    buffer_bytes: int
    """One weight buffer."""
    arena_bytes: int
    """All weight buffers."""
    kv_tokens: int
    """Slots of the KV pool."""
    kv_bytes: int
    """The KV pool."""
    free_bytes: int
    """Free at the moment, before anything is loaded."""

    @staticmethod
    def of(config: ServeConfig) -> MemoryPlan:
        """Plan for a model directory.

        Raises:
            ModelError, ConfigError: it can't be served like that.
        """
        spec = ModelSpec.from_dir(Path(config.model))
        engine = config.engine
        dtype: torch.dtype = getattr(torch, engine.dtype)
        layout = WeightLayout(spec, dtype)
        device = torch.device(engine.device)
        max_len = engine.max_model_len or spec.max_position_embeddings
        per_token = KVBuffer.bytes_per_slot(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
        tokens = pool_tokens(engine.cache, engine.scheduler, max_len, per_token, device)
        return MemoryPlan(
            parameters=layout.num_elements,
            buffer_bytes=layout.num_bytes,
            arena_bytes=layout.num_bytes * config.worker.num_buffers,
            kv_tokens=tokens,
            kv_bytes=tokens * per_token,
            free_bytes=free_bytes(device),
        )
