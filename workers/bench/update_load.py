"""UpdateLoad: many streams on a running worker while new versions are published at a fixed pace.

Owns: the load and what is seen of it (gaps between tokens, results, failures, publications). Knows nothing of how the
worker was started. Used by bin/bench and by the tests of updates under load.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter

from torch import Tensor

from ...ipc.arena.publisher import WeightPublisher
from ...ipc.client import AsyncClient, Client
from ...ipc.errors import UnisonError, VersionBusyError
from ...ipc.types import OnUpdate, RequestOutput, SamplingParams

WriteVersion = Callable[[dict[str, Tensor], int], None]
"""Fills the tensors of a buffer with the weights of an ordinal."""


@dataclass(frozen=True)
class UpdateLoad:
    """What is run."""

    run_dir: Path
    """The run."""
    on_update: OnUpdate = OnUpdate.FINISH
    """What requests do at a flip."""
    num_streams: int = 32
    """Requests at once; one that ends is followed by another."""
    prompt_tokens: int = 48
    """Length of each prompt."""
    max_tokens: int = 48
    """Tokens per request."""
    vocab_size: int = 1000
    """Prompts are drawn from ids below it."""
    duration_s: float = 10.0
    """No new request after it."""
    interval_s: float | None = 0.5
    """From one publication to the next; None publishes nothing."""


@dataclass
class UpdateReport:
    """What was seen."""

    outputs: list[RequestOutput] = field(default_factory=list)
    """Results, in the order in which they ended."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two arrivals of tokens of one stream, after its first."""
    failures: list[str] = field(default_factory=list)
    """Requests that ended in an error of the client library."""
    published: list[int] = field(default_factory=list)
    """Ordinals that went live."""
    publish_s: list[float] = field(default_factory=list)
    """From the reservation to live, writing included."""
    num_postponed: int = 0
    """Publications for which no buffer came free within the interval."""
    seconds: float = 0.0
    """From the first request to the last result."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(completion.token_ids) for output in self.outputs for completion in output.completions)

    def gap_s(self, share: float) -> float:
        """Percentile of the gaps, by nearest rank."""
        ordered = sorted(self.gaps_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run_update_load(load: UpdateLoad, write: WriteVersion) -> UpdateReport:
    """Run the streams in this thread and the publications in another; both end before it returns."""
    report, is_over = UpdateReport(), threading.Event()
    publishing = threading.Thread(target=_publish, args=(load, write, report, is_over), name="publisher")
    if load.interval_s is not None:
        publishing.start()
    started = perf_counter()
    try:
        asyncio.run(_stream_all(load, report))
        report.seconds = perf_counter() - started
    finally:
        is_over.set()
        if load.interval_s is not None:
            publishing.join()
    return report


async def _stream_all(load: UpdateLoad, report: UpdateReport) -> None:
    async with await AsyncClient.connect(load.run_dir, role="rollout") as client:
        until_s = monotonic() + load.duration_s
        await asyncio.gather(*(_stream(client, load, report, at, until_s) for at in range(load.num_streams)))


async def _stream(client: AsyncClient, load: UpdateLoad, report: UpdateReport, at: int, until_s: float) -> None:
    number = at
    while monotonic() < until_s:
        prompt = [(number * 7919 + position * 31) % load.vocab_size for position in range(load.prompt_tokens)]
        params = SamplingParams(max_tokens=load.max_tokens, temperature=1.0, seed=number, ignore_eos=True)
        last = None
        try:
            async with client.stream(prompt, params, on_update=load.on_update) as stream:
                async for _ in stream:
                    now = perf_counter()
                    if last is not None:
                        report.gaps_s.append(now - last)
                    last = now
            assert stream.output is not None
            report.outputs.append(stream.output)
        except UnisonError as error:
            report.failures.append(f"{type(error).__name__}: {error}")
        number += load.num_streams


def _publish(load: UpdateLoad, write: WriteVersion, report: UpdateReport, is_over: threading.Event) -> None:
    assert load.interval_s is not None
    with Client.connect(load.run_dir, role="trainer") as client, WeightPublisher(client) as publisher:
        next_s = monotonic() + load.interval_s
        while not is_over.wait(max(0.0, next_s - monotonic())):
            next_s = max(next_s + load.interval_s, monotonic())
            started = perf_counter()
            try:
                with publisher.update(wait_s=load.interval_s) as update:
                    write(update.tensors, update.ordinal)
            except VersionBusyError:
                report.num_postponed += 1
                continue
            report.published.append(update.ordinal)
            report.publish_s.append(perf_counter() - started)
