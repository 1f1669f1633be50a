"""Attention: descriptors of a call, the base class, and the backends behind `select_attention`.

Backends: `native` (CPU, C++), `torch` (CPU, torch alone), `cuda` (torch operations that CUDA graphs can capture), and
the reference that tests compare with. Nothing here imports engine.cache.
"""

from __future__ import annotations

import torch

from ...ipc.errors import ConfigError
from ..kernels.build import library, why_unavailable
from .attention import AttentionBackend
from .cuda import CudaAttention
from .descriptors import (
    DecodeDescriptor,
    Descriptor,
    LayerAttention,
    LayerKV,
    PackedDescriptor,
    PrefillDescriptor,
)
from .native import NativeAttention
from .torch_cpu import TorchAttention

__all__ = [
    "AttentionBackend",
    "DecodeDescriptor",
    "Descriptor",
    "LayerAttention",
    "LayerKV",
    "PackedDescriptor",
    "PrefillDescriptor",
    "select_attention",
    "split_tokens_for",
]

SPLIT_MULTIPLE_TOKENS = 64


def select_attention(
    device: str | torch.device, choice: str, exact: bool, split_tokens: int, query_tile_rows: int
) -> AttentionBackend:
    """The backend for a device and the configuration's `runtime.kernels` (`auto`, `native` or `torch`).

    `auto` takes the native kernel on the CPU where it can be built. `exact` tells torch how to be called; the native
    kernel is exact either way. On other devices `choice` must not be `native`.

    Raises:
        ConfigError: native kernels were asked for and aren't there (says why), or the choice is unknown.
    """
    if choice not in ("auto", "native", "torch"):
        raise ConfigError("runtime.kernels", f"is {choice!r}; must be one of auto, native, torch")
    if torch.device(device).type != "cpu":
        if choice == "native":
            raise ConfigError("runtime.kernels", f"is 'native', which runs on the CPU; {device} takes auto or torch")
        return CudaAttention()
    if choice == "native" and library() is None:
        raise ConfigError("runtime.kernels", f"is 'native', but {why_unavailable()}; set it to auto or torch")
    if choice == "torch" or library() is None:
        return TorchAttention(exact)
    return NativeAttention(split_tokens, query_tile_rows)


def split_tokens_for(max_position_embeddings: int, max_kv_splits: int) -> int:
    """Positions per KV partition: the context over the most partitions allowed, rounded up to a multiple of 64."""
    tokens = -(-max_position_embeddings // max_kv_splits)
    return -(-tokens // SPLIT_MULTIPLE_TOKENS) * SPLIT_MULTIPLE_TOKENS
