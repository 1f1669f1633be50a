"""The ledger against a dictionary, under random operations."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from harness.rollouts import result
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from unison.ipc.types import PolicyVersion
from unison.workers.rollout.records import RolloutOrder
from unison.workers.trainer.ledger import Ledger, OrderEnd, StepRecord


class LedgerMachine(RuleBasedStateMachine):
    """States by order id, and the step at which each ended."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        self.states: dict[int, tuple[str, int]] = {}
        self.step = 0
        self.ordinal = 0

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
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.open), min_size=1, unique=True))
        self.step += 1
        self.ordinal += 1
        version = PolicyVersion(self.ordinal, f"d{self.ordinal}")
        ends = {at: OrderEnd("trained", result=result(at, [0.0, 1.0])) for at in chosen}
        self.ledger.commit_step(StepRecord(self.step, version, version, 2 * len(chosen), {}), ends)
        self.states |= dict.fromkeys(chosen, ("trained", self.step))

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        target = data.draw(st.integers(0, self.step))
        assert self.ledger.rewind(target) == self.step - target
        self.step = target
        for at, (_, step) in self.states.items():
            if step > target:
                self.states[at] = ("issued", 0)

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.folder / "ledger.sqlite")

    @invariant()
    def agrees(self) -> None:
        counts: dict[str, int] = {}
        for state, _ in self.states.values():
            counts[state] = counts.get(state, 0) + 1
        assert self.ledger.count_by_state() == counts
        assert [row[0] for row in self.ledger.issued()] == self.open
        assert self.ledger.check() == [] and self.ledger.highest_ordinal == (self.ordinal or -1)

    def teardown(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.folder)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
