"""bin/train's command line and configuration, without a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness.rollouts import result
from rich.console import Console
from unison.ipc.errors import ConfigError
from unison.workers.process import Report
from unison.workers.trainer import __all__ as public_names
from unison.workers.trainer.cli import train
from unison.workers.trainer.config import TrainConfig
from unison.workers.trainer.curves import draw_curves, held_out_change
from unison.workers.trainer.metrics import MetricsWriter, rollout_metrics
from unison.workers.trainer.progress import ProgressDisplay


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(train, list(arguments))


def test_dry_run(chat_model: Path, tmp_path: Path) -> None:
    """P50: what came of file, --set and options, what memory it takes, how stale samples may be; no secret."""
    (tmp_path / "t.toml").write_text('steps = 7\n[rollout]\ngroup_size = 4\n[serve.network]\napi_key = "secret"\n')
    shown = invoke(
        "--model", str(chat_model), "--config", str(tmp_path / "t.toml"), "--set", "rollout.group_size=6",
        "--mode", "async", "--dry-run",
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    values = json.loads(shown.output)
    assert values["configuration"]["steps"] == 7 and values["samples_per_step"] == 48
    assert values["configuration"]["serve"]["network"]["api_key"] == "(set)" and "secret" not in shown.output
    memory = values["memory"]
    assert memory["moments_bytes"] == 2 * memory["masters_bytes"] == 8 * memory["parameters"]
    assert any("at most 1 versions old" in line for line in values["plan"]) and values["task"]["held_out"] == 256


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--set", "rollout.nothing=1"), "rollout.nothing"), (("--set", "rollout.group_size=0"), "rollout.group_size"),
        (("--algorithm", "ppo"), "algorithm.name"), (("--mode", "later"), "rollout.mode"),
        (("--set", "optimizer.schedule=zigzag"), "optimizer.schedule"),
        (("--set", "rollout.overlong_buffer_tokens=999"), "rollout.overlong_buffer_tokens"),
        (("--group-size", "1"), "rollout.group_size"),
        (("--group-size", "1", "--algorithm", "reinforce_pp", "--set", "rollout.zero_variance=drop"),
         "rollout.zero_variance"),
        (("--mode", "async", "--set", "algorithm.num_iterations=2"), "algorithm.num_iterations"),
        (("--task", "nothing"), "task.source"), (("--resume",), "run_dir"),
    ],
)  # fmt: skip
def test_bad_configurations_name_the_key(arguments: tuple[str, ...], field: str, chat_model: Path) -> None:
    """P50: unknown keys, values out of bounds and settings that contradict each other."""
    ended = invoke("--model", str(chat_model), "--dry-run", *arguments)
    assert isinstance(ended.exception, ConfigError) and ended.exception.field == field, ended.exception


def test_a_model_is_needed(tmp_path: Path) -> None:
    ended = invoke("--model", str(tmp_path), "--dry-run")
    assert isinstance(ended.exception, ConfigError) and ended.exception.field == "model"


def test_configuration_round_trip() -> None:
    """What is stored in the run's directory is what `--resume` reads."""
    config = TrainConfig.from_dict({"rollout": {"mode": "async", "max_staleness": 3}, "algorithm": {"name": "cispo"}})
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config and config.max_lag == 3
    assert TrainConfig().max_lag == 0 and TrainConfig().algorithm.recipe.objective == "token_clipped"


def step_values(**fields: float) -> dict[str, float]:
    values = rollout_metrics([result(0, [0.0, 1.0])]) | {
        "rollout_s": 1.0, "train_s": 2.0, "publish_s": 0.5, "tokens_per_s": 10.0, "samples_per_s": 2.0, "lag_max": 0.0,
        "kl": 0.0, "clip_fraction": 0.0, "entropy": 1.0,
    }  # fmt: skip
    return values | fields


def test_progress_lines() -> None:
    """P26: a line per step with what matters; truncation and mismatches are said loudly."""
    text = io.StringIO()
    display = ProgressDisplay(Console(file=text, width=300))
    display.start()
    display.on_report(Report("step", {"step": 3, "steps": 5, **step_values(truncated=0.9, canary_mismatch=1.0)}))
    display.on_report(Report("evaluation", {"step": 3, "reward": 0.25, "version": 3.0, "length": 4.0}))
    display.on_report(Report("checkpoint", {"step": 3, "path": "/x"}))
    display.on_report(Report("ready", {"step": 3, "steps": 2}))
    display.on_report(Report("stopping", {}))
    display.on_report(Report("dry", {"step": 3, "batches": 51}))
    display.stop()
    shown = text.getvalue()
    said = (
        "step 3/5", "7 s left", "90% truncated", "engine and trainer differ", "0.250", "/x",
        "going on after step 3: nothing left of 2", "51", "once more to stop at once",
    )  # fmt: skip
    for words in said:
        assert words in shown, words


@pytest.mark.slow
def test_curves(tmp_path: Path) -> None:
    """A picture of the metrics; nothing to draw is an error that says so."""
    with pytest.raises(ConfigError, match="no metrics"):
        draw_curves(tmp_path)
    writer = MetricsWriter(tmp_path, 0, False)
    writer.write("evaluation", 0, {"reward": 0.1})
    for step in (1, 2):
        writer.write("step", step, step_values())
    assert held_out_change(tmp_path) is None
    writer.write("evaluation", 2, {"reward": 0.6})
    writer.close()
    assert draw_curves(tmp_path).read_bytes().startswith(b"\x89PNG") and held_out_change(tmp_path) == (0.1, 0.6)


def test_public_names() -> None:
    """What a loop of one's own imports is there, and loaded on first use."""
    import unison.workers.trainer as package

    assert all(getattr(package, name) is not None for name in public_names)
    with pytest.raises(AttributeError, match="nothing"):
        package.nothing  # noqa: B018 - the access is the test
