"""Which Kernels a device gets, and why.

Owns the choice alone. Called once per engine and once per trainer; both must come to the same answer, so it depends
on the machine and the arguments only.
"""

from __future__ import annotations

import torch

from .build import cpu_features, library, why_unavailable
from .kernels import Kernels
from .native_kernels import NativeKernels
from .torch_kernels import TorchKernels

CHOICES = ("auto", "native", "torch")


def has_amx_linear() -> bool:
    """Whether torch's bf16 GEMM runs on AMX tiles here: several times faster than any vector code."""
    return "amx_bf16" in cpu_features().split() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def select_kernels(device: torch.device | str, choice: str = "auto", exact: bool = True) -> Kernels:
    """The kernels for a device. `auto` takes native code on the CPU where it can be built, else torch.

    `exact=False` asks for speed alone; native code is exact anyway and as fast.

    Raises: ValueError for an unknown choice, or for `native` on a device that isn't the CPU; RuntimeError for
    `native` where it can't be built or is turned off.
    """
    if choice not in CHOICES:
        raise ValueError(f"kernels are {choice!r}; must be one of {', '.join(CHOICES)}")
    is_cpu = torch.device(device).type == "cpu"
    if choice == "native" and not is_cpu:
        raise ValueError(f"native kernels work on the CPU, not on {device}; choose 'auto' or 'torch'")
    if choice == "torch" or not is_cpu or (choice == "auto" and library() is None):
        return TorchKernels(exact)
    native = NativeKernels()
    if choice == "auto" and has_amx_linear() and not native.has_tiles:
        # Torch's AMX blocks are kept only where the probe finds rows invariant; asked for by name, native means native.
        return NativeKernels(linear="onednn")
    return native


def why_not_native(device: torch.device | str) -> str | None:
    """Why `auto` gives a device the torch kernels; None where it gives native ones."""
    if torch.device(device).type != "cpu":
        return f"native kernels work on the CPU, not on {device}"
    return why_unavailable()
