"""TrainLoop: batch → gradient → step that ends in a live version → ledger; evaluations and checkpoints between.

Invariants: the ledger's steps, the optimizer's steps and the versions go together, one of each per training step (S26);
no sample older than the configured lag is trained (V6); a step that fails leaves ledger and live version as they were.

Owns: the order of these things and the step number. Everything else is a part that is handed in. Called by the
trainer's process; one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import monotonic, time
from typing import Any, TypeVar

from torch import Tensor

from ...ipc.arena.publisher import WeightPublisher
from ...ipc.client import Client
from ...ipc.errors import ERROR_CODES, RolloutFailedError, TrainingError, UnisonError
from ...ipc.messages import WeightsLive
from ...ipc.types import PolicyVersion
from ..rollout.records import RolloutResult
from ..rollout.runner import Interrupted, RolloutRunner, ends_of
from .batching import TrainBatch, group_has_signal, kept_indices, lag_of, make_batch
from .canary import compare_with_engine
from .checkpoint import TrainState, write_checkpoint
from .config import TrainConfig
from .kept import VersionKeeper
from .ledger import Ledger, OrderEnd, StepRecord
from .metrics import MetricsWriter, bias_report, rollout_metrics
from .optimizer import PolicyOptimizer
from .policy import TrainablePolicy
from .step import BatchGradient, StepAccount

log = logging.getLogger(__name__)

T = TypeVar("T")

Report = Callable[[str, Mapping[str, Any]], None]
"""(kind, values): `step`, `evaluation`, `checkpoint`; for whoever watches the run."""


@dataclass(frozen=True, eq=False)
class TrainParts:
    """What a training loop is made of; each part says itself what it owns."""

    client: Client
    """To the worker."""
    publisher: WeightPublisher
    """To the arena."""
    policy: TrainablePolicy
    """Forward and backward."""
    optimizer: PolicyOptimizer
    """Masters and moments."""
    gradient: BatchGradient
    """From a batch to a gradient."""
    runner: RolloutRunner
    """Rollouts."""
    ledger: Ledger
    """The account."""
    metrics: MetricsWriter
    """metrics.jsonl."""
    keeper: VersionKeeper
    """Versions that stay on disk."""


class TrainLoop:
    """Life: built around its parts at a step → `run` until the last step, an interruption or an error."""

    def __init__(
        self, parts: TrainParts, config: TrainConfig, run_dir: Path, base_model: Path, report: Report, step: int = 0
    ) -> None:
        """`step`: training steps that are done already. The live version must be theirs."""
        self._parts = parts
        self._config = config
        self._run_dir = run_dir
        self._base_model = base_model
        self._report = report
        self.step = step
        """Training steps done."""
        self._live_tensors: Mapping[str, Tensor] = {}
        self._base = self._read_live()
        parts.keeper.begin(self._base, self._live_tensors, parts.ledger.knows(0, self._base.digest))
        self._dropped: list[RolloutResult] = []
        self._num_replaced = 0
        self._num_dry = 0
        self._has_learnt_it = False
        self._checkpointed_step = step if step else -1

    def run(self, is_stopping: Callable[[], bool]) -> bool:
        """Train up to the configured step, or until there is nothing left to learn from; False where `is_stopping`
        ended it before. A checkpoint is left behind.

        Raises:
            TrainingError, RolloutFailedError, DeadlineError: the run can't go on; the last checkpoint is what it was.
        """
        config, is_interrupted = self._config, False
        try:
            self._evaluate_if_due()
            while self.step < config.steps and not is_stopping():
                if not self.train_step():
                    self._end_early()
                    break
                interval = config.checkpoint.interval_steps
                if self.step == config.steps or (interval and self.step % interval == 0):
                    self.save()
                self._evaluate_if_due()
        except Interrupted:
            is_interrupted = True
            log.info("interrupted")
        except RolloutFailedError:  # between two steps: nothing is half done
            self._save_if_new()
            raise
        self._save_if_new()
        if is_interrupted or (self.step < config.steps and not self._has_learnt_it):
            return False
        self._parts.runner.end_open(self.step)
        return True

    def _evaluate_if_due(self) -> None:
        """Evaluate at the first, the last and every so many steps; never twice, also where a run was resumed."""
        interval = self._config.evaluation.interval_steps
        is_due = self.step in (0, self._config.steps) or (interval and self.step % interval == 0)
        if is_due and not self._parts.ledger.has_evaluation(self.step):
            self.evaluate()

    def _end_early(self) -> None:
        """After some steps, batch after batch had equal rewards in every group: that is an end, and no fault."""
        self._has_learnt_it = True
        log.warning("nothing left to learn from", extra={"step": self.step, "batches": self._num_dry})
        self._report("dry", {"step": self.step, "batches": self._num_dry})
        self.evaluate()

    # ---- one step ----------------------------------------------------------------------------------------------------

    def train_step(self) -> bool:
        """Gather batches until one has something to learn from, and train on it; False where none has.

        Raises:
            TrainingError: there was none from the beginning.
        """
        while True:
            started_s = monotonic()
            self._dropped, self._num_replaced = [], 0
            pin = self._base.ordinal if self._config.max_lag == 0 else None
            results, is_fresh = self._parts.runner.next_batch(
                self.step, pin, self._judge, self._config.algorithm.num_iterations
            )
            batch, outside = self._make_batch(results)
            has_kl = self._config.algorithm.kl_coef > 0 and self._config.algorithm.kl_in == "loss"
            if batch.has_signal or (has_kl and batch.groups):
                break
            self._skip(results, outside, is_fresh)
            if self._num_dry > self._config.max_dry_batches:
                return False
        self._num_dry = 0
        self._parts.runner.run_ahead(pin)
        rollout_s = monotonic() - started_s
        self._train(results, batch, outside, is_fresh, rollout_s)
        return True

    def _judge(self, result: RolloutResult) -> OrderEnd | None:
        """Whether a group is used; None: it is."""
        rollout = self._config.rollout
        lag = max((lag_of(each, self._base.ordinal) for each in result.completions), default=0)
        if lag > self._config.max_lag:
            self._dropped.append(result)
            return OrderEnd("dropped", "stale", f"{lag} versions old; at most {self._config.max_lag}", result)
        if lag < 0:
            raise self._foreign(f"group {result.order_id} was made by a version newer than the weights in training")
        if self._num_replaced >= rollout.max_refill_groups:
            return None
        if not kept_indices(result, self._config):
            reason = "truncated"
        elif rollout.zero_variance == "refill" and not group_has_signal(result, self._config):
            reason = "zero_variance"
        else:
            return None
        self._num_replaced += 1
        self._dropped.append(result)
        return OrderEnd("dropped", reason, result=result)

    def _make_batch(self, results: list[RolloutResult]) -> tuple[TrainBatch, dict[int, OrderEnd]]:
        """The batch, and the ends of groups that stay outside."""
        outside = {
            each.order_id: OrderEnd("dropped", "truncated", result=each)
            for each in results if not kept_indices(each, self._config)
        }  # fmt: skip
        if self._config.rollout.zero_variance == "drop":
            outside |= {
                each.order_id: OrderEnd("dropped", "zero_variance", result=each)
                for each in results
                if each.order_id not in outside and not group_has_signal(each, self._config)
            }
        inside = [each for each in results if each.order_id not in outside]
        self._dropped += [end.result for end in outside.values() if end.result is not None]
        penalties = self._parts.gradient.penalties(inside)
        return make_batch(inside, self._config, self._base.ordinal, penalties), outside

    def _skip(self, results: list[RolloutResult], outside: Mapping[int, OrderEnd], is_fresh: bool) -> None:
        """A batch without signal moves nothing: no step, no version; its prompts have their end in the ledger."""
        self._parts.runner.forget_batch()
        if is_fresh:
            ends = {each.order_id: OrderEnd("dropped", "no_signal", result=each) for each in results}
            self._parts.ledger.end_orders({**ends, **outside}, self.step + 1)
        self._num_dry += 1
        log.warning("batch without signal", extra={"step": self.step + 1, "in_a_row": self._num_dry})
        if self._num_dry > self._config.max_dry_batches and self.step == 0:
            raise TrainingError(
                f"{self._num_dry} batches in a row had equal rewards in every group, max_dry_batches is "
                f"{self._config.max_dry_batches}: there is nothing to learn from them; look at the rewards with "
                "`bin/train samples RUN`, raise the temperature or the group size, or shape the reward"
            )

    def _train(
        self, results: list[RolloutResult], batch: TrainBatch, outside: Mapping[int, OrderEnd], is_fresh: bool,
        rollout_s: float,
    ) -> None:  # fmt: skip
        parts, base, started_s = self._parts, self._base, monotonic()
        account = parts.gradient.compute(batch)
        norm = parts.optimizer.clip(parts.policy.gradient)
        learning_rate = parts.optimizer.learning_rate
        difference = self._canary(batch, account)
        trained_s = monotonic()
        live = self._publish_step()
        published_s, published_at = monotonic(), time()
        with suppress(UnisonError):
            status = parts.client.status()
            difference["kv_used"] = 1.0 - status.num_free_blocks / status.num_blocks
        lags = [sample.lag for group in batch.groups for sample in group.samples]
        seconds = rollout_s + published_s - started_s
        metrics = {
            **rollout_metrics(results), **account.metrics(), **difference, "grad_norm": norm,
            "learning_rate": learning_rate, "lag_mean": fmean(lags), "lag_max": float(max(lags)),
            "num_samples": float(batch.num_samples), "num_replaced": float(self._num_replaced),
            **bias_report(results, self._dropped), "rollout_s": rollout_s, "train_s": trained_s - started_s,
            "publish_s": published_s - trained_s, "publish_wait_s": live.waited_s, "published_at": published_at,
            "samples_per_s": batch.num_samples / seconds, "tokens_per_s": account.num_tokens / seconds,
            "version": float(live.version.ordinal),
        }  # fmt: skip
        self.step += 1
        inside = [each for each in results if each.order_id not in outside]
        ends = {**ends_of(inside, "trained", batch.advantages), **outside} if is_fresh else {}
        parts.ledger.commit_step(StepRecord(self.step, base, live.version, batch.num_samples, metrics), ends)
        parts.metrics.write("step", self.step, metrics)
        self._base = self._read_live()
        if self._base != live.version:
            raise self._foreign(f"version {live.version} was published and {self._base} is live")
        parts.keeper.keep(self.step, live.version, self._live_tensors)
        self._report("step", {"step": self.step, "steps": self._config.steps, **metrics})

    def _canary(self, batch: TrainBatch, account: StepAccount) -> dict[str, float]:
        """Engine against trainer: every fresh token of the step, or a few samples that the engine scores again."""
        config = self._config.canary
        found: dict[str, float] = {}
        worst = account.max_difference if account.num_compared else None
        if worst is None and config.num_samples:
            worst = compare_with_engine(
                self._parts.policy, self._parts.client, batch.groups, config.num_samples, self._base.ordinal
            )
            if worst is not None:
                found["canary_max_difference"] = worst
        if worst is not None and worst > config.max_difference:
            log.error("engine and trainer differ", extra={"difference": worst, "version": self._base.ordinal})
            found["canary_mismatch"] = 1.0
            if config.stops_run:
                raise TrainingError(
                    f"a log-prob of engine and trainer differs by {worst:.3g} at version {self._base.ordinal}, "
                    f"canary.max_difference is {config.max_difference}; nothing was updated"
                )
        return found

    def _publish_step(self) -> WeightsLive:
        """Apply the gradient and publish; where the worker dies meanwhile, its successor gets the same weights."""
        optimizer, publisher = self._parts.optimizer, self._parts.publisher

        def publish() -> WeightsLive:
            version, _ = publisher.read_live()
            if version not in (self._base, publisher.sealed):
                raise self._foreign(f"version {self._base} is in training and {version} is live")
            if optimizer.is_ahead:
                return optimizer.publish(publisher)
            return optimizer.step(self._parts.policy.gradients, publisher)

        return self._patiently(publish)

    @staticmethod
    def _foreign(what: str) -> TrainingError:
        return TrainingError(f"{what}: someone else publishes into this run, or has rolled it back")

    def _patiently(self, call: Callable[[], T]) -> T:
        """Repeat a call while the worker is being replaced."""
        until_s = monotonic() + self._config.serve.supervisor.start_s
        while True:
            try:
                return call()
            except UnisonError as error:
                if not ERROR_CODES[type(error)].is_retryable or monotonic() > until_s:
                    raise
                log.warning("call repeated", extra={"step": self.step, "reason": str(error)})
                self._parts.runner.poll(0.25)

    def _read_live(self) -> PolicyVersion:
        version, self._live_tensors = self._parts.publisher.read_live()
        self._parts.policy.read(self._live_tensors)
        return version

    # ---- between steps -----------------------------------------------------------------------------------------------

    def evaluate(self) -> float:
        """Mean reward over the held-out prompts under the present weights, pinned (P45)."""
        config, started_s = self._config, monotonic()
        client, ordinal = self._parts.client, self._base.ordinal
        self._patiently(lambda: client.pin(ordinal))
        try:
            results = self._parts.runner.evaluate(
                config.task.num_eval_prompts, config.evaluation.num_samples, self._base.ordinal
            )
        finally:
            with suppress(UnisonError):  # a worker that died meanwhile has taken the pin with it
                client.unpin(ordinal)
        values = {**rollout_metrics(results), "version": float(self._base.ordinal),
                  "evaluation_s": monotonic() - started_s}  # fmt: skip
        ends = ends_of(results, "evaluated", {})
        self._parts.ledger.commit_evaluation(self.step, self._base, values["reward"], ends)
        self._parts.metrics.write("evaluation", self.step, values)
        self._report("evaluation", {"step": self.step, **values})
        return values["reward"]

    def _save_if_new(self) -> None:
        if self._checkpointed_step != self.step:
            self.save()

    def save(self) -> Path:
        """Write a checkpoint of the present step."""
        optimizer, layout = self._parts.optimizer, self._parts.policy.layout
        version, tensors = self._parts.publisher.read_live()
        if version != self._base:
            raise self._foreign(f"version {self._base} is to be saved and {version} is live")
        state = TrainState(
            self.step, self._base.ordinal, self._base.digest, optimizer.scalars(), self._config.seed,
            self._parts.ledger.next_order_id, str(self._base_model),
        )  # fmt: skip
        weights = {name: tensors[name] for name in layout.entries}
        path = write_checkpoint(
            self._run_dir, state, weights, optimizer.tensors(), self._config.checkpoint.keep
        )
        self._checkpointed_step = self.step
        self._report("checkpoint", {"step": self.step, "path": str(path)})
        return path
