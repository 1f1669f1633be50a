"""Masters and AdamW, without a publication."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.tiny_model import tiny_spec, tiny_weights
from torch import Tensor
from unison.engine.models.layout import WeightLayout
from unison.ipc.errors import TrainingError
from unison.workers.trainer.config import OptimizerConfig
from unison.workers.trainer.optimizer import PolicyOptimizer

LAYOUT = WeightLayout(tiny_spec(), torch.float32)


def optimizer(**config: Any) -> PolicyOptimizer:
    settings = OptimizerConfig(**({"learning_rate": 1e-2} | config))
    return PolicyOptimizer(LAYOUT, tiny_weights(tiny_spec()), settings, num_training_steps=20)


def gradients(seed: int) -> dict[str, Tensor]:
    flat = LAYOUT.allocate()
    flat.copy_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(seed)))
    return LAYOUT.views(flat)


def test_it_is_adamw() -> None:
    """Every master moves as under torch's own AdamW; norms have no weight decay."""
    ours = optimizer(weight_decay=0.1)
    names = list(LAYOUT.entries)
    copies = {name: torch.nn.Parameter(tiny_weights(tiny_spec())[name].float()) for name in names}
    groups = [
        {"params": [copies[name] for name in names if copies[name].ndim > 1], "weight_decay": 0.1},
        {"params": [copies[name] for name in names if copies[name].ndim == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
    for seed in range(3):
        given = gradients(seed)
        ours.apply(given)
        ours.is_ahead = False
        for name, parameter in copies.items():
            parameter.grad = given[name].clone()
        reference.step()
    for name, parameter in copies.items():
        assert torch.allclose(ours.masters[name], parameter, atol=1e-6), name


def test_clip() -> None:
    """Scaled to the norm, left alone below it, refused where it isn't finite."""
    ours = optimizer(max_grad_norm=1.0)
    gradient = torch.tensor([3.0, 4.0])
    assert ours.clip(gradient) == 5.0 and torch.allclose(gradient, torch.tensor([0.6, 0.8]))
    assert ours.clip(gradient) == pytest.approx(1.0)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(TrainingError, match="norm"):
            ours.clip(torch.tensor([1.0, bad]))


@pytest.mark.parametrize("schedule", ["constant_with_warmup", "cosine", "cosine_with_min_lr", "linear", "polynomial"])
def test_restore_goes_on_bit_for_bit(schedule: str) -> None:
    """P28: masters, moments, step count and learning rate go on as if nothing had been between."""
    config = {"schedule": schedule, "warmup_steps": 2, "weight_decay": 0.01}
    whole, first = optimizer(**config), optimizer(**config)
    for seed in range(5):
        for each in (whole, first) if seed < 3 else (whole,):
            each.apply(gradients(seed))
            each.is_ahead = False
    second = optimizer(**config)
    second.restore({name: tensor.clone() for name, tensor in first.tensors().items()}, first.scalars())
    assert second.learning_rate == first.learning_rate
    for seed in (3, 4):
        second.apply(gradients(seed))
        second.is_ahead = False
    assert torch.equal(second.master, whole.master) and second.learning_rate == whole.learning_rate


def test_restore_refuses_another_model() -> None:
    with pytest.raises(TrainingError, match="lacks"):
        optimizer().restore({}, {"num_steps": 0, "schedule": 0})


def test_an_unpublished_step_is_not_stepped_over() -> None:
    """The gradient of a step is applied once: a step that isn't published yet refuses the next one."""
    ours = optimizer()
    ours.apply(gradients(0))
    with pytest.raises(TrainingError, match="isn't published"):
        ours.step(gradients(1), None)  # type: ignore[arg-type]
    assert ours.num_steps == 0
