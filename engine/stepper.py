"""Stepper: advances the engine by one step; the one road for the serving loop and for the synchronous batch.

Owns: the order of things inside a step. Knows nothing of who asked for it. Called by the engine, under the guard's
hold.
"""

from __future__ import annotations

from ..ipc.types import ErrorReason
from .guard import PolicyVersionGuard
from .metrics import EngineMetrics
from .models.layout import DecoderWeights
from .outcome import StepEvents
from .plan import StepPlan
from .runtime.executor import Executor
from .scheduler import Scheduler


class Stepper:
    """flip, plan, run, apply. Invariant V2: the live version changes in `advance` and nowhere else, before the plan."""

    def __init__(
        self,
        guard: PolicyVersionGuard[DecoderWeights],
        scheduler: Scheduler,
        executor: Executor,
        metrics: EngineMetrics,
    ) -> None:
        self._guard = guard
        self._metrics = metrics
        self._scheduler = scheduler
        self._executor = executor
        self.last_plan = StepPlan((), ())

    def advance(self) -> StepEvents:
        """Run one step and return what came of it; empty when there was nothing to run.

        If the step breaks, every sequence in it ends with an error, all its resources are given back, and the fault
        goes up; the next call returns the terminal events (R1, R2).
        """
        self.flip()
        plan = self.last_plan = self._scheduler.plan()
        if not plan.batches:
            return self._scheduler.take_events()
        try:
            result = self._executor.run(plan)
        except BaseException:
            self._scheduler.fail(plan, ErrorReason.INTERNAL)
            raise
        return self._scheduler.apply(plan, result)

    @property
    def decode_path(self) -> str:
        """How steady decode runs, for status."""
        return self._executor.decode_path

    def clear_plan(self) -> None:
        """Forget the last plan: nothing has run since."""
        self.last_plan = StepPlan((), ())

    def flip(self) -> bool:
        """Make a pending version live, if there is one; True where the live version changed."""
        flip = self._guard.flip()
        if flip is not None:
            self._scheduler.on_flip(flip)
            self._metrics.on_flip()
        for version in self._guard.take_retired():
            self._scheduler.forget_version(version.ordinal)
            self._executor.forget_version(version.ordinal)
        return flip is not None
