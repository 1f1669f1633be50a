"""SharedMemory, Doorbell and the passing of descriptors: memory without a name, so that nothing can be left behind.

A memfd lives as long as a descriptor or a mapping of it does; it never appears in /dev/shm, isn't bounded by its size,
and no signal can leak it (P33). Its pages are allocated when it is created, so that a lack of memory is an error then
and never a SIGBUS or a visit of the OOM killer later; seals keep anyone from resizing it. Descriptors travel over
AF_UNIX sockets (SCM_RIGHTS) to processes of the same user only (SO_PEERCRED).

Owns: memfds, eventfds, descriptor passing. Knows nothing of what the memory holds. Called by ring and arena, worker and
supervisor. Source: memfd_create(2), eventfd(2), unix(7), fcntl(2) "File Sealing". Linux only.
"""

from __future__ import annotations

import array
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

import psutil

from .address import check_private
from .errors import ArenaError, CapacityError, ConfigError, DeadlineError, HandshakeError, WireError

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SEAL") else 0
_UCRED = struct.Struct("3i")
_USABLE_SHARE = 0.95
"""Part of the available memory that one allocation may take; the system needs the rest."""
_CGROUPS = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controllers as /proc/self/cgroup writes them: root, limit, usage, and what of the usage goes when it is asked to."""
_EVENTFD = "anon_inode:[eventfd]"
MAX_NAME_BYTES = 256
MAX_PAYLOAD_BYTES = 1 << 16
MAX_FDS = 16
_BACKLOG = 64
_GRANTED, _REFUSED = b"\x00", b"\x01"
"""First byte of an answer; a payload or a reason follows."""
_SERVE_S = 1.0
"""How long a client of the descriptor socket may take for its one short line."""


def available_bytes() -> int:
    """Memory that can be taken now: the system's, or what the closest limit of a control group leaves.

    The kernel refuses no allocation of a memfd that it can begin: it allocates until the OOM killer ends somebody. So
    the size is compared with this before. Source: cgroups(7); Linux admin guide, "Memory Resource Controller" (v1, v2).
    """
    left = [int(psutil.virtual_memory().available)]
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers not in _CGROUPS:
            continue
        root, limit, usage, inactive = _CGROUPS[controllers]
        # In a container the path may be the host's, and the root the container's own: every level is asked.
        for level in (Path(path), *Path(path).parents):
            folder = Path(root, *level.parts[1:])
            most, used = _lines(folder / limit), _lines(folder / usage)
            if most and used and most[0].isdigit():
                stat = dict(line.split() for line in _lines(folder / "memory.stat"))
                left.append(int(most[0]) - int(used[0]) + int(stat.get(inactive, 0)))
    return max(0, min(left))


def _no_memory(label: str, num_bytes: int, reason: str) -> CapacityError:
    return CapacityError(
        f"{num_bytes} bytes of shared memory for {label} aren't to be had: {reason}; free memory, raise the "
        "container's limit, or use a smaller model or fewer buffers"
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no such level or controller here
        return []


def _allocate(fd: int, num_bytes: int) -> None:
    """All pages, now. A signal undoes a long allocation, so it is asked for again after one (fallocate(2), EINTR)."""
    while True:
        try:
            return os.posix_fallocate(fd, 0, num_bytes)
        except InterruptedError:
            continue


class SharedMemory:
    """One memfd. Life: created or attached → mapped any number of times → closed (mappings live on their own)."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Use `create` or `attach`."""
        self.fd = fd
        self.num_bytes = num_bytes

    @staticmethod
    def create(label: str, num_bytes: int) -> SharedMemory:
        """Allocate `num_bytes` now; `label` shows up in /proc/PID/maps.

        Raises:
            ConfigError: the size isn't positive, or the system has no memfd. CapacityError: there is no such memory.
        """
        if num_bytes <= 0:
            raise ConfigError("num_bytes", f"is {num_bytes}; shared memory has at least one byte")
        if not hasattr(os, "memfd_create"):
            raise ConfigError("platform", "has no memfd_create; shared memory between processes needs Linux")
        available = int(available_bytes() * _USABLE_SHARE)
        if num_bytes > available:
            raise _no_memory(label, num_bytes, f"{available} bytes are usable")
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _allocate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise _no_memory(label, num_bytes, os.strerror(error.errno)) from error
            raise
        return SharedMemory(fd, num_bytes)

    @staticmethod
    def attach(fd: int, min_bytes: int = 1) -> SharedMemory:
        """Take over a descriptor that came from another process.

        Raises:
            ArenaError: it is no sealed memfd, or smaller than `min_bytes`; the descriptor is closed.
        """
        try:
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        except OSError as error:
            os.close(fd)
            raise ArenaError(f"the descriptor isn't shared memory: {error.strerror}") from error
        if seals & _SEALS != _SEALS or size < min_bytes:
            os.close(fd)
            raise ArenaError(f"the shared memory has {size} bytes and seals {seals:#x}; it must be sealed and hold at "
                             f"least {min_bytes} bytes")  # fmt: skip
        return SharedMemory(fd, size)

    def map(self, writable: bool, offset: int = 0, length: int | None = None) -> mmap.mmap:
        """Map a part (the whole from `offset` by default); pages of a mapping that isn't writable can't be written.

        Raises:
            ArenaError: the part isn't inside.
        """
        length = self.num_bytes - offset if length is None else length
        if offset < 0 or length <= 0 or offset + length > self.num_bytes:
            raise ArenaError(f"bytes {offset} … {offset + length} aren't inside the {self.num_bytes} that there are")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(self.fd, length, mmap.MAP_SHARED, protection, offset=offset)

    def close(self) -> None:
        """Give the descriptor back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> SharedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Doorbell:
    """An eventfd: rung by any number of producers, waited for by one consumer, also among other descriptors."""

    def __init__(self, fd: int) -> None:
        """Use `create`, or take over a descriptor from another process."""
        self._fd = fd

    @staticmethod
    def create() -> Doorbell:
        """A bell that hasn't been rung.

        Raises:
            ConfigError: the system has no eventfd.
        """
        if not hasattr(os, "eventfd"):
            raise ConfigError("platform", "has no eventfd; doorbells between processes need Linux")
        return Doorbell(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def check(self) -> None:
        """For a descriptor that came from another process.

        Raises:
            ArenaError: it is no eventfd, or one on which `clear` could block.
        """
        try:
            is_bell = os.readlink(f"/proc/self/fd/{self._fd}") == _EVENTFD and not os.get_blocking(self._fd)
        except OSError as error:
            raise ArenaError(f"the descriptor isn't a doorbell: {error.strerror}") from error
        if not is_bell:
            raise ArenaError("the descriptor isn't a doorbell: it must be an eventfd that doesn't block")

    def fileno(self) -> int:
        """For a poll loop: readable after `ring`."""
        return self._fd

    def ring(self) -> None:
        """Wake the consumer; any thread or process may."""
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:  # it was rung 2^64 - 2 times and nobody came: it is readable, which is all we want
            pass

    def clear(self) -> bool:
        """Forget the ringing; True where there was any. Look at the data after it, never before."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return False
        return True

    def wait(self, deadline_s: float) -> bool:
        """Sleep until it rings; False when `deadline_s` is over. Doesn't clear it."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(max(0.0, deadline_s) * 1000))

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def send_fds(sock: socket.socket, payload: bytes, fds: Sequence[int]) -> None:
    """Send bytes (at least one) and descriptors together; the receiver gets descriptors of its own.

    Raises:
        WireError: the socket took only a part of the payload; the connection is of no use any more.
    """
    num_sent = socket.send_fds(sock, [payload], list(fds))
    if num_sent != len(payload):
        raise WireError(f"the socket took {num_sent} of {len(payload)} bytes")


def recv_fds(sock: socket.socket, max_bytes: int, max_fds: int, deadline_s: float) -> tuple[bytes, tuple[int, ...]]:
    """What `send_fds` sent; the descriptors are the caller's to close and don't survive exec. Nothing at all means that
    the other side closed the connection.

    Raises:
        DeadlineError: nothing came. WireError: payload or descriptors were cut off (those that came are closed).
    """
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if not poller.poll(max(0.0, deadline_s) * 1000):
        raise DeadlineError(f"no descriptors came within {deadline_s} s")
    space = socket.CMSG_LEN(max_fds * array.array("i").itemsize)
    payload, ancillary, flags, _ = sock.recvmsg(max_bytes, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise WireError(f"more than {max_bytes} bytes or {max_fds} descriptors came at once")
    return payload, tuple(fds)


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end of a connected AF_UNIX socket, as the kernel recorded it."""
    return int(_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])


class FdServer:
    """Hands out descriptors by name to processes of the same user. Life: bound → `serve_one` per connection → closed.

    One request per connection: a name goes in, a payload and descriptors come out. A client that takes its time is
    dropped after a second, one of another user at once.
    """

    def __init__(self, path: Path, lookup: Callable[[str], tuple[bytes, Sequence[int]] | None]) -> None:
        """Bind at `path` with mode 0600; a socket that a dead process left there is replaced.

        Raises:
            HandshakeError: the directory isn't this user's alone. ConfigError: nothing can be bound there.
        """
        check_private(path.parent)
        self._path = path
        self._lookup = lookup
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            if path.is_socket():
                path.unlink()
            os.fchmod(self._socket.fileno(), 0o600)  # before bind, the file gets the socket's mode: there is no gap
            self._socket.bind(str(path))
            self._inode = path.stat().st_ino
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise ConfigError("path", f"{path} can't be bound: {error.strerror or error}") from error

    def fileno(self) -> int:
        """For a poll loop: readable when someone connects."""
        return self._socket.fileno()

    def serve_one(self) -> None:
        """Answer one connection, if there is one; whatever the client does, it ends within a second."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        with connection:
            try:
                self._answer(connection)
            except (OSError, WireError):  # it went away, or spoke nonsense: its own loss
                return

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_SERVE_S)
        if peer_uid(connection) != os.geteuid():
            return
        name = connection.recv(MAX_NAME_BYTES + 1)
        found = self._lookup(name.decode(errors="replace")) if len(name) <= MAX_NAME_BYTES else None
        if found is None:
            connection.send(_REFUSED + f"nothing is offered under the name {name[:60]!r}".encode())
            return
        payload, fds = found
        send_fds(connection, _GRANTED + payload, fds)

    def close(self) -> None:
        """Stop listening and remove the socket file, unless a successor has bound its own there."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            if self._path.exists() and self._path.stat().st_ino == self._inode:
                self._path.unlink()


def fetch_fds(path: Path, name: str, deadline_s: float) -> tuple[bytes, tuple[int, ...]]:
    """Ask the server at `path` for what it offers under `name`: (payload, descriptors, which are the caller's).

    Raises:
        HandshakeError: nobody listens there, another user does, or it refused. DeadlineError: it doesn't answer.
        WireError: the answer is longer than any of ours.
    """
    until_s = monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        # A blocking connect waits for room in the server's backlog; one with Python's own timeout fails at once.
        seconds_and_us = divmod(max(1, int(deadline_s * 1e6)), 1_000_000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", *seconds_and_us))
        try:
            sock.connect(str(path))
            if peer_uid(sock) != os.geteuid():
                raise HandshakeError(f"{path} is served by user {peer_uid(sock)}, this process runs as {os.geteuid()}")
            sock.send(name.encode())
            payload, fds = recv_fds(sock, MAX_PAYLOAD_BYTES, MAX_FDS, until_s - monotonic())
        except (BlockingIOError, DeadlineError):
            raise DeadlineError(f"{path} gave no answer for {name!r} within {deadline_s} s") from None
        except OSError as error:
            raise HandshakeError(f"{path} can't be asked for {name!r}: {error.strerror or error}") from error
    if payload[:1] != _GRANTED:
        for fd in fds:
            os.close(fd)
        reason = payload[1:].decode(errors="replace") if payload else "the connection was closed"
        raise HandshakeError(f"{path} refused {name!r}: {reason}")
    return payload[1:], fds
