"""The shape of the repository: packages, sizes, and the words that files and pages may not use."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from harness.source_tree import FOLDERS, ROOT, imports_of, module_paths

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 75
MAX_PARAMETERS = 8
"""Bounds a little above what the style asks for (400, 60, 6): past these a noun wants out."""

CATCH_ALL_NAMES = {"base", "common", "core", "helpers", "manager", "misc", "utils"}


def setup_cfg() -> configparser.ConfigParser:
    """The parsed setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def test_package_list_matches_the_tree() -> None:
    """Every folder with modules is listed in setup.cfg, and none besides."""
    listed = setup_cfg()["options"]["packages"].split()
    folders = {Path("unison", *path.parent.parts) for path in module_paths()}
    assert sorted(listed) == sorted(".".join(folder.parts) for folder in folders)


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in module_paths()}
    assert not [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()]


def test_root_holds_one_module() -> None:
    """Any other *.py at the root would be published as unison/*.py."""
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


def test_no_catch_all_names() -> None:
    """S16: no core folder and no file that takes whatever has no place."""
    used = {part.removesuffix(".py") for path in module_paths() for part in path.parts}
    assert not used & CATCH_ALL_NAMES


def test_cache_is_layers() -> None:
    """S17: the cache consists of buffers, strategy and pool, each in its own module."""
    names = {path.stem for path in module_paths() if path.parent == Path("engine/cache")}
    assert {"buffer", "strategy", "pool"} <= names


def test_http_lies_in_network() -> None:
    """S20: HTTP code is the package network, the application its module app; nothing else imports an HTTP library."""
    assert Path("workers/network/app.py") in module_paths()
    for path in module_paths():
        if path.parts[:2] != ("workers", "network"):
            assert not {"starlette", "uvicorn"} & {item.module.split(".")[0] for item in imports_of(path)}, path


def test_sampling_lies_beside_the_executor() -> None:
    """S21: sampling is part of the runtime folder."""
    names = {path.stem for path in module_paths() if path.parent == Path("engine/runtime")}
    assert {"sample", "executor"} <= names


@pytest.mark.parametrize("path", module_paths(), ids=str)
def test_module_fits_a_sitting(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it owns"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"
            parameters = [arg.arg for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
            count = len([name for name in parameters if name not in ("self", "cls")])
            assert count <= MAX_PARAMETERS, f"{node.name} has {count} parameters"


@pytest.mark.parametrize("path", module_paths(), ids=str)
def test_public_things_have_docstrings(path: Path) -> None:
    """Classes and public functions say what holds; each dataclass field has a line under it.

    A method that fills in a documented one of its base class has said it there.
    """
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    bare = []
    for scope in [tree, *[node for node in tree.body if isinstance(node, ast.ClassDef)]]:
        for node in scope.body:
            is_documentable = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            is_override = isinstance(scope, ast.ClassDef) and scope.bases
            if is_documentable and not is_override and not node.name.startswith("_") and not ast.get_docstring(node):
                bare.append(node.name)
        if isinstance(scope, ast.ClassDef) and _is_dataclass(scope) and not scope.name.startswith("_"):
            bare += [f"{scope.name}.{name}" for name, text in field_docstrings(scope).items() if not text]
    assert not bare


def test_no_unimplemented_code() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError|pickle\.loads?|torch\.load)\b")
    found = {str(path): words.findall((ROOT / path).read_text(encoding="utf-8")) for path in module_paths()}
    assert not {path: hits for path, hits in found.items() if hits}


@pytest.mark.slow
def test_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    """A wheel made of this tree has every module, the native sources and the type marker; no test, no script."""
    source = tmp_path / "checkout"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "py.typed", "__init__.py", *FOLDERS):
        (source / name).symlink_to(ROOT / name)
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "--no-index",
         "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (wheel,) = tmp_path.glob("unison_rl-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    native = {path.relative_to(ROOT) for path in (ROOT / "engine/kernels/native").iterdir()}
    assert names == {str(Path("unison", path)) for path in {*module_paths(), *native, Path("py.typed")}}


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def field_docstrings(node: ast.ClassDef) -> dict[str, str]:
    """The string under each annotated field of a class; empty where there is none."""
    texts = {}
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            texts[item.target.id] = str(following.value.value) if is_text else ""
    return texts
