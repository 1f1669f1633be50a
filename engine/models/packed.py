"""The packed forward: whole sequences end to end, without a cache, with autograd where it is asked for.

Owns: nothing but the calls. It is the trainer's forward, and the oracle that the engine's incremental forward is
compared with bit for bit.

Shapes: B sequences · T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import AttentionBackend, LayerAttention, PackedDescriptor
from ..kernels import differentiable
from .decoder import Decoder
from .layout import DecoderWeights

_LOGIT_ROWS = 64
"""Positions whose logits are held at once when no gradient is needed."""


def packed_forward(
    decoder: Decoder, weights: DecoderWeights, attention: AttentionBackend, sequences: Sequence[Sequence[int]]
) -> Tensor:
    """Hidden states [T, hidden] of all sequences, one after the other."""
    lengths = [len(sequence) for sequence in sequences]
    device = weights.norm.device
    token_ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    descriptor = PackedDescriptor(starts, max(lengths))
    layers = [LayerAttention(decoder.spec.attention_scale, window) for window in decoder.spec.windows]

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.forward(q, k, v, descriptor, layers[index], None)

    return decoder.forward(weights, token_ids, positions, attend)


def packed_logprobs(
    decoder: Decoder, weights: DecoderWeights, attention: AttentionBackend, sequences: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Raw log-prob of the tokens 1 … of each sequence given those before: float32 [len - 1] per sequence."""
    hidden = packed_forward(decoder, weights, attention, sequences)
    out, first = [], 0
    for sequence in sequences:
        rows = hidden[first : first + len(sequence) - 1]
        targets = torch.tensor(list(sequence[1:]), dtype=torch.int64, device=hidden.device)
        pieces = [
            differentiable.row_logprobs(decoder.kernels, decoder.logits(weights, part), wanted)
            for part, wanted in zip(rows.split(_LOGIT_ROWS), targets.split(_LOGIT_ROWS), strict=True)
        ]
        out.append(torch.cat(pieces) if pieces else hidden.new_zeros(0, dtype=torch.float32))
        first += len(sequence)
    return out
