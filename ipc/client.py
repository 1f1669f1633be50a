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
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .async_client import AsyncClient, TokenStream
from .client_config import ClientConfig
from .errors import WorkerLostError
from .mailbox import Mailbox, ThreadMailbox
from .messages import BufferReserved, RequestFinished, SubmitRequest, WeightsLive, Welcome, WorkerStatus
from .requests import new_request
from .types import Manifest, OnUpdate, PolicyVersion, RequestOutput, SamplingParams, ScoreOutput, TokenDelta

__all__ = ["AsyncClient", "Client", "ClientConfig", "SyncStream", "TokenStream"]

T = TypeVar("T")


class SyncStream:
    """The tokens of one request as they come, for a plain `for` loop; `close`, or the end of `with`, cancels the
    rest."""

    def __init__(self, client: Client, message: SubmitRequest, deadline_s: float | None, resubmit: bool) -> None:
        self.request_id = message.request.request_id
        self.output: RequestOutput | None = None
        """The whole result, once the iteration has ended."""
        self._client = client
        self._submit = (message, deadline_s, resubmit)
        self._mailbox: ThreadMailbox | None = None

    def __iter__(self) -> Iterator[tuple[TokenDelta, ...]]:
        """As TokenStream; a loop that is left early closes the stream."""
        if self._mailbox is None:
            self._mailbox = ThreadMailbox()
            self._client.open(self._mailbox, *self._submit)
        try:
            while self.output is None:
                answer = self._mailbox.take()
                if isinstance(answer, RequestFinished):
                    self.output = answer.output
                else:
                    yield answer
        finally:
            self.close()

    def close(self) -> None:
        """End it; a request that isn't finished is cancelled at the worker."""
        if self._mailbox is not None:
            self._client.abandon(self._mailbox)

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

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, n: int = 1,
        on_update: OnUpdate = OnUpdate.FINISH, pin_version: int | None = None, deadline_s: float | None = None,
        resubmit: bool = False, request_id: str | None = None,
    ) -> SyncStream:  # fmt: skip
        """As AsyncClient.stream, for a plain `for` loop."""
        request = new_request(prompt_ids, params, n, on_update, pin_version, request_id)
        return SyncStream(self, SubmitRequest(request, True), deadline_s, resubmit)

    def open(self, mailbox: Mailbox, message: Any, deadline_s: float | None, resubmit: bool) -> None:
        """As AsyncClient.open; answers are put by the client's thread."""

        async def start() -> None:
            self._client.open(mailbox, message, deadline_s, resubmit)

        self._wait(start())

    def abandon(self, mailbox: Mailbox) -> None:
        """As AsyncClient.abandon; harmless after the client was closed."""

        async def end() -> None:
            self._client.abandon(mailbox)

        if not self._is_closed:
            self._wait(end())

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
