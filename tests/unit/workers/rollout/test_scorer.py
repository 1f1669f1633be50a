"""The scorer's real process, with functions that hang, crash, print and lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.rollouts import result
from harness.training import write_task
from unison.ipc.errors import RewardError
from unison.workers.rollout.records import RawRollout, RewardScore
from unison.workers.rollout.scorer import Scorer

pytestmark = pytest.mark.slow


def raw(texts: tuple[str, ...] = ("aab", "xyz")) -> RawRollout:
    made = replace(result(0, [0.0] * len(texts)), texts=texts, prompt_id="train-0")
    return RawRollout(*(getattr(made, name) for name in (
        "order_id", "incarnation", "split", "prompt_id", "prompt_ids", "completions", "texts")))  # fmt: skip


def scored(
    path: Path, extra: str, work: Callable[[Scorer], Coroutine[Any, Any, Any]], attempts: int = 1
) -> Any:
    """Run `work` with a scorer whose function is `f`, defined by `extra`."""
    source = write_task(path / "t.py", "f", extra)

    async def everything() -> Any:
        scorer = Scorer((source, "", ""), 1.0, attempts)
        try:
            return await work(scorer)
        finally:
            await scorer.close()

    return asyncio.run(everything())


def reason(path: Path, extra: str, attempts: int = 1) -> str:
    with pytest.raises(RewardError) as caught:
        scored(path, extra, lambda scorer: scorer.score(raw(), 0), attempts)
    return caught.value.reason


def test_scores_and_prints(tmp_path: Path) -> None:
    """What functions print isn't taken for an answer; one process scores group after group."""
    extra = (
        "import os\n"
        "def f(completions, **_):\n    print('noise')\n    os.write(1, b'{}\\n')\n"
        "    return [float(os.getpid()) for _ in completions]\n"
    )

    async def twice(scorer: Scorer) -> tuple[RewardScore, ...]:
        return (*await scorer.score(raw(), 0), *await scorer.score(raw(("a",)), 1))

    found = scored(tmp_path, extra, twice)
    assert len(found) == 3 and len({score.total for score in found}) == 1


def test_it_may_hang(tmp_path: Path) -> None:
    """P36: the deadline ends the process, as often as configured."""
    extra = f"import time\ndef f(**_):\n    open({str(tmp_path / 'n')!r}, 'a').write('x')\n    time.sleep(3600)\n"
    assert reason(tmp_path, extra, attempts=2) == "reward_timeout"
    assert (tmp_path / "n").read_text() == "xx"


def test_it_may_crash(tmp_path: Path) -> None:
    """A process that ends is seen, and the next group has a new one."""
    extra = (
        "import os\ndef f(completions, at, **_):\n    if at[0] == 0: os._exit(9)\n    return [1.0] * len(completions)\n"
    )

    async def after_a_crash(scorer: Scorer) -> Any:
        with pytest.raises(RewardError) as caught:
            await scorer.score(raw(), 0)
        return caught.value.reason, await scorer.score(raw(), 1)

    why, scores = scored(tmp_path, extra, after_a_crash)
    assert why == "reward_crashed" and [score.total for score in scores] == [1.0, 1.0]


def test_it_may_fail_once(tmp_path: Path) -> None:
    """A function that raises is tried again; one whose values can't be isn't."""
    counter = tmp_path / "n"
    extra = (
        "def f(completions, **_):\n"
        f"    open({str(counter)!r}, 'a').write('x')\n"
        f"    if len(open({str(counter)!r}).read()) < 2: raise OSError('flaky')\n"
        "    return [2.0] * len(completions)\n"
    )
    scores = scored(tmp_path, extra, lambda scorer: scorer.score(raw(), 0), attempts=3)
    assert [score.total for score in scores] == [2.0, 2.0]
    counter.unlink()
    wrong = f"def f(completions, **_):\n    open({str(counter)!r}, 'a').write('x')\n    return [1.0]\n"
    assert reason(tmp_path, wrong, attempts=3) == "reward_invalid"
    assert counter.read_text() == "x"


def test_a_cancelled_group_leaves_no_answer_behind(tmp_path: Path) -> None:
    """The answer to a group that nobody waits for any more isn't given to the next one."""
    extra = (
        "import time\ndef f(completions, at, **_):\n    time.sleep(0.4 if at[0] == 0 else 0)\n"
        "    return [float(at[0])] * len(completions)\n"
    )

    async def cancelled(scorer: Scorer) -> Any:
        await scorer.score(raw(), 1)
        task = asyncio.create_task(scorer.score(raw(), 0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await scorer.score(raw(), 2)

    assert [score.total for score in scored(tmp_path, extra, cancelled)] == [2.0, 2.0]
