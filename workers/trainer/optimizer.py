"""PolicyOptimizer: float32 masters, AdamW, and the step that ends in a live version.

A step is one act: update the masters, write them rounded into the reserved buffer (the publication's only copy), fence,
hash, publish, wait for the acknowledgement. `num_steps` and `version` advance with the acknowledgement and not before.
A publication that fails leaves the masters ahead and the old version live; `publish` then publishes them again, and the
gradient is never applied twice.

Owns: masters, moments, schedule. Knows nothing of samples or losses. Called by the training loop; usable alone.
Source: Loshchilov and Hutter 2019 (AdamW), alg. 2.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
        from transformers import get_scheduler  # noqa: PLC0415 - slow to import

        self._config = config
        self._layout = layout
        self.master = layout.allocate(next(iter(tensors.values())).device)
        """float32 [elements]."""
        self.masters = layout.views(self.master)
        """Views of it by Hugging Face name."""
        with torch.no_grad():
            for name in layout.entries:
                self.masters[name].copy_(tensors[name])
        self._parameters = {
            name: torch.nn.Parameter(self.masters[name], requires_grad=False) for name in layout.entries
        }
        decayed = [name for name, entry in layout.entries.items() if len(entry.shape) > 1]
        plain = [name for name in layout.entries if name not in set(decayed)]
        groups = [
            {"params": [self._parameters[name] for name in names], "weight_decay": decay}
            for names, decay in ((decayed, config.weight_decay), (plain, 0.0)) if names
        ]  # fmt: skip
        self._adamw = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        arguments = {"min_lr_rate": 0.1} if config.schedule == "cosine_with_min_lr" else None
        self._schedule = get_scheduler(
            config.schedule, self._adamw, config.warmup_steps, num_training_steps, scheduler_specific_kwargs=arguments
        )
        self.num_steps = 0
        """Steps whose version has been live."""
        self.version: PolicyVersion | None = None
        """The last one."""
        self.is_ahead = False
        """True between an update of the masters and its publication."""

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self._schedule.get_last_lr()[0])

    def clip(self, gradient: Tensor) -> float:
        """Scale a flat gradient down to the configured norm, in place; returns its norm before.

        Raises:
            TrainingError: it isn't finite; nothing has advanced.
        """
        norm = float(torch.linalg.vector_norm(gradient))
        if not norm < float("inf"):
            raise TrainingError(
                f"the gradient's norm is {norm}; nothing was updated: look at rewards, log-probs and the learning rate"
            )
        if self._config.max_grad_norm and norm > self._config.max_grad_norm:
            gradient.mul_(self._config.max_grad_norm / norm)
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
            self.apply(gradients)
            self._write(update.tensors)
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
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(True).grad = gradients[name]
        self._adamw.step()
        for parameter in self._parameters.values():
            parameter.requires_grad_(False).grad = None
        self._schedule.step()
        self.is_ahead = True

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
        found = {f"master.{name}": self.masters[name] for name in self._layout.entries}
        for name, parameter in self._parameters.items():
            state = self._adamw.state.get(parameter)
            if state:
                found |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
        return found

    def scalars(self) -> dict[str, Any]:
        """What else `restore` needs; plain values."""
        return {"num_steps": self.num_steps, "schedule": self._schedule.state_dict()["last_epoch"]}

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Go on where another optimizer's `tensors` and `scalars` were taken; for an optimizer that was just built.

        Raises:
            TrainingError: they are of another model.
        """
        wanted = {f"master.{name}" for name in self._layout.entries}
        if not wanted <= tensors.keys():
            raise TrainingError(f"the optimizer's state lacks {sorted(wanted - tensors.keys())[:4]}")
        self.num_steps = int(scalars["num_steps"])
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[f"master.{name}"])
                if f"exp_avg.{name}" in tensors:
                    state = {moment: tensors[f"{moment}.{name}"].to(parameter.device, copy=True) for moment in MOMENTS}
                    steps = torch.tensor(float(scalars["schedule"]), device=parameter.device)
                    self._adamw.state[parameter] = {"step": steps, **state}
        with warnings.catch_warnings():
            # torch misses the optimizer's own steps, which were taken before.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(int(scalars["schedule"])):
                self._schedule.step()
