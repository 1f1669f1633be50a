"""Whole training runs for tests: bin/train's process tree by pid, on the tiny model and a task that it can learn."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from unison.workers.trainer.audit import audit
from unison.workers.trainer.ledger import LEDGER_FILE, Ledger, open_to_read
from unison.workers.trainer.metrics import read_metrics
from unison.workers.trainer.stored import StoredRun

from .serving import DEADLINE_S, ServeProcess, wait_until

LETTERS_TASK = '''
"""Rewards the share of vowels among a completion's characters; REWARD may be replaced by a test."""
from unison.workers.rollout import Prompt, Task

def vowels(completions, **_):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(char in "aeiou" for char in text) / max(1, len(text)) for text in texts]

def letters(num_train=64, num_held_out=8):
    def prompts(split, count):
        return [Prompt(f"{split}-{at}", ({"role": "user", "content": f"{split} {at}"},), columns={"at": at})
                for at in range(count)]
    return Task(prompts("train", num_train), prompts("held", num_held_out), [REWARD])
'''
FAST = (
    "--group-size", "4", "--groups-per-step", "4", "--max-tokens", "8", "--learning-rate", "3e-3",
    "--set", "serve.engine.cache.num_tokens=8192", "--set", "serve.engine.cache.block_size_tokens=4",
    "--set", "serve.engine.runtime.num_threads=1", "--set", "optimizer.num_threads=1",
    "--set", "rollout.ring_mib=1", "--set", "task.num_eval_prompts=4", "--set", "checkpoint.interval_steps=1",
)  # fmt: skip
"""A step takes some 20 ms."""


def write_task(path: Path, reward: str = "vowels", extra: str = "") -> str:
    """A task file; `extra` is code before the task, `reward` the name of the function. Returns the source's name."""
    path.write_text(extra + LETTERS_TASK.replace("REWARD", reward))
    return f"{path}:letters"


class TrainProcess(ServeProcess):
    """One `bin/train`, started as its script starts it; without matplotlib, whose import takes longer than a short run,
    unless the picture is wanted."""

    def __init__(self, run_dir: Path, model: Path, task: str, *options: str, has_curves: bool = False) -> None:
        self.run_dir = run_dir
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._out = run_dir.parent / f"{run_dir.name}.out"
        self._err = run_dir.parent / f"{run_dir.name}.err"
        arguments = ["--model", str(model), "--run-dir", str(run_dir), *(["--task", task] if task else []), *options]
        with self._out.open("a") as out, self._err.open("a") as err:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "unison.workers.trainer.cli", *arguments],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"COLUMNS": "400"} | ({} if has_curves else _without_matplotlib(run_dir.parent)),
            )  # fmt: skip

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._out.read_text() + self._err.read_text()

    def pid_of(self, module: str) -> int:
        """Pid of a child by its module: `gpu`, `rollout`, `trainer`."""
        return int(wait_until(lambda: self.pids().get(module), f"a process of {module}"))

    def wait_step(self, step: int, deadline_s: float = DEADLINE_S) -> None:
        """Until a step is in the metrics."""
        wait_until(
            lambda: self.popen.poll() is not None or any(row["step"] >= step for row in self.steps()),
            f"step {step}", deadline_s,
        )  # fmt: skip
        assert any(row["step"] >= step for row in self.steps()), f"ended with {self.popen.poll()}:\n{self.story}"

    def steps(self) -> list[dict[str, Any]]:
        """Metrics of the training steps so far."""
        return [row for row in read_metrics(self.run_dir) if row["kind"] == "step"]

    def wait_end(self, deadline_s: float = DEADLINE_S) -> int:
        """Until it has ended by itself; its exit code."""
        try:
            return self.popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"still running after {deadline_s} s:\n{self.story}") from None

    def interrupt(self, deadline_s: float = DEADLINE_S) -> int:
        """Ctrl-C; the exit code."""
        self.popen.send_signal(signal.SIGINT)
        return self.wait_end(deadline_s)

    @property
    def story(self) -> str:
        """Output and logs, for a failed assertion."""
        return self.output + self.logs


def _without_matplotlib(folder: Path) -> dict[str, str]:
    """An environment in which the import of matplotlib fails at once, as where it isn't installed."""
    hidden = folder / "without"
    hidden.mkdir(exist_ok=True)
    (hidden / "matplotlib.py").write_text("raise ImportError('left out')\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(hidden), os.environ.get("PYTHONPATH")]))}


@contextmanager
def training(
    run_dir: Path, model: Path, task: str, *options: str, has_curves: bool = False
) -> Iterator[TrainProcess]:
    """A run that is ended at the end of the block, whatever happens."""
    process = TrainProcess(run_dir, model, task, *options, has_curves=has_curves)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.kill_all()


def train(run_dir: Path, model: Path, task: str, *options: str, has_curves: bool = False) -> TrainProcess:
    """A run to its end, which must be a good one."""
    with training(run_dir, model, task, *options, has_curves=has_curves) as process:
        assert process.wait_end() == 0, process.story
    return process


def query(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    """Rows of a run's ledger."""
    with closing(open_to_read(run_dir / LEDGER_FILE)) as db:
        return db.execute(sql).fetchall()


def digests(run_dir: Path) -> dict[int, str]:
    """Digest of the version that each step made; step 0 is what the run began with."""
    return dict(query(run_dir, "SELECT step, digest FROM versions ORDER BY ordinal"))


def assert_accounted(run_dir: Path, is_over: bool = True) -> dict[str, int]:
    """Every prompt has exactly one state, and the ledger passes the audit; returns the count by state."""
    ledger = Ledger(run_dir / LEDGER_FILE)
    try:
        problems = ledger.check()
        assert not problems, problems
        counts = ledger.count_by_state()
    finally:
        ledger.close()
    with StoredRun(run_dir) as run:
        report = audit(run)
    assert report.is_sound, [finding for finding in report.findings if finding.count]
    trained = query(run_dir, "SELECT step, count(*) FROM orders WHERE state = 'trained' GROUP BY step ORDER BY step")
    steps = query(run_dir, "SELECT step FROM steps ORDER BY step")
    assert [step for step, _ in trained] == [step for (step,) in steps]
    if is_over:
        samples = query(run_dir, "SELECT count(*) FROM orders WHERE state = 'trained' AND order_id IN "
                        "(SELECT order_id FROM orders GROUP BY order_id HAVING count(*) > 1)")  # fmt: skip
        assert samples == [(0,)]
    return counts


def children_gone(process: TrainProcess) -> None:
    """No child is left, nor what a run directory holds only while something runs there. The janitor removes the files
    after it has ended the last child that can be listed, so they too are waited for."""
    wait_until(lambda: not process.pids(), "all children to be gone")
    names = re.compile(r"\.sock$|address\.json|supervisor\.json")
    wait_until(
        lambda: not any(names.search(path.name) for path in process.run_dir.iterdir()), "the volatile files' removal"
    )
