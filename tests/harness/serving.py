"""Whole runs for tests: bin/serve's process tree by pid, and a worker in a thread for what needs no process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from unison.engine.config import EngineConfig
from unison.engine.engine import Engine
from unison.engine.models.layout import WeightLayout
from unison.engine.models.spec import ModelSpec
from unison.ipc.address import FD_SOCKET, Address, make_private_dir, new_token, read_address, socket_path, write_address
from unison.ipc.channel import ChannelConfig, Listener
from unison.ipc.memory import FdServer
from unison.workers.config import WorkerConfig
from unison.workers.gpu.weights import engine_views, fill_arena
from unison.workers.gpu.worker import GpuWorker, WorkerIdentity

DEADLINE_S = 60.0


def wait_until(holds: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll a condition; fails, saying what was waited for."""
    until_s = time.monotonic() + deadline_s
    while True:
        value = holds()
        if value:
            return value
        assert time.monotonic() < until_s, f"waited {deadline_s} s for {what}"
        time.sleep(0.01)


class ServeProcess:
    """One `bin/serve`, started as its script starts it, with every pid at hand."""

    def __init__(self, run_dir: Path, model: Path, *options: str) -> None:
        self.run_dir = run_dir
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._out = run_dir.parent / f"{run_dir.name}.out"
        self._err = run_dir.parent / f"{run_dir.name}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "unison.workers.cli", "--model", str(model), "--run-dir", str(run_dir),
                 *options],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def wait_ready(self, deadline_s: float = DEADLINE_S) -> ServeProcess:
        """Until the ready line is there."""
        wait_until(lambda: self.ready_line or self.popen.poll() is not None, "the ready line", deadline_s)
        assert self.ready_line, f"serve ended with {self.popen.returncode}:\n{self.logs}"
        return self

    @property
    def ready_line(self) -> str:
        """The line that bin/serve prints when it is ready, or nothing."""
        return next((line for line in self._out.read_text().splitlines() if line.startswith("ready:")), "")

    @property
    def url(self) -> str:
        """Where HTTP is served."""
        found = re.search(r"http://\S+", self.ready_line)
        assert found, self.ready_line
        return found.group()

    @property
    def logs(self) -> str:
        """Everything that the processes have logged."""
        files = [self._err, *sorted(self.run_dir.glob("*.log"))]
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in files if file.exists())

    @property
    def worker_pid(self) -> int:
        """The present worker's pid, from the address file."""
        return read_address(self.run_dir).pid

    def pids(self) -> dict[str, int]:
        """Children of the supervisor, by module."""
        found = {}
        for pid in _children_of(self.popen.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            names = [part.decode() for part in command if part.startswith(b"unison.workers.")]
            if names:
                found[names[0].removeprefix("unison.workers.")] = pid
        return found

    def stop(self, deadline_s: float = DEADLINE_S) -> int:
        """SIGTERM, and the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise

    def kill_all(self) -> None:
        """SIGKILL to everything; for the end of a failed test."""
        for pid in [*self.pids().values(), self.popen.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.popen.wait()


@contextmanager
def serving(run_dir: Path, model: Path, *options: str) -> Iterator[ServeProcess]:
    """A run that is ready, and stopped at the end."""
    process = ServeProcess(run_dir, model, *options)
    try:
        yield process.wait_ready()
    finally:
        process.stop()


def is_running(pid: int) -> bool:
    """True while the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _children_of(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += map(int, task.read_text().split())
        except OSError:
            continue
    return children


class WorkerThread:
    """A GpuWorker with everything around it but the process: for tests of what it says and does."""

    def __init__(self, run_dir: Path, model: Path, engine: dict[str, Any], **config: Any) -> None:
        self.run_dir = make_private_dir(run_dir)
        spec = ModelSpec.from_dir(model)
        settings = EngineConfig.from_dict({"cache": {"num_tokens": 4096, "block_size_tokens": 4}} | engine)
        import torch

        layout = WeightLayout(spec, getattr(torch, settings.dtype))
        worker_config = WorkerConfig(**config)
        self.arena = fill_arena(model, layout, "tiny", worker_config.num_buffers)
        views = partial(engine_views, self.arena, layout)
        self.engine = Engine(spec, views(0), settings)
        identity = WorkerIdentity(os.urandom(8).hex(), os.getpid(), new_token(), "tiny")
        endpoint = f"ipc://{socket_path(run_dir, f'worker-{identity.epoch}.sock')}"
        self.listener = Listener(endpoint, ChannelConfig(worker_config.send_queue_messages))
        self.worker = GpuWorker(self.engine, self.arena, views, self.listener, identity, worker_config)
        self.address = Address(endpoint, identity.epoch, os.getpid(), identity.token)
        self.fds = FdServer(socket_path(run_dir, FD_SOCKET), lambda name: (b"", (self.arena.fd,)))
        write_address(run_dir, self.address)
        self.fault: BaseException | None = None
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name="worker"), threading.Thread(target=self._serve_fds, name="fds")
        ]  # fmt: skip

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.fault = error
        finally:
            self.worker.close()

    def _serve_fds(self) -> None:
        while not self._is_over.wait(0.01):
            self.fds.serve_one()

    def __enter__(self) -> WorkerThread:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop(0.0)
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self.fds.close()
        del self.engine, self.worker
        self.arena.close()


def read_state(run_dir: Path) -> dict[str, Any]:
    """The supervisor's description of a run."""
    values: dict[str, Any] = json.loads((run_dir / "supervisor.json").read_text())
    return values
