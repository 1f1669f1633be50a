"""The leak check finds what it is there to find: each kind of thing that a test may leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness.leaks import Holdings, leaks_since

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the leak check reads /proc")


def test_nothing_held_is_nothing_found() -> None:
    assert leaks_since(Holdings.take()) == []


def test_an_open_file_is_found(tmp_path: Path) -> None:
    before = Holdings.take()
    with (tmp_path / "file").open("w") as file:
        assert leaks_since(before) == [f"file descriptor {file.fileno()}: {tmp_path / 'file'}"]
    assert leaks_since(before) == []


def test_anonymous_memory_is_found() -> None:
    before = Holdings.take()
    descriptor = os.memfd_create("arena")
    try:
        (found,) = leaks_since(before)
        assert "memfd:arena" in found
    finally:
        os.close(descriptor)


def test_a_thread_is_found() -> None:
    before = Holdings.take()
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, name="left-over")
    thread.start()
    try:
        assert leaks_since(before) == ["thread left-over"]
    finally:
        may_end.set()
        thread.join()
    assert leaks_since(before) == []


def test_a_child_is_found_until_somebody_has_waited_for_it() -> None:
    before = Holdings.take()
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert any(line.startswith(f"child process {child.pid}: ") and code in line for line in leaks_since(before))
        child.stdin.close()
        child.stdout.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert leaks_since(before) == [f"child process {child.pid}: (ended, but nobody has waited for it)"]
    assert leaks_since(before) == []


def test_a_name_in_shared_memory_is_found_unless_a_stranger_holds_it() -> None:
    before = Holdings.take()
    path = Path(f"/dev/shm/unison-leak-{os.getpid()}")
    path.write_text("")
    try:
        assert leaks_since(before) == [f"shared memory {path}"]
        # The shell's own child is no child of ours: the nearest thing to a stranger.
        command = ["sh", "-c", f"sh -c 'exec 3<{path}; echo held; read line'; true"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
            assert shell.stdin is not None and shell.stdout is not None
            assert shell.stdout.readline() == "held\n"
            assert not [line for line in leaks_since(before) if line.startswith("shared memory")]
            shell.stdin.close()
    finally:
        path.unlink()
    assert leaks_since(before) == []
