"""EngineBackend: a real engine behind the server's backend protocol, in this process.

One thread steps the engine and belongs to nobody else; the event loop speaks to it through commands, as it does to a
worker process. Used by the tests of workers/network.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

from unison.engine.engine import Engine
from unison.ipc.errors import DeadlineError, UnisonError, UnknownVersionError
from unison.ipc.messages import Welcome, WorkerStatus
from unison.ipc.types import (
    GenerateRequest,
    OnUpdate,
    PolicyVersion,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    TokenDelta,
)  # fmt: skip
from unison.workers.gpu.report import WorkerGauges

T = TypeVar("T")

Sink = Callable[[tuple[TokenDelta, ...], RequestOutput | None], None]


class EngineBackend:
    """Life: `start` → used from any event loops → `stop`."""

    def __init__(self, engine: Engine, model: str = "tiny") -> None:
        self.engine = engine
        self.is_connected = True
        self.pins: dict[int, int] = {}
        self.answers_status = True
        """False makes `status` run into its deadline, as with a worker that hangs."""
        self._model = model
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue()
        self._sinks: dict[str, Sink] = {}
        self._is_paused = False
        self._is_stopped = False
        self._num_requests = 0
        self._step_s = monotonic()
        self._gauges = WorkerGauges(self._step_s)
        self._thread = threading.Thread(target=self._run, name="engine-backend")

    def start(self) -> EngineBackend:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._is_stopped = True
        self._commands.put(lambda: None)
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def worker(self) -> Welcome:
        engine = self.engine
        limits = engine.status().max_len
        return Welcome("1", 0, self._model, engine.spec.vocab_size, limits, 2, engine.live_version)

    @property
    def num_in_flight(self) -> int:
        return len(self._sinks)

    # ---- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopped:
            is_idle = self._is_paused or not self.engine.has_work
            try:
                while True:
                    self._commands.get(block=is_idle)()
                    is_idle = False
            except queue.Empty:
                pass
            if not self._is_paused and self.engine.has_work:
                self._step()

    def _step(self) -> None:
        output = self.engine.step()
        self._step_s = monotonic()
        finished = {done.request_id: done for done in output.finished}
        deltas: dict[str, list[TokenDelta]] = {request_id: [] for request_id in finished}
        for delta in output.deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
        for request_id, own in deltas.items():
            done = finished.get(request_id)
            sink = self._sinks.pop(request_id, None) if done else self._sinks.get(request_id)
            if sink is not None:
                sink(tuple(own), done)

    async def _call(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = work()
            except UnisonError as error:
                _post(loop, future, error)
            else:
                _post(loop, future, value)

        self._commands.put(run)
        return await future

    # ---- Backend -----------------------------------------------------------------------------------------------------

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, n: int = 1,
        on_update: OnUpdate = OnUpdate.FINISH, pin_version: int | None = None, deadline_s: float | None = None,
        resubmit: bool = False,
    ) -> EngineStream:  # fmt: skip
        self._num_requests += 1
        request = GenerateRequest(
            f"request-{self._num_requests}", tuple(prompt_ids), params, n, on_update, pin_version
        )
        return EngineStream(self, request, deadline_s)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> RequestOutput:
        async with self.stream(prompt_ids, params, **options) as stream:
            async for _ in stream:
                pass
        assert stream.output is not None
        return stream.output

    async def score(
        self, prompt_ids: Sequence[int], continuation_ids: Sequence[int], top_k: int = 0, pin_version: int | None = None
    ) -> ScoreOutput:
        return await self._call(lambda: self.engine.score(prompt_ids, continuation_ids, top_k, pin_version))

    async def status(self, deadline_s: float = 5.0) -> WorkerStatus:
        if not self.answers_status:
            raise DeadlineError(f"the worker didn't answer within {deadline_s} s")
        return await self._call(self._facts)

    def _facts(self) -> WorkerStatus:
        status = self._gauges.status("1", self.engine, lambda _: 0, monotonic())
        versions = tuple(
            replace(item, num_pins=item.num_pins + self.pins.get(item.version.ordinal, 0)) for item in status.versions
        )
        step_age_s = monotonic() - self._step_s
        return replace(status, versions=versions, is_paused=self._is_paused, step_age_s=step_age_s)

    async def rollback(self, ordinal: int) -> PolicyVersion:
        def work() -> PolicyVersion:
            self.engine.rollback(ordinal)
            self.engine.flip()
            return self.engine.live_version

        return await self._call(work)

    async def pin(self, ordinal: int) -> None:
        self.pins[ordinal] = self.pins.get(ordinal, 0) + 1

    async def unpin(self, ordinal: int) -> None:
        if not self.pins.get(ordinal):
            raise UnknownVersionError(f"version {ordinal} isn't pinned")
        self.pins[ordinal] -= 1

    async def pause(self) -> None:
        await self._call(lambda: setattr(self, "_is_paused", True))

    async def resume(self) -> None:
        await self._call(lambda: setattr(self, "_is_paused", False))

    def open(self, request: GenerateRequest, sink: Sink) -> None:
        """In the engine's thread: submit, and send what comes to `sink`."""
        self.engine.submit(request)
        self._sinks[request.request_id] = sink

    def cancel(self, request_id: str) -> None:
        """From any thread: nobody wants more of it."""
        self._commands.put(lambda: self._cancel(request_id))

    def _cancel(self, request_id: str) -> None:
        self._sinks.pop(request_id, None)
        self.engine.abort(request_id)


class EngineStream:
    """The tokens of one request."""

    def __init__(self, backend: EngineBackend, request: GenerateRequest, deadline_s: float | None) -> None:
        self.request_id = request.request_id
        self.output: RequestOutput | None = None
        self._backend = backend
        self._request = request
        self._deadline_s = deadline_s
        self._is_open = False

    async def __aenter__(self) -> EngineStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._is_open and self.output is None:
            self._backend.cancel(self.request_id)
        self._is_open = False

    async def __aiter__(self) -> AsyncIterator[tuple[TokenDelta, ...]]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[tuple[TokenDelta, ...], RequestOutput | None]] = asyncio.Queue()

        def sink(deltas: tuple[TokenDelta, ...], output: RequestOutput | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, (deltas, output))

        self._is_open = True
        await self._backend._call(lambda: self._backend.open(self._request, sink))
        while self.output is None:
            try:
                deltas, self.output = await asyncio.wait_for(arrived.get(), self._deadline_s)
            except asyncio.TimeoutError:
                raise DeadlineError(f"nothing came within {self._deadline_s} s") from None
            if deltas:
                yield deltas


def _post(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: Any) -> None:
    def settle() -> None:
        if not future.done():
            future.set_exception(value) if isinstance(value, BaseException) else future.set_result(value)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
