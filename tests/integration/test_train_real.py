"""Training on the real model, by the way that bin/demo takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.training import assert_accounted, query
from unison.workers.trainer.checkpoint import latest_checkpoint, verify
from unison.workers.trainer.metrics import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two steps of the demo: the run's directory and what was printed."""
    run_dir = tmp_path_factory.mktemp("demo") / "r"
    ended = subprocess.run(
        [sys.executable, "-m", "unison.workers.trainer.demo", "--model", str(model_dir), "--steps", "2", "--port", "0",
         "--run-dir", str(run_dir), "--set", "task.num_eval_prompts=8"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"COLUMNS": "300"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return run_dir, ended.stdout


def test_the_real_model_is_exact(demo: tuple[Path, str]) -> None:
    """S35, P19: bfloat16, 128 samples: every fresh ratio is exactly 1, every log-prob the engine's own; versions are
    steps."""
    rows = [row for row in read_metrics(demo[0]) if row["kind"] == "step"]
    assert [(row["step"], row["version"], row["lag_max"]) for row in rows] == [(at, at, 0) for at in (1, 2)]
    assert all((row["ratio_max_deviation"], row["canary_max_difference"]) == (0.0, 0.0) for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert assert_accounted(demo[0])["evaluated"] == 16


def test_it_says_what_a_newcomer_needs(demo: tuple[Path, str]) -> None:
    """The served policy answers while it is trained; the end names reward, picture, checkpoint and a curl line."""
    run_dir, printed = demo
    assert "→" in printed and "no answer" not in printed
    assert "Held-out reward" in printed and "curl -s http://127.0.0.1:8000/v1/chat/completions" in printed
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    checkpoint = latest_checkpoint(run_dir)
    assert checkpoint is not None and str(checkpoint) in printed
    verify(checkpoint)
    assert query(run_dir, "SELECT count(*) FROM samples WHERE length(tokens) > 0") != [(0,)]
