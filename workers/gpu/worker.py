"""GpuWorker: receive → admit → step → send, in one loop of one thread that owns the engine.

Control messages (cancel, publish, pause, status) are handled before queued requests; at most `admit_per_turn` requests
are taken in between two steps, so that a burst of them doesn't stop generation. Whatever a client sends, it gets a
typed answer and nothing else happens; a fault of ours ends the loop, and with it the process, after every request in
flight has been told (R1). docs/failures.md says who sees what.

Owns: the loop, and which request belongs to whom. Called by workers/gpu/__main__.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import zmq

from ...engine.engine import Engine, StepOutput
from ...ipc.arena.arena import WeightArena
from ...ipc.channel import Listener, Received
from ...ipc.errors import (
    CapacityError,
    HandshakeError,
    InvalidRequestError,
    RequestFailedError,
    ShuttingDownError,
    UnisonError,
    WireError,
)  # fmt: skip
from ...ipc.memory import Doorbell
from ...ipc.messages import (
    CODEC,
    AbandonBuffer,
    Acknowledged,
    CancelHandled,
    CancelRequest,
    GetStatus,
    Goodbye,
    Hello,
    PauseGeneration,
    Ping,
    PinVersion,
    Pong,
    PublishWeights,
    ReleaseVersion,
    RequestAccepted,
    RequestFinished,
    ReserveBuffer,
    ResumeGeneration,
    RollbackPolicy,
    SubmitRequest,
    TokensGenerated,
    UnpinVersion,
    Welcome,
    failure,
)  # fmt: skip
from ...ipc.types import ErrorReason, TokenDelta
from ...ipc.wire import Envelope
from ..config import WorkerConfig
from .peers import Peer, Peers
from .publication import Publication
from .report import WorkerGauges

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.25
"""Longest sleep of an idle loop: how late a silent peer or a deadline may be noticed."""
BUSY_POLL_S = 0.002
"""The same while a call waits for something that no message announces (a lock that falls)."""
DRAIN_MESSAGES = 10_000
"""Messages taken off the channel in one turn."""


@dataclass(frozen=True)
class WorkerIdentity:
    """Who this worker is."""

    epoch: str
    """Drawn at its start."""
    pid: int
    """Its process."""
    token: str
    """The run's secret."""
    model: str
    """Name under which the model is served."""


class GpuWorker:
    """Life: built around a warm engine → `run` until told to stop → `close`."""

    def __init__(
        self, engine: Engine, arena: WeightArena, views: Callable[[int], Any], listener: Listener,
        identity: WorkerIdentity, config: WorkerConfig,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._arena = arena
        self._listener = listener
        self._identity = identity
        self._config = config
        self._peers = Peers(listener, identity.token, identity.epoch, config.client_silence_s)
        self._doorbell = Doorbell.create()
        self._publication = Publication(engine, arena, views, self._doorbell.ring)
        self._owners: dict[str, Peer] = {}
        self._queue: deque[tuple[Peer, Envelope]] = deque()
        self._gauges = WorkerGauges(monotonic())
        self._is_paused = False
        self._stop_by_s: float | None = None
        self._poller = zmq.Poller()
        for source in (listener.socket, self._doorbell.fileno()):
            self._poller.register(source, zmq.POLLIN)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, every_turn: Callable[[WorkerGauges], None] = lambda _: None) -> None:
        """Turn until told to stop and drained. A fault of ours goes up, after the requests in flight were told."""
        try:
            while self._stop_by_s is None or self._is_draining(self._stop_by_s):
                self.turn()
                every_turn(self._gauges)
        except BaseException:
            self._tell_everyone(ErrorReason.INTERNAL)
            raise
        self._tell_everyone(ErrorReason.SHUTDOWN)

    def stop(self, drain_s: float) -> None:
        """Take nothing new, finish what runs within `drain_s`, then end. May be called from a signal handler."""
        self._stop_by_s = monotonic() + drain_s
        self._is_paused = False

    def turn(self) -> None:
        """One turn: what has come, some admissions, one step, what has to go out."""
        self._receive(self._patience_s())
        now_s = monotonic()
        self._gauges.on_turn(now_s)
        self._admit(now_s)
        if self._engine.has_work and not self._is_paused:
            output = self._engine.step()
            now_s = monotonic()
            self._gauges.on_step(now_s, sum(len(delta.token_ids) for delta in output.deltas))
        else:
            self._engine.flip()
            output = self._engine.take_events()
        answers = self._publication.settle(now_s)
        self._route(output)
        for peer, call_id, message in answers:
            self._peers.answer(peer, call_id, message)
        self._peers.flush()
        self._part(now_s)

    def close(self) -> None:
        """End the threads, say what is still to be said, give back descriptors."""
        self._publication.close()
        self._peers.flush()
        self._peers.close()
        self._listener.close()
        self._doorbell.close()

    def _is_draining(self, until_s: float) -> bool:
        return (self._engine.has_work or bool(self._queue)) and monotonic() < until_s

    def _patience_s(self) -> float:
        if (self._engine.has_work and not self._is_paused) or self._queue:
            return 0.0
        if self._publication.is_busy or any(peer.is_slow for peer in self._peers):
            return BUSY_POLL_S
        return IDLE_POLL_S

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def _receive(self, timeout_s: float) -> None:
        self._poller.poll(int(timeout_s * 1000))
        self._doorbell.clear()
        now_s = monotonic()
        for received in self._listener.drain(DRAIN_MESSAGES):
            self._take(received, now_s, self._handle)
        for received in self._listener.take_requests():
            self._take(received, now_s, self._enqueue)

    def _take(self, received: Received, now_s: float, then: Callable[[Peer, Envelope, float], None]) -> None:
        """Open one frame and act on it; whatever is wrong with it is answered, if it can be."""
        call_id, peer = 0, self._peers.get(received.peer)
        try:
            envelope = CODEC.open(received.frame)
            call_id = envelope.call_id
            if peer is None:
                self._greet(received.peer, envelope, now_s)
                return
            peer.heard_s = now_s
            if not self._peers.is_retry(peer, call_id):
                then(peer, envelope, now_s)
        except UnisonError as error:
            if peer is None:
                self._peers.refuse(received.peer, call_id, failure(error))
            else:
                self._peers.answer(peer, call_id, failure(error))

    def _greet(self, identity: bytes, envelope: Envelope, now_s: float) -> None:
        if envelope.tag == Goodbye.__name__:
            return
        message = CODEC.message(envelope)
        if not isinstance(message, Hello):
            raise HandshakeError(f"{envelope.tag} came before Hello, or this client was dropped; say Hello first")
        peer = self._peers.welcome(identity, message, now_s)
        limits = self._engine.status().max_len
        me = self._identity
        welcome = Welcome(
            me.epoch, me.pid, me.model, self._engine.spec.vocab_size, limits, self._arena.num_buffers,
            self._engine.live_version,
        )  # fmt: skip
        self._peers.answer(peer, envelope.call_id, welcome)

    def _enqueue(self, peer: Peer, envelope: Envelope, now_s: float) -> None:
        if envelope.tag != SubmitRequest.__name__:
            raise WireError(f"{envelope.tag} came on the lane of requests, which is for SubmitRequest alone")
        if self._stop_by_s is not None:
            raise ShuttingDownError("the worker is about to stop and takes no new requests")
        if len(self._queue) >= self._config.max_queued_requests:
            raise CapacityError(
                f"{len(self._queue)} requests are queued, the limit is worker.max_queued_requests; try again later"
            )
        if peer.is_slow:
            raise CapacityError("this client doesn't read its events; read them, then try again")
        self._queue.append((peer, envelope))
        del now_s

    # ---- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, now_s: float) -> None:
        del now_s
        for _ in range(min(len(self._queue), self._config.admit_per_turn)):
            peer, envelope = self._queue.popleft()
            if self._peers.get(peer.identity) is not peer:
                continue
            try:
                message = CODEC.message(envelope)
                self._submit(peer, envelope.call_id, message)
            except UnisonError as error:
                self._peers.answer(peer, envelope.call_id, failure(error))

    def _submit(self, peer: Peer, call_id: int, message: SubmitRequest) -> None:
        request_id = message.request.request_id
        if call_id == 0:
            raise InvalidRequestError("call_id", "is 0; a request needs a call of its own")
        self._engine.submit(message.request)
        self._owners[request_id] = peer
        peer.calls[request_id] = call_id
        if message.stream:
            peer.streamed.add(request_id)
        self._peers.tell(peer, RequestAccepted(request_id))

    # ---- control -----------------------------------------------------------------------------------------------------

    def _handle(self, peer: Peer, envelope: Envelope, now_s: float) -> None:
        message, call_id = CODEC.message(envelope), envelope.call_id
        publication = self._publication
        if isinstance(message, Goodbye):
            self._peers.lose(peer, "it left")
        elif isinstance(message, Ping):
            self._peers.tell(peer, Pong())
        elif isinstance(message, Hello):
            self._greet(peer.identity, envelope, now_s)
        elif isinstance(message, CancelRequest):
            was_in_flight = self._cancel(peer, message.request_id)
            if call_id:
                self._peers.answer(peer, call_id, CancelHandled(was_in_flight))
        elif isinstance(message, ReserveBuffer):
            publication.reserve(peer, call_id, message.wait_s, now_s)
        elif isinstance(message, PublishWeights):
            publication.publish(peer, call_id, message, now_s)
        elif isinstance(message, RollbackPolicy):
            publication.rollback(peer, call_id, message.ordinal, now_s)
        elif isinstance(message, GetStatus):
            self._peers.answer(peer, call_id, self._status(now_s))
        else:
            self._operate(peer, message)
            self._peers.answer(peer, call_id, Acknowledged())

    def _operate(self, peer: Peer, message: Any) -> None:
        """Calls that are done at once and answered with `Acknowledged`."""
        if isinstance(message, PauseGeneration):
            self._is_paused = self._stop_by_s is None
        elif isinstance(message, ResumeGeneration):
            self._is_paused = False
        elif isinstance(message, PinVersion):
            self._engine.pin(message.ordinal)
            peer.pins[message.ordinal] += 1
        elif isinstance(message, UnpinVersion):
            if peer.pins[message.ordinal] == 0:
                raise InvalidRequestError("ordinal", f"is {message.ordinal}, which this client hasn't pinned")
            peer.pins[message.ordinal] -= 1
            self._engine.unpin(message.ordinal)
        elif isinstance(message, ReleaseVersion):
            self._engine.retire(message.ordinal)
        elif isinstance(message, AbandonBuffer):
            self._publication.abandon(peer, message.buffer)
        else:
            raise WireError(f"{type(message).__name__} isn't a message for the worker, or came on the wrong lane")

    def _cancel(self, peer: Peer, request_id: str) -> bool:
        """Abort a running request, or take it out of the queue; only its own client may."""
        if request_id in peer.calls:
            return self._engine.abort(request_id)
        for entry in self._queue:
            owner, envelope = entry
            if owner is peer and _request_id(envelope) == request_id:
                self._queue.remove(entry)
                error = RequestFailedError(f"request {request_id!r} was cancelled before it was admitted", "cancelled")
                self._peers.answer(peer, envelope.call_id, failure(error))
                return True
        return False

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _route(self, output: StepOutput) -> None:
        """Tokens to who streams them, in one message per client and step; results to whom they belong."""
        by_peer: dict[int, tuple[Peer, list[TokenDelta]]] = {}
        for delta in output.deltas:
            peer = self._owners.get(delta.request_id)
            if peer is not None and delta.request_id in peer.streamed:
                by_peer.setdefault(id(peer), (peer, []))[1].append(delta)
        for peer, deltas in by_peer.values():
            self._peers.tell(peer, TokensGenerated(tuple(deltas)))
        for done in output.finished:
            peer = self._owners.pop(done.request_id, None)
            if peer is not None:
                peer.streamed.discard(done.request_id)
                self._peers.answer(peer, peer.calls.pop(done.request_id), RequestFinished(done))

    def _part(self, now_s: float) -> None:
        """Abort what belongs to slow or lost peers, and take back what the lost ones held."""
        self._peers.look_after(now_s)
        for peer in self._peers.take_newly_slow():
            log.warning("client too slow", extra={"role": peer.role, "client_pid": peer.pid})
            for request_id in list(peer.calls):
                self._engine.abort(request_id, ErrorReason.CLIENT_TOO_SLOW)
        for peer in self._peers.take_gone():
            for request_id in list(peer.calls):
                self._owners.pop(request_id, None)
                self._engine.abort(request_id)
            for ordinal, count in peer.pins.items():
                for _ in range(count):
                    self._engine.unpin(ordinal)
            self._publication.forget(peer)

    def _tell_everyone(self, reason: ErrorReason) -> None:
        """One terminal event for each request that is still here (R1)."""
        for peer, envelope in self._queue:
            error = ShuttingDownError("the worker ended before the request was admitted")
            self._peers.answer(peer, envelope.call_id, failure(error))
        self._queue.clear()
        for request_id in list(self._owners):
            self._engine.abort(request_id, reason)
        self._route(self._engine.take_events())
        self._peers.flush()

    # ---- status ------------------------------------------------------------------------------------------------------

    def _status(self, now_s: float) -> Any:
        status = self._gauges.status(self._identity.epoch, self._engine, self._publication.buffer_of, now_s)
        return replace(
            status, is_paused=self._is_paused, is_draining=self._stop_by_s is not None, num_clients=len(self._peers),
            num_queued=len(self._queue),
        )  # fmt: skip


def _request_id(envelope: Envelope) -> Any:
    """The request id inside a request that hasn't been decoded yet; None where there is none."""
    body = envelope.body
    request = body.get("request") if isinstance(body, dict) else None
    return request.get("request_id") if isinstance(request, dict) else None


