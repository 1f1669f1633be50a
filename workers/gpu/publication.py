"""Publication: a new version's way from a reserved buffer to the live one, while generation goes on (V1, V2, V5).

reserve → (the publisher writes and seals) → publish → verified in a thread of its own → pending in the engine's
guard → live between two steps. The engine holds a shared lock on every buffer whose version is installed; the lock goes
when the guard has retired the version, so no forward ever reads a buffer that may be written.

Owns: which buffer holds which version, the one reservation, the calls that wait. Knows nothing of sockets: answers go
out as (peer, call id, message). Called by the worker's loop; only `_verify` runs in the other thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ...engine.engine import Engine
from ...engine.guard import VersionState
from ...ipc.arena.arena import WeightArena
from ...ipc.errors import (
    ArenaError,
    InvalidRequestError,
    StaleVersionError,
    UnisonError,
    VersionBusyError,
    VersionError,
)
from ...ipc.messages import BufferReserved, PublishWeights, WeightsLive, failure
from ...ipc.types import PolicyVersion
from .peers import Peer

log = logging.getLogger(__name__)

Answer = tuple[Peer, int, Any]
MAX_ORDINAL = 2**53
"""Ordinals stay exact in JSON, and far from where an integer of the wire ends."""
MAX_WAIT_S = 86_400.0
"""Longest wait for a buffer."""


@dataclass
class _Reservation:
    """A buffer promised to a publisher."""

    peer: Peer
    """Whose it is."""
    buffer: int
    """Which one."""


@dataclass(frozen=True)
class _Wish:
    """A call that waits for a buffer."""

    peer: Peer
    """Who asked."""
    call_id: int
    """Its call."""
    until_s: float
    """When it is refused."""


@dataclass(frozen=True)
class _Update:
    """A call that waits for a version to be live."""

    peer: Peer
    """Who asked."""
    call_id: int
    """Its call."""
    version: PolicyVersion
    """What shall be live."""
    since_s: float
    """When the message came."""


@dataclass(frozen=True)
class _Verification:
    """A buffer whose bytes are being hashed."""

    future: Future[PolicyVersion]
    """Done when the guard has taken the version in, or refused it."""
    version: PolicyVersion
    """What was announced."""
    buffer: int
    """Where it lies."""


class Publication:
    """Reservations, verification and flips of one worker. One thread, but for the hashing."""

    def __init__(self, engine: Engine, arena: WeightArena, views: Callable[[int], Any], wake: Callable[[], None]):
        """`views` gives the engine's tensors of a buffer; `wake` is called when the hashing is done."""
        self._engine = engine
        self._arena = arena
        self._views = views
        self._wake = wake
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unison-verify")
        live = arena.header.live_buffer
        assert live is not None
        self._buffer_by_version = {engine.live_version.ordinal: live}
        self._reservation: _Reservation | None = None
        self._verification: _Verification | None = None
        self._wishes: list[_Wish] = []
        self._updates: list[_Update] = []
        self._live = engine.live_version

    def buffer_of(self, ordinal: int) -> int:
        """The buffer of an installed version."""
        return self._buffer_by_version[ordinal]

    @property
    def is_busy(self) -> bool:
        """True while a call waits for something that `settle` may bring."""
        return bool(self._wishes or self._updates or self._verification)

    # ---- what clients ask --------------------------------------------------------------------------------------------

    def reserve(self, peer: Peer, call_id: int, wait_s: float, now_s: float) -> None:
        """Queue the wish; `settle` answers it, at the latest when `wait_s` is over."""
        self._wishes.append(_Wish(peer, call_id, now_s + min(max(0.0, wait_s), MAX_WAIT_S)))

    def abandon(self, peer: Peer, buffer: int) -> None:
        """Give a reservation back.

        Raises:
            ArenaError: it isn't this peer's.
        """
        self._owned(peer, buffer)
        self._reservation = None

    def publish(self, peer: Peer, call_id: int, message: PublishWeights, now_s: float) -> None:
        """Start the verification of a sealed buffer; the answer comes from `settle`.

        Raises:
            ArenaError: the buffer isn't reserved by this peer. StaleVersionError: the ordinal doesn't grow.
        """
        update = _Update(peer, call_id, message.version, now_s)
        verification = self._verification
        if message.version == self._live or (verification is not None and verification.version == message.version):
            self._updates.append(update)  # the same message once more (P29)
            return
        self._owned(peer, message.buffer)
        if message.version.ordinal > MAX_ORDINAL:
            raise InvalidRequestError("version", f"has ordinal {message.version.ordinal}; the highest is {MAX_ORDINAL}")
        if message.version.ordinal < self._engine.next_ordinal:
            raise StaleVersionError(
                f"ordinal {message.version.ordinal} isn't above every one seen; publish under "
                f"{self._engine.next_ordinal} or above"
            )
        self._arena.hold(message.buffer)
        self._updates.append(update)
        self._reservation = None
        future = self._pool.submit(self._verify, message)
        self._verification = _Verification(future, message.version, message.buffer)
        future.add_done_callback(lambda _: self._wake())

    def rollback(self, peer: Peer, call_id: int, ordinal: int, now_s: float) -> None:
        """Have the next flip go back to an installed version; `settle` answers when it is live.

        Raises:
            UnknownVersionError: it isn't installed any more.
        """
        self._engine.rollback(ordinal)
        version = next(item.version for item in self._engine.versions if item.version.ordinal == ordinal)
        self._updates.append(_Update(peer, call_id, version, now_s))

    def forget(self, peer: Peer) -> None:
        """The peer is gone: its reservation and its waiting calls too; a version that it published goes its way."""
        if self._reservation is not None and self._reservation.peer is peer:
            self._reservation = None
        self._wishes = [wish for wish in self._wishes if wish.peer is not peer]
        self._updates = [update for update in self._updates if update.peer is not peer]

    # ---- between two steps -------------------------------------------------------------------------------------------

    def settle(self, now_s: float) -> list[Answer]:
        """Bring arena and guard together after a step, and answer whom that concerns."""
        answers = self._finish_verification()
        self._follow_guard()
        answers += self._answer_updates(now_s)
        answers += self._grant(now_s)
        return answers

    def close(self) -> None:
        """Wait for the hashing thread."""
        self._pool.shutdown(wait=True)

    def _verify(self, message: PublishWeights) -> PolicyVersion:
        with self._arena.buffers.aside():
            return self._engine.install(self._views(message.buffer), message.version.ordinal, message.manifest)

    def _finish_verification(self) -> list[Answer]:
        verification = self._verification
        if verification is None:
            return []
        # The guard may have it, and have flipped to it, a moment before the thread's own result is set.
        is_installed = any(item.version == verification.version for item in self._engine.versions)
        if not is_installed and not verification.future.done():
            return []
        self._verification = None
        error = verification.future.exception(timeout=60)
        if error is None:
            self._buffer_by_version[verification.version.ordinal] = verification.buffer
            self._arena.header.raise_ordinal(verification.version.ordinal)
            return []
        if not isinstance(error, UnisonError):
            raise error
        self._arena.drop(verification.buffer)
        log.warning("version refused", extra={"ordinal": verification.version.ordinal, "reason": str(error)})
        return self._take_updates(verification.version, failure(error))

    def _follow_guard(self) -> None:
        """The header says what the guard says: which version is live, and which buffers nobody reads any more."""
        live = self._engine.live_version
        if live != self._live:
            self._live = live
            self._arena.set_live(self._buffer_by_version[live.ordinal])
            log.info("version live", extra={"ordinal": live.ordinal, "digest": live.digest})
        installed = {item.version.ordinal for item in self._engine.versions}
        for ordinal in [known for known in self._buffer_by_version if known not in installed]:
            self._arena.drop(self._buffer_by_version.pop(ordinal))

    def _answer_updates(self, now_s: float) -> list[Answer]:
        """Versions that are live, and versions that never will be because another superseded them."""
        answers: list[Answer] = []
        awaited = {update.version for update in self._updates}
        installed = {item.version for item in self._engine.versions}
        for version in awaited:
            if version == self._live:
                step = self._engine.stats().num_steps
                waited = [update for update in self._updates if update.version == version]
                answers += [
                    (update.peer, update.call_id, WeightsLive(version, step, now_s - update.since_s))
                    for update in waited
                ]
                self._take_updates(version, None)
            elif version not in installed and (self._verification is None or self._verification.version != version):
                error = VersionError(
                    f"version {version.ordinal} was superseded by version {self._live.ordinal} before it went live"
                )
                answers += self._take_updates(version, failure(error))
        return answers

    def _take_updates(self, version: PolicyVersion, message: Any) -> list[Answer]:
        taken = [update for update in self._updates if update.version == version]
        self._updates = [update for update in self._updates if update.version != version]
        return [(update.peer, update.call_id, message) for update in taken]

    def _grant(self, now_s: float) -> list[Answer]:
        answers: list[Answer] = []
        while self._wishes and self._reservation is None and self._verification is None:
            buffer = self._free_buffer()
            if buffer is None:
                break
            wish = self._wishes.pop(0)
            self._reservation = _Reservation(wish.peer, buffer)
            answers.append((wish.peer, wish.call_id, BufferReserved(buffer, self._engine.next_ordinal)))
        for wish in [wish for wish in self._wishes if now_s >= wish.until_s]:
            self._wishes.remove(wish)
            answers.append((wish.peer, wish.call_id, failure(VersionBusyError(self._why_busy()))))
        return answers

    def _free_buffer(self) -> int | None:
        """A buffer that nobody reads or writes; where there is none, a version kept only for rollback makes room."""
        used = set(self._buffer_by_version.values())
        free = [
            buffer
            for buffer in range(self._arena.num_buffers)
            if buffer not in used and not self._arena.locks.is_held_by_others(buffer)
        ]
        if free:
            return free[0]
        if len(used) < self._arena.num_buffers:
            return None  # one is free here, but a former publisher still has it locked
        retained = [item.version.ordinal for item in self._engine.versions if item.state is VersionState.RETAINED]
        if not retained:
            return None
        self._engine.retire(retained[0])
        self._engine.flip()
        self._follow_guard()
        return self._free_buffer()

    def _why_busy(self) -> str:
        if self._reservation is not None:
            return f"buffer {self._reservation.buffer} is reserved by {self._reservation.peer.name}; try again later"
        if self._verification is not None:
            return f"version {self._verification.version.ordinal} is being verified; try again"
        pins = ", ".join(f"{item.version.ordinal} ({item.state.value}, {item.num_pins} pins)" for item in
                         self._engine.versions)  # fmt: skip
        return (
            f"all {self._arena.num_buffers} buffers are in use by versions {pins}; wait for their requests to end, "
            "unpin versions, or use a third buffer (num_buffers)"
        )

    def _owned(self, peer: Peer, buffer: int) -> None:
        if self._reservation is None or self._reservation.peer is not peer or self._reservation.buffer != buffer:
            raise ArenaError(f"buffer {buffer} isn't reserved by this client; reserve one before writing or publishing")
