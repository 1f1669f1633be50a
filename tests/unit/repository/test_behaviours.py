"""docs/behaviours.md and the tests name each other; that the named ones ran is checked at the end of a whole run."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from harness.behaviours import ids_in_docstring, read_behaviours
from harness.source_tree import ROOT


@cache
def ids_by_test() -> dict[str, list[str]]:
    """Every test's node id (without parameters) and the rows that its docstring names."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for scope in [tree, *[node for node in tree.body if isinstance(node, ast.ClassDef)]]:
            middle = f"::{scope.name}" if isinstance(scope, ast.ClassDef) else ""
            file = path.relative_to(ROOT)
            for node in scope.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                    found[f"{file}{middle}::{node.name}"] = ids_in_docstring(ast.get_docstring(node))
                elif is_state_machine_case(node):
                    assert isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
                    found[f"{file}::{node.targets[0].id}::runTest"] = ids_of_machine(tree, node)
    return found


def is_state_machine_case(node: ast.stmt) -> bool:
    """True for `TestPool = PoolMachine.TestCase`, the way hypothesis gives a state machine to pytest."""
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr == "TestCase"


def ids_of_machine(tree: ast.Module, node: ast.Assign) -> list[str]:
    """The rows that a state machine's own docstring names."""
    assert isinstance(node.value, ast.Attribute)
    machine = ast.unparse(node.value.value)
    for item in tree.body:
        if isinstance(item, ast.ClassDef) and item.name == machine:
            return ids_in_docstring(ast.get_docstring(item))
    return []


def test_every_row_names_tests_that_name_it() -> None:
    tests = ids_by_test()
    wrong = []
    for row in read_behaviours(ROOT):
        if not row.tests:
            wrong.append(f"{row.row_id}: names no test")
        for test in row.tests:
            if test not in tests:
                wrong.append(f"{row.row_id}: {test} doesn't exist")
            elif row.row_id not in tests[test]:
                wrong.append(f"{row.row_id}: {test} doesn't name it in its docstring's first line")
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_row_that_a_test_names_is_in_the_table() -> None:
    listed = {row.row_id for row in read_behaviours(ROOT)}
    missing = sorted({(row_id, test) for test, ids in ids_by_test().items() for row_id in ids if row_id not in listed})
    assert not missing, "add to docs/behaviours.md:\n" + "\n".join(f"| {row} | … | `{test}` |" for row, test in missing)


def test_rows_are_in_order_and_unique() -> None:
    """Invariants V, R and P1 to P4 come first, then inherited behaviours S, then pains P01 to P50."""
    found = [row.row_id for row in read_behaviours(ROOT)]
    kinds = ("V", "R", "P", "S", "P0")

    def place(row_id: str) -> tuple[int, int]:
        is_pain = row_id[0] == "P" and len(row_id) == 3
        return kinds.index("P0" if is_pain else row_id[0]), int(row_id[1:])

    assert found == sorted(set(found), key=place)


@pytest.mark.parametrize(
    ("docstring", "ids"),
    [
        ("S22, P17: one argument.", ["S22", "P17"]),
        ("V3: spans.\n\nR1: not the first line.", ["V3"]),
        ("P1: an invariant. P01 is another row.", ["P1"]),
        ("Shows S22: not at the beginning.", []),
        ("P99: no such row.", []),
        (None, []),
    ],
)
def test_rows_are_read_from_the_beginning_of_a_docstring(docstring: str | None, ids: list[str]) -> None:
    assert ids_in_docstring(docstring) == ids


def test_the_table_is_read_whole(tmp_path: Path) -> None:
    table = tmp_path / "docs" / "behaviours.md"
    table.parent.mkdir()
    row_line = "| S1 | a | `tests/a.py::test_a`, `tests/b.py::T::test_b` |"
    table.write_text(f"| id | behaviour | test |\n|---|---|---|\n{row_line}\n")
    (row,) = read_behaviours(tmp_path)
    assert (row.row_id, row.text, row.tests) == ("S1", "a", ("tests/a.py::test_a", "tests/b.py::T::test_b"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "is_green"),
    [
        ((), False),
        (("-k", "test_runs"), True),
        (("tests/test_case.py",), True),
    ],
)
def test_a_whole_run_demands_every_named_test(tmp_path: Path, arguments: tuple[str, ...], is_green: bool) -> None:
    """A named test that was skipped makes a whole run red, and no narrowed one; one that ran is no trouble."""
    for folder in ("docs", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "docs" / "behaviours.md").write_text(
        "| S1 | a | `tests/test_case.py::test_runs` |\n| S2 | b | `tests/test_case.py::test_skipped` |\n"
    )
    (tmp_path / "tests" / "conftest.py").write_text('pytest_plugins = ["harness.behaviours"]\n')
    (tmp_path / "tests" / "test_case.py").write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('x', [1, 2])\ndef test_runs(x):\n    pass\n\n\n"
        "def test_skipped():\n    pytest.skip('on purpose')\n"
    )
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ntestpaths = tests\npythonpath = {ROOT / 'tests'}\n")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", *arguments],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert (ended.returncode == 0) is is_green, ended.stdout + ended.stderr
    named = [line for line in ended.stdout.splitlines() if line.startswith("NOT RUN")]
    assert named == ([] if is_green else ["NOT RUN tests/test_case.py::test_skipped"])
