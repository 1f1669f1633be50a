"""docs/failures.md against the code: every test, error, wire code, setting and default that it names."""

from __future__ import annotations

import ast
import re

import pytest
from harness.source_tree import ROOT
from unison.ipc import errors
from unison.ipc.client_config import ClientConfig
from unison.ipc.types import ErrorReason, FinishReason
from unison.workers.config import ServeConfig
from unison.workers.trainer.config import TrainConfig

PAGE = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| what fails")]


def test_every_row_names_a_test_that_exists() -> None:
    for row in ROWS:
        named = re.findall(r"`(tests/[^`]+)::(\w+)`", row)
        assert named, row
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_every_test_of_faults_is_on_the_page() -> None:
    for path in sorted((ROOT / "tests/faults").glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                assert f"`tests/faults/{path.name}::{node.name}`" in PAGE, node.name


def test_errors_and_codes_exist() -> None:
    rows = {kind.__name__: row for kind, row in errors.ERROR_CODES.items()}
    assert set(re.findall(r"`(\w+Error)`", PAGE)) <= rows.keys()
    for name, code, status in re.findall(r"`(\w+Error)` \(`(\w+)`(?:, (\d+))?", PAGE):
        assert rows[name].code == code and status in ("", str(rows[name].http_status)), name
    reasons = {reason.value for kind in (ErrorReason, FinishReason) for reason in kind}
    assert set(re.findall(r"reason `(\w+)`", PAGE)) <= reasons


def test_defaults_are_the_codes_own() -> None:
    quoted = re.findall(r"([\d.]+)(?: s| restarts| messages)? \(`([\w.]+)`\)", PAGE)
    assert len(quoted) >= 8
    configurations = (ServeConfig(), TrainConfig(), ClientConfig())
    for number, name in quoted:
        value: object = next(each for each in configurations if hasattr(each, name.split(".")[0]))
        for part in name.split("."):
            value = getattr(value, part)
        assert value == pytest.approx(float(number)), name
