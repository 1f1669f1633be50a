"""NativeDraws: the sampler's arithmetic in this package's own C++ (kernels/native/sample*.cpp), for the CPU.

Owns: the structs that cross to the library and the pointers in them. Knows nothing of the meaning of a parameter; the
sampler checks shapes and dtypes in front of it. Rows are drawn in parallel, each from its own data alone (R3).

Thread rule: as `Sampler`, one call at a time; Python's lock is free meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .filters import FilteredRow

_POINTER, _COUNT, _DOUBLE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_float
_TOP = (_POINTER, _COUNT, _COUNT, _COUNT, _COUNT, _POINTER, _POINTER)


@dataclass(frozen=True, eq=False)
class DrawBuffers:
    """What a draw reads beside the logits and what it writes; contiguous CPU tensors of one entry per row."""

    seeds_R: Tensor
    """int64."""
    samples_R: Tensor
    """int64."""
    positions_R: Tensor
    """int64."""
    token_ids_R: Tensor
    """int64, written."""
    logprobs_R: Tensor
    """float32, written."""
    raw_logprobs_R: Tensor
    """float32, written."""
    log_support_mass_R: Tensor
    """float32, written."""
    status_R: Tensor
    """uint8, written."""

    def pointers(self) -> tuple[int, ...]:
        """Addresses in the order of the fields, which is that of the structs' ends."""
        return (
            self.seeds_R.data_ptr(), self.samples_R.data_ptr(), self.positions_R.data_ptr(),
            self.token_ids_R.data_ptr(),
            self.logprobs_R.data_ptr(), self.raw_logprobs_R.data_ptr(), self.log_support_mass_R.data_ptr(),
            self.status_R.data_ptr(),
        )  # fmt: skip


_BUFFERS = [
    (name, _POINTER)
    for name in ("seeds", "samples", "positions", "tokens", "logprobs", "raw_logprobs", "log_support_mass", "status")
]


class _PlainCall(ctypes.Structure):
    """`unison_sample_call` of native/sample.cpp."""

    _fields_ = [
        ("logits", _POINTER), ("stride", _COUNT), ("rows", _COUNT), ("vocab_size", _COUNT), ("temperatures", _POINTER),
        *_BUFFERS,
    ]  # fmt: skip


class _Filter(ctypes.Structure):
    """`unison_filtered_row` of native/sample_filtered.cpp."""

    _fields_ = [
        ("top_p", _DOUBLE), ("min_p", _DOUBLE), ("presence", _DOUBLE), ("frequency", _DOUBLE),
        ("temperature", _FLOAT), ("repetition", _FLOAT), ("top_k", _COUNT), ("has_allowed", _COUNT),
        ("allowed", _POINTER), ("bad", _POINTER), ("early", _POINTER), ("bias_ids", _POINTER), ("history", _POINTER),
        ("num_allowed", _COUNT), ("num_bad", _COUNT), ("num_early", _COUNT), ("num_bias", _COUNT),
        ("num_history", _COUNT), ("num_prompt", _COUNT), ("bias", _POINTER),
    ]  # fmt: skip


class _FilteredCall(ctypes.Structure):
    """`unison_filtered_call` of native/sample_filtered.cpp."""

    _fields_ = [
        ("logits", _POINTER), ("stride", _COUNT), ("count", _COUNT), ("vocab_size", _COUNT), ("rows", _POINTER),
        ("filters", ctypes.POINTER(_Filter)), *_BUFFERS,
    ]  # fmt: skip


class NativeDraws:
    """The native sampler's three functions."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._plain, self._filtered, self._top = (
            lib.unison_sample_plain, lib.unison_sample_filtered, lib.unison_top_logprobs,
        )  # fmt: skip
        self._plain.argtypes = (ctypes.POINTER(_PlainCall),)
        self._filtered.argtypes = (ctypes.POINTER(_FilteredCall),)
        self._top.argtypes = _TOP
        self._plain.restype = self._filtered.restype = self._top.restype = None

    def draw_plain(self, logits_RV: Tensor, temperature_R: Tensor, buffers: DrawBuffers) -> None:
        """Draws the rows that have a temperature alone; a row whose temperature is negative is left as it is."""
        rows, vocab_size = logits_RV.shape
        call = _PlainCall(
            logits_RV.data_ptr(), logits_RV.stride(0), rows, vocab_size, temperature_R.data_ptr(), *buffers.pointers()
        )
        self._plain(ctypes.byref(call))

    def draw_filtered(
        self, logits_RV: Tensor, rows_F: Tensor, filtered: Sequence[FilteredRow], buffers: DrawBuffers
    ) -> None:
        """Draws the rows `rows_F` (int64), each by its own entry of `filtered`."""
        filters = (_Filter * len(filtered))(*(_filter(row) for row in filtered))
        call = _FilteredCall(
            logits_RV.data_ptr(), logits_RV.stride(0), len(filtered), logits_RV.shape[1], rows_F.data_ptr(), filters,
            *buffers.pointers(),
        )  # fmt: skip
        self._filtered(ctypes.byref(call))

    def top_logprobs(self, logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Ids int64 and raw log-probs float32 [R, k] of the most probable tokens, 1 <= k <= V."""
        rows, vocab_size = logits_RV.shape
        ids = torch.empty((rows, k), dtype=torch.int64)
        logprobs = torch.empty((rows, k), dtype=torch.float32)
        self._top(logits_RV.data_ptr(), logits_RV.stride(0), rows, vocab_size, k, ids.data_ptr(), logprobs.data_ptr())
        return ids, logprobs


def _filter(row: FilteredRow) -> _Filter:
    params = row.params
    history, num_prompt = row.seen()
    early = row.early()
    return _Filter(
        params.top_p, params.min_p, params.presence_penalty, params.frequency_penalty,
        params.temperature, params.repetition_penalty, params.top_k or row.vocab_size, row.allowed is not None,
        None if row.allowed is None else row.allowed.data_ptr(), row.bad.data_ptr(), early.data_ptr(),
        row.bias_ids.data_ptr(), history.ctypes.data, 0 if row.allowed is None else len(row.allowed), len(row.bad),
        len(early), len(row.bias_ids), len(history), num_prompt, row.bias.data_ptr(),
    )  # fmt: skip
