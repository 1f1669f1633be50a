"""What trainer and rollout workers tell each other over their rings.

A sample is token ids with everything that is known of them; text is for reward functions and for reading, and is never
turned back into tokens (P21). Owns: the types and their codec. Used by both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...ipc.types import Completion
from ...ipc.wire import Codec

TRAIN, HELD_OUT = "train", "held_out"
"""The two splits of a task."""


@dataclass(frozen=True)
class RolloutOrder:
    """To a rollout worker: make one group."""

    order_id: int
    """Unique in the run; the ledger's key."""
    incarnation: str
    """Of the trainer that asks; what comes back for a dead one is dropped."""
    split: str
    """`train` or `held_out`."""
    prompt_index: int
    """Which of the split's prompts."""
    prompt_id: str
    """Its id, compared with the worker's own reading of the task."""
    num_samples: int
    """Completions."""
    seed: int
    """Key of their draws (R3)."""
    pin_version: int | None
    """Ordinal of the one version to use; None takes what is live."""


@dataclass(frozen=True)
class RewardScore:
    """What one completion earned."""

    total: float
    """Weighted sum of the parts."""
    parts: dict[str, float]
    """By reward function, unweighted; functions that don't apply are missing."""


@dataclass(frozen=True)
class RawRollout:
    """A group as the engine made it."""

    order_id: int
    """The order."""
    incarnation: str
    """From the order."""
    split: str
    """From the order."""
    prompt_id: str
    """From the order."""
    prompt_ids: tuple[int, ...]
    """Token ids of the rendered prompt."""
    completions: tuple[Completion, ...]
    """By index, each whole."""
    texts: tuple[str, ...]
    """The completions as the reward functions read them, special tokens left out."""


@dataclass(frozen=True)
class RolloutResult(RawRollout):
    """A scored group: the raw rollout and its rewards, nothing else (S36)."""

    rewards: tuple[RewardScore, ...]
    """By completion."""

    @staticmethod
    def of(raw: RawRollout, rewards: tuple[RewardScore, ...]) -> RolloutResult:
        """Add the rewards."""
        return RolloutResult(**{item.name: getattr(raw, item.name) for item in fields(RawRollout)}, rewards=rewards)


@dataclass(frozen=True)
class RolloutRejected:
    """A group that came to nothing; it is recorded, and never trained as empty (S28)."""

    order_id: int
    """The order."""
    incarnation: str
    """From the order."""
    reason: str
    """One of REJECTIONS."""
    message: str
    """What happened."""
    indices: tuple[int, ...]
    """Completions that are at fault; empty where the whole group is."""


@dataclass(frozen=True)
class WorkerJoined:
    """First frame of a rollout worker: what its predecessor had in work is lost."""

    pid: int
    """Its process."""


REJECTIONS = {
    "generation_failed": "the engine refused the request or ended a completion with an error",
    "aborted": "a completion was aborted before its end",
    "unattributable": "a completion's version spans don't cover it, or name another version than the pinned one",
    "prompt_failed": "the task or the chat template failed on the prompt, or it doesn't fit the model",
    "reward_timeout": "the reward functions took longer than rollout.reward_timeout_s",
    "reward_crashed": "the process of the reward functions ended",
    "reward_error": "a reward function raised an exception",
    "reward_invalid": "a reward function returned a wrong number of values, or values that aren't finite numbers",
    "too_large": "the group doesn't fit into the ring to the trainer; rollout.ring_mib is too small",
    "internal": "a fault of the rollout worker",
}
"""Reasons for which a rollout is rejected, and what they mean."""

RECORDS = Codec((RolloutOrder, RolloutResult, RolloutRejected, WorkerJoined))
"""The one codec of the rings."""
