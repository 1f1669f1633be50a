"""The ledger against a dictionary, under random operations."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from harness.examples import num_examples
from harness.rollouts import completion, result
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from unison.ipc.errors import InvariantError
from unison.ipc.types import PolicyVersion
from unison.workers.rollout.records import HELD_OUT, RolloutOrder, RolloutResult
from unison.workers.trainer.audit import audit
from unison.workers.trainer.ledger import HELD_OUT_IDS, Ledger, OrderEnd, StepRecord
from unison.workers.trainer.stored import StoredRun


def group(order_id: int, version: PolicyVersion) -> RolloutResult:
    """The answer to an order of this machine."""
    made = [completion(at, version=version.ordinal, seed=order_id) for at in range(2)]
    return result(order_id, [0.0, 1.0], made)


class LedgerMachine(RuleBasedStateMachine):
    """V6: states by order id, and the step at which each ended; the ledger that comes of it passes every audit."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        self.states: dict[int, tuple[str, int]] = {}
        self.held_out: dict[int, int] = {}
        self.step = 0
        self.live = PolicyVersion(0, "d0")
        self.digests = {0: "d0"}
        self.ledger.add_version(self.live, 0)

    @property
    def open(self) -> list[int]:
        """Orders without an end."""
        return sorted(number for number, (state, _) in self.states.items() if state == "issued")

    @rule(count=st.integers(1, 4))
    def issue(self, count: int) -> None:
        first = self.ledger.next_order_id
        assert first == len(self.states)
        ids = range(first, first + count)
        self.ledger.issue([RolloutOrder(at, "me", "train", 0, "p", 2, at, None) for at in ids])
        self.states |= dict.fromkeys(ids, ("issued", 0))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), state=st.sampled_from(["dropped", "rejected"]))
    def end(self, data: st.DataObject, state: str) -> None:
        number = data.draw(st.sampled_from(self.open))
        at = self.step + 1 if state == "dropped" else 0
        self.ledger.end_orders({number: OrderEnd(state, "why")}, at)
        self.states[number] = (state, at)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_evaluated=st.integers(0, 2))
    def train(self, data: st.DataObject, num_evaluated: int) -> None:
        """A step, and an evaluation right after it."""
        chosen = data.draw(st.lists(st.sampled_from(self.open), min_size=1, unique=True))
        self.step += 1
        base = self.live
        self.live = PolicyVersion(self.ledger.highest_ordinal + 1, f"d{self.ledger.highest_ordinal + 1}")
        self.digests[self.step] = self.live.digest
        ends = {at: OrderEnd("trained", result=group(at, base), advantages=(-1.0, 1.0)) for at in chosen}
        self.ledger.commit_step(StepRecord(self.step, base, self.live, 2 * len(chosen), {}), ends)
        self.states |= dict.fromkeys(chosen, ("trained", self.step))
        if num_evaluated:
            self.evaluate_some(num_evaluated)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), is_step=st.booleans())
    def end_twice(self, data: st.DataObject, is_step: bool) -> None:
        """Refused as a whole, the good end beside it too."""
        ended = sorted(self.states.keys() - set(self.open))
        again = data.draw(st.sampled_from(ended)) if ended else len(self.states)
        ends = {at: OrderEnd("trained", result=result(at, [0.0, 1.0])) for at in (self.open[0], again)}
        version = PolicyVersion(self.live.ordinal + 1, "never")
        with pytest.raises(InvariantError, match=f"order {again} "):
            if is_step:
                self.ledger.commit_step(StepRecord(self.step + 1, version, version, 4, {}), ends)
            else:
                self.ledger.end_orders(ends, self.step + 1)

    @rule(count=st.integers(1, 3))
    def evaluate(self, count: int) -> None:
        self.evaluate_some(count)

    def evaluate_some(self, count: int) -> None:
        """Held-out orders, all of them evaluated, at the present step."""
        first = self.ledger.next_held_out_id
        ids = range(first, first + count)
        assert first == max(self.held_out, default=HELD_OUT_IDS - 1) + 1
        self.ledger.issue([RolloutOrder(at, "me", HELD_OUT, 0, "h", 2, at, None) for at in ids])
        ends = {at: OrderEnd("evaluated", result=group(at, self.live)) for at in ids}
        self.ledger.commit_evaluation(self.step, self.live, 0.5, ends)
        self.held_out |= dict.fromkeys(ids, self.step)

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """A run that goes on from a checkpoint: its weights are published again, or were live still."""
        target = data.draw(st.integers(0, self.step))
        is_live = target == self.step and data.draw(st.booleans())
        assert self.ledger.rewind(target) == self.step - target
        self.step = target
        if not is_live:
            num_lost = data.draw(st.integers(0, 2))  # ordinals of versions that nobody wrote down before a kill
            self.live = PolicyVersion(self.ledger.highest_ordinal + 1 + num_lost, self.digests[target])
        self.ledger.add_version(self.live, target)
        for at, (_, step) in self.states.items():
            if step > target:
                self.states[at] = ("issued", 0)
        self.held_out = {at: step for at, step in self.held_out.items() if step <= target}

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.folder / "ledger.sqlite")

    @invariant()
    def agrees(self) -> None:
        counts: dict[str, int] = {}
        for state, _ in self.states.values():
            counts[state] = counts.get(state, 0) + 1
        if self.held_out:
            counts["evaluated"] = len(self.held_out)
        assert self.ledger.count_by_state() == counts
        assert [row[0] for row in self.ledger.issued()] == self.open
        assert self.ledger.check() == [] and self.ledger.highest_ordinal == self.live.ordinal

    def teardown(self) -> None:
        self.ledger.close()
        with StoredRun(self.folder) as run:
            report = audit(run, max_staleness=0)
        assert report.is_sound, report.findings
        assert not self.open or report.state.startswith("stopped")
        shutil.rmtree(self.folder)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=num_examples(25), stateful_step_count=20, deadline=None)
