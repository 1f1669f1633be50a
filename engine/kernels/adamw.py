"""AdamW updates of float32 masters that also write the rounded weights, and the sum of squares for a gradient's norm.

Owns: the formula in torch, which is the reference and serves every device, the door to native/adamw.cpp, which does the
same in one pass over memory on the CPU, and the checks in front of both. Knows nothing of models, schedules or
publications. Called by the trainer's optimizer.

Where torch has fused multiply-add (on a CPU: its AVX2 and AVX512 code) the reference gives the native code's bits, and
moments are those of torch.optim.AdamW(foreach=False, fused=False). Masters differ from its by the rounding of the root,
which torch leaves to MKL; fused=True rounds the second moment elsewhere. The native code gives its bits on every CPU,
for any number of threads.

Thread rule: as NativeKernels.
Source: Loshchilov and Hutter 2019 (AdamW), alg. 2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .build import library

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_BLOCK = 1 << 20
"""Elements that the reference takes at once, which bounds its temporaries."""
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}


@dataclass(frozen=True)
class AdamWRates:
    """The numbers of one update."""

    learning_rate: float
    """Of this update."""
    beta1: float
    """Decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    eps: float
    """Added to the root of the second moment."""
    num_updates: int
    """With this one: 1 at the first, whose moments are zeros."""
    scale: float = 1.0
    """What gradients are multiplied by first."""


@dataclass(frozen=True, eq=False)
class AdamWRun:
    """Elements that are updated alike: contiguous tensors of one shape on one device."""

    gradient: Tensor
    """float32; only read."""
    master: Tensor
    """float32; updated."""
    exp_avg: Tensor
    """float32; updated."""
    exp_avg_sq: Tensor
    """float32; updated."""
    out: Tensor | None = None
    """bfloat16 or float32: the new master, rounded to even."""
    weight_decay: float = 0.0
    """Decoupled: times the learning rate."""


def adamw_(runs: Sequence[AdamWRun], rates: AdamWRates) -> None:
    """Update every run; nothing is written where one is refused.

    Raises: TypeError for a wrong dtype or device, ValueError for a wrong shape, for strides, for tensors that overlap,
    and for `num_updates` below 1.
    """
    if rates.num_updates < 1:
        raise ValueError(f"num_updates is {rates.num_updates}; the first update is 1")
    for run in runs:
        _check(run)
    _check_overlap(runs)
    lib = library()
    for run in runs:
        if lib is not None and run.master.is_cpu:
            native_adamw_(run, rates, lib)
        else:
            reference_adamw_(run, rates)


def sum_of_squares(flat: Tensor) -> float:
    """Of a contiguous float32 tensor, in float64: the native code's bits don't depend on the number of threads; torch,
    where there is none, differs from them by at most 1e-12 of the sum.

    Raises: TypeError, ValueError as above.
    """
    _check_tensor("the gradient", flat, flat)
    lib = library() if flat.is_cpu else None
    if lib is None:
        return sum(float(block.double().square().sum()) for block in flat.flatten().split(_BLOCK))
    return native_sum_of_squares(flat, lib)


@torch.no_grad()
def reference_adamw_(run: AdamWRun, rates: AdamWRates) -> None:
    """One run in torch's own operations, unchecked."""
    parts = [tensor.view(-1).split(_BLOCK) for tensor in (run.gradient, run.master, run.exp_avg, run.exp_avg_sq)]
    root, step = _root_and_step(rates)
    for gradient, master, exp_avg, exp_avg_sq in zip(*parts, strict=True):
        scaled = gradient * rates.scale
        master.mul_(1 - rates.learning_rate * run.weight_decay)
        exp_avg.lerp_(scaled, 1 - rates.beta1)
        exp_avg_sq.mul_(rates.beta2).addcmul_(scaled, scaled, value=1 - rates.beta2)
        # By way of float64, which gives the correctly rounded root; torch's own in float32 (MKL) isn't always that.
        denominator = (exp_avg_sq.double().sqrt().float() / root).add_(rates.eps)
        master.addcdiv_(exp_avg, denominator, value=step)
    if run.out is not None:
        run.out.copy_(run.master)


def _root_and_step(rates: AdamWRates) -> tuple[float, float]:
    """The bias corrections: sqrt(1 - beta2^t), and the step's size with its sign."""
    root = (1 - rates.beta2**rates.num_updates) ** 0.5
    return root, -(rates.learning_rate / (1 - rates.beta1**rates.num_updates))


class _Rates(ctypes.Structure):
    """As in adamw.cpp."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in ("scale", "decay", "weight1", "beta2", "weight2", "root", "eps", "step")
    ]  # fmt: skip


def native_adamw_(run: AdamWRun, rates: AdamWRates, lib: ctypes.CDLL) -> None:
    """One run on the CPU in one pass, unchecked."""
    root, step = _root_and_step(rates)
    plain = _Rates(
        rates.scale, 1 - rates.learning_rate * run.weight_decay, 1 - rates.beta1, rates.beta2, 1 - rates.beta2,
        root, rates.eps, step,
    )  # fmt: skip
    function = getattr(lib, f"unison_adamw_{'f32' if run.out is None else _SUFFIXES[run.out.dtype]}")
    function.argtypes, function.restype = (ctypes.POINTER(_Rates), *(_POINTER,) * 5, _COUNT), None
    function(
        ctypes.byref(plain), run.gradient.data_ptr(), run.master.data_ptr(), run.exp_avg.data_ptr(),
        run.exp_avg_sq.data_ptr(), None if run.out is None else run.out.data_ptr(), run.master.numel(),
    )  # fmt: skip


def native_sum_of_squares(flat: Tensor, lib: ctypes.CDLL) -> float:
    """Blocks of 32,768 elements, sixteen lanes in each, added in their order; unchecked."""
    function = lib.unison_sum_of_squares
    function.argtypes, function.restype = (_POINTER, _COUNT), ctypes.c_double
    return float(function(flat.data_ptr(), flat.numel()))


def _check(run: AdamWRun) -> None:
    for name in ("gradient", "master", "exp_avg", "exp_avg_sq"):
        _check_tensor(name, getattr(run, name), run.master)
    if run.out is not None:
        _check_tensor("out", run.out, run.master, tuple(_SUFFIXES))


def _check_tensor(name: str, tensor: Tensor, master: Tensor, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
    if tensor.dtype not in dtypes or tensor.device != master.device:
        wanted = " or ".join(map(str, dtypes))
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}; it must be {wanted} on {master.device}")
    if tensor.shape != master.shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be contiguous with shape "
            f"{tuple(master.shape)}"
        )


def _check_overlap(runs: Sequence[AdamWRun]) -> None:
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for run in runs
        for tensor in (run.gradient, run.master, run.exp_avg, run.exp_avg_sq, run.out)
        if tensor is not None and tensor.numel()
    )
    for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
        if start < end:
            raise ValueError("tensors of an update overlap; each needs memory of its own")
