"""Generation: all completions of one HTTP request, awaited together.

Owns: one task per prompt that reads the backend's stream, the choices that the tokens become, the deadline, and
cancelling: a prompt whose choices have all ended is cancelled, and leaving the generation cancels the rest. Knows no
protocol. Called by the handlers of the generating endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ...ipc.errors import DeadlineError, InvariantError, RequestFailedError
from ...ipc.types import ErrorReason, OnUpdate, RequestOutput, SamplingParams, TokenDelta
from .backend import Backend
from .choice import Choice, ChoiceDelta, ChoicePlan


@dataclass(frozen=True)
class Job:
    """One prompt to complete n times."""

    prompt_ids: tuple[int, ...]
    """Its token ids."""
    params: SamplingParams
    """How to draw; with a seed, so that it is known also when the request is cut short."""
    plan: ChoicePlan
    """How tokens become text."""
    n: int = 1
    """Completions."""
    on_update: OnUpdate = OnUpdate.FINISH
    """What happens when a new version goes live meanwhile."""
    pin_version: int | None = None
    """Version to run on."""


class Generation:
    """Life: entered → `start` → iterated to its end, or left early, which cancels. Belongs to one task."""

    def __init__(self, backend: Backend, jobs: tuple[Job, ...], timeout_s: float | None) -> None:
        self.jobs = jobs
        """One per prompt."""
        self.choices = [
            [Choice(first + index, index, job.plan) for index in range(job.n)]
            for first, job in zip(_firsts(jobs), jobs, strict=True)
        ]
        """Choices by prompt, numbered through."""
        self.outputs: list[RequestOutput | None] = [None] * len(jobs)
        """The backend's own account by prompt; None for a prompt that was cancelled when its choices had ended."""
        self.first_version: int | None = None
        """Version that made the first token; known after `start`, unless there was none."""
        self._num_ended = [0] * len(jobs)
        self._backend = backend
        self._timeout_s = timeout_s
        self._ends_s: float | None = None
        self._queue: asyncio.Queue[tuple[int, tuple[TokenDelta, ...] | RequestOutput | BaseException | None]]
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._kept: list[ChoiceDelta] | None = None

    async def __aenter__(self) -> Generation:
        loop = asyncio.get_running_loop()
        self._ends_s = None if self._timeout_s is None else loop.time() + self._timeout_s
        self._queue = asyncio.Queue()
        self._tasks = {index: loop.create_task(self._read(index)) for index in range(len(self.jobs))}
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    async def start(self) -> None:
        """Wait for the first tokens: a request that is refused is refused here, before any answer has begun."""
        self._kept = await self._next()
        if self._kept and all(delta.choice.finish_reason == "error" for delta in self._kept):
            await self._next()  # raises with the reason

    async def run(self) -> None:
        """Wait for the end; everything is in `choices` then."""
        async for _ in self:
            pass

    async def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]:
        """What each step added, until every choice has ended.

        Raises:
            RequestFailedError: a completion ended in an error. DeadlineError: the time-out passed.
            UnisonError: whatever the backend raised.
        """
        deltas, self._kept = self._kept, None
        while True:
            if deltas is None:
                deltas = await self._next()
            if deltas is None:
                return
            yield deltas
            deltas = None

    async def _next(self) -> list[ChoiceDelta] | None:
        """The next deltas that say something; None when every prompt has ended."""
        while self._tasks:
            index, item = await self._get()
            if isinstance(item, BaseException):
                raise item
            if not isinstance(item, tuple):
                await self._end(index, item)
                continue
            pushed = (self.choices[index][delta.index].push(delta) for delta in item)
            deltas = [delta for delta in pushed if delta is not None]
            if self.first_version is None:
                self.first_version = next((span.version for delta in item for span in delta.versions), None)
            self._num_ended[index] += sum(delta.finish_reason is not None for delta in item)
            is_done = all(choice.finish_reason is not None for choice in self.choices[index])
            # Where the engine ended them all by itself, its account of them is on the way.
            if is_done and self._num_ended[index] < self.jobs[index].n:
                await self._end(index, None)
            if deltas:
                return deltas
        return None

    async def _get(self) -> tuple[int, tuple[TokenDelta, ...] | RequestOutput | BaseException | None]:
        if self._ends_s is None:
            return await self._queue.get()
        left_s = self._ends_s - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(self._queue.get(), max(left_s, 0.0))
        except asyncio.TimeoutError:
            raise DeadlineError(
                f"the completion wasn't done within the server's time-out of {self._timeout_s} s; ask for fewer tokens"
            ) from None

    async def _end(self, index: int, output: RequestOutput | None) -> None:
        """A prompt is done: by itself, or because nobody wants more of it."""
        task = self._tasks.pop(index, None)
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.outputs[index] = output
        for choice in self.choices[index]:
            if choice.finish_reason is None:
                raise InvariantError(f"the stream of completion {choice.index} ended without a terminal event (R1)")
        for choice in self.choices[index]:
            if choice.finish_reason == "error":
                error = output.completions[choice.sample_index].error if output else None
                reason = (error or ErrorReason.INTERNAL).value
                raise RequestFailedError(f"completion {choice.index} ended in an error: {reason}", reason)

    async def _read(self, index: int) -> None:
        """Task of one prompt: the backend's stream into the queue. With its seed it survives a worker (R1, R3)."""
        job = self.jobs[index]
        try:
            stream = self._backend.stream(
                job.prompt_ids, job.params, n=job.n, on_update=job.on_update, pin_version=job.pin_version,
                deadline_s=self._timeout_s, resubmit=True,
            )  # fmt: skip
            async with stream:
                async for deltas in stream:
                    self._queue.put_nowait((index, deltas))
            self._queue.put_nowait((index, stream.output))
        except Exception as error:  # the task's outermost frame: whoever reads the queue raises it
            self._queue.put_nowait((index, error))


def _firsts(jobs: tuple[Job, ...]) -> list[int]:
    return [sum(job.n for job in jobs[:at]) for at in range(len(jobs))]
