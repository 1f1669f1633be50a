"""PolicyVersionGuard alone: the version protocol, and generation and updates excluding one another."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager

import pytest
from unison.engine.guard import Flip, InstalledVersion, PolicyVersionGuard, VersionState
from unison.ipc.errors import (
    DeadlineError,
    DigestMismatchError,
    InvariantError,
    StaleVersionError,
    UnknownVersionError,
    VersionBusyError,
)
from unison.ipc.types import PolicyVersion

DEADLINE_S = 20.0
"""For everything that must happen; a test that reaches it fails."""
SHORT_S = 0.02
"""For everything that must not happen."""


def _version(ordinal: int, digest: str | None = None) -> PolicyVersion:
    return PolicyVersion(ordinal, digest or f"digest-{ordinal}")


def _guard(max_installed: int = 2, lock_timeout_s: float = DEADLINE_S) -> PolicyVersionGuard[str]:
    return PolicyVersionGuard(_version(0), "weights-0", max_installed, lock_timeout_s)


def _install(guard: PolicyVersionGuard[str], ordinal: int, digest: str | None = None) -> None:
    guard.install(_version(ordinal, digest), f"weights-{ordinal}")
    guard.check_invariants()


def _install_and_flip(guard: PolicyVersionGuard[str], ordinal: int) -> None:
    _install(guard, ordinal)
    assert guard.flip() is not None


def _states(guard: PolicyVersionGuard[str]) -> dict[int, str]:
    return {installed.version.ordinal: installed.state.value for installed in guard.installed}


def _picture(guard: PolicyVersionGuard[str]) -> tuple[object, ...]:
    """All that the outside can see, except for what `take_retired` would consume."""
    weights = [guard.weights_of(installed.version.ordinal) for installed in guard.installed]
    return guard.live, guard.pending, guard.installed, weights, guard.next_ordinal


def _refuse(_: str) -> None:
    raise DigestMismatchError("the bytes differ", ("lm_head.weight",))


class _Holder:
    """A thread that holds the guard until it is told to let go."""

    def __init__(self, hold: Callable[[], AbstractContextManager[None]]) -> None:
        self._hold = hold
        self._entered, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="holder")

    def _run(self) -> None:
        with self._hold():
            self._entered.set()
            assert self._leave.wait(DEADLINE_S)

    def __enter__(self) -> _Holder:
        self._thread.start()
        assert self._entered.wait(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


# ---- install and flip ------------------------------------------------------------------------------------------------


def test_first_version_is_live() -> None:
    """S2: the guard works alone, with any weights and without an engine."""
    guard = _guard()
    assert (guard.live, guard.pending, guard.next_ordinal) == (_version(0), None, 1)
    assert guard.installed == (InstalledVersion(_version(0), VersionState.LIVE, 0),)
    assert guard.weights_of(0) == "weights-0"
    assert guard.flip() is None
    guard.check_invariants()


def test_install_waits_for_the_flip() -> None:
    """V2, P09: label and weights go live together, at the flip and not before."""
    guard = _guard()
    _install(guard, 1)
    assert (guard.live, guard.pending) == (_version(0), _version(1))
    assert _states(guard) == {0: "live", 1: "pending"}
    assert guard.flip() == Flip(_version(0), _version(1))
    assert (guard.live, guard.pending) == (_version(1), None)
    assert guard.weights_of(guard.live.ordinal) == "weights-1"
    assert _states(guard) == {0: "retained", 1: "live"}
    assert guard.flip() is None


@pytest.mark.parametrize("ordinal", [0, 1, 2, 3])
def test_ordinal_must_grow(ordinal: int) -> None:
    """V1, S26: an ordinal at or below the highest one seen is refused, also where that one is only pending."""
    guard = _guard(max_installed=3)
    _install_and_flip(guard, 2)
    _install(guard, 3)
    before = _picture(guard)
    with pytest.raises(StaleVersionError, match="publish under ordinal 4"):
        guard.install(_version(ordinal, "another"), "other weights")
    assert _picture(guard) == before


def test_gone_ordinals_stay_used() -> None:
    """V1: a version that was retired isn't installed under its ordinal again."""
    guard = _guard()
    _install_and_flip(guard, 1)
    _install_and_flip(guard, 2)
    assert guard.take_retired() == (_version(0),)
    with pytest.raises(StaleVersionError):
        guard.install(_version(0), "weights-0")


@pytest.mark.parametrize("goes_live", [False, True])
def test_retried_install_is_quiet(goes_live: bool) -> None:
    """P29, P38: the same version once more, pending or live, changes nothing, and the first weights stay."""
    guard = _guard()
    _install(guard, 1)
    if goes_live:
        guard.flip()
    before = _picture(guard)
    guard.install(_version(1), "a second copy", _refuse)
    assert _picture(guard) == before
    assert guard.take_retired() == ()


def test_same_ordinal_with_other_digest() -> None:
    """V1, P09: one ordinal never names two contents."""
    guard = _guard()
    _install(guard, 1)
    before = _picture(guard)
    with pytest.raises(StaleVersionError, match="belongs to digest digest-1, not forged"):
        guard.install(_version(1, "forged"), "other weights")
    assert _picture(guard) == before


@pytest.mark.parametrize("with_pending", [False, True])
@pytest.mark.parametrize("error", [DigestMismatchError("differs"), MemoryError(), KeyboardInterrupt()])
def test_failed_verification_changes_nothing(with_pending: bool, error: BaseException) -> None:
    """V5, P13: the old version serves on, nothing was retired for the failed one, and its ordinal is still free."""
    guard = _guard(max_installed=3)
    _install_and_flip(guard, 1)
    if with_pending:
        _install(guard, 2)
    before = _picture(guard)

    def verify(weights: str) -> None:
        assert weights == "weights-5"
        raise error

    with pytest.raises(type(error)):
        guard.install(_version(5), "weights-5", verify)
    assert _picture(guard) == before
    assert guard.take_retired() == ()
    guard.check_invariants()
    _install(guard, 5)
    assert guard.pending == _version(5)


def test_generation_goes_on_during_verification() -> None:
    """V5, P13: while a version is verified others are read, pinned, flipped; it isn't there before it is complete."""
    guard = _guard(max_installed=3)
    _install(guard, 1)

    def verify(_: str) -> None:
        with guard.hold_generation():
            assert guard.flip() == Flip(_version(0), _version(1))
            guard.pin(1)
        assert 2 not in _states(guard)
        guard.check_invariants()

    guard.install(_version(2), "weights-2", verify)
    assert _states(guard) == {0: "retained", 1: "live", 2: "pending"}


def test_room_lost_during_verification() -> None:
    """V5: a version that was pinned while the next one was verified isn't retired for it."""
    guard = _guard()
    _install_and_flip(guard, 1)
    with pytest.raises(VersionBusyError):
        guard.install(_version(2), "weights-2", lambda _: guard.pin(0))
    assert _states(guard) == {0: "draining", 1: "live"}
    assert guard.next_ordinal == 2


def test_concurrent_installs_take_turns() -> None:
    """P38: a second install waits for the first; a retry of the same version then finds it there."""
    guard = _guard(max_installed=3)
    verifying, go_on = threading.Event(), threading.Event()

    def verify(_: str) -> None:
        verifying.set()
        assert go_on.wait(DEADLINE_S)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(guard.install, _version(1), "first", verify)
        assert verifying.wait(DEADLINE_S)
        retry = pool.submit(guard.install, _version(1), "retry", _refuse)
        assert not _ends_within(retry, SHORT_S)
        go_on.set()
        first.result(DEADLINE_S)
        retry.result(DEADLINE_S)
    assert guard.weights_of(1) == "first"


def test_install_gives_up_on_a_stuck_one() -> None:
    """P2, P38: the wait for another install ends, says what for, and leaves the guard usable."""
    guard = _guard(lock_timeout_s=SHORT_S)

    def verify(_: str) -> None:
        with ThreadPoolExecutor(1) as pool, pytest.raises(VersionBusyError, match="ordinal=1.*to be verified"):
            pool.submit(guard.install, _version(2), "weights-2").result(DEADLINE_S)

    guard.install(_version(1), "weights-1", verify)
    _install(guard, 2)
    assert guard.pending == _version(2)


# ---- room, pins, superseding -----------------------------------------------------------------------------------------


def test_oldest_idle_version_makes_room() -> None:
    """V5: live and pinned versions stay; the oldest of the others goes, and is reported once."""
    guard = _guard(max_installed=4)
    for ordinal in (1, 2, 3):
        _install_and_flip(guard, ordinal)
    guard.pin(0)
    _install(guard, 4)
    assert _states(guard) == {0: "draining", 2: "retained", 3: "live", 4: "pending"}
    assert guard.take_retired() == (_version(1),)
    assert guard.take_retired() == ()
    with pytest.raises(UnknownVersionError, match="installed are 0, 2, 3, 4"):
        guard.weights_of(1)
    with pytest.raises(UnknownVersionError):
        guard.pin(1)


def test_no_room() -> None:
    """V5: where every other version is pinned the install is refused, verifies nothing, and works after the unpin."""
    guard = _guard()
    guard.pin(0)
    _install_and_flip(guard, 1)
    before = _picture(guard)
    with pytest.raises(VersionBusyError, match=r"0 \(1 pins\).*versions.max_installed=2"):
        guard.install(_version(2), "weights-2", lambda _: pytest.fail("verified without room"))
    assert _picture(guard) == before
    guard.unpin(0)
    _install(guard, 2)
    assert _states(guard) == {1: "live", 2: "pending"}


def test_pins_outlive_flips() -> None:
    """V5: a pinned version is read until its last pin is gone, while others go live."""
    guard = _guard(max_installed=3)
    guard.pin(0)
    guard.pin(0)
    for ordinal in (1, 2, 3):
        _install_and_flip(guard, ordinal)
        assert guard.weights_of(0) == "weights-0"
    assert guard.installed[0] == InstalledVersion(_version(0), VersionState.DRAINING, 2)
    guard.unpin(0)
    assert _states(guard)[0] == "draining"
    guard.unpin(0)
    assert _states(guard)[0] == "retained"


def test_unpin_without_pin() -> None:
    """V5: a pin that isn't there can't be given back."""
    guard = _guard()
    with pytest.raises(InvariantError):
        guard.unpin(0)
    with pytest.raises(InvariantError):
        guard.unpin(7)
    guard.check_invariants()


def test_pending_version_is_superseded() -> None:
    """V1, V5: a newer install replaces a pending one, which never goes live and leaves at once."""
    guard = _guard(max_installed=3)
    _install(guard, 1)
    _install(guard, 2)
    assert _states(guard) == {0: "live", 2: "pending"}
    assert guard.take_retired() == (_version(1),)
    assert guard.flip() == Flip(_version(0), _version(2))


def test_pinned_pending_version_is_superseded() -> None:
    """V5: a pinned one that was superseded is read to the end, and leaves with its last pin."""
    guard = _guard(max_installed=3)
    _install(guard, 1)
    guard.pin(1)
    _install(guard, 2)
    assert _states(guard) == {0: "live", 1: "draining", 2: "pending"}
    assert guard.take_retired() == ()
    guard.unpin(1)
    assert _states(guard) == {0: "live", 2: "pending"}
    assert guard.take_retired() == (_version(1),)


def test_retire_frees_a_buffer() -> None:
    """V2, V5: only a version that nobody can read any more is given up on demand."""
    guard = _guard(max_installed=3)
    _install_and_flip(guard, 1)
    _install(guard, 2)
    guard.pin(0)
    for ordinal, state in {0: "draining", 1: "live", 2: "pending"}.items():
        with pytest.raises(VersionBusyError, match=state):
            guard.retire(ordinal)
    guard.unpin(0)
    guard.retire(0)
    assert guard.take_retired() == (_version(0),)
    with pytest.raises(UnknownVersionError):
        guard.retire(0)
    guard.check_invariants()


# ---- rollback --------------------------------------------------------------------------------------------------------


def test_rollback_is_a_flip() -> None:
    """V2, V5: going back takes the same road as going forward, and burns no ordinal."""
    guard = _guard()
    _install_and_flip(guard, 1)
    guard.rollback(0)
    assert (guard.live, guard.pending) == (_version(1), _version(0))
    assert guard.flip() == Flip(_version(1), _version(0))
    assert _states(guard) == {0: "live", 1: "retained"}
    with pytest.raises(StaleVersionError):
        guard.install(_version(1), "weights-1")
    _install_and_flip(guard, 2)
    assert _states(guard) == {0: "retained", 2: "live"}


def test_rollback_to_what_is_gone() -> None:
    """V5: a version whose weights may have been overwritten is refused, and nothing changes."""
    guard = _guard()
    _install_and_flip(guard, 1)
    _install(guard, 2)
    before = _picture(guard)
    with pytest.raises(UnknownVersionError, match="installed are 1, 2"):
        guard.rollback(0)
    assert _picture(guard) == before


def test_rollback_supersedes_and_is_superseded() -> None:
    """V5: the last word counts; a version that was live once survives being superseded."""
    guard = _guard(max_installed=3)
    _install_and_flip(guard, 1)
    _install(guard, 2)
    guard.rollback(0)
    assert _states(guard) == {0: "pending", 1: "live"}
    _install(guard, 3)
    assert _states(guard) == {0: "retained", 1: "live", 3: "pending"}
    assert guard.take_retired() == (_version(2),)


def test_repeated_rollback() -> None:
    """P29, P38: asked again before or after its flip it is the same rollback; to the live version it withdraws."""
    guard = _guard(max_installed=3)
    _install_and_flip(guard, 1)
    guard.rollback(0)
    guard.rollback(0)
    assert guard.flip() == Flip(_version(1), _version(0))
    guard.rollback(0)
    assert guard.flip() is None
    _install(guard, 2)
    guard.rollback(0)
    assert (guard.pending, guard.flip()) == (None, None)
    assert _states(guard) == {0: "live", 1: "retained"}


# ---- generation and updates ------------------------------------------------------------------------------------------


def test_a_hold_flips_once() -> None:
    """S26, V2: a batch is a long step: its first flip fixes the version for all steps inside; updates go live after."""
    guard = _guard(max_installed=3)
    _install(guard, 1)
    with guard.hold_generation():
        with guard.hold_generation():
            assert guard.flip() == Flip(_version(0), _version(1))
        _install(guard, 2)
        for _ in range(3):
            with guard.hold_generation():
                assert guard.flip() is None
                guard.check_invariants()
        assert (guard.live, guard.pending) == (_version(1), _version(2))
    with guard.hold_generation():
        assert guard.flip() == Flip(_version(1), _version(2))
    guard.check_invariants()


def test_a_hold_without_an_update_is_fixed_too() -> None:
    """S26: what arrives after the first step of a batch waits, also where that step had nothing to flip."""
    guard = _guard()
    with guard.hold_generation():
        assert guard.flip() is None
        _install(guard, 1)
        guard.rollback(0)
        _install(guard, 2)
        assert guard.flip() is None
    assert guard.flip() == Flip(_version(0), _version(2))


def test_a_failed_batch_lets_go() -> None:
    """P38: an exception inside a hold leaves nothing held and no version fixed."""
    guard = _guard()
    _install(guard, 1)
    for hold in (guard.hold_generation, guard.exclusive_update):
        with pytest.raises(ZeroDivisionError), hold():
            raise ZeroDivisionError
        guard.check_invariants()
    with _Holder(guard.hold_generation):
        pass
    assert guard.flip() is not None


def test_other_threads_cannot_flip() -> None:
    """S8, V2: while one thread holds the guard, a flip from another does nothing and doesn't wait."""
    guard = _guard()
    _install(guard, 1)
    for hold in (guard.hold_generation, guard.exclusive_update):
        with _Holder(hold):
            assert guard.flip() is None
            assert guard.live == _version(0)
    assert guard.flip() is not None


def test_update_waits_for_a_batch() -> None:
    """S26: generation and a weight update exclude one another; the wait ends with an error that says what for."""
    guard = _guard(lock_timeout_s=SHORT_S)
    with (
        _Holder(guard.hold_generation),
        pytest.raises(VersionBusyError, match="0.02 s .*for a step or batch in thread 'holder'"),
        guard.exclusive_update(),
    ):
        pytest.fail("an update ran inside a batch")
    with guard.exclusive_update():
        guard.check_invariants()


def test_batch_waits_for_an_update() -> None:
    """S26: the other way round, with the deadline of the caller who generates."""
    guard = _guard(lock_timeout_s=SHORT_S)
    with (
        _Holder(guard.exclusive_update),
        pytest.raises(DeadlineError, match="0.02 s .*for an update in thread 'holder'"),
        guard.hold_generation(),
    ):
        pytest.fail("a batch ran inside an update")
    with guard.hold_generation():
        guard.check_invariants()


def test_update_inside_a_batch_is_refused() -> None:
    """S26: a thread can't break the promise that it was given itself, and learns so at once."""
    guard = _guard()
    with guard.hold_generation():
        with pytest.raises(VersionBusyError, match="inside a step or batch"), guard.exclusive_update():
            pytest.fail("an update ran inside a batch")
        guard.check_invariants()
    guard.check_invariants()


def test_update_may_generate_inside() -> None:
    """S8: an update may flip, try the new version out, and take it back before anyone else has seen it."""
    guard = _guard()
    with guard.exclusive_update():
        _install_and_flip(guard, 1)
        with guard.hold_generation():
            assert guard.flip() is None
            guard.rollback(0)
            assert guard.flip() is None
        assert guard.flip() == Flip(_version(1), _version(0))
        with guard.exclusive_update():
            guard.check_invariants()
    guard.check_invariants()


def test_waiters_take_turns() -> None:
    """P38: a step loop that takes the hold again at once doesn't starve an update that waits."""
    guard = _guard()
    served: list[str] = []

    def update() -> None:
        with guard.exclusive_update():
            served.append("update")

    with ThreadPoolExecutor(1) as pool:
        with guard.hold_generation():
            future = pool.submit(update)
            _wait_until(lambda: len(guard._waiters) == 1)
        with guard.hold_generation():
            served.append("step")
        future.result(DEADLINE_S)
    assert served == ["update", "step"]


def test_a_waiter_that_gives_up_blocks_nobody() -> None:
    """P2, P38: the place in the queue of one that ran out of time is free."""
    guard = _guard(lock_timeout_s=0.2)
    with ThreadPoolExecutor(2) as pool:
        with guard.hold_generation():
            first = pool.submit(_enter, guard.exclusive_update)
            with pytest.raises(VersionBusyError):
                first.result(DEADLINE_S)
            second = pool.submit(_enter, guard.hold_generation)
            _wait_until(lambda: len(guard._waiters) == 1)
        second.result(DEADLINE_S)
    guard.check_invariants()


def test_barrier_race() -> None:
    """S8, S26, V2, P09: updates and batches race; no batch sees two versions, or a label without its weights."""
    num_threads, num_rounds = 4, 40
    guard = PolicyVersionGuard(_version(0), [0], 2, DEADLINE_S)
    start = threading.Barrier(2 * num_threads)
    inside: list[int] = []
    seen: list[list[tuple[int, int]]] = []

    def update() -> None:
        start.wait(DEADLINE_S)
        for _ in range(num_rounds):
            with guard.exclusive_update():
                assert not inside, "an update ran while a batch did"
                _install_next(guard)
                assert guard.flip() is not None
                for gone in guard.take_retired():
                    assert gone.ordinal != guard.live.ordinal
            # Without the hold: goes live with whoever flips next, never inside a batch.
            _install_next(guard)

    def generate() -> None:
        start.wait(DEADLINE_S)
        for _ in range(num_rounds):
            with guard.hold_generation():
                inside.append(1)
                assert len(inside) == 1, "two batches ran at once"
                guard.flip()
                steps = []
                for _ in range(5):
                    with guard.hold_generation():
                        assert guard.flip() is None
                        steps.append((guard.live.ordinal, guard.weights_of(guard.live.ordinal)[0]))
                seen.append(steps)
                inside.pop()

    with _frequent_switches(), ThreadPoolExecutor(2 * num_threads) as pool:
        futures = [pool.submit(work) for work in (update, generate) for _ in range(num_threads)]
        for future in futures:
            future.result(DEADLINE_S)
    assert len(seen) == num_threads * num_rounds
    assert all(len(set(steps)) == 1 and steps[0][0] == steps[0][1] for steps in seen)
    ordinals = [steps[0][0] for steps in seen]
    assert ordinals == sorted(ordinals) and ordinals[-1] > num_rounds
    guard.check_invariants()


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Have the interpreter change threads as often as it can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


def _install_next(guard: PolicyVersionGuard[list[int]]) -> None:
    """Install one more version; another thread may take the ordinal first, then the next one is tried."""
    for _ in range(10_000):
        ordinal = guard.next_ordinal
        try:
            return guard.install(_version(ordinal, f"from {threading.get_ident()}"), [ordinal])
        except StaleVersionError:
            continue
    pytest.fail("no install got through")


def _enter(hold: Callable[[], AbstractContextManager[None]]) -> None:
    with hold():
        pass


def _ends_within(future: Future[None], seconds: float) -> bool:
    return bool(wait([future], timeout=seconds).done)


def _wait_until(holds: Callable[[], bool]) -> None:
    poll = threading.Event()
    for _ in range(int(DEADLINE_S / 0.001)):
        if holds():
            return
        poll.wait(0.001)
    pytest.fail("the state was not reached")
