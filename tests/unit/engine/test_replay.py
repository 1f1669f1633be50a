"""Samples computed again from their records: every bit comes out, whatever versions had a part in them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from harness.tiny_model import EOS, drain, tiny_engine, tiny_weights
from unison.engine.config import EngineConfig
from unison.engine.engine import Engine
from unison.engine.replay import Draws, Replayed, Replayer, ReplayError, SampleRecord
from unison.ipc.types import Completion, GenerateRequest, OnUpdate, RequestOutput, SamplingParams, VersionSpan

PROMPT = tuple(range(20, 38))
PLAIN = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)


def record(done: Completion, **changes: Any) -> SampleRecord:
    made = SampleRecord(done.index, done.token_ids, done.versions, done.kv_versions, done.kv_history)
    return dataclasses.replace(made, **changes)


def replay(engine: Engine, output: RequestOutput, params: SamplingParams, records: Any = None) -> list[Replayed]:
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS, 3})
    draws = Draws(params, output.completions[0].seed, stops, 64)
    records = records or [record(done) for done in output.completions]
    return _replayer(engine).replay(output.prompt_ids, records, draws, engine._parts.guard.weights_of)


def _replayer(engine: Engine) -> Replayer:
    return Replayer(engine.spec, EngineConfig(dtype=str(engine._parts.layout.dtype).removeprefix("torch.")))


def assert_equal(engine: Engine, output: RequestOutput, params: SamplingParams) -> None:
    for done, found in zip(output.completions, replay(engine, output, params), strict=True):
        assert found.drawn_ids == done.token_ids
        assert found.raw_logprobs == done.raw_logprobs and found.logprobs == done.logprobs
        assert set(found.gaps) <= {0.0}


@pytest.mark.parametrize(
    "params",
    [
        PLAIN, SamplingParams(max_tokens=8, temperature=0.7, seed=1),
        SamplingParams(max_tokens=8, temperature=0, seed=1),
        SamplingParams(max_tokens=8, seed=2, top_k=7, top_p=0.9, min_tokens=6, temperature=1.3),
        SamplingParams(max_tokens=90, seed=2, repetition_penalty=1.3, presence_penalty=0.5, bad_token_ids=(5,),
                       logit_bias=((9, 4.0),), ignore_eos=True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_bit_comes_out_again(params: SamplingParams, dtype: str) -> None:
    """R3: tokens, log-probs of both kinds: of a whole group, with filters, penalties, greedily, over many rows."""
    engine = tiny_engine(dtype=dtype, scheduler={"prefill_chunk_tokens": 5})
    engine.submit(GenerateRequest("a", PROMPT, params, 3))
    engine.submit(GenerateRequest("b", PROMPT[:4], dataclasses.replace(params, seed=9), 2))
    done = drain(engine)
    assert_equal(engine, done["a"], params)
    assert_equal(engine, done["b"], dataclasses.replace(params, seed=9))


@pytest.mark.parametrize("rule", [OnUpdate.CARRY, OnUpdate.RECOMPUTE, OnUpdate.FINISH])
def test_samples_that_cross_flips(rule: OnUpdate) -> None:
    """V3: KV that was carried over two flips, or computed again, is built again under the versions that wrote it."""
    engine = tiny_engine(versions={"max_installed": 4})
    engine.submit(GenerateRequest("r", PROMPT, PLAIN, 2, rule))
    for seed in (1, 2):
        for _ in range(3):
            engine.step()
        engine.pin(engine.live_version.ordinal)  # so that its weights can be asked for afterwards
        engine.install(tiny_weights(engine.spec, seed))
    done = drain(engine)["r"]
    crossed = {span.version for each in done.completions for span in each.versions}
    assert len(crossed) == (1 if rule is OnUpdate.FINISH else 3)
    assert_equal(engine, done, PLAIN)


def test_kv_that_was_computed_again_after_a_preemption() -> None:
    """V3: tokens from before it were drawn over the KV that the record's history names."""
    engine = tiny_engine(
        cache={"num_tokens": 40, "block_size_tokens": 1, "prefix_caching": False}, versions={"max_installed": 3}
    )
    long = dataclasses.replace(PLAIN, max_tokens=24)
    engine.submit(GenerateRequest("older", PROMPT[:6], long))
    engine.submit(GenerateRequest("younger", PROMPT[6:12], long, on_update=OnUpdate.CARRY))
    for _ in range(6):
        engine.step()
    engine.pin(0)
    engine.install(tiny_weights(engine.spec, 1))
    done = drain(engine)
    assert done["younger"].completions[0].kv_history
    for output in done.values():
        assert_equal(engine, output, long)


def test_a_large_group_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """R3: how many samples one pass holds changes nothing."""
    engine = tiny_engine()
    output = engine.run_batch([PROMPT], PLAIN, n=5)[0]
    whole = replay(engine, output, PLAIN)
    monkeypatch.setattr("unison.engine.replay.MAX_TOKENS", 40)
    assert replay(engine, output, PLAIN) == whole


def test_a_changed_token_shows_where_it_stands() -> None:
    """P46: the draw at its place and the log-probs after it are others; those before it are the same bits."""
    engine = tiny_engine()
    output = engine.run_batch([PROMPT], PLAIN)[0]
    (done,) = output.completions
    tokens = list(done.token_ids)
    tokens[5] = (tokens[5] + 1) % engine.spec.vocab_size
    (found,) = replay(engine, output, PLAIN, [record(done, token_ids=tuple(tokens))])
    assert found.drawn_ids[:6] == done.token_ids[:6] and found.raw_logprobs[:5] == done.raw_logprobs[:5]
    assert found.raw_logprobs[5:] != done.raw_logprobs[5:] and found.gaps[5] > 0.0 == max(found.gaps[:5])
    assert found.logprobs[5] == found.raw_logprobs[5], "of the recorded token, at temperature 1"


def test_a_miss_is_measured() -> None:
    """How far from being drawn a token was: its share of probability greedily, nothing said where filters are on."""
    engine = tiny_engine()
    for params in (SamplingParams(max_tokens=2, temperature=0, seed=1), dataclasses.replace(PLAIN, top_k=3)):
        output = engine.run_batch([PROMPT], params)[0]
        (done,) = output.completions
        changed = record(done, token_ids=((done.token_ids[0] + 1) % engine.spec.vocab_size, *done.token_ids[1:]))
        (found,) = replay(engine, output, params, [changed])
        if params.is_greedy:
            assert 0.0 < found.gaps[0] <= 1.0 and found.logprobs[0] == 0.0
        else:
            assert math.isnan(found.gaps[0]) and math.isnan(found.logprobs[0])


def test_records_that_cannot_be() -> None:
    """R5: tokens outside the vocabulary or the context, no prompt, spans that contradict each other."""
    engine = tiny_engine(versions={"max_installed": 3})
    engine.submit(GenerateRequest("r", PROMPT, PLAIN, 1, OnUpdate.CARRY))
    for _ in range(3):
        engine.step()
    engine.pin(0)
    engine.install(tiny_weights(engine.spec, 1))
    output = drain(engine)["r"]
    (done,) = output.completions
    first, second = done.versions
    shifted = (VersionSpan(0, 0, first.end + 1), VersionSpan(1, first.end + 1, second.end))
    for changes, says in (
        ({"token_ids": (engine.spec.vocab_size, *done.token_ids[1:])}, "outside the vocabulary"),
        ({"token_ids": done.token_ids * 60}, "more than the context"),
        ({"versions": shifted}, f"token {first.end} is of version 0"),
        ({"versions": done.versions[:1]}, "don't cover"),
    ):  # fmt: skip
        with pytest.raises(ReplayError, match=says):
            replay(engine, output, PLAIN, [record(done, **changes)])
    with pytest.raises(ReplayError, match="prompt is empty"):
        replay(engine, dataclasses.replace(output, prompt_ids=()), PLAIN)
    empty = record(done, token_ids=(), versions=(), kv_versions=(VersionSpan(0, 0, len(PROMPT)),))
    assert replay(engine, output, PLAIN, [empty]) == [Replayed((), (), (), ())]


def test_it_says_what_computes() -> None:
    engine = tiny_engine()
    replayer = _replayer(engine)
    assert replayer.describe()["dtype"] == "bfloat16" and replayer.check(engine._parts.guard.weights_of(0)).reason
