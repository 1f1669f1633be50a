"""The scorer's process from its owner's side: what it says, when it is replaced, and that it leaves nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from harness.rollouts import result
from harness.serving import is_running, wait_until
from unison.ipc.errors import RewardError
from unison.workers.rollout.records import HELD_OUT, RawRollout, RewardScore
from unison.workers.rollout.rewards import score_group
from unison.workers.rollout.scorer import Scorer
from unison.workers.rollout.tasks import load_task

pytestmark = pytest.mark.slow

TASK = """
import asyncio, multiprocessing, os, subprocess, sys, time
from pathlib import Path
from unison.workers.rollout import Prompt, Reward, Task

FOLDER = Path(__file__).parent

def calls(name):
    with open(FOLDER / name, "a") as file:
        file.write(f"{os.getpid()}\\n")

def length(prompts, completions, completion_ids, at, **_):
    print("to standard output", flush=True)
    os.write(1, b'{"scores": []}\\n')
    print("to standard error", file=sys.stderr)
    return [len(text) + 10.0 * len(ids) + 100.0 * row for text, ids, row in zip(completions, completion_ids, at)]

def late(completions, at, **_):
    if at[0] == 1:
        (FOLDER / "begun").touch()
        while not (FOLDER / "go").exists(): pass
    return [float(at[0])] * len(completions)

async def some(completions, **_):
    return [None if "x" in text else 1 / 3 for text in completions]

def bad(completions, at, **_):
    calls(f"calls-{at[0]}")
    if at[0] == 1: time.sleep(3600)
    if at[0] == 2 and not (FOLDER / "mended").exists():
        if (FOLDER / "flaky").exists(): (FOLDER / "flaky").rename(FOLDER / "mended")
        os._exit(7)
    if at[0] == 3: raise LookupError("no such thing")
    if at[0] == 4: return [float("nan")] * len(completions)
    if at[0] == 5: return [1.0]
    if at[0] == 6: sys.exit("enough")
    if at[0] == 7 and (FOLDER / "lost").exists():
        (FOLDER / "lost").unlink()
        raise OSError("not this time")
    return [float(os.getpid())] * len(completions)

def prompts(name):
    first = 0 if name == "t" else 50
    return [Prompt(f"{name}{at}", text=f"text {at}", columns={"at": first + at}) for at in range(8)]

def copies(completions, at, **_):
    pid = os.fork()
    return [at[0] + (0.0 if pid else 0.5)] * len(completions)

def reads(completions, **_):
    return [float(len(sys.stdin.read()) + len(subprocess.run(["cat"], capture_output=True).stdout))] * len(completions)

def starts(completions, **_):
    child = multiprocessing.Process(target=time.sleep, args=(3600,))
    child.start()
    (FOLDER / "child").write_text(str(child.pid))
    child.join()

lock = asyncio.Lock()
async def hold():
    async with lock:
        await asyncio.sleep(0)

async def locks(completions, **_):
    await asyncio.gather(*(hold() for _ in range(3)))  # who has to wait for a lock ties it to the loop
    return [1.0] * len(completions)

good = Task(prompts("t"), prompts("h"), [Reward(length, 0.5), some])
waiting = Task(prompts("t"), prompts("h"), [late])
failing = Task(prompts("t"), prompts("h"), [bad])
copying = Task(prompts("t"), prompts("h"), [copies])
reading = Task(prompts("t"), prompts("h"), [reads])
starting = Task(prompts("t"), prompts("h"), [starts])
locking = Task(prompts("t"), prompts("h"), [locks])
"""


def raw(*texts: str, split: str = "train") -> RawRollout:
    """A group of these completions."""
    made = replace(result(0, [0.0] * len(texts)), texts=texts, split=split)
    return RawRollout(**{item.name: getattr(made, item.name) for item in fields(RawRollout)})


def with_scorer(
    folder: Path, name: str, work: Callable[[Scorer], Coroutine[Any, Any, Any]], attempts: int = 1,
    timeout_s: float = 30.0,
) -> Any:  # fmt: skip
    """What `work` gives for a scorer of the task `name`, which is closed after it."""
    (folder / "task.py").write_text(TASK)

    async def everything() -> Any:
        scorer = Scorer((f"{folder / 'task.py'}:{name}", "", ""), timeout_s, attempts)
        try:
            return await work(scorer)
        finally:
            await scorer.close()

    return asyncio.run(everything())


def pids(folder: Path, at: int) -> list[int]:
    """Processes in which the function was called for prompt `at`, in order."""
    path = folder / f"calls-{at}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_scores_are_those_of_score_group(tmp_path: Path) -> None:
    """The process adds nothing and loses nothing: weights, parts, None, both splits, to the last bit; what functions
    print is no answer."""
    groups = [(raw("a", "bcx", ""), 0), (raw("a\n\0é😀"), 7), (raw("x", "y", split=HELD_OUT), 3)]

    async def all_of_them(scorer: Scorer) -> list[tuple[RewardScore, ...]]:
        return [await scorer.score(group, at) for group, at in groups]

    found = with_scorer(tmp_path, "good", all_of_them)
    task = load_task(f"{tmp_path / 'task.py'}:good")
    for (group, at), scores in zip(groups, found, strict=True):
        ids = [completion.token_ids for completion in group.completions]
        assert scores == asyncio.run(score_group(task.rewards, task.split(group.split)[at], group.texts, ids))
    assert set(found[0][0].parts) == {"length", "some"} and set(found[0][1].parts) == {"length"}


def test_groups_at_once_have_their_own_scores(tmp_path: Path) -> None:
    """One process, one group after the other: no answer goes to another group's asker."""

    async def together(scorer: Scorer) -> list[tuple[RewardScore, ...]]:
        return await asyncio.gather(*(scorer.score(raw("x" * at), at) for at in range(8)))

    for at, scores in enumerate(with_scorer(tmp_path, "good", together)):
        assert [score.total for score in scores] == [0.5 * (at + 30 + 100 * at) + (0 if at else 1 / 3)]


@pytest.mark.parametrize(
    ("at", "reason", "text", "attempts", "num_calls"),
    [
        (1, "reward_timeout", "longer than 1.0 s", 2, 2),
        (2, "reward_crashed", "ended with 7", 3, 3),
        (3, "reward_error", "bad raised LookupError", 3, 3),
        (4, "reward_invalid", "finite numbers", 3, 1),
        (5, "reward_invalid", "1 for 2 completions", 3, 1),
        (6, "reward_crashed", "process ended", 2, 2),
    ],
    ids=["hangs", "crashes", "raises", "NaN", "too few", "exits"],
)
def test_failures(tmp_path: Path, at: int, reason: str, text: str, attempts: int, num_calls: int) -> None:
    """P36, P18: each kind has its reason; what may pass is tried as often as configured, wrong values once only."""

    async def fails(scorer: Scorer) -> RewardError:
        await scorer.score(raw("a"), 0)  # the start isn't part of the deadline, but may be slow
        with pytest.raises(RewardError, match=text) as caught:
            await scorer.score(raw("a", "b"), at)
        return caught.value

    timeout_s = 1.0 if reason == "reward_timeout" else 30.0
    error = with_scorer(tmp_path, "failing", fails, attempts, timeout_s)
    assert error.reason == reason and f"(attempt {num_calls})" in str(error)
    assert len(pids(tmp_path, at)) == num_calls


@pytest.mark.parametrize(("at", "is_replaced"), [(1, True), (2, True), (3, False), (4, False)],
                         ids=["hangs", "crashes", "raises", "NaN"])  # fmt: skip
def test_the_group_after_a_failure(tmp_path: Path, at: int, is_replaced: bool) -> None:
    """P36: it is scored as if nothing had been: by a new process after a crash or a hang, else by the same one; the
    old process is gone."""

    async def before_and_after(scorer: Scorer) -> tuple[float, ...]:
        found = []
        for prompt_index in (0, 7):
            (score,) = await scorer.score(raw("a"), prompt_index)
            found.append(score.total)
            if prompt_index == 0:
                with pytest.raises(RewardError):
                    await scorer.score(raw("a"), at)
        return tuple(found)

    before, after = with_scorer(tmp_path, "failing", before_and_after, timeout_s=1.0 if at == 1 else 30.0)
    assert (before != after) is is_replaced
    assert pids(tmp_path, 0) == [int(before)] and pids(tmp_path, 7) == [int(after)]
    wait_until(lambda: not is_running(int(before)) and not is_running(int(after)), "both processes' end")


def test_a_flaky_function_is_tried_again_in_a_new_process(tmp_path: Path) -> None:
    """P29: where the second attempt goes well its scores are the group's, once; each process was called once."""
    (tmp_path / "flaky").touch()

    async def scored(scorer: Scorer) -> tuple[RewardScore, ...]:
        return await scorer.score(raw("a", "b"), 2)

    scores = with_scorer(tmp_path, "failing", scored, attempts=2)
    first, second = pids(tmp_path, 2)
    assert first != second and [score.total for score in scores] == [second, second]


def test_a_function_that_raised_is_tried_again_in_the_same_process(tmp_path: Path) -> None:
    """P29: an exception may pass: the second attempt's scores are the group's."""
    (tmp_path / "lost").touch()

    async def scored(scorer: Scorer) -> tuple[RewardScore, ...]:
        return await scorer.score(raw("a", "b"), 7)

    scores = with_scorer(tmp_path, "failing", scored, attempts=3)
    first, second = pids(tmp_path, 7)
    assert first == second and [score.total for score in scores] == [second, second]


def test_a_cancelled_group_leaves_no_answer_behind(tmp_path: Path) -> None:
    """The answer to a group that nobody waits for any more isn't given to the next one."""

    async def cancelled(scorer: Scorer) -> tuple[RewardScore, ...]:
        task = asyncio.create_task(scorer.score(raw("a"), 1))
        await asyncio.to_thread(wait_until, (tmp_path / "begun").exists, "the function to be called")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (tmp_path / "go").touch()
        return await scorer.score(raw("a", "b"), 2)

    assert [score.total for score in with_scorer(tmp_path, "waiting", cancelled)] == [2.0, 2.0]


def test_the_process_ends_with_its_owner(tmp_path: Path) -> None:
    """P34: `close` ends it, and is harmless before the first group and after the last."""

    async def life(scorer: Scorer) -> int:
        await scorer.close()
        (score,) = await scorer.score(raw("a"), 0)
        assert is_running(int(score.total))
        await scorer.close()
        await scorer.close()
        return int(score.total)

    pid = with_scorer(tmp_path, "failing", life)
    assert pid != os.getpid() and not is_running(pid)


def test_a_task_that_does_not_load_there(tmp_path: Path) -> None:
    """P36: a file that is gone by the time the process starts fails the group, it doesn't hang it."""

    async def fails(scorer: Scorer) -> str:
        (tmp_path / "task.py").unlink()
        with pytest.raises(RewardError) as caught:
            await scorer.score(raw("a"), 0)
        return caught.value.reason

    assert with_scorer(tmp_path, "failing", fails, attempts=2) == "reward_crashed"


@pytest.mark.parametrize(
    ("name", "totals"), [("copying", [0.0, 1.0, 2.0]), ("reading", [0.0] * 3), ("locking", [1.0] * 3)]
)
def test_functions_that_fork_read_or_keep_a_lock(tmp_path: Path, name: str, totals: list[float]) -> None:
    """P36: the copy that a fork makes of the scorer doesn't answer for it; standard input is empty and holds no
    requests; what is tied to an event loop can be kept from group to group."""

    async def score_three(scorer: Scorer) -> list[float]:
        return [(await scorer.score(raw("a"), at))[0].total for at in range(3)]

    assert with_scorer(tmp_path, name, score_three) == totals


def test_what_a_function_has_started_ends_with_it(tmp_path: Path) -> None:
    """P34, P36: a process of a function's own neither outlives the deadline nor holds it up."""

    async def too_late(scorer: Scorer) -> None:
        with pytest.raises(RewardError, match="longer than") as caught:
            await scorer.score(raw("a"), 0)
        assert caught.value.reason == "reward_timeout"

    with_scorer(tmp_path, "starting", too_late, timeout_s=3.0)
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not is_running(child), "the end of the function's own process")
