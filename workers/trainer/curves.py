"""Curves: a run's metrics as one picture.

Owns: what is drawn. Called at the end of bin/train, and by `bin/train curves RUN`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...ipc.errors import ConfigError
from .metrics import read_metrics

CURVES_FILE = "curves.png"
PANELS = (
    ("reward", "reward"), ("length", "length, tokens"), ("kl", "KL to behaviour"), ("clip_fraction", "clip fraction"),
    ("entropy", "entropy, nats per token"), ("canary_max_difference", "engine - trainer, largest"),
    ("tokens_per_s", "trained tokens/s"), ("lag_max", "lag, versions"),
)  # fmt: skip


def draw_curves(run_dir: Path) -> Path:
    """Draw metrics.jsonl of a run into curves.png; held-out rewards lie over the training rewards.

    Raises:
        ConfigError: matplotlib isn't installed, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise ConfigError("curves", "need matplotlib: pip install 'unison-rl[train]'") from error
    rows = read_metrics(run_dir)
    steps = [row for row in rows if row["kind"] == "step"]
    held_out = [row for row in rows if row["kind"] == "evaluation"]
    if not rows:
        raise ConfigError("run_dir", f"is {run_dir}, which has no metrics to draw")
    figure = Figure(figsize=(14, 6), layout="constrained")
    axes = figure.subplots(2, 4).flat
    for axis, (name, title) in zip(axes, PANELS, strict=True):
        points = [(row["step"], row[name]) for row in steps if name in row]
        axis.plot([x for x, _ in points], [y for _, y in points], linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        if name == "reward":
            _draw_held_out(axis, held_out)
    path = run_dir / CURVES_FILE
    figure.savefig(path, dpi=110)
    return path


def _draw_held_out(axis: Any, rows: list[dict[str, Any]]) -> None:
    axis.plot([row["step"] for row in rows], [row["reward"] for row in rows], marker="o", label="held out")
    axis.legend(fontsize=8)


def held_out_change(run_dir: Path) -> tuple[float, float] | None:
    """Held-out reward of the first and of the last evaluation; None before there are two."""
    rewards = [row["reward"] for row in read_metrics(run_dir) if row["kind"] == "evaluation"]
    return (rewards[0], rewards[-1]) if len(rewards) > 1 else None
