"""Peers: who is connected to the worker, what each holds here, and what still has to be told to each.

A peer is welcomed once it has shown the run's token and the same schema. What it holds (requests, pins, a reservation)
is given back when it leaves, dies (its pidfd becomes readable), falls silent or can't be reached. Every call acts once:
a call id that was seen before gets its former answer again, if that is there already.

A peer that doesn't read is slow: its requests are aborted, their terminal events wait here, bounded, until it reads
again, and everybody else goes on (R1). Owns: the peers and their outgoing messages. Knows nothing of the engine.
Called by the worker's loop, in its thread.
"""

from __future__ import annotations

import hmac
import logging
import os
import select
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...ipc.channel import Delivery, Listener
from ...ipc.errors import HandshakeError, RequestFailedError
from ...ipc.messages import CODEC, Failed, Hello, failure

log = logging.getLogger(__name__)

MAX_BACKLOG = 10_000
"""Messages that wait for a slow peer; one that needs more is dropped."""
MAX_ANSWERS, MAX_ANSWER_BYTES = 1024, 16 << 20
"""Calls that are remembered per peer, so that a retried one acts once (P2), and bytes that their answers may take
together; an older answer is replaced by one that says so."""


@dataclass(eq=False)
class Peer:
    """One connected client."""

    identity: bytes
    """Routing id on the channel."""
    role: str
    """What it said it is."""
    pid: int
    """Its process."""
    pidfd: int
    """Readable when the process has ended; -1 where it can't be watched (another machine)."""
    heard_s: float
    """When it last said something."""
    calls: dict[str, int] = field(default_factory=dict)
    """Call id by request id, of its requests in flight."""
    streamed: set[str] = field(default_factory=set)
    """Request ids whose tokens are reported as they come."""
    pins: Counter[int] = field(default_factory=Counter)
    """Pins per version."""
    answers: OrderedDict[int, bytes | None] = field(default_factory=OrderedDict)
    """Frame of the last answer by call id; None while there is none yet."""
    backlog: deque[bytes] = field(default_factory=deque)
    """Frames that found the queue full."""

    num_answer_bytes: int = 0
    """Bytes of all remembered answers."""

    def remember(self, call_id: int, frame: bytes) -> None:
        """Keep an answer for a retry of its call; the oldest ones make room."""
        self.answers[call_id] = frame
        self.num_answer_bytes += len(frame)
        for old in self.answers:
            if self.num_answer_bytes <= MAX_ANSWER_BYTES:
                return
            known = self.answers[old]
            if known is not None:
                gone = RequestFailedError("the call was carried out; its answer isn't kept any more", "internal")
                self.answers[old] = CODEC.encode(old, failure(gone))
                self.num_answer_bytes += len(self.answers[old] or b"") - len(known)

    @property
    def is_slow(self) -> bool:
        """True while something couldn't be sent."""
        return bool(self.backlog)

    @property
    def name(self) -> str:
        """For logs and error texts."""
        return f"{self.role} {self.pid}"


class Peers:
    """All peers of one worker. Invariant: a peer that is gone holds nothing here; `forget` hands back what it held."""

    def __init__(self, listener: Listener, token: str, epoch: str, silence_s: float) -> None:
        self._listener = listener
        self._token = token
        self._epoch = epoch
        self._silence_s = silence_s
        self._by_identity: dict[bytes, Peer] = {}
        self._gone: list[Peer] = []
        self._newly_slow: list[Peer] = []

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_identity.values()))

    def get(self, identity: bytes) -> Peer | None:
        """The peer behind a routing id, if it was welcomed."""
        return self._by_identity.get(identity)

    def welcome(self, identity: bytes, hello: Hello, now_s: float) -> Peer:
        """Take a peer in.

        Raises:
            HandshakeError: wrong token, schema or epoch.
        """
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise HandshakeError("the token isn't this run's; read the address file of the run directory again")
        if hello.schema != CODEC.schema_digest:
            raise HandshakeError(
                f"the client speaks schema {hello.schema:.40}, this worker {CODEC.schema_digest}; "
                "use the same version of unison on both sides"
            )
        if hello.epoch != self._epoch:
            raise HandshakeError(f"the client looks for epoch {hello.epoch:.40}, this worker's is {self._epoch}")
        known = self._by_identity.get(identity)
        if known is not None:
            return known
        peer = Peer(identity, hello.role, hello.pid, _watch(hello.pid), now_s)
        self._by_identity[identity] = peer
        log.info("client connected", extra={"role": peer.role, "client_pid": peer.pid})
        return peer

    def is_retry(self, peer: Peer, call_id: int) -> bool:
        """True for a call that was seen before; what is known of its answer is sent again."""
        if call_id == 0:
            return False
        if call_id not in peer.answers:
            peer.answers[call_id] = None
            while len(peer.answers) > MAX_ANSWERS:
                _, forgotten = peer.answers.popitem(last=False)
                peer.num_answer_bytes -= len(forgotten or b"")
            return False
        frame = peer.answers[call_id]
        if frame is not None:
            self._push(peer, frame)
        return True

    def answer(self, peer: Peer, call_id: int, message: Any) -> None:
        """Send an answer, and remember it for a retry of the call."""
        frame = CODEC.encode(call_id, message)
        if call_id in peer.answers:
            peer.remember(call_id, frame)
        self._push(peer, frame)

    def tell(self, peer: Peer, message: Any) -> None:
        """Send something that may be lost on a slow peer: tokens, which its final result repeats."""
        if not peer.is_slow:
            self._push(peer, CODEC.encode(0, message), keep=False)

    def refuse(self, identity: bytes, call_id: int, error: Failed) -> None:
        """Answer someone who isn't welcomed; dropped where it doesn't read."""
        self._listener.send(identity, call_id, error)

    def flush(self) -> None:
        """Try again what waits for slow peers."""
        for peer in self:
            while peer.backlog:
                delivery = self._listener.send_frame(peer.identity, peer.backlog[0])
                if delivery is Delivery.FULL:
                    break
                if delivery is Delivery.GONE:
                    self.lose(peer, "its connection is gone")
                    break
                peer.backlog.popleft()

    def look_after(self, now_s: float) -> None:
        """Lose who has said nothing for too long and can't be watched, or has died."""
        for peer in self:
            if peer.pidfd >= 0 and _has_ended(peer.pidfd):
                self.lose(peer, "its process ended")
            elif now_s - peer.heard_s > self._silence_s:
                self.lose(peer, f"it said nothing for {self._silence_s} s")

    def lose(self, peer: Peer, reason: str) -> None:
        """The peer is gone; `take_gone` hands it over with what it held."""
        if self._by_identity.pop(peer.identity, None) is None:
            return
        if peer.pidfd >= 0:
            os.close(peer.pidfd)
        log.info("client lost", extra={"role": peer.role, "client_pid": peer.pid, "reason": reason})
        peer.backlog.clear()
        self._gone.append(peer)
        if not reason.startswith("it left"):
            self._listener.send(peer.identity, 0, failure(HandshakeError(f"dropped: {reason}; say Hello again")))

    def take_gone(self) -> list[Peer]:
        """Peers lost since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def take_newly_slow(self) -> list[Peer]:
        """Peers that became slow since the last call."""
        slow, self._newly_slow = self._newly_slow, []
        return slow

    def close(self) -> None:
        """Let go of every pidfd."""
        for peer in self:
            self.lose(peer, "it left: the worker ends")

    def _push(self, peer: Peer, frame: bytes, keep: bool = True) -> None:
        delivery = Delivery.FULL if peer.backlog else self._listener.send_frame(peer.identity, frame)
        if delivery is Delivery.GONE:
            self.lose(peer, "its connection is gone")
        elif delivery is Delivery.FULL:
            if not peer.backlog:
                self._newly_slow.append(peer)
            if keep:
                peer.backlog.append(frame)
            if len(peer.backlog) > MAX_BACKLOG:
                self.lose(peer, f"{MAX_BACKLOG} messages wait for it and it doesn't read")


def _watch(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError):  # another machine, another pid namespace, or gone already: silence will tell
        return -1


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])
