"""PolicyOptimizer: float32 masters, AdamW, and the step that ends in a live version.

A step is one act: update the masters and write them rounded into the reserved buffer, in one pass over memory, fence,
hash, publish, wait for the acknowledgement. `num_steps` and `version` advance with the acknowledgement and not before.
A publication that fails leaves the masters ahead and the old version live; `publish` then publishes them again, and the
gradient is never applied twice.

Owns: masters, moments, schedule. Knows nothing of samples or losses. Called by the training loop; usable alone.
Source: Loshchilov and Hutter 2019 (AdamW), alg. 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...engine.kernels.adamw import AdamWRates, AdamWRun, adamw_, sum_of_squares
from ...engine.models.layout import WeightLayout
from ...ipc.arena.publisher import WeightPublisher
from ...ipc.errors import TrainingError
from ...ipc.messages import WeightsLive
from ...ipc.types import PolicyVersion
from .config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class PolicyOptimizer:
    """Life: built from the weights that the run begins with → any number of `step` → its state is saved. One thread."""

    def __init__(
        self, layout: WeightLayout, tensors: Mapping[str, Tensor], config: OptimizerConfig, num_training_steps: int
    ) -> None:
        """`layout` is the float32 one; `tensors` by Hugging Face name, of any dtype, are copied."""
        self._config = config
        self._layout = layout
        self.master = layout.allocate(next(iter(tensors.values())).device)
        """float32 [elements]."""
        self.masters = layout.views(self.master)
        """Views of it by Hugging Face name."""
        with torch.no_grad():
            for name in layout.entries:
                self.masters[name].copy_(tensors[name])
        self._moments: dict[str, dict[str, Tensor]] = {}
        """Views by Hugging Face name of each of MOMENTS; none before the first update."""
        self._rate_factor = _rate_factor(config, num_training_steps)
        self._num_updates = 0
        self._scale = 1.0
        """Of the next update's gradient."""
        self.num_steps = 0
        """Steps whose version has been live."""
        self.version: PolicyVersion | None = None
        """The last one."""
        self.is_ahead = False
        """True between an update of the masters and its publication."""

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self._config.learning_rate * self._rate_factor(self._num_updates)

    def clip(self, gradient: Tensor) -> float:
        """Have the next update, which is of this flat gradient, scale it down to the configured norm; returns its norm
        before. The gradient itself stays as it is.

        Raises:
            TrainingError: it isn't finite; nothing has advanced.
        """
        norm = sum_of_squares(gradient) ** 0.5
        if not norm < float("inf"):
            raise TrainingError(
                f"the gradient's norm is {norm}; nothing was updated: look at rewards, log-probs and the learning rate"
            )
        longest = self._config.max_grad_norm
        self._scale = longest / norm if 0 < longest < norm else 1.0
        return norm

    def step(self, gradients: Mapping[str, Tensor], publisher: WeightPublisher, wait_s: float = 30.0) -> WeightsLive:
        """Apply gradients (float32, by name) and publish what comes of it; the version is live when this returns.

        The buffer is reserved first: nothing is updated where there is none.

        Raises:
            TrainingError: the step before wasn't published; `publish` it. And as `WeightPublisher.update`.
        """
        if self.is_ahead:
            raise TrainingError("the last step isn't published yet; call publish first")
        with publisher.update(wait_s) as update:
            self._update(gradients, update.tensors)
        return self._took(update.live)

    def publish(self, publisher: WeightPublisher, wait_s: float = 30.0) -> WeightsLive:
        """Publish the masters as they are: after a publication that failed, or to begin from a checkpoint.

        One that went live, and whose answer was lost with its worker, isn't made a second time (P29).
        """
        version, _ = publisher.read_live()
        if self.is_ahead and version == publisher.sealed:
            return self._took(WeightsLive(version, 0, 0.0))
        with publisher.update(wait_s) as update:
            self._write(update.tensors)
        return self._took(update.live)

    def apply(self, gradients: Mapping[str, Tensor]) -> None:
        """One AdamW update of the masters."""
        self._update(gradients, None)

    def _update(self, gradients: Mapping[str, Tensor], written: Mapping[str, Tensor] | None) -> None:
        """All of it or nothing. `written` gets the new weights; norms and biases don't decay."""
        moments = self._moments or self._zero_moments()
        first, second = (moments[moment] for moment in MOMENTS)
        config = self._config
        runs = [
            AdamWRun(
                gradients[name], self.masters[name], first[name], second[name],
                None if written is None else written[name], config.weight_decay if len(entry.shape) > 1 else 0.0,
            )
            for name, entry in self._layout.entries.items()
        ]  # fmt: skip
        beta1, beta2, count = config.beta1, config.beta2, self._num_updates + 1
        adamw_(runs, AdamWRates(self.learning_rate, beta1, beta2, config.eps, count, self._scale))
        self._moments, self._num_updates = moments, count
        self._scale = 1.0
        self.is_ahead = True

    def _zero_moments(self) -> dict[str, dict[str, Tensor]]:
        device = self.master.device
        return {moment: self._layout.views(self._layout.allocate(device)) for moment in MOMENTS}

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name in self._layout.entries:
                tensors[name].copy_(self.masters[name])

    def _took(self, live: WeightsLive | None) -> WeightsLive:
        assert live is not None
        if self.is_ahead:
            self.num_steps += 1
            self.is_ahead = False
        self.version = live.version
        return live

    # ---- state -------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments by `master.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`; views, float32."""
        kinds = {"master": self.masters, **self._moments}
        return {f"{kind}.{name}": views[name] for kind, views in kinds.items() for name in self._layout.entries}

    def scalars(self) -> dict[str, Any]:
        """What else `restore` needs; plain values."""
        return {"num_steps": self.num_steps, "schedule": self._num_updates}

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Go on where another optimizer's `tensors` and `scalars` were taken; for an optimizer that was just built.

        Raises:
            TrainingError: they are of another model.
        """
        num_updates = int(scalars["schedule"])
        moments = self._zero_moments() if num_updates else {}
        kinds = {"master": self.masters, **moments}
        wanted = {f"{kind}.{name}" for kind in kinds for name in self._layout.entries}
        if not wanted <= tensors.keys():
            raise TrainingError(f"the optimizer's state lacks {sorted(wanted - tensors.keys())[:4]}")
        with torch.no_grad():
            for kind, views in kinds.items():
                for name in self._layout.entries:
                    views[name].copy_(tensors[f"{kind}.{name}"])
        self._moments, self._num_updates = moments, num_updates
        self.num_steps = int(scalars["num_steps"])


def _rate_factor(config: OptimizerConfig, num_training_steps: int) -> Callable[[int], float]:
    """The configured schedule: the number of updates so far → share of the highest learning rate."""
    from transformers import get_scheduler  # noqa: PLC0415 - slow to import

    arguments = {"min_lr_rate": 0.1} if config.schedule == "cosine_with_min_lr" else None
    carrier = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)  # a schedule is only made for an optimizer
    schedule = get_scheduler(
        config.schedule, carrier, config.warmup_steps, num_training_steps, scheduler_specific_kwargs=arguments
    )
    assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    return lambda num_updates: float(schedule.lr_lambdas[0](num_updates))
