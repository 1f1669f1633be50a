"""Audit: what a run's ledger proves by itself, and what in it doesn't add up. Nothing is loaded and nothing computed.

Each rule of RULES is looked at on its own and named where it is broken, with the first places. Beside them stands the
comparison of what was dropped with what was trained, since dropping is a bias (P28).

Owns: the rules. Whether samples are what the weights give is bin/verify's business. Reads only, also
while the run is on. Called by the command line, through audit_table.py.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ...ipc.address import is_alive
from ...ipc.types import FinishReason
from ..rollout.records import HELD_OUT, TRAIN
from ..rollout.runner import order_seed
from ..supervisor import STATE_FILE
from .advantages import ESTIMATORS, overlong_penalty
from .config import TrainConfig
from .ledger import FINAL_STATES, check_structure
from .stored import DamagedSampleError, StoredOrder, StoredRun, StoredSample

RULES = {
    "file": "the database is whole",
    "ends": "each order has one state, and one end where it has ended",
    "prompts": "no prompt was skipped, and none was drawn twice",
    "steps": "steps are counted without a gap, each begun from the version that the one before made",
    "versions": "ordinals have no gap but at a resume, and each version has a step or a resume that it came of",
    "consumed": "each trained sample was consumed by exactly one step, and each step says how many it consumed",
    "groups": "a group has all the samples that were asked for, and nothing else has any",
    "blobs": "tokens and log-probs are whole and of one length",
    "numbers": "log-probs, rewards and advantages are finite",
    "spans": "versions cover each sample's tokens and KV once",
    "known": "every version that a sample names is known",
    "staleness": "no trained sample is older than the run allows, and none is newer than the weights in training",
    "seeds": "each order's seed follows from the run's, each sample's is its order's",
    "advantages": "advantages follow from the rewards of the step",
    "evaluations": "an evaluation is of one version, with all its prompts and their mean reward",
}
"""Name → what must hold."""
MAX_EXAMPLES = 5


@dataclass
class Finding:
    """One rule, and how often it is broken."""

    rule: str
    """Name in RULES."""
    count: int = 0
    """Places where it is broken."""
    examples: list[str] = field(default_factory=list)
    """The first of them, in words."""
    unchecked: str = ""
    """Why it could not be checked; empty where it was."""


@dataclass(frozen=True)
class BiasRow:
    """Groups that ended alike."""

    what: str
    """`trained`, or `dropped: REASON`."""
    groups: int
    """Groups."""
    samples: int
    """Their completions."""
    length: float | None
    """Mean tokens; None where nothing was drawn."""
    reward: float | None
    """Mean reward."""
    minus_trained_length: float | None = None
    """Less that of the trained ones."""
    minus_trained_reward: float | None = None
    """Less that of the trained ones."""


@dataclass(frozen=True)
class AuditReport:
    """What came of an audit."""

    state: str
    """Whether the run is on, was stopped, or is over."""
    counts: dict[str, int]
    """Orders by state, samples, steps, versions, resumes."""
    findings: tuple[Finding, ...]
    """One per rule."""
    bias: tuple[BiasRow, ...]
    """What was trained, and what was dropped."""

    @property
    def is_sound(self) -> bool:
        """True where no rule is broken."""
        return not any(finding.count for finding in self.findings)


def audit(run: StoredRun, max_staleness: int | None = None) -> AuditReport:
    """Look at every order, step, version and sample of a run. `max_staleness` overrides the run's own bound."""
    auditor = _Auditor(run, max_staleness)
    try:
        auditor.look()
    except sqlite3.DatabaseError as error:
        auditor.add("file", f"it can't be read to its end: {error}")
    return AuditReport(_state(run), auditor.counts, tuple(auditor.findings.values()), auditor.bias())


@dataclass(frozen=True)
class _Graded:
    """What a trained group's advantages come from."""

    order_id: int
    config: TrainConfig
    rewards: dict[int, float]  # shaped, of those that took part
    advantages: dict[int, float | None]  # of all
    is_whole: bool

    @staticmethod
    def of(order: StoredOrder, config: TrainConfig) -> _Graded:
        """Of one group."""
        kept = {each.index: _shaped_reward(each, config) for each in order.samples if _is_kept(each, config)}
        is_whole = not order.damage and len(order.samples) == order.num_samples
        return _Graded(order.order_id, config, kept, {each.index: each.advantage for each in order.samples}, is_whole)


class _Auditor:
    """One pass over a ledger."""

    def __init__(self, run: StoredRun, max_staleness: int | None) -> None:
        self._run = run
        self._max_staleness = max_staleness
        self.findings = {rule: Finding(rule) for rule in RULES}
        self.counts: dict[str, int] = {}
        self._versions: dict[int, dict[str, Any]] = {}
        self._steps: dict[int, dict[str, Any]] = {}
        self._num_consumed: dict[int, int] = {}
        self._places: dict[tuple[str, int], int] = {}
        self._rewards: dict[int, list[_Graded]] = {}
        self._seeds = {each.config.seed for each in run.settings.values() if each.config is not None}
        self._groups: dict[str, list[tuple[int, int, float]]] = {}

    def add(self, rule: str, text: str, count: int = 1) -> None:
        """Count places where a rule is broken."""
        finding = self.findings[rule]
        finding.count += count
        if len(finding.examples) < MAX_EXAMPLES:
            finding.examples.append(text)

    def look(self) -> None:
        """All of it."""
        run = self._run
        for (text,) in run.db.execute("PRAGMA quick_check(3)"):
            if text != "ok":
                self.add("file", str(text))
        for rule, count, what in check_structure(run.db):
            self.add(rule, f"{count} {what}", count)
        self._versions = {row["ordinal"]: row for row in run.rows("SELECT * FROM versions ORDER BY ordinal")}
        self._steps = {row["step"]: row for row in run.rows("SELECT * FROM steps ORDER BY step")}
        resumes = [row["step"] for row in run.rows("SELECT * FROM resumes ORDER BY resumed_at")]
        self.counts = dict(run.db.execute("SELECT state, count(*) FROM orders GROUP BY state").fetchall())
        self.counts |= {"samples": run.one("SELECT count(*) FROM samples"), "steps": len(self._steps),
                        "versions": len(self._versions), "resumes": len(resumes)}  # fmt: skip
        self._look_at_versions(resumes)
        self._look_at_steps(resumes)
        for order in run.orders():
            self._look_at_order(order)
        self._look_at_consumption()
        for step, batch in self._rewards.items():
            self._look_at_advantages(step, batch)
        self._look_at_evaluations()

    # ---- versions and steps ------------------------------------------------------------------------------------------

    def _look_at_versions(self, resumes: list[int]) -> None:
        made_by = {row["version"]: step for step, row in self._steps.items()}
        before: dict[str, Any] | None = None
        digests: dict[int, str] = {}
        for ordinal, row in self._versions.items():
            step, digest = row["step"], row["digest"]
            is_resumed = ordinal not in made_by and step in resumes
            is_undone = ordinal not in made_by and any(each < step for each in resumes)
            is_first = before is None and step == 0
            if ordinal in made_by and made_by[ordinal] != step:
                self.add("versions", f"version {ordinal} says that step {step} made it, step {made_by[ordinal]} does")
            elif ordinal not in made_by and not (is_first or is_resumed or is_undone):
                self.add("versions", f"version {ordinal} came of no step and of no resume")
            if before is not None and ordinal != before["ordinal"] + 1 and not is_resumed:
                self.add("versions", f"no version lies between {before['ordinal']} and {ordinal}, and no resume either")
            if is_resumed and not is_undone and digests.get(step, digest) != digest:
                self.add("versions", f"version {ordinal} isn't the one that step {step} made, which it goes on from")
            digests[step] = digest
            before = row
        if not self._versions:
            self.add("versions", "there are none")

    def _look_at_steps(self, resumes: list[int]) -> None:
        for step, row in self._steps.items():
            base, made = self._versions.get(row["base_version"]), self._versions.get(row["version"])
            for ordinal, found in ((row["base_version"], base), (row["version"], made)):
                if found is None:
                    self.add("steps", f"step {step} names version {ordinal}, which is missing")
            if base is None or made is None:
                continue
            if base["step"] != step - 1:
                self.add("steps", f"step {step} began from version {base['ordinal']}, which is of step {base['step']}")
            if made["ordinal"] <= base["ordinal"]:
                self.add("steps", f"step {step} made version {made['ordinal']} out of {base['ordinal']}, a later one")
            former = self._steps.get(step - 1)
            if former is None or former["version"] == base["ordinal"]:
                continue
            digest = self._versions.get(former["version"], base)["digest"]
            if step - 1 not in resumes or digest != base["digest"]:
                self.add("steps", f"step {step} began from version {base['ordinal']}, step {step - 1} made "
                         f"{former['version']}")  # fmt: skip

    # ---- orders and samples ------------------------------------------------------------------------------------------

    def _look_at_order(self, order: StoredOrder) -> None:
        settings = self._run.settings_of(order.settings_id)
        config, name = settings.config, f"order {order.order_id}"
        if order.state not in FINAL_STATES:
            return
        self._count_group(order)
        seeds = {order_seed(each, order.split, order.order_id, order.prompt_index) for each in self._seeds}
        if seeds and order.seed not in seeds:
            self.add("seeds", f"{name} has seed {order.seed}, which isn't what the run's seed gives")
        place = (order.split, order.seed)
        if order.split == TRAIN and self._places.setdefault(place, order.order_id) != order.order_id:
            self.add("prompts", f"{name} has the seed of order {self._places[place]}: it was drawn twice")
        for index, damage in order.damage.items():
            rule = "spans" if damage.column in ("versions", "kv_versions", "kv_history") else "blobs"
            self.add(rule, f"{name}, sample {index}: {damage}")
        if not order.samples and not order.damage:
            return
        num_prompt = self._prompt_length(order)
        for sample in order.samples:
            for rule, text in self._sample_problems(order, sample, num_prompt):
                self.add(rule, f"{name}, sample {sample.index}: {text}")
        if [sample.index for sample in order.samples] != list(range(len(order.samples))) and not order.damage:
            self.add("groups", f"{name} has the samples {[sample.index for sample in order.samples]}")
        if order.state == "trained" and order.step is not None:
            self._num_consumed[order.step] = self._num_consumed.get(order.step, 0) + _num_kept(order, config)
            if config is not None:
                self._rewards.setdefault(order.step, []).append(_Graded.of(order, config))

    def _prompt_length(self, order: StoredOrder) -> int | None:
        try:
            return len(order.prompt_ids)
        except DamagedSampleError as error:
            self.add("blobs", f"order {order.order_id}: {error}")
            return None

    def _sample_problems(
        self, order: StoredOrder, sample: StoredSample, num_prompt: int | None
    ) -> Iterator[tuple[str, str]]:
        if sample.seed != order.seed:
            yield "seeds", f"its seed is {sample.seed}, its order's {order.seed}"
        if sample.finish_reason not in (FinishReason.STOP.value, FinishReason.LENGTH.value):
            yield "ends", f"it ended with {sample.finish_reason!r}, which isn't kept"
        numbers = (*sample.logprobs, *sample.raw_logprobs, sample.reward, *sample.rewards.values())
        if not all(map(math.isfinite, numbers)):
            yield "numbers", "a log-prob or reward isn't finite"
        if order.state == "trained" and (sample.advantage is None or not math.isfinite(sample.advantage)):
            yield "numbers", f"its advantage is {sample.advantage}"
        problem = None if num_prompt is None else sample.span_problem(num_prompt)
        if problem:
            yield "spans", problem
        unknown = sorted(sample.named_versions - self._versions.keys())
        if unknown:
            yield "known", f"version {', '.join(map(str, unknown))} is nowhere"
        step = self._steps.get(order.step or 0)
        if order.state == "trained" and step is not None and sample.named_versions:
            yield from self._lag_problems(order, sample, step["base_version"])

    def _lag_problems(self, order: StoredOrder, sample: StoredSample, base: int) -> Iterator[tuple[str, str]]:
        config = self._run.settings_of(order.settings_id).config
        most = self._max_staleness if self._max_staleness is not None else None if config is None else config.max_lag
        lag = base - min(sample.named_versions)
        if max(sample.named_versions) > base:
            yield "staleness", f"version {max(sample.named_versions)} is newer than {base}, which was in training"
        if most is None:
            self.findings["staleness"].unchecked = "the run's configuration isn't known; give --max-staleness"
        elif lag > most:
            yield "staleness", f"it is {lag} versions old, at most {most} are allowed"

    def _count_group(self, order: StoredOrder) -> None:
        what = {"trained": "trained", "dropped": f"dropped: {order.reason}"}.get(order.state)
        if what is not None:
            lengths = sum(len(sample.token_ids) for sample in order.samples)
            rewards = math.fsum(sample.reward for sample in order.samples)
            self._groups.setdefault(what, []).append((len(order.samples), lengths, rewards))

    # ---- sums --------------------------------------------------------------------------------------------------------

    def _look_at_consumption(self) -> None:
        last_fresh = 0
        for step, row in self._steps.items():
            consumed = self._num_consumed.get(step)
            if consumed is not None:
                last_fresh = step
                if consumed != row["num_samples"]:
                    self.add("consumed", f"step {step} says {row['num_samples']} samples, {consumed} name it")
                continue
            uses = max(self._num_uses(), default=1)
            fresh = self._steps.get(last_fresh)
            if fresh is None or step - last_fresh >= uses:
                self.add("consumed", f"step {step} consumed no sample")
            elif fresh["num_samples"] != row["num_samples"]:
                self.add("consumed", f"step {step} says {row['num_samples']} samples, step {last_fresh} with the same "
                         f"batch {fresh['num_samples']}")  # fmt: skip

    def _num_uses(self) -> Iterator[int]:
        """Steps that a batch may serve, by each of the run's configurations."""
        return (each.config.algorithm.num_iterations for each in self._run.settings.values() if each.config is not None)

    def _look_at_advantages(self, step: int, batch: list[_Graded]) -> None:
        algorithm = batch[0].config.algorithm
        if algorithm.kl_coef and algorithm.kl_in == "reward":
            self.findings["advantages"].unchecked = "the KL is in the reward, and isn't in the ledger"
            return
        rewards = [list(group.rewards.values()) for group in batch]
        is_whole = all(group.is_whole for group in batch)
        if not is_whole or not all(math.isfinite(value) for values in rewards for value in values):
            return  # named already
        estimates = ESTIMATORS[algorithm.recipe.advantages](rewards)
        for group, values in zip(batch, estimates, strict=True):
            wanted = dict(zip(group.rewards, values, strict=True))
            for index, advantage in group.advantages.items():
                value = wanted.get(index, 0.0)
                if advantage is not None and advantage != value:
                    self.add("advantages", f"step {step}, order {group.order_id}, sample {index}: {advantage}, the "
                             f"rewards give {value}")  # fmt: skip

    def _look_at_evaluations(self) -> None:
        for row in self._run.rows("SELECT * FROM evaluations ORDER BY step"):
            step = row["step"]
            if row["version"] not in self._versions:
                self.add("known", f"the evaluation after step {step} is of version {row['version']}, which is nowhere")
            orders = list(self._run.orders("state = 'evaluated' AND split = ? AND step = ?", HELD_OUT, step))
            orders = orders[-row["num_prompts"] :]  # made twice where a run ended early: the last one counts
            samples = [sample for order in orders for sample in order.samples]
            if len(orders) != row["num_prompts"]:
                self.add("evaluations", f"after step {step}: {len(orders)} prompts of {row['num_prompts']}")
            foreign = sorted({version for each in samples for version in each.named_versions} - {row["version"]})
            if foreign:
                self.add("evaluations", f"after step {step}: of version {row['version']}, samples are of {foreign}")
            mean = fmean(sample.reward for sample in samples) if samples else math.nan
            if not math.isclose(mean, row["reward"], rel_tol=1e-9, abs_tol=1e-12):
                self.add("evaluations", f"after step {step}: mean reward {row['reward']}, its samples give {mean}")

    def bias(self) -> tuple[BiasRow, ...]:
        """Means by end, trained first."""
        rows: list[BiasRow] = []
        for what in sorted(self._groups, key=lambda each: (each != "trained", each)):
            groups = self._groups[what]
            count = sum(samples for samples, _, _ in groups)
            if not count:
                rows.append(BiasRow(what, len(groups), 0, None, None))
                continue
            length = sum(tokens for _, tokens, _ in groups) / count
            reward = math.fsum(value for _, _, value in groups) / count
            base = rows[0] if rows and rows[0].what == "trained" else None
            longer = None if base is None or base.length is None else length - base.length
            better = None if base is None or base.reward is None else reward - base.reward
            rows.append(BiasRow(what, len(groups), count, length, reward, longer, better))
        return tuple(rows)


def _is_kept(sample: StoredSample, config: TrainConfig | None) -> bool:
    """Whether a sample of a trained group took part (`rollout.truncated=drop` leaves those out that were cut off)."""
    is_dropping = config is not None and config.rollout.truncated == "drop"
    return not (is_dropping and sample.finish_reason == FinishReason.LENGTH.value)


def _num_kept(order: StoredOrder, config: TrainConfig | None) -> int:
    return sum(_is_kept(sample, config) for sample in order.samples) + len(order.damage)


def _shaped_reward(sample: StoredSample, config: TrainConfig) -> float:
    rollout = config.rollout
    return sample.reward + overlong_penalty(len(sample.token_ids), rollout.max_tokens, rollout.overlong_buffer_tokens)


def _state(run: StoredRun) -> str:
    """Whether the run is on, by its supervisor's own file; else whether anything is left open."""
    try:
        pid = int(json.loads((run.run_dir / STATE_FILE).read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        pid = 0
    if pid and is_alive(pid):
        return "on"
    try:
        is_open = run.one("SELECT count(*) FROM orders WHERE state = 'issued'")
    except sqlite3.DatabaseError:
        return "unknown"
    return "stopped, with orders open that a resumed run draws" if is_open else "over"
