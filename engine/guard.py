"""PolicyVersionGuard: which policy versions are installed, which one is live, and who may not be disturbed meanwhile.

Owns: the live and the pending version, the installed ones with their pins, the highest ordinal ever seen, and the
mutual exclusion of generation and weight updates. Knows nothing of tensors: weights are an opaque value that travels
with its label, so that neither can be published without the other. Does no I/O; its only primitive is one condition
variable. Called by the engine (holds, install, rollback), the stepper (flip, take_retired), the scheduler (pins).

Source of the idea that a reader keeps its version alive: read-copy-update (McKenney and Slingwine, 1998).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from threading import Condition, current_thread, get_ident
from typing import Generic, TypeVar

from ..ipc.errors import DeadlineError, InvariantError, StaleVersionError, UnknownVersionError, VersionBusyError
from ..ipc.types import PolicyVersion

W = TypeVar("W")


class VersionState(str, Enum):
    """Where an installed version is in its life (docs/states.md). Derived, never stored."""

    PENDING = "pending"
    """Complete and verified; the next flip makes it live."""
    LIVE = "live"
    """New requests start on it."""
    DRAINING = "draining"
    """Neither live nor pending, but requests are pinned to it."""
    RETAINED = "retained"
    """Was live and nobody reads it now; intact for a rollback until its room is needed."""


@dataclass(frozen=True)
class InstalledVersion:
    """An installed version as the outside sees it; a snapshot."""

    version: PolicyVersion
    """Ordinal and digest."""
    state: VersionState
    """Its state when the snapshot was taken."""
    num_pins: int
    """Requests that read its weights and keep them from being retired."""


@dataclass(frozen=True)
class Flip:
    """The live version changed."""

    old: PolicyVersion
    """Was live until this flip."""
    new: PolicyVersion
    """Is live from this flip on; its ordinal is the smaller one after a rollback."""


@dataclass(eq=False)
class _Entry(Generic[W]):
    """Label and weights of one version, bound together for as long as it is installed."""

    version: PolicyVersion
    """Ordinal and digest."""
    weights: W
    """What the forward reads."""
    num_pins: int = 0
    """Pins taken and not given back."""
    was_live: bool = False
    """True from its first flip on; one that never was live isn't kept for rollback."""


class PolicyVersionGuard(Generic[W]):
    """The version protocol of one engine. Life: built with the first version live → lives as long as the engine.

    Threads: every method may be called from any thread. `flip` is for the thread that steps the engine.

    Invariants:
        V1: the ordinal of a new version is above every ordinal ever installed, also after a rollback.
        V2: the live version changes in `flip` alone, label and weights in one assignment.
        V5: the live version, the pending one and pinned ones are never retired; a refused install changes nothing.
        S8: while a thread holds generation or an update, no other thread's flip changes the live version.
    """

    def __init__(
        self, version: PolicyVersion, weights: W, max_installed: int, lock_timeout_s: float, highest: int = 0
    ) -> None:
        """Start with `version` live. `max_installed` counts the live version; waits give up after `lock_timeout_s`;
        `highest` is the highest ordinal that a guard before this one has seen."""
        self._max_installed = max_installed
        self._lock_timeout_s = lock_timeout_s
        self._live = _Entry(version, weights, was_live=True)
        self._pending: _Entry[W] | None = None
        self._installed = {version.ordinal: self._live}
        self._highest = max(version.ordinal, highest)
        self._retired: list[PolicyVersion] = []
        self._installing: PolicyVersion | None = None

        self._changed = Condition()
        self._waiters: deque[object] = deque()
        self._holder: int | None = None
        self._held_for = ""
        self._depth = 0
        self._num_generation_holds = 0
        self._is_version_fixed = False

    # ---- what is there -----------------------------------------------------------------------------------------------

    @property
    def live(self) -> PolicyVersion:
        """The version that new requests start on."""
        return self._live.version

    @property
    def pending(self) -> PolicyVersion | None:
        """The version that the next flip makes live, also when that is a rollback."""
        pending = self._pending
        return None if pending is None else pending.version

    @property
    def next_ordinal(self) -> int:
        """The lowest ordinal that `install` accepts for a new version."""
        return self._highest + 1

    @property
    def installed(self) -> tuple[InstalledVersion, ...]:
        """Snapshot of every installed version, by ordinal."""
        with self._changed:
            entries = self._installed.values()
            return tuple(InstalledVersion(entry.version, self._state(entry), entry.num_pins) for entry in entries)

    def weights_of(self, ordinal: int) -> W:
        """The weights of an installed version; hold a pin, or the generation, for as long as they are read.

        Raises:
            UnknownVersionError: it isn't installed (any more).
        """
        with self._changed:
            return self._get(ordinal).weights

    # ---- coming and going --------------------------------------------------------------------------------------------

    def install(self, version: PolicyVersion, weights: W, verify: Callable[[W], None] | None = None) -> None:
        """Make `version` pending; it goes live at the next flip, and the old version serves until then.

        `verify` checks layout and digest and raises to refuse; it runs while generation goes on, before any change.
        A pending version is superseded: where it never was live it never will be, and it is retired once unpinned.
        Where there is no room, the oldest version that is neither live nor pinned is retired. Installing the very
        version that is live or pending changes nothing and drops the `weights` given, so that a retried message does
        no harm. A second install at the same time waits for the first; the last to be verified is the pending one.

        Raises:
            StaleVersionError: the ordinal isn't above every one seen, or names another digest than before.
            VersionBusyError: there is no room, or another install took longer than `lock_timeout_s`.
            Whatever `verify` raises. In every case nothing has changed (V5), and the same ordinal may be tried again.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._installing is None, self._lock_timeout_s):
                raise VersionBusyError(
                    f"version {version.ordinal} waited {self._lock_timeout_s} s (versions.lock_timeout_s) for "
                    f"{self._installing} to be verified; try again"
                )
            if self._is_known(version):
                return
            self._check_room(version)
            self._installing = version
        try:
            if verify is not None:
                verify(weights)
            with self._changed:
                self._check_room(version)
                self._add(_Entry(version, weights))
        finally:
            with self._changed:
                self._installing = None
                self._changed.notify_all()

    def rollback(self, ordinal: int) -> None:
        """Have the next flip go back to an installed version; a pending install is superseded.

        For the live version this withdraws what is pending. Ordinals aren't given back: the next install still has to
        exceed the highest ever seen (V1).

        Raises:
            UnknownVersionError: it isn't installed any more, so its weights may have been overwritten; nothing changed.
        """
        with self._changed:
            entry = self._get(ordinal)
            self._set_pending(None if entry is self._live else entry)

    def flip(self) -> Flip | None:
        """Between two steps: make the pending version live; None where the live version stays.

        The only place where the live version changes (V2). A hold of generation lives under one version: its first flip
        fixes that version, and further ones return None until the outermost hold ends. So does a flip while another
        thread holds the guard.
        """
        with self._changed:
            if self._is_version_fixed or self._holder not in (None, get_ident()):
                return None
            self._is_version_fixed = self._num_generation_holds > 0
            if self._pending is None:
                return None
            old, self._live, self._pending = self._live, self._pending, None
            self._live.was_live = True
            return Flip(old.version, self._live.version)

    def pin(self, ordinal: int) -> None:
        """Keep an installed version from being retired until `unpin`; pins are counted.

        Raises:
            UnknownVersionError: it isn't installed (any more).
        """
        with self._changed:
            self._get(ordinal).num_pins += 1

    def unpin(self, ordinal: int) -> None:
        """Give one pin back.

        Raises:
            InvariantError: there is none to give back.
        """
        with self._changed:
            entry = self._installed.get(ordinal)
            if entry is None or entry.num_pins == 0:
                raise InvariantError(f"version {ordinal} is unpinned more often than it was pinned")
            entry.num_pins -= 1
            self._settle(entry)

    def retire(self, ordinal: int) -> None:
        """Give a retained version up now, so that its buffer can be written before the next install asks for room.

        Raises:
            UnknownVersionError: it isn't installed (any more).
            VersionBusyError: it is live, pending or pinned; nothing changed.
        """
        with self._changed:
            entry = self._get(ordinal)
            state = self._state(entry)
            if state is not VersionState.RETAINED:
                raise VersionBusyError(
                    f"version {ordinal} is {state.value} with {entry.num_pins} pins; "
                    "only a retained version can be retired, so wait until it is neither live, pending nor pinned"
                )
            self._retire(entry)

    def take_retired(self) -> tuple[PolicyVersion, ...]:
        """Versions let go since the last call: nobody reads their weights, and their prefix cache serves nobody."""
        with self._changed:
            retired, self._retired = tuple(self._retired), []
            return retired

    # ---- generation and updates exclude each other -------------------------------------------------------------------

    @contextmanager
    def hold_generation(self) -> Iterator[None]:
        """Hold the guard for one step or one synchronous batch, which is a long step: it flips first and then lives
        under one version until it ends (S26). Threads take turns in the order they came; re-entrant in a thread.

        Raises:
            DeadlineError: an update, or another thread's batch, took longer than `lock_timeout_s`.
        """
        with self._changed:
            refusal = self._try_hold("a step or batch")
            if refusal is not None:
                raise DeadlineError(f"generation {refusal}")
            self._num_generation_holds += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_generation_holds -= 1
                if self._num_generation_holds == 0:
                    self._is_version_fixed = False
                self._release()

    @contextmanager
    def exclusive_update(self) -> Iterator[None]:
        """Hold the guard for a whole update: nobody generates inside, so that the check for idleness, the change of
        weights, the flip and what must be forgotten are one critical section (S8). Re-entrant in a thread.

        Raises:
            VersionBusyError: a step, a batch or another update took longer than `lock_timeout_s`, or this thread is
                inside a step or batch itself.
        """
        with self._changed:
            if self._holder == get_ident() and self._num_generation_holds > 0:
                raise VersionBusyError(
                    "this thread is inside a step or batch, which keeps its version; update afterwards"
                )
            refusal = self._try_hold("an update")
            if refusal is not None:
                raise VersionBusyError(f"update {refusal}")
        try:
            yield
        finally:
            with self._changed:
                self._release()

    def _try_hold(self, purpose: str) -> str | None:
        """Take the hold within the deadline, first come, first served; else say why not. The mutex is held."""
        thread = get_ident()
        if self._holder != thread:
            # Without the queue a step loop, which takes the hold again at once, would starve everyone else.
            waiter = object()
            self._waiters.append(waiter)
            try:
                if not self._changed.wait_for(
                    lambda: self._holder is None and self._waiters[0] is waiter, self._lock_timeout_s
                ):
                    holder = self._held_for or "those ahead of it"
                    return f"waited {self._lock_timeout_s} s (versions.lock_timeout_s) for {holder} to end; try again"
                self._holder, self._held_for = thread, f"{purpose} in thread {current_thread().name!r}"
            finally:
                self._waiters.remove(waiter)
                self._changed.notify_all()
        self._depth += 1
        return None

    def _release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder, self._held_for = None, ""
            self._changed.notify_all()

    # ---- inside; the mutex is held -----------------------------------------------------------------------------------

    def _get(self, ordinal: int) -> _Entry[W]:
        entry = self._installed.get(ordinal)
        if entry is None:
            there = ", ".join(map(str, self._installed))
            raise UnknownVersionError(f"version {ordinal} isn't installed (any more); installed are {there}")
        return entry

    def _state(self, entry: _Entry[W]) -> VersionState:
        if entry is self._live:
            return VersionState.LIVE
        if entry is self._pending:
            return VersionState.PENDING
        return VersionState.DRAINING if entry.num_pins else VersionState.RETAINED

    def _is_known(self, version: PolicyVersion) -> bool:
        """True for the very version that is live or pending; raises for any other that isn't above all ordinals."""
        if version.ordinal > self._highest:
            return False
        known = self._installed.get(version.ordinal)
        if known is not None and known.version.digest != version.digest:
            raise StaleVersionError(
                f"ordinal {version.ordinal} belongs to digest {known.version.digest}, not {version.digest}; a version "
                f"never changes its content, so publish under ordinal {self.next_ordinal} or above"
            )
        if known is not None and known in (self._live, self._pending):
            return True
        raise StaleVersionError(
            f"ordinal {version.ordinal} isn't above {self._highest}, the highest seen; publish under ordinal "
            f"{self.next_ordinal} or above, or roll back to a version that is still installed"
        )

    def _check_room(self, version: PolicyVersion) -> None:
        """Raise unless `version` fits, if need be by retiring one that is neither live nor pinned."""
        if len(self._installed) < self._max_installed:
            return
        if not any(entry is not self._live and entry.num_pins == 0 for entry in self._installed.values()):
            pins = ", ".join(f"{ordinal} ({entry.num_pins} pins)" for ordinal, entry in self._installed.items())
            raise VersionBusyError(
                f"version {version.ordinal} finds no room: installed are {pins}, {self._live.version.ordinal} is live; "
                f"the limit is versions.max_installed={self._max_installed}; wait for requests to end, or raise it"
            )

    def _add(self, entry: _Entry[W]) -> None:
        self._installed[entry.version.ordinal] = entry
        self._highest = entry.version.ordinal
        self._set_pending(entry)
        if len(self._installed) > self._max_installed:
            # Entries lie in order of their ordinals, so the first is the oldest.
            self._retire(next(e for e in self._installed.values() if self._state(e) is VersionState.RETAINED))

    def _set_pending(self, entry: _Entry[W] | None) -> None:
        superseded, self._pending = self._pending, entry
        if superseded is not None:
            self._settle(superseded)

    def _settle(self, entry: _Entry[W]) -> None:
        """A version that was superseded before it went live is nothing to roll back to: it goes with its last pin."""
        if self._state(entry) is VersionState.RETAINED and not entry.was_live:
            self._retire(entry)

    def _retire(self, entry: _Entry[W]) -> None:
        del self._installed[entry.version.ordinal]
        self._retired.append(entry.version)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InvariantError where a promise of this class is broken; for tests, after every operation."""
        with self._changed:
            ordinals, entries = list(self._installed), list(self._installed.values())
            retired = {version.ordinal for version in self._retired}
            retained = [entry for entry in entries if self._state(entry) is VersionState.RETAINED]
            _require(ordinals == sorted(entry.version.ordinal for entry in entries), "versions are out of order")
            _require(self._live in entries and self._live.was_live, "the live version isn't installed")
            _require(self._pending is None or self._pending in entries, "the pending version isn't installed")
            _require(self._pending is not self._live, "the live version is pending")
            _require(len(entries) <= self._max_installed, "more versions are installed than there is room for")
            _require(self._highest >= ordinals[-1], "an installed ordinal is above the highest seen")
            _require(all(entry.num_pins >= 0 for entry in entries), "a version has negative pins")
            _require(all(entry.was_live for entry in retained), "a version that never was live is kept for rollback")
            _require(not retired & set(ordinals), "a retired version is installed")
            _require((self._holder is None) == (self._depth == 0), "a hold has no holder, or a holder no hold")
            _require(0 <= self._num_generation_holds <= self._depth, "generation is held more often than the guard")
            _require(self._num_generation_holds > 0 or not self._is_version_fixed, "a version is fixed for nobody")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)
