"""Signals to every process of a training run, and reward functions that fail: nothing is lost, nothing counted twice.

One test per row of docs/failures.md, "Training".
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness.serving import is_running, wait_until
from harness.training import FAST, TrainProcess, assert_accounted, children_gone, query, train, training, write_task
from unison.workers.verify.cli import verify

pytestmark = pytest.mark.slow

LONG = (*FAST, "--steps", "100000", "--set", "checkpoint.interval_steps=5")


def stop(process: TrainProcess) -> None:
    """End the run with everything accounted for."""
    assert process.interrupt() == 75, process.story
    children_gone(process)
    assert_accounted(process.run_dir)


def finish(process: TrainProcess, chat_model: Path, more: int = 3) -> None:
    """The same, then resume it for a few steps, and have it end by itself."""
    stop(process)
    last = process.steps()[-1]["step"]
    train(process.run_dir, chat_model, "", "--resume", "--steps", str(last + more))
    counts = assert_accounted(process.run_dir)
    assert counts["trained"] == 4 * (last + more)
    assert "issued" not in counts
    ordinals = query(process.run_dir, "SELECT ordinal, step FROM versions ORDER BY ordinal")
    assert [ordinal for ordinal, _ in ordinals] == list(range(len(ordinals))), "ordinals go on, none is used twice"


@pytest.mark.parametrize(
    ("number", "mode"),
    [(signal.SIGKILL, "sync"), (signal.SIGKILL, "async"), (signal.SIGSTOP, "sync")],
    ids=["killed", "killed, async", "stopped"],
)
def test_trainer(number: signal.Signals, mode: str, chat_model: Path, task: str, tmp_path: Path) -> None:
    """P28, P36: a new trainer goes on from the newest checkpoint; later steps are undone, their prompts drawn again."""
    with training(tmp_path / "r", chat_model, task, *LONG, "--mode", mode) as process:
        process.wait_step(7)
        old = process.pid_of("trainer")
        os.kill(old, number)
        wait_until(lambda: process.pids().get("trainer", old) != old, "a new trainer")
        wait_until(lambda: query(process.run_dir, "SELECT count(*) FROM resumes") == [(1,)], "its resuming")
        process.wait_step(12)
        if number is signal.SIGKILL:
            finish(process, chat_model)
        else:
            stop(process)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_rollout_worker(number: signal.Signals, chat_model: Path, task: str, tmp_path: Path) -> None:
    """P36: its successor gets the open orders again; no step is lost."""
    with training(tmp_path / "r", chat_model, task, *LONG, "--set", "rollout.num_workers=2") as process:
        process.wait_step(3)
        old = process.pid_of("rollout")
        os.kill(old, number)
        wait_until(lambda: not is_running(old), "the old worker's end")
        process.wait_step(process.steps()[-1]["step"] + 5)
        stop(process)
    assert query(tmp_path / "r", "SELECT count(*) FROM resumes") == [(0,)]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gpu_worker(mode: str, chat_model: Path, task: str, tmp_path: Path) -> None:
    """P10: the engine comes back on the live version; rollouts are sent again, publications too; no step is lost."""
    with training(tmp_path / "r", chat_model, task, *LONG, "--mode", mode) as process:
        for _ in range(3):
            process.wait_step(len(process.steps()) + 2)
            old = process.worker_pid
            os.kill(old, signal.SIGKILL)
            wait_until(lambda: not is_running(old), "the old worker's end")  # noqa: B023 - used at once
        process.wait_step(process.steps()[-1]["step"] + 5)
        assert [row["version"] for row in process.steps()] == [row["step"] for row in process.steps()]
        stop(process)


def test_everything_at_once(chat_model: Path, task: str, tmp_path: Path) -> None:
    """V1, P33, P34: a killed supervisor takes all children along and leaves no socket; --resume goes on, and every
    sample of the whole is proved afterwards by the versions that were kept before and after."""
    with training(tmp_path / "r", chat_model, task, *LONG, "--set", "checkpoint.keep_versions=all") as process:
        process.wait_step(8)
        pids = process.pids()
        assert {"gpu", "rollout", "trainer"} <= pids.keys()
        process.popen.kill()
        process.popen.wait()
        wait_until(lambda: not any(map(is_running, pids.values())), "the children's end")
        children_gone(process)
        train(process.run_dir, chat_model, "", "--resume", "--steps", "12")
    counts = assert_accounted(tmp_path / "r")
    assert counts["trained"] == 48
    proved = CliRunner().invoke(verify, ["--all", str(tmp_path / "r"), "--no-rewards", "--json"])
    assert proved.exit_code == 0 and set(json.loads(proved.stdout)["num_samples"]) == {"bit-equal"}


def test_everything_before_the_first_checkpoint(chat_model: Path, task: str, tmp_path: Path) -> None:
    """P28, P34: with no checkpoint to go on from, the run begins anew from its first weights, whatever number of
    versions had been live; their ordinals aren't used again. A `#` in the path is a letter like another."""
    run_dir = tmp_path / "r#1"
    options = (*FAST, "--steps", "100000", "--set", "checkpoint.interval_steps=0")
    with training(run_dir, chat_model, task, *options) as process:
        process.wait_step(9)
        process.popen.kill()
        process.popen.wait()
        children_gone(process)
    before = query(run_dir, "SELECT count(*) FROM versions")[0][0]
    train(run_dir, chat_model, "", "--resume", "--steps", "3")
    assert assert_accounted(run_dir)["trained"] == 12
    assert query(run_dir, "SELECT count(*) FROM versions") == [(before + 4,)], "the first weights, three steps"
    assert query(run_dir, "SELECT min(ordinal), max(ordinal) FROM versions") == [(0, before + 3)]
    assert query(run_dir, "SELECT step FROM evaluations ORDER BY step") == [(0,), (3,)]


def test_damaged_checkpoints_are_not_begun_over(chat_model: Path, task: str, tmp_path: Path) -> None:
    """P13: where no checkpoint is what its digests say the run is refused and stays as it was."""
    process = train(tmp_path / "r", chat_model, task, *FAST, "--steps", "2")
    for path in (process.run_dir / "checkpoints").iterdir():
        (path / "config.json").write_text("{}")
    steps = query(process.run_dir, "SELECT * FROM steps")
    with training(process.run_dir, chat_model, "", "--resume", "--steps", "3") as again:
        assert again.wait_end() == 70
    assert "is what its digests say" in again.output
    assert query(process.run_dir, "SELECT * FROM steps") == steps


def test_what_fails_in_an_evaluation_costs_no_training(chat_model: Path, tmp_path: Path) -> None:
    """P37: a held-out rollout that can't be scored ends the run, after the steps before it are in a checkpoint; the
    evaluation is made up for when the run goes on."""
    fails = (
        "def some(prompts, completions, at, **_):\n"
        "    from pathlib import Path\n"
        "    if prompts[0][0]['content'].startswith('held'):\n"
        "        with open(Path(__file__).parent / 'held', 'a+') as held:\n"
        "            held.write('x'); held.seek(0)\n"
        "            if len(held.read()) == 5: raise LookupError('no answer')\n"
        "    return vowels(completions)\n"
    )
    task = write_task(tmp_path / "some.py", "some", fails)
    options = ("--steps", "4", "--set", "evaluation.interval_steps=2", "--set", "checkpoint.interval_steps=0",
               "--set", "rollout.reward_attempts=1")  # fmt: skip
    with training(tmp_path / "r", chat_model, task, *FAST, *options) as process:
        assert process.wait_end() == 70
    assert [path.name for path in (process.run_dir / "checkpoints").iterdir()] == ["step-00000002"]
    train(process.run_dir, chat_model, "", "--resume")
    assert query(process.run_dir, "SELECT step FROM evaluations ORDER BY step") == [(0,), (2,), (4,)]
    assert_accounted(process.run_dir)


def test_a_second_interrupt_ends_at_once(chat_model: Path, tmp_path: Path) -> None:
    """Ctrl-C twice: no checkpoint is waited for; what the ledger has stays sound, and the run can be resumed."""
    slow = "import time\ndef slow(completions, **_):\n    time.sleep(0.1)\n    return vowels(completions)\n"
    task = write_task(tmp_path / "slow.py", "slow", slow)
    with training(tmp_path / "r", chat_model, task, *LONG) as process:
        process.wait_step(1)
        process.popen.send_signal(signal.SIGINT)
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait_end() == 75, process.story
        children_gone(process)
        train(process.run_dir, chat_model, "", "--resume", "--steps", "3")
    assert assert_accounted(tmp_path / "r")["trained"] == 12


BAD_REWARDS = """
import os, time
def bad(completions, at, **_):
    kind = at[0] % 8
    if kind == 1: time.sleep(3600)
    if kind == 2: os._exit(3)
    if kind == 3: raise KeyError('x')
    if kind == 4: return [float('nan')] * len(completions)
    if kind == 5: return [1.0] * (len(completions) - 1)
    return vowels(completions)
"""
REASONS = {1: "reward_timeout", 2: "reward_crashed", 3: "reward_error", 4: "reward_invalid", 5: "reward_invalid"}


def test_reward_functions_that_fail(chat_model: Path, tmp_path: Path) -> None:
    """P18, P25, P36: a group whose scoring hangs, crashes, raises or gives values that can't be is rejected with its
    reason and replaced, never scored 0."""
    task = write_task(tmp_path / "bad.py", "bad", BAD_REWARDS)
    process = train(
        tmp_path / "r", chat_model, task, *FAST, "--steps", "5", "--set", "rollout.reward_timeout_s=1",
        "--set", "rollout.reward_attempts=1", "--set", "task.num_eval_prompts=1",
    )  # fmt: skip
    rejected = query(process.run_dir, "SELECT prompt_index % 8, reason, detail FROM orders WHERE state = 'rejected'")
    assert {index for index, _, _ in rejected} == set(REASONS), "each kind was met"
    assert all(REASONS[index] == reason and detail for index, reason, detail in rejected)
    assert assert_accounted(process.run_dir)["trained"] == 20


def test_rewards_that_always_fail_end_the_run(chat_model: Path, tmp_path: Path) -> None:
    """S28: a batch that can't be had raises with order ids and reasons; no step was taken."""
    task = write_task(tmp_path / "bad.py", "bad", "def bad(**_): raise RuntimeError('never')\n")
    with training(
        tmp_path / "r", chat_model, task, *FAST, "--set", "rollout.max_rejected=5", "--set", "rollout.reward_attempts=1"
    ) as process:
        assert process.wait_end() == 70
    assert "RolloutFailedError" in process.output and "never" in process.output
    assert query(tmp_path / "r", "SELECT count(*) FROM steps") == [(0,)]


def test_a_task_that_differs_between_processes(chat_model: Path, tmp_path: Path) -> None:
    """P40: prompts that aren't the same in every process are refused, not mixed up."""
    task = write_task(tmp_path / "t.py")
    text = (tmp_path / "t.py").read_text().replace('f"{split}-{at}"', 'f"{split}-{at}-{os.getpid()}"')
    (tmp_path / "t.py").write_text("import os\n" + text)
    with training(tmp_path / "r", chat_model, task, *FAST) as process:
        assert process.wait_end() == 70
    assert "the task isn't the same" in process.output


def test_a_checkpoint_that_cannot_be_written(chat_model: Path, task: str, tmp_path: Path) -> None:
    """P13: it ends the run with a clear reason; the one before is whole, and the run goes on from it."""
    with training(tmp_path / "r", chat_model, task, *FAST, "--steps", "100000") as process:
        process.wait_step(3)
        folder = tmp_path / "r" / "checkpoints"
        blocked = folder / ".writing-step-00000040"
        blocked.write_text("in the way")
        assert process.wait_end() == 70
    assert "CheckpointError" in process.output
    blocked.unlink()
    train(tmp_path / "r", chat_model, "", "--resume", "--steps", "42")
    assert assert_accounted(tmp_path / "r")["trained"] == 4 * 42


def test_a_checkpoint_of_another_run_is_refused(chat_model: Path, task: str, tmp_path: Path) -> None:
    """P28: ledger and checkpoint must be of one history; nothing is trained otherwise."""
    train(tmp_path / "a", chat_model, task, *FAST, "--steps", "2")
    train(tmp_path / "b", chat_model, task, *FAST, "--steps", "2", "--seed", "1")
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    shutil.copytree(tmp_path / "b" / "checkpoints", tmp_path / "a" / "checkpoints")
    with training(tmp_path / "a", chat_model, "", "--resume", "--steps", "4") as process:
        assert process.wait_end() == 70
    assert "isn't of the run" in process.output
    assert query(tmp_path / "a", "SELECT count(*) FROM steps") == [(2,)]
