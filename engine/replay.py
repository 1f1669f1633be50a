"""Replayer: finished samples computed again from their own records, under the versions that the records name.

A sample of one version goes through the packed forward, its group's prompt computed once. One whose KV is of several
versions (`carry`, or KV that was computed again) goes through a cache: each run of positions under the version that
computed its KV, in order. Then every token is drawn again from the counter RNG. Since no row depends on its company
(R3), what comes out is what the engine had, bit for bit, whatever it was batched with.

Owns: the forward passes and the draws. Knows nothing of where records and weights come from, and judges nothing. Called
by bin/verify; one thread.

Shapes: N tokens of a sample, P of its prompt · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ipc.types import KVEpoch, SamplingParams, VersionSpan
from .assembly import forward_parts
from .attention import LayerAttention, LayerKV, PrefillDescriptor
from .cache.buffer import KVBuffer
from .config import EngineConfig
from .models.layout import DecoderWeights, WeightLayout
from .models.packed import LOGIT_ROWS, PackedTokens, packed_hidden
from .models.spec import ModelSpec
from .runtime.exactness import Exactness, check_exactness
from .runtime.filters import is_plain, scaled
from .runtime.rng import uniforms_torch
from .runtime.sample import RowSampling, Sampler, SampleStatus

MAX_TOKENS = 4096
"""Tokens of one packed pass; a group that is larger is cut between its samples."""

WeightsOf = Callable[[int], DecoderWeights]
"""Weights by ordinal."""


class ReplayError(ValueError):
    """A record that no engine can have made."""


@dataclass(frozen=True)
class SampleRecord:
    """What a replay needs to know of one completion."""

    index: int
    """Which of its request's completions."""
    token_ids: tuple[int, ...]
    """Its tokens."""
    versions: tuple[VersionSpan, ...]
    """Version whose weights computed each token's logits."""
    kv_versions: tuple[VersionSpan, ...]
    """Version of the KV of each position of prompt and completion."""
    kv_history: tuple[KVEpoch, ...] = ()
    """KV that earlier tokens were drawn over."""


@dataclass(frozen=True)
class Draws:
    """How a request's tokens were drawn."""

    params: SamplingParams
    """Temperature, filters, penalties and bans."""
    seed: int
    """Key of the counter RNG."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a completion, which must not come before `params.min_tokens`."""
    penalty_window: int = 0
    """Last tokens that penalties look at; 0 is all."""


@dataclass(frozen=True)
class Replayed:
    """What came out, each [N]."""

    drawn_ids: tuple[int, ...]
    """Tokens as the RNG draws them here, each after the recorded ones before it."""
    logprobs: tuple[float, ...]
    """Of the recorded tokens, under the distribution drawn from; NaN where filters are on and another was drawn."""
    raw_logprobs: tuple[float, ...]
    """Of the recorded tokens, under the full softmax."""
    gaps: tuple[float, ...]
    """How far, in probability, the draw was from the recorded token: 0 where it is the same; NaN where filters are on
    and another was drawn."""


class Replayer:
    """Computes samples of one model again. Life: built from what an engine is built from → any number of `replay`."""

    def __init__(self, spec: ModelSpec, config: EngineConfig) -> None:
        """`config` is that of the engine whose samples are replayed; the device must be the CPU.

        Raises:
            ConfigError: the machine can't do what is asked for.
        """
        self._spec = spec
        self._parts = forward_parts(spec, config)
        self._sampler = Sampler(spec.vocab_size, self._parts.kernels, "cpu")
        self.layout = WeightLayout(spec, getattr(torch, config.dtype))
        """How weights must lie."""

    def describe(self) -> dict[str, object]:
        """What computes, and the settings that its bits depend on, as plain values."""
        return self._parts.describe() | {"dtype": str(self.layout.dtype).removeprefix("torch.")}

    def check(self, weights: DecoderWeights) -> Exactness:
        """Whether this machine keeps the promise of R3 on these weights."""
        return check_exactness(self._parts.decoder, weights, self._parts.attention)

    @torch.inference_mode()
    def replay(
        self, prompt_ids: Sequence[int], samples: Sequence[SampleRecord], draws: Draws, weights_of: WeightsOf
    ) -> list[Replayed]:
        """The samples of one request, in their order.

        Raises:
            ReplayError: a record can't be: tokens outside the vocabulary or the context, or spans that contradict each
            other. Whatever `weights_of` raises.
        """
        found: dict[int, Replayed] = {}
        whole: dict[int, list[int]] = {}
        for at, sample in enumerate(samples):
            self._check(prompt_ids, sample)
            version = _one_version(sample)
            if not sample.token_ids:
                found[at] = Replayed((), (), (), ())
            elif version is not None:
                whole.setdefault(version, []).append(at)
            else:
                found[at] = self._replay_mixed(prompt_ids, sample, draws, weights_of)
        for version, places in whole.items():
            for part in _parts(len(prompt_ids), [(at, len(samples[at].token_ids)) for at in places]):
                found |= self._replay_packed(prompt_ids, {at: samples[at] for at in part}, draws, weights_of(version))
        return [found[at] for at in range(len(samples))]

    def _check(self, prompt_ids: Sequence[int], sample: SampleRecord) -> None:
        tokens = (*prompt_ids, *sample.token_ids)
        if not prompt_ids:
            raise ReplayError("the prompt is empty")
        if min(tokens) < 0 or max(tokens) >= self._spec.vocab_size:
            raise ReplayError(f"a token id is outside the vocabulary of {self._spec.vocab_size}")
        if len(tokens) > self._spec.max_position_embeddings:
            raise ReplayError(f"{len(tokens)} tokens are more than the context of {self._spec.max_position_embeddings}")

    # ---- one version -------------------------------------------------------------------------------------------------

    def _replay_packed(
        self, prompt_ids: Sequence[int], samples: dict[int, SampleRecord], draws: Draws, weights: DecoderWeights
    ) -> dict[int, Replayed]:
        parts = self._parts
        tokens = PackedTokens.of_groups([(prompt_ids, [sample.token_ids for sample in samples.values()])])
        hidden = packed_hidden(parts.decoder, weights, parts.attention, tokens).index_select(0, tokens.predicts)
        rows = hidden.split([len(sample.token_ids) for sample in samples.values()])
        return {
            at: _joined([self._draw(prompt_ids, sample, draws, 0, own, weights)])
            for (at, sample), own in zip(samples.items(), rows, strict=True)
        }

    # ---- several versions --------------------------------------------------------------------------------------------

    def _replay_mixed(
        self, prompt_ids: Sequence[int], sample: SampleRecord, draws: Draws, weights_of: WeightsOf
    ) -> Replayed:
        """Epoch by epoch of its KV, and in each run by run of positions of one version."""
        found = []
        for first, end, spans in _epochs(sample):
            for start, version, hidden in self._prefill_runs(prompt_ids, sample, (first, end), spans, weights_of):
                found.append(self._draw(prompt_ids, sample, draws, start, hidden, weights_of(version)))
        return _joined(found)

    def _prefill_runs(
        self, prompt_ids: Sequence[int], sample: SampleRecord, tokens: tuple[int, int],
        spans: Sequence[VersionSpan], weights_of: WeightsOf,
    ) -> Iterator[tuple[int, int, Tensor]]:  # fmt: skip
        """(first token, version, hidden states that predict from there) for the tokens [first, end) of one epoch."""
        first, end = tokens
        context = [*prompt_ids, *sample.token_ids][: len(prompt_ids) + end - 1]
        by_position = [span.version for span in spans for _ in range(span.first, span.end)][: len(context)]
        made_by = [span.version for span in sample.versions for _ in range(span.first, span.end)]
        if len(by_position) < len(context) or len(made_by) != len(sample.token_ids):
            raise ReplayError("its spans don't cover its tokens and their KV")
        offset = len(prompt_ids) - 1
        for at in range(first, end):
            if made_by[at] != by_position[offset + at]:
                raise ReplayError(
                    f"token {at} is of version {made_by[at]}, and the KV of the same forward pass of "
                    f"{by_position[offset + at]}"
                )
        spec = self._spec
        cache = KVBuffer(
            spec.num_layers, len(context), spec.num_kv_heads, spec.head_dim, self.layout.dtype, torch.device("cpu")
        )
        start = 0
        while start < len(context):
            version = by_position[start]
            stop = next((at for at in range(start, len(context)) if by_position[at] != version), len(context))
            hidden = self._prefill(cache, weights_of(version), context[start:stop], start)
            skipped = max(0, offset + first - start)
            if skipped < stop - start:
                yield start + skipped - offset, version, hidden[skipped:]
            start = stop

    def _prefill(self, cache: KVBuffer, weights: DecoderWeights, tokens: Sequence[int], first: int) -> Tensor:
        """Hidden states [len(tokens), hidden] at the positions first …, whose KV is stored on the way."""
        attention, spec, end = self._parts.attention, self._spec, first + len(tokens)
        descriptor = PrefillDescriptor(
            torch.arange(end, dtype=torch.int32)[None], 1, torch.tensor([0, len(tokens)], dtype=torch.int32),
            torch.tensor([first]), len(tokens), end,
        )  # fmt: skip
        slots = torch.arange(first, end, dtype=torch.int32)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = LayerKV(*cache.layer(index))
            attention.store(k, v, slots, kv)
            layer = LayerAttention(spec.attention_scale, spec.windows[index])
            return attention.forward(q, k, v, descriptor, layer, kv)

        return self._parts.decoder.forward(weights, torch.tensor(tokens), torch.arange(first, end), attend)

    # ---- draws -------------------------------------------------------------------------------------------------------

    def _draw(
        self, prompt_ids: Sequence[int], sample: SampleRecord, draws: Draws, first: int, hidden: Tensor,
        weights: DecoderWeights,
    ) -> Replayed:  # fmt: skip
        """The tokens first … from the hidden states that predict them, some rows of logits at a time."""
        row = RowSampling(
            draws.params, draws.seed, sample.index, draws.stop_ids, draws.penalty_window, tuple(prompt_ids)
        )
        found = []
        for rows in hidden.split(LOGIT_ROWS):
            end = first + len(rows)
            recorded = torch.tensor(sample.token_ids[first:end], dtype=torch.int64)
            generated = [sample.token_ids[:at] for at in range(first, end)]
            logits = self._parts.decoder.logits(weights, rows)
            drawn = self._sampler.sample(logits, self._sampler.prepare([row] * len(rows), generated))
            if int(drawn.status.max()) != SampleStatus.OK:
                raise ReplayError("the logits are no distribution: a weight isn't finite, or nothing could be drawn")
            raw = self._parts.kernels.row_logprobs(logits, recorded)
            logprobs, gaps = drawn.logprobs.clone(), torch.zeros(len(rows), dtype=torch.float64)
            for at in (drawn.token_ids != recorded).nonzero().flatten().tolist():
                logprobs[at], gaps[at] = self._missed(logits[at : at + 1], recorded[at : at + 1], draws, sample.index,
                                                      first + at)  # fmt: skip
            found.append(Replayed(
                tuple(drawn.token_ids.tolist()), tuple(logprobs.tolist()), tuple(raw.tolist()), tuple(gaps.tolist())
            ))  # fmt: skip
            first = end
        return _joined(found)

    def _missed(self, logits: Tensor, token: Tensor, draws: Draws, index: int, position: int) -> tuple[float, float]:
        """(log-prob, gap) of a recorded token that isn't what is drawn here."""
        params, at = draws.params, int(token)
        if not is_plain(params):
            return math.nan, math.nan
        if params.is_greedy:
            chances = torch.softmax(logits[0].double(), -1)
            return 0.0, float(chances.max() - chances[at])
        scores = scaled(logits, torch.tensor([params.temperature], dtype=torch.float32))
        edges = torch.softmax(scores[0].double(), -1).cumsum(-1)
        uniform = float(uniforms_torch(*(torch.tensor([value]) for value in (draws.seed, index, position)))[0])
        low = float(edges[at - 1]) if at else 0.0
        gap = max(low - uniform, uniform - float(edges[at]), 0.0)
        return float(self._parts.kernels.row_logprobs(scores, token)[0]), gap


def _one_version(sample: SampleRecord) -> int | None:
    """The version of everything about a sample; None where there are several."""
    spans = [*sample.versions, *sample.kv_versions]
    spans += [span for epoch in sample.kv_history for span in epoch.kv_versions]
    versions = {span.version for span in spans}
    return versions.pop() if len(versions) == 1 else None


def _epochs(sample: SampleRecord) -> Iterator[tuple[int, int, tuple[VersionSpan, ...]]]:
    """(first token, end, KV) in order."""
    first = 0
    for epoch in (*sample.kv_history, KVEpoch(len(sample.token_ids), sample.kv_versions)):
        if epoch.end > first:
            yield first, epoch.end, epoch.kv_versions
        first = max(first, epoch.end)


def _parts(num_prompt: int, sizes: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Samples (place, tokens) cut so that each pass has at most MAX_TOKENS tokens, or one sample."""
    part: list[int] = []
    total = num_prompt
    for place, size in sizes:
        if part and total + size > MAX_TOKENS:
            yield part
            part, total = [], num_prompt
        part.append(place)
        total += size
    if part:
        yield part


def _joined(pieces: Sequence[Replayed]) -> Replayed:
    columns = zip(*((each.drawn_ids, each.logprobs, each.raw_logprobs, each.gaps) for each in pieces), strict=True)
    drawn, logprobs, raw, gaps = (tuple(value for part in column for value in part) for column in columns)
    return Replayed(drawn, logprobs, raw, gaps)
