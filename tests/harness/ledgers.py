"""A ledger as a run leaves it behind, in milliseconds: steps, lags, drops, a rejection, evaluations and a resume."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean

from unison.ipc.types import PolicyVersion
from unison.workers.rollout.records import HELD_OUT, TRAIN, RolloutOrder, RolloutResult
from unison.workers.rollout.runner import ends_of, order_seed
from unison.workers.trainer.batching import make_batch
from unison.workers.trainer.config import TrainConfig
from unison.workers.trainer.ledger import LEDGER_FILE, Ledger, OrderEnd, StepRecord

from .rollouts import completion, result

LEDGER_CONFIG = TrainConfig.from_dict({
    "seed": 3, "rollout": {"mode": "async", "max_staleness": 1, "groups_per_step": 2, "group_size": 2},
})  # fmt: skip
"""What `write_ledger` says that the run was drawn under."""


def group(order_id: int, version: int, rewards: Sequence[float] = (0.0, 1.0), split: str = TRAIN) -> RolloutResult:
    """The answer to an order of the run, all of one version."""
    seed = order_seed(LEDGER_CONFIG.seed, split, order_id, 0 if split == HELD_OUT else order_id)
    made = [completion(at, 3 + at, version, seed=seed) for at in range(len(rewards))]
    return result(order_id, rewards, made, split)


class LedgerWriter:
    """Writes a ledger step by step, as the training loop does."""

    def __init__(self, path: Path) -> None:
        self.ledger = Ledger(path)
        self.ledger.use_settings(LEDGER_CONFIG.to_dict(), {"is_exact": True})
        self.live = PolicyVersion(0, "d0")
        self.step = 0
        self.ledger.add_version(self.live, 0)

    def order(self, split: str = TRAIN) -> int:
        """Issue one order; its id."""
        number = self.ledger.next_order_id if split == TRAIN else self.ledger.next_held_out_id
        index = number if split == TRAIN else 0
        seed = order_seed(LEDGER_CONFIG.seed, split, number, index)
        self.ledger.issue([RolloutOrder(number, "me", split, index, f"prompt-{number}", 2, seed, None)])
        return number

    def train(self, lag: int = 0) -> None:
        """One step on two groups."""
        base, ids = self.live, [self.order() for _ in range(2)]
        results = [group(number, base.ordinal - lag, (0.0, 0.5 + at)) for at, number in enumerate(ids)]
        batch = make_batch(results, LEDGER_CONFIG, base.ordinal, {})
        self.step += 1
        highest = max(self.ledger.highest_ordinal, base.ordinal)
        self.live = PolicyVersion(highest + 1, f"d{self.step}")
        self.ledger.commit_step(StepRecord(self.step, base, self.live, batch.num_samples, {"reward": 0.5}),
                                ends_of(results, "trained", batch.advantages))  # fmt: skip

    def drop(self, reason: str) -> None:
        """A group that isn't trained."""
        number = self.order()
        ended = OrderEnd("dropped", reason, result=group(number, 0, (0.25, 0.25)))
        self.ledger.end_orders({number: ended}, self.step + 1)

    def reject(self) -> None:
        """A group that came to nothing."""
        self.ledger.end_orders({self.order(): OrderEnd("rejected", "reward_error", "it raised")}, 0)

    def evaluate(self) -> None:
        """One held-out prompt under the live version."""
        made = group(self.order(HELD_OUT), self.live.ordinal, split=HELD_OUT)
        reward = fmean(score.total for score in made.rewards)
        self.ledger.commit_evaluation(self.step, self.live, reward, ends_of([made], "evaluated", {}))

    def resume(self, step: int) -> None:
        """Go on from a checkpoint, whose weights are published again; what it had open is drawn again."""
        self.ledger.rewind(step)
        self.step, self.live = step, PolicyVersion(self.ledger.highest_ordinal + 2, f"d{step}")
        self.ledger.add_version(self.live, step)
        for number, *_ in self.ledger.issued():
            self.ledger.end_orders({number: OrderEnd("rejected", "aborted", "gone")}, 0)


def write_ledger(run_dir: Path) -> Path:
    """A whole run, which nothing is wrong with; returns its directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    writer = LedgerWriter(run_dir / LEDGER_FILE)
    with closing(writer.ledger):
        writer.evaluate()
        writer.train()
        writer.drop("stale")
        writer.train(lag=1)
        writer.reject()
        writer.train()
        writer.resume(2)
        writer.train()
        writer.drop("zero_variance")
        writer.train(lag=1)
        writer.evaluate()
    return run_dir
