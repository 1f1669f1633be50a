"""EngineMetrics: counters, recent latencies, and the baseline after every way out."""

from __future__ import annotations

import threading

import pytest
from unison.engine.metrics import EngineMetrics, Percentiles
from unison.ipc.errors import InvariantError
from unison.ipc.types import FinishReason


def _serve(metrics: EngineMetrics, request_id: str, submitted_s: float, first_s: float, end_s: float, num: int) -> None:
    metrics.on_submit(request_id, submitted_s)
    metrics.on_first_token(request_id, 0, first_s)
    metrics.on_finish(request_id, 0, FinishReason.LENGTH, num, end_s)
    metrics.forget(request_id)


def test_nothing_measured() -> None:
    """S29: the baseline: every counter 0, every reason there, no percentile made up."""
    stats = EngineMetrics(4).snapshot()
    assert stats.num_requests_live == stats.num_requests_submitted == stats.num_steps == 0
    assert stats.num_completions_by_reason == dict.fromkeys(FinishReason, 0)
    assert stats.step is stats.time_to_first_token is stats.time_per_token is None


def test_counters() -> None:
    """S29: each event counts once, in its own counter."""
    metrics = EngineMetrics(4)
    metrics.on_step(3, 10, 0.5)
    metrics.on_step(2, 0, 0.25)
    metrics.on_prefix_hit(16)
    metrics.on_preempt()
    metrics.on_preempt()
    metrics.on_flip()
    stats = metrics.snapshot()
    assert (stats.num_steps, stats.num_decode_tokens, stats.num_prefill_tokens) == (2, 5, 10)
    assert (stats.num_cached_tokens, stats.num_preemptions, stats.num_flips) == (16, 2, 1)
    assert stats.step == Percentiles(0.25, 0.5)


def test_latencies_of_a_group() -> None:
    """Each completion of a request has its own first token and its own pace."""
    metrics = EngineMetrics(4)
    metrics.on_submit("a", 10.0)
    metrics.on_first_token("a", 0, 11.0)
    metrics.on_first_token("a", 1, 13.0)
    metrics.on_finish("a", 0, FinishReason.STOP, 5, 13.0)
    metrics.on_finish("a", 1, FinishReason.LENGTH, 3, 14.0)
    assert metrics.snapshot().time_to_first_token is None
    metrics.forget("a")
    stats = metrics.snapshot()
    assert stats.time_to_first_token == Percentiles(1.0, 3.0)
    assert stats.time_per_token == Percentiles(0.5, 0.5)
    assert stats.num_generated_tokens == 8
    ended = {reason: num for reason, num in stats.num_completions_by_reason.items() if num}
    assert ended == {FinishReason.STOP: 1, FinishReason.LENGTH: 1}


def test_single_token_has_no_pace() -> None:
    """One token has a first-token time, but nothing between tokens to measure."""
    metrics = EngineMetrics(4)
    _serve(metrics, "a", 0.0, 2.0, 2.0, num=1)
    stats = metrics.snapshot()
    assert stats.time_to_first_token == Percentiles(2.0, 2.0)
    assert stats.time_per_token is None


def test_window_of_recent_requests() -> None:
    """S9: percentiles look at the last `recent_requests` requests, counters at all."""
    metrics = EngineMetrics(2)
    for number, first_s in enumerate((100.0, 1.0, 2.0)):
        _serve(metrics, f"r{number}", 0.0, first_s, first_s + 1.0, num=2)
        metrics.on_step(1, 0, first_s)
    stats = metrics.snapshot()
    assert stats.time_to_first_token == stats.step == Percentiles(1.0, 2.0)
    assert stats.num_requests_submitted == stats.num_completions_by_reason[FinishReason.LENGTH] == 3


@pytest.mark.parametrize("reason", list(FinishReason))
def test_baseline_after_every_end(reason: FinishReason) -> None:
    """S29: whatever ended a request, before or after its first token, no entry of it stays."""
    metrics = EngineMetrics(4)
    for request_id in ("started", "not started"):
        metrics.on_submit(request_id, 0.0)
    metrics.on_first_token("started", 0, 1.0)
    assert metrics.snapshot().num_requests_live == 2
    metrics.on_finish("started", 0, reason, 1, 2.0)
    metrics.on_finish("not started", 0, reason, 0, 2.0)
    metrics.forget("started")
    metrics.forget("not started")
    stats = metrics.snapshot()
    assert stats.num_requests_live == 0
    assert stats.num_completions_by_reason[reason] == 2
    assert stats.time_to_first_token == Percentiles(1.0, 1.0)
    metrics.on_submit("started", 3.0)
    assert metrics.snapshot().num_requests_live == 1


def test_forget_is_harmless() -> None:
    """S29: a failed submission is forgotten without a trace among the latencies, and twice is as good as once."""
    metrics = EngineMetrics(4)
    metrics.on_submit("a", 0.0)
    metrics.forget("a")
    metrics.forget("a")
    stats = metrics.snapshot()
    assert (stats.num_requests_live, stats.time_to_first_token) == (0, None)


def test_broken_order_is_our_fault() -> None:
    """R1: a second end, an end without a start, or a second start is a bug that is named."""
    metrics = EngineMetrics(4)
    with pytest.raises(InvariantError, match="isn't measured"):
        metrics.on_finish("a", 0, FinishReason.STOP, 1, 1.0)
    with pytest.raises(InvariantError, match="isn't measured"):
        metrics.on_first_token("a", 0, 1.0)
    metrics.on_submit("a", 0.0)
    with pytest.raises(InvariantError, match="measured already"):
        metrics.on_submit("a", 0.0)
    metrics.on_finish("a", 0, FinishReason.STOP, 0, 1.0)
    with pytest.raises(InvariantError, match="ends twice"):
        metrics.on_finish("a", 0, FinishReason.STOP, 0, 1.0)
    assert metrics.snapshot().num_completions_by_reason[FinishReason.STOP] == 1


@pytest.mark.parametrize(
    ("num", "p50", "p99"), [(1, 1, 1), (2, 1, 2), (3, 2, 3), (100, 50, 99), (101, 51, 100), (200, 100, 198)]
)
def test_percentiles_are_nearest_rank(num: int, p50: int, p99: int) -> None:
    """Of 1 … num: the smallest value that at least 50 % (99 %) of them don't exceed."""
    assert Percentiles.of(float(value) for value in range(num, 0, -1)) == Percentiles(p50, p99)
    assert Percentiles.of([]) is None


def test_snapshot_from_another_thread() -> None:
    """The reader of the statistics needs no lock while the engine goes on counting."""
    metrics = EngineMetrics(64)
    done = threading.Event()
    faults: list[Exception] = []

    def read() -> None:
        try:
            while not done.is_set():
                metrics.snapshot()
        except RuntimeError as fault:
            faults.append(fault)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(3000):
        _serve(metrics, f"r{number}", 0.0, 1.0, 2.0, num=2)
        metrics.on_step(1, 0, 0.001)
    done.set()
    reader.join(20.0)
    assert not reader.is_alive() and not faults
    assert metrics.snapshot().num_requests_submitted == 3000
