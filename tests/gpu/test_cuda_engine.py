"""The engine on CUDA: pinned staging, graph replay equal to eager decode, and the same rules as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.tiny_model import assert_baseline, tiny_spec, tiny_weights
from unison.engine.config import EngineConfig
from unison.engine.engine import Engine
from unison.engine.models.layout import WeightLayout
from unison.ipc.types import GenerateRequest, OnUpdate, SamplingParams

PROMPTS = [[5], [7, 8, 9], list(range(10, 27)), list(range(30, 70))]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)


def cuda_engine(seed: int = 0, **config: Any) -> Engine:
    spec = tiny_spec()
    layout = WeightLayout(spec, torch.bfloat16)
    weights = layout.pack(tiny_weights(spec, seed), "cuda")
    values = {"device": "cuda", "cache": {"num_tokens": 1024, "block_size_tokens": 4}} | config
    return Engine(spec, weights, EngineConfig.from_dict(values))


def rows(engine: Engine, params: SamplingParams, n: int = 1) -> list[tuple[Any, ...]]:
    outputs = engine.run_batch(PROMPTS, params, n=n)
    return [(c.token_ids, c.logprobs, c.raw_logprobs) for output in outputs for c in output.completions]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_graph_replay_equals_eager(params: SamplingParams) -> None:
    """S14: replay gives the bits of the eager step, in log-probs and in KV, for batches that don't fill their
    bucket."""
    eager = cuda_engine(runtime={"cuda_graphs": False})
    graphs = cuda_engine(runtime={"cuda_graphs": True})
    assert rows(graphs, params, n=3) == rows(eager, params, n=3)
    for index in range(eager.spec.num_layers):
        for mine, theirs in zip(graphs._parts.buffer.layer(index), eager._parts.buffer.layer(index), strict=True):
            assert torch.equal(mine, theirs)
    assert_baseline(graphs)


def test_padding_rows_never_reach_a_result() -> None:
    """Unwritten slots hold NaN: padding rows of a bucket read none that matters."""
    engine = cuda_engine()
    wanted = rows(cuda_engine(), GREEDY)
    engine._parts.buffer.poison(range(4, 1024))
    assert rows(engine, GREEDY) == wanted


def test_staging_is_pinned() -> None:
    """S3: host buffers are pinned exactly when the device is CUDA."""
    space = cuda_engine()._parts.stepper._executor._workspace
    assert all(tensor.is_pinned() for tensor in vars(space.host).values())
    assert all(tensor.is_cuda for tensor in vars(space.device).values())


def test_graphs_go_with_their_version() -> None:
    """After an update the new weights compute, and no graph over retired weights is kept."""
    engine = cuda_engine()
    rows(engine, GREEDY)
    for seed in (1, 2):
        layout = engine._parts.layout
        engine.install(layout.pack(tiny_weights(engine.spec, seed), "cuda"))
        assert rows(engine, GREEDY) == rows(cuda_engine(seed), GREEDY)
    graphs = engine._parts.stepper._executor._graphs
    assert graphs is not None
    assert {ordinal for ordinal, _, _ in graphs._captured} <= {v.version.ordinal for v in engine.versions}


@pytest.mark.parametrize("rule", OnUpdate)
def test_updates_in_flight(rule: OnUpdate) -> None:
    """Every rule ends every request once, with spans that tile."""
    engine = cuda_engine()
    engine.submit(GenerateRequest("a", tuple(PROMPTS[2]), SAMPLED, 2, rule))
    for _ in range(4):
        engine.step()
    engine.install(engine._parts.layout.pack(tiny_weights(engine.spec, 1), "cuda"))
    finished = []
    while engine.has_work:
        finished.extend(engine.step().finished)
    for completion in finished[0].completions:
        assert completion.versions[-1].end == len(completion.token_ids)
    assert_baseline(engine)
