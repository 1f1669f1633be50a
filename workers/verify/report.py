"""Summary: what a sweep came to, for people and for scripts.

Owns: the counts, the exit code, the tables. Called by the command line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from .verdict import SampleReport, Verdict

EXIT_DIFFERENT, EXIT_UNVERIFIABLE = 1, 3
"""1: a sample or a file differs · 3: none does, but weights of some versions weren't kept."""
MAX_SHOWN = 40
"""Samples that a table shows; all of them are in the JSON."""


@dataclass
class Summary:
    """Counts over samples, filled one by one."""

    num_samples: Counter[str] = field(default_factory=Counter)
    """By verdict."""
    num_tokens: int = 0
    """Of all samples."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Samples by kind of their differences."""
    missing: Counter[int] = field(default_factory=Counter)
    """Unverifiable samples by version whose weights weren't kept."""
    unchecked: Counter[str] = field(default_factory=Counter)
    """Samples by what wasn't looked at."""
    max_difference: float = 0.0
    """Largest difference of a log-prob."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Files that aren't what they should be, whether a sample needed them or not."""
    seconds: float = 0.0
    """How long it took."""
    notable: list[SampleReport] = field(default_factory=list)
    """Those that aren't bit-equal."""

    def add(self, report: SampleReport) -> None:
        """Count one sample."""
        self.num_samples[report.verdict.value] += 1
        self.num_tokens += report.num_tokens
        self.kinds.update({each.kind for each in report.differences})
        self.max_difference = max(self.max_difference, report.max_difference)
        self.unchecked.update(set(report.unchecked))
        if report.verdict is Verdict.UNVERIFIABLE:
            self.missing.update(report.missing)
        if report.verdict is not Verdict.BIT_EQUAL:
            self.notable.append(report)

    def exit_code(self, allow_unverifiable: bool) -> int:
        """0: all is bit-equal, or within the tolerance where bits can't be asked for."""
        if self.num_samples[Verdict.DIFFERENT.value] or self.damaged:
            return EXIT_DIFFERENT
        if self.num_samples[Verdict.UNVERIFIABLE.value] and not allow_unverifiable:
            return EXIT_UNVERIFIABLE
        return 0

    def to_json(self) -> dict[str, Any]:
        """Plain values of the counts."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "notable"}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}

    def show(self, console: Console, reports: list[SampleReport]) -> None:
        """The chosen samples where they are few, else those that are notable; then the counts."""
        shown = reports if len(reports) <= MAX_SHOWN else self.notable
        if shown:
            console.print(_samples_table(shown[:MAX_SHOWN]))
            if len(shown) > MAX_SHOWN:
                console.print(f"and {len(shown) - MAX_SHOWN} more; --json has them all")
        total = sum(self.num_samples.values())
        rate = f"{self.num_tokens / self.seconds:.0f} tokens/s" if self.seconds else ""
        console.print(f"{total} samples of {self.num_tokens} tokens in {self.seconds:.1f} s {rate}")
        for verdict in Verdict:
            count = self.num_samples[verdict.value]
            if count or verdict is Verdict.BIT_EQUAL:
                console.print(f"  {verdict.value}: {count}", highlight=False)
        if self.num_samples[Verdict.WITHIN_TOLERANCE.value] or self.kinds["logprob"]:
            console.print(f"  largest difference of a log-prob: {self.max_difference:.3g}")
        for kind, count in self.kinds.items():
            console.print(f"  {count} × {kind}", highlight=False)
        for ordinal, count in sorted(self.missing.items()):
            console.print(f"  {count} samples: weights of version {ordinal} weren't kept", highlight=False)
        for text, count in self.unchecked.items():
            console.print(f"  unchecked in {count} samples: {text}", highlight=False, markup=False)
        for text in self.damaged.values():
            console.print(f"damaged: {text}", highlight=False, markup=False)


def _samples_table(reports: list[SampleReport]) -> Table:
    colours = {Verdict.BIT_EQUAL: "green", Verdict.WITHIN_TOLERANCE: "green", Verdict.DIFFERENT: "bold red",
               Verdict.UNVERIFIABLE: "yellow"}  # fmt: skip
    table = Table()
    for name in ("order", "#", "verdict", "tokens"):
        table.add_column(name, no_wrap=True)
    table.add_column("what differs, causes first", overflow="fold")
    for report in reports:
        lines = [f"{each.kind}: {each.text}" for each in report.differences]
        lines += [f"weights of version {ordinal} weren't kept" for ordinal in report.missing]
        table.add_row(str(report.order), str(report.index), f"[{colours[report.verdict]}]{report.verdict.value}[/]",
                      str(report.num_tokens), "\n".join(lines).replace("[", r"\["))  # fmt: skip
    return table
