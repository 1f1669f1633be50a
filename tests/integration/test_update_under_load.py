"""32 streams on the real model while a new version goes live every half second, under each update rule.

UNISON_SOAK_S sets how long each rule runs; the figures of a long run are in docs/performance.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import psutil
import pytest
import torch
from harness.serving import ServeProcess, serving
from harness.tiny_directory import write_tiny_directory
from harness.tiny_model import tiny_spec, tiny_weights
from harness.version_replay import replay_carried, replay_recomputed, versions_of
from torch import Tensor
from unison.engine.config import EngineConfig
from unison.engine.engine import Engine
from unison.engine.models.layout import DecoderWeights
from unison.ipc.arena.publisher import WeightPublisher
from unison.ipc.client import Client
from unison.ipc.types import ErrorReason, FinishReason, OnUpdate
from unison.workers.bench.update_load import UpdateLoad, run_update_load

SOAK_S = float(os.environ.get("UNISON_SOAK_S", "3"))

pytestmark = pytest.mark.slow


class Versions:
    """The weights of every ordinal: the directory's, with some tensors scaled by a factor that the ordinal gives."""

    def __init__(self, model_dir: Path) -> None:
        self.engine = Engine.from_pretrained(model_dir, EngineConfig())
        layout = self.engine._parts.layout
        self.layout = layout
        bound = self.engine._parts.guard.weights_of(0)
        flat = bound.embedding._base
        assert flat is not None
        self.base = layout.views(flat)

    def write(self, tensors: dict[str, Tensor], ordinal: int) -> None:
        """Fill a buffer."""
        with torch.no_grad():
            for name in self.layout.entries:
                tensors[name].copy_(self.base[name])
            if ordinal:
                tensors["model.norm.weight"].mul_(1 + 0.02 * (ordinal % 17))
                tensors["model.layers.7.mlp.down_proj.weight"].mul_(1 - 0.03 * (ordinal % 13))

    @lru_cache(maxsize=8)  # noqa: B019 - one object per module
    def weights_of(self, ordinal: int) -> DecoderWeights:
        """A version's weights, made anew."""
        views = self.layout.views(self.layout.allocate())
        self.write(views, ordinal)
        return self.layout.bind(views)


@pytest.fixture(scope="module")
def versions(model_dir: Path) -> Versions:
    return Versions(model_dir)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServeProcess]:
    with serving(tmp_path_factory.mktemp("serve") / "r", model_dir, "--no-http") as process:
        yield process


@pytest.mark.parametrize("rule", list(OnUpdate))
def test_each_rule_under_load(run: ServeProcess, versions: Versions, rule: OnUpdate) -> None:
    """V2, V3, V5, P07, P11, P12: nothing lost or errored, spans exact: every log-prob comes out again from the
    recorded versions' weights, bit for bit."""
    load = UpdateLoad(run.run_dir, rule, duration_s=SOAK_S)
    report = run_update_load(load, versions.write)
    assert not report.failures
    assert len(report.outputs) >= load.num_streams and report.published
    switched = 0
    for at, output in enumerate(report.outputs):
        (done,) = output.completions
        made_by = versions_of(done.versions)
        assert len(made_by) == len(done.token_ids)
        switched += len(set(made_by)) > 1
        if rule is OnUpdate.ABORT and done.finish_reason is FinishReason.ABORTED:
            assert done.error is ErrorReason.POLICY_UPDATED
        else:
            assert (done.finish_reason, len(done.token_ids)) == (FinishReason.LENGTH, load.max_tokens)
        if rule in (OnUpdate.FINISH, OnUpdate.ABORT):
            assert len(set(made_by)) <= 1, "no mixed versions"
        if done.token_ids and at % 16 == 0:
            replay = replay_carried if rule is OnUpdate.CARRY else replay_recomputed
            assert replay(versions.engine, versions.weights_of, output.prompt_ids, done) == done.raw_logprobs
    assert (switched > 0) == (rule in (OnUpdate.CARRY, OnUpdate.RECOMPUTE))


def test_a_thousand_publications_leave_nothing_behind(tmp_path: Path) -> None:
    """P30, P49, P48: no growth of memory or descriptors over 1,000 publications, on either side."""
    write_tiny_directory(tmp_path / "model")
    options = ("--no-http", "--set", "engine.cache.num_tokens=8192")
    with serving(tmp_path / "r", tmp_path / "model", *options) as process, Client.connect(process.run_dir) as client:
        worker, me = psutil.Process(process.worker_pid), psutil.Process()
        weights = [tiny_weights(tiny_spec(), seed=seed) for seed in range(3)]
        with WeightPublisher(client) as publisher:
            for ordinal in range(1, 201):
                publisher.publish(weights[ordinal % 3])
            before = [(p.memory_info().rss, p.num_fds(), p.num_threads()) for p in (worker, me)]
            for ordinal in range(201, 1201):
                assert publisher.publish(weights[ordinal % 3]).version.ordinal == ordinal
            after = [(p.memory_info().rss, p.num_fds(), p.num_threads()) for p in (worker, me)]
        for (rss0, fds0, threads0), (rss1, fds1, threads1) in zip(before, after, strict=True):
            assert fds1 <= fds0 and threads1 <= threads0
            assert rss1 - rss0 < 8 << 20, f"{(rss1 - rss0) / 1e6:.1f} MB more"
