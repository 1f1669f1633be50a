"""Task: what is asked, in two splits, and how answers are rewarded.

Owns: the type and its checks. Knows nothing of files, tokens or processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .prompts import Prompt
from .records import HELD_OUT, TRAIN
from .rewards import Rewards, as_rewards


class Task:
    """Prompts in two splits and their reward functions. Immutable after construction."""

    def __init__(
        self, train: Sequence[Prompt], held_out: Sequence[Prompt], rewards: Rewards
    ) -> None:
        """
        Raises:
            ValueError: a split is empty, an id is no text, or comes twice (the held-out split must not be trained on).
        """
        ids = [prompt.prompt_id for prompt in (*train, *held_out)]
        strange = next((each for each in ids if not isinstance(each, str)), None)
        if strange is not None:
            raise ValueError(f"a prompt's id is {strange!r}, a {type(strange).__name__}; ids are texts")
        if not train or not held_out or len(set(ids)) != len(ids):
            raise ValueError(
                f"the task has {len(train)} training and {len(held_out)} held-out prompts with {len(set(ids))} "
                "different ids; both splits need at least one, and no id may come twice"
            )
        self.train = tuple(train)
        self.held_out = tuple(held_out)
        self.rewards = as_rewards(rewards)

    def split(self, name: str) -> tuple[Prompt, ...]:
        """`train` or `held_out`."""
        return {TRAIN: self.train, HELD_OUT: self.held_out}[name]
