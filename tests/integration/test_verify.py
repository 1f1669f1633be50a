"""bin/verify on short real runs: everything comes out bit for bit, and whatever is tampered with is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness.training import FAST, query, train, write_task
from unison.engine.config import EngineConfig
from unison.engine.engine import Engine
from unison.ipc.types import SamplingParams
from unison.workers.trainer.audit import audit
from unison.workers.trainer.ledger import LEDGER_FILE
from unison.workers.trainer.stored import StoredRun
from unison.workers.verify.cli import verify

pytestmark = pytest.mark.slow

WAVERING = """
import pathlib
from unison.workers.rollout import Reward
calls = [0]
def wavering(completions, **_):
    calls[0] += 1
    return [0.01 * (calls[0] % 2)] * len(completions)
def judge(completions, **_):
    with pathlib.Path(__file__).with_suffix(".calls").open("a") as marks:
        marks.write("x")
    return [0.01 * len(each[0]["content"]) for each in completions]
"""
"""A function that gives two values for the same text, and one that counts its calls, as a judge is paid for."""
KEEP = ("--set", "checkpoint.keep_versions=all", "--set", "checkpoint.keep=1")


@pytest.fixture(scope="module")
def sync_run(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in synchronous mode, every version kept."""
    folder = tmp_path_factory.mktemp("verify")
    task = write_task(folder / "letters.py")
    return train(folder / "r", chat_model, task, *FAST, *KEEP, "--steps", "4", "--temperature", "0.8").run_dir


@pytest.fixture(scope="module")
def carried_run(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run whose samples cross updates with their KV, with rewards that can't be asked for again."""
    folder = tmp_path_factory.mktemp("carried")
    functions = "wavering, Reward(judge, is_deterministic=False), Reward(vowels, is_deterministic=True)"
    task = write_task(folder / "letters.py", functions, WAVERING)
    return train(
        folder / "r", chat_model, task, *FAST, *KEEP, "--steps", "8", "--mode", "async", "--max-tokens", "64",
        "--set", "rollout.on_update=carry", "--set", "rollout.max_staleness=3", "--set", "rollout.top_k=40",
    ).run_dir  # fmt: skip


@pytest.fixture
def copy(sync_run: Path, tmp_path: Path) -> Path:
    """The synchronous run, to be tampered with."""
    shutil.copytree(sync_run, tmp_path / "r")
    return tmp_path / "r"


def run_verify(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON."""
    ended = CliRunner().invoke(verify, [*map(str, arguments), "--json"])
    assert ended.stdout.startswith("{"), (ended.output, ended.exception)
    return ended.exit_code, json.loads(ended.stdout)


def tamper(run_dir: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(run_dir / LEDGER_FILE)) as db:
        assert db.execute(statement, values).rowcount == 1
        db.commit()


def blob(run_dir: Path, column: str, order: int = 0, index: int = 1) -> bytes:
    ((value,),) = query(run_dir, f"SELECT {column} FROM samples WHERE order_id = {order} AND sample_index = {index}")
    return bytes(value)


def different(run_dir: Path, *arguments: str) -> tuple[dict[int, list[str]], list[str]]:
    """Of order 0: kinds of differences by sample, and the texts of the one that was tampered with."""
    code, found = run_verify(run_dir, "--order", "0", *arguments)
    assert code == 1
    kinds = {each["index"]: [item["kind"] for item in each["differences"]] for each in found["samples"]}
    texts = [item["text"] for each in found["samples"] if each["index"] == 1 for item in each["differences"]]
    return kinds, texts


def test_a_synchronous_run_is_proved(sync_run: Path) -> None:
    """R3, V1, S35: every sample of every version, trained and evaluated, at a temperature: bits, prompt, text,
    reward."""
    ended = subprocess.run(
        [sys.executable, "-m", "unison.workers.verify", "--all", str(sync_run), "--json"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert not found["unchecked"] and not found["damaged"]
    assert found["num_samples"] == {"bit-equal": len(found["samples"])} and len(found["samples"]) == 4 * 16 + 8
    assert found["max_difference"] == 0.0
    versions = {row[0] for row in query(sync_run, "SELECT DISTINCT versions FROM samples")}
    assert len({json.loads(each)[0][0] for each in versions}) == 5


def test_an_asynchronous_run_is_proved(carried_run: Path) -> None:
    """V3, V6: samples whose KV crosses updates are rebuilt under the versions that wrote it; the ledger adds up too."""
    crossing = [each for (each,) in query(carried_run, "SELECT versions FROM samples") if len(json.loads(each)) > 1]
    assert crossing, "none crosses an update"
    calls = (carried_run.parent / "letters.calls").read_text()
    code, found = run_verify("--all", carried_run)
    assert code == 0 and set(found["num_samples"]) == {"bit-equal"}, found["samples"]
    with StoredRun(carried_run) as run:
        report = audit(run)
    assert report.is_sound and not [each for each in report.findings if each.unchecked], report.findings
    unchecked = " ".join(found["unchecked"])
    assert "judge isn't deterministic" in unchecked and "wavering gave two values" in unchecked
    assert "vowels" not in unchecked and (carried_run.parent / "letters.calls").read_text() == calls


def test_what_is_shown(sync_run: Path) -> None:
    """A table of one sample of a group, and the counts."""
    ended = CliRunner().invoke(verify, [str(sync_run), "--order", "3", "--sample", "2"])
    assert ended.exit_code == 0 and "bit-equal: 1" in ended.stdout and "1 samples of" in ended.stdout


@pytest.mark.parametrize(
    ("statement", "kinds", "says"),
    [
        ("UPDATE samples SET seed = 12345 WHERE order_id = 0 AND sample_index = 1", ["seed"], "its seed is 12345"),
        ("UPDATE samples SET text = 'x' || text WHERE order_id = 0 AND sample_index = 1", ["text"], "from character 0"),
        ("UPDATE samples SET reward = reward + 0.5 WHERE order_id = 0 AND sample_index = 1", ["reward"],
         "the functions give"),
        ("UPDATE samples SET rewards = '{\"vowels\": 9.0}' WHERE order_id = 0 AND sample_index = 1", ["reward"],
         "vowels gave 9.0"),
        ("UPDATE samples SET rewards = '{}' WHERE order_id = 0 AND sample_index = 1", ["reward"], "vowels gave None"),
        ("UPDATE samples SET versions = replace(versions, '[[0,', '[[1,'), kv_versions = replace(kv_versions, '[[0,', "
         "'[[1,') WHERE order_id = 0 AND sample_index = 1", ["version", "version", "tokens", "logprob", "logprob"],
         "it names version 1, and was to be made by 0"),
        ("UPDATE samples SET versions = replace(versions, '[[0,', '[[1,') WHERE order_id = 0 AND sample_index = 1",
         ["version", "version"], "token 0 is of version 1, and the KV"),
        ("UPDATE samples SET versions = replace(versions, '[[0,', '[[99,') WHERE order_id = 0 AND sample_index = 1",
         ["version", "version"], "version 99 is nowhere"),
        ("UPDATE samples SET finish_reason = 'stop' WHERE order_id = 0 AND sample_index = 1", ["finish"], "'length'"),
        ("UPDATE samples SET tokens = substr(tokens, 1, 9) WHERE order_id = 0 AND sample_index = 1", ["record"],
         "tokens is cut off"),
    ],
)  # fmt: skip
def test_a_changed_column_is_named(statement: str, kinds: list[str], says: str, copy: Path) -> None:
    """P46, V3: in the one sample where it was changed, with what differs; the others of its group stay proved."""
    tamper(copy, statement)
    found, texts = different(copy)
    given = found.pop(1)
    assert [kind for kind in given if kind in kinds] == given and set(kinds) >= set(given) and given, given
    assert given[0] == kinds[0] and any(says in text for text in texts), texts
    assert all(kind == [] for kind in found.values())


def test_a_changed_token_is_named(copy: Path) -> None:
    """P46: the first place at which another token is drawn, and the log-prob there."""
    tokens = list(struct.unpack("<8i", blob(copy, "tokens")))
    tokens[3] = tokens[3] % 200 + 10
    data = struct.pack("<8i", *tokens)
    tamper(copy, "UPDATE samples SET tokens = ? WHERE order_id = 0 AND sample_index = 1", data)
    found, texts = different(copy, "--no-rewards")
    assert found[1][:1] == ["tokens"] and set(found[1]) == {"tokens", "logprob", "text"}
    assert texts[0].startswith(f"token 3 is {tokens[3]}, ")


@pytest.mark.parametrize(("column", "name"), [("logprobs", "log-prob"), ("raw_logprobs", "raw log-prob")])
def test_a_changed_bit_of_a_log_prob_is_named(column: str, name: str, copy: Path) -> None:
    """S35: the last bit of one log-prob."""
    data = bytearray(blob(copy, column))
    data[4 * 5] ^= 1
    tamper(copy, f"UPDATE samples SET {column} = ? WHERE order_id = 0 AND sample_index = 1", bytes(data))
    found, texts = different(copy)
    assert found == {0: [], 1: ["logprob"], 2: [], 3: []} and texts[0].startswith(f"token 5 has the {name} ")


def test_an_orders_seed_and_prompt(copy: Path) -> None:
    """P40: the order's seed is derived anew; a prompt's token is compared with the rendered prompt."""
    tamper(copy, "UPDATE orders SET seed = 7 WHERE order_id = 0")
    found, _ = different(copy)
    assert {tuple(kinds) for kinds in found.values()} == {("seed", "seed")}
    (prompt,) = query(copy, "SELECT prompt_tokens FROM orders WHERE order_id = 1")[0]
    changed = bytes(prompt[:8] + struct.pack("<i", 30) + prompt[12:])
    tamper(copy, "UPDATE orders SET prompt_tokens = ? WHERE order_id = 1", changed)
    code, found_1 = run_verify(copy, "--order", "1")
    assert code == 1 and all(each["differences"][0]["kind"] == "prompt" for each in found_1["samples"])
    assert "token 2 of the prompt is 30, the task's prompt gives" in found_1["samples"][0]["differences"][0]["text"]


def test_two_versions_that_changed_places(copy: Path) -> None:
    """V1, P09: digests under each other's ordinals: the version whose log-probs they are is named."""
    (first,), (second,) = query(copy, "SELECT digest FROM versions WHERE ordinal IN (1, 2) ORDER BY ordinal")
    tamper(copy, "UPDATE versions SET digest = ? WHERE ordinal = 1", second)
    tamper(copy, "UPDATE versions SET digest = ? WHERE ordinal = 2", first)
    code, found = run_verify(copy, "--step", "2")
    kinds = {each["kind"] for sample in found["samples"] for each in sample["differences"]}
    assert code == 1 and {"version", "logprob"} <= kinds <= {"version", "logprob", "tokens"}
    assert all(
        sample["differences"][0]["text"] == "it names version 1, and its log-probs are those of version 2"
        for sample in found["samples"]
    )


def kept(run_dir: Path, ordinal: int) -> Path:
    ((digest,),) = query(run_dir, f"SELECT digest FROM versions WHERE ordinal = {ordinal}")
    return run_dir / "versions" / f"{digest}.version"


def test_a_changed_byte_of_a_kept_version(copy: Path) -> None:
    """P13, V1: where the bytes are the only way to a version its samples differ, by file and tensor; else it is said
    that they are damaged."""
    path = kept(copy, 2)
    content = bytearray(path.read_bytes())
    content[content.index(b"]]}") + 50] ^= 4
    path.write_bytes(content)
    code, found = run_verify("--all", copy)
    assert code == 1 and found["num_samples"] == {"bit-equal": len(found["samples"])}, "another way led there"
    (text,) = found["damaged"].values()
    assert str(path) in text and "model." in text
    shutil.rmtree(copy / "checkpoints")
    code, found = run_verify("--all", copy)
    named = {spans[0][0] for spans in (json.loads(each) for (each,) in query(copy, "SELECT versions FROM samples"))}
    assert code == 1 and named == {0, 1, 2, 3, 4}
    kinds = {each["kind"] for sample in found["samples"] for each in sample["differences"]}
    assert kinds == {"weights"} and set(found["num_samples"]) == {"bit-equal", "different"}
    damaged = [sample for sample in found["samples"] if sample["differences"]]
    assert all(str(path) in sample["differences"][0]["text"] for sample in damaged)


def test_weights_that_were_not_kept(copy: Path) -> None:
    """What can't be proved is counted apart, by version, with an exit code of its own; the rest is still looked at."""
    shutil.rmtree(copy / "versions")
    code, found = run_verify("--all", copy)
    assert code == 3 and set(found["num_samples"]) == {"bit-equal", "unverifiable"}
    assert set(found["missing"]) == {"1", "2", "3"}, "the first is the model's, the last one a checkpoint's"
    assert run_verify("--all", copy, "--allow-unverifiable")[0] == 0
    tamper(copy, "UPDATE samples SET seed = 1 WHERE order_id = 5 AND sample_index = 0")
    code, found = run_verify("--step", "2", copy)
    assert code == 1 and found["num_samples"]["different"] == 1


def test_a_model_that_is_not_the_one_it_began_with(copy: Path, chat_model: Path, tmp_path: Path) -> None:
    """V1: a directory whose weights were replaced isn't taken for the first version."""
    from harness.tiny_directory import write_tiny_chat_directory

    write_tiny_chat_directory(tmp_path / "other", seed=5)
    for (configuration,) in query(copy, "SELECT configuration FROM settings"):
        changed = configuration.replace(str(chat_model), str(tmp_path / "other"))
        tamper(copy, "UPDATE settings SET configuration = ?", changed)
    stored = (copy / "train.json").read_text()
    (copy / "train.json").write_text(stored.replace(str(chat_model), str(tmp_path / "other")))
    shutil.rmtree(copy / "checkpoints")
    code, found = run_verify(copy, "--order", "0")
    assert code == 1 and "is said to have" in found["samples"][0]["differences"][0]["text"]
    assert run_verify(copy, "--order", "0", "--weights", str(chat_model))[1]["num_samples"] == {"bit-equal": 4}


def test_a_run_that_did_not_claim_exactness(copy: Path) -> None:
    """Where bits can't be asked for, near is near and far is different; what was drawn must be likely."""
    data = bytearray(blob(copy, "logprobs"))
    data[4 * 5] ^= 3
    tamper(copy, "UPDATE samples SET logprobs = ? WHERE order_id = 0 AND sample_index = 1", bytes(data))
    for claim in ({"is_exact": False}, {"is_exact": True, "kernels": {"name": "other"}, "attention": {}}):
        with closing(sqlite3.connect(copy / LEDGER_FILE)) as db:
            db.execute("UPDATE settings SET machine = ?", (json.dumps(claim),))
            db.commit()
        code, found = run_verify(copy, "--order", "0")
        assert code == 0 and found["num_samples"] == {"bit-equal": 3, "within tolerance": 1}
        assert 0.0 < found["max_difference"] < 1e-5 and any("bits: " in text for text in found["unchecked"])
    assert run_verify(copy, "--order", "0", "--tolerance", "0")[0] == 1


def test_a_file_of_samples(copy: Path, chat_model: Path, tmp_path: Path) -> None:
    """A sample travels as JSON: exported from a run, or written by whoever used the engine."""
    exported = tmp_path / "one.json"
    ended = CliRunner().invoke(verify, [str(copy), "--step", "3", "--sample", "2", "--export", str(exported)])
    assert ended.exit_code == 0 and "4 samples" in ended.output
    values = json.loads(exported.read_text())
    assert set(values["versions"]) == {"2"} and len(values["samples"]) == 4
    assert run_verify(exported)[1]["num_samples"] == {"bit-equal": 4}
    values["samples"][1]["completion"]["token_ids"][2] ^= 1
    exported.write_text(json.dumps(values))
    code, found = run_verify(exported)
    assert code == 1 and [len(each["differences"]) > 0 for each in found["samples"]] == [False, True, False, False]

    engine = Engine.from_pretrained(chat_model, EngineConfig(dtype="float32"))
    params = SamplingParams(max_tokens=9, seed=11, top_p=0.9, frequency_penalty=0.4, logit_bias=((40, 3.0),))
    output = engine.run_batch([[5, 60, 70]], params, n=2)[0]
    own = {
        "format": 1, "model": str(chat_model), "engine": {"dtype": "float32"},
        "versions": {engine.live_version.ordinal: engine.live_version.digest},
        "samples": [
            {"prompt_ids": output.prompt_ids, "params": dataclasses.asdict(params),
             "completion": dataclasses.asdict(completion)}
            for completion in output.completions
        ],
    }  # fmt: skip
    exported.write_text(json.dumps(own))
    assert run_verify(exported)[1]["num_samples"] == {"bit-equal": 2}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format": 2}, "format"), ({"nothing": 1}, "source.nothing"), ({"samples": [{}]}, "source"),
        ({"samples": [{"prompt_ids": [1], "params": {}, "completion": {"no": 1}}]}, "samples[0].completion.no"),
        ({"engine": {"dtype": "int8"}}, "dtype"),
    ],
)  # fmt: skip
def test_a_file_of_another_form(changes: dict[str, Any], field: str, chat_model: Path, tmp_path: Path) -> None:
    """P4, P50: refused by the name of the key."""
    values = {"format": 1, "model": str(chat_model), "versions": {}, "samples": []} | changes
    (tmp_path / "s.json").write_text(json.dumps(values))
    ended = CliRunner().invoke(verify, [str(tmp_path / "s.json")])
    assert getattr(ended.exception, "field", "") == field, ended.exception


def test_what_is_not_chosen(sync_run: Path) -> None:
    """A run needs a choice, and a choice that finds nothing is an error."""
    assert CliRunner().invoke(verify, [str(sync_run)]).exception.field == "source"  # type: ignore[union-attr]
    assert CliRunner().invoke(verify, [str(sync_run), "--order", "99999"]).exception.field == "order"  # type: ignore[union-attr]
    assert CliRunner().invoke(verify, [str(sync_run / "none")]).exception.field == "source"  # type: ignore[union-attr]
