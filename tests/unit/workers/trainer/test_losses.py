"""Each loss against an oracle written from its paper, against TRL where TRL has it, and however the batch is cut."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from unison.workers.trainer.config import RECIPES, AlgorithmConfig
from unison.workers.trainer.losses import (
    LossScale,
    LossTokens,
    correction_weights,
    kl_estimate,
    policy_loss,
)

LENGTHS = (5, 1, 0, 7, 3)
MAX_TOKENS = 9


class Batch:
    """Random log-probs and advantages of sequences, padded for oracles and flat for ours."""

    def __init__(self, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (len(lengths), MAX_TOKENS)

        def draw(scale: float) -> Tensor:
            return torch.randn(shape, generator=generator) * scale

        self.lengths = lengths
        self.mask = (torch.arange(MAX_TOKENS)[None] < torch.tensor(lengths)[:, None]).float()
        self.logprobs = (draw(1.0) - 3.0).requires_grad_(True)
        self.anchor = self.logprobs.detach() + draw(0.3)
        self.behaviour = self.anchor + draw(0.2)
        self.reference = self.logprobs.detach() + draw(0.5)
        self.advantages = torch.randn(len(lengths), generator=generator)

    def tokens(self, rows: Sequence[int] | None = None) -> LossTokens:
        """The flat view of some sequences, all by default."""
        rows = list(range(len(self.lengths))) if rows is None else list(rows)
        keep = self.mask[rows].bool()
        sequence = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([self.lengths[row] for row in rows]))
        advantages = self.advantages[rows][:, None].expand(-1, MAX_TOKENS)
        return LossTokens(
            self.logprobs[rows][keep], self.anchor[rows][keep], self.behaviour[rows][keep], advantages[keep],
            torch.ones(int(keep.sum())), sequence, len(rows), self.reference[rows][keep],
        )  # fmt: skip

    @property
    def scale(self) -> LossScale:
        """Denominators of the whole batch."""
        return LossScale(len(self.lengths), int(self.mask.sum()), MAX_TOKENS)


def oracle(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """The losses once more, padded, as their papers write them."""
    mask, advantages = batch.mask, batch.advantages[:, None]
    lengths = mask.sum(-1).clamp(min=1)
    log_ratio = batch.logprobs - batch.anchor
    low, high = 1 - config.clip_low, 1 + config.clip_high
    name = config.name
    if name == "rloo":
        ratio = torch.exp((log_ratio * mask).sum(-1))
        terms = -torch.minimum(ratio * batch.advantages, ratio.clamp(low, high) * batch.advantages)
        kl = torch.zeros(())
        if config.kl_coef:
            kl = config.kl_coef * (kl_estimate(batch.logprobs, batch.reference, config.kl_estimator) * mask).sum()
        return (terms * (mask.sum(-1) > 0)).sum() / len(terms) + kl / len(terms)
    if name == "gspo":
        log_ratio = ((log_ratio * mask).sum(-1) / lengths)[:, None].expand_as(mask)
    ratio = torch.exp(log_ratio)
    if name == "cispo":
        per_token = -ratio.detach().clamp(max=high) * advantages * batch.logprobs
    else:
        per_token = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if config.kl_coef:
        per_token = per_token + config.kl_coef * kl_estimate(batch.logprobs, batch.reference, config.kl_estimator)
    if name in ("grpo", "gspo"):
        return ((per_token * mask).sum(-1) / lengths).mean()
    if name == "dr_grpo":
        return (per_token * mask).sum() / (len(mask) * MAX_TOKENS)
    return (per_token * mask).sum() / mask.sum()


def value_and_gradient(loss: Tensor, batch: Batch) -> tuple[float, Tensor]:
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    return float(loss.detach()), gradient


def ours(batch: Batch, config: AlgorithmConfig) -> tuple[float, Tensor]:
    return value_and_gradient(policy_loss(batch.tokens(), batch.scale, config).loss, batch)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("name", RECIPES)
def test_oracle(name: str, kl_coef: float) -> None:
    """Value and gradient of every loss equal the padded oracle's, at lengths 0 and 1 too (P24)."""
    config = AlgorithmConfig(name=name, kl_coef=kl_coef, clip_low=0.15, clip_high=0.25)
    for seed in range(5):
        batch = Batch(seed)
        value, gradient = ours(batch, config)
        wanted, wanted_gradient = value_and_gradient(oracle(batch, config), batch)
        assert value == pytest.approx(wanted, abs=1e-5)
        assert torch.allclose(gradient, wanted_gradient, atol=1e-5, rtol=1e-5)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", RECIPES)
def test_cut_and_order(name: str) -> None:
    """P27: the sum over micro-batches is the loss, however the batch is cut and in whatever order."""
    config = AlgorithmConfig(name=name, kl_coef=0.05)
    batch = Batch(3)
    whole, gradient = ours(batch, config)
    for parts in ([[0], [1], [2], [3], [4]], [[4, 2], [0, 3, 1]], [[2], [3, 4, 1, 0]]):
        pieces = [policy_loss(batch.tokens(rows), batch.scale, config).loss for rows in parts]
        value, piecewise = value_and_gradient(torch.stack(pieces).sum(), batch)
        assert value == pytest.approx(whole, abs=1e-6)
        assert torch.allclose(piecewise, gradient, atol=1e-6)


def test_masked_tokens_change_nothing() -> None:
    """P26: tokens that don't count have no gradient and no part in any denominator."""
    batch = Batch(1, (4, 4))
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0])
    for name in RECIPES:
        masked = LossTokens(**(vars(batch.tokens()) | {"mask": mask}))
        config = AlgorithmConfig(name=name)
        loss = policy_loss(masked, LossScale(2, 4, MAX_TOKENS), config).loss
        _, gradient = value_and_gradient(loss, batch)
        assert not gradient[1].any() and gradient[0].any(), name


def test_empty_micro_batch() -> None:
    """P24: no tokens at all give a zero without NaN."""
    batch = Batch(0, (0, 0))
    for name in RECIPES:
        loss = policy_loss(batch.tokens(), LossScale(0, 0, MAX_TOKENS), AlgorithmConfig(name=name)).loss
        assert float(loss.detach()) == 0.0


def test_kl_estimators() -> None:
    """k1 is the log-ratio, k2 half its square, k3 never negative; k1 and k3 have one mean under the policy."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5])
    reference = torch.tensor([-1.5, -1.0, -0.5])
    assert torch.allclose(kl_estimate(logprobs, reference, "k1"), logprobs - reference)
    assert torch.allclose(kl_estimate(logprobs, reference, "k2"), 0.5 * (logprobs - reference) ** 2)
    k3 = kl_estimate(logprobs, reference, "k3")
    assert (k3 >= 0).all() and float(k3[2]) == 0.0
    policy, other = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy / other).log()).sum()
    for name in ("k1", "k3"):
        assert float((policy * kl_estimate(policy.log(), other.log(), name)).sum()) == pytest.approx(float(exact))


def test_corrections() -> None:
    """TIS truncates, IcePop masks outside its bounds, the sequence forms look at product and geometric mean."""
    batch = Batch(2)
    tokens = batch.tokens()
    ratio = torch.exp(tokens.anchor - tokens.behaviour).detach()
    low, high = 0.9, 1.2

    def weights(name: str) -> Tensor:
        return correction_weights(
            tokens, AlgorithmConfig(correction=name, correction_low=low, correction_high=high)
        )

    assert torch.equal(weights("none"), torch.ones_like(ratio))
    assert torch.allclose(weights("tis"), ratio.clamp(max=high))
    assert torch.allclose(weights("icepop"), torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros(())))
    for row, length in enumerate(LENGTHS):
        mine = tokens.sequence == row
        if length:
            product = float(ratio[mine].prod())
            assert torch.allclose(weights("sequence_tis")[mine], torch.tensor(min(product, high)))
            kept = float(low <= product ** (1 / length) <= high)
            assert torch.equal(weights("sequence_mask")[mine], torch.full((length,), kept))
    assert 0 < float((weights("icepop") == 0).float().mean()) < 1


def test_a_correction_scales_the_loss_of_its_tokens() -> None:
    """A token whose weight is 0 has no gradient; the others keep theirs, scaled."""
    batch = Batch(4)
    config = AlgorithmConfig(name="dapo", correction="icepop", correction_low=0.9, correction_high=1.2)
    terms = policy_loss(batch.tokens(), batch.scale, config)
    _, gradient = value_and_gradient(terms.loss, batch)
    flat = gradient[batch.mask.bool()]
    assert not flat[terms.weight == 0].any() and flat[terms.weight > 0].any()


# ---- against TRL -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl() -> Any:
    """TRL's two trainers, whose loss functions are called without a trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer import grpo_trainer, rloo_trainer
    return SimpleNamespace(grpo=grpo_trainer.GRPOTrainer, rloo=rloo_trainer.RLOOTrainer)


class _Anything(dict):  # type: ignore[type-arg]
    """Metrics that are written and never read."""

    def __missing__(self, key: Any) -> Any:
        self[key] = _Anything() if not isinstance(key, str) or key in ("train", "eval") else []
        return self[key]


def trl_loss(trl: Any, batch: Batch, config: AlgorithmConfig, kind: str) -> Tensor:
    """TRL's loss of the same batch: its own code, with our log-probs in place of a model's."""
    entropies = torch.zeros_like(batch.mask)
    is_cispo = config.name == "cispo"
    accelerator = SimpleNamespace(
        gather=lambda x: x, reduce=lambda x, **_: x, gather_for_metrics=lambda x: x, num_processes=1,
        sync_gradients=True,
    )  # fmt: skip
    self = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logprobs, entropies, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=config.kl_coef,
        importance_sampling_level="sequence" if config.name == "gspo" else "token", loss_type=kind,
        epsilon_low=config.clip_low, epsilon_high=config.clip_high + (1.0 if is_cispo else 0.0), use_vllm=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        current_gradient_accumulation_steps=1, max_completion_length=MAX_TOKENS, accelerator=accelerator,
        model=SimpleNamespace(training=True), _metrics=_Anything(), _entropy_bonus_enabled=False,
        vllm_importance_sampling_correction=False,
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(len(batch.lengths), 1), "prompt_mask": torch.ones(len(batch.lengths), 1),
        "completion_ids": torch.zeros_like(batch.mask), "completion_mask": batch.mask,
        "advantages": batch.advantages, "old_per_token_logps": batch.anchor,
        "ref_per_token_logps": batch.reference, "num_items_in_batch": batch.mask.sum(),
        "old_logps": (batch.anchor * batch.mask).sum(-1),
    }  # fmt: skip
    trainer = trl.rloo if kind == "rloo" else trl.grpo
    loss: Tensor = trainer._compute_loss(self, None, inputs)
    return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("grpo", "grpo"), ("dr_grpo", "dr_grpo"), ("dapo", "dapo"), ("gspo", "grpo"), ("cispo", "cispo"),
        ("rloo", "rloo"),
    ],  # fmt: skip
)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_trl(trl: Any, name: str, kind: str, kl_coef: float) -> None:
    """Value and gradient equal TRL's, by TRL's own code (whose RLOO has its KL in the reward alone)."""
    if name == "rloo" and kl_coef:
        kl_coef = 0.0
    config = AlgorithmConfig(name=name, kl_coef=kl_coef, clip_low=0.15, clip_high=0.25)
    for seed in range(3):
        batch = Batch(seed, (5, 1, 7, 3))
        value, gradient = ours(batch, config)
        wanted, wanted_gradient = value_and_gradient(trl_loss(trl, batch, config, kind), batch)
        assert value == pytest.approx(wanted, abs=1e-5)
        assert torch.allclose(gradient, wanted_gradient, atol=1e-5)
