"""metrics.jsonl and the numbers in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.rollouts import completion, result
from unison.ipc.types import FinishReason
from unison.workers.trainer.metrics import METRICS_FILE, MetricsWriter, bias_report, read_metrics, rollout_metrics


def test_undone_steps_go(tmp_path: Path) -> None:
    """P46: a resumed run's metrics hold each step once; a line that a kill has cut is left out."""
    writer = MetricsWriter(tmp_path, 0, False)
    for step in (1, 2, 3):
        writer.write("step", step, {"reward": float(step)})
    writer.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"kind": "step", "st')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    writer = MetricsWriter(tmp_path, 2, False)
    writer.write("step", 3, {"reward": 30.0})
    writer.close()
    assert [row["reward"] for row in read_metrics(tmp_path)] == [1.0, 2.0, 30.0]


def test_tensorboard(tmp_path: Path) -> None:
    """On request the same numbers are written for TensorBoard."""
    writer = MetricsWriter(tmp_path, 0, True)
    writer.write("step", 1, {"reward": 1.0})
    writer.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_rollout_metrics() -> None:
    """P26: the share of truncated completions, lengths and rewards are over completions."""
    cut = [completion(0, length=8, finish_reason=FinishReason.LENGTH), completion(1, length=2)]
    found = rollout_metrics([result(0, [1.0, 0.0], cut), result(1, [0.5, 0.5])])
    assert found["reward"] == 0.5 and found["truncated"] == 0.25 and found["zero_variance"] == 0.5
    assert found["length"] == 4.0 and found["length_max"] == 8.0


def test_bias_report() -> None:
    """P28, P37: what was dropped is compared with what was kept, in reward and length."""
    long = [completion(0, length=7), completion(1, length=5)]
    report = bias_report([result(0, [0.0, 0.0])], [result(1, [1.0, 1.0], long)])
    assert report["num_dropped"] == 1.0
    assert report["dropped_minus_kept_reward"] == 1.0 and report["dropped_minus_kept_length"] == pytest.approx(3.0)
    assert bias_report([result(0, [0.0])], []) == {"num_dropped": 0.0}
