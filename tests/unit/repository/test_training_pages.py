"""docs/training.md and docs/ledger.md against the code, and their examples run."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from harness.serving import serving
from harness.source_tree import ROOT
from harness.tiny_directory import write_tiny_chat_directory
from unison.workers.rollout.builtin import BUILTIN_TASKS
from unison.workers.rollout.records import REJECTIONS
from unison.workers.rollout.tasks import load_task
from unison.workers.trainer.config import RECIPES
from unison.workers.trainer.ledger import FINAL_STATES, Ledger

TRAINING = (ROOT / "docs/training.md").read_text(encoding="utf-8")
LEDGER = (ROOT / "docs/ledger.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TRAINING, re.DOTALL)


def table(page: str, head: str) -> dict[str, list[str]]:
    """Rows of the table whose first header cell is `head`, by first cell."""
    found: dict[str, list[str]] = {}
    is_inside = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split(" | ")]
        if is_inside and line.startswith("| `"):
            found[cells[0].strip("`")] = cells[1:]
        is_inside = (is_inside and line.startswith("|")) or cells[0] == head
    return found


def test_algorithms_and_tasks() -> None:
    """Every algorithm is in the table, every built-in task is named."""
    assert list(table(TRAINING, "`--algorithm`")) == list(RECIPES)
    assert all(f"`{name}`" in TRAINING for name in BUILTIN_TASKS)


def test_states_and_reasons() -> None:
    """States and reasons of the ledger's page are the code's."""
    assert list(table(LEDGER, "state")) == ["issued", *(each for each in table(LEDGER, "state") if each != "issued")]
    assert set(table(LEDGER, "state")) == {"issued", *FINAL_STATES}
    assert {name: cells[0] for name, cells in table(LEDGER, "reason of a rejection").items()} == REJECTIONS


def test_schema(tmp_path: Path) -> None:
    """Every table and column of the ledger is on its page."""
    Ledger(tmp_path / "ledger.sqlite").close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {name: [row[1] for row in db.execute(f"PRAGMA table_info({name})")] for name in names}
    listed = table(LEDGER, "table")
    assert set(listed) == set(columns)
    for name, cells in listed.items():
        assert set(columns[name]) <= set(re.findall(r"`(\w+)`", " ".join(cells))), name


def test_the_task_example_is_a_task(tmp_path: Path) -> None:
    """The page's task file loads as it stands there."""
    (example,) = [block for block in BLOCKS if "Task(" in block]
    (tmp_path / "capitals.py").write_text(example)
    task = load_task(f"{tmp_path / 'capitals.py'}:capitals")
    assert len(task.train) == 3 and [reward.label for reward in task.rewards] == ["exact", "short"]


@pytest.mark.slow
def test_the_custom_loop_runs(tmp_path: Path) -> None:
    """A loop of one's own, as the page has it, on a running server: exact, and every step a live version."""
    (example,) = [block for block in BLOCKS if "TrainablePolicy" in block]
    assert len([line for line in example.splitlines() if line.strip()]) <= 50, "short enough to be read at once"
    model = tmp_path / "model"
    write_tiny_chat_directory(model)
    with serving(tmp_path / "r", model, "--no-http", "--set", "engine.cache.num_tokens=4096") as run:
        text = example.replace('"DIR"', repr(str(run.run_dir))).replace('"models/smollm2-135m"', repr(str(model)))
        text = re.sub(r"PROMPTS = .*", "PROMPTS = [[50, 60], [51, 61], [52]]", text)
        (tmp_path / "loop.py").write_text(text)
        ended = subprocess.run(
            [sys.executable, "loop.py"], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=120, check=False,
        )
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [(int(step), int(ordinal)) for step, ordinal, _ in lines] == [(at, at + 1) for at in range(5)]
