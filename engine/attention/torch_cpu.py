"""TorchAttention: the best that torch alone gives on the CPU.

Owns: how scaled_dot_product_attention must be called for a query's bits not to depend on phase, batch or chunk
(exact=True), and the fastest way to call it (exact=False). Differentiable over packed sequences.

Exact calls go through the flash kernel with an explicit additive mask (its causal shortcut cuts keys at a place that
depends on the chunk), one sequence at a time except in decode, with keys and values zero-padded to a fixed multiple and
query rows to a multiple of four, so that the kernel's inner matrix products are of the same kind whatever the lengths.
In float32 MKL must also have been told to be reproducible before its first product (environment
MKL_CBWR=AVX2,STRICT or AVX512,STRICT). Positions that no query may see are zero in the padded copies, so unwritten
slots never enter a product.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attention import AttentionBackend
from .descriptors import DecodeDescriptor, Descriptor, LayerAttention, LayerKV, PackedDescriptor, PrefillDescriptor

PAD_TOKENS = {torch.bfloat16: 32, torch.float32: 512}
"""Multiple that the keys' length is padded to: the flash kernel's blocking of the key dimension, per dtype."""
PAD_ROWS = 4
"""Multiple that the query rows of an exact call are padded to: the kernel takes them in tiles of a multiple of 4, and
matrix products of fewer than 4 rows follow another path, with other bits."""


class TorchAttention(AttentionBackend):
    """torch's CPU kernels, called in a fixed way (exact) or the fastest one."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self.name = "torch-exact" if exact else "torch"

    def _attend(
        self,
        q_THD: Tensor,
        k_THkD: Tensor,
        v_THkD: Tensor,
        descriptor: Descriptor,
        layer: LayerAttention,
        kv: LayerKV | None,
    ) -> Tensor:
        if isinstance(descriptor, PackedDescriptor):
            return self._packed(q_THD, k_THkD, v_THkD, descriptor, layer)
        assert kv is not None
        if isinstance(descriptor, DecodeDescriptor):
            return self._decode(q_THD, descriptor, layer, kv)
        return self._prefill(q_THD, descriptor, layer, kv)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, descriptor: PackedDescriptor, layer: LayerAttention) -> Tensor:
        outputs = []
        for start, end in itertools.pairwise(descriptor.seq_starts.tolist()):
            if end > start:
                outputs.append(self._sequence(q[start:end], k[start:end], v[start:end], 0, layer))
        return torch.cat(outputs) if outputs else torch.empty_like(q)

    def _prefill(self, q: Tensor, descriptor: PrefillDescriptor, layer: LayerAttention, kv: LayerKV) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        bounds = itertools.pairwise(descriptor.query_starts.tolist())
        for row, ((start, end), position) in enumerate(zip(bounds, descriptor.start_positions.tolist(), strict=True)):
            if end > start:
                slots = _slots(descriptor.block_tables[row], descriptor.block_size, position + end - start)
                out[start:end] = self._sequence(q[start:end], kv.k_SHD[slots], kv.v_SHD[slots], position, layer)
        return out

    def _sequence(self, q_QHD: Tensor, k_PHkD: Tensor, v_PHkD: Tensor, start: int, layer: LayerAttention) -> Tensor:
        """Queries from position `start` on over the sequence's positions 0, 1, …"""
        queries, keys = q_QHD.shape[0], k_PHkD.shape[0]
        if not self.exact and start == 0 and not layer.window:
            return _sdpa(q_QHD[None], k_PHkD[None], v_PHkD[None], None, layer.scale, is_causal=True)[0]
        if not self.exact:
            return _sdpa(q_QHD[None], k_PHkD[None], v_PHkD[None], _mask(q_QHD, start, keys, layer), layer.scale)[0]
        padding = -keys % PAD_TOKENS.get(q_QHD.dtype, 512)
        k, v = (F.pad(tensor, (0, 0, 0, 0, 0, padding)) for tensor in (k_PHkD, v_PHkD))
        q = torch.cat((q_QHD, q_QHD[-1:].expand(-queries % PAD_ROWS, -1, -1)))
        out = _sdpa(q[None], k[None], v[None], _mask(q, start, keys + padding, layer, queries), layer.scale)[0]
        return out[:queries]

    def _decode(self, q_RHD: Tensor, descriptor: DecodeDescriptor, layer: LayerAttention, kv: LayerKV) -> Tensor:
        rows, heads, dim = q_RHD.shape
        kv_heads = kv.k_SHD.shape[1]
        multiple = PAD_TOKENS.get(q_RHD.dtype, 512) if self.exact else 1
        longest = int(descriptor.seq_lens.max()) if rows else 0
        length = longest + -longest % multiple
        if not length:
            return torch.empty_like(q_RHD)
        positions = torch.arange(length)
        last = descriptor.seq_lens[:, None] - 1
        is_hidden = positions > last
        if layer.window:
            is_hidden |= positions <= last - layer.window
        column = (positions // descriptor.block_size).clamp_(max=descriptor.block_tables.shape[1] - 1)
        slots = descriptor.block_tables[:, column].long() * descriptor.block_size + positions % descriptor.block_size
        slots.masked_fill_(is_hidden, 0)
        hole = is_hidden[:, :, None, None]
        k, v = (tensor[slots].masked_fill_(hole, 0) for tensor in (kv.k_SHD, kv.v_SHD))
        mask = torch.zeros(is_hidden.shape, dtype=q_RHD.dtype).masked_fill_(is_hidden, float("-inf"))[:, None, None]
        group = heads // kv_heads
        q = q_RHD.view(rows, kv_heads, group, dim).transpose(1, 2)  # the heads of a KV head become its query rows
        if self.exact:
            q = torch.cat((q, q[:, -1:].expand(-1, -group % PAD_ROWS, -1, -1)), dim=1)
        out = _sdpa(q, k, v, mask.expand(-1, -1, q.shape[1], -1), layer.scale)
        return out[:, :group].transpose(1, 2).reshape(rows, heads, dim)


def _sdpa(q_BQHD: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool = False) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BQHD, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def _mask(q: Tensor, start: int, keys: int, layer: LayerAttention, queries: int | None = None) -> Tensor:
    """Additive [Q, P]; rows after `queries` repeat the last one's."""
    last = start + (q.shape[0] if queries is None else queries) - 1
    q_position = torch.arange(start, start + q.shape[0]).clamp_(max=last)[:, None]
    k_position = torch.arange(keys)[None, :]
    is_hidden = k_position > q_position
    if layer.window:
        is_hidden |= k_position <= q_position - layer.window
    return torch.zeros(is_hidden.shape, dtype=q.dtype).masked_fill_(is_hidden, float("-inf"))


def _slots(table: Tensor, block_size: int, num_positions: int) -> Tensor:
    positions = torch.arange(num_positions)
    return table[positions // block_size].long() * block_size + positions % block_size
