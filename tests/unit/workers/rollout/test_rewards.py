"""Reward functions: called as TRL calls them, and checked."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from unison.ipc.errors import RewardError
from unison.workers.rollout.prompts import Prompt
from unison.workers.rollout.records import RewardScore
from unison.workers.rollout.rewards import Reward, as_rewards, score_group

CHAT = Prompt("p", ({"role": "user", "content": "q"},), columns={"answer": "x"})


def score(*functions: Any, prompt: Prompt = CHAT, texts: tuple[str, ...] = ("a", "b")) -> tuple[RewardScore, ...]:
    return asyncio.run(score_group(as_rewards(functions), prompt, texts, [(1,), (2, 3)][: len(texts)]))


def test_arguments_of_a_conversation() -> None:
    """Messages for prompts, one assistant message per completion, columns and token ids as lists by name."""
    seen: dict[str, Any] = {}

    def function(prompts: Any, completions: Any, answer: Any, completion_ids: Any, **others: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, answer=answer, ids=completion_ids, others=others)
        return [1.0, 2.0]

    assert [each.total for each in score(function)] == [1.0, 2.0]
    assert seen == {
        "prompts": [[{"role": "user", "content": "q"}]] * 2, "answer": ["x", "x"], "ids": [[1], [2, 3]], "others": {},
        "completions": [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]],
    }  # fmt: skip


def test_arguments_of_a_text() -> None:
    """Plain strings on both sides."""
    found = score(
        lambda prompts, completions, **_: [float(prompts == ["t", "t"]), float(completions == ["a", "b"])],
        prompt=Prompt("p", text="t"),
    )
    assert [each.total for each in found] == [1.0, 1.0]


def test_weights_coroutines_and_functions_that_do_not_apply() -> None:
    """Several functions are weighted; coroutines run together; None leaves a function out of one completion."""
    both = asyncio.Barrier(2) if hasattr(asyncio, "Barrier") else None

    async def first(**_: Any) -> list[float | None]:
        if both is not None:
            await asyncio.wait_for(both.wait(), 10)
        return [1.0, None]

    async def second(**_: Any) -> list[float]:
        if both is not None:
            await asyncio.wait_for(both.wait(), 10)
        return [10.0, 20.0]

    assert score(Reward(first, 2.0), Reward(second, 0.5, "other")) == (
        RewardScore(7.0, {"first": 1.0, "other": 10.0}), RewardScore(10.0, {"other": 20.0})
    )  # fmt: skip


@pytest.mark.parametrize("values", [np.array([0.5, 1.5]), torch.tensor([0.5, 1.5]), (np.float32(0.5), 1.5), [True, 2]])
def test_numbers_of_every_kind(values: Any) -> None:
    assert all(isinstance(each.total, float) for each in score(lambda **_: values))


@pytest.mark.parametrize(
    "values",
    [[1.0], [1.0, 2.0, 3.0], [1.0, float("nan")], [float("inf"), 0.0], "ab", None, 1.0, [1.0, "x"], [None, 1.0]],
    ids=str,
)
def test_wrong_values_are_refused(values: Any) -> None:
    """P18: a wrong number of values, or one that is no finite number, fails the group: never a silent 0."""
    with pytest.raises(RewardError) as caught:
        score(lambda **_: values)
    assert caught.value.reason == "reward_invalid"


def test_exceptions_are_the_groups_failure() -> None:
    """P36: what a function raises is recorded with its name."""

    def broken(**_: Any) -> list[float]:
        raise KeyError("nope")

    with pytest.raises(RewardError, match="broken raised KeyError") as caught:
        score(broken)
    assert caught.value.reason == "reward_error"


def test_names_must_differ() -> None:
    with pytest.raises(ValueError, match="names must differ"):
        as_rewards([Reward(len, name="f"), Reward(max, name="f")])
    with pytest.raises(ValueError, match="there must be one"):
        as_rewards([])
