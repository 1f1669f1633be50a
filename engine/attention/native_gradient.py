"""The gradient of packed attention by the C++ kernel of engine/kernels/native/attention_gradient.cpp.

Owns: the struct that describes a call. The same numbers as gradient.py up to rounding, several times as fast: queries
without an upstream gradient, such as the repeats of a shared prompt, are left out.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..kernels.build import library
from .descriptors import LayerAttention, PackedDescriptor
from .gradient import Gradients

_POINTERS = "starts q k v out grad grad_q grad_k grad_v".split()
_FIELDS = (
    "starts num_sequences q k v out grad grad_q grad_k grad_v q_token q_head k_token k_head v_token v_head out_token "
    "out_head grad_token grad_head num_heads num_kv_heads head_dim window scale is_bf16"
).split()


class _Call(ctypes.Structure):
    """AttentionGradient of attention_gradient.cpp."""

    _fields_ = [
        (name, ctypes.c_void_p if name in _POINTERS else ctypes.c_double if name == "scale" else ctypes.c_int64)
        for name in _FIELDS
    ]


def native_packed_backward(
    grad_THD: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor], descriptor: PackedDescriptor, layer: LayerAttention
) -> Gradients:
    """As `gradient.packed_backward`. The forward ran natively on the same tensors, so dtype, device and head dim are
    checked.
    """
    native = library()
    assert native is not None
    q, k, v, out = (_dense(tensor) for tensor in saved)
    grad = _dense(grad_THD.to(q.dtype))
    found = torch.zeros(q.shape, dtype=q.dtype), *(torch.empty(tensor.shape, dtype=q.dtype) for tensor in (k, v))
    call = _Call(
        starts=descriptor.seq_starts.data_ptr(), num_sequences=descriptor.seq_starts.shape[0] - 1,
        num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[2], window=layer.window or 0,
        scale=layer.scale, is_bf16=q.dtype is torch.bfloat16,
    )  # fmt: skip
    for name, tensor in zip(("q", "k", "v", "out", "grad"), (q, k, v, out, grad), strict=True):
        setattr(call, name, tensor.data_ptr())
        setattr(call, f"{name}_token", tensor.stride(0))
        setattr(call, f"{name}_head", tensor.stride(1))
    for name, tensor in zip(("grad_q", "grad_k", "grad_v"), found, strict=True):
        setattr(call, name, tensor.data_ptr())
    native.unison_attention_gradient(ctypes.byref(call))
    return found[0], found[1], found[2]


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
