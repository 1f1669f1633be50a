"""Rules that every module keeps: nothing unused, nothing that runs what it reads."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.source_tree import ROOT
from unison.engine.engine import Engine
from unison.engine.scheduler import Scheduler

PACKAGES = ("engine", "ipc", "workers")
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_no_unused_imports() -> None:
    """S33: ruff's F401 is on, and clean."""
    run = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "F401", "--output-format", "concise", *PACKAGES, "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stdout


def test_no_dead_parameters() -> None:
    """S38: every parameter of every function is used; names that begin with an underscore say that they aren't."""
    dead = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}({name})"
        for path in modules()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and has_body(function)
        for name in parameters(function)
        if name not in used_names(function)
    ]
    assert not dead, dead


def has_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """False for what only declares: a docstring, `...`, or an abstract method."""
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in function.body)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    given = function.args
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
        if argument.arg not in ("self", "cls") and not argument.arg.startswith("_"):
            yield argument.arg


def used_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {node.id for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Name)}


def test_nothing_unpickles() -> None:
    """P43: no pickle, and no torch.load that could run one, on any path."""
    for path, node in [(file, node) for file in modules() for node in ast.walk(ast.parse(file.read_text()))]:
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        assert not FORBIDDEN_MODULES & {name.split(".")[0] for name in (*names, module)}, path
        is_load = isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value) == "torch"
        assert not is_load, f"{path}:{getattr(node, 'lineno', 0)} calls torch.load"


def test_public_surface() -> None:
    """S2, S38: what engine and scheduler offer; a name that comes or goes is a decision, not an accident."""
    assert public(Engine) == [
        "abort", "check_invariants", "flip", "from_pretrained", "has_work", "install", "live_version", "next_ordinal",
        "pin", "retire", "rollback", "run_batch", "score", "stats", "status", "step", "submit", "take_events", "unpin",
        "versions", "warm_up",
    ]  # fmt: skip
    assert public(Scheduler) == [
        "abort", "apply", "check_invariants", "fail", "forget_version", "has_work", "knows", "num_requests",
        "num_running", "num_waiting", "on_flip", "plan", "submit", "take_events",
    ]  # fmt: skip


def public(kind: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(kind) if not name.startswith("_")]
