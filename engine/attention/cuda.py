"""CudaAttention: attention in torch operations that a CUDA graph can capture.

Owns: the gather through block tables, the padding of ragged queries and the masks. Every shape follows from the
descriptor's Python integers and the tables' shape, never from tensor contents: no host synchronisation, no
data-dependent shape. The same code runs on any torch device.

Slots that no query sees are replaced by zeros after the gather, so unwritten ones never enter a product. A decode row
whose length is 0 (padding of a captured batch) is meaningless in its own output only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import AttentionBackend
from .descriptors import DecodeDescriptor, Descriptor, LayerAttention, LayerKV, PackedDescriptor, PrefillDescriptor


class CudaAttention(AttentionBackend):
    """Gather, mask, scaled_dot_product_attention."""

    name = "cuda"
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
        if not q_THD.shape[0]:
            return torch.empty_like(q_THD)
        if isinstance(descriptor, PackedDescriptor):
            return _packed(q_THD, k_THkD, v_THkD, descriptor, layer)
        assert kv is not None
        if isinstance(descriptor, DecodeDescriptor):
            return _cached(q_THD[:, None], descriptor.seq_lens[:, None] - 1, descriptor, layer, kv)[:, 0]
        return _prefill(q_THD, descriptor, layer, kv)

    def _store(self, k_THkD: Tensor, v_THkD: Tensor, slots_T: Tensor, kv: LayerKV) -> None:
        """Skipped tokens write what the slot of another token of the call, or slot 0, holds anyway."""
        if not slots_T.shape[0]:
            return
        is_kept = slots_T >= 0
        # All skipped tokens are sent to one kept token's slot with that token's own values, so that duplicate writes
        # agree; where none is kept, to slot 0 with the values already there.
        stand_in = torch.argmax(is_kept.to(torch.int32))
        source = torch.where(is_kept, torch.arange(slots_T.shape[0], device=slots_T.device), stand_in)
        slots = slots_T.long()[source].clamp_(min=0)
        is_any = is_kept.any()
        for new, old in ((k_THkD, kv.k_SHD), (v_THkD, kv.v_SHD)):
            old.index_copy_(0, slots, torch.where(is_any, new[source], old[:1]))


def _packed(q_THD: Tensor, k: Tensor, v: Tensor, descriptor: PackedDescriptor, layer: LayerAttention) -> Tensor:
    index, row, offset = _ragged(descriptor.seq_starts, descriptor.max_len, q_THD.shape[0])
    q_BQHD, k, v = (tensor[index] for tensor in (q_THD, k, v))
    if not layer.window:
        return _sdpa(q_BQHD, k, v, None, layer.scale)[row, offset]
    positions = torch.arange(descriptor.max_len, device=q_THD.device)
    is_visible = _is_visible(positions[None], positions, layer.window)
    return _sdpa(q_BQHD, k, v, is_visible, layer.scale)[row, offset]


def _prefill(q_THD: Tensor, descriptor: PrefillDescriptor, layer: LayerAttention, kv: LayerKV) -> Tensor:
    index, row, offset = _ragged(descriptor.query_starts, descriptor.max_query_len, q_THD.shape[0])
    # Queries beyond a row's own repeat its last position, so that they see nothing that was never written.
    lengths = (descriptor.query_starts[1:] - descriptor.query_starts[:-1]).long()
    steps = torch.arange(descriptor.max_query_len, device=q_THD.device)
    positions = descriptor.start_positions[:, None] + torch.minimum(steps, (lengths - 1).clamp(min=0)[:, None])
    return _cached(q_THD[index], positions, descriptor, layer, kv)[row, offset]


def _cached(
    q_RQHD: Tensor,
    positions_RQ: Tensor,
    descriptor: DecodeDescriptor | PrefillDescriptor,
    layer: LayerAttention,
    kv: LayerKV,
) -> Tensor:
    tables, block_size = descriptor.block_tables, descriptor.block_size
    blocks = min(tables.shape[1], -(-descriptor.max_kv_len // block_size))
    in_block = torch.arange(block_size, device=tables.device)
    slots_RP = (tables[:, :blocks].long().clamp(min=0)[:, :, None] * block_size + in_block).flatten(1)
    k_positions = torch.arange(blocks * block_size, device=tables.device)
    is_visible_RQP = _is_visible(positions_RQ, k_positions, layer.window)
    is_hole = ~is_visible_RQP.any(dim=1)[:, :, None, None]
    k, v = (tensor[slots_RP].masked_fill(is_hole, 0) for tensor in (kv.k_SHD, kv.v_SHD))
    return _sdpa(q_RQHD, k, v, is_visible_RQP, layer.scale)


def _is_visible(positions_RQ: Tensor, k_positions_P: Tensor, window: int) -> Tensor:
    """Bool [R, Q, P]."""
    is_visible = k_positions_P <= positions_RQ[:, :, None]
    return is_visible & (k_positions_P > positions_RQ[:, :, None] - window) if window else is_visible


def _ragged(starts: Tensor, max_len: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token of each (row, offset), cut off at the last token; row and offset of each token."""
    tokens = torch.arange(num_tokens, device=starts.device)
    row = torch.searchsorted(starts[1:].contiguous(), tokens.to(starts.dtype), right=True)
    offset = tokens - starts[row]
    index = starts[:-1, None].long() + torch.arange(max_len, device=starts.device)
    return index.clamp(max=num_tokens - 1), row, offset


def _sdpa(q_RQHD: Tensor, k: Tensor, v: Tensor, is_visible_RQP: Tensor | None, scale: float) -> Tensor:
    """[R, Q, H, D]; causal where there is no mask."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_RQHD, k, v))
    mask = None if is_visible_RQP is None else is_visible_RQP[:, None]
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)
