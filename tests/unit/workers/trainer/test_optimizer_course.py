"""The course of the masters over many updates: torch's AdamW under the schedule's formula, and a restart anywhere in
it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from harness.tiny_model import tiny_spec, tiny_weights
from torch import Tensor
from unison.engine.models.layout import WeightLayout
from unison.ipc.errors import TrainingError
from unison.workers.trainer.config import OptimizerConfig
from unison.workers.trainer.optimizer import PolicyOptimizer

SPEC = tiny_spec(model_type="qwen2", num_hidden_layers=1)
"""With biases."""
LAYOUT = WeightLayout(SPEC, torch.float32)
STEPS, WARMUP, RATE = 12, 3, 0.01


def optimizer(dtype: torch.dtype = torch.float32, **config: Any) -> PolicyOptimizer:
    """Over the tiny model's weights."""
    settings = OptimizerConfig(**({"learning_rate": RATE, "warmup_steps": WARMUP} | config))
    return PolicyOptimizer(LAYOUT, tiny_weights(SPEC, 0, dtype), settings, num_training_steps=STEPS)


def gradients(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Views of one flat vector, as a policy's are."""
    flat = LAYOUT.allocate()
    flat.copy_(scale * torch.randn(flat.shape, generator=torch.Generator().manual_seed(seed)))
    return LAYOUT.views(flat)


def masters(each: PolicyOptimizer) -> dict[str, Tensor]:
    """Copies."""
    return {name: value.clone() for name, value in each.masters.items()}


# ---- AdamW -----------------------------------------------------------------------------------------------------------


def constant(step: int) -> float:
    """No warmup."""
    return 1.0


def warm(step: int) -> float:
    """Linear from 0 to 1."""
    return min(1.0, step / WARMUP)


def linear(step: int) -> float:
    """Up, then down to 0 at the last step."""
    return warm(step) if step < WARMUP else (STEPS - step) / (STEPS - WARMUP)


def cosine(step: int) -> float:
    """Loshchilov and Hutter 2017, eq. 5, after the warmup."""
    return warm(step) if step < WARMUP else 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def cosine_with_min_lr(step: int) -> float:
    """The same down to a tenth."""
    return warm(step) if step < WARMUP else 0.1 + 0.9 * cosine(step)


SCHEDULES: dict[str, Callable[[int], float]] = {
    "constant": constant, "constant_with_warmup": warm, "linear": linear, "cosine": cosine,
    "cosine_with_min_lr": cosine_with_min_lr,
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rate(schedule: str) -> None:
    """The rate of every step is its formula's; `learning_rate` is that of the step to come."""
    ours = optimizer(schedule=schedule)
    given = gradients(0)
    for step in range(STEPS):
        assert ours.learning_rate == pytest.approx(RATE * SCHEDULES[schedule](step), abs=1e-12), step
        ours.apply(given)


def reference_step(
    values: dict[str, Tensor], moments: dict[str, tuple[Tensor, Tensor]], given: Mapping[str, Tensor], step: int,
    rate: float, config: OptimizerConfig,
) -> None:  # fmt: skip
    """Loshchilov and Hutter 2019, alg. 2, in float64, `step` counting from 1."""
    for name, value in values.items():
        first, second = moments[name]
        gradient = given[name].double()
        first = config.beta1 * first + (1 - config.beta1) * gradient
        second = config.beta2 * second + (1 - config.beta2) * gradient**2
        moments[name] = (first, second)
        decay = config.weight_decay if value.ndim > 1 else 0.0
        unbiased = first / (1 - config.beta1**step), second / (1 - config.beta2**step)
        values[name] = value - rate * (decay * value + unbiased[0] / (unbiased[1].sqrt() + config.eps))


def test_masters_move_as_the_paper_says() -> None:
    """Every master, over a whole cosine course, is where AdamW's algorithm puts it; only matrices decay."""
    settings = {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95, "schedule": "cosine"}
    ours = optimizer(**settings)
    config = OptimizerConfig(**settings)
    values = {name: ours.masters[name].double() for name in LAYOUT.entries}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in values.items()}
    for step in range(STEPS):
        given = gradients(step)
        ours.apply(given)
        reference_step(values, moments, given, step + 1, RATE * cosine(step), config)
    for name, value in values.items():
        assert float((ours.masters[name].double() - value).abs().max()) <= 1e-6, name
    for name, tensor in ours.tensors().items():
        kind, _, parameter = name.partition(".")
        if kind != "master":
            wanted = moments[parameter][("exp_avg", "exp_avg_sq").index(kind)]
            assert float((tensor.double() - wanted).abs().max()) <= 1e-5, name


@pytest.mark.parametrize("is_fused", [False, True])
def test_masters_move_as_torchs(is_fused: bool) -> None:
    """As torch.optim.AdamW moves the same tensors, within rounding."""
    ours = optimizer(weight_decay=0.1, schedule="constant")
    copies = {name: torch.nn.Parameter(ours.masters[name].clone()) for name in LAYOUT.entries}
    groups = [
        {"params": [each for each in copies.values() if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in copies.values() if each.ndim == 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-8, fused=is_fused, foreach=False)
    for seed in range(4):
        given = gradients(seed)
        for name, parameter in copies.items():
            parameter.grad = given[name].clone()
        theirs.step()
        ours.apply(given)
    for name, parameter in copies.items():
        assert torch.allclose(ours.masters[name], parameter.detach(), rtol=1e-6, atol=1e-8), name


def test_only_matrices_decay() -> None:
    """Under a gradient of 0, norms and biases keep every bit, and matrices shrink by 1 - rate * decay."""
    ours = optimizer(weight_decay=0.5, schedule="constant")
    before = masters(ours)
    ours.apply(gradients(0, scale=0.0))
    kept = {name for name in LAYOUT.entries if torch.equal(ours.masters[name], before[name])}
    assert kept == {name for name in LAYOUT.entries if "norm" in name or name.endswith("bias")}
    assert any("norm" in name for name in kept) and any(name.endswith("bias") for name in kept)
    for name in set(LAYOUT.entries) - kept:
        assert torch.allclose(ours.masters[name], before[name] * (1 - RATE * 0.5), rtol=1e-6, atol=0), name


def test_a_small_update_is_not_lost() -> None:
    """Masters are float32 copies: updates too small for bfloat16 add up, and what they were made from stays."""
    weights = tiny_weights(SPEC)
    ours = PolicyOptimizer(LAYOUT, weights, OptimizerConfig(learning_rate=1e-6, schedule="constant"), STEPS)
    for name in LAYOUT.entries:
        assert torch.equal(ours.masters[name], weights[name].float()), name
    for _ in range(3):
        ours.apply(gradients(0))
    name = "model.norm.weight"
    moved = (ours.masters[name] - weights[name].float()).abs()
    assert float(moved.max()) > 2e-6
    assert torch.equal(ours.masters[name].bfloat16(), weights[name])
    assert torch.equal(weights[name], tiny_weights(SPEC)[name])


def test_gradients_are_only_read() -> None:
    """The policy's gradient is as it was after an update, and no parameter holds on to it."""
    ours = optimizer()
    given = gradients(0)
    ours.apply(given)
    ours.apply(given)
    for name, wanted in gradients(0).items():
        assert torch.equal(given[name], wanted), name
    assert not ours.master.requires_grad and ours.master.grad is None


# ---- clip ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 4.9999, 5.0, 5.0001, 100.0, 0.0])
def test_clip(max_norm: float) -> None:
    """The norm before comes back; the update is that of a gradient scaled to `max_grad_norm`, or, where it is short
    enough, of the gradient as it is; 0: always. The gradient keeps every bit."""
    ours, plain = optimizer(max_grad_norm=max_norm), optimizer()
    flat = LAYOUT.allocate()
    flat[0], flat[2] = 3.0, -4.0
    before = flat.clone()
    assert ours.clip(flat) == 5.0
    ours.apply(LAYOUT.views(flat))
    factor = max_norm / 5.0 if 0 < max_norm < 5.0 else 1.0
    plain.apply(LAYOUT.views(flat * factor))
    for name, tensor in plain.tensors().items():
        assert torch.equal(ours.tensors()[name], tensor), name
    assert torch.equal(flat, before)


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_no_number(bad: float, max_norm: float) -> None:
    """P18: one NaN or infinity is an error that names the norm; nothing has advanced, also where nothing is clipped."""
    ours = optimizer(max_grad_norm=max_norm)
    before, rate = ours.master.clone(), ours.learning_rate
    gradient = torch.tensor([1.0, bad, 2.0])
    with pytest.raises(TrainingError, match="norm is (nan|inf)"):
        ours.clip(gradient)
    assert gradient[[0, 2]].tolist() == [1.0, 2.0]
    assert torch.equal(ours.master, before) and ours.learning_rate == rate and ours.num_steps == 0


# ---- state -----------------------------------------------------------------------------------------------------------


def saved(each: PolicyOptimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a checkpoint keeps: copies of the tensors, and the scalars through JSON."""
    return {name: tensor.clone() for name, tensor in each.tensors().items()}, json.loads(json.dumps(each.scalars()))


@pytest.mark.parametrize("at", [0, 1, WARMUP, 7, STEPS - 1])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_restart_anywhere_changes_no_bit(schedule: str, at: int) -> None:
    """P28: a new optimizer that takes up the state after `at` steps ends where an uninterrupted one does: masters,
    moments and learning rate, bit for bit, whatever weights it was built from."""
    settings = {"schedule": schedule, "weight_decay": 0.05}
    whole = optimizer(**settings)
    state = saved(whole)
    for seed in range(STEPS):
        if seed == at:
            state = saved(whole)
        whole.apply(gradients(seed))
    settings_of_resumed = OptimizerConfig(learning_rate=RATE, warmup_steps=WARMUP, **settings)
    resumed = PolicyOptimizer(LAYOUT, tiny_weights(SPEC, 1), settings_of_resumed, STEPS)
    resumed.restore(*state)
    assert (at == 0) is not any(name.startswith("exp_avg") for name in state[0])
    for seed in range(at, STEPS):
        resumed.apply(gradients(seed))
    assert resumed.learning_rate == whole.learning_rate
    assert resumed.scalars() == whole.scalars()
    assert set(resumed.tensors()) == set(whole.tensors())
    for name, tensor in whole.tensors().items():
        assert torch.equal(resumed.tensors()[name], tensor), name


def test_restored_tensors_are_copied() -> None:
    """The state that was restored from is not written to by later updates."""
    first = optimizer()
    first.apply(gradients(0))
    tensors, scalars = saved(first)
    second = optimizer()
    second.restore(tensors, scalars)
    second.apply(gradients(1))
    for name, tensor in first.tensors().items():
        assert torch.equal(tensors[name], tensor), name


def test_state_is_live() -> None:
    """`tensors` are views of all masters and, after a step, of all moments; tied names come once."""
    ours = optimizer()
    found = ours.tensors()
    assert set(found) == {f"master.{name}" for name in LAYOUT.entries}
    ours.apply(gradients(0))
    ours.apply(gradients(0))
    for name in LAYOUT.entries:
        assert found[f"master.{name}"].data_ptr() == ours.masters[name].data_ptr()
    kinds = ("master", "exp_avg", "exp_avg_sq")
    assert set(ours.tensors()) == {f"{kind}.{name}" for kind in kinds for name in LAYOUT.entries}
    assert {tensor.dtype for tensor in ours.tensors().values()} == {torch.float32}


def test_restore_refuses_another_models_state() -> None:
    """A state that lacks a master is refused before anything is changed."""
    first = optimizer()
    first.apply(gradients(0))
    tensors, scalars = saved(first)
    del tensors["master.model.norm.weight"]
    ours = optimizer()
    before = ours.master.clone()
    with pytest.raises(TrainingError, match="master.model.norm.weight"):
        ours.restore(tensors, scalars)
    assert torch.equal(ours.master, before) and ours.num_steps == 0


def test_restore_refuses_a_state_without_moments() -> None:
    """After updates there are moments: a state that lacks one is refused before anything is changed."""
    first = optimizer()
    first.apply(gradients(0))
    tensors, scalars = saved(first)
    del tensors["exp_avg_sq.model.norm.weight"]
    ours = optimizer()
    before = ours.master.clone()
    with pytest.raises(TrainingError, match="exp_avg_sq.model.norm.weight"):
        ours.restore(tensors, scalars)
    assert torch.equal(ours.master, before) and ours.learning_rate == optimizer().learning_rate


def test_goes_on_from_torchs_own_state() -> None:
    """Masters and moments that torch.optim.AdamW made, by a checkpoint's names, go on as there, within rounding."""
    ours = optimizer(schedule="constant")
    copies = {name: torch.nn.Parameter(ours.masters[name].clone()) for name in LAYOUT.entries}
    theirs = torch.optim.AdamW(
        list(copies.values()), lr=RATE, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, fused=True
    )
    for seed in range(4):
        if seed == 3:
            state = {f"master.{name}": copies[name].detach() for name in copies}
            for moment in ("exp_avg", "exp_avg_sq"):
                state |= {f"{moment}.{name}": theirs.state[copies[name]][moment] for name in copies}
            ours.restore({name: tensor.clone() for name, tensor in state.items()}, {"num_steps": 3, "schedule": 3})
        for name, parameter in copies.items():
            parameter.grad = gradients(seed)[name].clone()
        theirs.step()
    ours.apply(gradients(3))
    for name, parameter in copies.items():
        assert torch.allclose(ours.masters[name], parameter.detach(), rtol=1e-6, atol=1e-8), name


def test_a_step_needs_the_last_one_published() -> None:
    """P29: while the masters are ahead of the live version, a step is refused and touches nothing."""
    ours = optimizer(schedule="constant")
    assert not ours.is_ahead
    ours.apply(gradients(0))
    assert ours.is_ahead and ours.num_steps == 0 and ours.version is None
    before, rate = ours.master.clone(), ours.learning_rate
    unreached: Any = object()
    with pytest.raises(TrainingError, match="publish"):
        ours.step(gradients(1), unreached)
    assert torch.equal(ours.master, before) and ours.learning_rate == rate
    assert ours.is_ahead and ours.num_steps == 0
