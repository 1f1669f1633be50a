"""NativeAttention: the C++ kernel of engine/kernels/native/attention.cpp behind the base class.

Owns: the structs that describe a call to the kernel, kept for as long as a step uses the same descriptor, so that a layer
costs one ctypes call. Gradients flow through packed sequences only (see gradient.py).

Exactness: a query's bits depend on its own sequence and on `split_tokens`. See the contract at the top of attention.cpp.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ipc.errors import InvariantError
from ..kernels.build import library, why_unavailable
from .attention import AttentionBackend
from .descriptors import DecodeDescriptor, Descriptor, LayerAttention, LayerKV, PackedDescriptor, PrefillDescriptor
from .gradient import packed_backward

MAX_HEAD_DIM = 256
GROUP_TOKENS = 32

_FAULTS = {
    1: "the query starts don't rise from 0 to the number of queries",
    2: "a position is negative or beyond the block table",
    3: "a visible position has no block, or a block outside the KV slots",
    4: "a slot is beyond the KV slots",
}
_PHASES = {PackedDescriptor: 0, PrefillDescriptor: 1, DecodeDescriptor: 2}


class _Rows(ctypes.Structure):
    """AttentionRows of attention.cpp: what stays the same for all layers of a step."""

    _fields_ = [
        ("phase", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("split_tokens", ctypes.c_int64),
        ("tile_rows", ctypes.c_int64),
    ]


class _Shape(ctypes.Structure):
    """AttentionShape of attention.cpp: what follows from the tensors' shapes and strides (in elements)."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "is_bf16",
            "num_tokens",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "num_slots",
            "q_token_stride",
            "q_head_stride",
            "k_slot_stride",
            "k_head_stride",
            "v_slot_stride",
            "v_head_stride",
        )
    ]


@dataclass
class _Bound:
    """A descriptor with the structs made from it."""

    descriptor: Descriptor
    """Kept, so that its tensors live as long as the pointers to them."""
    rows: _Rows
    """Points into the descriptor's tensors."""
    rows_address: Any
    """Argument of the call."""
    key: tuple[Any, ...] = ()
    """Shapes, strides and dtype that `shape` was made for."""
    shape: _Shape | None = None
    """The last shape seen."""


class NativeAttention(AttentionBackend):
    """Attention on the CPU for float32 and bfloat16 and head dims that are multiples of 8 up to 256."""

    name = "native"
    exact = True

    def __init__(self, split_tokens: int, query_tile_rows: int = 64) -> None:
        """
        Args:
            split_tokens: positions per KV partition, a multiple of 32; results depend on it.
            query_tile_rows: queries that share one read of the KV in prefill; results don't depend on it.

        Raises:
            ValueError: `split_tokens` or `query_tile_rows` is out of range.
            RuntimeError: the native library isn't available; says why.
        """
        if split_tokens < GROUP_TOKENS or split_tokens % GROUP_TOKENS:
            raise ValueError(f"split_tokens is {split_tokens}; must be a positive multiple of {GROUP_TOKENS}")
        if query_tile_rows < 1:
            raise ValueError(f"query_tile_rows is {query_tile_rows}; must be at least 1")
        native = library()
        if native is None:
            raise RuntimeError(f"native attention isn't available: {why_unavailable()}; choose the torch kernels")
        self.split_tokens = split_tokens
        self.query_tile_rows = query_tile_rows
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._kernel = native.unison_attention
        self._kernel.argtypes = [pointer] * 6 + [ctypes.c_float, integer]
        self._store_kernel = native.unison_store_kv
        self._store_kernel.argtypes = [pointer] * 5 + [integer] * 7
        self._bound: dict[type, _Bound] = {}

    def describe(self) -> dict[str, str | int | bool]:
        """See the base class; `split_tokens` is part of what the bits depend on."""
        return {"name": self.name, "exact": self.exact, "split_tokens": self.split_tokens}

    def _attend(
        self,
        q_THD: Tensor,
        k_THkD: Tensor,
        v_THkD: Tensor,
        descriptor: Descriptor,
        layer: LayerAttention,
        kv: LayerKV | None,
    ) -> Tensor:
        if kv is not None:
            return self._run(q_THD, kv.k_SHD, kv.v_SHD, descriptor, layer)
        if torch.is_grad_enabled() and (q_THD.requires_grad or k_THkD.requires_grad or v_THkD.requires_grad):
            return _PackedAttention.apply(q_THD, k_THkD, v_THkD, self, descriptor, layer)
        return self._run(q_THD, k_THkD, v_THkD, descriptor, layer)

    def _run(self, q_THD: Tensor, k_SHD: Tensor, v_SHD: Tensor, descriptor: Descriptor, layer: LayerAttention) -> Tensor:
        bound = self._bound.get(type(descriptor))
        if bound is None or bound.descriptor is not descriptor:
            bound = self._bound[type(descriptor)] = self._bind(descriptor)
        strides = q_THD.stride(), k_SHD.stride(), v_SHD.stride()
        key = (q_THD.dtype, q_THD.shape, k_SHD.shape, strides)
        if bound.key != key:
            if any(stride[2] != 1 for stride in strides):
                q_THD, k_SHD, v_SHD = q_THD.contiguous(), k_SHD.contiguous(), v_SHD.contiguous()
                return self._run(q_THD, k_SHD, v_SHD, descriptor, layer)
            bound.shape, bound.key = _shape_of(q_THD, k_SHD, v_SHD), key
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        fault = self._kernel(
            bound.rows_address,
            ctypes.addressof(bound.shape),  # type: ignore[arg-type]
            q_THD.data_ptr(),
            k_SHD.data_ptr(),
            v_SHD.data_ptr(),
            out_THD.data_ptr(),
            layer.scale,
            layer.window,
        )
        if fault:
            raise InvariantError(f"attention over a {type(descriptor).__name__}: {_FAULTS[fault]}")
        return out_THD

    def _bind(self, descriptor: Descriptor) -> _Bound:
        rows = _Rows(phase=_PHASES[type(descriptor)], split_tokens=self.split_tokens, tile_rows=self.query_tile_rows)
        if isinstance(descriptor, PackedDescriptor):
            rows.num_rows = descriptor.seq_starts.shape[0] - 1
            rows.query_starts = _address(descriptor.seq_starts)
        else:
            tables = descriptor.block_tables
            rows.num_rows, rows.table_width = tables.shape
            rows.tables = _address(tables, rows_may_be_strided=True)
            rows.table_stride = tables.stride(0)
            rows.block_size = descriptor.block_size
            if isinstance(descriptor, PrefillDescriptor):
                rows.query_starts = _address(descriptor.query_starts)
                rows.positions = _address(descriptor.start_positions)
            else:
                rows.positions = _address(descriptor.seq_lens)
        return _Bound(descriptor, rows, ctypes.addressof(rows))

    def _store(self, k_THkD: Tensor, v_THkD: Tensor, slots_T: Tensor, kv: LayerKV) -> None:
        k_SHD, v_SHD = kv.k_SHD, kv.v_SHD
        slots, heads, dim = k_SHD.shape
        packed = (dim, 1)
        if k_SHD.stride()[1:] != packed or v_SHD.stride()[1:] != packed or not slots_T.is_contiguous():
            super()._store(k_THkD, v_THkD, slots_T, kv)
            return
        if k_THkD.stride()[1:] != packed or v_THkD.stride()[1:] != packed:
            k_THkD, v_THkD = k_THkD.contiguous(), v_THkD.contiguous()
        size = k_SHD.element_size()
        fault = self._store_kernel(
            k_THkD.data_ptr(),
            v_THkD.data_ptr(),
            slots_T.data_ptr(),
            k_SHD.data_ptr(),
            v_SHD.data_ptr(),
            slots_T.shape[0],
            slots,
            heads * dim * size,
            k_THkD.stride(0) * size,
            v_THkD.stride(0) * size,
            k_SHD.stride(0) * size,
            v_SHD.stride(0) * size,
        )
        if fault:
            raise InvariantError(f"storing {slots_T.shape[0]} tokens into {slots} KV slots: {_FAULTS[fault]}")


class _PackedAttention(torch.autograd.Function):
    """Native forward, torch backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, backend: NativeAttention, descriptor: PackedDescriptor, layer: LayerAttention
    ) -> Tensor:
        out = backend._run(q, k, v, descriptor, layer)
        ctx.save_for_backward(q, k, v, out)
        ctx.descriptor, ctx.layer = descriptor, layer
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        return (*packed_backward(grads[0], (q, k, v, out), ctx.descriptor, ctx.layer), None, None, None)


def _address(tensor: Tensor, rows_may_be_strided: bool = False) -> int:
    is_plain = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    if not (tensor.is_contiguous() or (rows_may_be_strided and is_plain)) or tensor.device.type != "cpu":
        raise ValueError(f"native attention needs descriptors in contiguous CPU memory; got strides {tensor.stride()}")
    return tensor.data_ptr()


def _shape_of(q_THD: Tensor, k_SHD: Tensor, v_SHD: Tensor) -> _Shape:
    dim = q_THD.shape[2]
    if q_THD.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"native attention computes bfloat16 and float32, not {q_THD.dtype}; choose the torch kernels")
    if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head dim is {dim}; native attention takes multiples of 8 up to {MAX_HEAD_DIM}: choose the torch kernels"
        )
    if any(tensor.device.type != "cpu" for tensor in (q_THD, k_SHD, v_SHD)):
        raise ValueError("native attention needs tensors in CPU memory")
    return _Shape(
        q_THD.dtype is torch.bfloat16,
        q_THD.shape[0],
        q_THD.shape[1],
        k_SHD.shape[1],
        dim,
        k_SHD.shape[0],
        *q_THD.stride()[:2],
        *k_SHD.stride()[:2],
        *v_SHD.stride()[:2],
    )
