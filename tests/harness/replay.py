"""Replays a finished completion from its own record: the same tokens under the versions that it names, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from unison.engine.attention import LayerAttention, LayerKV, PrefillDescriptor
from unison.engine.cache.buffer import KVBuffer
from unison.engine.engine import Engine
from unison.ipc.types import Completion, RequestOutput, VersionSpan


def assert_replays(engine: Engine, output: RequestOutput) -> None:
    """Spans tile tokens and KV, and every raw log-prob comes out again under the recorded versions' weights."""
    for completion in output.completions:
        num_tokens = len(completion.token_ids)
        assert_tiles(completion.versions, num_tokens)
        assert_tiles(completion.kv_versions, len(output.prompt_ids) + max(num_tokens - 1, 0))
        assert completion.raw_logprobs == replay(engine, output.prompt_ids, completion)


def assert_tiles(spans: Sequence[VersionSpan], end: int) -> None:
    """Spans cover [0, end) once, in order."""
    edges = [0, *(span.end for span in spans)]
    assert [span.first for span in spans] == edges[:-1]
    assert edges[-1] == end or (not spans and end == 0)


def replay(engine: Engine, prompt: Sequence[int], completion: Completion) -> tuple[float, ...]:
    """Raw log-probs of the tokens.

    A token's logits come from its own version's weights over the KV as it was then: that of `kv_versions`, or of the
    epoch of `kv_history` that the token belongs to.
    """
    tokens = [*prompt, *completion.token_ids]
    logprobs = []
    for at, token in enumerate(completion.token_ids):
        version = _version_at(completion.versions, at)
        position = len(prompt) + at - 1
        spans = next((epoch.kv_versions for epoch in completion.kv_history if at < epoch.end), completion.kv_versions)
        kv = [*(_version_at(spans, index) for index in range(position)), version]
        logprobs.append(_logprob(engine, tokens[: position + 1], kv, version, token))
    return tuple(logprobs)


def _version_at(spans: Sequence[VersionSpan], index: int) -> int:
    return next(span.version for span in spans if span.first <= index < span.end)


@torch.no_grad()
def _logprob(engine: Engine, tokens: list[int], kv_versions: list[int], version: int, token: int) -> float:
    """Prefill run by run of equal KV version, then the log-prob of `token` after the last position."""
    parts, spec = engine._parts, engine.spec
    dtype = parts.layout.dtype
    buffer = KVBuffer(spec.num_layers, len(tokens), spec.num_kv_heads, spec.head_dim, dtype, torch.device("cpu"))
    hidden: Tensor | None = None
    first = 0
    while first < len(tokens):
        end = first + 1
        while end < len(tokens) and kv_versions[end] == kv_versions[first]:
            end += 1
        hidden = _prefill(engine, buffer, tokens[first:end], first, kv_versions[first])
        first = end
    assert hidden is not None
    logits = parts.decoder.logits(parts.guard.weights_of(version), hidden[-1:])
    return float(parts.decoder.kernels.row_logprobs(logits, torch.tensor([token]))[0])


def _prefill(engine: Engine, buffer: KVBuffer, tokens: list[int], first: int, version: int) -> Tensor:
    parts, spec = engine._parts, engine.spec
    end = first + len(tokens)
    tables = torch.arange(end, dtype=torch.int32)[None]
    descriptor = PrefillDescriptor(
        tables, 1, torch.tensor([0, len(tokens)], dtype=torch.int32), torch.tensor([first]), len(tokens), end
    )
    slots = torch.arange(first, end, dtype=torch.int32)

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = LayerKV(*buffer.layer(index))
        parts.attention.store(k, v, slots, kv)
        layer = LayerAttention(spec.attention_scale, spec.windows[index])
        return parts.attention.forward(q, k, v, descriptor, layer, kv)

    weights = parts.guard.weights_of(version)
    return parts.decoder.forward(weights, torch.tensor(tokens), torch.arange(first, end), attend)
