"""The pages are compared with the code: file map, configuration, errors, glossary, links."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.source_tree import ROOT, module_paths
from unison.engine.config import EngineConfig
from unison.ipc import errors, types
from unison.workers.config import ServeConfig
from unison.workers.trainer.config import TrainConfig

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

UNIT_BY_SUFFIX = {
    "_tokens": "tokens", "_s": "s", "_ms": "ms", "_bytes": "bytes", "_steps": "steps", "_fraction": "share",
    "_rows": "rows",
}


def table_rows(page: Path, num_cells: int) -> list[list[str]]:
    """Cells of the table rows with `num_cells` columns whose first cell is code."""
    rows = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split(" | ")]
        if line.startswith("| `") and len(cells) == num_cells:
            rows.append(cells)
    return rows


def test_file_map_lists_every_module() -> None:
    """README's file map names each module once, with a phrase, and nothing that doesn't exist."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- file map -->\n```\n(.*?)```", text, re.DOTALL)
    assert block, "README.md has no file map"
    listed = {}
    for line in block.group(1).splitlines():
        path, _, phrase = line.partition(" ")
        listed[path] = phrase.strip()
    assert not [path for path, phrase in listed.items() if not phrase], "each has a phrase"
    assert not [path for path in listed if not (ROOT / path).exists()], "each exists"
    modules = [str(path) for path in module_paths() if path.name not in ("__init__.py", "__main__.py")]
    assert not [path for path in modules if path not in listed], "none is missing"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert not [target for target in targets if target and not (page.parent / target).exists()]


def config_fields(kind: type, prefix: str = "") -> dict[str, tuple[dataclasses.Field[Any], str]]:
    """Dotted name → field and docstring, for a configuration class and its parts."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__)
    texts = {
        item.target.id: ast.literal_eval(following.value)
        for item, following in zip(node.body, node.body[1:], strict=False)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(following, ast.Expr)
    }
    found = {}
    for item in dataclasses.fields(kind):
        if item.default_factory is not dataclasses.MISSING:
            found.update(config_fields(type(item.default_factory()), f"{prefix}{item.name}."))
        else:
            found[prefix + item.name] = (item, texts[item.name])
    return found


def bound_text(item: dataclasses.Field[Any]) -> str:
    """The bound of a field as the page writes it."""
    if item.metadata.get("choices"):
        return ", ".join(f"`{choice}`" for choice in item.metadata["choices"])
    if item.metadata.get("low") is not None:
        return f"{item.metadata['low']} to {item.metadata['high']}"
    return "`true`, `false`" if isinstance(item.default, bool) else "text"


def default_text(item: dataclasses.Field[Any]) -> str:
    """The default of a field as the page writes it: as TOML does, and `none` where there is no value."""
    if item.default is None:
        return "none"
    return f"`{str(item.default).lower() if isinstance(item.default, bool) else item.default}`"


def test_configuration_page_matches_the_code() -> None:
    """S9, P50: each field is on the page with its default, unit, bound and meaning, and the page lists no other."""
    rows = {cells[0].strip("`"): cells[1:] for cells in table_rows(ROOT / "docs/configuration.md", 5)}
    processes = {name: item for name, item in config_fields(ServeConfig).items() if not name.startswith("engine.")}
    training = {name: item for name, item in config_fields(TrainConfig).items() if not name.startswith("serve.")}
    expected = config_fields(EngineConfig) | processes | training
    assert list(rows) == list(expected)
    for name, (item, meaning) in expected.items():
        default, unit, bound, text = rows[name]
        assert (default, bound, text) == (default_text(item), bound_text(item), meaning), name
        suffix = next((s for s in UNIT_BY_SUFFIX if name.endswith(s)), None)
        assert unit == UNIT_BY_SUFFIX[suffix] if suffix else unit, f"{name}: unit"


def test_error_page_matches_the_code() -> None:
    """Each class is on the page with wire code, HTTP status and whether to retry, and the page lists no other."""
    rows = [(cells[0].strip("`"), *cells[1:4]) for cells in table_rows(ROOT / "docs/errors.md", 5)]
    assert rows == [
        (kind.__name__, f"`{row.code}`", str(row.http_status), "yes" if row.is_retryable else "no")
        for kind, row in errors.ERROR_CODES.items()
    ]


def test_reasons_on_the_error_page_match_the_code() -> None:
    """S27: every finish reason and error reason is explained, and no other."""
    rows = [cells[0].strip("`") for cells in table_rows(ROOT / "docs/errors.md", 2)]
    assert rows == [reason.value for kind in (types.FinishReason, types.ErrorReason) for reason in kind]


def test_glossary_is_sorted_and_has_no_word_twice() -> None:
    words = re.findall(r"^\*\*(.+?)\*\*", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert words == sorted(set(words), key=str.lower) and len(words) > 20
