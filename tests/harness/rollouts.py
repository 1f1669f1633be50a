"""Rollouts for tests, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unison.ipc.types import Completion, FinishReason, VersionSpan
from unison.workers.rollout.records import RewardScore, RolloutResult


def completion(index: int = 0, length: int = 3, version: int = 0, **fields: Any) -> Completion:
    """A whole completion of one version; log-prob of token i is -(i + 1) / 8."""
    values = tuple(-(at + 1) / 8 for at in range(length))
    spans = (VersionSpan(version, 0, length),) if length else ()
    defaults: dict[str, Any] = {
        "index": index, "token_ids": tuple(range(10, 10 + length)), "logprobs": tuple(2 * value for value in values),
        "raw_logprobs": values, "log_support_mass": (0.0,) * length, "finish_reason": FinishReason.STOP,
        "versions": spans, "kv_versions": (VersionSpan(version, 0, length + 1),), "seed": 7,
    }  # fmt: skip
    return Completion(**(defaults | fields))


def result(
    order_id: int, rewards: Sequence[float], completions: Sequence[Completion] | None = None, split: str = "train",
    incarnation: str = "me", version: int = 0,
) -> RolloutResult:  # fmt: skip
    """A scored group."""
    made = tuple(completions or (completion(at, version=version) for at in range(len(rewards))))
    return RolloutResult(
        order_id, incarnation, split, f"prompt-{order_id}", (1, 2), made, ("text",) * len(rewards),
        tuple(RewardScore(value, {"f": value}) for value in rewards),
    )  # fmt: skip
