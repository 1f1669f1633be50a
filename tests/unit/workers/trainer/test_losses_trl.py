"""Losses against TRL's own `_compute_loss`, called without a trainer, with masks that have holes and empty rows."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from unison.workers.trainer.config import AlgorithmConfig
from unison.workers.trainer.losses import LossScale, LossTerms, LossTokens, correction_weights, policy_loss

pytestmark = pytest.mark.slow

MAX_TOKENS = 8
LOSS_TYPES = {
    "grpo": ("grpo", "token"), "dr_grpo": ("dr_grpo", "token"), "dapo": ("dapo", "token"),
    "gspo": ("grpo", "sequence"), "cispo": ("cispo", "token"),
}  # fmt: skip
"""TRL's names: `loss_type` and `importance_sampling_level`."""
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 1, 1],  # a hole, as a tool's answer leaves it
        [0, 0, 0, 0, 0, 0, 0, 0],  # masked as a whole, as TRL's mask_truncated_completions does it
        [0, 1, 1, 0, 0, 0, 0, 0],
    ],
    dtype=torch.float32,
)


@pytest.fixture(scope="module")
def trainers() -> Iterator[Any]:
    """TRL's two trainer classes; the import warns, and takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.rloo_trainer import RLOOTrainer
    yield SimpleNamespace(grpo=GRPOTrainer, rloo=RLOOTrainer)


@dataclass(frozen=True, eq=False)
class Batch:
    """Padded log-probs [B, MAX_TOKENS], as TRL wants them."""

    logprobs: Tensor
    anchor: Tensor
    behaviour: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor

    @staticmethod
    def draw(seed: int, mask: Tensor = MASK) -> Batch:
        """Log-probs of neighbouring versions."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn((4, *mask.shape), generator=generator)
        logprobs = noise[0] - 3.0
        anchor = logprobs + 0.25 * noise[1]
        return Batch(
            logprobs.requires_grad_(True), anchor.detach(), anchor.detach() + 0.25 * noise[2],
            logprobs.detach() + 0.5 * noise[3], torch.randn(len(mask), generator=generator), mask,
        )  # fmt: skip

    def tokens(self) -> LossTokens:
        """Every position as a token; the mask says which count."""
        sequence = torch.arange(len(self.mask)).repeat_interleave(MAX_TOKENS)
        return LossTokens(
            self.logprobs.flatten(), self.anchor.flatten(), self.behaviour.flatten(), self.advantages[sequence],
            self.mask.flatten(), sequence, len(self.mask), self.reference.flatten(),
        )  # fmt: skip

    def ours(self, config: AlgorithmConfig) -> LossTerms:
        """Our loss of the whole batch."""
        return policy_loss(self.tokens(), LossScale(len(self.mask), int(self.mask.sum()), MAX_TOKENS), config)


def trl_self(batch: Batch, config: AlgorithmConfig) -> SimpleNamespace:
    """What TRL's loss reads from its trainer: one process, no accumulation, our log-probs for the model's."""
    loss_type, level = LOSS_TYPES.get(config.name, ("", "token"))
    accelerator = SimpleNamespace(
        gather=lambda values: values, gather_for_metrics=lambda values: values,
        reduce=lambda values, reduction: values, num_processes=1, sync_gradients=True,
    )  # fmt: skip
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logprobs, torch.zeros_like(batch.mask), None),
        _metrics={"train": defaultdict(list)}, _entropy_bonus_enabled=False, accelerator=accelerator,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        aux_loss_enabled=False, beta=config.kl_coef, current_gradient_accumulation_steps=1,
        epsilon_low=config.clip_low, importance_sampling_level=level, loss_type=loss_type,
        # TRL's bound of CISPO is the ratio itself, ours what it may exceed 1 by.
        epsilon_high=1 + config.clip_high if config.name == "cispo" else config.clip_high,
        max_completion_length=MAX_TOKENS, model=SimpleNamespace(training=True), off_policy_mask_threshold=None,
        top_entropy_quantile=1.0, use_vllm=config.correction != "none", vllm_importance_sampling_correction=True,
    )  # fmt: skip


def trl_inputs(batch: Batch) -> dict[str, Tensor]:
    """One generation batch, in TRL's words."""
    prompt = torch.zeros((len(batch.mask), 1), dtype=torch.int64)
    return {
        "prompt_ids": prompt, "prompt_mask": prompt + 1, "completion_ids": torch.zeros(batch.mask.shape).long(),
        "completion_mask": batch.mask, "advantages": batch.advantages, "old_per_token_logps": batch.anchor,
        "ref_per_token_logps": batch.reference, "num_items_in_batch": batch.mask.sum(),
        "old_logps": (batch.anchor * batch.mask).sum(1),
    }  # fmt: skip


def assert_equal(ours: Tensor, theirs: Tensor, batch: Batch) -> None:
    """One value and one gradient, to 1e-5."""
    (gradient,) = torch.autograd.grad(ours, batch.logprobs)
    (wanted,) = torch.autograd.grad(theirs, batch.logprobs)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-5)
    assert float((gradient - wanted).abs().max()) <= 1e-5
    assert wanted.any()


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("name", LOSS_TYPES)
def test_grpo_and_its_relatives(trainers: Any, name: str, kl_coef: float) -> None:
    """P26: value and gradient are TRL's, with k3 in the loss too, over masks with holes and rows without tokens."""
    config = AlgorithmConfig(name=name, clip_low=0.15, clip_high=0.3, kl_coef=kl_coef)
    for seed in range(4):
        batch = Batch.draw(seed)
        trainer = trl_self(batch, config)
        theirs = trainers.grpo._compute_loss(trainer, trainer.model, trl_inputs(batch))
        terms = batch.ours(config)
        assert_equal(terms.loss, theirs, batch)
        if name in ("grpo", "dr_grpo", "dapo"):
            fraction = float((terms.is_clipped * batch.mask.flatten()).sum() / batch.mask.sum())
            assert fraction == pytest.approx(trainer._metrics["train"]["clip_ratio/region_mean"][0], abs=1e-6)
            assert fraction > 0


def test_rloo(trainers: Any) -> None:
    """RLOO's clipped product of a sequence's ratios is TRL's, which has its KL in the reward alone."""
    config = AlgorithmConfig(name="rloo", clip_low=0.15, clip_high=0.3)
    mask = MASK[MASK.any(1)]  # a row without tokens is -A to TRL, which is no gradient, and 0 to us
    for seed in range(6):
        batch = Batch.draw(seed, mask)
        trainer = trl_self(batch, config)
        theirs = trainers.rloo._compute_loss(trainer, trainer.model, trl_inputs(batch))
        terms = batch.ours(config)
        assert_equal(terms.loss, theirs, batch)
        is_clipped = terms.is_clipped.view(mask.shape)[:, 0].float()
        assert float(is_clipped.mean()) == pytest.approx(trainer._metrics["train"]["clip_ratio/region_mean"][0])


@pytest.mark.parametrize("correction", ["tis", "icepop", "sequence_tis", "sequence_mask"])
@pytest.mark.parametrize("name", LOSS_TYPES)
def test_corrections_enter_where_trl_has_them(trainers: Any, name: str, correction: str) -> None:
    """P19: the ratio of anchor to sampler multiplies the policy's term, and not the KL, as TRL's
    `vllm_importance_sampling_correction` does."""
    config = AlgorithmConfig(name=name, kl_coef=0.1, correction=correction, correction_low=0.95, correction_high=1.05)
    batch = Batch.draw(5)
    trainer, inputs = trl_self(batch, config), trl_inputs(batch)
    weights = correction_weights(batch.tokens(), config).view(batch.mask.shape)
    assert (weights != 1).any() and weights.any()
    theirs = trainers.grpo._compute_loss(trainer, trainer.model, inputs | {"importance_sampling_ratio": weights})
    assert_equal(batch.ours(config).loss, theirs, batch)


@pytest.mark.parametrize("correction", ["tis", "icepop", "sequence_tis"])
def test_correction_weights_are_trls(correction: str) -> None:
    """Token and sequence ratios, truncated or masked, as TRL makes them in `_generate_and_score_completions`."""
    low, high = 0.8, 1.2
    batch = Batch.draw(5)
    config = AlgorithmConfig(correction=correction, correction_low=low, correction_high=high)
    difference = (batch.anchor - batch.behaviour) * batch.mask
    ratio = torch.exp(difference.sum(-1, keepdim=True) if correction == "sequence_tis" else difference)
    if correction == "icepop":  # token_mask
        wanted = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    else:  # token_truncate, sequence_truncate
        wanted = torch.clamp(ratio, max=high)
    found = correction_weights(batch.tokens(), config).view(batch.mask.shape)
    counts = batch.mask.bool()
    assert torch.allclose(found[counts], wanted.expand_as(found)[counts], atol=1e-6)
