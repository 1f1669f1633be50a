"""EngineMetrics: what the engine remembers about its own work.

Owns: counters since the start, the requests in flight with their times, and a window of recent latencies. Knows no
clock (times come in as arguments), no exporter, and of a request only its id. Called by the engine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..ipc.errors import InvariantError
from ..ipc.types import FinishReason


@dataclass(frozen=True)
class Percentiles:
    """Median and tail of a set of durations, by nearest rank: each is a duration that was measured."""

    p50_s: float
    """Half of them took at most this long, in seconds."""
    p99_s: float
    """99 of 100 took at most this long, in seconds."""

    @staticmethod
    def of(durations_s: Iterable[float]) -> Percentiles | None:
        """Of any number of durations; None where there are none."""
        ordered = sorted(durations_s)
        if not ordered:
            return None
        return Percentiles(*(ordered[math.ceil(share * len(ordered) / 100) - 1] for share in (50, 99)))


@dataclass(frozen=True)
class EngineStats:
    """What an engine has done so far, and how fast it was lately; a snapshot."""

    num_requests_submitted: int
    """Requests accepted since the start."""
    num_requests_live: int
    """Requests accepted and not forgotten yet."""
    num_completions_by_reason: dict[FinishReason, int]
    """Completions ended since the start; every reason is there, also with 0."""
    num_generated_tokens: int
    """Tokens of ended completions."""
    num_decode_tokens: int
    """Tokens that steps ran as decodes."""
    num_prefill_tokens: int
    """Tokens that steps ran as prefill, those computed again after a preemption included."""
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix index."""
    num_steps: int
    """Steps that ran a forward pass."""
    num_preemptions: int
    """Times that a running sequence gave up its KV."""
    num_flips: int
    """Changes of the live policy version."""
    step: Percentiles | None
    """Duration of the last `metrics.recent_requests` steps; None before the first."""
    time_to_first_token: Percentiles | None
    """From submission to the first token, per completion of the recent requests; None before any."""
    time_per_token: Percentiles | None
    """Mean time between tokens after the first, per completion of the recent requests; None before any."""


@dataclass
class _LiveRequest:
    """A request in flight."""

    submitted_s: float
    """When it was accepted."""
    first_token_s: dict[int, float] = field(default_factory=dict)
    """Time of the first token, by the index of completions that haven't ended."""
    ended: set[int] = field(default_factory=set)
    """Indices of completions that have ended."""
    ttft_s: list[float] = field(default_factory=list)
    """Time to first token of the completions that have ended with a token."""
    tpot_s: list[float] = field(default_factory=list)
    """Time per token of the completions that have ended with two tokens or more."""


class EngineMetrics:
    """Counters, gauges and recent latencies of one engine.

    Life of an entry: `on_submit` → `on_first_token`, `on_finish` per completion → `forget`, on every way out (S29).
    Threads: written by the thread that steps the engine; `snapshot` may be called from another.
    """

    def __init__(self, recent_requests: int) -> None:
        self._live: dict[str, _LiveRequest] = {}
        self._recent: deque[_LiveRequest] = deque(maxlen=recent_requests)
        self._step_s: deque[float] = deque(maxlen=recent_requests)
        self._by_reason = dict.fromkeys(FinishReason, 0)
        self._num_submitted = 0
        self._num_generated = 0
        self._num_decode = 0
        self._num_prefill = 0
        self._num_cached = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_flips = 0

    def on_submit(self, request_id: str, now_s: float) -> None:
        """A request was accepted."""
        if request_id in self._live:
            raise InvariantError(f"request {request_id!r} is measured already; forget it when it leaves")
        self._live[request_id] = _LiveRequest(now_s)
        self._num_submitted += 1

    def on_first_token(self, request_id: str, index: int, now_s: float) -> None:
        """Completion `index` got its first token."""
        self._get(request_id).first_token_s[index] = now_s

    def on_finish(self, request_id: str, index: int, reason: FinishReason, num_tokens: int, now_s: float) -> None:
        """Completion `index` ended, with `num_tokens` generated tokens.

        Raises:
            InvariantError: the request isn't in flight, or the completion has ended before (R1).
        """
        live = self._get(request_id)
        if index in live.ended:
            raise InvariantError(f"completion {index} of request {request_id!r} ends twice")
        live.ended.add(index)
        self._by_reason[reason] += 1
        self._num_generated += num_tokens
        first_s = live.first_token_s.pop(index, None)
        if first_s is None:
            return
        live.ttft_s.append(first_s - live.submitted_s)
        if num_tokens > 1:
            live.tpot_s.append((now_s - first_s) / (num_tokens - 1))

    def forget(self, request_id: str) -> None:
        """The request left, in whatever way; its latencies join the recent ones. Harmless where it isn't known."""
        live = self._live.pop(request_id, None)
        if live is not None and live.ended:
            self._recent.append(live)

    def on_step(self, num_decode_tokens: int, num_prefill_tokens: int, duration_s: float) -> None:
        """A step ran a forward pass."""
        self._num_steps += 1
        self._num_decode += num_decode_tokens
        self._num_prefill += num_prefill_tokens
        self._step_s.append(duration_s)

    def on_prefix_hit(self, num_tokens: int) -> None:
        """A prompt's first `num_tokens` tokens came from the prefix index."""
        self._num_cached += num_tokens

    def on_preempt(self, count: int = 1) -> None:
        """Running sequences gave up their KV."""
        self._num_preemptions += count

    def on_flip(self) -> None:
        """The live policy version changed."""
        self._num_flips += 1

    def snapshot(self) -> EngineStats:
        """Everything as of now."""
        # list() copies without running Python code, so a step in another thread can't change what is iterated.
        recent, step_s = list(self._recent), list(self._step_s)
        return EngineStats(
            num_requests_submitted=self._num_submitted,
            num_requests_live=len(self._live),
            num_completions_by_reason=dict(self._by_reason),
            num_generated_tokens=self._num_generated,
            num_decode_tokens=self._num_decode,
            num_prefill_tokens=self._num_prefill,
            num_cached_tokens=self._num_cached,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            num_flips=self._num_flips,
            step=Percentiles.of(step_s),
            time_to_first_token=Percentiles.of(value for request in recent for value in request.ttft_s),
            time_per_token=Percentiles.of(value for request in recent for value in request.tpot_s),
        )

    def _get(self, request_id: str) -> _LiveRequest:
        live = self._live.get(request_id)
        if live is None:
            raise InvariantError(f"request {request_id!r} isn't measured; submit it first, forget it last")
        return live
