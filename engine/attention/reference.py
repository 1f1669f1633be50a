"""ReferenceAttention: attention written down as plainly as it can be, the oracle of the other backends.

Owns: nothing. Reads one sequence, one query head at a time, in float64 whatever the dtype of its inputs.
Differentiable (packed sequences), so that gradients can be compared as well.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .attention import AttentionBackend
from .descriptors import DecodeDescriptor, Descriptor, LayerAttention, LayerKV, PackedDescriptor


class ReferenceAttention(AttentionBackend):
    """softmax(q·k · scale) · v over the visible positions. Slow; any device."""

    name = "reference"
    exact = False

    def _attend(
        self,
        q_THD: Tensor,
        k_THkD: Tensor,
        v_THkD: Tensor,
        descriptor: Descriptor,
        layer: LayerAttention,
        kv: LayerKV | None,
    ) -> Tensor:
        outputs = []
        if isinstance(descriptor, PackedDescriptor):
            starts = descriptor.seq_starts.tolist()
            for start, end in itertools.pairwise(starts):
                outputs.append(_attend_one(q_THD[start:end], k_THkD[start:end], v_THkD[start:end], 0, layer))
        else:
            assert kv is not None
            for row, (start, end, position) in enumerate(_query_runs(descriptor)):
                slots = _slots_of(descriptor.block_tables[row], descriptor.block_size, position + end - start)
                outputs.append(_attend_one(q_THD[start:end], kv.k_SHD[slots], kv.v_SHD[slots], position, layer))
        return torch.cat(outputs) if outputs else torch.empty_like(q_THD)


def _query_runs(descriptor: Descriptor) -> list[tuple[int, int, int]]:
    """(first query, end, position of the first query) of each row of a cached call."""
    if isinstance(descriptor, DecodeDescriptor):
        return [(row, row + 1, length - 1) for row, length in enumerate(descriptor.seq_lens.tolist())]
    assert not isinstance(descriptor, PackedDescriptor)
    starts = descriptor.query_starts.tolist()
    return list(zip(starts, starts[1:], descriptor.start_positions.tolist(), strict=False))


def _slots_of(table: Tensor, block_size: int, num_positions: int) -> Tensor:
    positions = torch.arange(num_positions, device=table.device)
    return table[positions // block_size].long() * block_size + positions % block_size


def _attend_one(q_QHD: Tensor, k_PHkD: Tensor, v_PHkD: Tensor, start: int, layer: LayerAttention) -> Tensor:
    """Queries at positions start, start+1, … over keys at positions 0, 1, …"""
    heads_per_kv = q_QHD.shape[1] // k_PHkD.shape[1]
    q_position = torch.arange(start, start + q_QHD.shape[0], device=q_QHD.device)[:, None]
    k_position = torch.arange(k_PHkD.shape[0], device=q_QHD.device)[None, :]
    is_visible = k_position <= q_position
    if layer.window:
        is_visible &= k_position > q_position - layer.window
    heads = []
    for head in range(q_QHD.shape[1]):
        kv_head = head // heads_per_kv
        q, k, v = (x.double() for x in (q_QHD[:, head], k_PHkD[:, kv_head], v_PHkD[:, kv_head]))
        scores = (q @ k.T * layer.scale).masked_fill(~is_visible, float("-inf"))
        heads.append(torch.softmax(scores, dim=-1) @ v)
    return torch.stack(heads, dim=1).to(q_QHD.dtype) if heads else torch.empty_like(q_QHD)
