"""Samples: browsing a run's ledger from the command line.

Owns: the table. Reads only.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...ipc.errors import ConfigError
from .ledger import LEDGER_FILE, open_to_read

WIDE_COLUMNS = 320


def open_ledger(run_dir: Path) -> sqlite3.Connection:
    """The ledger of a run, read-only.

    Raises:
        ConfigError: there is none.
    """
    path = run_dir / LEDGER_FILE
    if not path.exists():
        raise ConfigError("run_dir", f"is {run_dir}, which has no {LEDGER_FILE}")
    return open_to_read(path)


def show_samples(run_dir: Path, step: int | None, state: str | None, order: int | None, limit: int) -> None:
    """Print samples, newest first, and how the run's prompts have ended."""
    console = Console()
    if not console.is_terminal:  # for a file or another program no width is too wide
        console = Console(width=WIDE_COLUMNS)
    db = open_ledger(run_dir)
    try:
        counts = dict(db.execute("SELECT state, count(*) FROM orders GROUP BY state").fetchall())
        console.print("prompts: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
        table = Table()
        for name in ("order", "state", "step", "#", "versions", "finish", "tokens", "reward"):
            table.add_column(name, no_wrap=True)  # where room is short the texts are wrapped, and not the numbers
        table.add_column("prompt", overflow="fold")
        table.add_column("text", overflow="fold")
        for row in _rows(db, step, state, order, limit):
            table.add_row(*row)
        console.print(table)
    finally:
        db.close()


def _rows(
    db: sqlite3.Connection, step: int | None, state: str | None, order: int | None, limit: int
) -> list[list[Any]]:
    query = (
        "SELECT o.order_id, o.prompt_id, o.state, o.reason, o.step, s.sample_index, s.versions, s.finish_reason, "
        "length(s.tokens) / 4, s.reward, s.text FROM orders o LEFT JOIN samples s USING (order_id) "
        "WHERE (?1 IS NULL OR o.step = ?1) AND (?2 IS NULL OR o.state = ?2) AND (?3 IS NULL OR o.order_id = ?3) "
        "ORDER BY o.step DESC, o.order_id DESC, s.sample_index LIMIT ?4"
    )
    found = []
    for row in db.execute(query, (step, state, order, limit)):
        order_id, prompt_id, end, reason, at, index, versions, finish, length, value, text = row
        spans = "" if versions is None else " ".join(
            str(version) for version, *_ in json.loads(versions)
        )  # fmt: skip
        found.append([
            str(order_id), f"{end}: {reason}" if reason else end, str(at or ""),
            "" if index is None else str(index), spans, finish or "", "" if length is None else str(length),
            "" if value is None else f"{value:.3f}", Text(prompt_id), Text((text or "")[:200]),
        ])  # fmt: skip
    return found
