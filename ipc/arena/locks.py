"""BufferLocks: one record lock per buffer, shared for who reads it, exclusive for who writes it.

The kernel drops a dead process's locks, so a reader's pin and a writer's claim end with their process, whatever killed
it (V2, P3). Open-file-description locks are used, on a description of our own: they don't vanish when some other
descriptor of the same file is closed, as POSIX process locks do. Source: fcntl(2), "Open file description locks".
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""


class BufferLocks:
    """Locks of one process on one arena. Not inherited: the descriptor closes on exec, and forks don't use it."""

    def __init__(self, fd: int) -> None:
        """`fd` is the arena's memfd; it is opened anew, so that these locks belong to this object alone."""
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

    def try_shared(self, buffer: int) -> bool:
        """Pin a buffer for reading (or turn a claim into a pin); False where a writer holds it."""
        return self._set(fcntl.F_RDLCK, buffer)

    def try_exclusive(self, buffer: int) -> bool:
        """Claim a buffer for writing; False where anyone else holds it."""
        return self._set(fcntl.F_WRLCK, buffer)

    def release(self, buffer: int) -> None:
        """Let go of a buffer, whatever was held."""
        self._set(fcntl.F_UNLCK, buffer)

    def is_held_by_others(self, buffer: int) -> bool:
        """True where an exclusive claim would fail now because of another holder."""
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, buffer, 1, 0))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Drop all locks."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _set(self, kind: int, buffer: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, buffer, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True
