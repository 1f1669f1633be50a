"""Losses: pure functions from log-probs and advantages to a scalar, each with its paper.

A loss is a sum over tokens, and every denominator is of the whole batch (`LossScale`), so that the sum over
micro-batches is the loss, however the batch is cut (P27). Nothing here knows of models, padding or memory.

Shapes: N completion tokens of a micro-batch, of S sequences. A sequence of no tokens takes part in the denominators
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import AlgorithmConfig

MAX_LOG_RATIO = 60.0
"""Log-ratios are cut off here on both sides."""


@dataclass(frozen=True, eq=False)
class LossTokens:
    """One micro-batch."""

    logprobs: Tensor
    """float32 [N]: under the weights in training; carries the gradient."""
    anchor: Tensor
    """float32 [N]: what ratios are taken to: the behaviour policy, or the policy at the start of the step."""
    behaviour: Tensor
    """float32 [N]: as the engine reported them."""
    advantages: Tensor
    """float32 [N]."""
    mask: Tensor
    """float32 [N]: 1 where a token counts, else 0."""
    sequence: Tensor
    """int64 [N]: which of the S sequences a token belongs to, ascending."""
    num_sequences: int
    """S."""
    reference: Tensor | None = None
    """float32 [N]: under the reference policy, where there is a KL term in the loss."""


@dataclass(frozen=True)
class LossScale:
    """Denominators, of the whole batch."""

    num_sequences: int
    """Sequences, those that are masked as a whole included."""
    num_tokens: int
    """Tokens that count."""
    max_tokens: int
    """Longest completion that the run allows."""


@dataclass(frozen=True, eq=False)
class LossTerms:
    """A micro-batch's part of the loss."""

    loss: Tensor
    """float32 scalar."""
    is_clipped: Tensor
    """bool [N]: where the clip took the gradient away."""
    ratio: Tensor
    """float32 [N], detached: policy in training to anchor, per token."""
    weight: Tensor
    """float32 [N]: the correction's weight."""


PolicyLoss = Callable[[LossTokens, AlgorithmConfig], tuple[Tensor, Tensor]]
"""Per-token loss [N] before weights and denominators, and where it is clipped [N]."""


def sequence_sum(values: Tensor, tokens: LossTokens) -> Tensor:
    """Sum over the counting tokens of each sequence: float32 [S]."""
    total = values.new_zeros(tokens.num_sequences)
    return total.index_add(0, tokens.sequence, values * tokens.mask)


def sequence_lengths(tokens: LossTokens) -> Tensor:
    """Counting tokens of each sequence, at least 1: float32 [S]."""
    return sequence_sum(torch.ones_like(tokens.mask), tokens).clamp(min=1.0)


def _ratio(log_ratio: Tensor) -> Tensor:
    """e^x, kept finite: infinity times 0 is no gradient."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _clipped(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    is_clipped = ((ratio < 1.0 - config.clip_low) & (advantages < 0)) | (
        (ratio > 1.0 + config.clip_high) & (advantages > 0)
    )
    return -torch.minimum(ratio * advantages, bounded * advantages), is_clipped


def token_clipped(tokens: LossTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective with one ratio per token. Source: Schulman et al. 2017, eq. 7; with `clip_high` above
    `clip_low`: Yu et al. 2025 (DAPO), sec. 3.1."""
    return _clipped(_ratio(tokens.logprobs - tokens.anchor), tokens.advantages, config)


def sequence_clipped(tokens: LossTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The same with the geometric mean of a sequence's ratios in place of each. Source: Zheng et al. 2025 (GSPO), eq.
    5–7."""
    mean = sequence_sum(tokens.logprobs - tokens.anchor, tokens) / sequence_lengths(tokens)
    return _clipped(_ratio(mean)[tokens.sequence], tokens.advantages, config)


def sequence_product(tokens: LossTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The same with the product of a sequence's ratios, as one action. Source: Ahmadian et al. 2024 (RLOO), sec. 3."""
    total = sequence_sum(tokens.logprobs - tokens.anchor, tokens)
    loss, is_clipped = _clipped(_ratio(total)[tokens.sequence], tokens.advantages, config)
    # The sequence's one term is shared out over its tokens; their sum is the term.
    return loss / sequence_lengths(tokens)[tokens.sequence], is_clipped


def clipped_weight(tokens: LossTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """REINFORCE with the ratio as a bounded weight, so that no token loses its gradient. Source: MiniMax 2025 (CISPO),
    eq. 4–5; the bound is 1 + `clip_high`."""
    ratio = _ratio(tokens.logprobs - tokens.anchor).detach()
    bounded = ratio.clamp(max=1.0 + config.clip_high)
    return -bounded * tokens.advantages * tokens.logprobs, ratio > bounded


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "token_clipped": token_clipped, "sequence_clipped": sequence_clipped, "sequence_product": sequence_product,
    "clipped_weight": clipped_weight,
}  # fmt: skip


def token_weights(tokens: LossTokens, scale: LossScale, aggregation: str) -> Tensor:
    """What each token's term is multiplied by, so that their sum over the batch is the loss: float32 [N].

    `sequence_mean`: mean over sequences of the mean over tokens (GRPO). `token_mean`: mean over tokens (DAPO, sec.
    3.3). `fixed_length`: sum over tokens by sequences times the longest length (Dr. GRPO, sec. 3.2). `sequence_sum`:
    mean over sequences of the sum over tokens (RLOO).
    """
    if aggregation == "sequence_mean":
        return tokens.mask / (sequence_lengths(tokens)[tokens.sequence] * max(1, scale.num_sequences))
    if aggregation == "token_mean":
        return tokens.mask / max(1, scale.num_tokens)
    if aggregation == "fixed_length":
        return tokens.mask / max(1, scale.num_sequences * scale.max_tokens)
    return tokens.mask / max(1, scale.num_sequences)


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy, reference) per token from samples of the policy.

    `k1`: unbiased, may be negative. `k2`: half the squared log-ratio; its gradient is the KL's. `k3`: unbiased, never
    negative. Source: Schulman 2020, "Approximating KL divergence".
    """
    log_ratio = reference - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.exp(log_ratio) - log_ratio - 1.0


def correction_weights(tokens: LossTokens, config: AlgorithmConfig) -> Tensor:
    """What a token's term is multiplied by for having been drawn from another policy than the anchor: float32 [N].

    `none`: 1 (ratios are taken to the behaviour policy itself). `tis`: the ratio, at most `correction_high`; Yao et al.
    2025 (truncated importance sampling). `icepop`: the ratio where it lies within the bounds, else 0; Ling team 2025
    (IcePop). `sequence_tis`: the product over the sequence, at most `correction_high`. `sequence_mask`: 1 where the
    geometric mean over the sequence lies within the bounds, else 0.
    """
    if config.correction == "none":
        return torch.ones_like(tokens.mask)
    low, high = config.correction_low, config.correction_high
    log_ratio = (tokens.anchor - tokens.behaviour).detach()
    if config.correction == "tis":
        return _ratio(log_ratio).clamp(max=high)
    if config.correction == "icepop":
        ratio = _ratio(log_ratio)
        return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    total = sequence_sum(log_ratio, tokens)
    if config.correction == "sequence_tis":
        return _ratio(total).clamp(max=high)[tokens.sequence]
    mean = _ratio(total / sequence_lengths(tokens))[tokens.sequence]
    return ((mean >= low) & (mean <= high)).to(mean.dtype)


def policy_loss(tokens: LossTokens, scale: LossScale, config: AlgorithmConfig) -> LossTerms:
    """The configured loss over one micro-batch; the sum over micro-batches is the loss of the batch."""
    per_token, is_clipped = POLICY_LOSSES[config.recipe.objective](tokens, config)
    weight = correction_weights(tokens, config)
    per_token = per_token * weight
    if config.kl_coef and config.kl_in == "loss":
        if tokens.reference is None:
            raise ValueError("there is a KL term in the loss, but no log-probs of a reference")
        per_token = per_token + config.kl_coef * kl_estimate(tokens.logprobs, tokens.reference, config.kl_estimator)
    loss = (per_token * token_weights(tokens, scale, config.recipe.aggregation)).sum()
    ratio = _ratio((tokens.logprobs - tokens.anchor).detach())
    return LossTerms(loss, is_clipped.detach(), ratio, weight)
