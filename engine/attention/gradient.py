"""Gradient of causal attention over packed sequences, in torch.

Owns: the formula. Called by backends whose forward torch can't differentiate. Softmax weights are recomputed in float32
from q and k, a strip of query rows at a time, so memory stays at strip × sequence length × heads; all work is in matrix
products.

Source: Dao et al., FlashAttention (2022), appendix B.2: dS = P ∘ (dO·Vᵀ − rowsum(dO ∘ O)).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .descriptors import LayerAttention, PackedDescriptor

STRIP_ROWS = 256


def packed_backward(
    grad_THD: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor], descriptor: PackedDescriptor, layer: LayerAttention
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each in its own dtype.

    Shapes: grad [T, H, D]; saved = q [T, H, D], k and v [T, Hk, D], out [T, H, D].
    """
    q, k, v, out = saved
    grads = tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in (q, k, v))
    for start, end in itertools.pairwise(descriptor.seq_starts.tolist()):
        if end > start:
            pieces = tuple(tensor[start:end] for tensor in (grad_THD, q, k, v, out))
            for grad, piece in zip(grads, _sequence_backward(pieces, layer), strict=True):
                grad[start:end] = piece
    return grads[0], grads[1], grads[2]


def _sequence_backward(pieces: tuple[Tensor, ...], layer: LayerAttention) -> tuple[Tensor, Tensor, Tensor]:
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
