"""Kernels: the arithmetic of the decoder, each native code beside its torch reference.

Reading order: kernels (the contract), torch_kernels (the reference), native_kernels (the door to native/*.cpp),
build, selection, differentiable; adamw, the trainer's.
"""

from .kernels import Kernels
from .native_kernels import NativeKernels
from .selection import select_kernels
from .torch_kernels import TorchKernels

__all__ = ["Kernels", "NativeKernels", "TorchKernels", "select_kernels"]
