"""RolloutWorker: orders come off one ring, scored groups go onto another; generation and scoring overlap.

Owns: the orders in work. An order that fails is answered with RolloutRejected and its reason; a worker that dies has
said nothing of its orders, and its successor's first frame (WorkerJoined) has the trainer send them again.

Called by the rollout worker's process (__main__.py). One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from typing import Any

from ...ipc.errors import ConfigError
from ...ipc.ring import RingReader, RingWriter
from ..trainer.config import TrainConfig
from .generator import RolloutGenerator, RolloutRejectedError
from .records import RECORDS, RolloutOrder, RolloutRejected, RolloutResult, WorkerJoined
from .scorer import RewardError, Scorer
from .task import Task

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25
"""How often the rings are looked at where no bell rings (ring.py says why)."""
MAX_FRAMES = 64
"""Orders taken off the ring at once."""


class RolloutWorker:
    """Life: built → `run` until cancelled. Invariant: each order taken is answered once, or dies with the process."""

    def __init__(
        self, task: Task, generator: RolloutGenerator, scorer: Scorer, rings: tuple[RingReader, RingWriter],
        config: TrainConfig,
    ) -> None:  # fmt: skip
        self._task = task
        self._generator = generator
        self._scorer = scorer
        self._orders, self._results = rings
        self._config = config
        self._in_work: dict[int, tuple[RolloutOrder, asyncio.Task[None]]] = {}
        self._waiting: deque[RolloutOrder] = deque()
        self._outbox: deque[tuple[RolloutOrder | None, bytes]] = deque()
        """Frames to send, and the order that each answers."""
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled; then nothing runs any more."""
        loop = asyncio.get_running_loop()
        for source in (self._orders, self._results):
            loop.add_reader(source.fileno(), self._news.set)
        self._say(None, WorkerJoined(os.getpid()))
        try:
            while True:
                self._take_orders()
                self._start_some()
                self._flush()
                timer = loop.call_later(LOOK_AGAIN_S, self._news.set)
                try:
                    await self._news.wait()
                finally:
                    timer.cancel()
                self._news.clear()
                self._orders.clear()
                self._results.clear()
        finally:
            for source in (self._orders, self._results):
                loop.remove_reader(source.fileno())
            tasks = [task for _, task in self._in_work.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take_orders(self) -> None:
        for frame in self._orders.pop_many(MAX_FRAMES):
            self._take_order(RECORDS.decode(frame)[1])
        self._orders.give_up()

    def _take_order(self, order: RolloutOrder) -> None:
        """An order that is here already is taken once; of another trainer's time it gives way to the new one, whose
        answer must carry the new trainer's name."""
        self._waiting = deque(each for each in self._waiting if each.order_id != order.order_id or each == order)
        known, task = self._in_work.get(order.order_id, (None, None))
        if known == order or order in self._waiting:
            return
        if task is not None:
            task.cancel()
        self._waiting.append(order)

    def _start_some(self) -> None:
        while self._waiting and len(self._in_work) < self._config.rollout.max_groups_per_worker:
            order = self._waiting.popleft()
            self._in_work[order.order_id] = order, asyncio.create_task(self._work(order))

    async def _work(self, order: RolloutOrder) -> None:
        try:
            self._say(order, await self._make(order))
        except RolloutRejectedError as error:
            self._reject(order, error.reason, str(error), error.indices)
        except RewardError as error:
            self._reject(order, error.reason, str(error))
        except Exception as error:  # the outermost frame of an order: whatever broke is recorded, nothing is lost
            log.exception("an order failed")
            self._reject(order, "internal", repr(error))
        finally:
            if self._in_work.get(order.order_id, (None, None))[0] is order:
                del self._in_work[order.order_id]
            self._news.set()

    async def _make(self, order: RolloutOrder) -> RolloutResult:
        prompts = self._task.split(order.split)
        if not order.prompt_index < len(prompts) or prompts[order.prompt_index].prompt_id != order.prompt_id:
            raise RolloutRejectedError(
                "prompt_failed", f"prompt {order.prompt_index} isn't {order.prompt_id!r} here: the task isn't the same "
                "in every process; make its prompts from a fixed seed",
            )  # fmt: skip
        raw = await self._generator.generate(order, prompts[order.prompt_index])
        return RolloutResult.of(raw, await self._scorer.score(raw, order.prompt_index))

    def _reject(self, order: RolloutOrder, reason: str, message: str, indices: tuple[int, ...] = ()) -> None:
        log.warning("rollout rejected", extra={"order": order.order_id, "reason": reason, "detail": message[:500]})
        self._say(order, RolloutRejected(order.order_id, order.incarnation, reason, message[:1000], indices))

    def _say(self, order: RolloutOrder | None, message: Any) -> None:
        self._outbox.append((order, RECORDS.encode(0, message)))
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            order, frame = self._outbox[0]
            try:
                if not self._results.try_push(frame):
                    return
            except ConfigError as error:  # the frame is too long for the ring, however empty that is
                self._outbox.popleft()
                if order is None:
                    raise
                self._reject(order, "too_large", f"{error}; raise rollout.ring_mib")
                continue
            self._outbox.popleft()
