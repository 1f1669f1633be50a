"""AttentionBackend: one forward and one guard for every way to compute attention.

Owns: what a call may look like. Knows nothing of the cache's bookkeeping (it never imports engine.cache), of models or
of requests. Called by the decoder, once per layer.

Shapes: see descriptors.py. Threads: a backend is called from one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .descriptors import (
    DecodeDescriptor,
    Descriptor,
    LayerAttention,
    LayerKV,
    PackedDescriptor,
    PrefillDescriptor,
)


class AttentionBackend(ABC):
    """Causal attention with grouped KV heads over packed sequences or over a paged cache."""

    name: str = ""
    """Short name for logs and `describe()`."""
    exact: bool = False
    """True where a query's bits depend on its own sequence alone: not on phase, batch, chunk, block size or threads."""

    def forward(
        self,
        q_THD: Tensor,
        k_THkD: Tensor,
        v_THkD: Tensor,
        descriptor: Descriptor | None,
        layer: LayerAttention,
        kv: LayerKV | None,
    ) -> Tensor:
        """Attend; every query sees its own sequence's positions up to its own, inside the layer's window.

        Without a cache (`descriptor` None: one whole sequence; `PackedDescriptor`: several) K and V are the call's own.
        With one (`PrefillDescriptor`, `DecodeDescriptor`) they are read from `kv`, where `store` has put the call's own
        before; `k_THkD` and `v_THkD` are then not looked at.

        Shapes: q [T, H, D], k and v [T, Hk, D] → [T, H, D], contiguous, of q's dtype.

        Raises:
            TypeError: the descriptor is of no known type (S7), `kv` is missing or superfluous, dtypes differ.
            ValueError: shapes don't fit each other.
        """
        _guard(q_THD, k_THkD, v_THkD, descriptor, kv)
        if descriptor is None:
            descriptor = _whole_sequence(q_THD)
        return self._attend(q_THD, k_THkD, v_THkD, descriptor, layer, kv)

    def store(self, k_THkD: Tensor, v_THkD: Tensor, slots_T: Tensor, kv: LayerKV) -> None:
        """Write the call's K and V into their slots; tokens whose slot is negative are skipped.

        Shapes: k and v [T, Hk, D]; slots int32 [T], each below S, no slot twice.
        """
        if slots_T.dtype is not torch.int32:
            raise TypeError(f"slots_T is {slots_T.dtype}; must be torch.int32")
        self._store(k_THkD, v_THkD, slots_T, kv)

    def _store(self, k_THkD: Tensor, v_THkD: Tensor, slots_T: Tensor, kv: LayerKV) -> None:
        """`store` after its check; CPU default."""
        is_kept = slots_T >= 0
        if not bool(is_kept.all()):
            k_THkD, v_THkD, slots_T = k_THkD[is_kept], v_THkD[is_kept], slots_T[is_kept]
        kv.k_SHD.index_copy_(0, slots_T.long(), k_THkD)
        kv.v_SHD.index_copy_(0, slots_T.long(), v_THkD)

    @abstractmethod
    def _attend(
        self,
        q_THD: Tensor,
        k_THkD: Tensor,
        v_THkD: Tensor,
        descriptor: Descriptor,
        layer: LayerAttention,
        kv: LayerKV | None,
    ) -> Tensor:
        """`forward` after the guard; `descriptor` is one of the three types and `kv` is there exactly when cached."""

    def describe(self) -> dict[str, str | int | bool]:
        """What this backend is and which settings its bits depend on, for status and for records of versions."""
        return {"name": self.name, "exact": self.exact}


def _guard(q_THD: Tensor, k_THkD: Tensor, v_THkD: Tensor, descriptor: object, kv: LayerKV | None) -> None:
    """The one check of every call. Descriptors and `LayerKV` have checked themselves when they were made."""
    kind = type(descriptor)
    if kind is DecodeDescriptor or kind is PrefillDescriptor:
        if kv is None:
            raise TypeError(f"{kind.__name__} needs the layer's KV slots; kv is None")
        keys = kv.k_SHD
    elif descriptor is None or kind is PackedDescriptor:
        if kv is not None:
            raise TypeError("kv was given without a prefill or decode descriptor that says what to read from it")
        keys = k_THkD
        if k_THkD.shape != v_THkD.shape or k_THkD.dtype is not v_THkD.dtype or k_THkD.ndim != 3:
            raise ValueError(f"K is {_text(k_THkD)}, V {_text(v_THkD)}; must be equal, [tokens, KV heads, head dim]")
        if k_THkD.shape[0] != q_THD.shape[0]:
            raise ValueError(f"q has {q_THD.shape[0]} tokens, K and V {k_THkD.shape[0]}; must be equal without a cache")
    else:
        raise TypeError(
            f"attention descriptor is {kind.__name__}; must be None, PackedDescriptor, PrefillDescriptor or "
            "DecodeDescriptor"
        )
    if q_THD.dtype is not keys.dtype:
        raise TypeError(f"q is {q_THD.dtype}, K and V {keys.dtype}; must be the same")
    shape, (_, kv_heads, dim) = q_THD.shape, keys.shape
    if len(shape) != 3 or shape[2] != dim or shape[1] % kv_heads:
        raise ValueError(
            f"q is {_text(q_THD)}; must be [tokens, heads, {dim}] with a multiple of {kv_heads} heads, to fit K and V"
        )
    if isinstance(descriptor, DecodeDescriptor) and descriptor.seq_lens.shape[0] != shape[0]:
        raise ValueError(f"DecodeDescriptor has {descriptor.seq_lens.shape[0]} rows for {shape[0]} queries")


def _text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _whole_sequence(q_THD: Tensor) -> PackedDescriptor:
    length = q_THD.shape[0]
    return PackedDescriptor(torch.tensor([0, length], dtype=torch.int32, device=q_THD.device), length)
