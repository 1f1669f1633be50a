"""What is checked before anything is scored, and what a result is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from harness.rollouts import completion, result
from unison.ipc.types import Completion, ErrorReason, FinishReason, VersionSpan
from unison.workers.rollout.generator import RolloutRejectedError, check_completions
from unison.workers.rollout.records import (
    RECORDS,
    RawRollout,
    RolloutOrder,
    RolloutRejected,
    RolloutResult,
    WorkerJoined,
)


def order(pin: int | None = 0, count: int = 2) -> RolloutOrder:
    return RolloutOrder(1, "me", "train", 0, "p", count, 7, pin)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_whole_completions_pass(reason: FinishReason) -> None:
    check_completions([completion(0, finish_reason=reason), completion(1, length=0)], order())


SPAN = VersionSpan


@pytest.mark.parametrize(
    ("fields_of_second", "pin", "reason"),
    [
        ({"finish_reason": FinishReason.ERROR, "error": ErrorReason.NON_FINITE_LOGITS}, 0, "generation_failed"),
        ({"finish_reason": FinishReason.ABORTED, "error": ErrorReason.CANCELLED}, 0, "aborted"),
        ({"versions": ()}, 0, "unattributable"),
        ({"versions": (SPAN(0, 0, 2),)}, 0, "unattributable"),
        ({"versions": (SPAN(0, 0, 1), SPAN(1, 2, 3))}, None, "unattributable"),
        ({"versions": (SPAN(0, 0, 2), SPAN(1, 2, 3))}, 0, "unattributable"),
        ({"raw_logprobs": (-1.0,)}, 0, "unattributable"),
    ],
)
def test_what_is_rejected(fields_of_second: dict[str, Any], pin: int | None, reason: str) -> None:
    """P25, V6, S28: aborted, failed and unattributable completions are named with their index."""
    with pytest.raises(RolloutRejectedError) as caught:
        check_completions([completion(0), completion(1, **fields_of_second)], order(pin))
    assert (caught.value.reason, caught.value.indices) == (reason, (1,))


def test_mixed_versions_pass_where_none_is_pinned() -> None:
    check_completions([completion(0, versions=(SPAN(3, 0, 1), SPAN(4, 1, 3)))], order(None, 1))


@pytest.mark.parametrize("made", [[], [completion(0)], [completion(1), completion(0)]], ids=len)
def test_a_wrong_number_of_completions(made: list[Completion]) -> None:
    with pytest.raises(RolloutRejectedError, match="were asked for"):
        check_completions(made, order())


def test_a_result_is_the_raw_rollout_and_its_rewards() -> None:
    """S36: a subclass with one field more."""
    assert issubclass(RolloutResult, RawRollout)
    assert {item.name for item in fields(RolloutResult)} - {item.name for item in fields(RawRollout)} == {"rewards"}
    scored = result(3, [1.0, 2.0])
    raw = RawRollout(**{item.name: getattr(scored, item.name) for item in fields(RawRollout)})
    assert RolloutResult.of(raw, scored.rewards) == scored


def test_records_cross_the_rings() -> None:
    """Every record comes out of the codec as it went in; log-probs are float32 and lose nothing."""
    for record in (order(), result(1, [0.5]), RolloutRejected(1, "me", "aborted", "m", (1, 2)), WorkerJoined(5)):
        assert RECORDS.decode(RECORDS.encode(0, record)) == (0, record)
