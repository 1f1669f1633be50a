"""Verdict, Difference and SampleReport: what is said of a sample that was verified.

Owns: the words. Knows nothing of how they are come by. Used by all of bin/verify.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

KINDS = {
    "record": "a column of the ledger can't be read, or the record can't be of this model",
    "seed": "the seed isn't what the run's seed and the order give, or the sample's isn't its order's",
    "version": "a version is unknown, isn't its step's, contradicts its KV, or another one gives the log-probs",
    "weights": "a file that a version's weights come from isn't what its digest says",
    "prompt": "the task's prompt, rendered and tokenized, gives other tokens",
    "tokens": "the counter RNG draws another token here",
    "logprob": "a log-prob has other bits, raw or under the distribution drawn from",
    "finish": "the reason for which it ended isn't what its tokens say",
    "text": "its tokens decode to another text",
    "reward": "a reward function that gives the same value twice gives another one than is stored",
}
"""Kind of a difference → what it means. In the order in which causes are named: an earlier one explains a later one."""


class Verdict(str, Enum):
    """What came of one sample."""

    BIT_EQUAL = "bit-equal"
    """Every number came out again with the same bits, and nothing else differs."""
    WITHIN_TOLERANCE = "within tolerance"
    """The same tokens could be drawn and no log-prob is further off than the tolerance; of a run that didn't claim
    exactness, or on a machine that can't compute what that one did."""
    DIFFERENT = "different"
    """Something differs, and is named."""
    UNVERIFIABLE = "unverifiable"
    """The weights of a version that it names weren't kept; what could be looked at without them is sound."""


@dataclass(frozen=True)
class Difference:
    """One thing that isn't as it is stored."""

    kind: str
    """One of KINDS."""
    text: str
    """What differs, and at which token first."""


@dataclass(frozen=True)
class SampleReport:
    """What is known of one sample."""

    order: int
    """Its order, or its place in a file."""
    index: int
    """Which of the group's completions."""
    verdict: Verdict
    """The word."""
    num_tokens: int
    """Its length."""
    differences: tuple[Difference, ...] = ()
    """Causes first."""
    max_difference: float = 0.0
    """Largest |recomputed - stored| of a log-prob."""
    missing: tuple[int, ...] = ()
    """Versions whose weights are nowhere."""
    unchecked: tuple[str, ...] = ()
    """What could not be looked at, and why."""


@dataclass
class Findings:
    """What is gathered about one sample on the way to its report."""

    differences: list[Difference] = field(default_factory=list)
    """In any order."""
    max_difference: float = 0.0
    """Largest difference of a log-prob."""
    is_equal: bool = False
    """Whether tokens and log-probs came out again, bit for bit."""
    missing: list[int] = field(default_factory=list)
    """Versions without weights."""
    unchecked: list[str] = field(default_factory=list)
    """Checks that weren't made."""

    def add(self, kind: str, text: str) -> None:
        """One difference more."""
        self.differences.append(Difference(kind, text))

    def report(self, order: int, index: int, num_tokens: int) -> SampleReport:
        """The verdict."""
        order_of = list(KINDS)
        causes = sorted(self.differences, key=lambda each: order_of.index(each.kind))
        if causes:
            verdict = Verdict.DIFFERENT
        elif self.missing:
            verdict = Verdict.UNVERIFIABLE
        else:
            verdict = Verdict.BIT_EQUAL if self.is_equal else Verdict.WITHIN_TOLERANCE
        return SampleReport(order, index, verdict, num_tokens, tuple(causes), self.max_difference,
                            tuple(self.missing), tuple(self.unchecked))  # fmt: skip
