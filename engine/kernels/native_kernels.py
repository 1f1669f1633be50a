"""NativeKernels: the operations in this package's own C++ (native/*.cpp), for the CPU.

Owns: the ctypes functions and the checks in front of them: a wrong dtype, device, shape or stride is a TypeError or
ValueError here, because behind this door are raw pointers. Rows are independent of everything but themselves by
construction: each operation's order of reduction is fixed in its source, so results are equal for any batch, thread
count and CPU.

Thread rule: any thread; calls are served one after another by the library's thread pool, and Python's lock is free
meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from .build import library, why_unavailable
from .gradients import NativeRowGradients, RowGradients
from .kernels import Kernels
from .tape import NativeFunction, keep
from .torch_kernels import TorchKernels

_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_LINEAR = (_POINTER, _COUNT, _POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _COUNT)
_NORM = (_POINTER, _COUNT, _POINTER, _COUNT, _POINTER, _FLOAT, _POINTER, _COUNT, _COUNT, _COUNT)
_ROPE = (_POINTER, _COUNT, _COUNT, _COUNT) * 2 + (_POINTER, _COUNT) * 2 + (_COUNT, _COUNT)
_SILU = (_POINTER, _COUNT, _POINTER, _COUNT, _COUNT, _COUNT)
_BF16, _F32 = torch.bfloat16, torch.float32

_TILES = ("not on this CPU", "used", "the system refuses the tile registers", "unused: a test product came out wrong")
"""What `unison_tiles_state` returns."""

Function = Callable[..., Any]


def _functions(lib: ctypes.CDLL, name: str, argtypes: tuple[Any, ...]) -> dict[torch.dtype, Function]:
    by_dtype: dict[torch.dtype, Function] = {}
    for dtype, suffix in ((_BF16, "bf16"), (_F32, "f32")):
        by_dtype[dtype] = _function(lib, f"{name}_{suffix}", argtypes)
    return by_dtype


def _function(lib: ctypes.CDLL, name: str, argtypes: tuple[Any, ...]) -> Function:
    return NativeFunction(lib, name, argtypes)


class NativeKernels(Kernels):
    """The native CPU kernels; exact by construction.

    Raises: RuntimeError where the library can't be had (the reason is in the message), ValueError for an unknown
    `linear`.
    """

    def __init__(self, linear: str = "native", lib: ctypes.CDLL | None = None) -> None:
        """`linear="onednn"` leaves bf16 `linear` to torch's row blocks, which are faster where the CPU has AMX."""
        if linear not in ("native", "onednn"):
            raise ValueError(f"linear is {linear!r}; it takes 'native' or 'onednn'")
        lib = lib if lib is not None else library()
        if lib is None:
            raise RuntimeError(f"native kernels are unavailable: {why_unavailable()}")
        self._lib = lib
        self._torch = TorchKernels(exact=True) if linear == "onednn" else None
        self._linear = _functions(lib, "unison_linear", _LINEAR)
        self._logits = {_BF16: _function(lib, "unison_logits_bf16", _LINEAR), _F32: self._linear[_F32]}
        self._linear_silu_mul = _functions(lib, "unison_linear_silu_mul", _LINEAR)
        self._norm = _functions(lib, "unison_rms_norm", _NORM)
        self._rope = _functions(lib, "unison_rope", _ROPE)
        self._silu_mul = _functions(lib, "unison_silu_mul", _SILU)
        self._gather = NativeFunction(
            lib, "unison_gather_rows", (_POINTER, _COUNT, _COUNT, _POINTER, _POINTER, _COUNT), ctypes.c_int
        )
        self._logsumexp = _function(lib, "unison_row_logsumexp", (_POINTER, _COUNT, _POINTER, _COUNT, _COUNT))
        self._logprobs = _function(lib, "unison_row_logprobs", (_POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _COUNT))
        self._softmax = _functions(lib, "unison_row_softmax", (_POINTER, _COUNT, *(_POINTER,) * 3, _COUNT, _COUNT))
        self._gradients = NativeRowGradients(lib)
        lib.unison_variant.restype = ctypes.c_char_p

    @property
    def name(self) -> str:
        return "native"

    @property
    def exact(self) -> bool:
        return self._torch is None or self._torch.exact

    @property
    def writes_into_outputs(self) -> bool:
        return self._torch is None

    @property
    def has_tiles(self) -> bool:
        """Whether bf16 linear layers run on AMX tiles; a test product has come out right then."""
        return int(self._lib.unison_tiles_state()) == 1

    @property
    def gradients(self) -> RowGradients:
        return self._gradients

    @property
    def num_threads(self) -> int:
        """Threads that take part in an operation, the caller's included."""
        return int(self._lib.unison_get_threads())

    def set_num_threads(self, count: int) -> int:
        """Sets the threads of this process's pool; results don't depend on it. Returns the number in force.

        Raises: ValueError outside 1..256.
        """
        if not 1 <= count <= 256:
            raise ValueError(f"num_threads is {count}; it takes 1 to 256")
        return int(self._lib.unison_set_threads(count))

    def describe(self) -> dict[str, object]:
        plain: dict[str, object] = {
            "name": self.name,
            "exact": self.exact,
            "variant": self._lib.unison_variant().decode(),
            "threads": self.num_threads,
            "bf16_linear": "native" if self._torch is None else "torch row blocks",
            "amx": _TILES[int(self._lib.unison_tiles_state())],
        }
        if self._torch is not None:
            plain["torch_linear"] = self._torch.describe()
        return plain

    def gather_rows(self, table_VH: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        rows, width, stride = _matrix("table", table_VH)
        if stride != width and rows > 1:
            raise ValueError(f"table has strides {table_VH.stride()}; it must be contiguous")
        if ids_T.dtype is not torch.int64 or not ids_T.is_cpu or ids_T.dim() != 1 or not ids_T.is_contiguous():
            raise TypeError(f"ids are {ids_T.dtype} {tuple(ids_T.shape)}; gather_rows takes contiguous int64 [T], CPU")
        count = ids_T.shape[0]
        y, _ = _output(None, count, width, table_VH.dtype)
        num_bytes = width * table_VH.dtype.itemsize
        if self._gather(table_VH.data_ptr(), rows, num_bytes, ids_T.data_ptr(), y.data_ptr(), count):
            raise IndexError(f"an id is outside the table of {rows} rows")
        return y

    def linear(
        self,
        x_MK: torch.Tensor,
        w_NK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        dtype = x_MK.dtype
        if self._torch is not None and dtype is _BF16 and self._torch.can_be_exact(x_MK, w_NK):
            return self._torch.linear(x_MK, w_NK, bias_N, out)
        return _call_linear(self._linear, x_MK, w_NK, bias_N, out, dtype)

    def linear_silu_mul(
        self,
        x_MK: torch.Tensor,
        w_2IK: torch.Tensor,
        bias_2I: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._torch is not None:
            return super().linear_silu_mul(x_MK, w_2IK, bias_2I, out)
        if w_2IK.shape[0] % 2:
            raise ValueError(f"w is {tuple(w_2IK.shape)}; its rows must be even in number: gate, then up")
        return _call_linear(self._linear_silu_mul, x_MK, w_2IK, bias_2I, out, x_MK.dtype, 2)

    def logits(self, x_MK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return _call_linear(self._logits, x_MK, w_NK, None, out, _F32)

    def rms_norm(
        self, x_MH: torch.Tensor, weight_H: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        function = _by_dtype(self._norm, x_MH, weight_H)
        rows, width, stride = _matrix("x", x_MH)
        _vector("weight", weight_H, width)
        y, y_stride = _output(out, rows, width, x_MH.dtype)
        function(x_MH.data_ptr(), stride, None, 0, weight_H.data_ptr(), eps, y.data_ptr(), y_stride, rows, width)
        return y

    def add_rms_norm(
        self,
        residual_MH: torch.Tensor,
        x_MH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        function = _by_dtype(self._norm, x_MH, weight_H)
        rows, width, stride = _matrix("x", x_MH)
        _vector("weight", weight_H, width)
        residual, residual_stride = _output(residual_MH, rows, width, x_MH.dtype, "residual")
        y, y_stride = _output(out, rows, width, x_MH.dtype)
        function(
            x_MH.data_ptr(), stride, residual.data_ptr(), residual_stride, weight_H.data_ptr(), eps,
            y.data_ptr(), y_stride, rows, width,
        )  # fmt: skip
        return y

    def rope_(self, q_THD: torch.Tensor, k_THkD: torch.Tensor, cos_TD2: torch.Tensor, sin_TD2: torch.Tensor) -> None:
        function = _by_dtype(self._rope, q_THD, k_THkD)
        tokens, half, cos_stride = _matrix("cos", cos_TD2)
        sin_tokens, sin_half, sin_stride = _matrix("sin", sin_TD2)
        if cos_TD2.dtype is not _F32 or sin_TD2.dtype is not _F32:
            raise TypeError(f"cos and sin are {cos_TD2.dtype} and {sin_TD2.dtype}; rope_ takes float32")
        if sin_tokens != tokens or sin_half != half:
            raise ValueError(f"cos is {tuple(cos_TD2.shape)} and sin {tuple(sin_TD2.shape)}; they must be alike")
        q_heads, q_token, q_head = _heads("q", q_THD, tokens, half)
        k_heads, k_token, k_head = _heads("k", k_THkD, tokens, half)
        function(
            q_THD.data_ptr(), q_token, q_head, q_heads, k_THkD.data_ptr(), k_token, k_head, k_heads,
            cos_TD2.data_ptr(), cos_stride, sin_TD2.data_ptr(), sin_stride, tokens, half,
        )  # fmt: skip

    def silu_mul(self, gate_up_M2I: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        function = _by_dtype(self._silu_mul, gate_up_M2I, gate_up_M2I)
        rows, double, stride = _matrix("gate_up", gate_up_M2I)
        if double % 2:
            raise ValueError(f"gate_up is {tuple(gate_up_M2I.shape)}; its width must be even: gate, then up")
        y, y_stride = _output(out, rows, double // 2, gate_up_M2I.dtype)
        function(gate_up_M2I.data_ptr(), stride, y.data_ptr(), y_stride, rows, double // 2)
        return y

    def row_logprobs(self, logits_RV: torch.Tensor, targets_R: torch.Tensor) -> torch.Tensor:
        rows, width, stride = _logits_rows(logits_RV)
        targets = _targets(targets_R, rows)
        y = torch.empty(rows, dtype=_F32)
        self._logprobs(logits_RV.data_ptr(), stride, targets.data_ptr(), y.data_ptr(), rows, width)
        return y

    def row_softmax(
        self, logits_RV: torch.Tensor, targets_R: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width, stride = _logits_rows(logits_RV)
        targets = _targets(targets_R, rows)
        y, softmax = torch.empty(rows, dtype=_F32), torch.empty((rows, width), dtype=dtype)
        self._softmax[dtype](
            logits_RV.data_ptr(), stride, targets.data_ptr(), y.data_ptr(), softmax.data_ptr(), rows, width
        )
        return y, softmax

    def row_logsumexp(self, logits_RV: torch.Tensor) -> torch.Tensor:
        rows, width, stride = _logits_rows(logits_RV)
        y = torch.empty(rows, dtype=_F32)
        self._logsumexp(logits_RV.data_ptr(), stride, y.data_ptr(), rows, width)
        return y


def _call_linear(
    functions: dict[torch.dtype, Function],
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    rows_per_output: int = 1,
) -> torch.Tensor:
    function = _by_dtype(functions, x, w)
    rows, inner, x_stride = _matrix("x", x)
    width, w_inner, w_stride = _matrix("w", w)
    if inner != w_inner or inner == 0:
        raise ValueError(f"x is {tuple(x.shape)} and w is {tuple(w.shape)}; both need the same, non-zero, last size")
    bias_pointer = None
    if bias is not None:
        if bias.dtype is not x.dtype:
            raise TypeError(f"bias is {bias.dtype}; x is {x.dtype}, and they must be alike")
        _vector("bias", bias, width)
        bias_pointer = bias.data_ptr()
    y, y_stride = _output(out, rows, width // rows_per_output, out_dtype)
    function(x.data_ptr(), x_stride, w.data_ptr(), w_stride, bias_pointer, y.data_ptr(), y_stride, rows, width, inner)
    return y


def _by_dtype(functions: dict[torch.dtype, Function], x: torch.Tensor, other: torch.Tensor) -> Function:
    dtype = x.dtype
    function = functions.get(dtype)
    if function is None or other.dtype is not dtype:
        raise TypeError(f"operands are {dtype} and {other.dtype}; native kernels take bfloat16 or float32, both alike")
    return function


def _matrix(name: str, tensor: torch.Tensor) -> tuple[int, int, int]:
    """Rows, width and row stride of a CPU matrix whose rows are contiguous."""
    if not tensor.is_cpu:
        raise TypeError(f"{name} is on {tensor.device}; native kernels work on the CPU")
    if tensor.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have two dimensions")
    rows, width = tensor.shape
    stride, step = tensor.stride()
    if step != 1 and width > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; its rows must be contiguous")
    return rows, width, stride


def _vector(name: str, tensor: torch.Tensor, width: int) -> None:
    if not tensor.is_cpu:
        raise TypeError(f"{name} is on {tensor.device}; native kernels work on the CPU")
    if tensor.dim() != 1 or tensor.shape[0] != width or not tensor.is_contiguous():
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be contiguous with {width} elements")


def _output(
    out: torch.Tensor | None, rows: int, width: int, dtype: torch.dtype, name: str = "out"
) -> tuple[torch.Tensor, int]:
    """A matrix to write to and its row stride."""
    if out is None:
        out = torch.empty((rows, width), dtype=dtype)
        keep(out)
        return out, width
    if out.dtype is not dtype:
        raise TypeError(f"{name} is {out.dtype}; the result is {dtype}")
    out_rows, out_width, stride = _matrix(name, out)
    if out_rows != rows or out_width != width:
        raise ValueError(f"{name} has shape {tuple(out.shape)}; the result is ({rows}, {width})")
    if stride < width and rows > 1:
        raise ValueError(f"{name} has strides {out.stride()}; its rows must not overlap")
    return out, stride


def _heads(name: str, tensor: torch.Tensor, tokens: int, half: int) -> tuple[int, int, int]:
    """Heads, token stride and head stride of [T, H, D] to be written to."""
    if not tensor.is_cpu:
        raise TypeError(f"{name} is on {tensor.device}; native kernels work on the CPU")
    if tensor.dim() != 3 or tensor.shape[0] != tokens or tensor.shape[2] < 2 * half:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [{tokens}, heads, at least {2 * half}]")
    _, heads, width = tensor.shape
    token, head, step = tensor.stride()
    if (step != 1 and width > 1) or (head < width and heads > 1) or (token < width and tokens > 1):
        raise ValueError(f"{name} has strides {tensor.stride()}; heads must be contiguous and must not overlap")
    return heads, token, head


def _targets(targets: torch.Tensor, rows: int) -> torch.Tensor:
    if targets.dtype is not torch.int64 or not targets.is_cpu:
        raise TypeError(f"targets are {targets.dtype} on {targets.device}; row_logprobs takes int64 on the CPU")
    if targets.dim() != 1 or targets.shape[0] != rows:
        raise ValueError(f"targets are {tuple(targets.shape)}; {rows} rows of logits need shape ({rows},)")
    return targets.contiguous()


def _logits_rows(logits: torch.Tensor) -> tuple[int, int, int]:
    if logits.dtype is not _F32:
        raise TypeError(f"logits are {logits.dtype}; they must be float32")
    rows, width, stride = _matrix("logits", logits)
    if width == 0:
        raise ValueError("logits have no columns; a row needs at least one")
    return rows, width, stride
