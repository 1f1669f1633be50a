"""Scorer: the process in which reward functions run, and its owner in the rollout worker.

A reward function may hang, crash or print; here that costs a process and an attempt, and the rollout worker goes on
generating. Requests and answers are lines of JSON over the process's standard input and output; what the functions
print goes to the worker's log.

Owns: the process, its deadline, the retries. Called by the rollout worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ...ipc.errors import RewardError, UnisonError
from ..process import die_with_parent
from .records import RawRollout, RewardScore
from .rewards import score_group
from .task import Task
from .tasks import load_task

MAX_LINE_BYTES = 64 << 20
END_S = 5.0
"""Longest wait for the end of a process that has closed its output."""
START_S = 60.0
"""Longest start of the process until the task is loaded there."""


class Scorer:
    """Scores groups, one after the other. Life: built → any number of `score` → `close`. One asyncio loop."""

    def __init__(self, task: Sequence[str], timeout_s: float, attempts: int) -> None:
        """`task` are the arguments of `load_task`; the task must have loaded in this process already."""
        self._task = list(task)
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._num_requests = 0

    async def score(
        self, raw: RawRollout, prompt_index: int, labels: Sequence[str] | None = None
    ) -> tuple[RewardScore, ...]:
        """Rewards of one group; `labels` names the functions to call, all of them by default.

        Raises:
            RewardError: the functions failed `attempts` times, or gave values that can't be.
        """
        request = {
            "split": raw.split, "index": prompt_index, "texts": raw.texts,
            "completion_ids": [completion.token_ids for completion in raw.completions],
            "labels": None if labels is None else list(labels),
        }  # fmt: skip
        async with self._turn:
            for attempt in range(1, self._attempts + 1):
                try:
                    return await self._try(request)
                except RewardError as error:
                    if attempt == self._attempts or error.reason == "reward_invalid":
                        raise RewardError(error.reason, f"{error} (attempt {attempt})") from error
        raise RewardError("reward_error", "rollout.reward_attempts is 0")

    async def _try(self, request: Mapping[str, Any]) -> tuple[RewardScore, ...]:
        process = self._process or await self._start()
        self._num_requests += 1
        line = json.dumps({"number": self._num_requests, **request}).encode() + b"\n"
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                process.stdin.write(line)
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            await self.close()
            raise RewardError("reward_timeout", f"the reward functions took longer than {self._timeout_s} s") from None
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        except BaseException:
            await self.close()  # its answer would be taken for the next one's
            raise
        if not answer.endswith(b"\n"):
            # Waited for before it is killed: a kill would reap it, and its exit code with it.
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()
            await self.close()
            raise RewardError("reward_crashed", f"the reward functions' process ended with {process.returncode}")
        try:
            values = json.loads(answer)
            if values["number"] != self._num_requests:
                raise ValueError("it answers another request")
        except (ValueError, KeyError, TypeError):
            await self.close()
            raise RewardError("reward_crashed", f"the reward functions' process said {answer[:80]!r}") from None
        if "reason" in values:
            raise RewardError(values["reason"], values["message"])
        return tuple(RewardScore(each["total"], each["parts"]) for each in values["scores"])

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "unison.workers.rollout.scorer", str(os.getpid()), *self._task,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES, start_new_session=True,
        )  # fmt: skip
        self._process = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                ready = await process.stdout.readline()
        except TimeoutError:
            ready = b""
        except BaseException:
            await self.close()  # its "ready" would be taken for an answer
            raise
        if ready != b"ready\n":
            await self.close()
            raise RewardError("reward_crashed", f"the reward functions' process didn't start within {START_S} s")
        return process

    async def close(self) -> None:
        """End the process, and whatever the functions have started in its session."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # What it has written is read to its end, so that the pipe's transport is closed with it. One that left the
        # session may hold the pipe for ever.
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.communicate()


def main() -> int:
    """The process itself: load the task, then answer line by line until the input ends."""
    die_with_parent(int(sys.argv[1]))
    own_pid = os.getpid()
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # what the functions start must not read requests
    os.dup2(2, 1)  # prints of the functions must not be taken for answers
    task = load_task(*sys.argv[2:])
    answers.write("ready\n")
    answers.flush()
    with asyncio.Runner() as runner:  # one loop for all groups: functions may keep clients and locks
        for line in requests:
            request = json.loads(line)
            answer = {"number": request["number"], **_answer(task, request, runner)}
            if os.getpid() != own_pid:
                os._exit(0)  # a function has forked, and this is the copy: the original answers
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    return 0


def _answer(task: Task, request: Mapping[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    prompt = task.split(request["split"])[request["index"]]
    labels = request["labels"]
    rewards = [each for each in task.rewards if labels is None or each.label in labels]
    try:
        scores = runner.run(score_group(rewards, prompt, request["texts"], request["completion_ids"]))
    except UnisonError as error:
        return {"reason": getattr(error, "reason", "reward_error"), "message": str(error)}
    return {"scores": [asdict(score) for score in scores]}


if __name__ == "__main__":
    sys.exit(main())
