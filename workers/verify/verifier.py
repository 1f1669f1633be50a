"""Verifier: cases in, reports out: weights by digest, the forward pass, the draws, and everything around them.

Owns: the order of the checks, and the look for another version where one doesn't give its log-probs. Called by the
command line; usable alone. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...engine.config import EngineConfig, available_cores
from ...engine.models.layout import DecoderWeights, WeightLayout
from ...engine.models.spec import ModelSpec
from ...engine.replay import Draws, Replayed, Replayer, ReplayError, SampleRecord
from ...ipc.errors import UnisonError
from ...ipc.types import VersionSpan
from ..trainer.stored import StoredSample
from .case import Case, Claim
from .comparison import Tolerance, compare_numbers, compare_record
from .sources import MissingWeightsError, WeightSources
from .surroundings import Surroundings
from .verdict import Findings, SampleReport

MAX_OTHERS = 4
"""Neighbouring versions that are tried where one doesn't give a sample's log-probs."""

MAX_IN_VAIN = 32
"""Samples for which that was done without finding one, until it isn't done any more."""

OpenSources = Callable[[WeightLayout], WeightSources]
"""Makes the sources for one layout of the weights."""


@dataclass(frozen=True, eq=False)
class _Bench:
    """What computes samples of one engine configuration."""

    replayer: Replayer
    sources: WeightSources
    kind: dict[str, Any]


class Verifier:
    """Life: built → any number of `verify` → its sources are asked what they found damaged."""

    def __init__(
        self, model: Path, open_sources: OpenSources, surroundings: Surroundings, tolerance: Tolerance,
        num_threads: int | None = None,
    ) -> None:  # fmt: skip
        """`model` has the configuration of what made the samples."""
        self._spec = ModelSpec.from_dir(model)
        self._open_sources = open_sources
        self._surroundings = surroundings
        self._tolerance = tolerance
        self._threads = num_threads or available_cores()
        self._benches: dict[EngineConfig, _Bench] = {}
        self._exact: dict[EngineConfig, str] = {}
        self._num_in_vain = 0

    @property
    def damaged(self) -> dict[str, str]:
        """What was found wrong with files that weights come from, by path."""
        return {path: text for bench in self._benches.values() for path, text in bench.sources.damaged.items()}

    def verify(self, case: Case) -> list[SampleReport]:
        """One report per sample, those that can't be read included."""
        findings = {sample.index: Findings() for sample in case.samples}
        findings |= {index: Findings() for index in case.damage if index >= 0}
        for index, text in case.damage.items():
            for found in findings.values() if index < 0 else [findings[index]]:
                found.add("record", text)
        stop_ids = frozenset((*(() if case.params.ignore_eos else self._spec.eos_token_ids),
                              *case.params.stop_token_ids))  # fmt: skip
        max_len = min(case.engine.max_model_len or self._spec.max_position_embeddings,
                      case.engine.cache.num_tokens or self._spec.max_position_embeddings)  # fmt: skip
        for sample in case.samples:
            compare_record(case, sample, max_len, stop_ids, findings[sample.index])
        self._compute(case, stop_ids, findings)
        self._surroundings.look(case, findings)
        lengths = {sample.index: len(sample.token_ids) for sample in case.samples}
        return [found.report(case.order, index, lengths.get(index, 0)) for index, found in sorted(findings.items())]

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def _compute(self, case: Case, stop_ids: frozenset[int], findings: Mapping[int, Findings]) -> None:
        bench = self._bench(case.engine)
        wanted = sorted({version for sample in case.samples for version in sample.named_versions})
        had = bench.sources.prepare(case.digests[each] for each in wanted if each in case.digests)
        weights: dict[int, DecoderWeights] = {}
        whole = []
        for ordinal in wanted:
            found = had.get(case.digests.get(ordinal, ""))
            if found is not None and not isinstance(found, UnisonError):
                weights[ordinal] = found
        for sample in case.samples:
            if self._has_weights(case, sample, had, findings[sample.index]) and case.prompt_ids:
                whole.append(sample)
        if not whole:
            return
        window = case.params.penalty_window
        draws = Draws(case.params, case.seed, stop_ids,
                      case.engine.sampling.penalty_window_tokens if window is None else window)  # fmt: skip
        tolerance = self._tolerance_for(case, bench, next(iter(weights.values())), findings)
        for sample, replayed in self._replay(case, whole, draws, bench, weights, findings):
            found_here = findings[sample.index]
            compare_numbers(sample, replayed, tolerance, found_here)
            if any(each.kind == "logprob" for each in found_here.differences):
                self._look_for_other(case, sample, draws, bench, found_here)

    def _has_weights(
        self, case: Case, sample: StoredSample, had: Mapping[str, DecoderWeights | UnisonError], findings: Findings
    ) -> bool:
        is_whole = True
        for ordinal in sorted(sample.named_versions):
            found = had.get(case.digests.get(ordinal, ""))
            is_whole &= found is not None and not isinstance(found, UnisonError)
            if isinstance(found, MissingWeightsError):
                findings.missing.append(ordinal)
            elif isinstance(found, UnisonError):
                findings.add("weights", f"version {ordinal}: {found}")
        return is_whole

    def _replay(
        self, case: Case, samples: list[StoredSample], draws: Draws, bench: _Bench,
        weights: Mapping[int, DecoderWeights], findings: Mapping[int, Findings],
    ) -> list[tuple[StoredSample, Replayed]]:  # fmt: skip
        """Together, as they were made; one by one where a record can't be, so that it harms no other."""
        try:
            records = [_record(sample) for sample in samples]
            found = bench.replayer.replay(case.prompt_ids, records, draws, weights.__getitem__)
            return list(zip(samples, found, strict=True))
        except ReplayError as error:
            if len(samples) == 1:
                kind = "version" if "is of version" in str(error) or "spans" in str(error) else "record"
                findings[samples[0].index].add(kind, str(error))
                return []
        return [pair for each in samples for pair in self._replay(case, [each], draws, bench, weights, findings)]

    def _look_for_other(
        self, case: Case, sample: StoredSample, draws: Draws, bench: _Bench, findings: Findings
    ) -> None:
        """Whether a neighbouring version gives what the named one doesn't: then it is the label that is wrong."""
        if len(sample.named_versions) != 1 or self._num_in_vain >= MAX_IN_VAIN:
            return
        (named,) = sample.named_versions
        others = sorted(case.digests.keys() - {named}, key=lambda each: (abs(each - named), each))
        for ordinal in others[:MAX_OTHERS]:
            weights = bench.sources.prepare([case.digests[ordinal]])[case.digests[ordinal]]
            if isinstance(weights, UnisonError):
                continue
            record = replace(
                _record(sample), versions=(VersionSpan(ordinal, 0, len(sample.token_ids)),),
                kv_versions=(VersionSpan(ordinal, 0, len(case.prompt_ids) + len(sample.token_ids)),), kv_history=(),
            )  # fmt: skip
            (found,) = bench.replayer.replay(case.prompt_ids, [record], draws, lambda _, own=weights: own)  # type: ignore[misc]
            if found.raw_logprobs == sample.raw_logprobs and found.drawn_ids == sample.token_ids:
                findings.add("version", f"it names version {named}, and its log-probs are those of version {ordinal}")
                return
        self._num_in_vain += 1

    # ---- what computes -----------------------------------------------------------------------------------------------

    def _bench(self, engine: EngineConfig) -> _Bench:
        if engine not in self._benches:
            runtime = replace(engine.runtime, num_threads=self._threads)
            replayer = Replayer(self._spec, replace(engine, device="cpu", runtime=runtime))
            self._benches[engine] = _Bench(replayer, self._open_sources(replayer.layout), replayer.describe())
        return self._benches[engine]

    def _tolerance_for(
        self, case: Case, bench: _Bench, weights: DecoderWeights, findings: Mapping[int, Findings]
    ) -> Tolerance | None:
        """None where bits can be asked for; else why they can't is said."""
        reason = self._why_not_exact(case, bench, weights)
        if reason is None:
            return None
        for each in findings.values():
            each.unchecked.append(f"bits: {reason}")
        return self._tolerance

    def _why_not_exact(self, case: Case, bench: _Bench, weights: DecoderWeights) -> str | None:
        if not case.claim.is_exact:
            return "the run didn't claim exactness"
        other = _other_kind(case.claim, bench.kind)
        if other is not None:
            return other
        if case.engine not in self._exact:
            found = bench.replayer.check(weights)
            reason = f"this machine doesn't keep the promise: {found.reason}"
            self._exact[case.engine] = "" if found.is_exact else reason
        return self._exact[case.engine] or None


def _record(sample: StoredSample) -> SampleRecord:
    return SampleRecord(sample.index, sample.token_ids, sample.versions, sample.kv_versions, sample.kv_history)


def _other_kind(claim: Claim, ours: Mapping[str, Any]) -> str | None:
    """Which of the things that bits depend on isn't the same here; None where all are, or nobody has recorded them."""
    if claim.kind is None:
        return None
    for part, names in (("kernels", ("name", "bf16_linear")), ("attention", ("name", "split_tokens"))):
        theirs, here = claim.kind.get(part, {}), ours.get(part, {})
        for name in names:
            if theirs.get(name) != here.get(name):
                return f"{part} were {theirs.get('name')}, they are {here.get('name')} here ({name}: " \
                       f"{theirs.get(name)} and {here.get(name)})"
    return None
