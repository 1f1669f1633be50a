"""Which completions may be trained on: the tables of finish reasons and version spans, and how they are asked for."""

from __future__ import annotations

from typing import Any

import pytest
from harness.rollouts import completion
from unison.ipc.types import Completion, ErrorReason, FinishReason, VersionSpan
from unison.workers.rollout.generator import RolloutRejectedError, check_completions, is_attributable
from unison.workers.rollout.records import HELD_OUT, REJECTIONS, RolloutOrder


def order(count: int, pin: int | None = None, split: str = "train") -> RolloutOrder:
    return RolloutOrder(1, "me", split, 0, "p", count, 7, pin)


def spans(*bounds: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*each) for each in bounds)


@pytest.mark.parametrize(
    ("length", "versions", "pin", "expected"),
    [
        (3, spans((0, 0, 3)), None, True),
        (3, spans((0, 0, 3)), 0, True),
        (3, spans((5, 0, 3)), 5, True),
        (3, spans((4, 0, 1), (5, 1, 3)), None, True),
        (3, spans((4, 0, 1), (5, 1, 2), (9, 2, 3)), None, True),
        (1, spans((2, 0, 1)), 2, True),
        (0, (), None, True),
        (0, (), 3, True),
        (3, (), None, False),
        (3, spans((0, 0, 3)), 1, False),
        (3, spans((1, 0, 3)), 0, False),
        (3, spans((5, 0, 2), (4, 2, 3)), 5, False),
        (3, spans((4, 0, 2), (5, 2, 3)), 5, False),
        (3, spans((0, 0, 2)), None, False),
        (3, spans((0, 0, 4)), None, False),
        (3, spans((0, 1, 3)), None, False),
        (3, spans((0, 0, 1), (1, 2, 3)), None, False),
        (3, spans((0, 0, 2), (1, 1, 3)), None, False),
        (3, spans((1, 1, 3), (0, 0, 1)), None, False),
        (3, spans((0, 0, 3), (1, 3, 3)), None, False),
        (3, spans((0, 0, 3), (0, 0, 3)), None, False),
        (0, spans((0, 0, 0)), None, False),
        (0, spans((0, 0, 1)), None, False),
    ],
)
def test_every_token_has_one_version(
    length: int, versions: tuple[VersionSpan, ...], pin: int | None, expected: bool
) -> None:
    """V6: spans tile the tokens from the first to the last, and name the pinned version where there is one."""
    assert is_attributable(completion(0, length, versions=versions), pin) is expected


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "raw_logprobs"])
@pytest.mark.parametrize("values", [(), (-1.0, -1.0), (-1.0,) * 4], ids=len)
def test_what_is_known_of_each_token_is_complete(name: str, values: tuple[float, ...]) -> None:
    """V6: with a log-prob missing or one too many, which token it belongs to can't be told."""
    kept = tuple(map(int, values)) if name == "token_ids" else values
    assert not is_attributable(completion(0, 3, **{name: kept}), None)


@pytest.mark.parametrize("finish_reason", list(FinishReason))
def test_finish_reasons(finish_reason: FinishReason) -> None:
    """P25: only what ended by itself or at its limit is trained on; every other reason of the closed set is refused."""
    made = [completion(0), completion(1, finish_reason=finish_reason), completion(2)]
    expected = {FinishReason.ABORTED: "aborted", FinishReason.ERROR: "generation_failed"}.get(finish_reason)
    if expected is None:
        check_completions(made, order(3))
        return
    with pytest.raises(RolloutRejectedError) as caught:
        check_completions(made, order(3))
    assert (caught.value.reason, caught.value.indices) == (expected, (1,)) and expected in REJECTIONS


@pytest.mark.parametrize("error", list(ErrorReason))
def test_the_cause_is_named(error: ErrorReason) -> None:
    """S27: whatever the engine gave as its cause stands in the message."""
    made = [completion(0, finish_reason=FinishReason.ERROR, error=error), completion(1)]
    with pytest.raises(RolloutRejectedError, match=f"1 of 2 completions: {error.value}"):
        check_completions(made, order(2))


def test_all_at_fault_are_named() -> None:
    """S28: all indices of one reason, the gravest reason first; a short text isn't mistaken for an empty answer."""
    failed: dict[str, Any] = {"finish_reason": FinishReason.ERROR}
    aborted: dict[str, Any] = {"finish_reason": FinishReason.ABORTED}
    made = [
        completion(0, **aborted), completion(1, **failed), completion(2), completion(3, **failed),
        completion(4, versions=()),
    ]  # fmt: skip
    with pytest.raises(RolloutRejectedError) as caught:
        check_completions(made, order(5))
    assert (caught.value.reason, caught.value.indices) == ("generation_failed", (1, 3))
    with pytest.raises(RolloutRejectedError) as caught:
        check_completions([made[0], completion(1), *made[2:3], completion(3), made[4]], order(5))
    assert (caught.value.reason, caught.value.indices) == ("aborted", (0,))


@pytest.mark.parametrize("indices", [(), (0,), (0, 1, 2), (1, 0), (0, 0), (1, 2)], ids=str)
def test_the_group_is_whole_and_in_order(indices: tuple[int, ...]) -> None:
    """S28: rewards and advantages go by place, so a group with another number or order of completions is refused."""
    made: list[Completion] = [completion(at) for at in indices]
    with pytest.raises(RolloutRejectedError, match=f"2 completions were asked for, {len(indices)} came") as caught:
        check_completions(made, order(2))
    assert caught.value.reason == "generation_failed"


def test_held_out_groups_are_checked_as_well() -> None:
    """P45: an evaluation under another version than the pinned one is none."""
    check_completions([completion(0, version=4)], order(1, 4, HELD_OUT))
    with pytest.raises(RolloutRejectedError) as caught:
        check_completions([completion(0, version=5)], order(1, 4, HELD_OUT))
    assert caught.value.reason == "unattributable"
