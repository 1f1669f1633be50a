"""Which orders the runner gives, to whom and when, and what it makes of answers in any order and from anyone."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from harness.rollouts import result
from unison.ipc.errors import DeadlineError, RolloutFailedError
from unison.ipc.ring import Ring, RingReader, RingWriter
from unison.ipc.types import PolicyVersion
from unison.workers.rollout.prompts import Prompt
from unison.workers.rollout.records import (
    HELD_OUT,
    RECORDS,
    TRAIN,
    RolloutOrder,
    RolloutRejected,
    RolloutResult,
    WorkerJoined,
)
from unison.workers.rollout.runner import Interrupted, RolloutRunner, RunnerLimits, WorkerLink, ends_of, seed_of
from unison.workers.rollout.task import Task
from unison.workers.trainer.ledger import HELD_OUT_IDS, Ledger, OrderEnd, StepRecord

Turn = Callable[["Workers"], bool]
"""What the workers do each time that the runner looks around while it waits; True tells it to stop."""


def scored(order: RolloutOrder, incarnation: str | None = None, rewards: tuple[float, ...] = (0.0, 1.0)) -> Any:
    """The group that an order asks for."""
    return result(order.order_id, rewards, split=order.split, incarnation=incarnation or order.incarnation)


def rejected(order: RolloutOrder, reason: str = "aborted", incarnation: str | None = None) -> RolloutRejected:
    """An order that came to nothing."""
    return RolloutRejected(order.order_id, incarnation or order.incarnation, reason, f"of {order.order_id}", ())


def answer_all(workers: Workers) -> bool:
    """Every order is answered at once."""
    for order in workers.take():
        workers.say(scored(order), workers.link_of[order.order_id])
    return False


def take_all(_: RolloutResult) -> OrderEnd | None:
    return None


class Workers:
    """A runner's ledger, and the other ends of its rings."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._stack = stack
        self.path = path / "ledger.sqlite"
        self.ledger = stack.enter_context(closing(Ledger(self.path)))
        self._sides: list[tuple[RingReader, RingWriter]] = []
        self.seen: list[RolloutOrder] = []
        self.link_of: dict[int, int] = {}
        self.num_steps = 0
        self.turn: Turn = answer_all

    def runner(
        self, num_links: int = 1, num_train: int = 100, incarnation: str = "me", seed: int = 0,
        ring_bytes: int = 1 << 16, **limits: Any,
    ) -> RolloutRunner:  # fmt: skip
        """A runner over new rings."""
        links, self._sides = [], []
        for _ in range(num_links):
            orders, results = (self._stack.enter_context(Ring.create(size)) for size in (ring_bytes, 1 << 18))
            links.append(WorkerLink(RingWriter(orders), RingReader(results)))
            self._sides.append((RingReader(orders), RingWriter(results)))
        task = Task(
            [Prompt(f"t{at}", text="x") for at in range(num_train)], [Prompt(f"h{at}", text="y") for at in range(4)],
            [lambda **_: []],
        )  # fmt: skip
        values = {"groups_per_step": 3, "group_size": 2, "max_lag": 0, "max_rejected": 2, "stall_s": 10.0} | limits
        return RolloutRunner(
            task, links, self.ledger, RunnerLimits(**values), seed, incarnation, lambda: self.turn(self)
        )

    def take(self, limit: int = 1 << 20) -> list[RolloutOrder]:
        """Orders that have come since the last call, at most `limit` from each ring."""
        found = []
        for number, (orders, _) in enumerate(self._sides):
            for frame in orders.pop_many(limit):
                order = RECORDS.decode(frame)[1]
                self.link_of[order.order_id] = number
                found.append(order)
            orders.give_up()
        self.seen += found
        return found

    def say(self, message: Any, number: int = 0) -> None:
        """A worker says something."""
        assert self._sides[number][1].try_push(RECORDS.encode(0, message))

    def train(self, results: list[RolloutResult]) -> None:
        """The step that consumes a batch."""
        self.num_steps += 1
        version = PolicyVersion(self.num_steps, f"d{self.num_steps}")
        record = StepRecord(self.num_steps, version, version, 2 * len(results), {})
        self.ledger.commit_step(record, ends_of(results, "trained", {}))


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(tmp_path, stack)


def ids(groups: list[RolloutResult] | list[RolloutOrder]) -> list[int]:
    return [each.order_id for each in groups]


# ---- synchronous: the order of answers says nothing ------------------------------------------------------------------


@pytest.mark.parametrize("places", list(permutations(range(3))), ids=str)
def test_batches_do_not_depend_on_who_was_faster(workers: Workers, places: tuple[int, ...]) -> None:
    """P40: answers come one by one in any order; the batch is in the order of the orders."""
    waiting: list[RolloutOrder] = []

    def one_at_a_time(them: Workers) -> bool:
        orders = them.take()
        waiting.extend(orders[place] for place in places if orders)
        if waiting:
            them.say(scored(waiting.pop(0)))
        return False

    workers.turn = one_at_a_time
    runner = workers.runner()
    for step in range(2):
        results, is_fresh = runner.next_batch(step, step, take_all)
        assert is_fresh and ids(results) == [3 * step, 3 * step + 1, 3 * step + 2]
        workers.train(results)
    assert [order.pin_version for order in workers.seen] == [0, 0, 0, 1, 1, 1]


def test_each_prompt_once_per_epoch(workers: Workers) -> None:
    """P28: whatever the batch size, and wherever a batch ends; epochs are shuffled differently, and not sorted."""
    runner = workers.runner(num_train=10)
    for step in range(10):
        workers.train(runner.next_batch(step, 0, take_all)[0])
    drawn = [order.prompt_index for order in workers.seen]
    epochs = [drawn[at : at + 10] for at in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) != epoch for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert all(order.prompt_id == f"t{order.prompt_index}" and order.split == TRAIN for order in workers.seen)
    assert len({order.seed for order in workers.seen}) == 30


def test_the_seed_decides_prompts_and_draws(tmp_path: Path) -> None:
    """P40: equal seeds ask for the same, others for something else."""
    asked = []
    for number, seed in enumerate((1, 1, 2)):
        (tmp_path / str(number)).mkdir()
        with ExitStack() as stack:
            own = Workers(tmp_path / str(number), stack)
            own.runner(seed=seed).next_batch(0, 0, take_all)
            asked.append([(order.prompt_index, order.seed) for order in own.seen])
    assert asked[0] == asked[1] and not set(asked[1]) & set(asked[2])


def test_an_order_that_cannot_be_recorded_is_not_sent(workers: Workers) -> None:
    """P28: a trainer that dies at any moment leaves a record of whatever a worker has seen."""
    runner = workers.runner()
    with closing(sqlite3.connect(workers.path)) as other:
        other.execute("ALTER TABLE orders RENAME TO gone")
        for ask in (lambda: runner.next_batch(0, 0, take_all), lambda: runner.evaluate(2, 2, 0)):
            with pytest.raises(sqlite3.OperationalError):
                ask()
    assert workers.take() == []


def test_what_was_asked_for_is_in_the_ledger(workers: Workers) -> None:
    """P28: prompt, seed and size of every order that a worker sees, so that a successor can ask for the same."""

    def look(them: Workers) -> bool:
        recorded = {row[0]: row[1:] for row in them.ledger.issued()}
        for order in them.take():
            assert recorded[order.order_id] == (order.prompt_index, order.prompt_id, order.num_samples, order.seed)
            them.say(scored(order))
        return False

    workers.turn = look
    assert ids(workers.runner().next_batch(0, 0, take_all)[0]) == [0, 1, 2]


# ---- fresh and used batches ------------------------------------------------------------------------------------------


def test_freshness_is_counted(workers: Workers) -> None:
    """S37: True once per batch, then False as often as it is used again; equal objects, different flags."""
    runner = workers.runner()
    found = []
    for step in range(6):
        results, is_fresh = runner.next_batch(step, 0, take_all, num_uses=3)
        found.append((ids(results), is_fresh))
        if is_fresh:
            workers.train(results)
    assert found == [([0, 1, 2], True), ([0, 1, 2], False), ([0, 1, 2], False),
                     ([3, 4, 5], True), ([3, 4, 5], False), ([3, 4, 5], False)]  # fmt: skip


def test_a_forgotten_batch_is_not_used_again(workers: Workers) -> None:
    """S37: after `forget_batch` the next one is fresh, however many uses were left."""
    runner = workers.runner()
    workers.train(runner.next_batch(0, 0, take_all, num_uses=3)[0])
    runner.forget_batch()
    results, is_fresh = runner.next_batch(0, 0, take_all, num_uses=3)
    assert is_fresh and ids(results) == [3, 4, 5]


# ---- what comes to nothing -------------------------------------------------------------------------------------------


def test_rejections_in_a_row_are_counted_between_results(workers: Workers) -> None:
    """S28: only an unbroken row ends the run; each one is recorded with its reason, and trained by nobody."""

    def every_other(them: Workers) -> bool:
        for order in them.take():
            them.say(rejected(order) if order.order_id % 2 else scored(order))
        return False

    workers.turn = every_other
    runner = workers.runner(max_rejected=1)
    results, _ = runner.next_batch(0, 0, take_all)
    assert ids(results) == [0, 2, 4]
    workers.train(results)
    assert workers.ledger.count_by_state() == {"trained": 3, "rejected": 2}


def test_too_many_rejections_name_orders_and_reasons(workers: Workers) -> None:
    """S28: the error holds each order of the row with its own reason; what was good before it isn't blamed."""
    reasons = {1: "reward_timeout", 2: "aborted", 3: "reward_invalid"}

    def answer(them: Workers) -> bool:
        for order in them.take():
            why = reasons.get(order.order_id)
            them.say(scored(order) if why is None else rejected(order, why))
        return False

    workers.turn = answer
    with pytest.raises(RolloutFailedError, match="3 rollouts in a row .*reward_invalid: of 3") as caught:
        workers.runner().next_batch(0, 0, take_all)
    assert caught.value.failures == reasons
    assert workers.ledger.count_by_state() == {"rejected": 3, "issued": 2}


def test_completions_at_fault_are_in_the_ledger(workers: Workers) -> None:
    """S28, P25: reason, message and indices are kept for whoever asks later."""

    def answer(them: Workers) -> bool:
        for order in them.take():
            if order.order_id == 0:
                them.say(RolloutRejected(0, "me", "unattributable", "2 of 2 completions", (0, 1)))
            else:
                them.say(scored(order))
        return False

    workers.turn = answer
    workers.train(workers.runner().next_batch(0, 0, take_all)[0])
    row = workers.ledger._one("SELECT reason || '|' || detail FROM orders WHERE state = 'rejected'")
    assert row == "unattributable|2 of 2 completions (completions [0, 1])"


def test_refused_groups_end_as_accept_says(workers: Workers) -> None:
    """P28: with state, reason and samples, at the step that was being gathered for; the batch is filled up."""
    judged = []

    def accept(group: RolloutResult) -> OrderEnd | None:
        judged.append(group.order_id)
        return OrderEnd("dropped", "zero_variance", "flat", group) if group.order_id in (0, 3) else None

    results, _ = workers.runner().next_batch(6, 0, accept)
    assert judged == [0, 1, 2, 3, 4] and ids(results) == [1, 2, 4]
    workers.train(results)
    assert workers.ledger.count_by_state() == {"dropped": 2, "trained": 3} and workers.ledger.check() == []
    assert workers.ledger._one("SELECT count(*) FROM orders WHERE reason = 'zero_variance' AND step = 7") == 2
    assert workers.ledger._one("SELECT count(*) FROM samples WHERE order_id IN (0, 3)") == 4


# ---- answers that nobody waits for -----------------------------------------------------------------------------------


def test_a_dead_trainers_answers_change_nothing(workers: Workers) -> None:
    """P29, P47: neither its results nor its rejections, even under ids that are open here; they don't count either."""

    def answer(them: Workers) -> bool:
        for order in them.take():
            for _ in range(5):
                them.say(rejected(order, incarnation="dead"))
            them.say(scored(order, "dead", (9.0, 9.0)))
            them.say(scored(order))
        return False

    workers.turn = answer
    results, _ = workers.runner().next_batch(0, 0, take_all)
    assert ids(results) == [0, 1, 2] and {each.incarnation for each in results} == {"me"}
    assert workers.ledger.count_by_state() == {"issued": 3}


def test_second_answers_change_nothing(workers: Workers) -> None:
    """P29, P47: the first answer counts, whatever comes after it: a rejection, another result, at once or later."""
    runner = workers.runner()

    def answer(them: Workers) -> bool:
        for order in them.take():
            them.say(scored(order))
            them.say(rejected(order))
            them.say(scored(order, rewards=(5.0, 5.0)))
        return False

    workers.turn = answer
    for step in range(2):
        results, _ = runner.next_batch(step, 0, take_all)
        assert ids(results) == [3 * step, 3 * step + 1, 3 * step + 2]
        assert all(score.total <= 1 for each in results for score in each.rewards)
        workers.train(results)
        for each in results:
            workers.say(each)
    runner.poll(0.0)
    assert (runner.num_waiting, runner.num_open) == (0, 0)
    assert workers.ledger.count_by_state() == {"trained": 6}


def test_a_successor_gets_the_open_orders(workers: Workers) -> None:
    """P36, P29: all of its predecessor's and nobody else's; answers to both copies make one result each."""
    lost: list[RolloutOrder] = []

    def first_one_dies(them: Workers) -> bool:
        orders = them.take()
        if not lost:
            lost.extend(orders)
            them.say(scored(orders[0]), them.link_of[orders[0].order_id])
            them.say(WorkerJoined(77), 0)
            return False
        for order in [*orders, *orders]:
            them.say(scored(order), 0)
        for order in lost:
            if them.link_of[order.order_id] == 1:
                them.say(scored(order), 1)
        return False

    workers.turn = first_one_dies
    runner = workers.runner(num_links=2, groups_per_step=6)
    results, _ = runner.next_batch(0, 0, take_all)
    assert ids(results) == [0, 1, 2, 3, 4, 5]
    again = workers.seen[len(lost) :]
    assert again == [order for order in lost if workers.link_of[order.order_id] == 0 and order.order_id != 0]
    assert len(again) == 2 and workers.ledger.count_by_state() == {"issued": 6}


# ---- running ahead ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lag", [1, 2, 5])
def test_exactly_as_far_ahead_as_the_rule_allows(workers: Workers, max_lag: int) -> None:
    """AReaL: when batch s is asked for, s + 1 + lag batches have been ordered, never one more and, where workers are
    fast, never one less."""
    runner = workers.runner(max_lag=max_lag)
    for step in range(5):
        results, _ = runner.next_batch(step, None, take_all)
        workers.train(results)
        assert len({*ids(workers.seen)}) <= 3 * (step + 1 + max_lag)
        runner.run_ahead(None)
        workers.take()
        assert len({*ids(workers.seen)}) == len(workers.seen) == 3 * (step + 1 + max_lag)
        for order in workers.seen:
            workers.say(scored(order))
    assert runner.num_open + runner.num_waiting == 3 * max_lag


@pytest.mark.parametrize("max_lag", [0, 1])
def test_what_is_ordered_before_a_step(workers: Workers, max_lag: int) -> None:
    """V6: without lag nothing, so that no sample is drawn under weights older than those in training."""
    runner = workers.runner(max_lag=max_lag)
    workers.train(runner.next_batch(0, 0, take_all)[0])
    runner.run_ahead(0)
    workers.take()
    assert runner.num_open + runner.num_waiting == 3 * max_lag and len(workers.seen) == 3 * (1 + max_lag)


def test_asynchronous_use_takes_what_is_there(workers: Workers) -> None:
    """P37: a slow rollout holds nothing up, and is used when it comes: it isn't dropped for being slow."""
    slow: list[RolloutOrder] = []

    def but_the_first(them: Workers) -> bool:
        for order in them.take():
            if order.order_id == 0:
                slow.append(order)
            else:
                them.say(scored(order))
        return False

    workers.turn = but_the_first
    runner = workers.runner(max_lag=1)
    batches = []
    for step in range(3):
        if step == 2:
            workers.say(scored(slow[0]))
            runner.poll(0.0)
        results, _ = runner.next_batch(step, None, take_all)
        workers.train(results)
        batches.append(ids(results))
        runner.run_ahead(None)
    assert 0 not in batches[0] + batches[1] and batches[2][0] == 0
    assert len({number for batch in batches for number in batch}) == 9


def test_the_least_loaded_worker_gets_the_next_order(workers: Workers) -> None:
    """P37: orders are spread evenly, and a worker that is slow gets fewer."""
    runner = workers.runner(num_links=3, groups_per_step=6, max_lag=1)

    def first_is_slow(them: Workers) -> bool:
        for order in them.take():
            if them.link_of[order.order_id] != 0:
                them.say(scored(order), them.link_of[order.order_id])
        return False

    workers.turn = lambda them: bool(them.take()) or True
    with pytest.raises(Interrupted):
        runner.next_batch(0, None, take_all)
    assert [list(workers.link_of.values()).count(number) for number in range(3)] == [4, 4, 4]
    for order in workers.seen:
        if workers.link_of[order.order_id] != 0:
            workers.say(scored(order), workers.link_of[order.order_id])
    workers.turn = first_is_slow
    for step in range(1, 4):
        runner.next_batch(step, None, take_all)
    counts = [list(workers.link_of.values()).count(number) for number in range(3)]
    assert counts[0] == 4 and min(counts[1:]) > 4


def test_orders_wait_where_a_ring_is_full(workers: Workers) -> None:
    """P47: more orders than the ring takes: the rest goes out as room is made, each once and in order."""

    def a_few_at_a_time(them: Workers) -> bool:
        for order in them.take(5):
            them.say(scored(order))
        return False

    workers.turn = a_few_at_a_time
    runner = workers.runner(ring_bytes=4096, groups_per_step=90)
    results, _ = runner.next_batch(0, 0, take_all)
    assert ids(results) == ids(workers.seen) == list(range(90))


# ---- the end of waiting ----------------------------------------------------------------------------------------------


def test_a_stall_is_an_error(workers: Workers) -> None:
    """P2, P36: it says what was waited for, how long, and where to look; open orders stay open."""
    workers.turn = lambda them: bool(them.take()) and False
    with pytest.raises(DeadlineError, match=r"rollout\.stall_s=0\.2 s; 3 are open: see worker\.log"):
        workers.runner(stall_s=0.2).next_batch(0, 0, take_all)
    assert workers.ledger.count_by_state() == {"issued": 3}


def test_an_interruption_loses_nothing(workers: Workers) -> None:
    """P28: orders stay open in the ledger, and the next trainer asks for them again, with their seeds, then goes on."""
    workers.turn = lambda them: len(them.take()) > 0
    with pytest.raises(Interrupted):
        workers.runner().next_batch(0, 0, take_all)
    before = list(workers.seen)
    assert len(before) == 3 and workers.ledger.count_by_state() == {"issued": 3}
    workers.turn = answer_all
    results, _ = workers.runner(incarnation="next", groups_per_step=5).next_batch(0, 4, take_all)
    assert ids(results) == [0, 1, 2, 3, 4] and {each.incarnation for each in results} == {"next"}
    after = workers.seen[3:6]
    assert [(each.prompt_index, each.seed, each.num_samples) for each in after] == [
        (each.prompt_index, each.seed, each.num_samples) for each in before
    ]  # fmt: skip
    assert [each.pin_version for each in workers.seen[3:]] == [4] * 5


def test_the_end_of_a_run_leaves_nothing_open(workers: Workers) -> None:
    """P28: what is open and what waits ends as dropped, in the step after the last; a longer run opens it again."""
    runner = workers.runner(max_lag=2)
    workers.train(runner.next_batch(0, None, take_all)[0])
    runner.run_ahead(None)
    runner.end_open(1)
    assert workers.ledger.count_by_state() == {"trained": 3, "dropped": 6}
    assert (runner.num_open, runner.num_waiting) == (0, 0) and workers.ledger.issued() == []
    workers.ledger.rewind(1)
    assert [row[0] for row in workers.ledger.issued()] == [3, 4, 5, 6, 7, 8]


# ---- evaluations -----------------------------------------------------------------------------------------------------


def test_evaluations_go_on_beside_training_orders(workers: Workers) -> None:
    """P45: pinned, in the split's order, with ids of their own; what training has open is neither lost nor counted."""
    runner = workers.runner(max_lag=1)
    workers.train(runner.next_batch(0, None, take_all)[0])
    runner.run_ahead(None)

    def in_reverse(them: Workers) -> bool:
        for order in reversed(them.take()):
            them.say(scored(order))
        return False

    workers.turn = in_reverse
    results = runner.evaluate(4, 2, 5)
    orders = {order.order_id: order for order in workers.seen if order.split == HELD_OUT}
    assert ids(results) == [HELD_OUT_IDS + at for at in range(4)]
    assert [orders[each.order_id].prompt_id for each in results] == ["h0", "h1", "h2", "h3"]
    assert {(each.pin_version, each.num_samples) for each in orders.values()} == {(5, 2)}
    assert workers.ledger.count_by_state()["issued"] == 3 + 4
    assert ids(runner.next_batch(1, None, take_all)[0]) == [3, 4, 5]


def test_an_evaluation_of_more_prompts_than_there_are(workers: Workers) -> None:
    """P45: each held-out prompt once; the same seeds at every evaluation, so that scores differ by weights alone."""
    runner = workers.runner()
    first, second = (runner.evaluate(100, 2, ordinal) for ordinal in (1, 2))
    assert ids(first) + ids(second) == [HELD_OUT_IDS + at for at in range(8)]
    seeds = [order.seed for order in workers.seen]
    assert seeds[:4] == seeds[4:] and len(set(seeds)) == 4


def test_an_interrupted_evaluation(workers: Workers) -> None:
    """P45: it ends at once; a resumed run forgets its orders and evaluates anew."""
    workers.turn = lambda them: len(them.take()) > 0
    with pytest.raises(Interrupted):
        workers.runner().evaluate(3, 2, 0)
    assert workers.ledger.count_by_state() == {"issued": 3}
    workers.ledger.rewind(0)
    assert workers.ledger.count_by_state() == {}


def test_a_failed_evaluation_names_its_holes(workers: Workers) -> None:
    """S28, P45: with order ids and reasons; its good groups aren't evaluated, and the next evaluation is whole."""

    def answer(them: Workers) -> bool:
        for order in them.take():
            them.say(rejected(order, "reward_timeout") if order.order_id == HELD_OUT_IDS + 2 else scored(order))
        return False

    workers.turn = answer
    runner = workers.runner()
    with pytest.raises(RolloutFailedError, match="1 of 4 held-out .*reward_timeout") as caught:
        runner.evaluate(4, 2, 0)
    assert caught.value.failures == {HELD_OUT_IDS + 2: "reward_timeout"}
    assert workers.ledger.count_by_state() == {"rejected": 1, "dropped": 3}
    assert len(runner.evaluate(4, 2, 0)) == 4


# ---- seeds and ends --------------------------------------------------------------------------------------------------


def test_seeds_are_keys() -> None:
    """P40: a function of run, split and number alone; different for any two of them, and in [0, 2^63)."""
    keys = [(seed, split, at) for seed in (0, 1, 2**31 - 1) for split in (TRAIN, HELD_OUT)
            for at in (*range(300), HELD_OUT_IDS)]  # fmt: skip
    seeds = [seed_of(*key) for key in keys]
    assert len(set(seeds)) == len(keys) and seeds == [seed_of(*key) for key in keys]
    assert all(0 <= seed < 2**63 for seed in seeds) and max(seeds) > 2**62


def test_ends_of_a_step() -> None:
    """P28: one end per group, with its samples, and advantages where there are any."""
    groups = [result(4, [0.0, 1.0]), result(7, [1.0, 1.0])]
    assert ends_of(groups, "trained", {4: (-1.0, 1.0)}) == {
        4: OrderEnd("trained", result=groups[0], advantages=(-1.0, 1.0)), 7: OrderEnd("trained", result=groups[1])
    }  # fmt: skip
