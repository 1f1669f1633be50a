"""The tables of `bin/train audit RUN`: each rule with what is wrong, and what was dropped beside what was trained.

Owns: what is shown of an AuditReport, and the exit code. Called by the command line.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from .audit import RULES, AuditReport, audit
from .stored import StoredRun

EXIT_UNSOUND = 1
MAX_PLACES = 3
"""Places that are shown of each rule that is broken."""
WIDE_COLUMNS = 200


def show_audit(run_dir: Path, as_json: bool, max_staleness: int | None) -> int:
    """Print the audit of a run; returns the exit code: 1 where a rule is broken."""
    with StoredRun(run_dir) as run:
        report = audit(run, max_staleness)
    if as_json:
        values = {**asdict(report), "is_sound": report.is_sound, "rules": RULES}
        click.echo(json.dumps(values, indent=2))
    else:
        print_report(report)
    return 0 if report.is_sound else EXIT_UNSOUND


def print_report(report: AuditReport) -> None:
    """Two tables: the rules, and what was dropped."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE_COLUMNS)
    console.print("the run is " + report.state + "; " + ", ".join(f"{n} {name}" for name, n in report.counts.items()))
    table = Table(title="sound" if report.is_sound else "[bold red]not sound[/]")
    for name in ("rule", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("what must hold, or where it doesn't", overflow="fold")
    for finding in report.findings:
        text, state = RULES[finding.rule], "[green]holds[/]"
        if finding.count:
            state, text = f"[bold red]broken {finding.count}×[/]", "\n".join(finding.examples[:MAX_PLACES])
        elif finding.unchecked:
            state, text = "[yellow]unchecked[/]", f"{text}: {finding.unchecked}"
        table.add_row(finding.rule, state, text.replace("[", r"\["))
    console.print(table)
    bias = Table(title="what was dropped beside what was trained")
    for name in ("ended as", "groups", "samples", "mean length", "mean reward", "length − trained", "reward − trained"):
        bias.add_column(name, justify="left" if name == "ended as" else "right")
    for row in report.bias:
        bias.add_row(
            row.what, str(row.groups), str(row.samples), _shown(row.length, ".2f"), _shown(row.reward, ".4f"),
            _shown(row.minus_trained_length, "+.2f"), _shown(row.minus_trained_reward, "+.4f"),
        )  # fmt: skip
    if report.bias:
        console.print(bias)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
