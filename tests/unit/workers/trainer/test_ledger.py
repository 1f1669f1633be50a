"""The ledger: transitions, transactions, rewinding, kills."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from harness.rollouts import completion, result
from harness.serving import wait_until
from unison.ipc.errors import InvariantError
from unison.ipc.types import PolicyVersion
from unison.workers.rollout.records import HELD_OUT, RolloutOrder
from unison.workers.trainer.ledger import (
    HELD_OUT_IDS,
    Ledger,
    OrderEnd,
    StepRecord,
    oldest_version,
    pack_floats,
    pack_ints,
    unpack_floats,
    unpack_ints,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path / "ledger.sqlite")
    yield made
    made.close()


def order(order_id: int, split: str = "train") -> RolloutOrder:
    return RolloutOrder(order_id, "me", split, order_id % 7, f"p{order_id}", 2, order_id + 100, None)


def version(ordinal: int) -> PolicyVersion:
    return PolicyVersion(ordinal, f"digest-{ordinal}")


def record(step: int, ordinal: int | None = None) -> StepRecord:
    return StepRecord(step, version(step - 1), version(step if ordinal is None else ordinal), 2, {"reward": 0.5})


def trained(order_id: int) -> OrderEnd:
    return OrderEnd("trained", result=result(order_id, [0.0, 1.0]), advantages=(-1.0, 1.0))


def evaluated() -> OrderEnd:
    return OrderEnd("evaluated", result=result(HELD_OUT_IDS, [1.0, 0.0]))


def dump(folder: Path) -> list[str]:
    """The whole content, for comparing."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        return list(db.iterdump())


def run_steps(ledger: Ledger, count: int) -> None:
    ledger.add_version(version(0), 0)
    for step in range(1, count + 1):
        ledger.issue([order(step - 1)])
        ledger.commit_step(record(step), {step - 1: trained(step - 1)})


def test_every_end(ledger: Ledger) -> None:
    """Each order ends once, in the state it is given; samples are kept also of what was dropped."""
    ledger.issue([order(at) for at in range(4)] + [order(HELD_OUT_IDS, HELD_OUT)])
    ledger.add_version(version(0), 0)
    ledger.commit_step(record(1), {0: trained(0)})
    ledger.end_orders({1: OrderEnd("dropped", "stale", "2 old", result(1, [0.0, 0.5]))}, 2)
    ledger.end_orders({2: OrderEnd("rejected", "aborted", "gone")}, 0)
    ledger.commit_evaluation(1, version(1), 0.25, {HELD_OUT_IDS: evaluated()})
    assert ledger.count_by_state() == {"trained": 1, "dropped": 1, "rejected": 1, "evaluated": 1, "issued": 1}
    assert [row[0] for row in ledger.issued()] == [3] and ledger.next_order_id == 4
    assert ledger.next_held_out_id == HELD_OUT_IDS + 1 and ledger.check() == []


def test_nothing_ends_twice(ledger: Ledger) -> None:
    """P28, P29: a second end is refused, and the transaction that holds it leaves nothing."""
    run_steps(ledger, 1)
    ledger.issue([order(1)])
    with pytest.raises(InvariantError, match="order 0 can't become trained"):
        ledger.commit_step(record(2), {1: trained(1), 0: trained(0)})
    assert ledger.count_by_state() == {"trained": 1, "issued": 1} and ledger.highest_ordinal == 1
    with pytest.raises(InvariantError, match="isn't issued"):
        ledger.end_orders({99: OrderEnd("rejected", "aborted")}, 0)
    assert ledger.check() == []


@pytest.mark.parametrize("at", range(3))
def test_a_step_that_fails_leaves_nothing(ledger: Ledger, tmp_path: Path, at: int) -> None:
    """P3: wherever among its orders it fails, and where its number is taken: step, version, ends and samples are all
    as they were, and the same step can be committed after it."""
    run_steps(ledger, 1)
    ledger.issue([order(1), order(2)])
    before = dump(tmp_path)
    ends: list[tuple[int, OrderEnd]] = [(1, trained(1)), (2, trained(2))]
    ends.insert(at, (99, trained(99)))
    with pytest.raises(InvariantError, match="order 99"):
        ledger.commit_step(record(2), dict(ends))
    with pytest.raises(sqlite3.IntegrityError):
        ledger.commit_step(StepRecord(1, version(1), version(7), 4, {}), {1: trained(1)})
    assert dump(tmp_path) == before
    ledger.commit_step(record(2), {1: trained(1), 2: trained(2)})
    assert ledger.check() == [] and ledger.count_by_state() == {"trained": 3}


@pytest.mark.parametrize("first", ["trained", "dropped", "rejected", "evaluated"])
@pytest.mark.parametrize("second", ["trained", "dropped", "rejected", "evaluated"])
def test_an_end_is_the_end(ledger: Ledger, tmp_path: Path, first: str, second: str) -> None:
    """P28: no state but `issued` is left, in whatever direction, by whichever call."""
    run_steps(ledger, 1)
    ledger.issue([order(1), order(2)])
    ledger.end_orders({1: OrderEnd(first, "why", result=result(1, [0.0, 1.0]))}, 1)
    before = dump(tmp_path)
    twice = {2: OrderEnd("rejected", "aborted"), 1: OrderEnd(second, "why")}
    for call in (
        lambda: ledger.end_orders(twice, 2), lambda: ledger.commit_step(record(2), twice),
        lambda: ledger.commit_evaluation(2, version(2), 0.0, twice),
    ):  # fmt: skip
        with pytest.raises(InvariantError, match=f"order 1 can't become {second}"):
            call()
    assert dump(tmp_path) == before


def test_orders_that_are_sent_again_are_counted(ledger: Ledger) -> None:
    """P29: the second issue is the same order: its prompt, seed and place stay, only `num_issues` goes up."""
    ledger.issue([order(0)])
    before = ledger.issued()
    ledger.issue([order(0), order(1)])
    assert ledger.issued()[:1] == before and ledger.next_order_id == 2
    assert ledger._db.execute("SELECT num_issues FROM orders ORDER BY order_id").fetchall() == [(2,), (1,)]


def test_rewinding_takes_back_evaluations(ledger: Ledger) -> None:
    """P45: those after the step are forgotten with their samples, those before it stay; a second rewind does nothing
    more."""
    run_steps(ledger, 2)
    for step in (1, 2):
        number = HELD_OUT_IDS + step
        ledger.issue([order(number, HELD_OUT)])
        ledger.commit_evaluation(
            step, version(step), 0.5, {number: OrderEnd("evaluated", result=result(number, [1, 0]))}
        )
    assert ledger.rewind(1) == 1
    assert ledger.count_by_state() == {"trained": 1, "evaluated": 1, "issued": 1}
    assert ledger._db.execute("SELECT step FROM evaluations").fetchall() == [(1,)]
    with_samples = ledger._db.execute("SELECT DISTINCT order_id FROM samples ORDER BY order_id").fetchall()
    assert with_samples == [(0,), (HELD_OUT_IDS + 1,)]
    assert ledger.rewind(1) == 0 and ledger.check() == []
    assert ledger._db.execute("SELECT step, num_steps_undone FROM resumes").fetchall() == [(1, 1), (1, 0)]


def test_rewinding_to_the_beginning(ledger: Ledger) -> None:
    """P28: step 0 undoes all; every prompt is open again with its seed, and ordinals aren't used again."""
    run_steps(ledger, 4)
    ledger.issue([order(4)])
    ledger.end_orders({4: OrderEnd("dropped", "stale", result=result(4, [0.0, 1.0]))}, 5)
    assert ledger.rewind(0) == 4
    assert [(row[0], row[4]) for row in ledger.issued()] == [(at, at + 100) for at in range(5)]
    assert ledger._one("SELECT count(*) FROM samples") == 0 and ledger.highest_ordinal == 4 and ledger.check() == []


def test_rewind(ledger: Ledger) -> None:
    """P28: later steps are undone and their prompts open again with their seeds; versions and ordinals stay."""
    run_steps(ledger, 3)
    ledger.issue([order(HELD_OUT_IDS, HELD_OUT), order(3)])
    ledger.commit_evaluation(3, version(3), 1.0, {HELD_OUT_IDS: evaluated()})
    assert ledger.rewind(1) == 2
    assert [(row[0], row[4]) for row in ledger.issued()] == [(1, 101), (2, 102), (3, 103)]
    assert ledger.count_by_state() == {"trained": 1, "issued": 3}
    assert ledger.highest_ordinal == 3 and ledger.next_order_id == 4 and ledger.check() == []
    assert ledger.knows(1, "digest-1") and not ledger.knows(1, "digest-2")
    ledger.issue([order(1)])
    ledger.commit_step(record(2, 4), {1: trained(1)})
    assert ledger.check() == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("UPDATE orders SET state = 'lost' WHERE order_id = 0", "no known state"),
        ("UPDATE orders SET step = 9 WHERE order_id = 0", "trained by no step"),
        ("DELETE FROM samples WHERE sample_index = 1", "samples missing"),
        ("DELETE FROM orders WHERE order_id = 0", "samples of no order"),
        ("DELETE FROM steps WHERE step = 1", "isn't their rank"),
        ("DELETE FROM orders WHERE order_id = 0", "skipped by the cursor"),
    ],
)  # fmt: skip
def test_check_finds_damage(ledger: Ledger, tmp_path: Path, damage: str, problem: str) -> None:
    run_steps(ledger, 2)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        db.execute(damage)
        db.commit()
    assert any(problem in line for line in ledger.check())


def test_readers_see_it_while_it_is_written(ledger: Ledger, tmp_path: Path) -> None:
    """Anyone may read with plain SQLite; blobs are little-endian int32 and float32."""
    run_steps(ledger, 1)
    with closing(sqlite3.connect(f"file:{tmp_path / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        tokens, logprobs, versions, text = db.execute(
            "SELECT tokens, raw_logprobs, versions, text FROM samples WHERE sample_index = 1"
        ).fetchone()
    assert unpack_ints(tokens) == completion().token_ids and unpack_floats(logprobs) == completion().raw_logprobs
    assert versions == "[[0, 0, 3]]" and text == "text"
    assert unpack_ints(pack_ints(())) == () and unpack_floats(pack_floats((0.5,))) == (0.5,)


def test_a_reader_keeps_what_it_began_with(ledger: Ledger, tmp_path: Path) -> None:
    """Who reads neither waits for the writer nor holds it up, and sees whole steps only."""
    run_steps(ledger, 1)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite", timeout=0, isolation_level=None)) as reader:
        counts = "SELECT (SELECT count(*) FROM steps), (SELECT count(*) FROM samples)"
        reader.execute("BEGIN")
        assert reader.execute(counts).fetchone() == (1, 2)
        ledger.issue([order(1)])
        ledger.commit_step(record(2), {1: trained(1)})
        assert reader.execute(counts).fetchone() == (1, 2)
        reader.execute("COMMIT")
        assert reader.execute(counts).fetchone() == (2, 4)


def test_another_format_is_refused(tmp_path: Path) -> None:
    made = Ledger(tmp_path / "ledger.sqlite")
    made._db.execute("UPDATE meta SET value = '99'")
    made.close()
    with pytest.raises(InvariantError, match="schema 99"):
        Ledger(tmp_path / "ledger.sqlite")


def test_oldest_version() -> None:
    assert oldest_version(completion(version=4)) == 4 and oldest_version(completion(length=0)) is None


WRITER = """
import sys
from harness.rollouts import result
from unison.ipc.types import PolicyVersion
from unison.workers.rollout.records import RolloutOrder
from unison.workers.trainer.ledger import Ledger, OrderEnd, StepRecord
ledger = Ledger(sys.argv[1])
step = 0
while True:
    step += 1
    ids = range(4 * step - 4, 4 * step)
    ledger.issue([RolloutOrder(at, "me", "train", 0, "p", 2, at, None) for at in ids])
    version = PolicyVersion(step, "d")
    ledger.commit_step(StepRecord(step, version, version, 8, {}),
                       {at: OrderEnd("trained", result=result(at, [0.0, 1.0])) for at in ids})
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_kill_leaves_whole_steps(tmp_path: Path) -> None:
    """P3: SIGKILL at any instruction of the writer; every step that is there is whole."""
    path = tmp_path / "ledger.sqlite"
    for _ in range(3):
        path.unlink(missing_ok=True)
        for name in ("-wal", "-shm"):
            Path(f"{path}{name}").unlink(missing_ok=True)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True,
            env={**__import__("os").environ, "PYTHONPATH": ":".join(sys.path)},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(20)]
            process.send_signal(signal.SIGKILL)
            wait_until(lambda: process.poll() is not None, "the writer's end")
        ledger = Ledger(path)
        try:
            assert ledger.check() == [] and ledger.highest_ordinal >= int(said[-1])
        finally:
            ledger.close()
