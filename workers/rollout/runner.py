"""RolloutRunner: the trainer's view of the rollout workers: orders out, scored groups back, each once.

It draws prompts in an order that follows from the seed and the cursor alone, records every order before it is sent,
and keeps what comes back until it is asked for. A rollout worker that died announces its successor, which gets the
open orders again; what comes twice, or from a dead trainer's time, is dropped here.

How far it runs ahead: when the batch of step s (counted from 0) is asked for, at most s + 1 + η batches have been
ordered in all, those that were lost not counted, so few samples are older than η versions when their turn comes. In
synchronous use η = 0: a batch is ordered when it is asked for. Source: Fu et al. 2025
(AReaL), sec. 5.1.

Owns: open orders and results that nobody has taken. Writes to the ledger; knows nothing of losses. One thread.
"""

from __future__ import annotations

import random
import select
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import xxhash

from ...ipc.errors import DeadlineError, RolloutFailedError
from ...ipc.ring import LOOK_AGAIN_S, RingReader, RingWriter
from ..trainer.ledger import Ledger, OrderEnd
from .records import HELD_OUT, RECORDS, TRAIN, RolloutOrder, RolloutRejected, RolloutResult, WorkerJoined
from .task import Task

MAX_FRAMES = 256


@dataclass(eq=False)
class WorkerLink:
    """The two rings of one rollout worker."""

    orders: RingWriter
    """To it."""
    results: RingReader
    """From it."""
    outbox: deque[bytes] = field(default_factory=deque)
    """Orders that found no room yet."""


@dataclass(frozen=True)
class RunnerLimits:
    """What the runner may do."""

    groups_per_step: int
    """Groups of a batch."""
    group_size: int
    """Completions of a group."""
    max_lag: int
    """η: batches that may be ordered ahead."""
    max_rejected: int
    """Rejections in a row that end the run."""
    stall_s: float
    """Longest wait without anything coming back."""


Accept = Callable[[RolloutResult], OrderEnd | None]
"""Looks at a result when it is to be used: None takes it, else it ends so, and another one takes its place."""


class Interrupted(Exception):
    """The run was told to stop while rollouts were waited for; open orders stay open in the ledger."""


class RolloutRunner:
    """Life: built at the trainer's start, with the orders that the ledger has open → batches → the trainer's end."""

    def __init__(
        self, task: Task, links: Sequence[WorkerLink], ledger: Ledger, limits: RunnerLimits, seed: int,
        incarnation: str, is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """`is_stopping` is asked while rollouts are waited for; True ends the wait with Interrupted."""
        self._task = task
        self._links = list(links)
        self._ledger = ledger
        self._limits = limits
        self._seed = seed
        self._incarnation = incarnation
        self._is_stopping = is_stopping
        self._open: dict[int, tuple[int, RolloutOrder]] = {}
        """Order and the link that it went to, by id."""
        self._done: dict[int, RolloutResult] = {}
        self._cursor = ledger.next_order_id
        self._next_held_out = ledger.next_held_out_id
        self._reissue = deque(ledger.issued())
        self._num_rejected = 0
        self._failures: dict[int, tuple[str, str]] = {}
        """Reason and detail by order id, of what was rejected."""
        self._batch: list[RolloutResult] = []
        self._num_used = 0
        self._epoch = -1
        self._shuffled: list[int] = []
        self._poller = select.poll()
        for link in self._links:
            self._poller.register(link.results.fileno(), select.POLLIN)

    # ---- training ----------------------------------------------------------------------------------------------------

    def next_batch(
        self, step: int, pin_version: int | None, accept: Accept, num_uses: int = 1
    ) -> tuple[list[RolloutResult], bool]:
        """(groups, is_fresh): a new batch, or the last one again while it has been used less than `num_uses` times.

        `accept` judges each group when its turn comes; refused ones are recorded and replaced.

        Raises:
            RolloutFailedError: too many rollouts in a row came to nothing; with order ids and reasons (S28).
            DeadlineError: nothing came back within `stall_s`.
        """
        if self._batch and self._num_used < num_uses:
            self._num_used += 1
            return self._batch, False
        batch: list[RolloutResult] = []
        while len(batch) < self._limits.groups_per_step:
            self._order(self._limits.groups_per_step - len(batch), pin_version)
            result = self._next_result()
            if result is None:
                continue
            end = accept(result)
            if end is None:
                batch.append(result)
            else:
                self._ledger.end_orders({result.order_id: end}, step + 1)
        self._batch, self._num_used = batch, 1
        return batch, True

    def forget_batch(self) -> None:
        """The last batch isn't used again."""
        self._batch = []

    @property
    def num_open(self) -> int:
        """Training orders without a result."""
        return sum(order.split == TRAIN for _, order in self._open.values())

    @property
    def num_waiting(self) -> int:
        """Results that no step has taken yet."""
        return len(self._done)

    def run_ahead(self, pin_version: int | None) -> None:
        """Before a training step: order what may be made meanwhile."""
        if self._limits.max_lag:
            self._order(0, pin_version)
            self.poll(0.0)

    def _order(self, needed: int, pin_version: int | None) -> None:
        """Order what the present batch lacks, and what may be made ahead of it."""
        allowed = needed + self._limits.groups_per_step * self._limits.max_lag
        orders = [self._draw(pin_version) for _ in range(allowed - self.num_open - len(self._done))]
        if orders:
            self._ledger.issue(orders)
            for order in orders:
                self._send(order)

    def _next_result(self) -> RolloutResult | None:
        """The result whose turn it is; None where it came to nothing.

        Without running ahead that is the lowest order, so that a batch doesn't depend on who was faster; else whatever
        is there.
        """
        if self._limits.max_lag:
            self._await(lambda: self._done or not self._open)
            return self._done.pop(min(self._done)) if self._done else None
        order_id = min((*self._open, *self._done))
        self._await(lambda: order_id in self._done or order_id not in self._open)
        return self._done.pop(order_id, None)

    def _draw(self, pin_version: int | None) -> RolloutOrder:
        """The next training order: one that was open before, or the next prompt of the shuffled epoch."""
        if self._reissue:
            order_id, index, prompt_id, num_samples, seed = self._reissue.popleft()
        else:
            order_id = self._cursor
            self._cursor += 1
            index = self._index_at(order_id)
            prompt_id, num_samples = self._task.train[index].prompt_id, self._limits.group_size
            seed = order_seed(self._seed, TRAIN, order_id, index)
        return RolloutOrder(
            order_id, self._incarnation, TRAIN, index, prompt_id, num_samples, seed, pin_version
        )

    def _index_at(self, order_id: int) -> int:
        """Prompts are shuffled anew in every epoch, and each comes once per epoch (P28)."""
        epoch, place = divmod(order_id, len(self._task.train))
        if epoch != self._epoch:
            self._epoch, self._shuffled = epoch, list(range(len(self._task.train)))
            random.Random(f"{self._seed}-{epoch}").shuffle(self._shuffled)
        return self._shuffled[place]

    def end_open(self, step: int) -> None:
        """The run has reached its last step: what is open or waiting ends as dropped. A run that goes on from its
        checkpoint, with more steps, has them open again."""
        ids = [number for number, *_ in self._ledger.issued()]
        self._ledger.end_orders({number: OrderEnd("dropped", "run_ended") for number in ids}, step + 1)
        self._open.clear()
        self._done.clear()

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, num_prompts: int, num_samples: int, ordinal: int) -> list[RolloutResult]:
        """The first held-out prompts, all under one pinned version (P45), in their order.

        Raises:
            RolloutFailedError: a rollout came to nothing; an evaluation with holes is none.
        """
        count = min(num_prompts, len(self._task.held_out))
        orders = []
        for index in range(count):
            prompt, order_id = self._task.held_out[index], self._next_held_out
            self._next_held_out += 1
            orders.append(RolloutOrder(
                order_id, self._incarnation, HELD_OUT, index, prompt.prompt_id, num_samples,
                order_seed(self._seed, HELD_OUT, order_id, index), ordinal,
            ))  # fmt: skip
        self._ledger.issue(orders)
        for order in orders:
            self._send(order)
        ids = [order.order_id for order in orders]
        self._await(lambda: all(order_id in self._done or order_id not in self._open for order_id in ids))
        failed = {order_id: self._failures[order_id][0] for order_id in ids if order_id not in self._done}
        results = [self._done.pop(order_id) for order_id in ids if order_id not in failed]
        if failed:
            ends = {each.order_id: OrderEnd("dropped", "evaluation_failed", result=each) for each in results}
            self._ledger.end_orders(ends, 0)
            reason, detail = self._failures[next(iter(failed))]
            raise RolloutFailedError(
                f"{len(failed)} of {count} held-out rollouts came to nothing, and an evaluation with holes is none; "
                f"the first one: {reason}: {detail}", failed,
            )  # fmt: skip
        return results

    # ---- the rings ---------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> bool:
        """Take what has come back, waiting at most `timeout_s` for the first of it; True where there was anything."""
        for link in self._links:
            self._flush(link)
        if not any(link.results.has_frame for link in self._links):
            self._poller.poll(timeout_s * 1000)
        found = False
        for number, link in enumerate(self._links):
            link.results.clear()
            for frame in link.results.pop_many(MAX_FRAMES):
                self._take(number, RECORDS.decode(frame)[1])
                found = True
            link.results.give_up()
        return found

    def _await(self, is_there: Callable[[], Any]) -> None:
        heard_s = monotonic()
        while not is_there():
            if self._is_stopping():
                raise Interrupted
            if self.poll(LOOK_AGAIN_S):
                heard_s = monotonic()
            elif monotonic() - heard_s > self._limits.stall_s:
                raise DeadlineError(
                    f"no rollout came back within rollout.stall_s={self._limits.stall_s} s; {len(self._open)} are "
                    "open: see worker.log and rollout-*.log in the run directory"
                )

    def _take(self, number: int, message: RolloutResult | RolloutRejected | WorkerJoined) -> None:
        if isinstance(message, WorkerJoined):
            for link_number, order in list(self._open.values()):
                if link_number == number:
                    self._push(number, order)
            return
        if message.incarnation != self._incarnation or message.order_id not in self._open:
            return  # for a trainer that is gone, or here already
        self._open.pop(message.order_id)
        if isinstance(message, RolloutResult):
            self._num_rejected = 0
            self._done[message.order_id] = message
            return
        detail = f"{message.message} (completions {list(message.indices)})" if message.indices else message.message
        self._failures[message.order_id] = message.reason, detail
        self._ledger.end_orders({message.order_id: OrderEnd("rejected", message.reason, detail)}, 0)
        self._num_rejected += 1
        if self._num_rejected > self._limits.max_rejected:
            last = {number: why for number, (why, _) in list(self._failures.items())[-self._num_rejected :]}
            raise RolloutFailedError(
                f"{self._num_rejected} rollouts in a row came to nothing, rollout.max_rejected is "
                f"{self._limits.max_rejected}; the last one: {message.reason}: {detail}", last,
            )  # fmt: skip

    def _send(self, order: RolloutOrder) -> None:
        """To the rollout worker with the fewest open orders."""
        load = [0] * len(self._links)
        for number, _ in self._open.values():
            load[number] += 1
        number = load.index(min(load))
        self._open[order.order_id] = (number, order)
        self._push(number, order)

    def _push(self, number: int, order: RolloutOrder) -> None:
        link = self._links[number]
        link.outbox.append(RECORDS.encode(0, order))
        self._flush(link)

    def _flush(self, link: WorkerLink) -> None:
        while link.outbox and link.orders.try_push(link.outbox[0]):
            link.outbox.popleft()


def seed_of(seed: int, split: str, number: int) -> int:
    """Key of the draws of one order: in [0, 2^63), from the run's seed and the order's number alone (R3)."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{split}/{number}".encode()) >> 1


def order_seed(seed: int, split: str, order_id: int, prompt_index: int) -> int:
    """The seed of an order: a training order's own, and for a held-out prompt the same in every evaluation."""
    return seed_of(seed, split, order_id if split == TRAIN else prompt_index)


def ends_of(
    results: Sequence[RolloutResult], state: str, advantages: Mapping[int, tuple[float, ...]]
) -> dict[int, OrderEnd]:
    """The same end for all groups of a step."""
    return {
        each.order_id: OrderEnd(state, result=each, advantages=advantages.get(each.order_id, ())) for each in results
    }
