"""Kills of a worker that serves the real model: loading 135M parameters is part of coming back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.serving import ServeProcess, is_running, serving, wait_until
from unison.ipc.arena.publisher import WeightPublisher
from unison.ipc.client import Client
from unison.ipc.errors import UnisonError, WorkerLostError
from unison.ipc.types import PolicyVersion, SamplingParams

pytestmark = pytest.mark.slow

BACK_S = 30.0
PARAMS = SamplingParams(max_tokens=48, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def run(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    options = ("--no-http", "--set", "engine.cache.num_tokens=16384")
    with serving(tmp_path_factory.mktemp("serve") / "r", model_dir, *options) as process:
        yield process


def test_worker_killed_under_load(run: ServeProcess) -> None:
    """P3, R1, R3: 16 requests in a step: with `resubmit` each ends with the very bits of an undisturbed run, others
    end typed; service comes back, loading included."""
    prompts = [[at + 5, at + 6, at + 7] for at in range(8)]
    with Client.connect(run.run_dir) as client, ThreadPoolExecutor(16) as pool:
        expected = [output.completions for output in client.generate_all(prompts, PARAMS)]
        before = client.status().step
        kept = [pool.submit(client.generate, prompt, PARAMS, resubmit=True) for prompt in prompts]
        lost = [pool.submit(client.generate, prompt, PARAMS) for prompt in prompts]
        wait_until(lambda: client.status().step > before + 5, "a few steps")
        started = time.monotonic()
        os.kill(run.worker_pid, signal.SIGKILL)
        assert all(isinstance(call.exception(BACK_S), WorkerLostError) for call in lost)
        assert len(client.generate([9], SamplingParams(max_tokens=1), resubmit=True).completions[0].token_ids) == 1
        assert time.monotonic() - started < BACK_S
        assert [call.result(60).completions for call in kept] == expected


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03])
def test_worker_killed_while_it_verifies(run: ServeProcess, delay_s: float) -> None:
    """V5, P10: killed while 270 MB are being hashed: the publication ends typed or was live, what is served afterwards
    is one whole version under its own name, and publishing again works."""
    with Client.connect(run.run_dir) as client, WeightPublisher(client) as publisher:
        wait_until(lambda: _versions(client), "the worker")
        arena = publisher.arena
        base = {name: tensor.clone() for name, tensor in arena.tensors(arena.flat(_live(client))).items()}
        base.pop("lm_head.weight")
        base["model.norm.weight"].mul_(1.01)
        known, old = _versions(client), run.worker_pid
        reserved = client.reserve_buffer()
        tensors = arena.write(reserved.buffer)
        for name, tensor in base.items():
            tensors[name].copy_(tensor)
        version, manifest = arena.seal(reserved.buffer, reserved.next_ordinal)
        threading.Timer(delay_s, os.kill, (old, signal.SIGKILL)).start()
        try:
            client.publish(version, reserved.buffer, manifest)
        except UnisonError as error:
            assert isinstance(error, WorkerLostError)
        arena.let_go(reserved.buffer)
        wait_until(lambda: not is_running(old), "the worker to die")
        wait_until(lambda: client.worker.pid != old and _versions(client), "a new worker")
        (served,) = _versions(client)
        assert served in known | {version}
        assert publisher.publish(base).version.ordinal > max(item.ordinal for item in known)


def _versions(client: Client) -> set[PolicyVersion]:
    try:
        return {item.version for item in client.status().versions}
    except WorkerLostError:
        return set()


def _live(client: Client) -> int:
    return next(item.buffer for item in client.status().versions if item.state == "live")
