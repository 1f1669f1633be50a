"""Rewards: functions with the signature that TRL's users have, called and checked.

A function takes `prompts`, `completions` and the prompt's columns by name, each a list with one entry per completion,
and returns one number per completion (None: it doesn't apply to that one). For conversations, prompts are lists of
messages and completions lists of one assistant message; for plain texts both are strings. Coroutine functions are
awaited together.

Owns: the call, the check, the weighted sum. Runs in the scorer's process, so that a function that hangs or crashes
takes nothing with it. Nothing here ever turns a failure into a 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...ipc.errors import RewardError
from .prompts import Prompt
from .records import RewardScore

RewardFunction = Callable[..., Any]

MAX_REWARD = 1e12
"""Largest |reward|: sums and squares of a batch stay finite in float32."""


@dataclass(frozen=True)
class Reward:
    """One reward function and its weight."""

    function: RewardFunction
    """Called as described above."""
    weight: float = 1.0
    """Factor in the total."""
    name: str = ""
    """For records and metrics; the function's own name when empty."""
    is_deterministic: bool | None = None
    """Whether equal arguments give equal values, for bin/verify, which calls it again: False has it left alone (a judge
    that costs money), True holds it to that, None has it called twice to find out."""

    @property
    def label(self) -> str:
        """Its name."""
        return self.name or getattr(self.function, "__name__", type(self.function).__name__)


Rewards = Sequence[RewardFunction | Reward] | RewardFunction | Reward
"""One or several."""


def as_rewards(functions: Rewards) -> tuple[Reward, ...]:
    """Plain functions get weight 1; equal names are refused, since records go by them."""
    if callable(functions) or isinstance(functions, Reward):  # one alone, as TRL takes it
        functions = [functions]
    rewards = tuple(each if isinstance(each, Reward) else Reward(each) for each in functions)
    labels = [reward.label for reward in rewards]
    if not all(math.isfinite(reward.weight) for reward in rewards):
        raise ValueError(f"the weights are {[reward.weight for reward in rewards]}; they must be finite")
    if not rewards or len(set(labels)) != len(labels):
        raise ValueError(f"the task's reward functions are {labels}; there must be one, and names must differ")
    return rewards


async def score_group(
    rewards: Sequence[Reward], prompt: Prompt, texts: Sequence[str], completion_ids: Sequence[Sequence[int]]
) -> tuple[RewardScore, ...]:
    """Score all completions of one prompt.

    Raises:
        RewardError: a function raised, or returned something that isn't one finite number (or None) per completion, or
            no function applied to a completion.
    """
    count = len(texts)
    completions: list[Any] = [[{"role": "assistant", "content": text}] for text in texts]
    prompts: list[Any] = [[dict(message) for message in prompt.messages] for _ in texts]
    if not prompt.is_chat:
        completions, prompts = list(texts), [prompt.text] * count
    columns = {name: [value] * count for name, value in prompt.columns.items()}
    columns |= {"completion_ids": [list(ids) for ids in completion_ids]}
    answers = await asyncio.gather(*(_call(each, prompts, completions, columns) for each in rewards))
    parts: list[dict[str, float]] = [{} for _ in texts]
    for reward, answer in zip(rewards, answers, strict=True):
        for part, value in zip(parts, _checked(reward, answer, count), strict=True):
            if value is not None:
                part[reward.label] = value
    for index, part in enumerate(parts):
        if not part:
            raise RewardError("reward_invalid", f"no reward function applies to completion {index}")
    weights = {reward.label: reward.weight for reward in rewards}
    totals = [sum(weights[name] * value for name, value in part.items()) for part in parts]
    if not all(abs(total) <= MAX_REWARD for total in totals):
        raise RewardError("reward_invalid", f"the weighted sums are {totals}; they must be in [-1e12, 1e12]")
    return tuple(RewardScore(total, part) for total, part in zip(totals, parts, strict=True))


async def _call(reward: Reward, prompts: Any, completions: Any, columns: dict[str, Any]) -> Any:
    try:
        answer = reward.function(prompts=prompts, completions=completions, **columns)
        return await answer if inspect.isawaitable(answer) else answer
    except Exception as error:  # a reward function is the user's program: it may raise anything
        raise RewardError("reward_error", f"{reward.label} raised {error!r}"[:2000]) from error


def _checked(reward: Reward, answer: Any, count: int) -> list[float | None]:
    if hasattr(answer, "tolist"):  # numpy arrays and tensors
        answer = answer.tolist()
    if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes)) or len(answer) != count:
        size = len(answer) if isinstance(answer, Sequence) else type(answer).__name__
        raise RewardError("reward_invalid", f"{reward.label} returned {size} for {count} completions; one number each")
    values: list[float | None] = []
    for index, value in enumerate(answer):
        number = None if value is None else _finite(value)
        if value is not None and number is None:
            raise RewardError("reward_invalid", f"{reward.label} returned {value!r:.100} for completion {index}; "
                              "rewards are finite numbers up to 1e12, or None where it doesn't apply")  # fmt: skip
        values.append(number)
    return values


def _finite(value: Any) -> float | None:
    """The number that a value is, also one of numpy's or torch's; None where it is none, or not finite."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        number = float(plain) if isinstance(plain, (int, float)) else math.nan
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return None
    return number if abs(number) <= MAX_REWARD else None
