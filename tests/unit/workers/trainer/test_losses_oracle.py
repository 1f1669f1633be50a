"""Losses against a padded oracle in float64 that knows nothing of losses.py: every algorithm, KL and correction, with
masked tokens inside, and however a batch is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from harness.examples import num_examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from unison.workers.trainer.config import RECIPES, AlgorithmConfig
from unison.workers.trainer.losses import (
    LossScale,
    LossTerms,
    LossTokens,
    correction_weights,
    kl_estimate,
    policy_loss,
)

LONGEST = 7
MAX_TOKENS = 9
MASKS = ([1, 1, 1, 1, 1], [1], [], [0, 0, 0], [1, 0, 1, 1, 0, 0, 1], [0], [0, 1, 1])
"""Which tokens count: whole sequences, one of one token, one of none, ones that are masked as a whole or in part."""
CORRECTIONS = ("tis", "icepop", "sequence_tis", "sequence_mask")
KL_TERMS = (None, "k1", "k2", "k3")


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences as [B, LONGEST] with padding; `flat` gives what the losses take."""

    masks: Sequence[Sequence[int]]
    logprobs: Tensor
    anchor: Tensor
    behaviour: Tensor
    reference: Tensor
    advantages: Tensor

    @staticmethod
    def draw(seed: int, masks: Sequence[Sequence[int]] = MASKS) -> Batch:
        """Log-probs near each other, as two versions of one policy have them."""
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> Tensor:
            return torch.randn((len(masks), LONGEST), generator=generator) * scale

        logprobs = normal(1.0) - 4.0
        anchor = logprobs + normal(0.25)
        behaviour = anchor + normal(0.25)
        reference = logprobs + normal(0.5)
        advantages = torch.randn(len(masks), generator=generator)
        return Batch(masks, logprobs.requires_grad_(True), anchor, behaviour, reference, advantages)

    @property
    def mask(self) -> Tensor:
        """float64 [B, LONGEST]."""
        rows = [[*row, *[0] * (LONGEST - len(row))] for row in self.masks]
        return torch.tensor(rows, dtype=torch.float64).view(len(rows), LONGEST)

    @property
    def scale(self) -> LossScale:
        """Denominators of the whole batch."""
        return LossScale(len(self.masks), sum(map(sum, self.masks)), MAX_TOKENS)

    def flat(self, rows: Sequence[int] | None = None) -> LossTokens:
        """Some sequences in some order, all by default, as one run of tokens."""
        rows = range(len(self.masks)) if rows is None else rows
        place = [(row, at) for row in rows for at in range(len(self.masks[row]))]
        row_N = torch.tensor([row for row, _ in place], dtype=torch.int64)
        at_N = torch.tensor([at for _, at in place], dtype=torch.int64)
        return LossTokens(
            self.logprobs[row_N, at_N], self.anchor[row_N, at_N], self.behaviour[row_N, at_N], self.advantages[row_N],
            torch.tensor([self.masks[row][at] for row, at in place], dtype=torch.float32),
            torch.tensor([new for new, row in enumerate(rows) for _ in self.masks[row]], dtype=torch.int64),
            len(rows), self.reference[row_N, at_N],
        )  # fmt: skip

    def present(self, values: Tensor) -> Tensor:
        """Values of the tokens that are there, masked ones included, one sequence after the other."""
        return torch.cat([values[row, : len(mask)] for row, mask in enumerate(self.masks)])


# ---- the papers' formulas --------------------------------------------------------------------------------------------

Term = Callable[[Tensor, Tensor, float, float], Tensor]
"""(ratio, advantage, 1 - clip_low, 1 + clip_high) → what is maximised."""


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Schulman et al. 2017, eq. 7."""
    return torch.min(ratio * advantage, torch.clamp(ratio, low, high) * advantage)


def per_token_kl(policy: Tensor, reference: Tensor, estimator: str | None) -> Tensor:
    """Schulman 2020, with r = reference / policy: -log r, (log r)² / 2, r - 1 - log r."""
    if estimator is None:
        return torch.zeros_like(policy)
    r = torch.exp(reference) / torch.exp(policy)
    return {"k1": -r.log(), "k2": r.log() ** 2 / 2, "k3": r - 1 - r.log()}[estimator]


def oracle(batch: Batch, config: AlgorithmConfig, weights: Tensor) -> Tensor:
    """The loss of a padded batch; `weights` [B, LONGEST] multiply the policy's term and not the KL."""
    policy, anchor = batch.logprobs.double(), batch.anchor.double()
    mask, weights = batch.mask, weights.double()
    advantage = batch.advantages.double()[:, None].expand_as(mask)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    count = mask.sum(1)
    kl = config.kl_coef * per_token_kl(policy, batch.reference.double(), config.kl_estimator)
    ratio = (policy - anchor).exp()
    name = config.name

    def token_mean(term: Tensor) -> Tensor:
        """Yu et al. 2025, eq. 8: over all tokens of all outputs."""
        return (term * mask).sum() / mask.sum()

    def sequence_mean(term: Tensor) -> Tensor:
        """Shao et al. 2024, eq. 3: 1/G Σ 1/|o| Σ."""
        return ((term * mask).sum(1) / count.clamp(min=1)).mean()

    if name == "grpo":
        return sequence_mean(kl - weights * surrogate(ratio, advantage, low, high))
    if name == "dr_grpo":  # Liu et al. 2025: no 1/|o|, a constant in its place
        return ((kl - weights * surrogate(ratio, advantage, low, high)) * mask).sum() / (len(mask) * MAX_TOKENS)
    if name in ("dapo", "reinforce_pp", "reinforce_pp_baseline"):
        return token_mean(kl - weights * surrogate(ratio, advantage, low, high))
    if name == "gspo":  # Zheng et al. 2025, eq. 7: s = (π / π_old)^(1/|o|)
        s = torch.exp(((policy - anchor) * mask).sum(1) / count.clamp(min=1))[:, None].expand_as(mask)
        return sequence_mean(kl - weights * surrogate(s, advantage, low, high))
    if name == "cispo":  # MiniMax 2025, eq. 4: sg(clip(r)) A log π
        return token_mean(kl - weights * torch.clamp(ratio, max=high).detach() * advantage * policy)
    assert name == "rloo"  # Ahmadian et al. 2024: one action per sequence, whose probability is the tokens' product
    product = torch.exp(((policy - anchor) * mask).sum(1))
    term = surrogate(product, batch.advantages.double(), low, high) * (count > 0)
    weight = (weights * mask).sum(1) / count.clamp(min=1)
    return ((kl * mask).sum(1) - weight * term).mean()


def loop_weights(batch: Batch, config: AlgorithmConfig) -> Tensor:
    """Correction of every token [B, LONGEST], one token after the other."""
    low, high = config.correction_low, config.correction_high
    found = torch.ones_like(batch.mask)
    for row, mask in enumerate(batch.masks):
        ratios = [float(torch.exp(batch.anchor[row, at] - batch.behaviour[row, at])) for at in range(len(mask))]
        counting = [ratio for ratio, counts in zip(ratios, mask, strict=True) if counts]
        product = math.prod(counting)
        mean = product ** (1 / max(1, len(counting)))
        for at, ratio in enumerate(ratios):
            found[row, at] = {
                "none": 1.0, "tis": min(ratio, high), "icepop": ratio if low <= ratio <= high else 0.0,
                "sequence_tis": min(product, high), "sequence_mask": float(low <= mean <= high),
            }[config.correction]  # fmt: skip
    return found


def value_and_gradient(loss: Tensor, batch: Batch) -> tuple[float, Tensor]:
    """The loss, and its gradient by the padded log-probs."""
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    return float(loss.detach()), gradient


def assert_equal_to_oracle(batch: Batch, config: AlgorithmConfig) -> LossTerms:
    """Value and gradient to 1e-5; gives back our terms."""
    terms = policy_loss(batch.flat(), batch.scale, config)
    value, gradient = value_and_gradient(terms.loss, batch)
    wanted, wanted_gradient = value_and_gradient(oracle(batch, config, loop_weights(batch, config)), batch)
    assert terms.loss.dtype is torch.float32
    assert value == pytest.approx(wanted, abs=1e-5)
    assert float((gradient - wanted_gradient).abs().max()) <= 1e-5
    assert wanted_gradient.any()
    return terms


# ---- value and gradient ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", KL_TERMS)
@pytest.mark.parametrize("name", RECIPES)
def test_value_and_gradient(name: str, estimator: str | None) -> None:
    """P24, P26: every loss is its paper's, with each KL, at lengths 0 and 1 and with tokens that don't count."""
    kl = {} if estimator is None else {"kl_coef": 0.2, "kl_estimator": estimator}
    config = AlgorithmConfig(name=name, clip_low=0.15, clip_high=0.25, **kl)
    clipped = []
    for seed in range(5):
        batch = Batch.draw(seed)
        clipped += assert_equal_to_oracle(batch, config).is_clipped.tolist()
    assert any(clipped) and not all(clipped), "both sides of the clip were seen"


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", RECIPES)
def test_correction_weighs_the_policy_and_not_the_kl(name: str, correction: str) -> None:
    """A correction multiplies a token's policy term; its KL to the reference keeps its whole weight."""
    config = AlgorithmConfig(name=name, kl_coef=0.1, correction=correction, correction_low=0.85, correction_high=1.1)
    for seed in range(3):
        batch = Batch.draw(seed)
        weights = assert_equal_to_oracle(batch, config).weight
        assert torch.allclose(weights.double(), batch.present(loop_weights(batch, config)), atol=1e-6)
        assert len(set(weights.tolist())) > 1


@pytest.mark.parametrize("name", RECIPES)
def test_fresh_ratios_are_policy_gradient(name: str) -> None:
    """Where the anchor is the policy itself, nothing is clipped and the gradient is -A by the paper's denominator."""
    drawn = Batch.draw(1)
    batch = replace(drawn, anchor=drawn.logprobs.detach())
    terms = policy_loss(batch.flat(), batch.scale, AlgorithmConfig(name=name))
    _, gradient = value_and_gradient(terms.loss, batch)
    count = batch.mask.sum(1, keepdim=True).clamp(min=1)
    size = len(batch.masks)
    share = {
        "grpo": 1 / (count * size), "gspo": 1 / (count * size), "dr_grpo": torch.tensor(1 / (size * MAX_TOKENS)),
        "rloo": torch.tensor(1 / size),
    }.get(name, 1 / batch.mask.sum())  # fmt: skip
    assert torch.allclose(gradient.double(), -batch.advantages[:, None] * share * batch.mask, atol=1e-7)
    assert not terms.is_clipped.any() and torch.equal(terms.ratio, torch.ones_like(terms.ratio))


@pytest.mark.parametrize("name", RECIPES)
def test_clipped_is_where_the_gradient_is_gone(name: str) -> None:
    """`is_clipped` names exactly the counting tokens that the clip has left without a gradient; CISPO leaves none."""
    config = AlgorithmConfig(name=name, clip_low=0.1, clip_high=0.1)
    seen: set[bool] = set()
    for seed in range(4):
        batch = Batch.draw(seed)
        terms = policy_loss(batch.flat(), batch.scale, config)
        _, gradient = value_and_gradient(terms.loss, batch)
        counts = batch.present(batch.mask).bool()
        is_gone = batch.present(gradient)[counts] == 0
        if name == "cispo":
            assert not is_gone.any()
            assert torch.equal(terms.is_clipped, terms.ratio > 1.1)
        else:
            assert torch.equal(is_gone, terms.is_clipped[counts])
        seen |= set(terms.is_clipped[counts].tolist())
    assert seen == {True, False}


@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo", "cispo"])
def test_a_clipped_token_has_no_gradient_however_large_its_ratio(name: str) -> None:
    """Ratios past float32 (a sequence of 1,000 tokens, each e^0.1 more probable) are clipped like any other."""
    logprobs = torch.full((1000,), -1.0, requires_grad=True)
    shift = 0.1 if name == "rloo" else 100.0
    anchor = logprobs.detach() - shift
    ones = torch.ones(1000)
    tokens = LossTokens(logprobs, anchor, anchor, ones, ones, torch.zeros(1000, dtype=torch.int64), 1)
    loss = policy_loss(tokens, LossScale(1, 1000, 1000), AlgorithmConfig(name=name)).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    wanted = torch.full((1000,), -1.2 / 1000) if name == "cispo" else torch.zeros(1000)
    assert torch.isfinite(loss) and torch.allclose(gradient, wanted)


# ---- parts and wholes ------------------------------------------------------------------------------------------------

SEQUENCES = st.lists(st.lists(st.integers(0, 1), max_size=LONGEST), min_size=1, max_size=7)


@settings(max_examples=num_examples(100))
@example("rloo", "none", "k3", [[1], [], [0, 0]], [1, 0, 1], 0)
@example("gspo", "sequence_mask", "k1", [[]], [0], 0)
@given(
    st.sampled_from(sorted(RECIPES)), st.sampled_from(("none", *CORRECTIONS)), st.sampled_from(("k1", "k2", "k3")),
    SEQUENCES, st.lists(st.integers(0, 3), min_size=7, max_size=7), st.integers(0, 2**31 - 1),
)  # fmt: skip
def test_parts_sum_to_the_whole(
    name: str, correction: str, estimator: str, masks: list[list[int]], part_of: list[int], seed: int
) -> None:
    """P27, P24: any sequences dealt out to any micro-batches in any order give the loss and gradient of the whole."""
    config = AlgorithmConfig(name=name, correction=correction, kl_coef=0.1, kl_estimator=estimator)
    batch = Batch.draw(seed, masks)
    whole, gradient = value_and_gradient(policy_loss(batch.flat(), batch.scale, config).loss, batch)
    order = torch.randperm(len(masks), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [[row for row in order if part_of[row] == part] for part in range(4)]
    losses = [policy_loss(batch.flat(rows), batch.scale, config).loss for rows in parts]
    assert all(bool(torch.isfinite(loss)) for loss in losses) and bool(torch.isfinite(gradient).all())
    value, piecewise = value_and_gradient(torch.stack(losses).sum(), batch)
    assert value == pytest.approx(whole, abs=1e-6, rel=1e-6)
    assert torch.allclose(piecewise, gradient, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("correction", ("none", *CORRECTIONS))
@pytest.mark.parametrize("name", RECIPES)
def test_masked_sequences_add_nothing(name: str, correction: str) -> None:
    """P26: sequences without a counting token move no other's gradient, and have none themselves."""
    config = AlgorithmConfig(name=name, kl_coef=0.1, correction=correction)
    batch = Batch.draw(2)
    counting = [row for row, mask in enumerate(batch.masks) if any(mask)]
    assert len(counting) < len(batch.masks)
    value, gradient = value_and_gradient(policy_loss(batch.flat(), batch.scale, config).loss, batch)
    alone = policy_loss(batch.flat(counting), batch.scale, config).loss
    wanted, wanted_gradient = value_and_gradient(alone, batch)
    assert value == pytest.approx(wanted, abs=1e-7)
    assert torch.allclose(gradient, wanted_gradient, atol=1e-8)
    assert not gradient[batch.mask == 0].any()


@pytest.mark.parametrize("masks", [[], [[]], [[], [], []], [[0, 0], []]], ids=str)
@pytest.mark.parametrize("correction", ("none", *CORRECTIONS))
@pytest.mark.parametrize("name", RECIPES)
def test_nothing_that_counts(name: str, correction: str, masks: list[list[int]]) -> None:
    """P24: a micro-batch, or a whole batch, without a counting token is a 0 with a gradient of 0, and never NaN."""
    config = AlgorithmConfig(name=name, kl_coef=0.1, correction=correction)
    batch = Batch.draw(0, masks)
    for scale in (batch.scale, LossScale(8, 40, MAX_TOKENS)):
        value, gradient = value_and_gradient(policy_loss(batch.flat(), scale, config).loss, batch)
        assert value == 0.0
        assert torch.equal(gradient, torch.zeros_like(gradient))


# ---- KL and corrections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimate(estimator: str) -> None:
    """Value and gradient of each estimator are its formula's; equal policies have none."""
    batch = Batch.draw(3)
    wide = batch.logprobs.double()
    wanted, wanted_gradient = value_and_gradient(per_token_kl(wide, batch.reference.double(), estimator).sum(), batch)
    value, gradient = value_and_gradient(kl_estimate(batch.logprobs, batch.reference, estimator).sum(), batch)
    assert value == pytest.approx(wanted, abs=1e-5)
    assert torch.allclose(gradient, wanted_gradient, atol=1e-6)
    same = kl_estimate(batch.logprobs, batch.logprobs.detach(), estimator)
    assert torch.equal(same, torch.zeros_like(same))


def test_k2_has_the_gradient_of_the_kl() -> None:
    """Under the policy, the mean of k2's gradient is the gradient of KL(policy, reference)."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    sampled = (logprobs.exp().detach() * kl_estimate(logprobs, reference, "k2")).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad(sampled, logits)
    assert torch.allclose(found, wanted, atol=1e-12)


def test_a_kl_term_needs_a_reference() -> None:
    """A KL in the loss without log-probs of a reference is an error; in the reward it isn't the loss's business."""
    batch = Batch.draw(0)
    tokens = replace(batch.flat(), reference=None)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(tokens, batch.scale, AlgorithmConfig(kl_coef=0.1))
    plain = policy_loss(tokens, batch.scale, AlgorithmConfig()).loss
    assert torch.equal(policy_loss(tokens, batch.scale, AlgorithmConfig(kl_coef=0.1, kl_in="reward")).loss, plain)


@pytest.mark.parametrize("correction", ("none", *CORRECTIONS))
def test_correction_weights(correction: str) -> None:
    """Each correction is its definition's, token by token; products and means look at counting tokens alone."""
    config = AlgorithmConfig(correction=correction, correction_low=0.8, correction_high=1.25)
    seen: list[float] = []
    for seed in range(6):
        batch = Batch.draw(seed)
        found = correction_weights(batch.flat(), config)
        assert torch.allclose(found.double(), batch.present(loop_weights(batch, config)), atol=1e-6)
        seen += found.tolist()
    if correction in ("icepop", "sequence_mask"):
        assert 0.0 in seen and max(seen) > 0.0
    if correction in ("tis", "sequence_tis"):
        assert max(seen) == 1.25 and min(seen) < 1.0


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_bounds_of_a_correction_are_inside(correction: str) -> None:
    """A sample that the weights in training drew has weight 1, even where both bounds are 1."""
    drawn = Batch.draw(0)
    batch = replace(drawn, behaviour=drawn.anchor)
    config = AlgorithmConfig(correction=correction, correction_low=1.0, correction_high=1.0)
    found = correction_weights(batch.flat(), config)
    assert torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections_carry_no_gradient(correction: str) -> None:
    """Weights are constants, also where the anchor is the policy in training."""
    batch = Batch.draw(0)
    tokens = batch.flat()
    anchored = replace(tokens, anchor=tokens.logprobs)
    assert anchored.anchor.requires_grad
    assert not correction_weights(anchored, AlgorithmConfig(correction=correction)).requires_grad
