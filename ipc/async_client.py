"""AsyncClient: the client of one asyncio loop; drives a CallTable over a Dialer, and finds the next worker by itself.

Owns: the connection, its signs of life, and the waiting of callers. What a call is and how it ends is CallTable's. A
worker counts as lost when its process is gone, its address file names another, or it has been silent for too long.
Called by the HTTP server, by asyncio programs, and by Client.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from .address import Address, is_alive, read_address
from .calls import Answer, CallTable
from .channel import Dialer
from .client_config import ClientConfig, named_directory
from .errors import ERROR_CODES, CapacityError, DeadlineError, HandshakeError, UnisonError, WorkerLostError
from .mailbox import Mailbox, TaskMailbox
from .messages import (
    CODEC,
    AbandonBuffer,
    BufferReserved,
    CancelHandled,
    CancelRequest,
    Failed,
    GetStatus,
    Goodbye,
    Hello,
    PauseGeneration,
    Ping,
    PinVersion,
    PublishWeights,
    ReleaseVersion,
    RequestFinished,
    ReserveBuffer,
    ResumeGeneration,
    RollbackPolicy,
    SubmitRequest,
    UnpinVersion,
    WeightsLive,
    Welcome,
    WorkerStatus,
    error_of,
    failure,
)  # fmt: skip
from .requests import new_request, score_of, scoring_params
from .types import (
    GenerateRequest,
    Manifest,
    OnUpdate,
    PolicyVersion,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    TokenDelta,
)  # fmt: skip

T = TypeVar("T")
_DROPPED = ERROR_CODES[HandshakeError].code
"""A failure of no call in particular with this code says that the worker doesn't know this client any more."""


class TokenStream:
    """The tokens of one request as they come: iterate inside `async with`; leaving early cancels the request."""

    def __init__(self, client: AsyncClient, request: GenerateRequest, deadline_s: float | None, resubmit: bool) -> None:
        self.request_id = request.request_id
        self.output: RequestOutput | None = None
        """The whole result, once the iteration has ended."""
        self._client = client
        self._submit = (SubmitRequest(request, True), deadline_s, resubmit)
        self._mailbox: TaskMailbox | None = None

    async def __aenter__(self) -> TokenStream:
        if self._mailbox is None:
            self._mailbox = TaskMailbox()
            self._client.open(self._mailbox, *self._submit)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __aiter__(self) -> AsyncIterator[tuple[TokenDelta, ...]]:
        """Deltas that arrived together: those of one engine step, of one or more of the request's completions.

        Raises:
            UnisonError: the request was refused, or lost with its worker.
        """
        await self.__aenter__()
        while self.output is None:
            answer = await self._take()
            if isinstance(answer, RequestFinished):
                self.output = answer.output
            else:
                yield answer

    async def _take(self) -> Any:
        assert self._mailbox is not None
        return await self._mailbox.take()

    async def aclose(self) -> None:
        """End it; a request that isn't finished is cancelled at the worker."""
        if self._mailbox is not None:
            self._client.abandon(self._mailbox)


class AsyncClient:
    """A client for one asyncio loop. Life: `connect` → used by any number of tasks → `close`."""

    def __init__(self, run_dir: str | Path, role: str = "user", config: ClientConfig | None = None) -> None:
        """Use `connect`, which also starts it."""
        self.run_dir = named_directory(run_dir)
        self.config = config or ClientConfig()
        self.worker: Welcome
        """Whom we talk to; replaced when a new worker answers."""
        self.is_connected = False
        self._role = role
        self._calls = CallTable()
        self._mailboxes: dict[int, Mailbox] = {}
        self._dialer: Dialer | None = None
        self._task: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._news = asyncio.Event()
        self._refusal: UnisonError | None = None
        self._lost_since_s: float | None = None

    @classmethod
    async def connect(
        cls, run_dir: str | Path, *, role: str = "user", config: ClientConfig | None = None
    ) -> AsyncClient:
        """A client that a worker of this run has welcomed.

        Raises:
            DeadlineError: no worker answered within `connect_s`. HandshakeError: it refused this client.
            ConfigError: `run_dir` is empty.
        """
        client = cls(run_dir, role, config)
        client._task = asyncio.create_task(client._run())
        try:
            await asyncio.wait_for(client._connected.wait(), client.config.connect_s)
        except asyncio.TimeoutError:
            await client.close()
            raise DeadlineError(
                f"no worker in {run_dir} answered within {client.config.connect_s} s; is bin/serve running there?"
            ) from None
        except BaseException:
            await client.close()
            raise
        if client._refusal is not None:
            refusal = client._refusal
            await client.close()
            raise refusal
        return client

    async def close(self) -> None:
        """Say goodbye (the worker aborts what is pending) and end everything here."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._deliver(self._calls.close(WorkerLostError("the client was closed")))
        if self._dialer is not None:
            self._say(self._dialer, Goodbye())
            self._dialer.close()
        self.is_connected, self._dialer = False, None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, n: int = 1,
        on_update: OnUpdate = OnUpdate.FINISH, pin_version: int | None = None, deadline_s: float | None = None,
        resubmit: bool = False, request_id: str | None = None,
    ) -> TokenStream:  # fmt: skip
        """Generate and report tokens as they come. `deadline_s` None: as long as the worker gives signs of life.

        Raises:
            InvalidRequestError: at once, where a field can't be right.
        """
        request = new_request(prompt_ids, params, n, on_update, pin_version, request_id)
        return TokenStream(self, request, deadline_s, resubmit)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, n: int = 1,
        on_update: OnUpdate = OnUpdate.FINISH, pin_version: int | None = None, deadline_s: float | None = None,
        resubmit: bool = False, request_id: str | None = None,
    ) -> RequestOutput:  # fmt: skip
        """Generate `n` completions and wait for all of them; cancelling the waiting task cancels the request."""
        request = new_request(prompt_ids, params, n, on_update, pin_version, request_id)
        finished = await self.call(SubmitRequest(request, False), RequestFinished, deadline_s, resubmit)
        return finished.output

    async def score(
        self, prompt_ids: Sequence[int], continuation_ids: Sequence[int], top_k: int = 0,
        pin_version: int | None = None, deadline_s: float | None = None,
    ) -> ScoreOutput:  # fmt: skip
        """Raw log-probs of a continuation, teacher-forced; all under one version."""
        params = scoring_params(prompt_ids, continuation_ids, top_k)
        output = await self.generate(
            [*prompt_ids, *continuation_ids], params, pin_version=pin_version, deadline_s=deadline_s
        )
        return score_of(output, len(prompt_ids))

    async def abort(self, request_id: str) -> bool:
        """Cancel one of this client's requests; its own call gets the terminal events. False where it had ended."""
        return (await self.call(CancelRequest(request_id), CancelHandled)).was_in_flight

    # ---- policy versions and operation -------------------------------------------------------------------------------

    async def reserve_buffer(self, wait_s: float = 30.0) -> BufferReserved:
        """A buffer to write the next version into; waits for one whose requests haven't ended.

        Raises:
            VersionBusyError: none came free in time.
        """
        return await self.call(ReserveBuffer(wait_s), BufferReserved, wait_s + self.config.call_s)

    async def abandon_buffer(self, buffer: int) -> None:
        """Give a reservation back."""
        await self.call(AbandonBuffer(buffer))

    async def publish(self, version: PolicyVersion, buffer: int, manifest: Manifest) -> WeightsLive:
        """Make a sealed buffer the live version (`ipc.arena.publisher` does all three steps)."""
        return await self.call(PublishWeights(version, buffer, manifest), WeightsLive)

    async def rollback(self, ordinal: int) -> PolicyVersion:
        """Go back to a version that is still installed."""
        return (await self.call(RollbackPolicy(ordinal), WeightsLive)).version

    async def pin(self, ordinal: int) -> None:
        """Keep a version installed until `unpin`, or until this client is gone."""
        await self.call(PinVersion(ordinal))

    async def unpin(self, ordinal: int) -> None:
        """Give one pin back."""
        await self.call(UnpinVersion(ordinal))

    async def release(self, ordinal: int) -> None:
        """Retire a version that is only retained for rollback."""
        await self.call(ReleaseVersion(ordinal))

    async def pause(self) -> None:
        """Stop stepping; KV is kept, requests queue up."""
        await self.call(PauseGeneration())

    async def resume(self) -> None:
        """Go on stepping."""
        await self.call(ResumeGeneration())

    async def status(self, deadline_s: float | None = None) -> WorkerStatus:
        """A snapshot of the worker."""
        return await self.call(GetStatus(), WorkerStatus, deadline_s)

    async def call(
        self, message: Any, answer: type[T] | None = None, deadline_s: float | None = None, resubmit: bool = False
    ) -> T:
        """Send one message and wait for its last answer.

        Raises:
            UnisonError: what the worker answered; DeadlineError; WorkerLostError.
        """
        if deadline_s is None and not isinstance(message, SubmitRequest):
            deadline_s = self.config.call_s
        mailbox = TaskMailbox()
        self.open(mailbox, message, deadline_s, resubmit)
        try:
            value: T = await mailbox.take()
        finally:
            self.abandon(mailbox)
        if answer is not None and not isinstance(value, answer):
            raise WorkerLostError(f"{type(message).__name__} was answered with {type(value).__name__}")
        return value

    def open(self, mailbox: Mailbox, message: Any, deadline_s: float | None, resubmit: bool) -> None:
        """Start a call whose answers go to `mailbox`; in this client's loop. `abandon` it when done.

        Raises:
            WorkerLostError: there is no worker at the moment, and the call may not wait for one.
        """
        if self._task is None or self._task.done():
            raise self._refusal or WorkerLostError("the client is closed")
        if not self.is_connected and not resubmit:
            raise WorkerLostError("the worker is gone and no new one has answered yet; try again, or resubmit=True")
        mailbox.call_id = self._calls.open(message, monotonic(), deadline_s, resubmit)
        self._mailboxes[mailbox.call_id] = mailbox
        self._flush()

    def abandon(self, mailbox: Mailbox) -> None:
        """No more answers are wanted; a request that hasn't ended is cancelled."""
        if self._mailboxes.pop(mailbox.call_id, None) is not None and self._calls.is_pending(mailbox.call_id):
            self._calls.abandon(mailbox.call_id)
            self._flush()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._dialer is None or not self.is_connected:
            return
        for call_id, message in self._calls.take_outbox():
            try:
                self._dialer.send(call_id, message)
            except UnisonError as error:
                self._deliver(self._calls.on_message(call_id, failure(error)))
        self._news.set()  # a send may have taken the edge of something that came

    def _say(self, dialer: Dialer, message: Any) -> None:
        """Send something that needs no answer."""
        try:
            dialer.send(0, message)
        except CapacityError:  # it doesn't read; its silence will tell
            pass

    def _deliver(self, answers: list[Answer]) -> None:
        for answer in answers:
            mailbox = self._mailboxes.get(answer.call_id)
            if mailbox is not None:
                mailbox.put(answer.value)

    async def _run(self) -> None:
        """Find a worker, talk to it, find the next one; until closed or refused. However it ends, no call is left."""
        try:
            await self._find_and_talk()
        except Exception as error:  # a fault of ours in this task would leave every caller waiting for ever
            self._refusal = WorkerLostError(f"the client's own loop failed: {error!r}")
            raise
        finally:
            self._deliver(self._calls.close(self._refusal or WorkerLostError("the client was closed")))
            self._connected.set()

    async def _find_and_talk(self) -> None:
        epoch_seen = ""
        while True:
            try:
                address = read_address(self.run_dir)
                if address.epoch != epoch_seen:
                    epoch_seen = await self._talk(address)
            except WorkerLostError:
                pass
            except UnisonError as error:
                self._refusal = error
                return
            self._expire(monotonic())
            await asyncio.sleep(0.02 if self._lost_since_s is not None else self.config.tick_s / 5)

    def _expire(self, now_s: float) -> None:
        """While no worker is there: deadlines, and the end of patience."""
        self._deliver(self._calls.on_tick(now_s))
        if self._lost_since_s is not None and now_s - self._lost_since_s > self.config.return_s:
            error = WorkerLostError(f"no new worker answered within {self.config.return_s} s")
            self._deliver(self._calls.close(error))

    async def _talk(self, address: Address) -> str:
        """One worker's whole life as this client sees it; returns its epoch when it is gone for good, else "".

        Raises:
            HandshakeError: it refused us.
        """
        dialer = Dialer(address)
        loop = asyncio.get_running_loop()
        fd = dialer.fileno()
        loop.add_reader(fd, self._news.set)
        try:
            welcome = await self._hello(dialer, address)
            if welcome is None:
                dialer.close()
                return ""
            self.worker, self._dialer, self.is_connected, self._lost_since_s = welcome, dialer, True, None
            self._calls.on_welcome()
            self._flush()
            self._connected.set()
            reason, is_gone = await self._converse(dialer, address)
        except BaseException:
            if self._dialer is not dialer:
                dialer.close()
            raise
        finally:
            loop.remove_reader(fd)
        self.is_connected, self._dialer, self._lost_since_s = False, None, monotonic()
        dialer.close()
        self._deliver(self._calls.on_worker_lost(reason))
        return address.epoch if is_gone else ""

    async def _hello(self, dialer: Dialer, address: Address) -> Welcome | None:
        """Introduce ourselves; None where nobody answers and the process behind the address is gone."""
        dialer.send(0, Hello(CODEC.schema_digest, address.token, self._role, os.getpid(), address.epoch))
        while not (messages := dialer.drain()):
            await self._wait_for_news()
            self._expire(monotonic())
            if not _is_current(self.run_dir, address) or not is_alive(address.pid):
                return None
        _, answer = messages[0]
        if isinstance(answer, Failed):
            raise error_of(answer)
        if not isinstance(answer, Welcome) or answer.epoch != address.epoch:
            raise HandshakeError(f"{address.endpoint} answered Hello with {answer!r:.200}")
        return answer

    async def _wait_for_news(self) -> None:
        """Until something may have come, at most one tick."""
        # Not asyncio.wait_for, which up to Python 3.11 may swallow a cancellation that comes together with the news.
        timer = asyncio.get_running_loop().call_later(self.config.tick_s, self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()
        self._news.clear()

    async def _converse(self, dialer: Dialer, address: Address) -> tuple[str, bool]:
        """Receive until the worker is lost; returns how that was seen, and whether it is gone for good."""
        can_see_pid = is_alive(address.pid) and address.endpoint.startswith("ipc:")
        heard_s = pinged_s = checked_s = monotonic()
        while True:
            await self._wait_for_news()
            now_s = monotonic()
            messages = dialer.drain()
            for call_id, message in messages:
                heard_s = now_s
                if call_id == 0 and isinstance(message, Failed) and message.code == _DROPPED:
                    return f"worker {address.epoch} dropped this client: {message.message}", False
                self._deliver(self._calls.on_message(call_id, message))
            if now_s - checked_s >= self.config.tick_s:
                checked_s = now_s
                self._deliver(self._calls.on_tick(now_s))
                if not messages and can_see_pid and not is_alive(address.pid):
                    return f"worker {address.epoch} (pid {address.pid}) died", True
                if not messages and not _is_current(self.run_dir, address):
                    return f"worker {address.epoch} was replaced", True
                if now_s - heard_s > self.config.silence_s:
                    return f"worker {address.epoch} said nothing for {self.config.silence_s} s", False
                if now_s - pinged_s >= self.config.ping_s:
                    pinged_s = now_s
                    self._say(dialer, Ping())
                self._flush()


def _is_current(run_dir: Path, address: Address) -> bool:
    """True while the address file still names this worker, or names nobody."""
    try:
        return read_address(run_dir).epoch == address.epoch
    except UnisonError:
        return True
