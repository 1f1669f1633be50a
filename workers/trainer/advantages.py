"""Advantages: how much better a completion did than what it is compared with.

Owns: one pure function per estimator, and the table of them. Knows nothing of tokens. Called by the training step.

Shapes: G groups of at most n completions; every function takes one list of rewards per group and returns one list of
advantages per group, of the same lengths. A group of one has nothing to be compared with: its advantage is 0, but for
`reinforce_pp`, which compares with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

Groups = Sequence[Sequence[float]]
Advantages = list[list[float]]

EPSILON = 1e-4
"""Added to a standard deviation before it divides, as TRL does."""


def group_normalized(rewards: Groups) -> Advantages:
    """(r - mean) / (std + ε) within the group; std with n - 1. Source: Shao et al. 2024 (DeepSeekMath), sec. 4.1.2."""
    return [[value / (_std(group) + EPSILON) for value in _centered(group)] for group in rewards]


def group_centered(rewards: Groups) -> Advantages:
    """r - mean within the group; no division, which would weigh questions by their difficulty. Source: Liu et al. 2025
    (Dr. GRPO), sec. 3.2."""
    return [_centered(group) for group in rewards]


def leave_one_out(rewards: Groups) -> Advantages:
    """r - mean of the other completions of the group. Source: Kool et al. 2019; Ahmadian et al. 2024 (RLOO), sec.
    3.3."""
    return [[len(group) / max(1, len(group) - 1) * value for value in _centered(group)] for group in rewards]


def batch_normalized(rewards: Groups) -> Advantages:
    """(r - mean) / (std + ε) over the whole batch. Source: Hu et al. 2025 (REINFORCE++), sec. 3."""
    everything = [reward for group in rewards for reward in group]
    scale, values = _std(everything) + EPSILON, iter(_centered(everything))
    return [[next(values) / scale for _ in group] for group in rewards]


def group_centered_batch_scaled(rewards: Groups) -> Advantages:
    """r - mean within the group, divided by the batch's std of that. Source: Hu et al. 2025 (REINFORCE++-baseline)."""
    centered = group_centered(rewards)
    scale = _std([value for group in centered for value in group]) + EPSILON
    return [[value / scale for value in group] for group in centered]


ESTIMATORS: dict[str, Callable[[Groups], Advantages]] = {
    "group_normalized": group_normalized, "group_centered": group_centered, "leave_one_out": leave_one_out,
    "batch_normalized": batch_normalized, "group_centered_batch_scaled": group_centered_batch_scaled,
}  # fmt: skip
"""By the name that the configuration takes."""


def has_signal(rewards: Sequence[float]) -> bool:
    """False for a group whose rewards are all equal: nothing in it is better than anything else."""
    return any(reward != rewards[0] for reward in rewards[1:])


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """What a long completion loses: 0 up to `max_tokens - buffer_tokens`, then linearly down to -1 at `max_tokens`.

    Source: Yu et al. 2025 (DAPO), sec. 3.4, soft overlong punishment.
    """
    if buffer_tokens <= 0:
        return 0.0
    return min(0.0, max(-1.0, (max_tokens - buffer_tokens - num_tokens) / buffer_tokens))


def _centered(values: Sequence[float]) -> list[float]:
    """Each less the mean; exactly 0 where all are equal, which the mean's own rounding would spoil."""
    if not has_signal(values):
        return [0.0] * len(values)
    mean = fmean(values)
    return [value - mean for value in values]


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
