"""Signals to every process of a run, by pid: what was accepted ends, what should come back does, nothing is left.

One test per row of docs/failures.md that a signal can cause.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.serving import ServeProcess, is_running, read_state, serving, wait_until
from harness.tiny_directory import write_tiny_directory
from harness.tiny_model import tiny_spec, tiny_weights
from unison.ipc.arena.publisher import WeightPublisher
from unison.ipc.client import Client
from unison.ipc.errors import DigestMismatchError, UnisonError, WorkerLostError
from unison.ipc.types import FinishReason, RequestOutput, SamplingParams, TokenDelta

BACK_S = 30.0
"""Service is back within this time after a process of it was killed."""
LONG = SamplingParams(max_tokens=480, temperature=1.0, seed=5, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=1.0, seed=6, ignore_eos=True)
TINY = ("--no-http", "--set", "engine.cache.num_tokens=8192")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_directory(directory)
    return directory


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Iterator[ServeProcess]:
    with serving(tmp_path / "r", model, *TINY) as process:
        yield process
    assert_clean(process)


@pytest.fixture(scope="module")
def lasting_run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[ServeProcess]:
    """One run for the tests after which it serves as before."""
    many = ("--set", "supervisor.max_restarts=1000")
    with serving(tmp_path_factory.mktemp("lasting") / "r", model, *TINY, *many) as process:
        yield process
    assert_clean(process)


def assert_clean(process: ServeProcess) -> None:
    """No child is left, and the run directory holds logs and the lock file only."""
    wait_until(lambda: not process.pids(), "all children to be gone")
    left = {path.name for path in process.run_dir.iterdir()}
    assert left <= {"lock", "worker.log", "server.log"}, left


def new_worker(process: ServeProcess, old_pid: int) -> int:
    """Pid of the worker that came after `old_pid`."""
    return int(wait_until(lambda: (pid := _worker_pid(process)) != old_pid and pid, "a new worker", BACK_S))


def _worker_pid(process: ServeProcess) -> int:
    try:
        return process.worker_pid
    except UnisonError:
        return 0


def ended(future: Future[RequestOutput]) -> str:
    """How a call ended: its finish reason, or its typed error."""
    error = future.exception(60)
    if error is None:
        return future.result().completions[0].finish_reason.value
    assert isinstance(error, UnisonError), error
    return type(error).__name__


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "mid-step"])
def test_worker(lasting_run: ServeProcess, number: signal.Signals, is_busy: bool) -> None:
    """P3, R1, P34, P36: every accepted call ends once, typed; a new worker serves the same version within seconds."""
    with Client.connect(lasting_run.run_dir) as client, ThreadPoolExecutor(8) as pool:
        before = client.generate([5, 6], SHORT)
        calls = [pool.submit(client.generate, [5, at], LONG) for at in range(5, 11 if is_busy else 5)]
        if calls:
            wait_until(lambda: client.status().num_running, "requests to run")
        old = lasting_run.worker_pid
        started = time.monotonic()
        os.kill(old, number)
        assert {ended(call) for call in calls} <= {"WorkerLostError"}
        after = pool.submit(client.generate, [5, 6], SHORT, resubmit=True).result(BACK_S)
        assert time.monotonic() - started < BACK_S
    assert after.completions == before.completions, "same request, same seed, same version: same bits"
    assert new_worker(lasting_run, old) != old and not is_running(old)


def test_a_resubmitted_stream_goes_on_where_it_was(lasting_run: ServeProcess) -> None:
    """R3, P3: with `resubmit`, the reader of a stream sees each token once and never learns of the worker's death."""
    with Client.connect(lasting_run.run_dir) as client:
        (expected,) = client.generate([5, 6], LONG).completions
        seen: list[int] = []
        stream = client.stream([5, 6], LONG, resubmit=True)
        for deltas in stream:
            for delta in deltas:
                assert delta.first == len(seen)
                seen += delta.token_ids
            if 20 < len(seen) < 100:
                os.kill(lasting_run.worker_pid, signal.SIGKILL)
                seen += _rest(stream.__iter__(), len(seen))
                break
        assert tuple(seen) == expected.token_ids
        assert stream.output is not None and stream.output.completions[0].logprobs == expected.logprobs


def _rest(deltas: Iterator[tuple[TokenDelta, ...]], first: int) -> list[int]:
    tokens: list[int] = []
    for group in deltas:
        for delta in group:
            assert delta.first == first + len(tokens)
            tokens += delta.token_ids
    return tokens


def test_the_published_version_survives_its_worker(run: ServeProcess) -> None:
    """P10, V1, V5: a new worker serves the last live version, attested, and ordinals go on growing."""
    with Client.connect(run.run_dir) as client, WeightPublisher(client) as publisher:
        live = publisher.publish(tiny_weights(tiny_spec(), seed=1)).version
        publisher.publish(tiny_weights(tiny_spec(), seed=2))
        client.rollback(1)
        before = client.generate([5, 6], SHORT)
        old = run.worker_pid
        os.kill(old, signal.SIGKILL)
        new_worker(run, old)
        after = client.generate([5, 6], SHORT, resubmit=True)
        assert after.completions[0].versions == before.completions[0].versions
        assert after.completions == before.completions
        assert [item.version for item in client.status().versions] == [live]
        assert publisher.publish(tiny_weights(tiny_spec(), seed=3)).version.ordinal == 3


def test_worker_killed_mid_verify(run: ServeProcess) -> None:
    """V5: the publication's call fails typed, the old version is served, and publishing again works."""
    with Client.connect(run.run_dir) as client, WeightPublisher(client) as publisher:
        outcomes = []
        for at in range(4):
            old = run.worker_pid
            update = publisher.update()
            with pytest.raises(WorkerLostError), update as open_update:
                for name, tensor in tiny_weights(tiny_spec(), seed=1 + at).items():
                    open_update.tensors[name].copy_(tensor)
                # The kill races with verification: before, within or just after it.
                threading.Timer(0.0005 * at, os.kill, (old, signal.SIGKILL)).start()
                version, manifest = publisher.arena.seal(open_update.buffer, open_update.ordinal)
                client.publish(version, open_update.buffer, manifest)
                wait_until(lambda pid=old: not is_running(pid), "the worker to die")
                raise WorkerLostError("it went live before the kill")
            new_worker(run, old)
            outcomes.append(wait_until(lambda: _live(client), "an answer"))
            assert len(client.generate([5], SHORT, resubmit=True).completions[0].token_ids) == 8
        assert publisher.publish(tiny_weights(tiny_spec(), seed=9)).version.ordinal >= max(outcomes)


def _live(client: Client) -> int:
    try:
        return max(item.version.ordinal for item in client.status().versions) + 1
    except WorkerLostError:
        return 0


@pytest.mark.parametrize("moment", ["writing", "sealed"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_publisher(lasting_run: ServeProcess, number: signal.Signals, moment: str) -> None:
    """V5, P13, P3: a publisher that dies while writing, or between seal and publish, leaves the served version alone,
    and its buffer is free; one that is stopped keeps its buffer, and others are told that it is busy."""
    script = (
        "import sys, time\n"
        "from unison.ipc.client import Client\nfrom unison.ipc.arena.publisher import WeightPublisher\n"
        f"client = Client.connect({str(lasting_run.run_dir)!r})\npublisher = WeightPublisher(client)\n"
        "with publisher.update() as update:\n"
        "    update.tensors['model.norm.weight'].zero_()\n"
        f"    if {moment == 'sealed'}: publisher.arena.seal(update.buffer, update.ordinal)\n"
        "    print('there', flush=True)\n    sys.stdin.read()\n"
    )
    with Client.connect(lasting_run.run_dir) as client, WeightPublisher(client) as publisher:
        before = client.generate([5, 6], SHORT)
        newest = max(item.version.ordinal for item in client.status().versions)
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE
        ) as child:
            assert child.stdout is not None and child.stdout.readline() == b"there\n"
            os.kill(child.pid, number)
            if number is signal.SIGSTOP:
                with pytest.raises(UnisonError, match="reserved by user"):
                    publisher.publish(tiny_weights(tiny_spec(), seed=1), wait_s=0.2)
            assert client.generate([5, 6], SHORT).completions == before.completions
            child.kill()
        assert publisher.publish(tiny_weights(tiny_spec(), seed=1)).version.ordinal == newest + 1


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_supervisor(tmp_path: Path, model: Path, is_busy: bool) -> None:
    """P34, P33, P3: nothing outlives a killed supervisor, no socket is left, and its directory can be used again."""
    names = set(os.listdir("/dev/shm"))
    process = ServeProcess(tmp_path / "r", model, *TINY).wait_ready()
    children = process.pids()
    assert {"gpu", "janitor"} <= children.keys()
    with Client.connect(process.run_dir) as client, ThreadPoolExecutor(2) as pool:
        call = pool.submit(client.generate, [5], LONG) if is_busy else None
        if is_busy:
            wait_until(lambda: client.status().num_running, "the request to run")
        process.popen.kill()
        process.popen.wait()
        assert call is None or ended(call) == "WorkerLostError"
    wait_until(lambda: not any(is_running(pid) for pid in children.values()), "all children to be gone", BACK_S)
    left = {path.name for path in process.run_dir.iterdir()}
    assert left <= {"lock", "worker.log"}, left
    wait_until(lambda: set(os.listdir("/dev/shm")) <= names, "no new name in /dev/shm")
    with serving(process.run_dir, model, *TINY) as again, Client.connect(again.run_dir) as client:
        assert client.generate([5], SHORT).completions[0].finish_reason is FinishReason.LENGTH
    assert_clean(again)


def test_a_stopped_worker_dies_with_its_supervisor(tmp_path: Path, model: Path) -> None:
    """P34: SIGSTOP on the worker, SIGKILL on the supervisor: still no orphan."""
    process = ServeProcess(tmp_path / "r", model, *TINY).wait_ready()
    children = process.pids()
    os.kill(children["gpu"], signal.SIGSTOP)
    process.popen.kill()
    process.popen.wait()
    wait_until(lambda: not any(is_running(pid) for pid in children.values()), "all children to be gone", BACK_S)


def test_janitor(lasting_run: ServeProcess) -> None:
    """P34: the janitor is a child like any other: a new one takes over, and knows whom to clean up after."""
    old = lasting_run.pids()["janitor"]
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: lasting_run.pids().get("janitor", old) != old, "a new janitor", BACK_S)


def test_a_worker_that_keeps_dying_ends_the_run_with_its_story(tmp_path: Path, model: Path) -> None:
    """P36: restarts are bounded; after them the run ends, says why, and leaves nothing."""
    process = ServeProcess(tmp_path / "r", model, *TINY, "--set", "supervisor.max_restarts=1").wait_ready()
    for _ in range(2):
        pid = int(wait_until(lambda: _worker_pid(process), "a worker"))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: _worker_pid(process) not in (0, pid) or process.popen.poll() is not None, "what follows")  # noqa: B023
    assert process.popen.wait(BACK_S) == 70
    assert "signal SIGKILL" in process.logs
    assert_clean(process)


def test_two_runs_never_meet(tmp_path: Path, model: Path) -> None:
    """P39: two runs on one host have directories, sockets and ports of their own; one directory holds one run."""
    with serving(tmp_path / "a", model, *TINY) as one, serving(tmp_path / "b", model, *TINY) as two:
        with Client.connect(one.run_dir) as first, Client.connect(two.run_dir) as second:
            assert first.worker.epoch != second.worker.epoch
            with WeightPublisher(first) as publisher:
                publisher.publish(tiny_weights(tiny_spec(), seed=1))
            assert [item.version.ordinal for item in second.status().versions] == [0]
        third = ServeProcess(tmp_path / "a", model, *TINY)
        assert third.popen.wait(30) == 78 and "another run is active" in third.logs


def test_bytes_that_changed_while_no_worker_looked_are_not_served(run: ServeProcess) -> None:
    """P10, V1: a new worker attests the live buffer; damaged bytes end the run instead of being served."""
    with Client.connect(run.run_dir) as client, WeightPublisher(client) as publisher:
        old = run.worker_pid
        os.kill(old, signal.SIGKILL)
        damaged = publisher.arena.tensors(publisher.arena.buffers.vector(0, is_writable=True))
        damaged["model.norm.weight"][0] += 1
        del damaged
    assert run.popen.wait(BACK_S) == 70
    assert DigestMismatchError.__name__ in run.logs and "isn't served" in run.logs


def test_drain(tmp_path: Path, model: Path) -> None:
    """SIGTERM lets requests in flight end within --drain-s, and takes nothing new."""
    process = ServeProcess(tmp_path / "r", model, *TINY, "--drain-s", "30").wait_ready()
    assert read_state(process.run_dir)["state"] == "ready"
    with Client.connect(process.run_dir) as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.generate, [5], LONG)
        wait_until(lambda: client.status().num_running, "the request to run")
        process.popen.send_signal(signal.SIGTERM)
        assert ended(call) == "length"
    assert process.popen.wait(30) == 0
    assert_clean(process)
