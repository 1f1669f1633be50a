"""The audit: a sound ledger is said to be sound, and whatever is done to one is named by its rule."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness.ledgers import LEDGER_CONFIG, LedgerWriter, write_ledger
from unison.workers.trainer.audit import RULES, AuditReport, audit
from unison.workers.trainer.cli import train
from unison.workers.trainer.ledger import HELD_OUT_IDS, LEDGER_FILE, SCHEMA_VERSION, Ledger
from unison.workers.trainer.stored import StoredRun


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_ledger(tmp_path / "r")


def report_of(run_dir: Path, **options: Any) -> AuditReport:
    with StoredRun(run_dir) as run:
        return audit(run, **options)


def broken(run_dir: Path) -> dict[str, list[str]]:
    """The rules that are broken, with the places."""
    return {each.rule: each.examples for each in report_of(run_dir).findings if each.count}


def tamper(run_dir: Path, *statements: str) -> None:
    with closing(sqlite3.connect(run_dir / LEDGER_FILE)) as db:
        for statement in statements:
            assert db.execute(statement).rowcount != 0, statement
        db.commit()


def test_a_sound_ledger(run_dir: Path) -> None:
    """V6, P28: every rule is looked at and holds, also over a resume, a lag and drops; the run is over."""
    report = report_of(run_dir)
    assert report.is_sound and broken(run_dir) == {}
    assert [finding.rule for finding in report.findings] == list(RULES)
    assert not [finding for finding in report.findings if finding.unchecked]
    assert report.state == "over" and report.counts == {
        "trained": 8, "dropped": 2, "rejected": 3, "evaluated": 2, "samples": 24, "steps": 4, "versions": 7,
        "resumes": 1,
    }  # fmt: skip


def test_what_was_dropped_is_compared(run_dir: Path) -> None:
    """P28: dropping is a bias, and the audit says how large."""
    trained, stale, flat = report_of(run_dir).bias
    assert (trained.what, trained.groups, trained.samples) == ("trained", 8, 16)
    assert trained.length == 3.5 and trained.reward == 0.5
    assert (stale.what, stale.groups, stale.samples) == ("dropped: stale", 1, 2)
    assert (flat.what, flat.groups) == ("dropped: zero_variance", 1)
    assert (flat.minus_trained_length, flat.minus_trained_reward) == (0.0, -0.25)


SPANS = "UPDATE samples SET versions = '{}' WHERE order_id = 0 AND sample_index = 1"


@pytest.mark.parametrize(
    ("rule", "says", "statements"),
    [
        ("spans", "order 0, sample 1: versions don't cover 4 tokens", [SPANS.format("[[0, 0, 3]]")]),
        ("spans", "0: 0…2, 0: 3…4", [SPANS.format("[[0, 0, 2], [0, 3, 4]]")]),
        ("spans", "versions is no list", [SPANS.format("[[0, 0]]")]),
        ("spans", "kv_versions don't cover", ["UPDATE samples SET kv_versions = '[[0, 0, 3]]' WHERE order_id = 0"]),
        ("spans", "an epoch of kv_history", [
            "UPDATE samples SET kv_history = '[[9, [[0, 0, 3]]]]' WHERE order_id = 0",
        ]),
        ("consumed", "step 1 says 4 samples, 2 name it", ["UPDATE orders SET step = 2 WHERE order_id = 0"]),
        ("consumed", "step 2 says 4 samples, 6 name it", ["UPDATE orders SET step = 2 WHERE order_id = 0"]),
        ("consumed", "step 1 says 4 samples, 6 name it", [
            "UPDATE orders SET state = 'trained', step = 1, reason = NULL WHERE reason = 'zero_variance'",
        ]),
        ("consumed", "1 orders trained by no step", ["UPDATE orders SET step = 99 WHERE order_id = 0"]),
        ("consumed", "step 1 consumed no sample", ["UPDATE orders SET state = 'dropped' WHERE step = 1"]),
        ("prompts", "order 1 has the seed of order 0: it was drawn twice", [
            "UPDATE orders SET seed = (SELECT seed FROM orders WHERE order_id = 0) WHERE order_id = 1",
        ]),
        ("prompts", "1 training prompts skipped", ["DELETE FROM orders WHERE order_id = 2"]),
        ("seeds", "order 1 has seed 5, which isn't what", ["UPDATE orders SET seed = 5 WHERE order_id = 1"]),
        ("seeds", "its seed is 5, its order's", [
            "UPDATE samples SET seed = 5 WHERE order_id = 1 AND sample_index = 0",
        ]),
        ("known", "version 0 is nowhere", ["DELETE FROM versions WHERE ordinal = 0"]),
        ("known", "version 77 is nowhere", [SPANS.format("[[77, 0, 4]]")]),
        ("versions", "no version lies between 0 and 2", ["DELETE FROM versions WHERE ordinal = 1"]),
        ("versions", "version 7 says that step 9 made it, step 4 does", [
            "UPDATE versions SET step = 9 WHERE ordinal = 7",
        ]),
        ("versions", "isn't the one that step 2 made", ["UPDATE versions SET digest = 'other' WHERE ordinal = 5"]),
        ("versions", "version 6 says that step 1 made it", ["UPDATE versions SET step = 1 WHERE ordinal = 6"]),
        ("versions", "version 8 came of no step", ["INSERT INTO versions VALUES (8, 'd', 0, 0.0)",
                                                   "DELETE FROM resumes"]),
        ("steps", "step 2 names version 1, which is missing", ["DELETE FROM versions WHERE ordinal = 1"]),
        ("steps", "step 4 began from version 1, which is of step 1", [
            "UPDATE steps SET base_version = 1 WHERE step = 4",
        ]),
        ("steps", "isn't their rank", ["DELETE FROM steps WHERE step = 2"]),
        ("steps", "step 3 began from version 5, step 2 made 2", ["DELETE FROM resumes"]),
        ("staleness", "it is 2 versions old, at most 1", ["UPDATE samples SET versions = '[[0, 0, 3]]', kv_versions = "
         "'[[0, 0, 4]]' WHERE sample_index = 0 AND order_id = (SELECT max(order_id) FROM orders WHERE step = 2)",
         "UPDATE steps SET base_version = 2 WHERE step = 2"]),
        ("staleness", "version 6 is newer than 0", [SPANS.format("[[6, 0, 4]]")]),
        ("blobs", "order 0, sample 0: tokens is cut off: 11 bytes", [
            "UPDATE samples SET tokens = substr(tokens, 1, 11) WHERE order_id = 0 AND sample_index = 0",
        ]),
        ("blobs", "differ in number: 3 tokens, 2 logprobs, 3 raw_logprobs", [
            "UPDATE samples SET logprobs = substr(logprobs, 1, 8) WHERE order_id = 0 AND sample_index = 0",
        ]),
        ("blobs", "prompt_tokens is cut off", ["UPDATE orders SET prompt_tokens = x'010203' WHERE order_id = 0"]),
        ("blobs", "prompt_tokens isn't there", ["UPDATE orders SET prompt_tokens = NULL WHERE order_id = 0"]),
        ("numbers", "a log-prob or reward isn't finite", [
            "UPDATE samples SET raw_logprobs = x'0000c07f0000c07f0000c07f' WHERE order_id = 0 AND sample_index = 0",
        ]),
        ("numbers", "a log-prob or reward isn't finite", ["UPDATE samples SET reward = 9e999 WHERE order_id = 1"]),
        ("numbers", "its advantage is None", ["UPDATE samples SET advantage = NULL WHERE order_id = 0"]),
        ("advantages", "the rewards give", ["UPDATE samples SET advantage = 0.5 WHERE order_id = 0 AND "
                                            "sample_index = 1"]),
        ("advantages", "the rewards give", [
            "UPDATE samples SET reward = 0.75 WHERE order_id = 0 AND sample_index = 1",
        ]),
        ("groups", "samples missing", ["DELETE FROM samples WHERE order_id = 0 AND sample_index = 1"]),
        ("groups", "samples of no order", ["UPDATE samples SET order_id = 999 WHERE order_id = 0"]),
        ("ends", "it ended with 'aborted'", ["UPDATE samples SET finish_reason = 'aborted' WHERE order_id = 0"]),
        ("ends", "no known state", ["UPDATE orders SET state = 'lost' WHERE order_id = 0"]),
        ("ends", "without a time", ["UPDATE orders SET ended_at = NULL WHERE order_id = 0"]),
        ("evaluations", "mean reward 0.75, its samples give 0.5", ["UPDATE evaluations SET reward = 0.75"]),
        ("evaluations", "0 prompts of 1", [f"UPDATE orders SET step = 9 WHERE order_id = {HELD_OUT_IDS}"]),
        ("evaluations", "of version 3, samples are of [0]", ["UPDATE evaluations SET version = 3 WHERE step = 0"]),
    ],
)  # fmt: skip
def test_what_is_tampered_with_is_named(rule: str, says: str, statements: list[str], run_dir: Path) -> None:
    """V3, V6, P28: spans, consumption, versions, staleness, seeds, blobs, numbers: each rule finds its breach."""
    tamper(run_dir, *statements)
    found = broken(run_dir)
    assert rule in found, found
    assert any(says in text for text in found[rule]), found[rule]


def test_a_rule_that_cannot_be_checked_says_so(run_dir: Path) -> None:
    """Where nothing was recorded of the run's settings staleness has no bound, unless one is given."""
    tamper(run_dir, "DELETE FROM settings", "UPDATE orders SET settings_id = NULL")
    unchecked = {each.rule for each in report_of(run_dir).findings if each.unchecked}
    assert unchecked == {"staleness"} and report_of(run_dir).is_sound
    assert report_of(run_dir, max_staleness=1).is_sound
    strict = report_of(run_dir, max_staleness=0)
    assert not strict.is_sound and not [each for each in strict.findings if each.unchecked]
    (run_dir / "train.json").write_text(json.dumps(LEDGER_CONFIG.to_dict()))
    assert not [each for each in report_of(run_dir).findings if each.unchecked] and report_of(run_dir).is_sound


def test_a_batch_may_serve_several_steps(run_dir: Path) -> None:
    """S37: a step without fresh samples is sound where the run's settings say that a batch is used again."""
    tamper(run_dir, "INSERT INTO versions VALUES (8, 'd5', 5, 0.0)", "INSERT INTO steps VALUES (5, 7, 8, 4, '{}', 0.0)")
    assert broken(run_dir) == {"consumed": ["step 5 consumed no sample"]}
    values = LEDGER_CONFIG.to_dict()
    values["rollout"]["mode"], values["algorithm"]["num_iterations"] = "sync", 2
    with closing(sqlite3.connect(run_dir / LEDGER_FILE)) as db:
        db.execute("UPDATE settings SET configuration = ?", (json.dumps(values),))
        db.commit()
    assert report_of(run_dir, max_staleness=1).is_sound
    tamper(run_dir, "UPDATE steps SET num_samples = 3 WHERE step = 5")
    assert broken(run_dir)["consumed"] == ["step 5 says 3 samples, step 4 with the same batch 4"]


def test_a_run_that_is_not_over(tmp_path: Path) -> None:
    """Open orders are no fault: the run is on, by its supervisor's word, or was stopped."""
    writer = LedgerWriter(tmp_path / LEDGER_FILE)
    with closing(writer.ledger):
        writer.train()
        writer.order()
        assert report_of(tmp_path).is_sound and report_of(tmp_path).state.startswith("stopped")
        (tmp_path / "supervisor.json").write_text(json.dumps({"pid": os.getpid()}))
        assert report_of(tmp_path).state == "on"
        (tmp_path / "supervisor.json").write_text(json.dumps({"pid": 2**22 + 1}))
        assert report_of(tmp_path).state.startswith("stopped")


def test_a_damaged_file_is_said_to_be_damaged(run_dir: Path) -> None:
    """P13: pages that SQLite can't read break the rule `file`; a file that is no ledger is refused."""
    path = run_dir / LEDGER_FILE
    content = bytearray(path.read_bytes())
    page = content.index(b"it raised") // 4096 * 4096  # of the orders
    content[page : page + 64] = bytes(range(64))
    path.write_bytes(content)
    assert "file" in broken(run_dir)
    path.write_bytes(b"no database" * 1000)
    ended = CliRunner().invoke(train, ["audit", str(run_dir)])
    assert "can't be read" in str(ended.exception)


def test_the_command(run_dir: Path) -> None:
    """Exit code 0 for a sound ledger and 1 for another; a table for people, JSON for scripts."""
    shown = CliRunner().invoke(train, ["audit", str(run_dir)])
    assert shown.exit_code == 0 and "sound" in shown.output and "dropped: zero_variance" in shown.output
    tamper(run_dir, "UPDATE orders SET seed = 5 WHERE order_id = 1")
    shown = CliRunner().invoke(train, ["audit", str(run_dir)])
    assert shown.exit_code == 1 and "broken" in shown.output and "order 1 has seed 5" in shown.output
    values = json.loads(CliRunner().invoke(train, ["audit", str(run_dir), "--json"]).output)
    assert values["is_sound"] is False and values["state"] == "over" and len(values["findings"]) == len(RULES)
    assert CliRunner().invoke(train, ["audit", str(run_dir / "nothing")]).exception.field == "run_dir"


def test_a_ledger_of_the_format_before(run_dir: Path) -> None:
    """It is read as it is, and gains what it lacks when its run goes on; nothing that is there changes."""
    tamper(
        run_dir, "UPDATE meta SET value = '1'", "UPDATE orders SET settings_id = NULL",
    )  # fmt: skip
    with closing(sqlite3.connect(run_dir / LEDGER_FILE)) as db:
        db.execute("DROP TABLE settings")
        db.execute("ALTER TABLE orders DROP COLUMN settings_id")
        db.execute("ALTER TABLE samples DROP COLUMN kv_history")
        before = {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in ("orders", "steps", "versions")}
        texts = db.execute("SELECT text, tokens FROM samples").fetchall()
    assert report_of(run_dir, max_staleness=1).is_sound
    Ledger(run_dir / LEDGER_FILE).close()
    with closing(sqlite3.connect(run_dir / LEDGER_FILE)) as db:
        assert db.execute("SELECT value FROM meta").fetchone() == (str(SCHEMA_VERSION),)
        assert db.execute("SELECT text, tokens FROM samples").fetchall() == texts
        assert [row[:-1] for row in db.execute("SELECT * FROM orders")] == before["orders"]
        assert db.execute("SELECT * FROM steps").fetchall() == before["steps"]
        assert db.execute("SELECT DISTINCT kv_history FROM samples").fetchall() == [("[]",)]
    assert report_of(run_dir, max_staleness=1).is_sound


def test_settings_are_recorded_once(tmp_path: Path) -> None:
    """An order says what it was drawn under; a run that goes on as it was records nothing new."""
    writer = LedgerWriter(tmp_path / LEDGER_FILE)
    with closing(writer.ledger) as ledger:
        first = writer.order()
        ledger.use_settings(LEDGER_CONFIG.to_dict(), {"is_exact": True})
        second = writer.order()
        ledger.use_settings(LEDGER_CONFIG.to_dict() | {"seed": 4}, {"is_exact": True})
        third = writer.order()
    with StoredRun(tmp_path) as run:
        orders = {order.order_id: run.settings_of(order.settings_id) for order in run.orders()}
    assert [orders[at].config.seed for at in (first, second, third) if orders[at].config] == [3, 3, 4]
    assert orders[first] is not orders[third] and orders[first].machine == {"is_exact": True}
