"""Pytest plugin: a whole run must have run every test that docs/behaviours.md names.

A run is whole when nothing narrows it: no path, -k, -m, --lf or the like. tests/gpu is excused where there is no GPU.
That table and tests name each other is the business of tests/unit/repository/test_behaviours.py, in every run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROW_ID = r"(?:V[1-6]|R[1-5]|P[0-5]\d|P[1-4]|S[1-4]?\d)"
"""An invariant (V1, R3, P2: one digit), an inherited behaviour (S12) or a pain (P07: two digits)."""


@dataclass(frozen=True)
class Behaviour:
    """One row of the table."""

    row_id: str
    """V, R, P or S with its number."""
    text: str
    """What holds."""
    tests: tuple[str, ...]
    """Node ids without parameters."""


def read_behaviours(root: Path) -> list[Behaviour]:
    """The rows of docs/behaviours.md under `root`, in its order."""
    rows = []
    for line in (root / "docs" / "behaviours.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and re.fullmatch(ROW_ID, cells[0]):
            rows.append(Behaviour(cells[0], cells[1], tuple(re.findall(r"`(tests/[^`]+)`", cells[2]))))
    return rows


def ids_in_docstring(docstring: str | None) -> list[str]:
    """The rows that a test's docstring names where it begins: `S22, P17: what it shows.`"""
    first_line = (docstring or "").strip().split("\n", 1)[0]
    match = re.match(rf"({ROW_ID}(?:, ?{ROW_ID})*):", first_line)
    return re.findall(ROW_ID, match.group(1)) if match else []


def is_whole_run(config: pytest.Config) -> bool:
    """True when nothing on the command line narrows the run."""
    narrowing = ("keyword", "markexpr", "lf", "deselect", "ignore", "ignore_glob", "collectonly", "maxfail")
    is_narrowed = any(config.getoption(option, None) for option in narrowing)
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not is_narrowed


class BehaviourAccount:
    """Notes which tests ran (skipped ones did not), and compares them with the table at its end."""

    def __init__(self) -> None:
        self._ran: set[str] = set()
        self._not_run: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for every phase of every test."""
        if report.when == "call" and (report.passed or report.failed):
            self._ran.add(report.nodeid.split("[", 1)[0])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Called by pytest after the last test: a named test that didn't run makes the run red."""
        named = {test for row in read_behaviours(session.config.rootpath) for test in row.tests}
        self._not_run = sorted(t for t in named - self._ran if not t.startswith("tests/gpu/") or _has_gpu())
        if self._not_run and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Called by pytest before its closing line."""
        if self._not_run:
            terminalreporter.section("named in docs/behaviours.md, but not run or skipped", red=True)
            for test in self._not_run:
                terminalreporter.line(f"NOT RUN {test}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the account where the run is whole, and of two processes that share it in the one that hears of all."""
    if is_whole_run(config) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(BehaviourAccount(), "unison-behaviours")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
