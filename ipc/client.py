"""Client and AsyncClient: generate, stream, score, and steer the policy of a running worker, from any process.

Importing this loads no torch. Client runs an AsyncClient in a thread of its own; any number of threads may call it. A
worker that dies ends its pending calls with WorkerLostError, unless they were sent with `resubmit=True`.

Example:
    with Client.connect("RUN_DIR") as client:
        for deltas in client.stream([1, 2, 3], SamplingParams(max_tokens=16)): ...
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .async_client import AsyncClient, ClientConfig, TokenStream
from .errors import WorkerLostError
from .messages import BufferReserved, WeightsLive, Welcome, WorkerStatus
from .types import Manifest, PolicyVersion, RequestOutput, SamplingParams, ScoreOutput, TokenDelta

__all__ = ["AsyncClient", "Client", "ClientConfig", "SyncStream", "TokenStream"]

T = TypeVar("T")


class SyncStream:
    """The tokens of one request as they come, for a plain `for` loop; `close`, or the end of `with`, cancels the
    rest."""

    def __init__(self, wait: Callable[[Coroutine[Any, Any, Any]], Any], stream: TokenStream) -> None:
        self._wait = wait
        self._stream = stream
        self._deltas = stream.__aiter__()

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._stream.request_id

    @property
    def output(self) -> RequestOutput | None:
        """The whole result, once the iteration has ended."""
        return self._stream.output

    def __iter__(self) -> Iterator[tuple[TokenDelta, ...]]:
        """As TokenStream; a loop that is left early closes the stream."""
        try:
            while (deltas := self._wait(self._next())) is not None:
                yield deltas
        finally:
            self.close()

    async def _next(self) -> tuple[TokenDelta, ...] | None:
        return await anext(self._deltas, None)

    def close(self) -> None:
        """End it; a request that isn't finished is cancelled at the worker."""
        self._wait(self._stream.aclose())

    def __enter__(self) -> SyncStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """The same for code without asyncio; any thread may call it. Life: `connect` → used → `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: AsyncClient) -> None:
        """Use `connect`."""
        self._loop, self._thread, self._client = loop, thread, client
        self._is_closed = False
        atexit.register(self.close)

    @staticmethod
    def connect(run_dir: str | Path, *, role: str = "user", config: ClientConfig | None = None) -> Client:
        """As AsyncClient.connect."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="unison-client", daemon=True)
        thread.start()
        try:
            joined = AsyncClient.connect(run_dir, role=role, config=config)
            client = asyncio.run_coroutine_threadsafe(joined, loop).result()
        except BaseException:
            _stop(loop, thread)
            raise
        return Client(loop, thread, client)

    @property
    def worker(self) -> Welcome:
        """Whom we talk to."""
        return self._client.worker

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return self._client.run_dir

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams | None = None, **options: Any) -> SyncStream:
        """As AsyncClient.stream, for a plain `for` loop."""
        return SyncStream(self._wait, self._client.stream(prompt_ids, params, **options))

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """As AsyncClient.generate."""
        return self._wait(self._client.generate(prompt_ids, params, **options))

    def generate_all(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None, **options: Any
    ) -> list[RequestOutput]:
        """All prompts at once; outputs in their order. The first failure cancels the others and is raised."""

        async def everything() -> list[RequestOutput]:
            tasks = [asyncio.create_task(self._client.generate(prompt, params, **options)) for prompt in prompts]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return self._wait(everything())

    def score(self, prompt_ids: Sequence[int], continuation_ids: Sequence[int], **options: Any) -> ScoreOutput:
        """As AsyncClient.score."""
        return self._wait(self._client.score(prompt_ids, continuation_ids, **options))

    def abort(self, request_id: str) -> bool:
        """As AsyncClient.abort."""
        return self._wait(self._client.abort(request_id))

    def reserve_buffer(self, wait_s: float = 30.0) -> BufferReserved:
        """As AsyncClient.reserve_buffer."""
        return self._wait(self._client.reserve_buffer(wait_s))

    def abandon_buffer(self, buffer: int) -> None:
        """As AsyncClient.abandon_buffer."""
        self._wait(self._client.abandon_buffer(buffer))

    def publish(self, version: PolicyVersion, buffer: int, manifest: Manifest) -> WeightsLive:
        """As AsyncClient.publish."""
        return self._wait(self._client.publish(version, buffer, manifest))

    def rollback(self, ordinal: int) -> PolicyVersion:
        """As AsyncClient.rollback."""
        return self._wait(self._client.rollback(ordinal))

    def pin(self, ordinal: int) -> None:
        """As AsyncClient.pin."""
        self._wait(self._client.pin(ordinal))

    def unpin(self, ordinal: int) -> None:
        """As AsyncClient.unpin."""
        self._wait(self._client.unpin(ordinal))

    def release(self, ordinal: int) -> None:
        """As AsyncClient.release."""
        self._wait(self._client.release(ordinal))

    def pause(self) -> None:
        """As AsyncClient.pause."""
        self._wait(self._client.pause())

    def resume(self) -> None:
        """As AsyncClient.resume."""
        self._wait(self._client.resume())

    def status(self) -> WorkerStatus:
        """As AsyncClient.status."""
        return self._wait(self._client.status())

    def close(self) -> None:
        """Say goodbye and end the thread."""
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close)
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
            _stop(self._loop, self._thread)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_closed:
            work.close()
            raise WorkerLostError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
