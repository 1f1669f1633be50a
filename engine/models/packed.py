"""The packed forward: whole sequences end to end, without a cache, with autograd where it is asked for.

A prompt that several completions share is computed once: its tokens stand once in the packed run, and only attention
sees it again in front of each completion. Since no row's result depends on its company (R3), every token gets the bits
that it would get alone.

Owns: which token stands where. It is the trainer's forward, and the oracle that the engine's incremental forward is
compared with bit for bit.

Shapes: B sequences · T tokens that are computed · E tokens as attention sees them (shared prompts repeated).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..attention import AttentionBackend, LayerAttention, PackedDescriptor
from ..kernels import differentiable
from .decoder import Decoder
from .layout import DecoderWeights

LOGIT_ROWS = 64
"""Positions whose logits are held at once when no gradient is needed."""


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """Tokens to compute, and how attention sees them."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: position in its own sequence."""
    descriptor: PackedDescriptor
    """Sequences as attention sees them, over E tokens."""
    spread: Tensor | None
    """int64 [E]: which of the T tokens stands there; None where nothing is shared."""
    gather: Tensor | None
    """int64 [T]: where among the E tokens each token's own output is; None where nothing is shared."""
    predicts: Tensor
    """int64 [N]: for each completion token, one completion after the other, the token whose logits predict it."""

    @staticmethod
    def of(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> PackedTokens:
        """Whole sequences; each token but the first of a sequence counts as predicted."""
        return PackedTokens.of_groups([(sequence[:1], [sequence[1:]]) for sequence in sequences], device, True)

    @staticmethod
    def of_groups(
        groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
        device: torch.device | str = "cpu",
        keep_last: bool = False,
    ) -> PackedTokens:
        """Prompts with their completions. A completion's last token predicts nothing and is left out, unless
        `keep_last`; an empty completion adds nothing.

        Raises:
            ValueError: a prompt is empty.
        """
        tokens: list[int] = []
        positions: list[int] = []
        spread: list[int] = []
        gather: list[int] = []
        predicts: list[int] = []
        lengths: list[int] = []
        for prompt, completions in groups:
            if not prompt:
                raise ValueError("a prompt is empty; a sequence has at least one token")
            first, size = len(tokens), len(prompt)
            tokens += prompt
            positions += range(size)
            gather += range(len(spread), len(spread) + size)
            for completion in completions or [()]:
                own = list(completion) if keep_last else list(completion[:-1])
                start = len(tokens)
                if completion:
                    predicts += [first + size - 1, *range(start, start + len(completion) - 1)]
                gather += range(len(spread) + size, len(spread) + size + len(own))
                spread += [*range(first, first + size), *range(start, start + len(own))]
                tokens += own
                positions += range(size, size + len(own))
                lengths.append(size + len(own))
        is_shared = len(spread) != len(tokens)
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

        def indices(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return PackedTokens(
            indices(tokens), indices(positions), PackedDescriptor(starts, max(lengths, default=0)),
            indices(spread) if is_shared else None, indices(gather) if is_shared else None, indices(predicts),
        )  # fmt: skip


def packed_hidden(
    decoder: Decoder, weights: DecoderWeights, attention: AttentionBackend, tokens: PackedTokens,
    is_checkpointed: bool = False,
) -> Tensor:  # fmt: skip
    """Hidden states [T, hidden] after the final norm; `is_checkpointed` keeps one activation per layer and computes
    the others again in the backward."""
    layers = [LayerAttention(decoder.spec.attention_scale, window) for window in decoder.spec.windows]

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spread, gather = tokens.spread, tokens.gather
        if spread is None or gather is None:
            return attention.forward(q, k, v, tokens.descriptor, layers[index], None)
        q, k, v = (heads.index_select(0, spread) for heads in (q, k, v))
        return attention.forward(q, k, v, tokens.descriptor, layers[index], None).index_select(0, gather)

    return decoder.forward(weights, tokens.token_ids, tokens.positions, attend, is_checkpointed)


def packed_forward(
    decoder: Decoder, weights: DecoderWeights, attention: AttentionBackend, sequences: Sequence[Sequence[int]]
) -> Tensor:
    """Hidden states [T, hidden] of all sequences, one after the other."""
    return packed_hidden(decoder, weights, attention, PackedTokens.of(sequences, weights.norm.device))


def packed_logprobs(
    decoder: Decoder, weights: DecoderWeights, attention: AttentionBackend, sequences: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Raw log-prob of the tokens 1 … of each sequence given those before: float32 [len - 1] per sequence."""
    tokens = PackedTokens.of(sequences, weights.norm.device)
    hidden = packed_hidden(decoder, weights, attention, tokens).index_select(0, tokens.predicts)
    targets = torch.tensor([token for sequence in sequences for token in sequence[1:]], device=hidden.device)
    pieces = [
        differentiable.row_logprobs(decoder.kernels, decoder.logits(weights, part), wanted)
        for part, wanted in zip(hidden.split(LOGIT_ROWS), targets.long().split(LOGIT_ROWS), strict=True)
        if len(part)
    ]
    whole = torch.cat(pieces) if pieces else hidden.new_zeros(0, dtype=torch.float32)
    return list(whole.split([len(sequence) - 1 for sequence in sequences]))
