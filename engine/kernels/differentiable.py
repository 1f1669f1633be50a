"""The operations with gradients: one function per operation of Kernels, for the trainer's forward.

Owns the way backward. The forward is the kernel's, bit for bit, so a trainer's forward and the engine's agree; the
backward is torch's GEMMs, in the dtype that is fast here, and the formulas of `gradients`. It makes no promise about
its order of reduction. Where no argument needs a gradient the kernel is called directly and nothing is recorded.

Operations that write into their arguments (`add_rms_norm`, `rope`) do so only without gradients; with gradients they
work on copies, and leave an `out` alone. Callers go on with what is returned and forget what they gave, so both read
the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .kernels import Kernels

Pair = tuple[torch.Tensor, torch.Tensor]


@cache
def _is_slow(dtype: torch.dtype, device: str) -> bool:
    """Whether torch multiplies matrices of `dtype` by a plain loop: some 100 times slower than in float32."""
    has_fast = {torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
                torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported}  # fmt: skip
    return device == "cpu" and dtype in has_fast and not has_fast[dtype]()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b for a backward pass, in their common dtype; computed in float32 where torch has no fast GEMM for it."""
    if _is_slow(a.dtype, a.device.type):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def _records(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, is_logits: bool, x: Any, w: Any, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return kernels.logits(x, w) if is_logits else kernels.linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        grad_x = product(grad, w) if ctx.needs_input_grad[2] else None
        grad_w = product(grad.t(), x) if ctx.needs_input_grad[3] else None
        grad_bias = grads[0].float().sum(0).to(x.dtype) if ctx.needs_input_grad[4] else None
        return None, None, grad_x, grad_w, grad_bias


def embedding(kernels: Kernels, table_VH: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """`Kernels.gather_rows`, differentiable in the table."""
    if not _records(table_VH):
        return kernels.gather_rows(table_VH, ids_T)
    return torch.nn.functional.embedding(ids_T, table_VH)


def linear(
    kernels: Kernels, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`Kernels.linear`, differentiable in x, w and bias. `out` is for calls that need no gradient."""
    if not _records(x, w, bias):
        return kernels.linear(x, w, bias, out)
    return _Linear.apply(kernels, False, x, w, bias)


def logits(kernels: Kernels, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`Kernels.logits`, differentiable in x and w."""
    if not _records(x, w):
        return kernels.logits(x, w)
    return _Linear.apply(kernels, True, x, w, None)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Any, weight: Any, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kernels, ctx.eps = kernels, eps
        return kernels.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return None, *ctx.kernels.gradients.rms_norm(x, weight, ctx.eps, grads[0]), None


def rms_norm(kernels: Kernels, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`Kernels.rms_norm`, differentiable in x and weight."""
    if not _records(x, weight):
        return kernels.rms_norm(x, weight, eps)
    return _RmsNorm.apply(kernels, x, weight, eps)


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, residual: Any, x: Any, weight: Any, eps: float) -> Pair:
        total = residual.clone()
        y = kernels.add_rms_norm(total, x, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.kernels, ctx.eps = kernels, eps
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total, weight = ctx.saved_tensors
        grad, grad_weight = ctx.kernels.gradients.rms_norm(total, weight, ctx.eps, grads[1], grads[0])
        return None, grad, grad, grad_weight, None


def add_rms_norm(
    kernels: Kernels, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float,
    out: torch.Tensor | None = None,
) -> Pair:  # fmt: skip
    """(residual + x, its rms_norm), differentiable in residual, x and weight. Without gradients `residual` itself
    is updated.
    """
    if not _records(residual, x, weight):
        return residual, kernels.add_rms_norm(residual, x, weight, eps, out)
    return _AddRmsNorm.apply(kernels, residual, x, weight, eps)


def _rotate_back(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = grad[..., :half].float(), grad[..., half : 2 * half].float()
    turned = torch.cat((a * c + b * s, b * c - a * s), dim=-1).to(grad.dtype)
    return torch.cat((turned, grad[..., 2 * half :]), dim=-1)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, q: Any, k: Any, cos: Any, sin: Any) -> Pair:
        ctx.save_for_backward(cos, sin)
        turned_q, turned_k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
        kernels.rope_(turned_q, turned_k, cos, sin)
        return turned_q, turned_k

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return None, _rotate_back(grads[0], cos, sin), _rotate_back(grads[1], cos, sin), None, None


def rope(kernels: Kernels, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """The rotated (q, k), differentiable in both. Without gradients they are rotated in place."""
    if not _records(q, k):
        kernels.rope_(q, k, cos, sin)
        return q, k
    return _Rope.apply(kernels, q, k, cos, sin)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, gate_up: Any) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.kernels = kernels
        return kernels.silu_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        return None, ctx.kernels.gradients.silu_mul(gate_up, grads[0])


def silu_mul(kernels: Kernels, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`Kernels.silu_mul`, differentiable."""
    if not _records(gate_up):
        return kernels.silu_mul(gate_up, out)
    return _SiluMul.apply(kernels, gate_up)


def linear_silu_mul(
    kernels: Kernels, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`Kernels.linear_silu_mul`, differentiable in x, w and bias: with gradients, what its two parts give."""
    if not _records(x, w, bias):
        return kernels.linear_silu_mul(x, w, bias, out)
    return silu_mul(kernels, linear(kernels, x, w, bias))


class _RowLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, rows: Any, targets: Any) -> torch.Tensor:
        ctx.save_for_backward(rows, targets)
        return kernels.row_logprobs(rows, targets)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, targets = ctx.saved_tensors
        grad = torch.softmax(rows, dim=-1).mul_(-grads[0].unsqueeze(-1))
        return None, grad.scatter_add_(-1, targets.unsqueeze(-1), grads[0].unsqueeze(-1)), None


def row_logprobs(kernels: Kernels, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`Kernels.row_logprobs`, differentiable in the logits."""
    if not _records(rows):
        return kernels.row_logprobs(rows, targets)
    return _RowLogprobs.apply(kernels, rows, targets)


class _RowLogsumexp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, rows: Any) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return kernels.row_logsumexp(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return None, torch.softmax(rows, dim=-1).mul_(grads[0].unsqueeze(-1))


def row_logsumexp(kernels: Kernels, rows: torch.Tensor) -> torch.Tensor:
    """`Kernels.row_logsumexp`, differentiable."""
    if not _records(rows):
        return kernels.row_logsumexp(rows)
    return _RowLogsumexp.apply(kernels, rows)
