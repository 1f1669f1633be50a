"""Engine: what a user of one process sees."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from harness.tiny_model import (
    EOS,
    VOCAB_SIZE,
    assert_baseline,
    drain,
    oracle_logprobs,
    run_all,
    tiny_engine,
    tiny_spec,
    tiny_weights,
)
from unison.engine.config import EngineConfig
from unison.engine.engine import Engine
from unison.engine.runtime.executor import Executor
from unison.ipc.errors import (
    BatchFailedError,
    CapacityError,
    InvalidRequestError,
    PromptTooLongError,
    UnknownVersionError,
)
from unison.ipc.types import (
    Completion,
    ErrorReason,
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    TokenDelta,
)

PROMPTS = [[5], [7, 8, 9], list(range(10, 27)), list(range(30, 70)), [9] * 8, list(range(10, 27)) + [99, 98]]
PARAMS = SamplingParams(max_tokens=9, seed=4, ignore_eos=True)


def samples(outputs: list[RequestOutput]) -> list[tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]]:
    return [(c.token_ids, c.logprobs, c.raw_logprobs) for output in outputs for c in output.completions]


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """Each prompt alone, three samples each."""
    engine = tiny_engine()
    return [engine.run_batch([prompt], PARAMS, n=3)[0] for prompt in PROMPTS]


# ---- samples do not depend on their company

CONFIGS = {
    "together": {},
    "block 1": {"cache": {"num_tokens": 1024, "block_size_tokens": 1}},
    "no prefix cache": {"cache": {"num_tokens": 1024, "prefix_caching": False}},
    "contiguous": {"cache": {"num_tokens": 1024, "strategy": "contiguous"}, "max_model_len": 64},
    "chunks of 1": {"scheduler": {"prefill_chunk_tokens": 1}},
    "small steps": {"scheduler": {"max_step_tokens": 7, "max_num_seqs": 7}},
    "two rows": {"scheduler": {"max_num_seqs": 2}},
    "one row": {"scheduler": {"max_num_seqs": 1}},
    "tiny pool": {"cache": {"num_tokens": 56, "block_size_tokens": 4}, "scheduler": {"watermark_fraction": 0.0}},
    "torch kernels": {"runtime": {"kernels": "torch"}},
}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "torch kernels"])
def test_batch_equals_each_alone(name: str, expected: list[RequestOutput]) -> None:
    """R3, P40, P41: batch, order, chunks, pool size, preemption and prefix hits change no bit of a sample."""
    engine = tiny_engine(**CONFIGS[name])
    order = [3, 0, 5, 2, 4, 1]
    outputs = engine.run_batch([PROMPTS[index] for index in order], PARAMS, n=3)
    assert samples(outputs) == samples([expected[index] for index in order])
    if name == "tiny pool":
        assert engine.stats().num_preemptions > 0
    assert_baseline(engine)


def test_torch_kernels_keep_the_promise_too() -> None:
    """R3: the path without native code is exact as well, among itself."""
    engine = tiny_engine(**CONFIGS["torch kernels"])
    assert engine.status().exact.is_exact, engine.status().exact.reason
    alone = [engine.run_batch([prompt], PARAMS, n=2)[0] for prompt in PROMPTS]
    assert samples(engine.run_batch(PROMPTS, PARAMS, n=2)) == samples(alone)


def test_inexact_switch_says_so() -> None:
    """P50: the switch to torch's fastest path works and is reported."""
    engine = tiny_engine(runtime={"kernels": "torch", "exact": False})
    assert not engine.status().exact.is_exact
    assert len(engine.run_batch([[1, 2]], PARAMS)[0].completions[0].token_ids) == 9


def test_group_members_differ_and_seeds_replay(expected: list[RequestOutput]) -> None:
    """R3, P40: members of a group differ; a request without a seed records the one that replays it."""
    engine = tiny_engine()
    for output in expected:
        assert len({completion.token_ids for completion in output.completions}) == 3
    (first,) = engine.run_batch([[5, 6]], SamplingParams(max_tokens=8), n=2)
    (again,) = engine.run_batch([[5, 6]], SamplingParams(max_tokens=8), n=2)
    assert samples([first]) != samples([again])
    seeded = SamplingParams(max_tokens=8, seed=first.completions[0].seed)
    assert samples(engine.run_batch([[5, 6]], seeded, n=2)) == samples([first])


def test_row_reuse_in_steady_decode() -> None:
    """S1, S6, S25, R4: B takes the row of A, which ended, at the very next position; its inputs come from B."""
    wanted = {
        name: tiny_engine().run_batch([[*ids]], replace(PARAMS, max_tokens=count))[0]
        for name, ids, count in (("a", (5, 6), 4), ("b", (7, 8, 9, 10, 11), 6), ("c", (12,), 12))
    }
    engine = tiny_engine(scheduler={"max_num_seqs": 2}, cache={"num_tokens": 256, "prefix_caching": False})
    requests = [
        GenerateRequest(name, output.prompt_ids, replace(PARAMS, max_tokens=len(output.completions[0].token_ids)))
        for name, output in wanted.items()
    ]
    done = run_all(engine, [requests[0], requests[2], requests[1]])
    assert {name: samples([output]) for name, output in done.items()} == {
        name: samples([output]) for name, output in wanted.items()
    }


def test_poisoned_slots_are_never_read(expected: list[RequestOutput]) -> None:
    """S25, R2: every free slot holds NaN before each step, and no result changes."""
    engine = tiny_engine()
    parts = engine._parts
    size = parts.caches.pool.strategy.block_size
    for index, prompt in enumerate(PROMPTS):
        engine.submit(GenerateRequest(str(index), tuple(prompt), PARAMS, n=3))
    done = {}
    while engine.has_work:
        free = [block * size + at for block in parts.caches.pool._free for at in range(size)]
        parts.buffer.poison(free)
        done.update((output.request_id, output) for output in engine.step().finished)
    assert samples([done[str(index)] for index in range(len(PROMPTS))]) == samples(expected)


# ---- log-probs


def test_logprobs_are_aligned_and_equal_the_packed_forward(expected: list[RequestOutput]) -> None:
    """S35, P08, P19: every raw log-prob belongs to its own token; at temperature 1 both log-probs are one."""
    engine = tiny_engine()
    for output in expected:
        for completion in output.completions:
            assert completion.raw_logprobs == oracle_logprobs(engine, output.prompt_ids, completion)
            assert completion.logprobs == completion.raw_logprobs
            assert set(completion.log_support_mass) == {0.0}


def test_score_equals_generation(expected: list[RequestOutput]) -> None:
    """S35: teacher-forced scores of a sample are its own raw log-probs, bit for bit, in any chunking."""
    engine = tiny_engine(scheduler={"prefill_chunk_tokens": 5})
    for output in expected:
        completion = output.completions[1]
        scored = engine.score(output.prompt_ids, completion.token_ids, top_k=3)
        assert scored.logprobs == completion.raw_logprobs
        assert scored.version == 0
        for token, logprob, top in zip(completion.token_ids, scored.logprobs, scored.top_logprobs, strict=True):
            assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
            assert token not in top.token_ids or top.logprobs[top.token_ids.index(token)] == pytest.approx(logprob)
    assert_baseline(engine)


def test_alternatives_come_with_tokens() -> None:
    """S35: `logprobs=k` gives k alternatives per token, the greedy token first."""
    engine = tiny_engine()
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=4, ignore_eos=True)
    (output,) = engine.run_batch([[3, 4]], params)
    (completion,) = output.completions
    assert [top.token_ids[0] for top in completion.top_logprobs] == list(completion.token_ids)
    assert [top.logprobs[0] for top in completion.top_logprobs] == pytest.approx(completion.raw_logprobs)


def test_prompt_logprobs_with_generation() -> None:
    """S35: prompt scores come beside a completion, are complete and don't use the prefix index."""
    engine = tiny_engine()
    prompt = PROMPTS[3]
    plain = engine.run_batch([prompt], PARAMS)[0]
    (output,) = engine.run_batch([prompt], replace(PARAMS, prompt_logprobs=2), n=2)
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs == engine.score(prompt[:1], prompt[1:]).logprobs
    assert output.prompt_top_logprobs is not None and len(output.prompt_top_logprobs) == len(prompt) - 1
    assert output.completions[0].token_ids == plain.completions[0].token_ids


# ---- ends and edges


def test_work_is_linear() -> None:
    """S34: P + R - 1 forward tokens per sequence, and shared prompts once per group."""
    engine = tiny_engine(cache={"num_tokens": 1024, "prefix_caching": False})
    engine.run_batch([PROMPTS[3]], PARAMS, n=4)
    stats = engine.stats()
    assert stats.num_prefill_tokens == len(PROMPTS[3])
    assert stats.num_decode_tokens == 4 * (PARAMS.max_tokens - 1)


@pytest.mark.parametrize("prompt_len", [1, 2, 511])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_shortest_and_longest(prompt_len: int, max_tokens: int) -> None:
    """P24: one-token prompts and completions, and a prompt that fills the context but for one token."""
    engine = tiny_engine()
    (output,) = engine.run_batch([[4] * prompt_len], SamplingParams(max_tokens=max_tokens, ignore_eos=True), n=2)
    for completion in output.completions:
        assert len(completion.token_ids) == min(max_tokens, 512 - prompt_len)
        assert completion.finish_reason is FinishReason.LENGTH
        assert (completion.versions[0].first, completion.versions[-1].end) == (0, len(completion.token_ids))
    assert_baseline(engine)


def test_every_eos_and_stop_token_ends_and_is_reported() -> None:
    """P23, S27: several EOS ids, own stop tokens, ignore_eos and min_tokens."""
    engine = tiny_engine()
    only = {"allowed_token_ids": (3,), "max_tokens": 6}
    (output,) = engine.run_batch([[5]], SamplingParams(**only))
    assert (output.completions[0].token_ids, output.completions[0].matched_stop) == ((3,), 3)
    assert output.completions[0].finish_reason is FinishReason.STOP
    (output,) = engine.run_batch([[5]], SamplingParams(**only, ignore_eos=True))
    assert output.completions[0].finish_reason is FinishReason.LENGTH
    assert output.completions[0].matched_stop is None
    both = SamplingParams(max_tokens=6, allowed_token_ids=(EOS, 40), stop_token_ids=(41,), min_tokens=2)
    (output,) = engine.run_batch([[5]], both)
    assert output.completions[0].token_ids[:2] == (40, 40)
    (output,) = engine.run_batch([[5]], SamplingParams(max_tokens=6, allowed_token_ids=(41,), stop_token_ids=(41,)))
    assert output.completions[0].matched_stop == 41


BAD = [
    ("prompt_ids", (VOCAB_SIZE,), {}),
    ("stop_token_ids", (1,), {"stop_token_ids": (VOCAB_SIZE,)}),
    ("bad_token_ids", (1,), {"bad_token_ids": (VOCAB_SIZE + 5,)}),
    ("allowed_token_ids", (1,), {"allowed_token_ids": (VOCAB_SIZE,)}),
    ("logit_bias", (1,), {"logit_bias": ((VOCAB_SIZE, 1.0),)}),
    ("prompt_ids", (1,) * 512, {}),
]


@pytest.mark.parametrize("field,prompt,params", BAD)
def test_bad_requests_are_refused_before_anything_is_taken(field: str, prompt: tuple[int, ...], params: dict) -> None:
    """R2, S8: the error names the field; pool, tables, queue and metrics are untouched."""
    engine = tiny_engine()
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit(GenerateRequest("r", prompt, SamplingParams(max_tokens=4, **params)))
    assert caught.value.field == field
    assert engine.stats().num_requests_submitted == 0 and not engine.has_work
    with pytest.raises(InvalidRequestError):
        engine.run_batch([[1], list(prompt)], SamplingParams(max_tokens=4, **params))
    assert engine.stats().num_requests_submitted == 0
    assert_baseline(engine)


def test_long_prompt_names_the_limit() -> None:
    """R2: whether the model or the pool is too small is said."""
    with pytest.raises(PromptTooLongError, match="cache.num_tokens"):
        tiny_engine(cache={"num_tokens": 32}).run_batch([[1] * 40], PARAMS)
    with pytest.raises(PromptTooLongError, match="context"):
        tiny_engine(max_model_len=32).run_batch([[1] * 40], PARAMS)


def test_duplicate_ids_and_a_full_queue_are_refused() -> None:
    """P47, P29, R2: an id in flight can't come twice; a full queue says so; both leave the others alone."""
    engine = tiny_engine(scheduler={"max_waiting": 2})
    engine.submit(GenerateRequest("a", (1, 2), PARAMS))
    with pytest.raises(InvalidRequestError, match="in flight"):
        engine.submit(GenerateRequest("a", (1, 2), PARAMS))
    engine.submit(GenerateRequest("b", (1, 2), PARAMS))
    with pytest.raises(CapacityError, match="max_waiting"):
        engine.submit(GenerateRequest("c", (1, 2), PARAMS))
    assert set(drain(engine)) == {"a", "b"}
    engine.submit(GenerateRequest("a", (1, 2), PARAMS))
    assert set(drain(engine)) == {"a"}
    assert_baseline(engine)


def test_unknown_pin_is_refused() -> None:
    """V5: a version that isn't installed can't be pinned."""
    engine = tiny_engine()
    with pytest.raises(UnknownVersionError):
        engine.submit(GenerateRequest("a", (1,), PARAMS, pin_version=3))
    assert_baseline(engine)


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_in_every_state(num_steps: int) -> None:
    """R1, P42: waiting, prefilling, decoding: one terminal event each, everything given back, the others go on."""
    engine = tiny_engine(scheduler={"prefill_chunk_tokens": 8})
    engine.submit(GenerateRequest("gone", tuple(PROMPTS[3][:20]), PARAMS, n=2))
    engine.submit(GenerateRequest("stays", (1, 2, 3), PARAMS))
    deltas: list[TokenDelta] = []
    for _ in range(num_steps):
        deltas.extend(engine.step().deltas)
    assert engine.abort("gone") and not engine.abort("nobody")
    output = engine.step()
    deltas.extend(output.deltas)
    (gone,) = [done for done in output.finished if done.request_id == "gone"]
    assert not engine.abort("gone")
    for completion in gone.completions:
        assert (completion.finish_reason, completion.error) == (FinishReason.ABORTED, ErrorReason.CANCELLED)
        own = [delta for delta in deltas if (delta.request_id, delta.index) == ("gone", completion.index)]
        assert sum(delta.finish_reason is not None for delta in own) == 1
        assert tuple(token for delta in own for token in delta.token_ids) == completion.token_ids
    assert drain(engine)["stays"].completions[0].finish_reason is FinishReason.LENGTH
    assert_baseline(engine)


def test_deltas_tile_the_completion() -> None:
    """R1, V3: the deltas of a completion are its tokens, in order, once, with their versions."""
    engine = tiny_engine()
    engine.submit(GenerateRequest("a", (1, 2, 3), replace(PARAMS, logprobs=2), n=3))
    deltas: dict[int, list[TokenDelta]] = {0: [], 1: [], 2: []}
    finished: list[RequestOutput] = []
    while engine.has_work:
        output = engine.step()
        finished.extend(output.finished)
        for delta in output.deltas:
            deltas[delta.index].append(delta)
    for completion in finished[0].completions:
        own = deltas[completion.index]
        assert [delta.first for delta in own] == list(range(9))
        assert sum((delta.token_ids for delta in own), ()) == completion.token_ids
        assert sum((delta.top_logprobs for delta in own), ()) == completion.top_logprobs
        assert all(delta.versions[0].first == delta.first for delta in own)
        assert [delta.finish_reason for delta in own] == [None] * 8 + [FinishReason.LENGTH]


# ---- faults


def test_a_broken_step_ends_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1, R2, S28, S29: an exception in the forward pass: terminal errors, everything given back, the engine goes
    on."""
    engine = tiny_engine(scheduler={"max_num_seqs": 2})
    for name in "abc":
        engine.submit(GenerateRequest(name, (1, 2, 3), PARAMS, n=2))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "run", _raise)
        with pytest.raises(MemoryError):
            engine.step()
    done = drain(engine)
    reasons = {name: {c.finish_reason for c in output.completions} for name, output in done.items()}
    assert reasons == {"a": {FinishReason.ERROR}, "b": {FinishReason.LENGTH}, "c": {FinishReason.LENGTH}}
    assert {c.error for c in done["a"].completions} == {ErrorReason.INTERNAL}
    assert_baseline(engine)
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "run", _raise)
        with pytest.raises(MemoryError):
            engine.run_batch(PROMPTS, PARAMS, n=2)
    assert_baseline(engine)
    assert len(engine.run_batch(PROMPTS, PARAMS)) == len(PROMPTS)


def _raise(*_: object) -> None:
    raise MemoryError("injected")


def test_non_finite_logits_never_become_a_token() -> None:
    """P18, S27, S28, R5: NaN weights end each request with its reason; a batch raises with indices and reasons."""
    spec = tiny_spec(tie_word_embeddings=False)
    weights = tiny_weights(spec)
    weights["lm_head.weight"][17] = float("nan")
    engine = Engine(spec, weights, EngineConfig.from_dict({"cache": {"num_tokens": 256}}))
    with pytest.raises(BatchFailedError) as caught:
        engine.run_batch([[1], [2, 3]], PARAMS, n=2)
    assert caught.value.failures == {0: "non_finite_logits", 1: "non_finite_logits"}
    assert_baseline(engine)
    engine.submit(GenerateRequest("a", (1, 2), PARAMS))
    completion = drain(engine)["a"].completions[0]
    assert (completion.finish_reason, completion.error, completion.token_ids) == (
        FinishReason.ERROR, ErrorReason.NON_FINITE_LOGITS, ()
    )  # fmt: skip
    with pytest.raises(BatchFailedError):
        engine.score([1, 2], [3])
    assert_baseline(engine)


def test_empty_support_is_an_error() -> None:
    """S27: bans that leave nothing to draw."""
    engine = tiny_engine()
    params = SamplingParams(max_tokens=3, allowed_token_ids=(7,), bad_token_ids=(7,))
    with pytest.raises(BatchFailedError, match="empty_support"):
        engine.run_batch([[1]], params)
    assert_baseline(engine)


def test_a_sequence_that_outgrows_the_pool_ends() -> None:
    """S29, R2: alone and without room for one more block, a sequence ends with its reason instead of waiting for
    ever."""
    engine = tiny_engine(cache={"num_tokens": 32, "block_size_tokens": 4})
    pool = engine._parts.caches.pool
    engine.submit(GenerateRequest("a", tuple(range(5, 15)), replace(PARAMS, max_tokens=20)))
    engine.step()
    taken = pool.take(pool.num_free)
    completion = _finish_within(engine, 10)
    assert (completion.finish_reason, completion.error) == (FinishReason.ERROR, ErrorReason.KV_EXHAUSTED)
    pool.release(taken)
    assert_baseline(engine)


def _finish_within(engine: Engine, num_steps: int) -> Completion:
    for _ in range(num_steps):
        for output in engine.step().finished:
            return output.completions[0]
    raise AssertionError(f"nothing finished in {num_steps} steps")


# ---- scheduling


def test_a_large_prompt_is_not_starved() -> None:
    """R1: small requests may overtake one that doesn't fit for `max_bypass_steps` steps, not for ever."""
    engine = tiny_engine(cache={"num_tokens": 64, "block_size_tokens": 4}, scheduler={"max_bypass_steps": 3})
    engine.submit(GenerateRequest("small-0", tuple(range(20)), replace(PARAMS, max_tokens=12)))
    engine.step()
    engine.submit(GenerateRequest("large", tuple(range(100, 152)), replace(PARAMS, max_tokens=4)))
    order: list[str] = []
    for index in range(1, 30):
        engine.submit(GenerateRequest(f"small-{index}", (index, 2), replace(PARAMS, max_tokens=4)))
        order.extend(output.request_id for output in engine.step().finished)
    order.extend(drain(engine))
    assert order.index("large") < order.index("small-25")


def test_a_group_shares_its_prompt_and_copies_on_write() -> None:
    """R3: n samples hold the prompt's whole blocks once, and each its own tail."""
    engine = tiny_engine(cache={"num_tokens": 1024, "block_size_tokens": 4, "prefix_caching": False})
    engine.submit(GenerateRequest("a", tuple(range(10, 28)), PARAMS, n=4))
    engine.step()
    engine.step()
    parts = engine._parts
    used = parts.caches.pool.strategy.num_blocks - parts.caches.pool.num_free
    assert used == 4 + 4  # four whole blocks of the prompt, and a tail of its own per sample
    drain(engine)
    assert_baseline(engine)


def test_equal_prompts_hit_the_prefix_index() -> None:
    """R3: reuse ends before the last prompt token, and is counted."""
    engine = tiny_engine()
    first, second = engine.run_batch([PROMPTS[3]], PARAMS)[0], engine.run_batch([PROMPTS[3]], PARAMS)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 36)
    assert samples([first]) == samples([second])


def test_a_conversation_goes_on_in_tokens() -> None:
    """P21, R3: the second turn is the first one's own ids and what follows; its KV is found, and nothing is encoded
    again."""
    engine = tiny_engine()
    first = engine.run_batch([PROMPTS[2]], PARAMS)[0].completions[0]
    turn = [*PROMPTS[2], *first.token_ids, 33, 34]
    second = engine.run_batch([turn], PARAMS)[0]
    assert second.num_cached_tokens == (len(PROMPTS[2]) + len(first.token_ids) - 1) // 4 * 4
    assert samples([second]) == samples(tiny_engine().run_batch([turn], PARAMS))


def test_a_batch_keeps_what_belongs_to_other_requests() -> None:
    """R1: run_batch while a request streams: its events come with the next step, none is lost."""
    engine = tiny_engine()
    engine.submit(GenerateRequest("stream", (1, 2, 3), PARAMS))
    engine.run_batch([[7, 8]], replace(PARAMS, max_tokens=5))
    tokens: list[int] = []
    finished = []
    while engine.has_work:
        output = engine.step()
        tokens.extend(token for delta in output.deltas for token in delta.token_ids)
        finished.extend(output.finished)
    assert tuple(tokens) == finished[0].completions[0].token_ids
    assert len(tokens) == 9


def test_empty_batch() -> None:
    """P24: nothing asked, nothing given."""
    assert tiny_engine().run_batch([], PARAMS) == []


# ---- who builds the engine


def test_engine_built_inside_inference_mode_works() -> None:
    """S3, S10, S11, S12: buffers are ordinary tensors, and 16 tokens come out, also lazily grown and from another
    thread."""
    with torch.inference_mode():
        engine = tiny_engine()
    parts = engine._parts
    space = parts.stepper._executor._workspace
    buffers = [*vars(space.host).values(), *parts.buffer.layer(0), parts.decoder._cos]
    assert not any(tensor.is_inference() for tensor in buffers)
    assert not any(tensor.is_pinned() for tensor in vars(space.host).values())
    params = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)
    wanted = samples(tiny_engine().run_batch([[1, 2, 3]], params))
    results: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: results.extend(engine.run_batch([[1, 2, 3]], params)))
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and samples(results) == wanted
    assert samples(engine.run_batch([[1, 2, 3]], params)) == wanted


def test_warm_up_leaves_nothing_but_counters() -> None:
    """S9: the warm-up prompt has the configured length."""
    engine = tiny_engine(runtime={"prefill_warmup_tokens": 24})
    engine.warm_up()
    assert engine.stats().num_prefill_tokens == 24
    assert_baseline(engine)
