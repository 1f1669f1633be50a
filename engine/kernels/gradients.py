"""Gradients of the row-wise operations: in torch for every device, and in this package's C++ for the CPU.

Owns: the backward formulas that aren't matrix products. The one beside the other, they agree up to rounding; neither
promises an order of reduction, and both give the same bits for any number of threads. Called by `differentiable` and by
the trainer's head.

Shapes: M rows, H width of a row, I inner width of the gated layer, R rows of logits, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class RowGradients:
    """In torch, computed in float32 and rounded once to the operands' dtype."""

    def rms_norm(
        self, x_MH: Tensor, weight_H: Tensor, eps: float, grad_MH: Tensor, residual_MH: Tensor | None = None
    ) -> Pair:
        """Gradients by x and by the weight; `residual_MH` is added to the first, for an x that others read too."""
        wide, upstream = x_MH.float(), grad_MH.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        normal = wide * scale
        inner = upstream * weight_H.float()
        grad_x = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
        if residual_MH is not None:
            grad_x = grad_x + residual_MH.float()
        grad_weight = (upstream * normal.to(x_MH.dtype).float()).sum(0)
        return grad_x.to(x_MH.dtype), grad_weight.to(weight_H.dtype)

    def silu_mul(self, gate_up_M2I: Tensor, grad_MI: Tensor) -> Tensor:
        """Gradient by gate and up [M, 2 I]."""
        gate, up = gate_up_M2I.float().chunk(2, dim=-1)
        upstream, gated = grad_MI.float(), torch.sigmoid(gate)
        grad_gate = upstream * up * gated * (1.0 + gate * (1.0 - gated))
        return torch.cat((grad_gate, upstream * gate * gated), dim=-1).to(gate_up_M2I.dtype)

    def logprobs(self, softmax_RV: Tensor, targets_R: Tensor, factors_R: Tensor) -> Tensor:
        """Gradient by the logits of `factors` times the log-prob of each row's target: factor (onehot - softmax)."""
        factors = factors_R.to(softmax_RV.dtype).unsqueeze(-1)
        return softmax_RV.mul(-factors).scatter_add_(-1, targets_R.unsqueeze(-1), factors)


class NativeRowGradients(RowGradients):
    """In C++ (native/gradients.cpp), for bfloat16 and float32 on the CPU."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._norm, self._silu_mul, self._logprobs = (
            {
                dtype: _function(lib, f"unison_{name}_{suffix}", argtypes)
                for dtype, suffix in ((torch.bfloat16, "bf16"), (torch.float32, "f32"))
            }
            for name, argtypes in (
                ("rms_norm_gradient", (pointer, pointer, ctypes.c_float, *(pointer,) * 4, count, count)),
                ("silu_mul_gradient", (pointer, pointer, pointer, count, count)),
                ("logprob_gradient", (pointer, pointer, pointer, pointer, count, count)),
            )
        )

    def rms_norm(
        self, x_MH: Tensor, weight_H: Tensor, eps: float, grad_MH: Tensor, residual_MH: Tensor | None = None
    ) -> Pair:
        """As in torch."""
        x, weight, grad = x_MH.contiguous(), weight_H.contiguous(), grad_MH.to(x_MH.dtype).contiguous()
        residual = None if residual_MH is None else residual_MH.to(x_MH.dtype).contiguous()
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        self._norm[x.dtype](
            x.data_ptr(), weight.data_ptr(), eps, grad.data_ptr(), None if residual is None else residual.data_ptr(),
            grad_x.data_ptr(), grad_weight.data_ptr(), *x.shape,
        )  # fmt: skip
        return grad_x, grad_weight

    def silu_mul(self, gate_up_M2I: Tensor, grad_MI: Tensor) -> Tensor:
        """As in torch."""
        gate_up, upstream = gate_up_M2I.contiguous(), grad_MI.to(gate_up_M2I.dtype).contiguous()
        grad = torch.empty_like(gate_up)
        function = self._silu_mul[gate_up.dtype]
        function(gate_up.data_ptr(), upstream.data_ptr(), grad.data_ptr(), *upstream.shape)
        return grad

    def logprobs(self, softmax_RV: Tensor, targets_R: Tensor, factors_R: Tensor) -> Tensor:
        """As in torch."""
        softmax, targets, factors = softmax_RV.contiguous(), targets_R.contiguous(), factors_R.float().contiguous()
        out = torch.empty_like(softmax)
        function = self._logprobs[softmax.dtype]
        function(softmax.data_ptr(), targets.data_ptr(), factors.data_ptr(), out.data_ptr(), *out.shape)
        return out


def _function(lib: ctypes.CDLL, name: str, argtypes: tuple[object, ...]) -> ctypes._NamedFuncPointer:
    function = getattr(lib, name)
    function.argtypes, function.restype = argtypes, None
    return function
