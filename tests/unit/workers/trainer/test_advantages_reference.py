"""Advantage estimators against loops written from their papers, over groups of any size and rewards of any value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unison.workers.trainer.advantages import ESTIMATORS, has_signal, overlong_penalty

Groups = list[list[float]]

REWARDS = st.floats(-100, 100, allow_nan=False, width=32)
GROUPS = st.lists(st.lists(REWARDS, min_size=1, max_size=6), min_size=1, max_size=5)
EQUAL_REWARDS = (0.0, 1.0, -1.0, 0.1, 0.3, 0.7, 0.92, 1 / 3, -2.35, 1e-6, 123.456)


def mean(values: list[float]) -> float:
    """Plain sum over count."""
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    """Unbiased, as torch.std; of one value 0."""
    if len(values) == 1:
        return 0.0
    return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def grpo(groups: Groups) -> Groups:
    """Shao et al. 2024, sec. 4.1.2."""
    return [[(reward - mean(group)) / (std(group) + 1e-4) for reward in group] for group in groups]


def dr_grpo(groups: Groups) -> Groups:
    """Liu et al. 2025: no std."""
    return [[reward - mean(group) for reward in group] for group in groups]


def rloo(groups: Groups) -> Groups:
    """Ahmadian et al. 2024, eq. 7: less the mean of the others."""
    return [
        [
            reward - mean(group[:at] + group[at + 1 :]) if len(group) > 1 else 0.0
            for at, reward in enumerate(group)
        ]
        for group in groups
    ]  # fmt: skip


def reinforce_pp(groups: Groups) -> Groups:
    """Hu et al. 2025, eq. 4: over the whole batch."""
    every = [reward for group in groups for reward in group]
    return [[(reward - mean(every)) / (std(every) + 1e-4) for reward in group] for group in groups]


def reinforce_pp_baseline(groups: Groups) -> Groups:
    """Hu et al. 2025: less the group's mean, then by the batch's std of what is left."""
    left = dr_grpo(groups)
    every = [value for group in left for value in group]
    return [[value / (std(every) + 1e-4) for value in group] for group in left]


REFERENCES: dict[str, Callable[[Groups], Groups]] = {
    "group_normalized": grpo, "group_centered": dr_grpo, "leave_one_out": rloo, "batch_normalized": reinforce_pp,
    "group_centered_batch_scaled": reinforce_pp_baseline,
}  # fmt: skip


def assert_close(found: Any, wanted: Groups, tolerance: float = 1e-7) -> None:
    """Same lengths, values to the tolerance where they are about 1, and relative to it where they are larger."""
    assert [len(group) for group in found] == [len(group) for group in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert list(ours) == pytest.approx(theirs, abs=tolerance, rel=tolerance)


def test_every_estimator_has_a_reference() -> None:
    """The table here and the table of the estimators name the same ones."""
    assert set(REFERENCES) == set(ESTIMATORS)


@pytest.mark.parametrize("name", REFERENCES)
@given(GROUPS)
def test_reference(name: str, groups: Groups) -> None:
    """Groups of 1 to 6, whatever their rewards, have the advantages of the paper's formula."""
    assert_close(ESTIMATORS[name](groups), REFERENCES[name](groups))


@given(st.lists(REWARDS, min_size=2, max_size=16))
def test_group_normalized_is_trls(group: list[float]) -> None:
    """TRL: `(rewards - mean) / (rewards.std() + 1e-4)` by torch, whose std divides by n - 1."""
    rewards = torch.tensor(group, dtype=torch.float64)
    wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert_close(ESTIMATORS["group_normalized"]([group]), [wanted.tolist()])


@pytest.mark.parametrize("name", REFERENCES)
def test_equal_rewards_have_no_advantage(name: str) -> None:
    """Equal rewards give exactly 0, whatever their value and however many: nothing is to be learnt from rounding."""
    for reward in EQUAL_REWARDS:
        for size in range(1, 17):
            found = ESTIMATORS[name]([[reward] * size, [reward] * 3])
            assert {value for group in found for value in group} == {0.0}, (reward, size)


@pytest.mark.parametrize("name", ["group_normalized", "group_centered", "leave_one_out", "group_centered_batch_scaled"])
def test_a_group_of_one_has_no_advantage(name: str) -> None:
    """P24: one completion has nothing to be compared with, also beside groups that have signal."""
    (lone,), *_, (other,) = ESTIMATORS[name]([[5.0], [1.0, 0.0, 0.5], [-3.0]])
    assert (lone, other) == (0.0, 0.0)


def test_reinforce_pp_compares_groups_of_one() -> None:
    """The whole batch is the group: completions of different prompts are told apart."""
    found = ESTIMATORS["batch_normalized"]([[1.0], [0.0], [0.5]])
    assert_close(found, [[0.5 / 0.5001], [-0.5 / 0.5001], [0.0]])


@pytest.mark.parametrize("name", REFERENCES)
@given(GROUPS, st.floats(-50, 50, width=32))
def test_a_constant_changes_nothing(name: str, groups: Groups, shift: float) -> None:
    """A reward that every completion gets is no advantage to any."""
    shifted = [[reward + shift for reward in group] for group in groups]
    assert_close(ESTIMATORS[name](shifted), ESTIMATORS[name](groups), 1e-6)


@pytest.mark.parametrize("name", REFERENCES)
@given(GROUPS, st.randoms(use_true_random=False))
def test_order_changes_nothing(name: str, groups: Groups, draw: Any) -> None:
    """Which group or completion comes first has no influence on any advantage."""
    order = list(range(len(groups)))
    draw.shuffle(order)
    found = ESTIMATORS[name]([groups[at][::-1] for at in order])
    whole = ESTIMATORS[name](groups)
    assert_close(found, [whole[at][::-1] for at in order])


@given(st.lists(REWARDS, max_size=5))
def test_has_signal(rewards: list[float]) -> None:
    """True exactly where two rewards differ."""
    assert has_signal(rewards) is (len(set(rewards)) > 1)


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 100))
def test_overlong_penalty(num_tokens: int, buffer: int, margin: int) -> None:
    """Yu et al. 2025, eq. 13, at every length; the three pieces meet without a step."""
    longest = buffer + margin
    if num_tokens <= longest - buffer:
        wanted = 0.0
    elif num_tokens <= longest:
        wanted = ((longest - buffer) - num_tokens) / buffer
    else:
        wanted = -1.0
    assert overlong_penalty(num_tokens, longest, buffer) == pytest.approx(wanted)


def test_corners_of_the_overlong_penalty() -> None:
    """At the buffer's first token nothing is lost, at its last all of it, past the limit no more; none, no loss."""
    corners = {80: 0.0, 81: -0.05, 99: -0.95, 100: -1.0, 101: -1.0, 0: 0.0}
    assert {length: overlong_penalty(length, 100, 20) for length in corners} == pytest.approx(corners)
    assert overlong_penalty(1, 100, 100) == pytest.approx(-0.01), "a buffer as long as the limit"
    assert overlong_penalty(0, 100, 100) == 0.0
    assert {overlong_penalty(length, 100, 0) for length in (0, 100, 1000)} == {0.0}
