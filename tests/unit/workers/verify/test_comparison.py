"""What is said of a sample, case by case, without a model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from unison.engine.config import EngineConfig
from unison.engine.replay import Replayed
from unison.ipc.types import SamplingParams, VersionSpan
from unison.workers.trainer.stored import StoredSample
from unison.workers.verify.case import Case, Claim
from unison.workers.verify.comparison import (
    Tolerance,
    compare_numbers,
    compare_prompt,
    compare_record,
    compare_rewards,
    compare_text,
)
from unison.workers.verify.report import EXIT_DIFFERENT, EXIT_UNVERIFIABLE, Summary
from unison.workers.verify.verdict import KINDS, Difference, Findings, SampleReport, Verdict

SAMPLE = StoredSample(
    4, 0, (10, 11, 2), (-1.0, -0.5, -0.25), (-1.0, -0.5, -0.25), (VersionSpan(3, 0, 3),), (VersionSpan(3, 0, 4),), (),
    7, "stop", 2, 0.5, {"f": 0.5}, None, "text",
)  # fmt: skip
CASE = Case(
    4, (5, 6), (SAMPLE,), SamplingParams(max_tokens=8, seed=7), EngineConfig.from_dict({"cache": {"num_tokens": 64}}),
    {2: "b", 3: "c"}, Claim(True, None), 7, 7,
)  # fmt: skip
FOUND = Replayed(SAMPLE.token_ids, SAMPLE.logprobs, SAMPLE.raw_logprobs, (0.0, 0.0, 0.0))


def numbers(tolerance: Tolerance | None = None, **changes: Any) -> Findings:
    findings = Findings()
    compare_numbers(SAMPLE, dataclasses.replace(FOUND, **changes), tolerance, findings)
    return findings


def test_equal_bits() -> None:
    found = numbers()
    assert found.is_equal and found.report(4, 0, 3).verdict is Verdict.BIT_EQUAL
    assert not numbers(logprobs=(-1.0, -0.5, math.nextafter(-0.25, 0.0))).differences, "of float32, which these are"
    zeros = dataclasses.replace(SAMPLE, logprobs=(-0.0, -0.5, -0.25))
    findings = Findings()
    compare_numbers(zeros, dataclasses.replace(FOUND, logprobs=(0.0, -0.5, -0.25)), None, findings)
    assert [each.kind for each in findings.differences] == ["logprob"], "equal as numbers, and not as bits"


@pytest.mark.parametrize(
    ("changes", "strict", "lenient"),
    [
        ({"raw_logprobs": (-1.0, -0.51, -0.25)}, ["logprob"], Verdict.WITHIN_TOLERANCE),
        ({"raw_logprobs": (-1.0, -0.7, -0.25)}, ["logprob"], Verdict.DIFFERENT),
        ({"drawn_ids": (10, 12, 2), "gaps": (0.0, 0.01, 0.0)}, ["tokens"], Verdict.WITHIN_TOLERANCE),
        ({"drawn_ids": (10, 12, 2), "gaps": (0.0, 0.3, 0.0)}, ["tokens"], Verdict.DIFFERENT),
        ({"drawn_ids": (10, 12, 2), "gaps": (0.0, math.nan, 0.0), "logprobs": (-1.0, math.nan, -0.25)},
         ["tokens", "logprob"], Verdict.WITHIN_TOLERANCE),
        ({"raw_logprobs": (-1.0, math.nan, -0.25)}, ["logprob"], Verdict.DIFFERENT),
    ],
)  # fmt: skip
def test_near_is_only_near_where_bits_cannot_be_asked_for(
    changes: dict[str, Any], strict: list[str], lenient: Verdict
) -> None:
    found = numbers(**changes)
    assert [each.kind for each in found.differences] == strict and "token 1" in found.differences[0].text
    assert numbers(Tolerance(), **changes).report(4, 0, 3).verdict is lenient


@pytest.mark.parametrize(
    ("case", "sample", "kind", "says"),
    [
        ({"stored_seed": 8}, {"seed": 8}, "seed", "the order's seed is 8"),
        ({}, {"seed": 8}, "seed", "its seed is 8"),
        ({"pinned": 2}, {}, "version", "it names version 3, and was to be made by 2"),
        ({"digests": {2: "b"}}, {}, "version", "version 3 is nowhere"),
        ({}, {"versions": (VersionSpan(3, 0, 2),)}, "version", "don't cover 3 tokens"),
        ({}, {"token_ids": (2, 11, 2)}, "finish", "token 0 is the stop token 2, and 2 follow"),
        ({}, {"matched_stop": None}, "finish", "its tokens say 'stop' and 2"),
        ({}, {"finish_reason": "length"}, "finish", "it ended with 'length'"),
        ({"params": SamplingParams(max_tokens=2, seed=7)}, {}, "finish", "3 tokens, 2 were to be drawn"),
        ({}, {"token_ids": (10, 11, 12), "finish_reason": "length", "matched_stop": None}, "finish",
         "3 tokens, 8 were to be drawn"),
    ],
)  # fmt: skip
def test_records(case: dict[str, Any], sample: dict[str, Any], kind: str, says: str) -> None:
    """V3, R1: seed, versions and end are compared without any weights."""
    findings = Findings()
    compare_record(
        dataclasses.replace(CASE, **case), dataclasses.replace(SAMPLE, **sample), 64, frozenset({2}), findings
    )
    assert {each.kind for each in findings.differences} == {kind}
    assert any(says in each.text for each in findings.differences), findings.differences
    clean = Findings()
    compare_record(CASE, SAMPLE, 64, frozenset({2}), clean)
    assert clean.differences == []


def test_prompt_text_and_rewards() -> None:
    """P21: each is compared with what it is made of now, and the first place is named."""
    findings = Findings()
    compare_prompt((1, 2, 3), (1, 9, 3), findings)
    compare_prompt((1, 2), (1, 2, 3), findings)
    compare_text("abcd", "abxd", findings)
    compare_rewards(SAMPLE, 0.75, {"f": 0.5, "g": 1.0}, findings)
    compare_rewards(SAMPLE, 0.5, {}, findings)
    texts = [each.text for each in findings.differences]
    assert texts[0] == "token 1 of the prompt is 2, the task's prompt gives 9"
    assert texts[1] == "token 2 of the prompt is nothing, the task's prompt gives 3"
    assert texts[2] == "from character 2 on it is 'cd', its tokens say 'xd'"
    assert texts[3:] == ["g gave None, it gives 1.0", "the reward is 0.5, the functions give 0.75",
                         "f gave a value, and gives none"]  # fmt: skip
    equal = Findings()
    compare_prompt((1,), (1,), equal)
    compare_text("a", "a", equal)
    compare_rewards(SAMPLE, None, {"f": 0.5}, equal)
    assert not equal.differences


def test_causes_come_first_and_exit_codes_follow() -> None:
    """A difference outweighs what can't be verified; damage outweighs all; both are counted."""
    findings = Findings()
    for kind in reversed(KINDS):
        findings.add(kind, "x")
    findings.missing.append(3)
    report = findings.report(4, 0, 3)
    assert [each.kind for each in report.differences] == list(KINDS) and report.verdict is Verdict.DIFFERENT
    unverifiable = SampleReport(4, 1, Verdict.UNVERIFIABLE, 3, missing=(3,))
    summary = Summary()
    assert summary.exit_code(False) == 0
    summary.add(unverifiable)
    assert (summary.exit_code(False), summary.exit_code(True)) == (EXIT_UNVERIFIABLE, 0) and summary.missing == {3: 1}
    summary.damaged = {"file": "text"}
    assert summary.exit_code(True) == EXIT_DIFFERENT
    summary.damaged = {}
    summary.add(report)
    assert summary.exit_code(True) == EXIT_DIFFERENT and summary.kinds["seed"] == 1
    assert summary.to_json()["num_samples"] == {"unverifiable": 1, "different": 1}
    assert Difference("seed", "x") in report.differences
