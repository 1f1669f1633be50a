"""Address: where a run's worker listens, and the secret that its clients show; one small file in the run directory.

Owns: the file's content, its permissions, and the checks of a run directory's owner and mode. Two runs on one host have
two directories and never meet (P39). Knows nothing of sockets. Called by the worker (write) and by clients (read).
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import ConfigError, HandshakeError, WorkerLostError

FILE_NAME = "address.json"
FD_SOCKET = "fds.sock"
"""Where the supervisor hands out descriptors (the arena), in the run directory."""
MAX_SOCKET_PATH_BYTES = 107
"""Longest path of an AF_UNIX socket on Linux (unix(7): sun_path has 108 bytes, the last is NUL)."""
_MAX_FILE_BYTES = 16_384


@dataclass(frozen=True)
class Address:
    """How to reach one worker."""

    endpoint: str
    """`ipc://PATH` or `tcp://HOST:PORT`."""
    epoch: str
    """Drawn anew at each start of the worker."""
    pid: int
    """Process id of the worker."""
    token: str
    """The run's secret; shown in `Hello`."""
    curve_public_key: str = ""
    """Server key (Z85) of the CURVE handshake; empty on `ipc://`."""


def new_token() -> str:
    """A secret of 128 bits."""
    return secrets.token_hex(16)


def write_address(run_dir: Path, address: Address) -> None:
    """Publish the address at once and whole: a reader sees the former file or this one."""
    partial = run_dir / f".{FILE_NAME}.{os.getpid()}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(address), file)
    os.replace(partial, run_dir / FILE_NAME)


def read_address(run_dir: str | Path) -> Address:
    """The address in a run directory.

    Raises:
        WorkerLostError: there is none: nothing runs there (yet).
        HandshakeError: directory or file belong to another user, are open to others, or aren't what `write_address`
        wrote.
    """
    directory = Path(run_dir)
    path = directory / FILE_NAME
    try:
        check_private(directory)
        check_private(path)
        text = path.read_bytes()[:_MAX_FILE_BYTES]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise WorkerLostError(f"no worker runs in {directory}: {error.filename} isn't there") from None
    try:
        values = json.loads(text)
        address = Address(**values)
        if not all(isinstance(values[name], kind) for name, kind in _TYPES.items()):
            raise TypeError("a field is of a wrong type")
    except (ValueError, TypeError, KeyError) as error:
        raise HandshakeError(f"{path} is no address file: {error}") from error
    return address


_TYPES = {"endpoint": str, "epoch": str, "pid": int, "token": str}


def check_private(path: Path) -> None:
    """Raise HandshakeError unless `path` belongs to this user and is closed to all others."""
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise HandshakeError(f"{path} belongs to user {found.st_uid}, this process runs as {os.geteuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise HandshakeError(f"{path} has mode {stat.S_IMODE(found.st_mode):o}; only its owner may reach it: chmod go=")


def make_private_dir(path: Path) -> Path:
    """Create a directory of mode 0700, or take one that is ours and closed to others already.

    Raises:
        HandshakeError: it is there and belongs to someone else, or is open to others. ConfigError: it can't be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError("run_dir", f"is {path}, which can't be made: {error.strerror}") from error
    check_private(path)
    return path


def socket_path(run_dir: Path, name: str) -> Path:
    """Where a socket of this run lies.

    Raises:
        ConfigError: the path is longer than the system allows.
    """
    path = run_dir.absolute() / name
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            "run_dir",
            f"is {run_dir}: its socket's path would have {len(os.fsencode(path))} bytes, the system's limit is "
            f"{MAX_SOCKET_PATH_BYTES}; choose a shorter directory",
        )
    return path


def is_alive(pid: int) -> bool:
    """True while the process is there and isn't a zombie that only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
