"""When a child is started again, and when not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.serving import wait_until
from unison.workers.config import SupervisorConfig
from unison.workers.process import Child
from unison.workers.service import Service, Verdict

CONFIG = SupervisorConfig(start_s=30.0, hang_s=20.0, stopped_s=2.0, max_restarts=2, restart_window_s=100.0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A service whose child is a real process that only sleeps."""
    import socket

    def spawn() -> Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with (tmp_path / "log").open("ab") as log:
            popen = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=log, stderr=log)
        theirs.close()
        ours.setblocking(False)
        return Child("sleeper", popen, ours, tmp_path / "log")

    made = Service("sleeper", CONFIG, spawn)
    made.start()
    yield made
    made.stop(0.0)


def pid_of(service: Service) -> int:
    assert service.child is not None
    return service.child.pid


def end(service: Service, number: int = signal.SIGKILL) -> None:
    assert service.child is not None
    os.kill(service.child.pid, number)
    wait_until(lambda: service.child is None or not service.child.is_running(), "the child to end")


def test_restarts_are_bounded_within_a_window(service: Service) -> None:
    """P36: two restarts within the window, the third end gives up; outside it, counting begins anew."""
    started = service.child.started_s if service.child else 0.0
    for now_s, expected in ((1, Verdict.RESTART), (2, Verdict.RESTART), (200, Verdict.RESTART), (201, Verdict.RESTART),
                            (202, Verdict.GIVE_UP)):  # fmt: skip
        end(service)
        verdict, story = service.examine(started + now_s)
        assert verdict is expected and "signal SIGKILL" in story
        if verdict is Verdict.RESTART:
            service.start()


def test_a_silent_child_is_killed(service: Service) -> None:
    """P35, P36: a process that is ready and says nothing for `hang_s` is killed and started again."""
    service.is_ready = True
    assert service.child is not None
    heard = service.child.heard_s
    assert service.examine(heard + 19)[0] is Verdict.FINE
    verdict, story = service.examine(heard + 21)
    assert verdict is Verdict.RESTART and "no sign of life for 20.0 s" in story


def test_a_start_that_takes_too_long(service: Service) -> None:
    assert service.child is not None
    verdict, story = service.examine(service.child.started_s + 31)
    assert verdict is Verdict.RESTART and "wasn't ready within 30.0 s" in story


def test_a_stopped_child_is_killed_after_a_while(service: Service) -> None:
    """P34: SIGSTOP is no way to keep the machine: after `stopped_s` the process is replaced; SIGCONT before is fine."""
    assert service.child is not None
    now, child = service.child.started_s, service.child
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(child.is_stopped, "the child to stop")
    assert service.examine(now + 1)[0] is Verdict.FINE
    os.kill(child.pid, signal.SIGCONT)
    wait_until(lambda: not child.is_stopped(), "the child to go on")
    assert service.examine(now + 4)[0] is Verdict.FINE
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(child.is_stopped, "the child to stop")
    assert service.examine(now + 5)[0] is Verdict.FINE
    verdict, story = service.examine(now + 8)
    assert verdict is Verdict.RESTART and "stopped by a signal" in story


def test_one_that_says_it_cannot_run_is_not_started_again(service: Service) -> None:
    service.failure = "model: is nothing"
    end(service)
    assert service.examine(1e9) == (Verdict.GIVE_UP, "sleeper: model: is nothing")


def test_stop_ends_a_stopped_child_too(service: Service) -> None:
    os.kill(pid_of(service), signal.SIGSTOP)
    assert service.stop(5.0).startswith("exit code")
