"""CallTable: a client's pending calls, as a machine without sockets, threads or clocks.

Events come in (a message, a tick, a lost worker, a welcome), and what has to be done goes out: messages to send and
answers to deliver. Each call ends exactly once: with its answer, with the error it was answered with, at its deadline,
or with the worker that held it (R1). A call that may be resubmitted survives its worker: it is sent again under the
same seed, what was delivered already is recognised and not delivered twice, and a replay that differs ends it.

Owns: numbering, matching answers to calls, deadlines, resubmission. Knows nothing of transport. Called by AsyncClient.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .errors import DeadlineError, InvalidRequestError, InvariantError, UnisonError, WireError, WorkerLostError
from .messages import CancelRequest, Failed, RequestAccepted, RequestFinished, SubmitRequest, TokensGenerated, error_of
from .types import TokenDelta, VersionSpan


@dataclass(frozen=True)
class Answer:
    """Something for the owner of a call."""

    call_id: int
    """The call."""
    value: Any
    """A message, a tuple of TokenDelta, or a UnisonError."""
    is_last: bool
    """True when the call has ended with it."""


@dataclass
class _Delivered:
    """What a completion's owner has seen so far."""

    token_ids: list[int] = field(default_factory=list)
    """Tokens."""
    versions: list[int] = field(default_factory=list)
    """The version of each."""
    has_ended: bool = False
    """True after its terminal delta."""


@dataclass
class _Call:
    """One pending call."""

    message: Any
    """What was sent, and is sent again to a new worker where that is wanted."""
    deadline_s: float | None
    """When it ends at the latest, on the caller's clock; None as long as the worker gives signs of life."""
    started_s: float
    """When it began."""
    resubmit: bool
    """True: survives its worker."""
    delivered: dict[int, _Delivered] = field(default_factory=dict)
    """By completion, for streams."""

    @property
    def name(self) -> str:
        """For error texts."""
        if isinstance(self.message, SubmitRequest):
            return f"request {self.message.request.request_id!r}"
        return type(self.message).__name__


class CallTable:
    """All calls of one client. One thread."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._call_by_request: dict[str, int] = {}
        self._last_id = 0
        self._outbox: list[tuple[int, Any]] = []

    @property
    def num_pending(self) -> int:
        """Calls without their last answer."""
        return len(self._calls)

    def take_outbox(self) -> list[tuple[int, Any]]:
        """(call id, message) to send, in order, since the last call."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def open(self, message: Any, now_s: float, deadline_s: float | None, resubmit: bool = False) -> int:
        """Start a call; returns its id. `deadline_s` counts from now.

        Raises:
            InvalidRequestError: its request id belongs to a pending call.
        """
        self._last_id += 1
        call_id = self._last_id
        if isinstance(message, SubmitRequest):
            request_id = message.request.request_id
            if request_id in self._call_by_request:
                raise InvalidRequestError("request_id", f"{request_id!r} is in flight already; ids are unique")
            if resubmit and message.request.params.seed is None:
                raise InvariantError("a request without a seed can't be resubmitted")
            self._call_by_request[request_id] = call_id
        until = None if deadline_s is None else now_s + deadline_s
        self._calls[call_id] = _Call(message, until, now_s, resubmit)
        self._outbox.append((call_id, message))
        return call_id

    def is_pending(self, call_id: int) -> bool:
        """True until the call has ended."""
        return call_id in self._calls

    def abandon(self, call_id: int) -> None:
        """The owner doesn't want the answer any more; a request is cancelled at the worker."""
        call = self._end(call_id)
        if call is not None and isinstance(call.message, SubmitRequest):
            self._outbox.append((0, CancelRequest(call.message.request.request_id)))

    def on_message(self, call_id: int, message: Any) -> list[Answer]:
        """A message came from the worker; one for a call that has ended is dropped."""
        if isinstance(message, TokensGenerated):
            return self._on_tokens(message)
        if call_id not in self._calls:
            return []
        if isinstance(message, RequestAccepted):
            return []
        if isinstance(message, Failed):
            return self._fail(call_id, error_of(message))
        if isinstance(self._calls[call_id].message, SubmitRequest) != isinstance(message, RequestFinished):
            name = self._calls[call_id].name
            return self._fail(call_id, WireError(f"{name} was answered with {type(message).__name__}"))
        self._end(call_id)
        return [Answer(call_id, message, True)]

    def on_tick(self, now_s: float) -> list[Answer]:
        """Time has passed: calls whose deadline is over end, and are called off at the worker."""
        late = [(key, call) for key, call in self._calls.items() if call.deadline_s is not None]
        answers = []
        for call_id, call in late:
            if call.deadline_s is not None and now_s >= call.deadline_s:
                self.abandon(call_id)
                waited_s = now_s - call.started_s
                answers.append(
                    Answer(call_id, DeadlineError(f"{call.name} wasn't answered within {waited_s:.1f} s"), True)
                )
        return answers

    def on_worker_lost(self, reason: str) -> list[Answer]:
        """The worker is gone and with it its calls; those that may be resubmitted wait for the next one."""
        self._outbox = []
        gone = [call_id for call_id, call in self._calls.items() if not call.resubmit]
        return [
            answer
            for call_id in gone
            for answer in self._fail(call_id, WorkerLostError(f"{reason}; {self._calls[call_id].name} went with it"))
        ]

    def on_welcome(self) -> None:
        """A new worker answers: send it everything that is pending."""
        self._outbox = [(call_id, call.message) for call_id, call in self._calls.items()]

    def close(self, error: UnisonError) -> list[Answer]:
        """End everything."""
        self._outbox = []
        return [answer for call_id in list(self._calls) for answer in self._fail(call_id, error)]

    def _fail(self, call_id: int, error: UnisonError) -> list[Answer]:
        self._end(call_id)
        return [Answer(call_id, error, True)]

    def _end(self, call_id: int) -> _Call | None:
        call = self._calls.pop(call_id, None)
        if call is not None and isinstance(call.message, SubmitRequest):
            del self._call_by_request[call.message.request.request_id]
        return call

    def _on_tokens(self, message: TokensGenerated) -> list[Answer]:
        fresh: dict[int, list[TokenDelta]] = {}
        answers: list[Answer] = []
        for delta in message.deltas:
            call_id = self._call_by_request.get(delta.request_id)
            if call_id is None:
                continue
            try:
                news = _news(self._calls[call_id].delivered.setdefault(delta.index, _Delivered()), delta)
            except WorkerLostError as error:
                self._outbox.append((0, CancelRequest(delta.request_id)))
                answers += self._fail(call_id, error)
                continue
            if news is not None:
                fresh.setdefault(call_id, []).append(news)
        for call_id, deltas in fresh.items():
            if call_id in self._calls:
                answers.append(Answer(call_id, tuple(deltas), False))
        return answers


def _news(seen: _Delivered, delta: TokenDelta) -> TokenDelta | None:
    """What of a delta its owner hasn't seen; None for nothing.

    Raises:
        WorkerLostError: the replay on a new worker isn't what was delivered, or tokens between are missing.
    """
    versions = [version for span in delta.versions for version in [span.version] * (span.end - span.first)]
    known = len(seen.token_ids) - delta.first
    if known < 0:
        raise WorkerLostError(f"request {delta.request_id!r}: tokens {len(seen.token_ids)} … {delta.first} are missing")
    overlap = min(known, len(delta.token_ids))
    end = delta.first + overlap
    if (tuple(seen.token_ids[delta.first : end]), seen.versions[delta.first : end]) != (
        delta.token_ids[:overlap], versions[:overlap],
    ):  # fmt: skip
        raise WorkerLostError(
            f"request {delta.request_id!r} was resubmitted to a new worker, whose policy gives other tokens or "
            "versions than were delivered; submit it anew"
        )
    seen.token_ids += delta.token_ids[overlap:]
    seen.versions += versions[overlap:]
    ends = delta.finish_reason is not None and not seen.has_ended
    seen.has_ended |= ends
    if overlap == len(delta.token_ids) and not ends:
        return None
    if known == 0:
        return delta
    return replace(
        delta, first=len(seen.token_ids) - len(delta.token_ids) + overlap, token_ids=delta.token_ids[overlap:],
        logprobs=delta.logprobs[overlap:], raw_logprobs=delta.raw_logprobs[overlap:],
        log_support_mass=delta.log_support_mass[overlap:], top_logprobs=delta.top_logprobs[overlap:],
        versions=tuple(VersionSpan(s.version, max(s.first, end), s.end) for s in delta.versions if s.end > end),
    )  # fmt: skip
