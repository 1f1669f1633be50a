"""Requests and sequences: what is known of a prompt and of each of its completions while they live.

Owns: the state of one request (its version, its seed, its prompt log-probs) and of its n sequences (tokens, log-probs,
spans, cache). Knows nothing of other requests, of scheduling or of tensors. Changed by the scheduler alone, in the
thread that steps the engine.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from ..ipc.errors import InvariantError
from ..ipc.types import (
    Completion,
    ErrorReason,
    FinishReason,
    GenerateRequest,
    KVEpoch,
    RequestOutput,
    TokenDelta,
    TopLogprobs,
    VersionSpan,
)
from .cache.strategy import RequestCache


class SequenceStatus(Enum):
    """Where a sequence is in its life: WAITING ⇄ RUNNING → FINISHED (docs/states.md)."""

    WAITING = "waiting"
    """Has no row and no KV: not started, or preempted."""
    RUNNING = "running"
    """Holds a row and KV."""
    FINISHED = "finished"
    """Has its one terminal event (R1)."""


class SpanRecorder:
    """Builds the list of version spans that tiles [0, end) (V3)."""

    def __init__(self) -> None:
        self.spans: list[VersionSpan] = []

    @property
    def end(self) -> int:
        """First position without a version."""
        return self.spans[-1].end if self.spans else 0

    def extend(self, version: int, end: int) -> None:
        """Positions from the present end up to `end` belong to `version`."""
        first = self.end
        if self.spans and self.spans[-1].version == version:
            first = self.spans.pop().first
        self.spans.append(VersionSpan(version, first, end))


class PromptScores:
    """Raw log-probs of the tokens 1 … P-1 of a prompt, filled in by chunks in any order."""

    def __init__(self, prompt_len: int) -> None:
        self.logprobs = np.full(prompt_len - 1, np.nan, dtype=np.float32)
        self.top: list[TopLogprobs | None] = [None] * (prompt_len - 1)
        self._num_missing = prompt_len - 1

    def fill(self, first: int, logprobs: np.ndarray, top: list[TopLogprobs]) -> None:
        """Scores of the tokens at positions first+1 …, i.e. those predicted at positions first …

        Shapes: logprobs [k]; top is empty or of length k.
        """
        self.logprobs[first : first + len(logprobs)] = logprobs
        self.top[first : first + len(top)] = top
        self._num_missing = int(np.isnan(self.logprobs).sum())

    @property
    def is_complete(self) -> bool:
        """True once every position is scored."""
        return self._num_missing == 0


class Sequence:
    """One completion in progress.

    Invariants: `cache` is set exactly while RUNNING; the four per-token lists have one length, and `spans` tile it.
    """

    __slots__ = (
        "request", "index", "incarnation", "status", "cache", "generated", "logprobs", "raw_logprobs",
        "log_support_mass", "top_logprobs", "spans", "kv_spans", "kv_epochs", "finish_reason", "error", "matched_stop",
        "identity",
    )  # fmt: skip

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.incarnation = 0
        self.status = SequenceStatus.WAITING
        self.cache: RequestCache | None = None
        self.generated: list[int] = []
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self.log_support_mass: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.spans = SpanRecorder()
        self.kv_spans: tuple[VersionSpan, ...] = ()
        self.kv_epochs: list[KVEpoch] = []
        self.finish_reason: FinishReason | None = None
        self.error: ErrorReason | None = None
        self.matched_stop: int | None = None
        self.identity: tuple[str, int, int] = (request.request_id, index, 0)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.prompt_ids) + len(self.generated)

    @property
    def num_computed(self) -> int:
        """Leading tokens whose KV is materialised."""
        return self.cache.num_tokens if self.cache is not None else 0

    def tokens(self, first: int, end: int) -> list[int]:
        """Token ids at positions first … end-1 of prompt + completion."""
        prompt = self.request.prompt_ids
        if first >= len(prompt):
            return self.generated[first - len(prompt) : end - len(prompt)]
        return [*prompt[first:end], *self.generated[: max(0, end - len(prompt))]]

    def start(self, cache: RequestCache) -> None:
        """WAITING → RUNNING with a fresh incarnation, so that no step state of a former one can be taken for it
        (R4)."""
        self.incarnation += 1
        self.identity = (self.request.request_id, self.index, self.incarnation)
        self.status = SequenceStatus.RUNNING
        self.cache = cache

    def leave(self, status: SequenceStatus) -> RequestCache:
        """RUNNING → WAITING (preempted) or FINISHED; hands back the cache, which the caller closes."""
        if self.cache is None:
            raise InvariantError(f"{self.identity} leaves, but holds no cache")
        cache, self.cache = self.cache, None
        self.status = status
        self.kv_spans = tuple(cache.kv_spans)
        if status is SequenceStatus.WAITING and self.generated:
            self.kv_epochs.append(KVEpoch(len(self.generated), self.kv_spans))
        return cache

    def append(self, token: int, logprob: float, raw_logprob: float, log_support_mass: float, version: int) -> None:
        """Take one drawn token with everything that was measured of it, under the version that made it (V3)."""
        self.generated.append(token)
        self.logprobs.append(logprob)
        self.raw_logprobs.append(raw_logprob)
        self.log_support_mass.append(log_support_mass)
        self.spans.extend(version, len(self.generated))

    def delta(self, first: int) -> TokenDelta:
        """What came since position `first` of the completion."""
        return TokenDelta(
            request_id=self.request.request_id,
            index=self.index,
            first=first,
            token_ids=tuple(self.generated[first:]),
            logprobs=tuple(self.logprobs[first:]),
            raw_logprobs=tuple(self.raw_logprobs[first:]),
            log_support_mass=tuple(self.log_support_mass[first:]),
            versions=tuple(
                VersionSpan(span.version, max(span.first, first), span.end)
                for span in self.spans.spans
                if span.end > first
            ),
            top_logprobs=tuple(self.top_logprobs[first:]),
            finish_reason=self.finish_reason,
        )

    def completion(self) -> Completion:
        """The finished sample (R5)."""
        if self.finish_reason is None:
            raise InvariantError(f"{self.identity} has no terminal event yet")
        return Completion(
            index=self.index,
            token_ids=tuple(self.generated),
            logprobs=tuple(self.logprobs),
            raw_logprobs=tuple(self.raw_logprobs),
            log_support_mass=tuple(self.log_support_mass),
            finish_reason=self.finish_reason,
            versions=tuple(self.spans.spans),
            kv_versions=self.kv_spans,
            seed=self.request.seed,
            matched_stop=self.matched_stop,
            error=self.error,
            top_logprobs=tuple(self.top_logprobs),
            kv_history=_differing(self.kv_epochs, self.kv_spans),
        )


def _differing(epochs: list[KVEpoch], last: tuple[VersionSpan, ...]) -> tuple[KVEpoch, ...]:
    """Epochs whose KV isn't, position by position, what came after them; most preemptions compute the same again."""
    kept: list[KVEpoch] = []
    for epoch in reversed(epochs):
        if not _agree(epoch.kv_versions, last):
            kept.append(epoch)
            last = epoch.kv_versions
    return tuple(reversed(kept))


def _agree(one: tuple[VersionSpan, ...], other: tuple[VersionSpan, ...]) -> bool:
    """True where both name the same version at every position that both have."""
    return all(a.version == b.version for a in one for b in other if a.first < b.end and b.first < a.end)


class Request:
    """One accepted request: its sequences and what they share.

    `version` is None until the first sequence starts; from then on the guard holds one pin on it for this request,
    until the request is done. A request with `pin_version` holds its pin from submission.
    """

    def __init__(self, spec: GenerateRequest, arrival: int, seed: int, stop_ids: frozenset[int]) -> None:
        self.spec = spec
        self.arrival = arrival
        self.seed = seed
        self.stop_ids = stop_ids
        self.version: int | None = spec.pin_version
        self.num_cached_tokens = 0
        self.num_bypassed_steps = 0
        self.sequences = [Sequence(self, index) for index in range(spec.n)]
        wants_scores = spec.params.prompt_logprobs is not None
        self.prompt_scores = PromptScores(len(spec.prompt_ids)) if wants_scores else None

    @property
    def request_id(self) -> str:
        """The caller's id."""
        return self.spec.request_id

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self.spec.prompt_ids

    @property
    def has_started(self) -> bool:
        """True once a sequence ran or is running, so that an update concerns this request."""
        return any(seq.incarnation > 0 for seq in self.sequences)

    @property
    def is_done(self) -> bool:
        """True once every sequence has its terminal event."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self.sequences)

    @property
    def needs_prompt_scores(self) -> bool:
        """True while prompt log-probs were asked for and some are missing."""
        return self.prompt_scores is not None and not self.prompt_scores.is_complete

    def output(self) -> RequestOutput:
        """All completions, once done; prompt log-probs come complete or, where the request ended early, not at all
        (R5)."""
        scores = self.prompt_scores if self.prompt_scores is not None and self.prompt_scores.is_complete else None
        with_top = bool(self.spec.params.prompt_logprobs)
        return RequestOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            completions=tuple(seq.completion() for seq in self.sequences),
            prompt_logprobs=None if scores is None else tuple(scores.logprobs.tolist()),
            prompt_top_logprobs=tuple(top for top in scores.top if top is not None) if scores and with_top else None,
            num_cached_tokens=self.num_cached_tokens,
        )
