"""Mailboxes: where the answers to one call wait for who asked, a task of the client's loop or another thread.

Owns: the queue between delivery and caller. Every call is answered: at its deadline, with its worker's death, or when
the worker has given no sign of life for `ClientConfig.silence_s`; so a taker waits without a deadline of its own (P2).
Called by the clients.
"""

from __future__ import annotations

import asyncio
from queue import SimpleQueue
from typing import Any, Protocol

from .errors import UnisonError


class Mailbox(Protocol):
    """Where the answers to one call go."""

    call_id: int

    def put(self, value: Any) -> None:
        """One more answer, in order; called in the client's loop."""


class TaskMailbox:
    """Answers for a task of the client's loop."""

    def __init__(self) -> None:
        self.call_id = 0
        self._answers: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, value: Any) -> None:
        """One more answer."""
        self._answers.put_nowait(value)

    async def take(self) -> Any:
        """The next answer; raises it where it is an error."""
        return _unless_error(await self._answers.get())


class ThreadMailbox:
    """Answers for another thread: taking one costs no trip to the loop and back."""

    def __init__(self) -> None:
        self.call_id = 0
        self._answers: SimpleQueue[Any] = SimpleQueue()

    def put(self, value: Any) -> None:
        """One more answer."""
        self._answers.put(value)

    def take(self) -> Any:
        """The next answer; raises it where it is an error."""
        return _unless_error(self._answers.get())


def _unless_error(value: Any) -> Any:
    if isinstance(value, UnisonError):
        raise value
    return value
