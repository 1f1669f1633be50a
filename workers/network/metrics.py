"""NetworkMetrics: what the server counts, and the engine's counters beside it, as Prometheus text.

Owns: one registry per application (none is global), the counters of HTTP, and the names under which the engine's
status is shown. Called by app.py (every request), routing.py (every generation) and probes.py (/metrics).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...ipc.messages import WorkerStatus
from .generation import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

GAUGES = {
    "step_age_s": ("unison_step_age_seconds", "Time since the last step ended."),
    "loop_age_s": ("unison_loop_age_seconds", "How long a message to the engine may have waited."),
    "is_paused": ("unison_is_paused", "1 while no step is run on purpose."),
    "num_running": ("unison_running", "Sequences with KV."),
    "num_waiting": ("unison_waiting", "Sequences without KV."),
    "num_blocks": ("unison_kv_blocks", "KV blocks of the pool."),
    "num_free_blocks": ("unison_kv_free_blocks", "KV blocks that could be taken."),
    "tokens_per_s": ("unison_tokens_per_second", "Generated tokens per second, lately."),
}


class NetworkMetrics:
    """Counters of one application. Belongs to its event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._requests = Counter(
            "unison_http_requests", "HTTP requests by path and status.", ["path", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "unison_http_request_seconds", "Time to the end of the reply.", ["path"], buckets=SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._first_token = Histogram(
            "unison_http_first_token_seconds", "Time to the first token.", buckets=SECONDS, registry=self._registry
        )
        self._inside = Gauge("unison_http_requests_inside", "HTTP requests being answered.", registry=self._registry)
        self._prompt_tokens = Counter("unison_http_prompt_tokens", "Tokens of prompts.", registry=self._registry)
        self._tokens = Counter("unison_http_completion_tokens", "Tokens given to clients.", registry=self._registry)
        self._choices = Counter(
            "unison_http_choices", "Choices by finish reason.", ["finish_reason"], registry=self._registry
        )

    def on_first_token(self, duration_s: float) -> None:
        """A generating request got its first tokens."""
        self._first_token.observe(duration_s)

    def on_generation(self, generation: Generation) -> None:
        """A generation ended, in whatever way."""
        self._prompt_tokens.inc(sum(len(job.prompt_ids) for job in generation.jobs))
        for choices in generation.choices:
            for choice in choices:
                self._tokens.inc(len(choice.tokens))
                self._choices.labels(choice.finish_reason or "cancelled").inc()

    def on_status(self, status: WorkerStatus | None, live: int | None) -> None:
        """What the engine says of itself; None while it doesn't answer."""
        self._engine.status, self._engine.live = status, live

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def around(self, app: ASGIApp, paths: Collection[str]) -> ASGIApp:
        """`app`, with every HTTP request counted under its path, or `other` where the path is none of ours."""

        async def measured(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            path = scope["path"] if scope["path"] in paths else "other"
            status, started_s = "none", monotonic()

            async def noted(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = str(message["status"])
                await send(message)

            with self._inside.track_inprogress():
                try:
                    await app(scope, receive, noted)
                finally:
                    self._requests.labels(path, status).inc()
                    self._seconds.labels(path).observe(monotonic() - started_s)

        return measured


class _EngineCollector(Collector):
    """The engine's last status as metrics."""

    def __init__(self) -> None:
        self.status: WorkerStatus | None = None
        self.live: int | None = None

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Called by the registry."""
        yield GaugeMetricFamily("unison_up", "1 while the engine answers.", value=float(self.status is not None))
        if self.status is None:
            return
        for attribute, (name, text) in GAUGES.items():
            yield GaugeMetricFamily(name, text, value=float(getattr(self.status, attribute)))
        for counter, count in self.status.counters.items():
            name = f"unison_engine_{_metric_name(counter)}"
            yield CounterMetricFamily(name, f"{counter} of the engine since its start.", value=float(count))
        for latency, value in self.status.latencies_s.items():
            name = f"unison_engine_{_metric_name(latency)}_seconds"
            yield GaugeMetricFamily(name, f"{latency} of the engine, lately.", value=value)
        if self.live is not None:
            yield GaugeMetricFamily("unison_live_version", "Ordinal of the live policy version.", value=self.live)


def _metric_name(name: str) -> str:
    """A name of the engine's as Prometheus takes it: `num_steps` → `steps`, `step_p50_s` → `step_p50`."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name.removeprefix("num_").removesuffix("_s"))
