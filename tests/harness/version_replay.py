"""Replays samples of the real model from their own record, in one pass over the tokens per version that made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from unison.engine.attention import LayerAttention, LayerKV, PrefillDescriptor
from unison.engine.cache.buffer import KVBuffer
from unison.engine.engine import Engine
from unison.engine.models.layout import DecoderWeights
from unison.ipc.types import Completion, VersionSpan

WeightsOf = Callable[[int], DecoderWeights]


def versions_of(spans: Sequence[VersionSpan]) -> list[int]:
    """The version at each position."""
    return [span.version for span in spans for _ in range(span.first, span.end)]


def replay_carried(engine: Engine, weights_of: WeightsOf, prompt: Sequence[int], done: Completion) -> tuple[float, ...]:
    """Raw log-probs where KV is kept over a flip: each run of positions under the version that computed its KV."""
    tokens = [*prompt, *done.token_ids][:-1] if done.token_ids else list(prompt)
    made_by, kv = versions_of(done.versions), versions_of(done.kv_versions)
    assert len(kv) >= len(tokens), (len(kv), len(tokens))
    assert made_by == kv[len(prompt) - 1 : len(tokens)], "a token's logits and its position's KV come from one forward"
    cache = _Cache(engine, len(tokens))
    logits = []
    first = 0
    while first < len(tokens):
        end = next((at for at in range(first, len(tokens)) if kv[at] != kv[first]), len(tokens))
        hidden = cache.prefill(weights_of(kv[first]), tokens[first:end], first)
        keep = max(0, len(prompt) - 1 - first)
        logits.append(engine._parts.decoder.logits(weights_of(kv[first]), hidden[keep:]))
        first = end
    return _pick(engine, torch.cat(logits), done.token_ids)


def replay_recomputed(
    engine: Engine, weights_of: WeightsOf, prompt: Sequence[int], done: Completion
) -> tuple[float, ...]:
    """Raw log-probs where every token was made over KV of its own version: one pass per version (`finish` has one)."""
    tokens = [*prompt, *done.token_ids][:-1] if done.token_ids else list(prompt)
    made_by = versions_of(done.versions)
    result = [0.0] * len(done.token_ids)
    for version in sorted(set(made_by)):
        hidden = _Cache(engine, len(tokens)).prefill(weights_of(version), tokens, 0)
        logits = engine._parts.decoder.logits(weights_of(version), hidden[len(prompt) - 1 :])
        picked = _pick(engine, logits, done.token_ids)
        for at, own in enumerate(made_by):
            if own == version:
                result[at] = picked[at]
    return tuple(result)


@torch.no_grad()
def _pick(engine: Engine, logits: Tensor, tokens: Sequence[int]) -> tuple[float, ...]:
    picked = engine._parts.decoder.kernels.row_logprobs(logits, torch.tensor(tokens))
    return tuple(float(value) for value in picked)


class _Cache:
    """KV of one sequence, filled by whole runs of tokens."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self._parts, spec = engine._parts, engine.spec
        self._spec = spec
        dtype = self._parts.layout.dtype
        self._buffer = KVBuffer(
            spec.num_layers, num_tokens, spec.num_kv_heads, spec.head_dim, dtype, torch.device("cpu")
        )

    @torch.no_grad()
    def prefill(self, weights: DecoderWeights, tokens: list[int], first: int) -> Tensor:
        """Hidden states of the positions first … after storing their KV."""
        end = first + len(tokens)
        tables = torch.arange(end, dtype=torch.int32)[None]
        descriptor = PrefillDescriptor(
            tables, 1, torch.tensor([0, len(tokens)], dtype=torch.int32), torch.tensor([first]), len(tokens), end
        )
        slots = torch.arange(first, end, dtype=torch.int32)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = LayerKV(*self._buffer.layer(index))
            self._parts.attention.store(k, v, slots, kv)
            layer = LayerAttention(self._spec.attention_scale, self._spec.windows[index])
            return self._parts.attention.forward(q, k, v, descriptor, layer, kv)

        return self._parts.decoder.forward(weights, torch.tensor(tokens), torch.arange(first, end), attend)
