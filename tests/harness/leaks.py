"""Pytest plugin: after every test the process holds what it held before it (Linux only).

Counted: child processes, file descriptors, threads, names in /dev/shm. What is on its way out gets `DEADLINE_S` to go.
Tolerated: the few things below that a library starts once per process and keeps, each with its reason.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

DEADLINE_S = 10.0
"""Longest wait for stragglers, in seconds; generous, since a busy machine may not run a finished thread for a while."""

LASTING_CHILDREN = {
    "multiprocessing.resource_tracker": "the standard library starts one per process and keeps it",
    "multiprocessing.forkserver": "the standard library starts one per process and keeps it",
}
"""Children that stay: part of the command line, and why."""

LASTING_PYTHON_THREADS = {
    "tqdm_monitor": "progress bars of transformers share one thread that redraws them",
}
"""Threads of Python's that stay: beginning of the name, and why."""

LASTING_POOLS = {
    "OpenMP": "torch's parallel loops; one team for each thread that runs them",
    "pthreadpool": "torch's older thread pool, resized by torch.set_num_threads",
    "autograd": "torch's backward threads",
    "BLAS": "numpy's matrix products",
    "rayon": "tokenizers' parallel loops",
    "unison": "the native kernels' helpers",
}
"""Pools of native threads that stay. The system gives their threads no names: only their sum is bounded."""

MAX_NATIVE_THREADS = len(LASTING_POOLS) * max(os.cpu_count() or 1, 4)
"""Most native threads that all pools together may hold; a leak of one per test passes it soon."""


@dataclass(frozen=True)
class Holdings:
    """What this process holds at one moment."""

    children: dict[int, str]
    """Command line by process id, zombies included."""
    descriptors: dict[int, str]
    """What each open file descriptor refers to."""
    python_threads: dict[int, str]
    """Name by `ident`."""
    num_native_threads: int
    """Threads that Python knows nothing of."""
    shared_memory: frozenset[str]
    """Names in /dev/shm."""

    @staticmethod
    def take() -> Holdings:
        """The present state of this process."""
        python_threads = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
        return Holdings(
            children=_children(),
            descriptors=_descriptors(),
            python_threads=python_threads,
            num_native_threads=max(0, len(os.listdir("/proc/self/task")) - len(python_threads)),
            shared_memory=frozenset(os.listdir("/dev/shm")),
        )


def leaks_since(before: Holdings) -> list[str]:
    """One line for each thing that is held now, was not held `before`, and isn't tolerated."""
    now = Holdings.take()
    found = []
    for pid, command in now.children.items():
        if pid not in before.children and not any(part in command for part in LASTING_CHILDREN):
            found.append(f"child process {pid}: {command}")
    for number, target in now.descriptors.items():
        if before.descriptors.get(number) != target and not _is_lasting_descriptor(number, target):
            found.append(f"file descriptor {number}: {target}")
    for ident, name in now.python_threads.items():
        if ident not in before.python_threads and not name.startswith(tuple(LASTING_PYTHON_THREADS)):
            found.append(f"thread {name}")
    if now.num_native_threads > max(before.num_native_threads, MAX_NATIVE_THREADS):
        found.append(f"{now.num_native_threads} native threads, above {MAX_NATIVE_THREADS}")
    for name in now.shared_memory - before.shared_memory:
        if not _is_held_elsewhere(f"/dev/shm/{name}", set(now.children)):
            found.append(f"shared memory /dev/shm/{name}")
    return found


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[None]:
    """Fails a test that leaves something behind. First of a test's own fixtures, so that it looks last."""
    if not sys.platform.startswith("linux"):
        yield
        return
    before = Holdings.take()
    yield
    found = leaks_since(before)
    if found:
        gc.collect()  # what only a reference cycle holds is no leak, but late
    deadline = time.monotonic() + DEADLINE_S
    while found and time.monotonic() < deadline:
        time.sleep(0.01)
        found = leaks_since(before)
    if found:
        pytest.fail(f"still held {DEADLINE_S:.0f} s after the test:\n  " + "\n  ".join(found), pytrace=False)


def _children() -> dict[int, str]:
    commands = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:  # the thread has ended meanwhile
            continue
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # reaped meanwhile
                continue
            commands[int(pid)] = command.strip() or "(ended, but nobody has waited for it)"
    return commands


def _descriptors() -> dict[int, str]:
    targets = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            targets[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the descriptor of this very listing
            continue
    return targets


def _is_lasting_descriptor(number: int, target: str) -> bool:
    """True for the pipe of multiprocessing's resource tracker, and for fonts, which matplotlib keeps open."""
    if "/mpl-data/fonts/" in target:
        return True
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    return tracker is not None and number == tracker._resource_tracker._fd


def _is_held_elsewhere(path: str, children: set[int]) -> bool:
    """True when a process that is neither this one nor its child has `path` open or mapped: it is theirs then."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) in {os.getpid(), *children}:
            continue
        try:
            if path in (process / "maps").read_text(errors="replace"):
                return True
            if any(os.readlink(link) == path for link in (process / "fd").iterdir()):
                return True
        except OSError:  # gone meanwhile, or not ours to look into
            continue
    return False
