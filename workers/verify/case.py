"""Case: one request's samples, with all that is needed to verify them; from a run's ledger or from a JSON file.

Owns: both ways in, the documented form of the file, and the way out (`as_json`). Knows nothing of weights. Called by
the verifier and the command line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...engine.config import EngineConfig
from ...ipc.errors import ConfigError, InvalidRequestError
from ...ipc.types import Completion, KVEpoch, SamplingParams, VersionSpan
from ..rollout.generator import sampling_params
from ..rollout.runner import order_seed
from ..trainer.config import TrainConfig
from ..trainer.stored import DamagedSampleError, RunSettings, StoredOrder, StoredRun, StoredSample

FORMAT = 1
_KEYS = {"format", "model", "sources", "engine", "is_exact", "versions", "samples"}
_SAMPLE_KEYS = {"prompt_ids", "params", "completion"}
_COMPLETION_KEYS = {item.name for item in fields(Completion)}


@dataclass(frozen=True)
class Claim:
    """What is said of the machine that made the samples."""

    is_exact: bool
    """Whether its bits can be asked for: its self-test passed, or nothing else was asked of the engine."""
    kind: Mapping[str, Any] | None
    """Kernels and attention as `Replayer.describe` gives them; None where nobody has recorded them."""


@dataclass(frozen=True)
class Origin:
    """Where a run's order came from: what prompt, text and reward can be compared with."""

    config: TrainConfig
    """The run's."""
    split: str
    """`train` or `held_out`."""
    prompt_index: int
    """Which of the split's prompts."""
    prompt_id: str
    """Its id."""


@dataclass(frozen=True)
class Case:
    """One request."""

    order: int
    """Order id, or the place in the file."""
    prompt_ids: tuple[int, ...]
    """Its prompt; empty where the ledger's can't be read."""
    samples: tuple[StoredSample, ...]
    """Its completions."""
    params: SamplingParams
    """How they were drawn."""
    engine: EngineConfig
    """What drew them."""
    digests: Mapping[int, str]
    """Of every version that is known."""
    claim: Claim
    """Of the machine."""
    stored_seed: int
    """The order's seed as it is there."""
    seed: int
    """What it must be."""
    pinned: int | None = None
    """The one version that they must be of; None where there may be several."""
    damage: Mapping[int, str] = field(default_factory=dict)
    """Why a sample can't be read, by index; -1 is the prompt."""
    origin: Origin | None = None
    """Where it came from; None for a file's."""


# ---- from a ledger ---------------------------------------------------------------------------------------------------


class LedgerCases:
    """The cases of a run. Life: built on an open run → `select`, then `cases`. Reads only."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._digests = {row["ordinal"]: row["digest"] for row in run.rows("SELECT ordinal, digest FROM versions")}
        self._bases = {row["step"]: row["base_version"] for row in run.rows("SELECT step, base_version FROM steps")}
        self._evaluated = {row["step"]: row["version"] for row in run.rows("SELECT step, version FROM evaluations")}
        self._seeds = [each.config.seed for each in run.settings.values() if each.config is not None]

    @property
    def first_digest(self) -> str | None:
        """Of the version that the run began with, which is the model's directory."""
        found = self._run.one("SELECT digest FROM versions WHERE step = 0 ORDER BY ordinal LIMIT 1")
        return None if found is None else str(found)

    def select(self, orders: Sequence[int], steps: Sequence[int]) -> list[int]:
        """Ids of the chosen orders that have samples (all where none is chosen), those of the oldest versions first: so
        each weight set is built once."""
        oldest: dict[int, int] = {}
        steps_of = dict(self._run.db.execute("SELECT order_id, step FROM orders").fetchall())
        for row in self._run.rows("SELECT order_id, versions, kv_versions FROM samples"):
            number = row["order_id"]
            if (not orders and not steps) or number in orders or steps_of.get(number) in steps:
                oldest[number] = min(oldest.get(number, 1 << 62), _oldest(row["versions"], row["kv_versions"]))
        return sorted(oldest, key=lambda number: (oldest[number], number))

    def cases(self, order_ids: Sequence[int]) -> Iterator[Case]:
        """One case per order.

        Raises:
            ConfigError: the run's configuration can't be read, so nobody knows how its samples were drawn.
        """
        for number in order_ids:
            for order in self._run.orders("order_id = ?", number):
                yield self._case(order)

    def _case(self, order: StoredOrder) -> Case:
        settings = self._run.settings_of(order.settings_id)
        if settings.config is None:
            raise ConfigError("run_dir", f"is {self._run.run_dir}, and how order {order.order_id} was drawn isn't "
                              f"known: {settings.trouble}")  # fmt: skip
        seeds = [order_seed(seed, order.split, order.order_id, order.prompt_index)
                 for seed in (settings.config.seed, *self._seeds)]  # fmt: skip
        seed = order.seed if order.seed in seeds else seeds[0]
        damage = {index: str(error) for index, error in order.damage.items()}
        prompt_ids: tuple[int, ...] = ()
        try:
            prompt_ids = order.prompt_ids
        except DamagedSampleError as error:
            damage[-1] = str(error)
        return Case(
            order.order_id, prompt_ids, order.samples, sampling_params(settings.config, order.split, seed),
            settings.config.serve.engine, self._digests, _claim(settings), order.seed, seed,
            self._pinned(order, settings), damage,
            Origin(settings.config, order.split, order.prompt_index, order.prompt_id),
        )  # fmt: skip

    def _pinned(self, order: StoredOrder, settings: RunSettings) -> int | None:
        step = -1 if order.step is None else order.step
        if order.state == "evaluated":
            return self._evaluated.get(step)
        is_sync = settings.config is not None and settings.config.max_lag == 0
        return self._bases.get(step) if is_sync and order.state == "trained" else None


def _oldest(*texts: str) -> int:
    """Oldest version in columns of spans; of one that can't be read, none."""
    found = []
    for text in texts:
        try:
            found += [int(version) for version, _, _ in json.loads(text)]
        except (ValueError, TypeError):
            continue
    return min(found, default=0)


def _claim(settings: RunSettings) -> Claim:
    config, machine = settings.config, settings.machine
    asked = config is not None and config.serve.engine.runtime.exact
    kind: dict[str, Any] = {name: machine[name] for name in ("kernels", "attention") if name in machine}
    return Claim(bool(machine.get("is_exact", asked)), kind or None)


# ---- from a file -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaseFile:
    """A file of samples (docs/verifying.md)."""

    model: Path
    """Directory of the model: its configuration, and weights."""
    sources: tuple[Path, ...]
    """Further directories of models or runs that may have weights."""
    cases: tuple[Case, ...]
    """One per sample."""

    @staticmethod
    def read(path: Path) -> CaseFile:
        """
        Raises:
            ConfigError: it isn't of the documented form; names the key.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("source", f"is {path}, which can't be read as JSON: {error}") from error
        _known("source", values, _KEYS)
        if values.get("format") != FORMAT:
            raise ConfigError("format", f"is {values.get('format')!r}; this version of unison reads {FORMAT}")
        try:
            model = path.parent / values["model"]
            digests = {int(ordinal): str(digest) for ordinal, digest in values["versions"].items()}
            engine = EngineConfig.from_dict(values.get("engine", {}))
            claim = Claim(bool(values.get("is_exact", True)), None)
            cases = tuple(
                _case_of(at, sample, engine, digests, claim) for at, sample in enumerate(values["samples"])
            )
            sources = tuple(path.parent / each for each in values.get("sources", ()))
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            if isinstance(error, (ConfigError, InvalidRequestError)):
                raise
            raise ConfigError("source", f"is {path}, which isn't of the documented form: {error!r}") from error
        return CaseFile(model, sources, cases)


def _case_of(
    place: int, values: dict[str, Any], engine: EngineConfig, digests: Mapping[int, str], claim: Claim
) -> Case:
    _known(f"samples[{place}]", values, _SAMPLE_KEYS)
    completion = values["completion"]
    _known(f"samples[{place}].completion", completion, _COMPLETION_KEYS)
    seed = int(completion["seed"])
    params = _params(values["params"], seed)
    sample = StoredSample(
        place, int(completion["index"]), tuple(map(int, completion["token_ids"])),
        tuple(map(float, completion["logprobs"])), tuple(map(float, completion["raw_logprobs"])),
        _spans(completion["versions"]), _spans(completion["kv_versions"]),
        tuple(KVEpoch(int(each["end"]), _spans(each["kv_versions"])) for each in completion.get("kv_history", ())),
        seed, str(completion["finish_reason"]), completion.get("matched_stop"), 0.0, {}, None, "",
    )  # fmt: skip
    if not len(sample.token_ids) == len(sample.logprobs) == len(sample.raw_logprobs):
        raise ConfigError(f"samples[{place}]", "has tokens and log-probs of different numbers")
    prompt_ids = tuple(map(int, values["prompt_ids"]))
    return Case(place, prompt_ids, (sample,), params, engine, digests, claim, seed, seed)


def _params(values: dict[str, Any], seed: int) -> SamplingParams:
    _known("params", values, {item.name for item in fields(SamplingParams)})
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    made["logit_bias"] = tuple((int(token), float(bias)) for token, bias in made.get("logit_bias", ()))
    return SamplingParams(**made | {"seed": seed})


def _spans(values: Sequence[Mapping[str, int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(**each) for each in values)


def _known(name: str, values: Any, keys: set[str]) -> None:
    if not isinstance(values, dict):
        raise ConfigError(name, f"is no JSON object, but {type(values).__name__}")
    unknown = sorted(values.keys() - keys)
    if unknown:
        raise ConfigError(f"{name}.{unknown[0]}", f"is no known key; known are {', '.join(sorted(keys))}")


def as_json(cases: Sequence[Case], model: Path, sources: Sequence[Path]) -> dict[str, Any]:
    """The documented form of some cases; they must be of one engine."""
    named = {version for case in cases for sample in case.samples for version in sample.named_versions}
    engines = {case.engine for case in cases}
    if len(engines) > 1:
        raise ConfigError("export", "takes samples of one configuration; these are of several")
    digests: dict[int, str] = {ordinal: digest for case in cases for ordinal, digest in case.digests.items()}
    return {
        "format": FORMAT, "model": str(model.absolute()), "sources": [str(each.absolute()) for each in sources],
        "engine": next(iter(engines), EngineConfig()).to_dict(), "is_exact": all(case.claim.is_exact for case in cases),
        "versions": {str(ordinal): digests[ordinal] for ordinal in sorted(named & digests.keys())},
        "samples": [_exported(case, sample) for case in cases for sample in case.samples],
    }  # fmt: skip


def _exported(case: Case, sample: StoredSample) -> dict[str, Any]:
    params = {item.name: getattr(case.params, item.name) for item in fields(SamplingParams)}
    completion = {
        "index": sample.index, "token_ids": sample.token_ids, "logprobs": sample.logprobs,
        "raw_logprobs": sample.raw_logprobs, "finish_reason": sample.finish_reason,
        "matched_stop": sample.matched_stop, "seed": sample.seed, "versions": _as_objects(sample.versions),
        "kv_versions": _as_objects(sample.kv_versions),
        "kv_history": [{"end": each.end, "kv_versions": _as_objects(each.kv_versions)} for each in sample.kv_history],
    }  # fmt: skip
    return {"prompt_ids": case.prompt_ids, "params": params, "completion": completion}


def _as_objects(spans: Sequence[VersionSpan]) -> list[dict[str, int]]:
    return [{"version": span.version, "first": span.first, "end": span.end} for span in spans]
