"""StoredOrder and StoredSample: what a ledger holds, read back as it was written, or refused by column.

Owns: reading rows of any format that `Ledger` has written, and the settings that an order was drawn under. Knows
nothing of what is checked. Called by the audit and by bin/verify.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...ipc.errors import ConfigError, UnisonError
from ...ipc.types import KVEpoch, VersionSpan
from .config import CONFIG_FILE, TrainConfig
from .ledger import LEDGER_FILE, open_to_read, unpack_floats, unpack_ints

ITEM_BYTES = 4
"""Of a token id or a log-prob in a blob."""


class DamagedSampleError(UnisonError):
    """A column of a sample can't be what `Ledger` wrote."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(f"{column} {message}")
        self.column = column


@dataclass(frozen=True)
class StoredSample:
    """One completion as the ledger keeps it."""

    order_id: int
    """Its group."""
    index: int
    """Which of the group's completions."""
    token_ids: tuple[int, ...]
    """Generated tokens."""
    logprobs: tuple[float, ...]
    """Under the distribution that each was drawn from."""
    raw_logprobs: tuple[float, ...]
    """Under the full softmax."""
    versions: tuple[VersionSpan, ...]
    """Version whose weights computed each token's logits."""
    kv_versions: tuple[VersionSpan, ...]
    """Version whose weights computed the KV of each position of prompt and completion."""
    kv_history: tuple[KVEpoch, ...]
    """What earlier tokens were drawn over, where KV was computed again."""
    seed: int
    """Key of its draws."""
    finish_reason: str
    """`stop` or `length`."""
    matched_stop: int | None
    """The stop token that ended it."""
    reward: float
    """Weighted sum."""
    rewards: dict[str, float]
    """By reward function."""
    advantage: float | None
    """What it was trained with; None where it wasn't."""
    text: str
    """As the reward functions read it."""

    @staticmethod
    def of(row: dict[str, Any]) -> StoredSample:
        """
        Raises:
            DamagedSampleError: a column isn't of the form that it is written in.
        """
        counts = {name: _checked_blob(name, row[name]) for name in ("tokens", "logprobs", "raw_logprobs")}
        if len(set(counts.values())) != 1:
            said = ", ".join(f"{count} {name}" for name, count in counts.items())
            raise DamagedSampleError("tokens", f"and log-probs differ in number: {said}")
        rewards = _json("rewards", row["rewards"])
        if not isinstance(rewards, dict) or not all(isinstance(each, (int, float)) for each in rewards.values()):
            raise DamagedSampleError("rewards", "aren't numbers by name")
        if not isinstance(row["reward"], float) or not isinstance(row["text"], str):
            raise DamagedSampleError("reward", "is no number, or text no text")
        history = _json("kv_history", row.get("kv_history", "[]"))
        try:
            epochs = tuple(KVEpoch(int(end), _spans("kv_history", spans)) for end, spans in history)
        except (TypeError, ValueError) as error:
            raise DamagedSampleError("kv_history", "is no list of [end, spans]") from error
        return StoredSample(
            row["order_id"], row["sample_index"], unpack_ints(row["tokens"]), unpack_floats(row["logprobs"]),
            unpack_floats(row["raw_logprobs"]), _spans("versions", _json("versions", row["versions"])),
            _spans("kv_versions", _json("kv_versions", row["kv_versions"])), epochs, row["seed"],
            row["finish_reason"], row["matched_stop"], row["reward"], rewards, row["advantage"], row["text"],
        )  # fmt: skip

    @cached_property
    def named_versions(self) -> frozenset[int]:
        """Every version that had a part in it: in its tokens, or in the KV below them."""
        spans = [*self.versions, *self.kv_versions]
        spans += [span for epoch in self.kv_history for span in epoch.kv_versions]
        return frozenset(span.version for span in spans)

    def span_problem(self, num_prompt: int) -> str | None:
        """What is wrong with the spans; None where tokens and KV are covered without a gap (V3)."""
        count = len(self.token_ids)
        if not _tiles(self.versions, count, count):
            return f"versions don't cover {count} tokens once: {_shown(self.versions)}"
        computed = num_prompt + max(0, count - 1)
        if not _tiles(self.kv_versions, computed, num_prompt + count):
            return f"kv_versions don't cover {computed} positions once: {_shown(self.kv_versions)}"
        last = 0
        for epoch in self.kv_history:
            if not last < epoch.end < count or not _tiles(epoch.kv_versions, num_prompt + epoch.end - 1, 1 << 62):
                return f"an epoch of kv_history can't be: up to token {epoch.end}, {_shown(epoch.kv_versions)}"
            last = epoch.end
        return None


@dataclass(frozen=True)
class RunSettings:
    """What orders were drawn under."""

    config: TrainConfig | None
    """The run's configuration; None where it can't be read."""
    machine: dict[str, Any]
    """What computed: kernels, attention, whether the self-test found the machine exact, versions; empty where nothing
    was recorded."""
    trouble: str = ""
    """Why there is no configuration."""


@dataclass(frozen=True)
class StoredOrder:
    """One prompt that was asked for once, with what came of it."""

    order_id: int
    """The ledger's key."""
    split: str
    """`train` or `held_out`."""
    prompt_index: int
    """Which of the split's prompts."""
    prompt_id: str
    """Its id."""
    num_samples: int
    """Completions that were asked for."""
    seed: int
    """Key of their draws."""
    state: str
    """How it ended."""
    reason: str
    """Why, or empty."""
    step: int | None
    """The step that consumed it, or that was gathered for."""
    settings_id: int | None
    """Which settings; None in a ledger that recorded none."""
    prompt_tokens: Any
    """The blob as it is there."""
    samples: tuple[StoredSample, ...]
    """By index, those that can be read."""
    damage: dict[int, DamagedSampleError]
    """By index: those that can't."""

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of the rendered prompt.

        Raises:
            DamagedSampleError: they aren't there, or cut off.
        """
        if not _checked_blob("prompt_tokens", self.prompt_tokens):
            raise DamagedSampleError("prompt_tokens", "is empty")
        return unpack_ints(self.prompt_tokens)


class StoredRun:
    """A run's ledger and configuration, read-only. Life: opened → read → `close`. One thread."""

    def __init__(self, run_dir: Path) -> None:
        """
        Raises:
            ConfigError: there is no ledger, or what is there is none.
        """
        path = run_dir / LEDGER_FILE
        if not path.exists():
            raise ConfigError("run_dir", f"is {run_dir}, which has no {LEDGER_FILE}")
        self.run_dir = run_dir
        self.db = open_to_read(path)
        self.db.row_factory = sqlite3.Row
        try:
            self.schema = self.one("SELECT value FROM meta WHERE key = 'schema_version'")
            self.settings = self._read_settings()
        except sqlite3.DatabaseError as error:
            self.db.close()
            raise ConfigError("run_dir", f"is {run_dir}, whose {LEDGER_FILE} can't be read: {error}") from error

    def one(self, query: str, *values: Any) -> Any:
        """First value of the first row."""
        row = self.db.execute(query, values).fetchone()
        return None if row is None else row[0]

    def rows(self, query: str, *values: Any) -> Iterator[dict[str, Any]]:
        """Rows as mappings."""
        return (dict(row) for row in self.db.execute(query, values))

    def settings_of(self, settings_id: int | None) -> RunSettings:
        """What an order was drawn under; the run's present configuration where nothing was recorded with it."""
        found = self.settings.get(settings_id)
        return found if found is not None else self.settings[None]

    def orders(self, where: str = "1", *values: Any) -> Iterator[StoredOrder]:
        """Orders with their samples, by id."""
        query = f"SELECT * FROM orders WHERE {where} ORDER BY order_id"
        for row in self.db.execute(query, values):
            order = dict(row)
            samples, damage = [], {}
            for item in self.rows("SELECT * FROM samples WHERE order_id = ? ORDER BY sample_index", order["order_id"]):
                try:
                    samples.append(StoredSample.of(item))
                except DamagedSampleError as error:
                    damage[int(item["sample_index"])] = error
            yield StoredOrder(
                order["order_id"], order["split"], order["prompt_index"], order["prompt_id"], order["num_samples"],
                order["seed"], order["state"], order["reason"] or "", order["step"], order.get("settings_id"),
                order["prompt_tokens"], tuple(samples), damage,
            )  # fmt: skip

    def close(self) -> None:
        """Close the database."""
        self.db.close()

    def __enter__(self) -> StoredRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_settings(self) -> dict[int | None, RunSettings]:
        found: dict[int | None, RunSettings] = {None: self._present_settings()}
        if self.one("SELECT 1 FROM sqlite_master WHERE name = 'settings'"):
            for row in self.rows("SELECT * FROM settings ORDER BY settings_id"):
                found[row["settings_id"]] = _settings(row["configuration"], row["machine"])
        return found

    def _present_settings(self) -> RunSettings:
        try:
            return _settings((self.run_dir / CONFIG_FILE).read_text(encoding="utf-8"), "{}")
        except OSError as error:
            return RunSettings(None, {}, f"{CONFIG_FILE}: {error.strerror}")


def _settings(configuration: str, machine: str) -> RunSettings:
    try:
        return RunSettings(TrainConfig.from_dict(json.loads(configuration)), dict(json.loads(machine)))
    except (ConfigError, ValueError, TypeError, AttributeError) as error:
        return RunSettings(None, {}, f"the recorded configuration can't be read: {error}")


def _checked_blob(name: str, data: Any) -> int:
    """Number of items in a blob."""
    if not isinstance(data, bytes):
        raise DamagedSampleError(name, "isn't there")
    if len(data) % ITEM_BYTES:
        raise DamagedSampleError(name, f"is cut off: {len(data)} bytes aren't whole items of {ITEM_BYTES}")
    return len(data) // ITEM_BYTES


def _json(name: str, text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError) as error:
        raise DamagedSampleError(name, f"is no JSON: {error}") from error


def _spans(name: str, values: Any) -> tuple[VersionSpan, ...]:
    try:
        return tuple(VersionSpan(*map(int, each)) for each in values)
    except (TypeError, ValueError, struct.error) as error:
        raise DamagedSampleError(name, "is no list of [version, first, end]") from error


def _tiles(spans: tuple[VersionSpan, ...], least: int, most: int) -> bool:
    """Whether spans cover [0, end) once and in order, for an end in [least, most]."""
    end = 0
    for span in spans:
        if span.first != end or span.end <= span.first:
            return False
        end = span.end
    return least <= end <= most


def _shown(spans: tuple[VersionSpan, ...]) -> str:
    return ", ".join(f"{span.version}: {span.first}…{span.end}" for span in spans) or "there are none"
