"""Company: whatever runs beside a request, in whatever pool, with whatever parameters, its sample stays the same."""

from __future__ import annotations

from typing import Any

import pytest
from harness.tiny_model import EOS, VOCAB_SIZE, assert_baseline, tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from unison.engine.engine import Engine
from unison.ipc.types import GenerateRequest, RequestOutput, SamplingParams

TOKENS = st.integers(0, VOCAB_SIZE - 1)
ENGINES: tuple[dict[str, Any], ...] = (
    {"cache": {"num_tokens": 96, "block_size_tokens": 4}, "scheduler": {"max_num_seqs": 5, "max_step_tokens": 12}},
    {"cache": {"num_tokens": 72, "block_size_tokens": 1}, "scheduler": {"prefill_chunk_tokens": 5}},
    {"cache": {"num_tokens": 192, "strategy": "contiguous"}, "max_model_len": 64, "scheduler": {"max_num_seqs": 3}},
    {"cache": {"num_tokens": 128, "block_size_tokens": 8, "prefix_caching": False}},
)  # fmt: skip


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    """Anything that a request may ask of the sampler, log-probs of the prompt included."""
    max_tokens = draw(st.integers(1, 12))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        temperature=draw(st.sampled_from([0, 0.3, 1, 1, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.7])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.6])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        penalty_window=draw(st.sampled_from([None, 0, 3])),
        logit_bias=draw(st.sampled_from([(), ((EOS, 4.0), (7, -2.0))])),
        allowed_token_ids=draw(st.sampled_from([None, None, (EOS, 4, 5, 6, 7, 8, 9)])),
        bad_token_ids=draw(st.sampled_from([(), (4, 11)])),
        stop_token_ids=draw(st.sampled_from([(), (8, 50, 51, 52)])),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 5)),
        logprobs=draw(st.sampled_from([0, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 2])),
    )


@st.composite
def requests(draw: st.DrawFn) -> list[GenerateRequest]:
    """A few requests over a small alphabet, so that beginnings are shared."""
    prompts = st.lists(st.integers(4, 6), min_size=1, max_size=40)
    count = draw(st.integers(1, 7))
    return [
        GenerateRequest(f"r{index}", tuple(draw(prompts)), draw(params()), draw(st.integers(1, 4)))
        for index in range(count)
    ]


def serve(engine: Engine, arrivals: list[tuple[int, GenerateRequest]]) -> dict[str, RequestOutput]:
    """Submit each request before its step; checks invariants on the way."""
    done: dict[str, RequestOutput] = {}
    left, step = list(arrivals), 0
    while left or engine.has_work:
        for _, request in [arrival for arrival in left if arrival[0] <= step]:
            engine.submit(request)
        left = [arrival for arrival in left if arrival[0] > step]
        done.update((output.request_id, output) for output in engine.step().finished)
        engine.check_invariants()
        step += 1
    return done


def facts(output: RequestOutput) -> tuple[object, ...]:
    """All of an output that isn't about the cache."""
    return output.completions, output.prompt_logprobs, output.prompt_top_logprobs


def _check(wanted: list[GenerateRequest], delays: list[int], config: dict[str, Any]) -> None:
    engine = tiny_engine(**config)
    arrivals = [(delays[index % len(delays)], request) for index, request in enumerate(wanted)]
    together = serve(engine, arrivals)
    assert_baseline(engine)
    alone = tiny_engine(cache={"num_tokens": 512, "prefix_caching": False}, max_model_len=64)
    for request in wanted:
        expected = serve(alone, [(0, request)])[request.request_id]
        assert facts(together[request.request_id]) == facts(expected)
        (again,) = alone.run_batch([request.prompt_ids], request.params, request.n)
        assert facts(again) == facts(expected)


ARGUMENTS = {
    "wanted": requests(),
    "delays": st.lists(st.integers(0, 9), min_size=1, max_size=5),
    "config": st.sampled_from(ENGINES),
}


@settings(max_examples=8, deadline=None)
@given(**ARGUMENTS)
@pytest.mark.slow
def test_a_sample_does_not_depend_on_its_company(
    wanted: list[GenerateRequest], delays: list[int], config: dict[str, Any]
) -> None:
    """R3, P40, P41, S1: mixed parameters, late arrivals, preemption, shared prefixes: every number is as alone."""
    _check(wanted, delays, config)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(**ARGUMENTS)
def test_many_companies(wanted: list[GenerateRequest], delays: list[int], config: dict[str, Any]) -> None:
    """R3, P40, P41, S1: the same over many more."""
    _check(wanted, delays, config)
