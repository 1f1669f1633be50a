"""Reads this repository's own source: which modules there are, and what each imports. Used by tests/unit/repository."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("ipc", "engine", "workers")
"""The folders that are published, beside the root `__init__.py`."""


@dataclass(frozen=True)
class Import:
    """One import statement's target."""

    module: str
    """Dotted name; modules of ours are absolute and without `unison.`: `engine.cache.pool`."""
    line: int
    """Line in the file."""
    is_for_typing: bool
    """True inside `if TYPE_CHECKING:`, so that it never runs."""
    is_ours: bool
    """True for a module of this repository."""


def module_paths() -> list[Path]:
    """Every published module, relative to the root, in order."""
    found = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted([Path("__init__.py"), *found])


def module_name(path: Path) -> str:
    """`engine/cache/pool.py` → `engine.cache.pool`; a package's `__init__.py` → the package."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> list[Import]:
    """Every import in the module at `path` (relative to the root), also those inside functions."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))
    return list(_walk(tree, path, is_for_typing=False))


def _walk(node: ast.AST, path: Path, is_for_typing: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield _foreign_or_ours(alias.name, node.lineno, is_for_typing)
    elif isinstance(node, ast.ImportFrom):
        yield from _from_imports(node, path, is_for_typing)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _walk(child, path, True)
        for child in node.orelse:
            yield from _walk(child, path, is_for_typing)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, path, is_for_typing)


def _foreign_or_ours(name: str, line: int, is_for_typing: bool) -> Import:
    is_ours = name == "unison" or name.startswith("unison.")
    return Import(name.removeprefix("unison.") if is_ours else name, line, is_for_typing, is_ours)


def _from_imports(node: ast.ImportFrom, path: Path, is_for_typing: bool) -> Iterator[Import]:
    if node.level == 0:
        yield _foreign_or_ours(node.module or "", node.lineno, is_for_typing)
        return
    package = list(path.parent.parts)
    base = package[: len(package) - (node.level - 1)]
    module = ".".join([*base, *([node.module] if node.module else [])])
    for alias in node.names:
        # `from .cache import pool` names a module, `from .pool import KVPool` a thing inside one.
        candidate = f"{module}.{alias.name}" if module else alias.name
        is_module = (ROOT / Path(*candidate.split("."))).with_suffix(".py").is_file() or (
            ROOT / Path(*candidate.split(".")) / "__init__.py"
        ).is_file()
        yield Import(candidate if is_module else module, node.lineno, is_for_typing, True)
