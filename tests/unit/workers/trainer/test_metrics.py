"""metrics.jsonl and the numbers in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from harness.rollouts import completion, result
from unison.ipc.types import FinishReason
from unison.workers.rollout.records import RewardScore
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


def test_parts_of_the_reward() -> None:
    """P46: with several functions each has its own mean, over the completions to which it applies."""
    parts = ({"a": 1.0, "b": 2.0}, {"a": 1.0}, {"a": 0.5, "b": 0.5}, {"b": 1.0})
    scores = [RewardScore(sum(each.values()), each) for each in parts]
    groups = [replace(result(at, [0.0, 0.0]), rewards=tuple(scores[2 * at : 2 * at + 2])) for at in range(2)]
    found = rollout_metrics(groups)
    assert found["reward"] == 1.5 and found["reward_std"] == pytest.approx(0.75**0.5)
    assert found["reward/a"] == pytest.approx(2.5 / 3) and found["reward/b"] == pytest.approx(3.5 / 3)
    assert not any(name.startswith("reward/") for name in rollout_metrics([result(0, [3.0, 1.0])]))


def test_a_run_without_metrics(tmp_path: Path) -> None:
    """Nothing was written yet: there are no rows, and a writer begins an empty file."""
    assert read_metrics(tmp_path) == []
    MetricsWriter(tmp_path, 5, False).close()
    assert (tmp_path / METRICS_FILE).read_text() == "" and not list(tmp_path.glob("*.partial"))


def test_evaluations_are_undone_too(tmp_path: Path) -> None:
    """P45, P46: rows of either kind go by their step; what stays is as it was written."""
    writer = MetricsWriter(tmp_path, 0, False)
    for kind, step in (("evaluation", 0), ("step", 1), ("evaluation", 1), ("step", 2), ("evaluation", 2)):
        writer.write(kind, step, {"reward": 0.25})
    writer.close()
    before = read_metrics(tmp_path)
    MetricsWriter(tmp_path, 1, False).close()
    assert read_metrics(tmp_path) == before[:3]


def test_bias_report() -> None:
    """P28, P37: what was dropped is compared with what was kept, in reward and length."""
    long = [completion(0, length=7), completion(1, length=5)]
    report = bias_report([result(0, [0.0, 0.0])], [result(1, [1.0, 1.0], long)])
    assert report["num_dropped"] == 1.0
    assert report["dropped_minus_kept_reward"] == 1.0 and report["dropped_minus_kept_length"] == pytest.approx(3.0)
    assert bias_report([result(0, [0.0])], []) == {"num_dropped": 0.0}
