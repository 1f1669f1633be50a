"""Child and Parent: how a process of ours is started, how it reports, and how it ends with its parent.

A child is a Python module that runs as `python -m`. It gets one inherited descriptor, a private SEQPACKET socket, over
which its configuration and further descriptors come in and its reports go out. It dies with its parent: the kernel
kills it (PR_SET_PDEATHSIG, prctl(2)), also when the parent gets SIGKILL and also when the child is stopped.

Owns: the start, the control socket, exit codes. Knows nothing of what the processes do. Called by the supervisor
(Child) and by the modules that it starts (Parent).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from ..ipc.errors import DeadlineError, ProcessFailedError

EXIT_OK, EXIT_FAULT, EXIT_CONFIG, EXIT_ORPHAN, EXIT_INTERRUPTED = 0, 70, 78, 71, 75
"""0: ended as told · 70: a fault of ours (EX_SOFTWARE) · 78: it can't be run as configured (EX_CONFIG) · 71: its parent
was gone before it had started (EX_OSERR) · 75: ended before its work was done, as told, and can go on later
(EX_TEMPFAIL)."""

SHARED_CORES = {"GOMP_SPINCOUNT": "5000"}
"""How long torch's threads spin at a barrier before they sleep. A child shares the cores with its siblings: with the
default, one busy core makes a training step 10 times slower, with this 2 times; alone it costs nothing measurable."""
CONTROL_FD, PARENT_PID = "UNISON_CONTROL_FD", "UNISON_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE_BYTES = 1 << 18
_MAX_FDS = 64
_LOG_TAIL_BYTES = 4000


@dataclass(frozen=True)
class Report:
    """One message of a child."""

    kind: str
    """`ready`, `beat`, `failed` …"""
    values: dict[str, Any]
    """What it says."""
    fds: tuple[int, ...] = field(default=())
    """Descriptors that came along; the receiver's to close."""


class Child:
    """The parent's view of a child. Life: spawned → reports → ended, and waited for exactly once (`close`)."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], control: socket.socket, log: Path) -> None:
        self.name = name
        self.popen = popen
        self.control = control
        self.log = log
        self.pidfd = os.pidfd_open(popen.pid)
        self.started_s = self.heard_s = monotonic()

    @staticmethod
    def spawn(
        name: str, module: str, config: Mapping[str, Any], fds: Mapping[str, int], log: Path
    ) -> Child:
        """Start `python -m module` in a session of its own; its output is appended to `log`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = SHARED_CORES | os.environ | {CONTROL_FD: str(theirs.fileno()), PARENT_PID: str(os.getpid())}
        try:
            with log.open("ab") as output:
                popen = subprocess.Popen(
                    [sys.executable, "-m", module], pass_fds=[theirs.fileno()], env=environment,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        child = Child(name, popen, ours, log)
        message = json.dumps({"config": config, "fds": list(fds)}).encode()
        socket.send_fds(ours, [message], list(fds.values()))
        ours.setblocking(False)
        return child

    @property
    def pid(self) -> int:
        """Process id."""
        return self.popen.pid

    def reports(self) -> list[Report]:
        """What has come since the last call; never waits."""
        found: list[Report] = []
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.control, _MAX_MESSAGE_BYTES, _MAX_FDS)
            except (BlockingIOError, ConnectionResetError):
                return found
            if not data:
                return found
            self.heard_s = monotonic()
            values = json.loads(data)
            found.append(Report(values.pop("kind"), values, tuple(fds)))

    def is_running(self) -> bool:
        """True until it has ended."""
        return self.popen.poll() is None

    def is_stopped(self) -> bool:
        """True while a signal has stopped it (state T)."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def terminate(self) -> None:
        """Ask it to end."""
        self.popen.terminate()

    def kill(self) -> None:
        """End it now, also when it is stopped."""
        self.popen.kill()

    def wait(self, deadline_s: float) -> int:
        """Exit code; negative is a signal's number.

        Raises:
            DeadlineError: it still runs after `deadline_s`.
        """
        try:
            return self.popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"{self.name} (pid {self.pid}) didn't end within {deadline_s:.1f} s") from None

    def close(self) -> None:
        """End it if it still runs, wait for it, and give back every descriptor."""
        if self.is_running():
            self.kill()
        self.popen.wait()
        self.control.close()
        os.close(self.pidfd)

    def story(self) -> str:
        """How it ended, with the end of its log."""
        code = self.popen.poll()
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
                tail = file.read().decode(errors="replace").strip()
        except OSError:
            tail = ""
        return f"{self.name} (pid {self.pid}) ended with {how}; the end of {self.log}:\n{tail}"


class Parent:
    """A child's view of its parent. Life: `join` at the very start → reports → the process ends."""

    def __init__(self, control: socket.socket, config: dict[str, Any], fds: dict[str, int]) -> None:
        self.control = control
        self.config = config
        self.fds = fds

    @staticmethod
    def join() -> Parent:
        """Tie this process's life to the parent's, and read what the parent has sent.

        Raises:
            ProcessFailedError: this process wasn't started by a parent of ours.
        """
        if CONTROL_FD not in os.environ:
            raise ProcessFailedError("this module is started by bin/serve; it can't be run by hand")
        die_with_parent(int(os.environ.pop(PARENT_PID)))
        control = socket.socket(fileno=int(os.environ.pop(CONTROL_FD)))
        os.set_inheritable(control.fileno(), False)
        readable, _, _ = select.select([control], [], [], 30)
        if not readable:
            raise DeadlineError("the parent sent no configuration within 30 s")
        data, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, _MAX_FDS)
        message = json.loads(data)
        control.setblocking(False)
        return Parent(control, message["config"], dict(zip(message["fds"], fds, strict=True)))

    def report(self, kind: str, fds: Sequence[int] = (), **values: Any) -> None:
        """Tell the parent; dropped where the parent doesn't read, which then sees the silence."""
        try:
            socket.send_fds(self.control, [json.dumps({"kind": kind, **values}).encode()], list(fds))
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; ends it at once where that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(EXIT_ORPHAN)
