"""Ledger: every prompt that was asked for, what came of it, and which step consumed it; one SQLite file (WAL).

Every order (one prompt, asked for once) is in exactly one state. `issued` is the only state that isn't an end:

    issued → trained      its group was part of a training step
           → dropped      not trained for a reason that is no fault: stale, zero_variance, no_signal, truncated,
                     evaluation_failed, run_ended
           → rejected     nothing came of it that could be trained on, with the reason
           → evaluated    a held-out prompt's group

A step and everything that it consumed are one transaction, so a kill leaves a step whole or not there at all (P3). A
resumed run goes back to its checkpoint's step with `rewind`: later steps are undone, what they had consumed is issued
again, with the same seeds.

Owns: the schema, the transactions. One writer, the trainer; anyone may read (docs/ledger.md).
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

from ...ipc.errors import InvariantError
from ...ipc.types import Completion, PolicyVersion, VersionSpan
from ..rollout.records import HELD_OUT, RolloutOrder, RolloutResult

LEDGER_FILE = "ledger.sqlite"
SCHEMA_VERSION = 2
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE versions (
    ordinal INTEGER PRIMARY KEY, digest TEXT NOT NULL, step INTEGER NOT NULL, live_at REAL NOT NULL);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, base_version INTEGER NOT NULL, version INTEGER NOT NULL, num_samples INTEGER NOT NULL,
    metrics TEXT NOT NULL, done_at REAL NOT NULL);
CREATE TABLE settings (
    settings_id INTEGER PRIMARY KEY, since REAL NOT NULL, configuration TEXT NOT NULL, machine TEXT NOT NULL);
CREATE TABLE orders (
    order_id INTEGER PRIMARY KEY, split TEXT NOT NULL, prompt_index INTEGER NOT NULL, prompt_id TEXT NOT NULL,
    num_samples INTEGER NOT NULL, seed INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT, detail TEXT,
    step INTEGER, prompt_tokens BLOB, num_issues INTEGER NOT NULL, issued_at REAL NOT NULL, ended_at REAL,
    settings_id INTEGER);
CREATE TABLE samples (
    order_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL,
    raw_logprobs BLOB NOT NULL, versions TEXT NOT NULL, kv_versions TEXT NOT NULL, seed INTEGER NOT NULL,
    finish_reason TEXT NOT NULL, matched_stop INTEGER, reward REAL NOT NULL, rewards TEXT NOT NULL,
    advantage REAL, text TEXT NOT NULL, kv_history TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (order_id, sample_index)) WITHOUT ROWID;
CREATE TABLE evaluations (
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, num_prompts INTEGER NOT NULL, reward REAL NOT NULL,
    done_at REAL NOT NULL);
CREATE TABLE resumes (resumed_at REAL NOT NULL, step INTEGER NOT NULL, num_steps_undone INTEGER NOT NULL);
CREATE INDEX orders_by_state ON orders (state);
CREATE INDEX orders_by_step ON orders (step);
"""
UPGRADES = {1: """
CREATE TABLE settings (
    settings_id INTEGER PRIMARY KEY, since REAL NOT NULL, configuration TEXT NOT NULL, machine TEXT NOT NULL);
ALTER TABLE orders ADD COLUMN settings_id INTEGER;
ALTER TABLE samples ADD COLUMN kv_history TEXT NOT NULL DEFAULT '[]';
"""}
"""From an older format to the next one: nothing that is there changes."""
FINAL_STATES = ("trained", "dropped", "rejected", "evaluated")
HELD_OUT_IDS = 1 << 40
"""Orders of held-out prompts have ids from here on, so that they don't shift those of training prompts."""
_STATES = ", ".join(f"'{state}'" for state in ("issued", *FINAL_STATES))
STRUCTURE = (
    ("ends", "orders in no known state", f"SELECT count(*) FROM orders WHERE state NOT IN ({_STATES})"),
    ("ends", "orders that have ended without a time, or are open with one",
     "SELECT count(*) FROM orders WHERE (state = 'issued') != (ended_at IS NULL)"),
    ("consumed", "orders trained by no step",
     "SELECT count(*) FROM orders WHERE state = 'trained' AND coalesce(step, -1) NOT IN (SELECT step FROM steps)"),
    ("groups", "trained or evaluated orders with samples missing",
     "SELECT count(*) FROM orders o WHERE state IN ('trained', 'evaluated') AND num_samples != "
     "(SELECT count(*) FROM samples s WHERE s.order_id = o.order_id)"),
    ("groups", "open orders with samples",
     "SELECT count(*) FROM orders WHERE state = 'issued' AND order_id IN (SELECT order_id FROM samples)"),
    ("groups", "samples of no order",
     "SELECT count(*) FROM samples WHERE order_id NOT IN (SELECT order_id FROM orders)"),
    ("steps", "steps whose number isn't their rank",
     "SELECT count(*) FROM (SELECT step, row_number() OVER (ORDER BY step) AS place FROM steps) WHERE step != place"),
    ("prompts", "training prompts skipped by the cursor",
     f"SELECT coalesce(max(order_id) + 1, 0) - count(*) FROM orders WHERE order_id < {HELD_OUT_IDS}"),
)  # fmt: skip
"""(rule of the audit, what was found, query that counts it); none is ever above 0 in what `Ledger` writes."""


@dataclass(frozen=True)
class OrderEnd:
    """How one order ended."""

    state: str
    """One of FINAL_STATES."""
    reason: str = ""
    """Why, for `dropped` and `rejected`."""
    detail: str = ""
    """What happened, in words."""
    result: RolloutResult | None = None
    """Its samples, where there are any; they are kept also for what was dropped."""
    advantages: tuple[float, ...] = ()
    """By sample, for `trained`."""


@dataclass(frozen=True)
class StepRecord:
    """One training step."""

    step: int
    """Counted from 1."""
    base: PolicyVersion
    """The weights whose gradient was taken."""
    version: PolicyVersion
    """The weights that came of it, live."""
    num_samples: int
    """Completions trained on."""
    metrics: Mapping[str, float]
    """As in metrics.jsonl."""


def open_to_read(path: Path) -> sqlite3.Connection:
    """A ledger, for who only reads it; the caller closes it. The path is quoted: a URI has its own meaning for # and ?
    (RFC 3986, section 2.2)."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def check_structure(db: sqlite3.Connection) -> list[tuple[str, int, str]]:
    """What doesn't add up among orders, steps and samples: (rule of the audit, how often, what). Of a run that is on,
    too."""
    found = [(rule, int(db.execute(query).fetchone()[0]), what) for rule, what, query in STRUCTURE]
    return [(rule, count, what) for rule, count, what in found if count]


class Ledger:
    """One run's ledger. Life: opened (made on first use) → `close`. One thread of one process writes."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            InvariantError: the file is a ledger of another format.
        """
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._settings_id: int | None = None
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            with self._transaction():
                self._run(SCHEMA)
                self._db.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
        found = self._one("SELECT value FROM meta WHERE key = 'schema_version'")
        if found in map(str, UPGRADES):
            with self._transaction():
                for older in range(int(found), SCHEMA_VERSION):
                    self._run(UPGRADES[older])
                self._db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION),))
        elif found != str(SCHEMA_VERSION):
            self._db.close()
            raise InvariantError(f"{path} has schema {found}; this version of unison writes {SCHEMA_VERSION}")

    # ---- writing -----------------------------------------------------------------------------------------------------

    def use_settings(self, configuration: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        """From here on orders are drawn and trained under this configuration, by a machine like this one; what was
        recorded last isn't recorded twice."""
        values = tuple(json.dumps(dict(each), sort_keys=True) for each in (configuration, machine))
        last = self._db.execute(
            "SELECT settings_id, configuration, machine FROM settings ORDER BY settings_id DESC LIMIT 1"
        ).fetchone()
        if last is None or last[1:] != values:
            with self._transaction():
                self._db.execute(
                    "INSERT INTO settings (since, configuration, machine) VALUES (?, ?, ?)", (time(), *values)
                )
        self._settings_id = int(self._one("SELECT max(settings_id) FROM settings"))

    def issue(self, orders: Sequence[RolloutOrder]) -> None:
        """Record orders before they are sent; one that is sent again counts up `num_issues`."""
        rows = [
            (each.order_id, each.split, each.prompt_index, each.prompt_id, each.num_samples, each.seed, time(),
             self._settings_id)
            for each in orders
        ]  # fmt: skip
        with self._transaction():
            self._db.executemany(
                "INSERT INTO orders (order_id, split, prompt_index, prompt_id, num_samples, seed, state, num_issues, "
                "issued_at, settings_id) VALUES (?, ?, ?, ?, ?, ?, 'issued', 1, ?, ?) "
                "ON CONFLICT (order_id) DO UPDATE SET num_issues = num_issues + 1, settings_id = excluded.settings_id",
                rows,
            )

    def end_orders(self, ends: Mapping[int, OrderEnd], step: int) -> None:
        """Record the ends of orders that no step consumed; `step` is the one that was being gathered for."""
        with self._transaction():
            self._end(ends, step)

    def commit_step(self, record: StepRecord, ends: Mapping[int, OrderEnd]) -> None:
        """A step and everything that it consumed, all or nothing."""
        with self._transaction():
            self._add_version(record.version, record.step)
            self._db.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)",
                (record.step, record.base.ordinal, record.version.ordinal, record.num_samples,
                 json.dumps(dict(record.metrics)), time()),
            )  # fmt: skip
            self._end(ends, record.step)

    def commit_evaluation(self, step: int, version: PolicyVersion, reward: float, ends: Mapping[int, OrderEnd]) -> None:
        """An evaluation and its samples."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?)",
                             (step, version.ordinal, len(ends), reward, time()))  # fmt: skip
            self._end(ends, step)

    def add_version(self, version: PolicyVersion, step: int) -> None:
        """A version that no step of this ledger made: the one that the run began with, or a resumed one."""
        with self._transaction():
            self._add_version(version, step)

    def rewind(self, step: int) -> int:
        """Back to the moment after `step`; returns the number of steps undone.

        What later steps consumed or ended is `issued` again, without samples; held-out orders after it are forgotten,
        since evaluations are made anew. Versions stay: they were live, and their ordinals aren't used again.
        """
        later = "(step > ? OR state = 'issued')"
        with self._transaction():
            num_undone = int(self._one("SELECT count(*) FROM steps WHERE step > ?", step))
            self._db.execute(
                f"DELETE FROM samples WHERE order_id IN (SELECT order_id FROM orders WHERE {later})", (step,)
            )
            self._db.execute(f"DELETE FROM orders WHERE split = ? AND {later}", (HELD_OUT, step))
            self._db.execute(
                "UPDATE orders SET state = 'issued', reason = NULL, detail = NULL, step = NULL, prompt_tokens = NULL, "
                f"ended_at = NULL WHERE {later}",
                (step,),
            )
            self._db.execute("DELETE FROM steps WHERE step > ?", (step,))
            self._db.execute("DELETE FROM evaluations WHERE step > ?", (step,))
            self._db.execute("INSERT INTO resumes VALUES (?, ?, ?)", (time(), step, num_undone))
        return num_undone

    # ---- reading -----------------------------------------------------------------------------------------------------

    @property
    def highest_ordinal(self) -> int:
        """Highest ordinal of any version of the run; -1 where there is none."""
        return int(self._one("SELECT coalesce(max(ordinal), -1) FROM versions"))

    @property
    def next_order_id(self) -> int:
        """The first id that no order of a training prompt has: the cursor."""
        return int(self._one("SELECT coalesce(max(order_id) + 1, 0) FROM orders WHERE order_id < ?", HELD_OUT_IDS))

    @property
    def next_held_out_id(self) -> int:
        """The same for held-out prompts."""
        return int(self._one("SELECT coalesce(max(order_id) + 1, ?) FROM orders WHERE order_id >= ?",
                             HELD_OUT_IDS, HELD_OUT_IDS))  # fmt: skip

    def knows(self, step: int, digest: str) -> bool:
        """Whether a version with these weights came of this step here."""
        return bool(self._one("SELECT 1 FROM versions WHERE step = ? AND digest = ?", step, digest))

    def has_evaluation(self, step: int) -> bool:
        """Whether the weights after a step were evaluated."""
        return bool(self._one("SELECT 1 FROM evaluations WHERE step = ?", step))

    def issued(self) -> list[tuple[int, int, str, int, int]]:
        """Orders of training prompts without an end: (order id, prompt index, prompt id, completions, seed), by id."""
        return self._db.execute(
            "SELECT order_id, prompt_index, prompt_id, num_samples, seed FROM orders WHERE state = 'issued' AND "
            "order_id < ? ORDER BY order_id",
            (HELD_OUT_IDS,),
        ).fetchall()

    def count_by_state(self) -> dict[str, int]:
        """Orders by state."""
        return dict(self._db.execute("SELECT state, count(*) FROM orders GROUP BY state").fetchall())

    def check(self) -> list[str]:
        """What doesn't add up, one line each; empty in a sound ledger. `issued` is an end only while a run is on."""
        return [f"{count} {what}" for _, count, what in check_structure(self._db)]

    def close(self) -> None:
        """Bring everything into the one file and let go of it."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _run(self, statements: str) -> None:
        for statement in filter(None, map(str.strip, statements.split(";"))):
            self._db.execute(statement)

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)

    def _one(self, query: str, *values: Any) -> Any:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    def _add_version(self, version: PolicyVersion, step: int) -> None:
        known = self._one("SELECT digest FROM versions WHERE ordinal = ?", version.ordinal)
        if known not in (None, version.digest):
            raise InvariantError(f"version {version.ordinal} was live with digest {known}, not {version.digest} (V1)")
        self._db.execute(
            "INSERT OR IGNORE INTO versions VALUES (?, ?, ?, ?)", (version.ordinal, version.digest, step, time())
        )

    def _end(self, ends: Mapping[int, OrderEnd], step: int) -> None:
        for order_id, end in ends.items():
            if end.state not in FINAL_STATES:
                raise InvariantError(f"order {order_id} can't become {end.state!r}; ends are {', '.join(FINAL_STATES)}")
            tokens = None if end.result is None else pack_ints(end.result.prompt_ids)
            changed = self._db.execute(
                "UPDATE orders SET state = ?, reason = ?, detail = ?, step = ?, prompt_tokens = ?, ended_at = ? "
                "WHERE order_id = ? AND state = 'issued'",
                (end.state, end.reason or None, end.detail or None, step, tokens, time(), order_id),
            ).rowcount
            if changed != 1:
                raise InvariantError(f"order {order_id} can't become {end.state}: it isn't issued; it would end twice")
            if end.result is not None:
                rows = _sample_rows(end.result, end.advantages)
                self._db.executemany(f"INSERT INTO samples VALUES ({', '.join('?' * 15)})", rows)


class _Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK where the block raises."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: Any, *_: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")


def _sample_rows(result: RolloutResult, advantages: tuple[float, ...]) -> Iterable[tuple[Any, ...]]:
    for at, (completion, reward, text) in enumerate(
        zip(result.completions, result.rewards, result.texts, strict=True)
    ):
        yield (
            result.order_id, completion.index, pack_ints(completion.token_ids), pack_floats(completion.logprobs),
            pack_floats(completion.raw_logprobs), _spans(completion.versions), _spans(completion.kv_versions),
            completion.seed, completion.finish_reason.value, completion.matched_stop, reward.total,
            json.dumps(reward.parts), advantages[at] if advantages else None, text,
            json.dumps([[epoch.end, _span_lists(epoch.kv_versions)] for epoch in completion.kv_history]),
        )  # fmt: skip


def _spans(spans: Sequence[VersionSpan]) -> str:
    return json.dumps(_span_lists(spans))


def _span_lists(spans: Sequence[VersionSpan]) -> list[list[int]]:
    return [[span.version, span.first, span.end] for span in spans]


def pack_ints(values: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return struct.pack(f"<{len(values)}i", *values)


def pack_floats(values: Sequence[float]) -> bytes:
    """Log-probs as little-endian float32, which is what they are."""
    return struct.pack(f"<{len(values)}f", *values)


def unpack_ints(data: bytes) -> tuple[int, ...]:
    """The inverse of `pack_ints`."""
    return struct.unpack(f"<{len(data) // 4}i", data)


def unpack_floats(data: bytes) -> tuple[float, ...]:
    """The inverse of `pack_floats`."""
    return struct.unpack(f"<{len(data) // 4}f", data)


def oldest_version(completion: Completion) -> int | None:
    """Ordinal of the oldest version in a completion; None for one of no tokens."""
    return min((span.version for span in completion.versions), default=None)
