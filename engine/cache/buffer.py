"""KVBuffer: the tensors that hold keys and values, one mapping for all layers.

Owns: their memory. Knows nothing of who uses which slot. Written by attention backends (store) and by copy-on-write.

Shapes: S slots · Hk KV heads · D head dim.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from ...ipc.errors import ConfigError

INT32_MAX = 2**31 - 1


class KVBuffer:
    """K and V of every layer. Invariants: ordinary tensors, whoever builds them (S12); slots fit int32 (S13)."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.check_num_slots(num_slots)
        shape = (num_layers, 2, num_slots, num_kv_heads, head_dim)
        with torch.inference_mode(False), torch.no_grad():
            if torch.device(device).type == "cpu":
                num_bytes = num_slots * self.bytes_per_slot(num_layers, num_kv_heads, head_dim, dtype)
                mapping = mmap.mmap(-1, num_bytes)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    mapping.madvise(mmap.MADV_HUGEPAGE)
                self._data = torch.frombuffer(mapping, dtype=dtype).view(shape)
            else:
                self._data = torch.zeros(shape, dtype=dtype, device=device)
        self.num_layers = num_layers
        self.num_slots = num_slots

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [S, Hk, D] each."""
        return self._data[index, 0], self._data[index, 1]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], block_size: int) -> None:
        """Copy whole blocks (source, target) in every layer; all sources are read before any target is written."""
        blocks = self._data.view(self.num_layers, 2, -1, block_size, *self._data.shape[3:])
        source = torch.tensor([pair[0] for pair in pairs], device=self._data.device)
        target = torch.tensor([pair[1] for pair in pairs], device=self._data.device)
        blocks[:, :, target] = blocks[:, :, source]

    def poison(self, slots: Sequence[int]) -> None:
        """Fill slots with NaN, so that a read of an unwritten one shows."""
        self._data[:, :, list(slots)] = float("nan")

    @staticmethod
    def bytes_per_slot(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values over all layers."""
        return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize

    @staticmethod
    def check_num_slots(num_slots: int) -> None:
        """Raise ConfigError where slot numbers would not fit int32 (S13)."""
        if num_slots > INT32_MAX:
            raise ConfigError("cache.num_tokens", f"is {num_slots}; slot numbers are int32, so at most {INT32_MAX}")
