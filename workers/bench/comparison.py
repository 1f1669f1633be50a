"""The engine beside its peers: every workload by every contender, alternately, in one run.

Owns: the order, and the record of everything that was measured. Called by `bin/bench engine`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...engine.models.layout import WeightLayout
from ...engine.models.spec import ModelSpec
from ..machine import describe
from .contenders import Contender, Entry, Measurement, peer_entry
from .environments import PeerUnavailableError
from .workloads import Workload, with_first_token

Table = dict[str, dict[str, list[Measurement]]]


@dataclass(frozen=True)
class Setting:
    """What all contenders have in common."""

    model: Path
    """Hugging Face directory."""
    dtype: str
    """`bfloat16` or `float32`."""
    threads: int
    """Threads of each."""
    repeats: int
    """Runs per contender and workload."""


def record(
    setting: Setting, ours: Sequence[Entry], peers: Sequence[str], workloads: Sequence[Workload],
    limits: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Everything measured, as JSON has it. The first of `ours` must last; a peer that doesn't is left out, with the
    reason.

    Raises: PeerUnavailableError when the first contender fails.
    """
    comparison = _Comparison(setting)
    table = comparison.run(ours, peers, workloads)
    return {
        "kind": "engine", **describe(), "model": setting.model.name, "dtype": setting.dtype,
        "threads": setting.threads, "repeats": setting.repeats, "limits": limits,
        "step_bytes": {work.name: step_bytes(setting, work) for work in workloads},
        "contenders": comparison.descriptions, "left_out": comparison.left_out,
        "workloads": {
            work: {
                name: [vars(run) | {"tokens_per_s": run.tokens_per_s} for run in runs] for name, runs in by_name.items()
            }
            for work, by_name in table.items()
        },
    }  # fmt: skip


def step_bytes(setting: Setting, work: Workload) -> int:
    """Least that a decode step of a batch reads: each weight once, and KV of the mean length once per sequence."""
    spec, dtype = ModelSpec.from_dir(setting.model), getattr(torch, setting.dtype)
    mean_prompt = sum(map(len, work.prompts)) / len(work.prompts)
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    return WeightLayout(spec, dtype).num_bytes + int(work.batch_size * (mean_prompt + work.max_tokens / 2) * kv)


class _Comparison:
    """One run of the bench. Life: one call of `run`, at whose end all processes are closed."""

    def __init__(self, setting: Setting) -> None:
        self.descriptions: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}
        self._setting = setting
        self._live: list[Contender] = []
        self._needed = ""

    def run(self, ours: Sequence[Entry], peers: Sequence[str], workloads: Sequence[Workload]) -> Table:
        """Start everybody, run everything; a peer that fails is in `left_out` afterwards."""
        self._needed = ours[0].name
        try:
            for entry in ours:
                self._start(entry)
            for name in peers:
                try:
                    entry = peer_entry(name)
                except PeerUnavailableError as error:
                    self._leave_out(name, error)
                else:
                    self._start(entry)
            return {work.name: self._rounds(work) for work in workloads}
        finally:
            for contender in self._live:
                contender.close()

    def _start(self, entry: Entry) -> None:
        contender, setting = Contender(entry), self._setting
        self._live.append(contender)
        try:
            contender.start(setting.model, setting.dtype, setting.threads)
        except PeerUnavailableError as error:
            self._drop(contender, error)
            return
        self.descriptions[entry.name] = {"start_s": contender.start_s, **contender.description}
        _say(f"  {entry.name} is ready after {contender.start_s:.1f} s")

    def _rounds(self, work: Workload) -> dict[str, list[Measurement]]:
        """All repeats of one workload, each other round in the other order."""
        runs: dict[str, list[Measurement]] = {contender.name: [] for contender in self._live}
        for repeat in range(self._setting.repeats):
            # Another first token in each round: what a prefix cache kept of an earlier one doesn't help.
            fresh = with_first_token(work, 100 + 7919 * (repeat + 1) % 4000)
            for contender in list(self._live if repeat % 2 == 0 else reversed(self._live)):
                try:
                    measured = contender.run(fresh)
                except PeerUnavailableError as error:
                    self._drop(contender, error)
                    continue
                runs[contender.name].append(measured)
                rate, memory = measured.tokens_per_s, measured.peak_rss_bytes / 1e9
                _say(f"  {work.name}: {contender.name} {measured.seconds:.2f} s, {rate:.1f} tokens/s, {memory:.2f} GB")
        return {name: measured for name, measured in runs.items() if measured}

    def _drop(self, contender: Contender, error: PeerUnavailableError) -> None:
        contender.close()
        self._live.remove(contender)
        self._leave_out(contender.name, error)

    def _leave_out(self, name: str, error: PeerUnavailableError) -> None:
        if name == self._needed:
            raise error
        self.left_out[name] = str(error).replace(str(Path.home()), "~")
        _say(f"  {name} is left out: {error}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
