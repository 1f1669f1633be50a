"""Advantage estimators against their formulas."""

from __future__ import annotations

import pytest
import torch
from unison.workers.trainer.advantages import (
    ESTIMATORS,
    batch_normalized,
    group_centered,
    group_centered_batch_scaled,
    group_normalized,
    has_signal,
    leave_one_out,
    overlong_penalty,
)

GROUPS = [[1.0, 0.0, 0.5, 0.25], [3.0, 1.0], [0.2, 0.2, 0.2]]


def flat(groups: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for group in groups for value in group])


def test_group_normalized_is_trl() -> None:
    """(r - mean) / (std + 1e-4), std with n - 1."""
    for group, found in zip(GROUPS, group_normalized(GROUPS), strict=True):
        rewards = torch.tensor(group)
        wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        assert torch.allclose(torch.tensor(found), wanted, atol=1e-6)


def test_group_centered() -> None:
    """Dr. GRPO: the mean alone is taken away."""
    for group, found in zip(GROUPS, group_centered(GROUPS), strict=True):
        assert torch.allclose(torch.tensor(found), torch.tensor(group) - torch.tensor(group).mean(), atol=1e-6)


def test_leave_one_out() -> None:
    """RLOO: each reward less the mean of the others."""
    for group, found in zip(GROUPS, leave_one_out(GROUPS), strict=True):
        for at, value in enumerate(found):
            others = [reward for other, reward in enumerate(group) if other != at]
            assert value == pytest.approx(group[at] - sum(others) / len(others))


def test_batch_estimators() -> None:
    """REINFORCE++: mean and std of the whole batch; with a baseline, of what the groups' means leave."""
    rewards = flat(GROUPS)
    wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert torch.allclose(flat(batch_normalized(GROUPS)), wanted, atol=1e-6)
    centered = flat(group_centered(GROUPS))
    assert torch.allclose(flat(group_centered_batch_scaled(GROUPS)), centered / (centered.std() + 1e-4), atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("groups", [[], [[]], [[0.7]], [[0.5, 0.5], [0.5]], [[1.0], []]], ids=str)
def test_nothing_to_compare_with(name: str, groups: list[list[float]]) -> None:
    """P24: empty groups, groups of one and equal rewards give finite numbers, and 0 if all are equal."""
    found = ESTIMATORS[name](groups)
    assert [len(group) for group in found] == [len(group) for group in groups]
    values = [value for group in found for value in group]
    assert all(abs(value) < 1e9 for value in values)
    if len({reward for group in groups for reward in group}) <= 1:
        assert not any(values)


def test_has_signal() -> None:
    assert has_signal([0.0, 0.0, 1.0])
    assert not has_signal([0.3, 0.3]) and not has_signal([1.0]) and not has_signal([])


def test_overlong_penalty() -> None:
    """DAPO eq. 13: 0 up to the buffer, then linear down to -1."""
    assert [overlong_penalty(length, 100, 20) for length in (0, 79, 80, 90, 100)] == [0.0, 0.0, 0.0, -0.5, -1.0]
    assert overlong_penalty(130, 100, 20) == -1.0
    assert overlong_penalty(100, 100, 0) == 0.0
