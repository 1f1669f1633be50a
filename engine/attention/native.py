"""NativeAttention: the C++ kernel of engine/kernels/native/attention.cpp behind the base class.

Owns: the structs that describe a call to the kernel. They are made once per descriptor and once per layer and kept
there (`prepared`), so that a layer costs one lean ctypes call. Gradients flow through packed sequences only (see
native_gradient.py).

Exactness: a query's bits depend on its own sequence and on `split_tokens`; attention.cpp has the contract.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...ipc.errors import InvariantError
from ..kernels.build import library, why_unavailable
from ..kernels.tape import NativeFunction, keep
from .attention import AttentionBackend
from .descriptors import DecodeDescriptor, Descriptor, LayerAttention, LayerKV, PackedDescriptor, PrefillDescriptor
from .native_gradient import native_packed_backward

MAX_HEAD_DIM = 256
GROUP_TOKENS = 32

_FAULTS = {
    1: "the query starts don't rise from 0 to the number of queries",
    2: "a position is negative or beyond the block table",
    3: "a visible position has no block, or a block outside the KV slots",
    4: "a slot is beyond the KV slots",
}
_PHASES = {PackedDescriptor: 0, PrefillDescriptor: 1, DecodeDescriptor: 2}


def _fields(names: str, pointers: str, doubles: str = "") -> list[tuple[str, Any]]:
    """C fields in order: int64 but for the named pointers and doubles."""
    kinds: dict[str, Any] = dict.fromkeys(pointers.split(), ctypes.c_void_p)
    kinds.update(dict.fromkeys(doubles.split(), ctypes.c_double))
    return [(name, kinds.get(name, ctypes.c_int64)) for name in names.split()]


class _Rows(ctypes.Structure):
    """AttentionRows of attention.cpp: what a step's layers have in common. Lives in the descriptor's `prepared`."""

    _fields_ = _fields(
        "phase num_rows query_starts positions tables table_stride table_width block_size split_tokens tile_rows "
        "num_tokens num_heads q_token_stride q_head_stride",
        pointers="query_starts positions tables",
    )
    geometry: tuple[Any, ...] = ()
    """Shape and strides of the queries that the last four fields were made for."""
    address: int
    """Of the struct itself."""


class _Keys(ctypes.Structure):
    """AttentionKeys of attention.cpp: one layer's keys and values. Lives in the layer's `prepared`."""

    _fields_ = _fields(
        "k v is_bf16 num_slots num_kv_heads head_dim k_slot_stride k_head_stride v_slot_stride v_head_stride scale "
        "window",
        pointers="k v",
        doubles="scale",
    )
    layer: LayerAttention | None = None
    """Whose scale and window the last two fields hold."""
    has_whole_slots: bool
    """True where all heads of a slot lie together, as `store` writes them."""
    address: int
    """Of the struct itself."""


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
        self._kernel = NativeFunction(native, "unison_attention", (pointer,) * 4, ctypes.c_int)
        self._store_kernel = NativeFunction(
            native, "unison_store_kv", (pointer,) * 4 + (integer,) * 3, ctypes.c_int
        )

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
            keys = kv.prepared.get(self) or self._prepare_keys(kv)
            return self._run(q_THD, keys, descriptor, layer)
        if torch.is_grad_enabled() and (q_THD.requires_grad or k_THkD.requires_grad or v_THkD.requires_grad):
            return _PackedAttention.apply(q_THD, k_THkD, v_THkD, self, descriptor, layer)
        return self._packed(q_THD, k_THkD, v_THkD, descriptor, layer)

    def _packed(
        self, q_THD: Tensor, k_THkD: Tensor, v_THkD: Tensor, descriptor: Descriptor, layer: LayerAttention
    ) -> Tensor:
        k_THkD, v_THkD = _with_dense_rows(k_THkD), _with_dense_rows(v_THkD)
        return self._run(q_THD, _keys_of(k_THkD, v_THkD), descriptor, layer)

    def _run(self, q_THD: Tensor, keys: _Keys, descriptor: Descriptor, layer: LayerAttention) -> Tensor:
        rows = descriptor.prepared.get(self) or self._prepare_rows(descriptor)
        geometry = q_THD.shape, q_THD.stride()
        if rows.geometry != geometry:
            tokens, heads, _ = q_THD.shape
            token_stride, head_stride, stride = q_THD.stride()
            if stride != 1 or head_stride > token_stride:
                return self._run(q_THD.clone(memory_format=torch.contiguous_format), keys, descriptor, layer)
            rows.num_tokens, rows.num_heads = tokens, heads
            rows.q_token_stride, rows.q_head_stride = token_stride, head_stride
            rows.geometry = geometry
        if keys.layer is not layer:
            keys.layer, keys.scale, keys.window = layer, layer.scale, layer.window
        out_THD = torch.empty_like(q_THD)  # dense with the order of q's strides, which falls: contiguous
        for needed in (out_THD, rows, keys):
            keep(needed)
        fault = self._kernel(rows.address, keys.address, q_THD.data_ptr(), out_THD.data_ptr())
        if fault:
            raise InvariantError(f"attention over a {type(descriptor).__name__}: {_FAULTS[fault]}")
        return out_THD

    def _prepare_rows(self, descriptor: Descriptor) -> _Rows:
        rows = _Rows(phase=_PHASES[type(descriptor)], split_tokens=self.split_tokens, tile_rows=self.query_tile_rows)
        if isinstance(descriptor, PackedDescriptor):
            rows.num_rows = descriptor.seq_starts.shape[0] - 1
            rows.query_starts = _address(descriptor.seq_starts)
        else:
            tables = descriptor.block_tables
            rows.num_rows, rows.table_width = tables.shape
            rows.tables = _address(tables, may_skip_between_rows=True)
            rows.table_stride = tables.stride(0)
            rows.block_size = descriptor.block_size
            if isinstance(descriptor, PrefillDescriptor):
                rows.query_starts = _address(descriptor.query_starts)
                rows.positions = _address(descriptor.start_positions)
            else:
                rows.positions = _address(descriptor.seq_lens)
        rows.address = ctypes.addressof(rows)
        descriptor.prepared[self] = rows
        return rows

    def _prepare_keys(self, kv: LayerKV) -> _Keys:
        if kv.k_SHD.stride(2) != 1 or kv.v_SHD.stride(2) != 1:
            raise ValueError("native attention needs KV slots whose head dim is contiguous")
        keys = _keys_of(kv.k_SHD, kv.v_SHD)
        kv.prepared[self] = keys
        return keys

    def _store(self, k_THkD: Tensor, v_THkD: Tensor, slots_T: Tensor, kv: LayerKV) -> None:
        keys = kv.prepared.get(self) or self._prepare_keys(kv)
        if not keys.has_whole_slots or not slots_T.is_contiguous():
            super()._store(k_THkD, v_THkD, slots_T, kv)
            return
        row = (keys.head_dim, 1)
        k_stride, v_stride = k_THkD.stride(), v_THkD.stride()
        if k_stride[1:] != row or v_stride[1:] != row:
            k_THkD, v_THkD = (x.clone(memory_format=torch.contiguous_format) for x in (k_THkD, v_THkD))
            k_stride, v_stride = k_THkD.stride(), v_THkD.stride()
        pointers = k_THkD.data_ptr(), v_THkD.data_ptr(), slots_T.data_ptr()
        fault = self._store_kernel(keys.address, *pointers, slots_T.shape[0], k_stride[0], v_stride[0])
        if fault:
            raise InvariantError(f"storing {slots_T.shape[0]} tokens into {keys.num_slots} KV slots: {_FAULTS[fault]}")


class _PackedAttention(torch.autograd.Function):
    """Forward and backward in C++."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        backend: NativeAttention,
        descriptor: PackedDescriptor,
        layer: LayerAttention,
    ) -> Tensor:
        out = backend._packed(q, k, v, descriptor, layer)
        ctx.save_for_backward(q, k, v, out)
        ctx.descriptor, ctx.layer = descriptor, layer
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        return (*native_packed_backward(grads[0], (q, k, v, out), ctx.descriptor, ctx.layer), None, None, None)


def _address(tensor: Tensor, may_skip_between_rows: bool = False) -> int:
    is_dense = tensor.is_contiguous() or (may_skip_between_rows and tensor.stride(1) == 1)
    if not is_dense or tensor.device.type != "cpu":
        raise ValueError(f"native attention needs descriptors in contiguous CPU memory; got strides {tensor.stride()}")
    return tensor.data_ptr()


def _with_dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def _keys_of(k_SHD: Tensor, v_SHD: Tensor) -> _Keys:
    slots, heads, dim = k_SHD.shape
    if k_SHD.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"native attention computes bfloat16 and float32, not {k_SHD.dtype}; choose the torch kernels")
    if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head dim is {dim}; native attention takes multiples of 8 up to {MAX_HEAD_DIM}: choose the torch kernels"
        )
    if k_SHD.device.type != "cpu" or v_SHD.device.type != "cpu":
        raise ValueError("native attention needs tensors in CPU memory")
    k_strides, v_strides = k_SHD.stride(), v_SHD.stride()
    is_bf16 = k_SHD.dtype is torch.bfloat16
    keys = _Keys(k_SHD.data_ptr(), v_SHD.data_ptr(), is_bf16, slots, heads, dim, *k_strides[:2], *v_strides[:2], 0.0, 0)
    keys.has_whole_slots = k_strides[1] == dim and v_strides[1] == dim
    keys.address = ctypes.addressof(keys)
    return keys
