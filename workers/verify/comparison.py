"""What is compared of a sample without weights, and what with them: pure functions from records to differences.

Owns: the rules and their words. Knows nothing of files or processes. Called by the verifier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...engine.replay import Replayed
from ...ipc.types import FinishReason
from ..trainer.stored import StoredSample
from .case import Case
from .verdict import Findings


@dataclass(frozen=True)
class Tolerance:
    """How far off is near, where bits can't be asked for."""

    logprob: float = 0.05
    """Largest difference of a log-prob."""
    probability: float = 0.05
    """How far, in probability, a draw may be from the recorded token."""


def compare_record(
    case: Case, sample: StoredSample, max_len: int, stop_ids: frozenset[int], findings: Findings
) -> None:
    """Seed, versions and end: what needs no weights."""
    if case.stored_seed != case.seed:
        findings.add("seed", f"the order's seed is {case.stored_seed}, the run's seed gives {case.seed}")
    if sample.seed != case.stored_seed:
        findings.add("seed", f"its seed is {sample.seed}, its order's {case.stored_seed}")
    problem = sample.span_problem(len(case.prompt_ids)) if case.prompt_ids else None
    if problem:
        findings.add("version", problem)
    unknown = sorted(sample.named_versions - case.digests.keys())
    if unknown:
        findings.add("version", f"version {', '.join(map(str, unknown))} is nowhere")
    if case.pinned is not None and sample.named_versions - {case.pinned}:
        named = ", ".join(map(str, sorted(sample.named_versions)))
        findings.add("version", f"it names version {named}, and was to be made by {case.pinned}")
    _compare_end(case, sample, max_len, stop_ids, findings)


def _compare_end(
    case: Case, sample: StoredSample, max_len: int, stop_ids: frozenset[int], findings: Findings
) -> None:
    tokens = sample.token_ids
    early = next((at for at, token in enumerate(tokens[:-1]) if token in stop_ids), None)
    if early is not None:
        findings.add("finish", f"token {early} is the stop token {tokens[early]}, and {len(tokens) - 1 - early} follow")
    last = tokens[-1] if tokens and tokens[-1] in stop_ids else None
    wanted = FinishReason.STOP if last is not None else FinishReason.LENGTH
    if sample.finish_reason != wanted.value or sample.matched_stop != last:
        findings.add("finish", f"it ended with {sample.finish_reason!r} and stop token {sample.matched_stop}, its "
                     f"tokens say {wanted.value!r} and {last}")  # fmt: skip
    longest = min(case.params.max_tokens, max_len - len(case.prompt_ids))
    if len(tokens) > longest or (last is None and len(tokens) < longest and case.engine.cache.num_tokens is not None):
        findings.add("finish", f"it has {len(tokens)} tokens, {longest} were to be drawn")


def compare_numbers(sample: StoredSample, found: Replayed, tolerance: Tolerance | None, findings: Findings) -> None:
    """Tokens and log-probs: bit for bit, or within a tolerance where one is given."""
    raw, drawn = _first_other(found.raw_logprobs, sample.raw_logprobs), _first_other(found.logprobs, sample.logprobs)
    pairs = zip(found.drawn_ids, sample.token_ids, strict=True)
    other = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    differences = [abs(a - b) for a, b in zip(found.raw_logprobs, sample.raw_logprobs, strict=True)]
    differences += [abs(a - b) for a, b in zip(found.logprobs, sample.logprobs, strict=True) if not math.isnan(a)]
    worst = max((math.inf if math.isnan(each) else each for each in differences), default=0.0)
    findings.max_difference = worst
    if raw is None and drawn is None and other is None:
        findings.is_equal = True
        return
    if tolerance is not None and worst <= tolerance.logprob and _is_near(found, tolerance):
        return
    if other is not None:
        findings.add("tokens", f"token {other} is {sample.token_ids[other]}, {found.drawn_ids[other]} is drawn")
    for name, at, ours, theirs in (
        ("raw log-prob", raw, found.raw_logprobs, sample.raw_logprobs),
        ("log-prob", drawn, found.logprobs, sample.logprobs),
    ):
        if at is not None:
            findings.add("logprob", f"token {at} has the {name} {theirs[at]:.9g}, {ours[at]:.9g} comes out; at most "
                         f"{worst:.3g} apart")  # fmt: skip


def _is_near(found: Replayed, tolerance: Tolerance) -> bool:
    """Where filters are on, how near a draw was isn't known; the log-prob has spoken then."""
    return all(math.isnan(gap) or gap <= tolerance.probability for gap in found.gaps)


def _first_other(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    """First place at which float32 bits differ."""
    a, b = (np.asarray(values, dtype=np.float32).view(np.uint32) for values in (ours, theirs))
    places = np.flatnonzero(a != b)
    return int(places[0]) if len(places) else None


def compare_prompt(stored: Sequence[int], rendered: Sequence[int], findings: Findings) -> None:
    """Token by token."""
    if tuple(stored) == tuple(rendered):
        return
    pairs = zip(stored, rendered, strict=False)
    at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(stored), len(rendered)))
    ours, theirs = ("nothing" if at >= len(ids) else ids[at] for ids in (rendered, stored))
    findings.add("prompt", f"token {at} of the prompt is {theirs}, the task's prompt gives {ours}")


def compare_text(stored: str, decoded: str, findings: Findings) -> None:
    """Character by character."""
    if stored == decoded:
        return
    at = next((at for at, (a, b) in enumerate(zip(stored, decoded, strict=False)) if a != b),
              min(len(stored), len(decoded)))  # fmt: skip
    findings.add("text", f"from character {at} on it is {stored[at:at + 20]!r}, its tokens say {decoded[at:at + 20]!r}")


def compare_rewards(
    sample: StoredSample, total: float | None, parts: Mapping[str, float], findings: Findings
) -> None:
    """`parts` are those that can be asked for; `total` where all of them can."""
    for label, value in parts.items():
        stored = sample.rewards.get(label)
        if stored != value:
            findings.add("reward", f"{label} gave {stored}, it gives {value}")
    gone = sorted(sample.rewards.keys() - parts.keys()) if total is not None else []
    if gone:
        findings.add("reward", f"{', '.join(gone)} gave a value, and gives none")
    if total is not None and sample.reward != total:
        findings.add("reward", f"the reward is {sample.reward}, the functions give {total}")
