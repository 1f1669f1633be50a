"""What trainer and rollout workers say to each other, and that nothing of it is lost on the way."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from harness.rollouts import completion, result
from unison.ipc.errors import WireError
from unison.ipc.types import ErrorReason, FinishReason, VersionSpan
from unison.workers.rollout.records import (
    HELD_OUT,
    RECORDS,
    REJECTIONS,
    RawRollout,
    RewardScore,
    RolloutOrder,
    RolloutRejected,
    RolloutResult,
    WorkerJoined,
)
from unison.workers.trainer.ledger import HELD_OUT_IDS

ORDER = RolloutOrder(3, "me", "train", 4, "p", 8, 2**63 - 1, None)


def raw_of(scored: RolloutResult) -> RawRollout:
    return RawRollout(**{item.name: getattr(scored, item.name) for item in fields(RawRollout)})


def test_the_only_field_that_scoring_adds_is_rewards() -> None:
    """S36: the scored type derives from the raw one, in its order, and adds `rewards`; scoring changes no field."""
    raw_names = [item.name for item in fields(RawRollout)]
    assert issubclass(RolloutResult, RawRollout) and [item.name for item in fields(RolloutResult)] == [
        *raw_names, "rewards"
    ]  # fmt: skip
    raw, rewards = raw_of(result(3, [1.0, 2.0], version=5)), (RewardScore(0.5, {"a": 1.0}), RewardScore(0.0, {}))
    scored = RolloutResult.of(raw, rewards)
    assert all(getattr(scored, name) is getattr(raw, name) for name in raw_names) and scored.rewards is rewards
    assert raw_of(scored) == raw and scored != raw


@pytest.mark.parametrize("record", [ORDER, result(1, [0.0])], ids=["order", "result"])
def test_records_cannot_be_changed(record: Any) -> None:
    """Whoever holds one holds what was said."""
    with pytest.raises(AttributeError):
        record.order_id = 9


@pytest.mark.parametrize(
    "record",
    [
        ORDER,
        replace(ORDER, pin_version=0),
        replace(ORDER, order_id=HELD_OUT_IDS + 5, split=HELD_OUT, pin_version=2**40, prompt_id="ä\0\u2028"),
        RolloutRejected(0, "", "internal", "", ()),
        RolloutRejected(HELD_OUT_IDS, "me", "aborted", "it was said: \n\t'no'", (0, 7)),
        WorkerJoined(2**22),
    ],
    ids=lambda record: type(record).__name__,
)
def test_small_records_come_out_as_they_went_in(record: Any) -> None:
    """Whatever values they have: the frame says all of it, None and 0 apart."""
    assert RECORDS.decode(RECORDS.encode(0, record)) == (0, record)


@pytest.mark.parametrize("lengths", [(0,), (1,), (0, 1, 300)], ids=str)
def test_results_of_any_length_come_out_as_they_went_in(lengths: tuple[int, ...]) -> None:
    """P24: completions of no token and of one are ordinary; what is known of each token comes along."""
    made = [completion(at, length) for at, length in enumerate(lengths)]
    scored = result(9, [0.1 * at - 1 / 3 for at in range(len(lengths))], made)
    (_, found) = RECORDS.decode(RECORDS.encode(0, scored))
    assert found == scored and [len(each.token_ids) for each in found.completions] == list(lengths)


def test_every_part_of_a_completion_comes_along() -> None:
    """P25: how it ended, which versions made it and its seed; log-probs to the last bit."""
    full = completion(
        0, 2, raw_logprobs=(-1e-300, -0.1), finish_reason=FinishReason.ERROR, error=ErrorReason.CANCELLED,
        versions=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)), matched_stop=2, seed=2**62 + 1,
    )  # fmt: skip
    scored = replace(result(9, [1.0], [full]), rewards=(RewardScore(0.3, {"a": 0.1, "b": 0.2}),), texts=("\x00é😀",))
    assert RECORDS.decode(RECORDS.encode(0, scored))[1] == scored


def test_the_codec_is_strict() -> None:
    """P43: a raw rollout can't be sent in a scored one's place; a wrong type, number or field name is refused."""
    with pytest.raises(WireError, match="no registered message"):
        RECORDS.encode(0, raw_of(result(1, [1.0])))
    with pytest.raises(WireError, match="can't be encoded"):
        RECORDS.encode(0, replace(ORDER, seed=2**63))
    with pytest.raises(WireError, match="can't be encoded"):
        RECORDS.encode(0, replace(ORDER, prompt_index="4"))  # type: ignore[arg-type]
    frame = RECORDS.encode(0, ORDER)
    for damaged in (frame[:-1], frame.replace(b"prompt_id", b"prompt_ix"), b""):
        with pytest.raises(WireError):
            RECORDS.decode(damaged)


def test_the_codec_knows_these_four() -> None:
    """Nothing else crosses the rings; a raw rollout stays in its worker."""
    assert RECORDS.tags == ("RolloutOrder", "RolloutRejected", "RolloutResult", "WorkerJoined")
    assert all(is_dataclass(kind) for kind in (RolloutOrder, RolloutRejected, RolloutResult, WorkerJoined))


def test_every_rejection_is_explained() -> None:
    """S27: a closed set of names that can be grepped for, each with its meaning."""
    assert all(name.replace("_", "").isalpha() and name.islower() and text for name, text in REJECTIONS.items())
    assert {"generation_failed", "aborted", "unattributable", "prompt_failed", "internal"} < REJECTIONS.keys()
    assert {f"reward_{why}" for why in ("timeout", "crashed", "error", "invalid")} < REJECTIONS.keys()
