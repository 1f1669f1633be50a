"""PolicyVersionGuard against a simple model, under random installs, rollbacks, flips, pins and holds."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from harness.examples import num_examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from unison.engine.guard import Flip, PolicyVersionGuard
from unison.ipc.errors import (
    DigestMismatchError,
    InvariantError,
    StaleVersionError,
    UnknownVersionError,
    VersionBusyError,
)
from unison.ipc.types import PolicyVersion

ORDINALS = st.integers(0, 40)


@dataclass
class Copy:
    """What the model knows of an installed version."""

    version: PolicyVersion
    weights: bytearray
    """Overwritten once the guard lets go, as a trainer would do; nobody may see that."""
    pins: int = 0
    was_live: bool = False


class GuardMachine(RuleBasedStateMachine):
    """V1, V2, V3, V4, V5, S2, S8, S26, P09, P13, P29, P38: the guard and the model agree after every step."""

    @initialize(max_installed=st.integers(1, 4))
    def build(self, max_installed: int) -> None:
        first = Copy(PolicyVersion(0, "d0"), bytearray(b"0"), was_live=True)
        self.guard = PolicyVersionGuard(first.version, first.weights, max_installed, 10.0)
        self.max_installed = max_installed
        self.copies = {0: first}
        self.live, self.highest = 0, 0
        self.pending: int | None = None
        self.retired: list[PolicyVersion] = []
        self.holds: list[ExitStack] = []
        self.is_fixed = False
        self.batch_version: PolicyVersion | None = None

    # ---- the model ---------------------------------------------------------------------------------------------------

    def supersede(self, pending: int | None) -> None:
        self.pending = pending
        for copy in list(self.copies.values()):
            self.let_go_of_orphan(copy)

    def let_go_of_orphan(self, copy: Copy) -> None:
        ordinal = copy.version.ordinal
        if ordinal not in (self.live, self.pending) and not copy.pins and not copy.was_live:
            self.let_go(ordinal)

    def let_go(self, ordinal: int) -> None:
        copy = self.copies.pop(ordinal)
        self.retired.append(copy.version)

    def idle(self) -> list[int]:
        in_use = (self.live, self.pending)
        return sorted(ordinal for ordinal, copy in self.copies.items() if ordinal not in in_use and not copy.pins)

    def has_room(self) -> bool:
        is_free = any(ordinal != self.live and not copy.pins for ordinal, copy in self.copies.items())
        return len(self.copies) < self.max_installed or is_free

    # ---- installs ----------------------------------------------------------------------------------------------------

    @rule(gap=st.integers(1, 3))
    def install(self, gap: int) -> None:
        ordinal = self.highest + gap
        copy = Copy(PolicyVersion(ordinal, f"d{ordinal}"), bytearray(str(ordinal).encode()))
        if not self.has_room():
            with pytest.raises(VersionBusyError):
                self.guard.install(copy.version, copy.weights)
            return
        self.guard.install(copy.version, copy.weights, lambda weights: None)
        self.copies[ordinal], self.highest = copy, ordinal
        self.supersede(ordinal)
        if len(self.copies) > self.max_installed:
            self.let_go(self.idle()[0])

    @rule(gap=st.integers(1, 3))
    def install_broken(self, gap: int) -> None:
        """V5, P13: the invariants below see that nothing has changed."""

        def refuse(_: bytearray) -> None:
            raise DigestMismatchError("half-written")

        expected = DigestMismatchError if self.has_room() else VersionBusyError
        with pytest.raises(expected):
            self.guard.install(PolicyVersion(self.highest + gap, "half"), bytearray(b"half"), refuse)

    @rule(ordinal=ORDINALS)
    def install_old(self, ordinal: int) -> None:
        """V1, P29: an ordinal that was seen is quiet for what is live or pending, and refused for all else."""
        if ordinal > self.highest:
            return
        version = PolicyVersion(ordinal, f"d{ordinal}")
        if ordinal in (self.live, self.pending):
            self.guard.install(version, bytearray(b"second copy"))
        else:
            with pytest.raises(StaleVersionError):
                self.guard.install(version, bytearray(b"old"))
        with pytest.raises(StaleVersionError):
            self.guard.install(PolicyVersion(ordinal, "forged"), bytearray(b"forged"))

    # ---- the live version --------------------------------------------------------------------------------------------

    @rule(ordinal=ORDINALS)
    def rollback(self, ordinal: int) -> None:
        if ordinal not in self.copies:
            with pytest.raises(UnknownVersionError):
                self.guard.rollback(ordinal)
            return
        self.guard.rollback(ordinal)
        self.supersede(None if ordinal == self.live else ordinal)

    @rule()
    def flip(self) -> None:
        """V2: the only rule in which the model's live version changes."""
        flip = self.guard.flip()
        if self.is_fixed or self.pending is None:
            assert flip is None
        else:
            old, new = self.copies[self.live], self.copies[self.pending]
            assert flip == Flip(old.version, new.version)
            self.live, self.pending, new.was_live = new.version.ordinal, None, True
        if self.holds and not self.is_fixed:
            self.is_fixed, self.batch_version = True, self.guard.live

    @rule()
    def hold(self) -> None:
        stack = ExitStack()
        stack.enter_context(self.guard.hold_generation())
        self.holds.append(stack)

    @precondition(lambda self: self.holds)
    @rule()
    def let_go_of_hold(self) -> None:
        self.holds.pop().close()
        if not self.holds:
            self.is_fixed, self.batch_version = False, None

    @rule()
    def update(self) -> None:
        """S26: inside a batch refused; outside it changes nothing by itself."""
        if self.holds:
            with pytest.raises(VersionBusyError), self.guard.exclusive_update():
                pass
        else:
            with self.guard.exclusive_update():
                self.guard.check_invariants()

    # ---- pins --------------------------------------------------------------------------------------------------------

    @rule(ordinal=ORDINALS)
    def pin(self, ordinal: int) -> None:
        if ordinal not in self.copies:
            with pytest.raises(UnknownVersionError):
                self.guard.pin(ordinal)
            return
        self.guard.pin(ordinal)
        self.copies[ordinal].pins += 1

    @rule()
    def pin_pending(self) -> None:
        if self.pending is not None:
            self.pin(self.pending)

    @rule(ordinal=ORDINALS)
    def unpin(self, ordinal: int) -> None:
        copy = self.copies.get(ordinal)
        if copy is None or not copy.pins:
            with pytest.raises(InvariantError):
                self.guard.unpin(ordinal)
            return
        self.guard.unpin(ordinal)
        copy.pins -= 1
        self.let_go_of_orphan(copy)

    @rule()
    def unpin_oldest(self) -> None:
        pinned = [ordinal for ordinal, copy in self.copies.items() if copy.pins]
        if pinned:
            self.unpin(min(pinned))

    @rule(ordinal=ORDINALS)
    def retire(self, ordinal: int) -> None:
        if ordinal in self.idle():
            self.guard.retire(ordinal)
            self.let_go(ordinal)
        else:
            with pytest.raises(VersionBusyError if ordinal in self.copies else UnknownVersionError):
                self.guard.retire(ordinal)

    @rule()
    def take_retired(self) -> None:
        """V2, V5: what was let go may be written over at once."""
        taken = self.guard.take_retired()
        assert taken == tuple(self.retired)
        assert not {version.ordinal for version in taken} & {self.live, self.pending}
        self.retired.clear()

    # ---- what must always hold ---------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        guard = self.guard
        guard.check_invariants()
        assert guard.live == self.copies[self.live].version
        assert guard.pending == (None if self.pending is None else self.copies[self.pending].version)
        assert guard.next_ordinal == self.highest + 1
        assert self.batch_version in (None, guard.live)
        installed = {entry.version: (entry.state.value, entry.num_pins) for entry in guard.installed}
        assert installed == {copy.version: (self.state(copy), copy.pins) for copy in self.copies.values()}

    @invariant()
    def label_and_weights_belong_together(self) -> None:
        """V3, P09: every installed label leads to its own weights, the very object that was handed in."""
        for ordinal, copy in self.copies.items():
            assert self.guard.weights_of(ordinal) is copy.weights
            assert copy.weights == str(ordinal).encode()

    def state(self, copy: Copy) -> str:
        ordinal = copy.version.ordinal
        if ordinal == self.live:
            return "live"
        if ordinal == self.pending:
            return "pending"
        return "draining" if copy.pins else "retained"

    def teardown(self) -> None:
        while getattr(self, "holds", None):
            self.holds.pop().close()
        if hasattr(self, "guard"):
            with self.guard.exclusive_update():
                self.guard.check_invariants()


TestGuardMachine = GuardMachine.TestCase
TestGuardMachine.settings = settings(max_examples=num_examples(150), stateful_step_count=70, deadline=None)
