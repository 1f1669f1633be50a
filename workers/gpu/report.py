"""WorkerGauges: how fast the worker is and when it last made progress; what `WorkerStatus` is made of.

Owns: the clock readings of the loop. Knows nothing of peers. Called by the worker's loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...engine.engine import Engine
from ...engine.metrics import EngineStats
from ...ipc.messages import VersionStatus, WorkerStatus

RATE_WINDOW_S = 10.0
LOOP_WINDOW_S = 60.0


class WorkerGauges:
    """Readings of one loop. Times come in as arguments, on one monotonic clock, in seconds."""

    def __init__(self, now_s: float) -> None:
        self.started_s = now_s
        self.last_turn_s = now_s
        self.last_step_s = now_s
        self.num_steps = 0
        self._tokens: deque[tuple[float, int]] = deque()
        self._turns: deque[tuple[float, float]] = deque()

    def on_turn(self, now_s: float) -> None:
        """A turn of the loop begins its work."""
        length_s, self.last_turn_s = now_s - self.last_turn_s, now_s
        while self._turns and (self._turns[0][0] < now_s - LOOP_WINDOW_S):
            self._turns.popleft()
        while self._turns and self._turns[-1][1] <= length_s:  # keeps only those that can still be the longest
            self._turns.pop()
        self._turns.append((now_s, length_s))

    def on_step(self, now_s: float, num_tokens: int) -> None:
        """An engine step has ended."""
        self.last_step_s = now_s
        self.num_steps += 1
        self._tokens.append((now_s, num_tokens))
        while self._tokens[0][0] < now_s - RATE_WINDOW_S:
            self._tokens.popleft()

    def status(
        self, epoch: str, engine: Engine, buffer_of: Callable[[int], int], now_s: float
    ) -> WorkerStatus:
        """A snapshot; the worker fills in what only it knows."""
        status, stats = engine.status(), engine.stats()
        recent = sum(count for at_s, count in self._tokens if at_s >= now_s - RATE_WINDOW_S)
        return WorkerStatus(
            epoch=epoch,
            uptime_s=now_s - self.started_s,
            step=stats.num_steps,
            step_age_s=now_s - self.last_step_s,
            loop_age_s=max((length_s for _, length_s in self._turns), default=0.0),
            is_paused=False,
            is_draining=False,
            is_exact=status.exact.is_exact,
            num_clients=0,
            num_running=status.num_running,
            num_waiting=status.num_waiting,
            num_queued=0,
            num_blocks=status.num_blocks,
            num_free_blocks=status.num_free_blocks,
            tokens_per_s=recent / min(RATE_WINDOW_S, max(now_s - self.started_s, 1e-9)),
            versions=tuple(
                VersionStatus(item.version, item.state.value, item.num_pins, buffer_of(item.version.ordinal))
                for item in status.versions
            ),
            counters=_counters(stats),
            latencies_s=_latencies(stats),
        )


def _counters(stats: EngineStats) -> dict[str, int]:
    totals = {
        name: getattr(stats, name)
        for name in (
            "num_requests_submitted", "num_requests_live", "num_generated_tokens", "num_decode_tokens",
            "num_prefill_tokens", "num_cached_tokens", "num_steps", "num_preemptions", "num_flips",
        )
    }  # fmt: skip
    by_reason = stats.num_completions_by_reason.items()
    return totals | {f"num_completions_{reason.value}": count for reason, count in by_reason}


def _latencies(stats: EngineStats) -> dict[str, float]:
    named = {"step": stats.step, "ttft": stats.time_to_first_token, "tpot": stats.time_per_token}
    return {
        f"{name}_{mark}": getattr(value, f"{mark}_s" if hasattr(value, f"{mark}_s") else mark)
        for name, value in named.items()
        if value is not None
        for mark in ("p50", "p99")
    }
