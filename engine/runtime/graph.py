"""CUDA graphs of steady decode: one captured forward pass per weight set, batch bucket and KV bound.

Owns: the captured graphs and their static outputs. A graph reads the workspace's device buffers and one version's
weights at fixed addresses; it is dropped together with that version, so it never outlives the tensors it points to
(P14). Used by the executor on CUDA alone. Source: torch.cuda.CUDAGraph ("CUDA semantics", section on graphs).

Shapes: B rows of a bucket (a power of two, or the most rows) · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import DecodeDescriptor
from .workspace import StepInputs

Forward = Callable[[int, Tensor, Tensor, Tensor, DecodeDescriptor], Tensor]
"""(version ordinal, token ids [B], positions [B], slots [B], descriptor) → logits [B, V]."""

_MIN_KV_BOUND = 256
_WARMUP_RUNS = 2
"""Runs before a capture, so that libraries allocate their workspaces outside it."""


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits_BV: Tensor


class DecodeGraphs:
    """Replays decode for any number of rows by padding it to a bucket.

    Invariant: padding rows read position 0 of block 0 at most, write nothing (slot -1), and their logits are dropped.
    """

    def __init__(self, inputs: StepInputs, block_size: int, forward: Forward) -> None:
        self._inputs = inputs
        self._block_size = block_size
        self._forward = forward
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def logits(self, ordinal: int, num_rows: int, max_kv_len: int) -> Tensor:
        """Logits [num_rows, V] of the rows staged in the workspace; valid until the next call."""
        bucket = min(_power_of_two(num_rows), self._inputs.seq_lens_R.shape[0])
        bound = _power_of_two(max(max_kv_len, _MIN_KV_BOUND))
        self._pad(num_rows, bucket)
        key = (ordinal, bucket, bound)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(*key)
        captured.graph.replay()
        return captured.logits_BV[:num_rows]

    def forget(self, ordinal: int) -> None:
        """Drop every graph over a version's weights; call before they may be freed or written."""
        for key in [key for key in self._captured if key[0] == ordinal]:
            del self._captured[key]

    def _pad(self, num_rows: int, bucket: int) -> None:
        inputs = self._inputs
        inputs.token_ids_T[num_rows:bucket].zero_()
        inputs.positions_T[num_rows:bucket].zero_()
        inputs.slots_T[num_rows:bucket].fill_(-1)
        inputs.seq_lens_R[num_rows:bucket].fill_(1)
        inputs.block_tables_RB[num_rows:bucket].zero_()

    def _capture(self, ordinal: int, bucket: int, bound: int) -> _Captured:
        inputs = self._inputs
        descriptor = DecodeDescriptor(
            inputs.block_tables_RB[:bucket], self._block_size, inputs.seq_lens_R[:bucket], bound
        )
        arguments = (inputs.token_ids_T[:bucket], inputs.positions_T[:bucket], inputs.slots_T[:bucket], descriptor)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_RUNS):
                self._forward(ordinal, *arguments)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(ordinal, *arguments)
        return _Captured(graph, logits)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
