"""The self-test of exactness: does this machine give the same bits to a token however it is computed?

Owns: one short experiment on the real weights, run when an engine is built: the packed forward that a trainer runs
against the engine's incremental one (chunked prefill, then decode in a batch, through scattered blocks). Called by the
assembly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import AttentionBackend, DecodeDescriptor, LayerAttention, LayerKV, PrefillDescriptor
from ..cache.buffer import KVBuffer
from ..models.decoder import Decoder
from ..models.layout import DecoderWeights
from ..models.packed import packed_forward

_LENGTHS = (41, 23)
_CHUNKS = (7, 32)
_BLOCK_SIZE = 16
_NUM_DECODES = 2


@dataclass(frozen=True)
class Exactness:
    """Whether the promise of R3 is kept here, and why not where it isn't."""

    is_exact: bool
    """True where every log-prob is the same bits in engine and packed forward."""
    reason: str
    """What was seen, for status and for the record of samples."""


@torch.inference_mode()
def check_exactness(decoder: Decoder, weights: DecoderWeights, attention: AttentionBackend) -> Exactness:
    """Compare logits of two short sequences, packed and incremental, bit for bit."""
    kernels = decoder.kernels
    generator = torch.Generator().manual_seed(0)
    longest = min(max(_LENGTHS), decoder.spec.max_position_embeddings)
    lengths = [min(length, longest) for length in _LENGTHS]
    sequences = [
        torch.randint(0, decoder.spec.vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]
    packed = decoder.logits(weights, packed_forward(decoder, weights, attention, sequences))
    incremental = _Incremental(decoder, weights, attention, longest).logits(sequences)
    wanted = torch.cat([packed[lengths[0] - _NUM_DECODES : lengths[0]], packed[-_NUM_DECODES:]])
    if not kernels.exact or not attention.exact:
        return Exactness(False, f"{kernels.name} kernels with {attention.name} attention don't promise it")
    if not torch.equal(wanted, incremental):
        worst = (wanted - incremental).abs().max().item()
        return Exactness(False, f"packed and incremental logits differ by up to {worst:.3g} on this machine")
    return Exactness(
        True, f"{kernels.name} kernels with {attention.name} attention: packed and incremental logits are equal"
    )


class _Incremental:
    """A tiny engine without a scheduler: prefill in chunks, then decode both sequences together."""

    def __init__(self, decoder: Decoder, weights: DecoderWeights, attention: AttentionBackend, longest: int) -> None:
        spec = decoder.spec
        self._decoder, self._weights, self._attention = decoder, weights, attention
        self._device = weights.norm.device
        blocks = -(-longest // _BLOCK_SIZE)
        dtype = weights.norm.dtype
        self._buffer = KVBuffer(
            spec.num_layers, 2 * blocks * _BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, dtype, self._device
        )
        order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(1))
        self._tables = order.to(torch.int32).view(2, blocks).to(self._device)

    def logits(self, sequences: list[list[int]]) -> Tensor:
        """Logits of the last `_NUM_DECODES` positions of each sequence, in order."""
        starts = [len(sequence) - _NUM_DECODES for sequence in sequences]
        for row, (sequence, stop, chunk) in enumerate(zip(sequences, starts, _CHUNKS, strict=True)):
            for first in range(0, stop, chunk):
                self._prefill(row, sequence[first : min(first + chunk, stop)], first)
        steps = [
            self._decode([seq[at + i] for seq, at in zip(sequences, starts, strict=True)], starts, i)
            for i in range(_NUM_DECODES)
        ]
        return torch.stack(steps, dim=1).flatten(0, 1)

    def _prefill(self, row: int, tokens: list[int], first: int) -> None:
        tables = self._tables[row : row + 1]
        descriptor = PrefillDescriptor(
            tables, _BLOCK_SIZE, self._int32([0, len(tokens)]), self._int64([first]), len(tokens), first + len(tokens)
        )
        self._forward(tokens, torch.arange(first, first + len(tokens), device=self._device), tables, descriptor)

    def _decode(self, tokens: list[int], starts: list[int], step: int) -> Tensor:
        positions = self._int64([start + step for start in starts])
        descriptor = DecodeDescriptor(self._tables, _BLOCK_SIZE, positions + 1, max(starts) + step + 1)
        return self._decoder.logits(self._weights, self._forward(tokens, positions, self._tables, descriptor))

    def _forward(
        self, tokens: list[int], positions: Tensor, tables: Tensor, descriptor: PrefillDescriptor | DecodeDescriptor
    ) -> Tensor:
        spec, attention = self._decoder.spec, self._attention
        blocks = tables.expand(len(tokens), -1).gather(1, (positions // _BLOCK_SIZE)[:, None])[:, 0]
        slots = (blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE).to(torch.int32)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = LayerKV(*self._buffer.layer(index))
            attention.store(k, v, slots, kv)
            return attention.forward(q, k, v, descriptor, LayerAttention(spec.attention_scale, spec.windows[index]), kv)

        return self._decoder.forward(self._weights, self._int64(tokens), positions, attend)

    def _int64(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)
