"""Shared memory without a name, and doorbells: what is promised, and what is refused."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from unison.ipc import memory
from unison.ipc.errors import ArenaError, CapacityError, ConfigError
from unison.ipc.memory import Doorbell, SharedMemory, available_bytes

_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def num_blocks(fd: int) -> int:
    """Bytes that the file really has."""
    return os.fstat(fd).st_blocks * 512


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 3 << 20])
def test_pages_are_there_from_the_start(num_bytes: int) -> None:
    """P33: all pages are allocated at once, so that no later touch can fail; no name exists; exec doesn't inherit."""
    with SharedMemory.create("unison-test", num_bytes) as made:
        assert os.fstat(made.fd).st_size == made.num_bytes == num_bytes
        assert num_blocks(made.fd) >= num_bytes
        assert os.readlink(f"/proc/self/fd/{made.fd}") == "/memfd:unison-test (deleted)"
        assert not os.get_inheritable(made.fd)
    assert made.fd == -1
    made.close()


def test_nobody_can_resize_it() -> None:
    """P33: a peer that could shrink the memory could kill whoever reads it with SIGBUS."""
    with SharedMemory.create("sealed", 8192) as made:
        for size in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(made.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(made.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_memory_has_a_size(num_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"num_bytes: is {num_bytes}"):
        SharedMemory.create("none", num_bytes)


@pytest.mark.parametrize("num_bytes", [1 << 40, 1 << 62, 1 << 80])
def test_memory_that_cannot_be_had(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """P33: a lack of memory is an error at the start that names the size. The kernel would allocate until the OOM
    killer ends somebody, which this very test once showed: it must not even be asked."""
    monkeypatch.setattr(memory, "_allocate", lambda fd, size: pytest.fail("the kernel was asked"))
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30))
    with pytest.raises(CapacityError, match=f"{num_bytes} bytes of shared memory for huge .* bytes are usable"):
        SharedMemory.create("huge", num_bytes)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("is_own_root", [True, False])
def test_the_limit_of_a_container_counts(
    version: int, is_own_root: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P33: the closest limit of all levels, whether the container sees the host's tree or itself as the root."""
    limit, usage = ("memory.max", "memory.current") if version == 2 else _V1_NAMES
    inactive = "inactive_file" if version == 2 else "total_inactive_file"
    inner = tmp_path if is_own_root else tmp_path / "outer" / "inner"
    inner.mkdir(parents=True, exist_ok=True)
    (inner / limit).write_text("1000000\n")
    (inner / usage).write_text("300000\n")
    (inner / "memory.stat").write_text(f"anon 5\n{inactive} 100000\n")
    if not is_own_root:
        (inner.parent / limit).write_text("max\n")
        (inner.parent / usage).write_text("300000\n")
    controllers = "" if version == 2 else "memory"
    monkeypatch.setitem(memory._CGROUPS, controllers, (str(tmp_path), *memory._CGROUPS[controllers][1:]))
    real = memory._lines
    groups = [f"7:pids:/other/{version}", f"0:{controllers}:/outer/inner"]
    monkeypatch.setattr(memory, "_lines", lambda path: groups if path.name == "cgroup" else real(path))
    assert available_bytes() == 800_000
    with pytest.raises(CapacityError, match="800000 bytes of shared memory for much"):
        SharedMemory.create("much", 800_000)
    SharedMemory.create("enough", 700_000).close()


def test_a_file_size_limit_is_a_typed_error() -> None:
    """P33: the same where the limit is met in the middle of the allocation; in a process of its own, limits are."""
    code = """if True:
        import resource, signal
        from unison.ipc.errors import CapacityError
        from unison.ipc.memory import SharedMemory
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            SharedMemory.create("limited", 4 << 20)
        except CapacityError as error:
            print("refused:", error)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.startswith("refused: 4194304 bytes of shared memory for limited")


def test_a_signal_does_not_undo_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def interrupted(fd: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) < 3:
            raise InterruptedError

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with SharedMemory.create("patient", 4096):
        assert calls == [4096] * 3


def test_a_system_without_memfd_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="platform: has no memfd_create"):
        SharedMemory.create("none", 1)
    monkeypatch.delattr(os, "eventfd")
    with pytest.raises(ConfigError, match="platform: has no eventfd"):
        Doorbell.create()


def test_both_sides_see_the_same_bytes() -> None:
    with SharedMemory.create("both", 8192) as made, SharedMemory.attach(os.dup(made.fd), 8192) as taken:
        assert taken.num_bytes == 8192
        with made.map(writable=True) as ours, taken.map(writable=False) as theirs:
            ours[5000:5003] = b"abc"
            assert theirs[5000:5003] == b"abc"
            with pytest.raises(TypeError):
                theirs[0] = 1


def test_a_mapping_outlives_the_descriptor() -> None:
    made = SharedMemory.create("mapped", 4096)
    mapping = made.map(writable=True)
    made.close()
    with mapping:
        mapping[:1] = b"x"
        assert mapping[:1] == b"x"


def test_a_part_can_be_mapped_and_no_more() -> None:
    with SharedMemory.create("parts", 3 * mmap.PAGESIZE) as made:
        with made.map(True) as whole, made.map(False, mmap.PAGESIZE, 10) as part, made.map(False, mmap.PAGESIZE) as end:
            whole[mmap.PAGESIZE] = 7
            assert (len(part), part[0], len(end)) == (10, 7, 2 * mmap.PAGESIZE)
        for offset, length in [(0, 0), (-1, 5), (0, 3 * mmap.PAGESIZE + 1), (3 * mmap.PAGESIZE, None), (0, -5)]:
            with pytest.raises(ArenaError, match="aren't inside"):
                made.map(False, offset, length)


def test_only_sealed_memory_of_the_right_size_is_taken(tmp_path: Path) -> None:
    """P33: what could shrink under the reader is refused, and closed."""
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    half_sealed = os.memfd_create("half", os.MFD_ALLOW_SEALING)
    os.ftruncate(half_sealed, 4096)
    fcntl.fcntl(half_sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    reading, writing = os.pipe()
    os.close(writing)
    with SharedMemory.create("small", 4096) as small:
        refused = {unsealed: "must be sealed", half_sealed: "must be sealed", file: "isn't shared memory",
                   reading: "isn't shared memory", os.dup(small.fd): "at least 4097 bytes"}  # fmt: skip
        for fd, reason in refused.items():
            with pytest.raises(ArenaError, match=reason):
                SharedMemory.attach(fd, 4097 if reason.startswith("at least") else 1)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)


# ---- doorbell --------------------------------------------------------------------------------------------------------


def test_a_doorbell_remembers_that_it_was_rung() -> None:
    with closing(Doorbell.create()) as bell:
        assert not bell.wait(0) and not bell.clear()
        bell.ring()
        bell.ring()
        assert bell.wait(0) and bell.wait(10), "waiting doesn't clear it"
        assert select.select([bell], [], [], 0)[0] == [bell]
        assert bell.clear() and not bell.clear() and not bell.wait(0)
        assert not os.get_inheritable(bell.fileno())


def test_a_full_doorbell_neither_blocks_nor_fails() -> None:
    with closing(Doorbell.create()) as bell:
        os.eventfd_write(bell.fileno(), 2**64 - 2)
        bell.ring()
        assert bell.clear() and not bell.clear()


def test_waiting_ends_at_the_deadline() -> None:
    """P2."""
    with closing(Doorbell.create()) as bell:
        started = time.monotonic()
        assert not bell.wait(0.05)
        assert 0.05 <= time.monotonic() - started < 5


def test_one_process_wakes_another() -> None:
    with closing(Doorbell.create()) as bell:
        pid = os.fork()
        if pid == 0:
            bell.ring()
            os._exit(0)
        assert bell.wait(30) and bell.clear()
        assert os.waitpid(pid, 0)[1] == 0


def test_only_an_eventfd_that_never_blocks_is_a_doorbell() -> None:
    with closing(Doorbell.create()) as bell:
        bell.check()
    with pytest.raises(ArenaError, match="isn't a doorbell"):
        bell.check()
    reading, writing = os.pipe()
    os.close(writing)
    for fd in (reading, os.eventfd(0)):
        with closing(Doorbell(fd)) as other, pytest.raises(ArenaError, match="eventfd that doesn't block"):
            other.check()
