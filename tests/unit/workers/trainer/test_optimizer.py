"""Masters and AdamW, without a publication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.serving import WorkerThread
from harness.tiny_directory import write_tiny_directory
from harness.tiny_model import tiny_spec, tiny_weights
from torch import Tensor
from unison.engine.models.layout import WeightLayout
from unison.ipc.arena.publisher import WeightPublisher
from unison.ipc.client import Client
from unison.ipc.errors import TrainingError, WorkerLostError
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
    """The next update, and no other, has its gradient scaled to the norm; one that isn't finite is refused."""
    ours, plain = optimizer(max_grad_norm=1.0), optimizer(max_grad_norm=1.0)
    flat = LAYOUT.allocate()
    flat[0], flat[1] = 3.0, 4.0
    assert ours.clip(flat) == 5.0 and flat[:2].tolist() == [3.0, 4.0]
    ours.apply(LAYOUT.views(flat))
    scaled = flat * 0.2
    assert plain.clip(scaled) == pytest.approx(1.0)
    plain.apply(LAYOUT.views(scaled))
    assert torch.equal(ours.master, plain.master)
    ours.apply(LAYOUT.views(flat))
    plain.apply(LAYOUT.views(flat))
    assert torch.equal(ours.master, plain.master)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(TrainingError, match="norm"):
            ours.clip(torch.tensor([1.0, bad]))


def test_a_step_without_a_buffer_stays_clipped() -> None:
    """Nothing moves where no buffer can be had, and the step is clipped when it is tried again."""
    ours, once = optimizer(max_grad_norm=0.5), optimizer(max_grad_norm=0.5)
    flat = LAYOUT.allocate().fill_(1.0)
    before = ours.master.clone()
    ours.clip(flat)
    once.clip(flat)
    unreached: Any = object()
    with pytest.raises(AttributeError):
        ours.step(LAYOUT.views(flat), unreached)
    assert torch.equal(ours.master, before) and not ours.is_ahead
    ours.apply(LAYOUT.views(flat))
    once.apply(LAYOUT.views(flat))
    assert torch.equal(ours.tensors()["exp_avg.model.norm.weight"], once.tensors()["exp_avg.model.norm.weight"])
    assert float(ours.tensors()["exp_avg.model.norm.weight"].max()) < 0.1


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


class _LosesAnswers:
    """A client whose worker dies between the flip and the answer: the call is carried out, and nobody hears of it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.is_lossy = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def publish(self, *arguments: Any) -> Any:
        """As Client.publish."""
        answer = self._client.publish(*arguments)
        if self.is_lossy:
            self.is_lossy = False
            raise WorkerLostError("the worker died")
        return answer


def test_a_step_is_one_act(tmp_path: Path) -> None:
    """V1, P29: step, fence, digest, publish, ack; an answer that was lost makes no second version and no second update,
    and nothing counts before it is live."""
    write_tiny_directory(tmp_path / "m")
    with WorkerThread(tmp_path / "r", tmp_path / "m", {}) as worker, Client.connect(worker.run_dir) as client:
        lossy: Any = _LosesAnswers(client)
        with WeightPublisher(lossy) as publisher:
            before, tensors = publisher.read_live()
            ours = PolicyOptimizer(LAYOUT, tensors, OptimizerConfig(learning_rate=1e-2), 20)
            with pytest.raises(WorkerLostError):
                ours.step(gradients(0), publisher)
            assert ours.is_ahead and ours.num_steps == 0
            masters = ours.master.clone()
            live = ours.publish(publisher)
            assert (live.version.ordinal, ours.num_steps) == (before.ordinal + 1, 1) and not ours.is_ahead
            assert torch.equal(ours.master, masters), "applied once"
            assert publisher.read_live()[0] == live.version
            again = ours.step(gradients(1), publisher)
            assert again.version.ordinal == before.ordinal + 2 and ours.num_steps == 2
            version, tensors = publisher.read_live()
            assert version == again.version
            for name, master in ours.masters.items():
                assert torch.equal(tensors[name], master.to(torch.bfloat16)), name
            del tensors
