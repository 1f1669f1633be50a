"""Progress: what bin/train shows while it runs: a live line on a terminal, one line per step elsewhere.

Owns: the terminal. Called by the command line with what the trainer reports.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..process import Report

TRUNCATED_WARNING = 0.5
"""Share of truncated completions from which on it is said loudly (P26)."""


class ProgressDisplay:
    """Life: built → `start` → reports → `stop`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._is_live = self.console.is_terminal
        self._seconds: deque[float] = deque(maxlen=20)
        self._held_out: list[tuple[int, float]] = []
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[line]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self._task = self._bar.add_task("train", total=None, line="")

    def start(self) -> None:
        """Begin to draw."""
        if self._is_live:
            self._bar.start()

    def stop(self) -> None:
        """Leave the terminal as it is."""
        if self._is_live:
            self._bar.stop()

    def on_report(self, report: Report) -> None:
        """Show what the trainer says."""
        values = report.values
        if report.kind == "step":
            self._on_step(values)
        elif report.kind == "evaluation":
            self._held_out.append((values["step"], values["reward"]))
            self.console.print(
                f"held-out reward after step {values['step']}: {values['reward']:.3f} "
                f"(version {values['version']:.0f}, length {values['length']:.1f})"
            )
        elif report.kind == "dry":
            self.console.print(
                f"nothing left to learn after step {values['step']}: {values['batches']} batches in a row were equal"
            )
        elif report.kind == "checkpoint":
            self.console.print(f"checkpoint of step {values['step']}: {values['path']}", soft_wrap=True)
        elif report.kind == "stopping":
            self.console.print("stopping after this step, with a checkpoint; once more to stop at once")
        elif report.kind == "ready" and values["step"]:
            is_over = values["step"] >= values["steps"]
            rest = f": nothing left of {values['steps']} steps, raise --steps" if is_over else ""
            self.console.print(f"going on after step {values['step']}{rest}")

    def _on_step(self, values: dict[str, Any]) -> None:
        self._seconds.append(values["rollout_s"] + values["train_s"] + values["publish_s"])
        left_s = fmean(self._seconds) * (values["steps"] - values["step"])
        line = (
            f"reward {values['reward']:.3f}  length {values['length']:.0f}  {values['tokens_per_s']:.0f} tokens/s  "
            f"{values['samples_per_s']:.1f} samples/s  lag {values['lag_max']:.0f}  "
            f"KV {values.get('kv_used', 0.0):.0%}"
        )
        if values["truncated"] >= TRUNCATED_WARNING:
            line += f"  [bold red]{values['truncated']:.0%} truncated: raise rollout.max_tokens[/]"
        if values.get("canary_mismatch"):
            line += "  [bold red]engine and trainer differ[/]"
        if self._is_live:
            self._bar.update(self._task, completed=values["step"], total=values["steps"], line=line)
        else:
            self.console.print(f"step {values['step']}/{values['steps']}  {line}  {left_s:.0f} s left", soft_wrap=True)
