"""The trainer's view of the rollout workers, over real rings, with the workers played by the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness.rollouts import result
from unison.ipc.errors import DeadlineError, RolloutFailedError
from unison.ipc.ring import Ring, RingReader, RingWriter
from unison.workers.rollout.prompts import Prompt
from unison.workers.rollout.records import RECORDS, RolloutOrder, RolloutRejected, RolloutResult, WorkerJoined
from unison.workers.rollout.runner import Interrupted, RolloutRunner, RunnerLimits, WorkerLink, seed_of
from unison.workers.rollout.task import Task
from unison.workers.trainer.ledger import Ledger, OrderEnd


def task(num_train: int = 10) -> Task:
    return Task(
        [Prompt(f"t{at}", text="x") for at in range(num_train)], [Prompt(f"h{at}", text="y") for at in range(4)],
        [lambda **_: []],
    )  # fmt: skip


class House:
    """A runner and the other ends of its rings."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.stack = stack
        self.ledger = Ledger(path / "ledger.sqlite")
        stack.callback(self.ledger.close)
        self.sides: list[tuple[RingReader, RingWriter]] = []
        self.seen: list[tuple[int, RolloutOrder]] = []
        self.is_stopping = False

    def runner(self, num_links: int = 1, incarnation: str = "me", **limits: Any) -> RolloutRunner:
        """A runner over new rings."""
        links, self.sides = [], []
        for _ in range(num_links):
            orders, results = (self.stack.enter_context(Ring.create(1 << 16)) for _ in range(2))
            links.append(WorkerLink(RingWriter(orders), RingReader(results)))
            self.sides.append((RingReader(orders), RingWriter(results)))
        values = {"groups_per_step": 3, "group_size": 2, "max_lag": 0, "max_rejected": 2, "stall_s": 5.0} | limits
        return RolloutRunner(
            task(), links, self.ledger, RunnerLimits(**values), 0, incarnation, lambda: self.is_stopping
        )

    def take(self) -> list[RolloutOrder]:
        """Orders that have come to any worker since the last call."""
        found = []
        for number, (orders, _) in enumerate(self.sides):
            while (frame := orders.pop()) is not None:
                order = RECORDS.decode(frame)[1]
                self.seen.append((number, order))
                found.append(order)
        return found

    def say(self, message: Any, number: int = 0) -> None:
        """A worker says something."""
        assert self.sides[number][1].try_push(RECORDS.encode(0, message))

    def answer(self, order: RolloutOrder, number: int = 0, **fields: Any) -> None:
        """A worker delivers an order's group."""
        self.say(answer_to(order, **fields), number)


def answer_to(order: RolloutOrder, **fields: Any) -> RolloutResult:
    return result(
        order.order_id, [0.0, 1.0], incarnation=fields.pop("incarnation", order.incarnation), split=order.split,
        **fields,
    )  # fmt: skip


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with ExitStack() as stack:
        yield House(tmp_path, stack)


class Answering:
    """Answers every order when the runner asks whether it should stop, which it does while it waits."""

    def __init__(self, house: House, answer: Any) -> None:
        self.house, self.answer = house, answer

    def __call__(self) -> bool:
        orders = self.house.take()
        for order in reversed(orders):
            self.answer(order)
        return False


def take_all(_: RolloutResult) -> OrderEnd | None:
    return None


def batches(house: House, runner: RolloutRunner, count: int, answer: Any = None) -> list[list[RolloutResult]]:
    runner._is_stopping = Answering(house, answer or house.answer)
    found = []
    for step in range(count):
        results, is_fresh = runner.next_batch(step, 0, take_all)
        assert is_fresh
        house.ledger.end_orders({each.order_id: OrderEnd("trained", result=each) for each in results}, 0)
        found.append(results)
    return found


def test_batches_come_in_the_order_of_their_ids(house: House) -> None:
    """A batch doesn't depend on who was faster: answers come in reverse, batches in order."""
    found = batches(house, house.runner(), 3)
    assert [[each.order_id for each in batch] for batch in found] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    prompts = [order.prompt_id for _, order in house.seen]
    assert len(set(prompts)) == 9 and prompts != sorted(prompts)
    assert len({order.seed for _, order in house.seen}) == 9


def test_the_next_epoch_is_shuffled_anew(house: House) -> None:
    """P28: no prompt is skipped or repeated within an epoch."""
    batches(house, house.runner(groups_per_step=10), 2)
    first, second = ([order.prompt_index for _, order in house.seen][at : at + 10] for at in (0, 10))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second


def test_fresh_is_a_flag(house: House) -> None:
    """S37: the same batch again is equal and not fresh; identity says nothing."""
    runner = house.runner()
    runner._is_stopping = Answering(house, house.answer)
    first = runner.next_batch(0, 0, take_all, num_uses=2)
    second = runner.next_batch(1, 1, take_all, num_uses=2)
    assert first[0] == second[0] and (first[1], second[1]) == (True, False)
    assert runner.next_batch(2, 2, take_all, num_uses=2)[1]


def test_never_more_than_the_rule_allows(house: House) -> None:
    """AReaL: s + 1 + η batches ordered when batch s is asked for, whoever is slow."""
    runner = house.runner(max_lag=2)
    runner._is_stopping = Answering(house, house.answer)
    for step in range(4):
        results, _ = runner.next_batch(step, None, take_all)
        house.ledger.end_orders({each.order_id: OrderEnd("trained", result=each) for each in results}, 0)
        runner.run_ahead(None)
        house.take()
        assert len({order.order_id for _, order in house.seen}) <= 3 * (step + 1 + 2)


def test_rejected_rollouts_are_recorded_and_replaced(house: House) -> None:
    """S28, P25: a rollout that came to nothing ends with its reason; another prompt takes its place."""

    def answer(order: RolloutOrder) -> None:
        if order.order_id == 1:
            house.say(RolloutRejected(1, "me", "aborted", "gone", (1,)))
        else:
            house.answer(order)

    (batch,) = batches(house, house.runner(), 1, answer)
    assert [each.order_id for each in batch] == [0, 2, 3]
    assert house.ledger.count_by_state() == {"rejected": 1, "trained": 3}


def test_too_many_in_a_row_fail_the_batch(house: House) -> None:
    """S28: with order ids and reasons; nothing is trained as empty."""
    runner = house.runner()
    runner._is_stopping = Answering(
        house, lambda order: house.say(RolloutRejected(order.order_id, "me", "reward_error", "why", ()))
    )
    with pytest.raises(RolloutFailedError, match="why") as caught:
        runner.next_batch(0, 0, take_all)
    assert set(caught.value.failures.values()) == {"reward_error"} and len(caught.value.failures) == 3


def test_what_nobody_waits_for_is_dropped(house: House) -> None:
    """P29, P47: answers to a dead trainer, and second ones, change nothing."""

    def answer(order: RolloutOrder) -> None:
        house.answer(order, incarnation="dead")
        house.answer(order)
        house.answer(order)

    runner = house.runner()
    found = batches(house, runner, 2, answer)
    assert [each.order_id for batch in found for each in batch] == list(range(6))
    assert runner.num_waiting == 0


def test_a_new_worker_gets_the_open_orders_again(house: House) -> None:
    """P36: WorkerJoined says that what its predecessor had is lost; orders of other workers stay where they are."""
    runner = house.runner(num_links=2, groups_per_step=4)
    house.is_stopping = True
    with pytest.raises(Interrupted):
        runner.next_batch(0, 0, take_all)
    mine = [order for number, order in house.seen + [(0, each) for each in []] if number == 0]
    house.take()
    before = [order.order_id for number, order in house.seen if number == 0]
    assert len(before) == 2 and not mine
    house.say(WorkerJoined(1), number=0)
    runner.poll(0.0)
    house.take()
    assert [order.order_id for number, order in house.seen if number == 0] == before * 2
    assert len([1 for number, _ in house.seen if number == 1]) == 2


def test_a_refused_group_is_replaced(house: House) -> None:
    """Groups that `accept` refuses end as it says, and the batch is filled up."""
    runner = house.runner()
    runner._is_stopping = Answering(house, house.answer)
    refused = OrderEnd("dropped", "stale")
    batch, _ = runner.next_batch(0, 0, lambda each: refused if each.order_id < 2 else None)
    assert [each.order_id for each in batch] == [2, 3, 4]
    assert house.ledger.count_by_state()["dropped"] == 2


def test_waiting_ends(house: House) -> None:
    """P2, P36: with what was waited for, where nothing comes; at once, where the run is told to stop."""
    runner = house.runner(stall_s=0.3)
    with pytest.raises(DeadlineError, match=r"rollout.stall_s=0.3 s; 3 are open"):
        runner.next_batch(0, 0, take_all)


def test_open_orders_are_drawn_first_after_a_restart(house: House) -> None:
    """P28: the next trainer asks again for what was open, with the same seeds, before it draws new prompts."""
    house.is_stopping = True
    with pytest.raises(Interrupted):
        house.runner().next_batch(0, 0, take_all)
    old = house.take()
    (batch,) = batches(house, house.runner(incarnation="next"), 1)
    again = [order for _, order in house.seen[len(old) :]]
    assert [(each.order_id, each.seed, each.prompt_id) for each in again] == [
        (each.order_id, each.seed, each.prompt_id) for each in old
    ]
    assert [each.order_id for each in batch] == [0, 1, 2]


def test_evaluations(house: House) -> None:
    """P45: the first held-out prompts, pinned, in order, with seeds that don't change from one to the next."""
    runner = house.runner()
    runner._is_stopping = Answering(house, house.answer)
    first, second = runner.evaluate(3, 2, 7), runner.evaluate(3, 2, 8)
    orders = [order for _, order in house.seen]
    assert [order.pin_version for order in orders] == [7] * 3 + [8] * 3
    assert [order.prompt_index for order in sorted(orders, key=lambda each: each.order_id)] == [0, 1, 2] * 2
    assert {(order.prompt_index, order.seed) for order in orders[:3]} == {
        (order.prompt_index, order.seed) for order in orders[3:]
    }
    assert not {each.order_id for each in first} & {each.order_id for each in second}
    assert house.ledger.next_order_id == 0, "training prompts aren't shifted"


def test_an_evaluation_with_holes_is_none(house: House) -> None:
    runner = house.runner()
    runner._is_stopping = Answering(
        house, lambda order: house.say(RolloutRejected(order.order_id, "me", "aborted", "gone", ()))
        if order.prompt_index == 1 else house.answer(order),
    )  # fmt: skip
    with pytest.raises(RolloutFailedError, match="gone"):
        runner.evaluate(3, 1, 0)
    assert house.ledger.count_by_state() == {"rejected": 1, "dropped": 2}


def test_the_end_of_a_run(house: House) -> None:
    """P28: at the last step whatever is open ends as dropped, once."""
    runner = house.runner(max_lag=1)
    batches(house, runner, 2)
    runner.run_ahead(None)
    runner.end_open(2)
    counts = house.ledger.count_by_state()
    assert counts == {"trained": 6, "dropped": 3} and runner.num_open == 0


def test_seeds() -> None:
    """P40: every order has a seed of its own, in range; splits don't share any."""
    seeds = [seed_of(seed, split, at) for seed in range(3) for split in ("train", "held_out") for at in range(200)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
