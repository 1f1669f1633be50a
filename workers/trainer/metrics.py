"""Metrics of a run: one JSON object per training step or evaluation, and TensorBoard files on request.

What is written is taken from the samples' own records, never from what happens to be live (P46).

Owns: the file. Called by the training loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from time import time
from typing import Any

from ...ipc.errors import ConfigError
from ...ipc.types import FinishReason
from ..rollout.records import RolloutResult
from .advantages import has_signal

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends lines. Life: opened → `write` → `close`."""

    def __init__(self, run_dir: Path, last_step: int, with_tensorboard: bool) -> None:
        """Lines of steps after `last_step`, which were undone, are removed first.

        Raises:
            ConfigError: TensorBoard is asked for and isn't installed.
        """
        self.path = run_dir / METRICS_FILE
        kept = [row for row in read_metrics(run_dir) if row["step"] <= last_step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        partial.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._board: Any = None
        if with_tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
            except ImportError as error:
                raise ConfigError("tensorboard", "needs its package: pip install 'unison-rl[train]'") from error
            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=last_step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """One line: `kind` is `step` or `evaluation`."""
        self._file.write(json.dumps({"kind": kind, "step": step, "time": time(), **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)
            self._board.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of a run; a last one that a kill has cut is left out."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def rollout_metrics(results: Sequence[RolloutResult]) -> dict[str, float]:
    """Rewards and lengths of groups."""
    rewards = [score.total for result in results for score in result.rewards]
    completions = [completion for result in results for completion in result.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    names = sorted({name for result in results for score in result.rewards for name in score.parts})
    parts = {
        f"reward/{name}": fmean(
            score.parts[name] for result in results for score in result.rewards if name in score.parts
        )
        for name in names
    }
    flat = [not has_signal([score.total for score in result.rewards]) for result in results]
    return {
        "reward": fmean(rewards), "reward_std": pstdev(rewards), **(parts if len(parts) > 1 else {}),
        "length": fmean(lengths), "length_max": float(max(lengths)),
        "truncated": fmean(completion.finish_reason is FinishReason.LENGTH for completion in completions),
        "zero_variance": fmean(flat),
    }  # fmt: skip


def bias_report(kept: Sequence[RolloutResult], dropped: Sequence[RolloutResult]) -> dict[str, float]:
    """How what was dropped differs from what was kept, in length and reward: a bias that dropping brings in (P28)."""
    if not dropped:
        return {"num_dropped": 0.0}
    lost = rollout_metrics(dropped)
    report = {"num_dropped": float(len(dropped)), "dropped_reward": lost["reward"], "dropped_length": lost["length"]}
    if kept:
        ours = rollout_metrics(kept)
        report["dropped_minus_kept_reward"] = lost["reward"] - ours["reward"]
        report["dropped_minus_kept_length"] = lost["length"] - ours["length"]
    return report
