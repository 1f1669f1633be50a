"""How a child's end becomes an exit code, and what the supervisor makes of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from unison.ipc.errors import CapacityError, ConfigError, UnisonError
from unison.workers.process import CONTROL_FD, EXIT_CONFIG, EXIT_FAULT, EXIT_OK, PARENT_PID

PROGRAM = """
import sys
from unison.ipc import errors
from unison.workers.child import run_child

def body(parent):
    kind = parent.config["kind"]
    if kind == "ValueError":
        raise ValueError("unexpected")
    if kind:
        raise getattr(errors, kind)(*parent.config["arguments"])
    return 0

sys.exit(run_child(body))
"""


def run_body(kind: str, *arguments: str) -> tuple[int, list[dict[str, str]]]:
    """Exit code and reports of a real child whose body raises that error."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            config = {"name": "c", "log_level": "error", "kind": kind, "arguments": arguments}
            ours.send(json.dumps({"config": config, "fds": []}).encode())
            ended = subprocess.run(
                [sys.executable, "-c", PROGRAM], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, timeout=60,
                env=os.environ | {CONTROL_FD: str(theirs.fileno()), PARENT_PID: str(os.getpid())}, check=False,
            )  # fmt: skip
        reports = []
        while data := ours.recv(1 << 16):
            reports.append(json.loads(data))
    return ended.returncode, reports


def test_a_good_end() -> None:
    """The body's own code, and nothing said."""
    assert run_body("") == (EXIT_OK, [])


@pytest.mark.parametrize("kind", [ConfigError, CapacityError, UnisonError])
def test_what_cannot_be_is_told(kind: type[UnisonError]) -> None:
    """P4: a fault that starting again can't mend is reported with its name; the supervisor gives up on it."""
    arguments = ("field", "is wrong") if kind is ConfigError else ("is wrong",)
    code, reports = run_body(kind.__name__, *arguments)
    assert code == EXIT_CONFIG
    assert [report["kind"] for report in reports] == ["failed"] and kind.__name__ in reports[0]["message"]


@pytest.mark.parametrize(
    "kind", ["WorkerLostError", "DeadlineError", "VersionBusyError", "InvariantError", "ValueError"]
)
def test_what_may_pass_is_a_fault(kind: str) -> None:
    """P10, P36: nothing is reported, so the supervisor starts it again, as often as `supervisor.max_restarts`."""
    assert run_body(kind, "gone") == (EXIT_FAULT, [])
