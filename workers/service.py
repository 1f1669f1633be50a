"""Service: one child of the supervisor over all its incarnations, and the rule for starting it again.

Sans-IO but for the child itself: readings and times go in, a verdict comes out. Owns: the child, its readiness, its
restarts. Called by the supervisor.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum

from .config import SupervisorConfig
from .process import Child, Report


class Verdict(Enum):
    """What the supervisor has to do about a service."""

    FINE = "fine"
    """Nothing."""
    RESTART = "restart"
    """It has ended, or was ended; start it again."""
    DONE = "done"
    """It has ended by itself, its work done."""
    GIVE_UP = "give_up"
    """It ended once more than allowed, or said that it can't be run as configured."""


class Service:
    """Life: started → ready → (ended → started)* → stopped. One thread."""

    def __init__(
        self, name: str, config: SupervisorConfig, spawn: Callable[[], Child], done_codes: Iterable[int] = ()
    ) -> None:
        """`done_codes`: exit codes that say that its work is done; a service without any never ends by itself."""
        self.name = name
        self.child: Child | None = None
        self.is_ready = False
        self.failure = ""
        """What it said about why it can't be run."""
        self.num_starts = 0
        self.exit_code: int | None = None
        """Of the last incarnation that ended."""
        self._config = config
        self._spawn = spawn
        self._done_codes = frozenset(done_codes)
        self._ends_s: deque[float] = deque()
        self._stopped_since_s: float | None = None

    def start(self) -> Child:
        """A new incarnation."""
        self.is_ready, self._stopped_since_s, self.failure = False, None, ""
        self.num_starts += 1
        self.child = self._spawn()
        return self.child

    def take_reports(self) -> list[Report]:
        """What it has said; readiness and failure are kept here."""
        reports = self.child.reports() if self.child is not None else []
        for report in reports:
            if report.kind == "ready":
                self.is_ready = True
            elif report.kind == "failed":
                self.failure = str(report.values.get("message"))
        return reports

    def examine(self, now_s: float) -> tuple[Verdict, str]:
        """Look at the child: has it ended, been stopped, or fallen silent? A hung one is killed here.

        Returns the verdict and the story behind it; an ended child is closed.
        """
        child = self.child
        if child is None:
            return Verdict.FINE, ""
        if child.is_running():
            reason = self._why_hung(child, now_s)
            if not reason:
                return Verdict.FINE, ""
            child.kill()
            child.wait(30)
            story = f"{self.name} (pid {child.pid}) {reason} and was killed"
        else:
            story = f"{self.name}: {self.failure}" if self.failure else child.story()
        was_configured = not self.failure
        self.child, self.is_ready = None, False
        child.close()
        self.exit_code = child.popen.returncode
        if self.exit_code in self._done_codes:
            return Verdict.DONE, ""
        while self._ends_s and self._ends_s[0] < now_s - self._config.restart_window_s:
            self._ends_s.popleft()
        self._ends_s.append(now_s)
        if was_configured and len(self._ends_s) <= self._config.max_restarts:
            return Verdict.RESTART, story
        return Verdict.GIVE_UP, story

    def _why_hung(self, child: Child, now_s: float) -> str:
        if child.is_stopped():
            self._stopped_since_s = self._stopped_since_s or now_s
            if now_s - self._stopped_since_s >= self._config.stopped_s:
                return f"was stopped by a signal for {self._config.stopped_s} s"
            return ""
        self._stopped_since_s = None
        if not self.is_ready and now_s - child.started_s > self._config.start_s:
            return f"wasn't ready within {self._config.start_s} s"
        if self.is_ready and now_s - child.heard_s > self._config.hang_s:
            return f"gave no sign of life for {self._config.hang_s} s"
        return ""

    def stop(self, deadline_s: float) -> str:
        """Ask it to end, kill it at the deadline; returns how it ended."""
        child = self.child
        if child is None:
            return "not running"
        self.child, self.is_ready = None, False
        try:
            if child.is_running():
                child.terminate()
                if child.is_stopped():
                    child.popen.send_signal(signal.SIGCONT)
            code = child.wait(deadline_s)
        except TimeoutError:
            child.kill()
            code = child.wait(30)
        finally:
            child.close()
        return f"exit code {code}"
