"""What reward functions are given, what they may give back, and how it is added up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from unison.ipc.errors import RewardError
from unison.workers.rollout.prompts import Prompt
from unison.workers.rollout.records import RewardScore
from unison.workers.rollout.rewards import Reward, RewardFunction, as_rewards, score_group

TEXT = Prompt("p", text="2 + 2 =", columns={"answer": 4, "notes": ["a", None], "unit": None})


def score(*functions: RewardFunction | Reward, prompt: Prompt = TEXT, count: int = 3) -> tuple[RewardScore, ...]:
    """Scores of `count` completions, "0" of token 0, "1" of tokens 1, 1, and so on."""
    texts, ids = [str(at) for at in range(count)], [[at] * (at + 1) for at in range(count)]
    return asyncio.run(score_group(as_rewards(functions), prompt, texts, ids))


def giving(values: Any, name: str = "f") -> Reward:
    """A function that returns `values`, whatever it is asked."""
    return Reward(lambda **_: values, name=name)


def test_columns_come_by_name_as_lists() -> None:
    """TRL's signature: one entry per completion in every argument, whatever the column holds, None included."""
    seen: dict[str, Any] = {}

    def function(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [0.0] * len(arguments["completions"])

    score(function)
    assert seen == {
        "prompts": ["2 + 2 ="] * 3, "completions": ["0", "1", "2"], "completion_ids": [[0], [1, 1], [2, 2, 2]],
        "answer": [4] * 3, "notes": [["a", None]] * 3, "unit": [None] * 3,
    }  # fmt: skip


def test_chat_prompts_are_whole_conversations() -> None:
    """TRL's signature: all turns of the prompt, and one assistant message per completion; the prompt isn't touched."""
    turns = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    prompt = Prompt("p", turns)

    def function(prompts: list[list[dict[str, str]]], completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        assert prompts == [list(turns)] * 2
        prompts[0][0]["content"] = "changed"
        return [float(completion == [{"role": "assistant", "content": str(at)}])
                for at, completion in enumerate(completions)]  # fmt: skip

    assert [each.total for each in score(function, prompt=prompt, count=2)] == [1.0, 1.0]
    assert prompt.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})


def test_coroutines_are_awaited_together() -> None:
    """Each waits for the other, so one after the other they would never end; plain functions go beside them."""
    first_is_here, second_is_here = asyncio.Event(), asyncio.Event()

    async def first(**_: Any) -> list[float]:
        first_is_here.set()
        await asyncio.wait_for(second_is_here.wait(), 10)
        return [1.0]

    async def second(**_: Any) -> list[float]:
        second_is_here.set()
        await asyncio.wait_for(first_is_here.wait(), 10)
        return [2.0]

    (found,) = score(first, giving([4.0], "third"), second, count=1)
    assert found == RewardScore(7.0, {"first": 1.0, "third": 4.0, "second": 2.0})


@pytest.mark.parametrize(("weights", "total"), [((1, 1), 5.0), ((2.0, 0.5), 5.5), ((0.0, 1.0), 3.0), ((-1, 2), 4.0)])
def test_the_total_is_the_weighted_sum(weights: tuple[float, float], total: float) -> None:
    """Weights scale the total and leave the parts as the functions gave them."""
    functions = [Reward(lambda **_: [2.0], weights[0], "a"), Reward(lambda **_: [3.0], weights[1], "b")]
    assert score(*functions, count=1) == (RewardScore(total, {"a": 2.0, "b": 3.0}),)


def test_none_is_no_zero() -> None:
    """None: the function doesn't apply to that completion and has no part in it; 0 is a reward like any other."""
    assert score(giving([None, 0.0, 5.0], "a"), giving([1.0, 2.0, None], "b")) == (
        RewardScore(1.0, {"b": 1.0}), RewardScore(2.0, {"a": 0.0, "b": 2.0}), RewardScore(5.0, {"a": 5.0})
    )  # fmt: skip


def test_a_completion_to_which_nothing_applies_is_refused() -> None:
    """P18: with its index; a completion without any reward isn't scored 0."""
    with pytest.raises(RewardError, match="applies to completion 1") as caught:
        score(giving([1.0, None, 1.0], "a"), giving([None] * 3, "b"))
    assert caught.value.reason == "reward_invalid"


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3], (1.0, 2.0, 3.0), range(1, 4), [True, 2, 3], np.array([1, 2, 3]), np.array([1, 2, 3], np.float16),
        [np.int64(1), np.float32(2), np.float64(3)], torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 2, 3]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1.0), torch.tensor(2), np.array(3.0)],
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_however_they_come(values: Any) -> None:
    """Lists, tuples, arrays and tensors of anything that is a number; plain floats come out."""
    found = score(giving(values))
    assert [each.total for each in found] == [1.0, 2.0, 3.0]
    assert all(type(each.total) is type(each.parts["f"]) is float for each in found)


@pytest.mark.parametrize(
    "values",
    [
        [], [1.0, 2.0], [1.0] * 4, "abc", None, 3.0, {0: 1.0, 1: 2.0, 2: 3.0}, {1.0, 2.0, 3.0}, iter([1.0, 2.0, 3.0]),
        np.float64(3.0), np.zeros((3, 1)), np.zeros(2), torch.zeros(3, 1), torch.tensor(1.0), torch.zeros(0),
        [1.0, 2.0, "3"], [1.0, 2.0, "x"], [1.0, 2.0, [3.0]], [1.0, 2.0, 3j], [1.0, 2.0, object()], [1.0, 2.0, {}],
        [1.0, 2.0, float("nan")], [1.0, 2.0, float("-inf")], [1.0, 2.0, 1.7e308], [1.0, 2.0, np.float32("nan")],
        np.array([1.0, np.inf, 3.0]), torch.tensor([1.0, 2.0, torch.nan]), np.array(["1", "2", "3"]),
    ],
)  # fmt: skip
def test_what_is_no_number_per_completion_is_refused(values: Any) -> None:
    """P18: wrong counts, NaN, infinities, texts and other things fail the group by the function's name."""
    with pytest.raises(RewardError, match="wrong_one returned") as caught:
        score(giving([1.0] * 3, "right_one"), giving(values, "wrong_one"))
    assert caught.value.reason == "reward_invalid"


def test_the_completion_at_fault_is_named() -> None:
    """P36: whoever reads the rejection finds function, value and completion in it."""
    with pytest.raises(RewardError, match=r"f returned nan for completion 2"):
        score(giving([1.0, 1.0, float("nan")]))
    with pytest.raises(RewardError, match=r"f returned 2 for 3 completions"):
        score(giving([1.0, 1.0]))


@pytest.mark.parametrize("error", [ValueError("why"), AssertionError("why"), StopIteration("why"), OSError("why")])
@pytest.mark.parametrize("is_coroutine", [False, True])
def test_exceptions_fail_the_group(error: Exception, is_coroutine: bool) -> None:
    """P36: whatever a function raises, awaited or not, is recorded with its name and text, and chained."""

    def plain(**_: Any) -> list[float]:
        raise error

    async def coroutine(**_: Any) -> list[float]:
        raise error

    function: Callable[..., Any] = coroutine if is_coroutine else plain
    with pytest.raises(RewardError, match=f"broken raised .*{'' if is_coroutine else 'why'}") as caught:
        score(giving([1.0] * 3), Reward(function, name="broken"))
    assert caught.value.reason == "reward_error" and caught.value.__cause__ is not None


def test_a_function_that_lacks_an_argument_fails_the_group() -> None:
    """P50: columns that a function doesn't take are an error, as a call with unknown keywords is in Python."""
    with pytest.raises(RewardError, match="narrow raised TypeError") as caught:
        score(Reward(lambda prompts, completions: [1.0] * 3, name="narrow"))
    assert caught.value.reason == "reward_error"


class Judge:
    """A reward function with a state."""

    def __call__(self, completions: Sequence[str], **_: Any) -> list[float]:
        return [float(text) for text in completions]


def test_labels() -> None:
    """Parts go by the given name, else by the function's own, else by its class's."""
    assert [each.label for each in as_rewards([len, Judge(), Reward(max, name="mine"), partial(min)])] == [
        "len", "Judge", "mine", "partial"
    ]  # fmt: skip
    assert [each.parts for each in score(Judge())] == [{"Judge": 0.0}, {"Judge": 1.0}, {"Judge": 2.0}]
    assert all(each.weight == 1.0 for each in as_rewards([len, Judge()]))


@pytest.mark.parametrize(
    "functions",
    [
        [len, len], [Judge(), Judge()], [lambda **_: [], lambda **_: []], [Reward(max, name="len"), len], [],
        [Reward(len, 1.0), Reward(len, 2.0)],
    ],
    ids=["twice", "two of a class", "lambdas", "name of another", "none", "two weights"],
)  # fmt: skip
def test_equal_names_are_refused(functions: list[Any]) -> None:
    """P47: parts are kept by name, so that a second one would hide the first."""
    with pytest.raises(ValueError, match="there must be one, and names must differ"):
        as_rewards(functions)
