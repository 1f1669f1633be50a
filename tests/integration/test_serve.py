"""bin/serve's own commands and ways to be reached, on the tiny model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.serving import ServeProcess, read_state, serving, wait_until
from harness.tiny_directory import write_tiny_directory
from unison.ipc.address import make_private_dir, read_address
from unison.ipc.client import Client
from unison.ipc.types import SamplingParams

pytestmark = pytest.mark.slow

SHORT = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
TINY = ("--no-http", "--set", "engine.cache.num_tokens=8192")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_directory(directory)
    return directory


def test_tcp_with_keys(tmp_path: Path, model: Path) -> None:
    """P43: beyond this machine: tcp with CURVE, reached with the address file alone, which holds key and token."""
    with serving(tmp_path / "r", model, *TINY, "--set", "worker.endpoint=tcp://127.0.0.1:0") as run:
        address = read_address(run.run_dir)
        assert address.endpoint.startswith("tcp://127.0.0.1:") and len(address.curve_public_key) == 40
        elsewhere = make_private_dir(tmp_path / "elsewhere")
        shutil.copy2(run.run_dir / "address.json", elsewhere)
        with Client.connect(run.run_dir) as client, Client.connect(elsewhere) as remote:
            assert client.generate([5], SHORT).completions == remote.generate([5], SHORT).completions


def test_status_shows_a_run(tmp_path: Path, model: Path) -> None:
    """The table of a run: state, versions with digests, progress."""
    with serving(tmp_path / "r", model, *TINY, "--served-name", "tiny-one") as run:
        ended = subprocess.run(
            [sys.executable, "-m", "unison.workers.cli", "status", str(run.run_dir), "--once"],
            capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"COLUMNS": "120"},
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        state = read_state(run.run_dir)
        assert (state["pid"], state["state"], state["model"]) == (run.popen.pid, "ready", "tiny-one")
        for text in ("tiny-one", "serving", "live", "policy versions", "last step"):
            assert text in ended.stdout, text


def test_logs_are_json_and_keep_secrets(tmp_path: Path, model: Path) -> None:
    """P43: every line of every log is JSON; neither token nor keys are in logs or in the process list."""
    os.environ |= {"UNISON_API_KEY": "user-secret-1"}
    try:
        with serving(tmp_path / "r", model, *TINY) as run, Client.connect(run.run_dir) as client:
            client.generate([5], SHORT)
            token = read_address(run.run_dir).token
            commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in run.pids().values()]
    finally:
        del os.environ["UNISON_API_KEY"]
    lines = [line for path in (tmp_path / "r").glob("*.log") for line in path.read_text().splitlines()]
    assert lines and all(json.loads(line)["event"] for line in lines)
    for secret in (token, "user-secret-1"):
        assert secret not in run.logs and not any(secret.encode() in command for command in commands)


def test_interrupted_twice_it_does_not_drain(tmp_path: Path, model: Path) -> None:
    """Ctrl-C drains, a second one ends it now; nothing is left either way."""
    process = ServeProcess(tmp_path / "r", model, *TINY, "--drain-s", "600").wait_ready()
    with Client.connect(process.run_dir) as client:
        stream = iter(client.stream([5], SamplingParams(max_tokens=500, seed=1, ignore_eos=True)))
        next(stream)
        client.pause()
        process.popen.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping" in process.logs, "the first one to be seen")
        process.popen.send_signal(signal.SIGINT)
        assert process.popen.wait(30) == 0
        stream.close()  # type: ignore[attr-defined]
    assert {path.name for path in process.run_dir.iterdir()} <= {"lock", "worker.log"}
