"""What is checked before anything is scored, and what a result is."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from harness.byte_tokenizer import byte_tokenizer
from harness.rollouts import completion, result
from harness.serving import WorkerThread
from harness.tiny_directory import write_tiny_chat_directory
from unison.ipc.async_client import AsyncClient
from unison.ipc.types import Completion, ErrorReason, FinishReason, VersionSpan
from unison.workers.rollout.generator import RolloutGenerator, RolloutRejectedError, check_completions
from unison.workers.rollout.prompts import Prompt, PromptRenderer
from unison.workers.rollout.records import (
    RECORDS,
    RawRollout,
    RolloutOrder,
    RolloutRejected,
    RolloutResult,
    WorkerJoined,
)
from unison.workers.trainer.config import TrainConfig


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


def test_a_group_is_one_request_of_the_engines_own(tmp_path: Path) -> None:
    """S39, S34: rollouts go through the engine's scheduler: one request, the prompt computed once, R - 1 tokens decoded
    per completion; at the trained model's end of turn, and not re-tokenized (P21)."""
    write_tiny_chat_directory(tmp_path / "m")
    config = TrainConfig.from_dict({"rollout": {"max_tokens": 6}})
    prompt = Prompt("p", ({"role": "user", "content": "hello"},))
    wanted = RolloutOrder(1, "me", "train", 0, "p", 4, 7, 0)

    async def generate(run_dir: Path) -> RawRollout:
        async with await AsyncClient.connect(run_dir, role="rollout") as client:
            return await RolloutGenerator(client, PromptRenderer(byte_tokenizer()), config).generate(wanted, prompt)

    with WorkerThread(tmp_path / "r", tmp_path / "m", {}) as worker:
        raw = asyncio.run(generate(worker.run_dir))
        stats = worker.engine.stats()
    lengths = [len(each.token_ids) for each in raw.completions]
    assert stats.num_requests_submitted == 1 and stats.num_prefill_tokens == len(raw.prompt_ids)
    assert stats.num_decode_tokens == sum(lengths) - len(lengths)
    assert len({each.token_ids for each in raw.completions}) > 1 and len(raw.texts) == 4
    assert raw.prompt_ids == PromptRenderer(byte_tokenizer()).encode(prompt)
