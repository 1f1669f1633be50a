"""What one attention call covers: three descriptors, and the per-layer pair that goes with them.

Owns: the shapes and dtypes of that data. Knows nothing of how attention is computed or of who owns the KV slots.
Called by the executor (cached steps), the trainer and `score` (packed sequences) and every attention backend.

Shapes (legend of the package): T tokens of the call · H query heads · Hk KV heads · D head dim · S slots of the pool ·
R rows (sequences of a cached call) · B sequences of a packed call · NB blocks per table row.

The slot of position p of row r is `block_tables[r, p // block_size] * block_size + p % block_size`. A table entry is -1
where no block is mapped; such entries, and slots after a row's last position, are never read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedDescriptor:
    """Whole sequences, one after the other, without a cache: the call's own K and V are all there is."""

    seq_starts: Tensor
    """int32 [B+1]: sequence b is the tokens seq_starts[b] … seq_starts[b+1]-1; the last entry is T."""
    max_len: int
    """Tokens of the longest sequence."""
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What a backend derived from the fields, by backend; dies with this object."""

    def __post_init__(self) -> None:
        _check("PackedDescriptor.seq_starts", self.seq_starts, torch.int32, 1)


@dataclass(frozen=True, eq=False)
class PrefillDescriptor:
    """Rows that bring any number of queries, each attending to its row's cached positions up to its own.

    The K and V of the queries themselves have been stored before the call. Start positions make a prefill.
    """

    block_tables: Tensor
    """int32 [R, NB]: block of each run of `block_size` positions, -1 where unmapped."""
    block_size: int
    """Slots per block."""
    query_starts: Tensor
    """int32 [R+1]: row r's queries are the tokens query_starts[r] … query_starts[r+1]-1; the last entry is T."""
    start_positions: Tensor
    """int64 [R]: position of each row's first query."""
    max_query_len: int
    """Most queries of one row."""
    max_kv_len: int
    """Most positions that a row attends to: the largest start position plus queries, or more."""
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What a backend derived from the fields, by backend; dies with this object."""

    def __post_init__(self) -> None:
        _check("PrefillDescriptor.block_tables", self.block_tables, torch.int32, 2)
        _check("PrefillDescriptor.query_starts", self.query_starts, torch.int32, 1)
        _check("PrefillDescriptor.start_positions", self.start_positions, torch.int64, 1)
        _check_block_size("PrefillDescriptor", self.block_size)
        rows = self.block_tables.shape[0]
        if self.query_starts.shape[0] != rows + 1 or self.start_positions.shape[0] != rows:
            raise ValueError(
                f"PrefillDescriptor: block_tables has {rows} rows, so query_starts needs {rows + 1} entries and "
                f"start_positions {rows}; they have {self.query_starts.shape[0]} and {self.start_positions.shape[0]}"
            )


@dataclass(frozen=True, eq=False)
class DecodeDescriptor:
    """Rows that bring one query each, at position `seq_lens - 1`, whose K and V have been stored before the call."""

    block_tables: Tensor
    """int32 [R, NB]: block of each run of `block_size` positions, -1 where unmapped."""
    block_size: int
    """Slots per block."""
    seq_lens: Tensor
    """int64 [R]: positions that each row attends to, its own included; at least 1."""
    max_kv_len: int
    """The largest of `seq_lens`, or more. Under CUDA graphs: the bound that the captured graph was made for."""
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What a backend derived from the fields, by backend; dies with this object."""

    def __post_init__(self) -> None:
        _check("DecodeDescriptor.block_tables", self.block_tables, torch.int32, 2)
        _check("DecodeDescriptor.seq_lens", self.seq_lens, torch.int64, 1)
        _check_block_size("DecodeDescriptor", self.block_size)
        if self.seq_lens.shape[0] != self.block_tables.shape[0]:
            raise ValueError(
                f"DecodeDescriptor: block_tables has {self.block_tables.shape[0]} rows, "
                f"seq_lens {self.seq_lens.shape[0]}"
            )


Descriptor = PackedDescriptor | PrefillDescriptor | DecodeDescriptor


@dataclass(frozen=True, eq=False)
class LayerKV:
    """One layer's slots of the KV pool; the tensors belong to the pool."""

    k_SHD: Tensor
    """[S, Hk, D]: keys, after rotary embedding."""
    v_SHD: Tensor
    """[S, Hk, D]: values."""
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What a backend derived from the fields, by backend; dies with this object."""

    def __post_init__(self) -> None:
        k, v = self.k_SHD, self.v_SHD
        if k.ndim != 3 or k.shape != v.shape or k.dtype is not v.dtype:
            raise ValueError(
                f"KV slots are {tuple(k.shape)} {k.dtype} and {tuple(v.shape)} {v.dtype}; "
                "must be equal, [slots, KV heads, head dim]"
            )


@dataclass(frozen=True)
class LayerAttention:
    """How one layer attends."""

    scale: float
    """Factor on query·key before the softmax."""
    window: int = 0
    """Positions that a query sees, its own included: keys at positions > p - window. 0 means all."""


def _check(name: str, tensor: Tensor, dtype: torch.dtype, ndim: int) -> None:
    """Index dtypes are fixed so that no kernel ever guesses (S13)."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} is {tensor.dtype}; must be {dtype}")
    if tensor.ndim != ndim:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; must have {ndim} dimension(s)")


def _check_block_size(name: str, block_size: int) -> None:
    if block_size < 1:
        raise ValueError(f"{name}.block_size is {block_size}; must be at least 1")
