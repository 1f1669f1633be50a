"""Any order of submits, aborts, steps, installs and rollbacks: invariants after each, and a clean end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from harness.replay import assert_replays
from harness.tiny_model import EOS, assert_baseline, tiny_engine, tiny_weights
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from unison.engine.engine import Engine
from unison.ipc.errors import DigestMismatchError, UnknownVersionError, VersionBusyError, VersionError
from unison.ipc.types import FinishReason, GenerateRequest, OnUpdate, RequestOutput, SamplingParams

WEIGHT_SEEDS = 4
CONFIGS: tuple[dict[str, Any], ...] = (
    {"cache": {"num_tokens": 96, "block_size_tokens": 4}, "scheduler": {"max_num_seqs": 6, "max_step_tokens": 16}},
    {"cache": {"num_tokens": 80, "block_size_tokens": 1}, "scheduler": {"max_num_seqs": 3, "prefill_chunk_tokens": 5}},
    {"cache": {"num_tokens": 192, "strategy": "contiguous"}, "max_model_len": 64, "scheduler": {"max_num_seqs": 4}},
    {"cache": {"num_tokens": 1024, "prefix_caching": False}, "versions": {"max_installed": 4}},
)  # fmt: skip


class EngineMachine(RuleBasedStateMachine):
    """The real engine on a tiny model, driven at random."""

    num_rules = 0

    @initialize(config=st.sampled_from(CONFIGS))
    def build(self, config: dict[str, Any]) -> None:
        self.engine: Engine = tiny_engine(**config)
        self.weights = [tiny_weights(self.engine.spec, seed) for seed in range(WEIGHT_SEEDS)]
        self.num_submitted = 0
        self.in_flight: set[str] = set()
        self.terminals: Counter[tuple[str, int]] = Counter()
        self.outputs: list[RequestOutput] = []
        self.num_replays = 0

    @rule(
        prompt=st.lists(st.integers(4, 9), min_size=1, max_size=30),
        max_tokens=st.integers(1, 14),
        n=st.integers(1, 4),
        on_update=st.sampled_from(OnUpdate),
        pin=st.booleans(),
    )
    def submit(self, prompt: list[int], max_tokens: int, n: int, on_update: OnUpdate, pin: bool) -> None:
        name = f"r{self.num_submitted}"
        self.num_submitted += 1
        params = SamplingParams(max_tokens=max_tokens, seed=self.num_submitted, stop_token_ids=(50, 51))
        version = self.engine.live_version.ordinal if pin else None
        self.engine.submit(GenerateRequest(name, tuple(prompt), params, n, on_update, version))
        self.in_flight.add(name)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            live = self.engine.live_version
            output = self.engine.step()
            batches = self.engine._parts.stepper.last_plan.batches
            installed = {version.version.ordinal for version in self.engine.versions}
            assert {batch.version for batch in batches} <= installed
            ran = [id(chunk.sequence) for batch in batches for chunk in batch.chunks]
            assert len(set(ran)) == len(ran)
            assert sum(batch.num_tokens for batch in batches) <= self.engine.config.scheduler.max_step_tokens
            assert self.engine.live_version == live or self.engine.stats().num_flips > 0
            for delta in output.deltas:
                if delta.finish_reason is not None:
                    self.terminals[delta.request_id, delta.index] += 1
            for done in output.finished:
                self.in_flight.remove(done.request_id)
                self._check(done)

    def _check(self, output: RequestOutput) -> None:
        assert all(self.terminals[output.request_id, c.index] == 1 for c in output.completions)
        for completion in output.completions:
            if completion.finish_reason is FinishReason.STOP:
                assert completion.matched_stop == completion.token_ids[-1] in (50, 51, EOS, 3)
        self.outputs.append(output)
        versions = {span.version for c in output.completions for span in (*c.versions, *c.kv_versions)}
        still_there = {version.version.ordinal for version in self.engine.versions}
        if versions <= still_there and self.num_replays < 6:
            self.num_replays += 1
            finished = [c for c in output.completions if c.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)]
            assert_replays(self.engine, RequestOutput(output.request_id, output.prompt_ids, tuple(finished)))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.engine.abort(name)
        assert not self.engine.abort(name)

    @rule(seed=st.integers(0, WEIGHT_SEEDS - 1))
    def install(self, seed: int) -> None:
        before = self.engine.versions
        try:
            self.engine.install(self.weights[seed])
        except VersionBusyError:
            assert self.engine.versions == before

    @rule(seed=st.integers(0, WEIGHT_SEEDS - 1))
    def install_damaged(self, seed: int) -> None:
        before, live = self.engine.versions, self.engine.live_version
        with pytest.raises((DigestMismatchError, VersionBusyError)):
            self.engine.install(self.weights[seed], expected="f" * 32)
        assert (self.engine.versions, self.engine.live_version) == (before, live)

    @rule(back=st.integers(1, 3))
    def rollback(self, back: int) -> None:
        ordinal = self.engine.live_version.ordinal - back
        known = {version.version.ordinal for version in self.engine.versions}
        try:
            self.engine.rollback(ordinal)
            assert ordinal in known
        except UnknownVersionError:
            assert ordinal not in known

    @rule()
    def flip(self) -> None:
        self.engine.flip()

    @invariant()
    def invariants_hold(self) -> None:
        EngineMachine.num_rules += 1
        self.engine.check_invariants()

    def teardown(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step(1)
        assert not self.engine.has_work and not self.in_flight
        assert len(self.outputs) == self.num_submitted
        for version in self.engine.versions:
            self.engine._parts.scheduler.forget_version(version.version.ordinal)
        assert_baseline(self.engine)
        with pytest.raises(VersionError):
            self.engine.rollback(10_000)


def test_random_lives() -> None:
    """V1, V2, V3, V4, V5, R1, R2, R3, S29, P42: a short exploration for every run."""
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=8, stateful_step_count=30))


@pytest.mark.slow
def test_ten_thousand_operations() -> None:
    """V1, V2, V3, V4, V5, R1, R2, R3, S29, P41, P42: ten thousand operations, every request one terminal event."""
    before = EngineMachine.num_rules
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=220, stateful_step_count=60))
    assert EngineMachine.num_rules - before >= 10_000
