"""Gradient of causal attention over packed sequences, in torch.

Owns: the formula. Called by backends whose forward torch can't differentiate. Softmax weights are recomputed in float32
from q and k; all work is in matrix products. Short sequences are padded to the longest of a batch and computed
together; long ones go one by one, a strip of query rows at a time, so memory stays at strip × sequence length × heads.

Source: Dao et al., FlashAttention (2022), appendix B.2: dS = P ∘ (dO·Vᵀ − rowsum(dO ∘ O)).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from .descriptors import LayerAttention, PackedDescriptor

STRIP_ROWS = 256
SHORT_ROWS = 256
"""Sequences up to this length are computed together."""
BATCH_SCORES = 1 << 23
"""Most scores per head that are held at once for a batch of short sequences."""

Gradients = tuple[Tensor, Tensor, Tensor]


def packed_backward(
    grad_THD: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor], descriptor: PackedDescriptor, layer: LayerAttention
) -> Gradients:
    """Gradients of q, k and v, each in its own dtype.

    Shapes: grad [T, H, D]; saved = q [T, H, D], k and v [T, Hk, D], out [T, H, D].
    """
    q, k, v, out = saved
    grads = tuple(tensor.new_zeros(tensor.shape) for tensor in (q, k, v))
    everything = (grad_THD, q, k, v, out)
    bounds = [(start, end) for start, end in itertools.pairwise(descriptor.seq_starts.tolist()) if end > start]
    for rows in _batches([(start, end) for start, end in bounds if end - start <= SHORT_ROWS]):
        is_real = rows >= 0
        pieces = tuple(_padded(tensor, rows) for tensor in everything)
        for total, part in zip(grads, _batch_backward(pieces, layer), strict=True):
            total[rows[is_real]] = part[is_real].to(total.dtype)
    for start, end in bounds:
        if end - start > SHORT_ROWS:
            for total, part in zip(grads, _sequence_backward([x[start:end] for x in everything], layer), strict=True):
                total[start:end] = part
    return grads[0], grads[1], grads[2]


def _batches(bounds: list[tuple[int, int]]) -> Iterator[Tensor]:
    """Row numbers [B, L] of sequences of about the same length, -1 where a sequence has ended."""
    ordered = sorted(bounds, key=lambda bound: bound[1] - bound[0])
    while ordered:
        longest = ordered[-1][1] - ordered[-1][0]
        count = max(1, BATCH_SCORES // (longest * longest))
        taken, ordered = ordered[-count:], ordered[:-count]
        starts, ends = torch.tensor(taken, dtype=torch.int64).T
        rows = starts[:, None] + torch.arange(longest)
        yield torch.where(rows < ends[:, None], rows, -1)


def _padded(tensor_THD: Tensor, rows_BL: Tensor) -> Tensor:
    """[B, L, H, D] in float32, 0 where a sequence has ended."""
    picked = tensor_THD[rows_BL.clamp(min=0)].float()
    return picked.masked_fill_((rows_BL < 0)[:, :, None, None], 0.0)


def _batch_backward(pieces: tuple[Tensor, ...], layer: LayerAttention) -> Gradients:
    """Float32 gradients of padded sequences. A row beyond a sequence's end has no upstream gradient and is seen by none
    before it, so it adds nothing.

    Shapes: grad, q, out [B, L, H, D], k and v [B, L, Hk, D].
    """
    batch, length, num_heads, dim = pieces[0].shape
    kv_heads = pieces[2].shape[2]

    def by_kv_head(tensor: Tensor) -> Tensor:
        return tensor.permute(0, 2, 1, 3).reshape(batch * kv_heads, -1, dim)  # query heads of a KV head, row below row

    grad, q, k, v, out = map(by_kv_head, pieces)
    position = torch.arange(length)
    is_hidden = position[None, :] > position[:, None]
    if layer.window:
        is_hidden |= position[None, :] <= position[:, None] - layer.window
    scores = (q @ k.mT).mul_(layer.scale).view(batch * kv_heads, -1, length, length)
    weights = torch.softmax(scores.masked_fill_(is_hidden, float("-inf")), dim=-1).flatten(1, 2)
    grad_v = weights.mT @ grad
    correction = (grad * out).sum(-1, keepdim=True)
    grad_scores = (grad @ v.mT).sub_(correction).mul_(weights).mul_(layer.scale)
    parts = ((grad_scores @ k, num_heads), (grad_scores.mT @ q, kv_heads), (grad_v, kv_heads))
    found = [part.view(batch, heads, length, dim).transpose(1, 2) for part, heads in parts]
    return found[0], found[1], found[2]


def _sequence_backward(pieces: list[Tensor], layer: LayerAttention) -> Gradients:
    length, num_heads, dim = pieces[0].shape
    kv_heads = pieces[2].shape[1]
    # [Hk, G, L, D] and [Hk, L, D]: the query heads of a KV head are folded into the rows of one product.
    grad, q, out = (_by_kv_head(pieces[i], kv_heads) for i in (0, 1, 4))
    k, v = (pieces[i].float().transpose(0, 1).contiguous() for i in (2, 3))
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, length, STRIP_ROWS):
        last = min(first + STRIP_ROWS, length)
        oldest = max(0, first - layer.window + 1) if layer.window else 0
        keys, values = k[:, oldest:last], v[:, oldest:last]
        rows = kv_heads, -1, dim
        q_strip, grad_strip = q[:, :, first:last].reshape(rows), grad[:, :, first:last].reshape(rows)
        weights = _weights(q_strip, keys, (first, last, oldest), layer)
        grad_v[:, oldest:last] += weights.mT @ grad_strip
        correction = (grad[:, :, first:last] * out[:, :, first:last]).sum(-1).reshape(kv_heads, -1, 1)
        grad_scores = (grad_strip @ values.mT).sub_(correction).mul_(weights).mul_(layer.scale)
        grad_q[:, :, first:last] = (grad_scores @ keys).view(kv_heads, num_heads // kv_heads, last - first, dim)
        grad_k[:, oldest:last] += grad_scores.mT @ q_strip
    return grad_q.flatten(0, 1).transpose(0, 1), grad_k.transpose(0, 1), grad_v.transpose(0, 1)


def _by_kv_head(tensor_LHD: Tensor, kv_heads: int) -> Tensor:
    length, heads, dim = tensor_LHD.shape
    return tensor_LHD.float().transpose(0, 1).contiguous().view(kv_heads, heads // kv_heads, length, dim)


def _weights(q_strip: Tensor, keys: Tensor, bounds: tuple[int, int, int], layer: LayerAttention) -> Tensor:
    first, last, oldest = bounds
    q_position = torch.arange(first, last)[:, None]
    k_position = torch.arange(oldest, last)[None, :]
    is_hidden = k_position > q_position
    if layer.window:
        is_hidden |= k_position <= q_position - layer.window
    scores = (q_strip @ keys.mT).mul_(layer.scale).view(keys.shape[0], -1, last - first, last - oldest)
    return torch.softmax(scores.masked_fill_(is_hidden, float("-inf")), dim=-1).flatten(1, 2)
