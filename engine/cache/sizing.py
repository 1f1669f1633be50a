"""How many KV slots fit: the pool's size from the memory that is free.

Owns: that arithmetic. Called once, when an engine is built, after its weights are in memory.
"""

from __future__ import annotations

import psutil
import torch

from ...ipc.errors import ConfigError
from ..config import CacheConfig, SchedulerConfig
from .buffer import KVBuffer


def pool_tokens(
    cache: CacheConfig, scheduler: SchedulerConfig, max_len: int, bytes_per_token: int, device: torch.device
) -> int:
    """Slots of the pool: as configured, else a share of free memory, never more than all rows at full length need.

    Units: tokens. Raises ConfigError when not even one block fits.
    """
    unit = max_len if cache.strategy == "contiguous" else cache.block_size_tokens
    wanted = cache.num_tokens
    if wanted is None:
        most = scheduler.max_num_seqs * -(-max_len // unit) * unit
        wanted = min(int(free_bytes(device) * cache.memory_fraction) // bytes_per_token, most)
    num_units = wanted // unit
    if num_units < 1:
        raise ConfigError(
            "cache.num_tokens",
            f"gives {wanted} slots, but one {'sequence' if unit == max_len else 'block'} takes {unit}; "
            "raise cache.num_tokens or cache.memory_fraction, or lower max_model_len",
        )
    KVBuffer.check_num_slots(num_units * unit)
    return num_units * unit


def free_bytes(device: torch.device) -> int:
    """Memory that a new allocation could take on `device` now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
