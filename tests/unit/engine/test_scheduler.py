"""Scheduler: who runs when, seen through the plans that the real engine makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.tiny_model import assert_baseline, drain, tiny_engine, tiny_weights
from unison.engine.engine import Engine
from unison.engine.plan import Chunk
from unison.ipc.errors import CapacityError
from unison.ipc.types import Completion, FinishReason, GenerateRequest, OnUpdate, RequestOutput, SamplingParams

PARAMS = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)


def chunks(engine: Engine) -> list[Chunk]:
    """What the last step ran, in the order of its rows."""
    return [chunk for batch in engine._parts.stepper.last_plan.batches for chunk in batch.chunks]


def planned(engine: Engine) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request.request_id, chunk.first, chunk.end) for chunk in chunks(engine)]


def submit(engine: Engine, name: str, length: int, first: int = 5, max_tokens: int = 6, n: int = 1) -> None:
    prompt = tuple(range(first, first + length))
    engine.submit(GenerateRequest(name, prompt, replace(PARAMS, max_tokens=max_tokens), n))


def order_of_finish(engine: Engine) -> list[str]:
    names: list[str] = []
    while engine.has_work:
        names.extend(output.request_id for output in engine.step().finished)
        engine.check_invariants()
    return names


def values(output: RequestOutput) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(completion.token_ids, completion.raw_logprobs) for completion in output.completions]


def alone(request: GenerateRequest) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    engine = tiny_engine()
    engine.submit(request)
    return values(drain(engine)[request.request_id])


# ---- order of service


def test_first_come_first_served() -> None:
    """R1: with one row, requests are served in the order of their arrival."""
    engine = tiny_engine(scheduler={"max_num_seqs": 1})
    for name in "dacb":
        submit(engine, name, 3)
    assert order_of_finish(engine) == ["d", "a", "c", "b"]
    assert_baseline(engine)


def test_decodes_come_first_and_prefills_share_what_is_left() -> None:
    """P41: one token per running sequence, then chunks by arrival, within the step's budget."""
    engine = tiny_engine(scheduler={"max_step_tokens": 16, "max_num_seqs": 8, "prefill_chunk_tokens": 10})
    submit(engine, "first", 2)
    engine.step()
    submit(engine, "long", 24, first=30)
    submit(engine, "next", 9, first=70)
    engine.step()
    assert planned(engine) == [("first", 2, 3), ("long", 0, 10), ("next", 0, 5)]
    engine.step()
    assert planned(engine) == [("first", 3, 4), ("long", 10, 20), ("next", 5, 9)]
    engine.step()
    assert planned(engine) == [("first", 4, 5), ("next", 9, 10), ("long", 20, 24)]


def test_a_step_never_exceeds_its_budget() -> None:
    """R1, P41: whatever arrives, a step's forward passes hold at most `max_step_tokens` rows, each sequence once."""
    engine = tiny_engine(scheduler={"max_step_tokens": 11, "max_num_seqs": 11, "prefill_chunk_tokens": 7})
    for index in range(12):
        submit(engine, str(index), 1 + 5 * index % 23, first=index, n=1 + index % 3)
    done: set[str] = set()
    while engine.has_work:
        done.update(output.request_id for output in engine.step().finished)
        ran = chunks(engine)
        assert sum(chunk.end - chunk.first for chunk in ran) <= 11
        assert all(chunk.end - chunk.first <= 7 for chunk in ran)
        assert len({id(chunk.sequence) for chunk in ran}) == len(ran)
    assert len(done) == 12
    assert_baseline(engine)


def test_admission_keeps_a_reserve() -> None:
    """P41: a new request isn't admitted into the last free blocks, which running ones need to grow."""
    engine = tiny_engine(
        cache={"num_tokens": 80, "block_size_tokens": 4, "prefix_caching": False},
        scheduler={"watermark_fraction": 0.25},
    )
    submit(engine, "runs", 40, max_tokens=12)
    engine.step()
    submit(engine, "waits", 24, first=60)
    engine.step()
    assert (engine.status().num_running, engine.status().num_waiting) == (1, 1)
    assert order_of_finish(engine) == ["runs", "waits"]
    assert engine.stats().num_preemptions == 0


def test_the_youngest_steps_back_and_returns_before_newcomers() -> None:
    """P41, R3: preemption takes the youngest; it is ahead of everyone who came after it, and loses no bit."""
    engine = tiny_engine(
        cache={"num_tokens": 48, "block_size_tokens": 4, "prefix_caching": False},
        scheduler={"watermark_fraction": 0.0},
    )
    submit(engine, "old", 20, max_tokens=16)
    submit(engine, "young", 20, first=60, max_tokens=16)
    engine.step()
    submit(engine, "newcomer", 20, first=90, max_tokens=2)
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        done.update((output.request_id, output) for output in engine.step().finished)
        engine.check_invariants()
    assert list(done) == ["old", "young", "newcomer"]
    assert engine.stats().num_preemptions > 0
    for name, output in done.items():
        count = len(output.completions[0].token_ids)
        params = replace(PARAMS, max_tokens=count)
        assert values(output) == alone(GenerateRequest(name, output.prompt_ids, params))


@pytest.mark.parametrize("small_len", [3, 5, 7])
def test_preempted_and_admitted_anew_in_one_step_runs_once(small_len: int) -> None:
    """R3, P41: an old prompt's chunk takes the room of two decodes, one of which fits again at once: it is planned
    once, on its new KV."""
    engine = tiny_engine(
        cache={"num_tokens": 64, "block_size_tokens": 4, "prefix_caching": False},
        scheduler={"watermark_fraction": 0.0, "prefill_chunk_tokens": 24},
    )
    lengths = {"prompt": (5, 40), "large": (50, 24), "small": (100, small_len)}
    for name, (first, length) in lengths.items():
        submit(engine, name, length, first=first)
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        done.update((output.request_id, output) for output in engine.step().finished)
        ran = [id(chunk.sequence) for chunk in chunks(engine)]
        assert len(set(ran)) == len(ran)
        engine.check_invariants()
    assert engine.stats().num_preemptions >= 2
    for name, (first, length) in lengths.items():
        assert values(done[name]) == alone(GenerateRequest(name, tuple(range(first, first + length)), PARAMS))
    assert_baseline(engine)


@pytest.mark.parametrize("when", range(1, 7))
def test_preemption_anywhere_changes_nothing(when: int) -> None:
    """P41, R3: in its prompt, at its first token or later, a group that is preempted gives the same bits."""
    request = GenerateRequest("a", tuple(range(20, 41)), PARAMS, n=3)
    engine = tiny_engine(scheduler={"prefill_chunk_tokens": 8})
    engine.submit(request)
    for _ in range(when):
        engine.step()
    scheduler = engine._parts.scheduler
    for seq in list(scheduler._running):
        scheduler._preempt(seq)
    engine.check_invariants()
    assert values(drain(engine)["a"]) == alone(request)
    assert engine.stats().num_preemptions >= 1
    assert_baseline(engine)


# ---- room


def test_blocks_below_idle_ones_do_not_keep_them() -> None:
    """R3, S29: of two requests that computed one prompt side by side, the index keeps the first one's blocks, under
    which the second one's lie; when the second needs the whole pool, it gets it."""
    engine = tiny_engine(cache={"num_tokens": 64, "block_size_tokens": 4}, scheduler={"watermark_fraction": 0.0})
    submit(engine, "ends", 8, max_tokens=2)
    submit(engine, "grows", 8, max_tokens=400)
    grown = drain(engine)["grows"].completions[0]
    assert (grown.finish_reason, len(grown.token_ids)) == (FinishReason.LENGTH, 64 - 8)
    assert_baseline(engine)


def test_a_sequence_may_fill_the_pool_to_the_last_slot() -> None:
    """P24, S29: alone, a sequence ends by length when every slot holds a token, not by a fault."""
    for strategy in ({"strategy": "contiguous"}, {"block_size_tokens": 4}, {"block_size_tokens": 1}):
        engine = tiny_engine(cache={"num_tokens": 32, **strategy}, max_model_len=32)
        submit(engine, "a", 31, max_tokens=9)
        submit(engine, "b", 9, max_tokens=99)
        counts = {name: len(output.completions[0].token_ids) for name, output in drain(engine).items()}
        assert counts == {"a": 1, "b": 23}
        assert_baseline(engine)


def test_the_queue_limit_counts_who_waits() -> None:
    """R2, P47: requests that run don't count against `max_waiting`; the refusal names it and keeps nothing."""
    engine = tiny_engine(scheduler={"max_waiting": 2, "max_num_seqs": 2})
    for name in "ab":
        submit(engine, name, 3)
    with pytest.raises(CapacityError, match="2 requests wait.*max_waiting"):
        submit(engine, "c", 3)
    engine.step()
    for name in "cd":
        submit(engine, name, 3)
    with pytest.raises(CapacityError):
        submit(engine, "e", 3)
    assert engine.stats().num_requests_submitted == 4
    assert set(drain(engine)) == set("abcd")
    assert_baseline(engine)


# ---- groups


def test_a_group_larger_than_the_rows_refills_them() -> None:
    """R1, R3, S34: 20 samples over 3 rows run in waves; a row is taken again as soon as it is free."""
    request = GenerateRequest("a", tuple(range(9, 22)), PARAMS, n=20)
    engine = tiny_engine(scheduler={"max_num_seqs": 3})
    engine.submit(request)
    steps = 0
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        steps += 1
        done.update((output.request_id, output) for output in engine.step().finished)
        assert engine.status().num_running <= 3
    assert values(done["a"]) == alone(request)
    assert steps <= 7 * (PARAMS.max_tokens + 2)
    assert_baseline(engine)


def test_members_wait_for_the_leader_and_fork_from_its_logits() -> None:
    """R3, S34: while the first member is in its prompt the others hold nothing; then all draw from one row."""
    engine = tiny_engine(scheduler={"prefill_chunk_tokens": 8})
    submit(engine, "a", 20, n=4)
    for _ in range(2):
        engine.step()
        assert (engine.status().num_running, engine.status().num_waiting) == (1, 3)
    output = engine.step()
    (chunk,) = chunks(engine)
    assert (chunk.sequence.index, [seq.index for seq in chunk.forks]) == (0, [1, 2, 3])
    assert sorted(delta.index for delta in output.deltas) == [0, 1, 2, 3]
    assert engine.status().num_running == 4


def test_samples_write_into_blocks_of_their_own() -> None:
    """R3, S25: after the fork each member copies the prompt's last, half full block before it writes."""
    engine = tiny_engine(cache={"num_tokens": 256, "block_size_tokens": 4, "prefix_caching": False})
    submit(engine, "a", 6, n=3)
    engine.step()
    engine.step()
    copies = engine._parts.stepper.last_plan.copies
    assert len(copies) == 2 and len({copy.src for copy in copies}) == 1
    caches = [seq.cache for seq in engine._parts.scheduler._running]
    assert len({cache.blocks[0] for cache in caches if cache}) == 1
    assert len({cache.blocks[1] for cache in caches if cache}) == 3
    drain(engine)
    assert_baseline(engine)


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_abort_of_a_group_in_waves(num_steps: int) -> None:
    """P42, R1: members that wait, decode and are done: one terminal event each, done ones keep their own reason."""
    engine = tiny_engine(scheduler={"max_num_seqs": 2})
    submit(engine, "a", 4, max_tokens=3, n=5)
    terminals: list[tuple[int, FinishReason]] = []
    finished: list[Completion] = []
    outputs = [engine.step() for _ in range(num_steps)]
    engine.abort("a")
    outputs.append(engine.step())
    for output in outputs:
        terminals.extend((d.index, d.finish_reason) for d in output.deltas if d.finish_reason is not None)
        finished.extend(completion for done in output.finished for completion in done.completions)
    assert sorted(terminals) == [(completion.index, completion.finish_reason) for completion in finished]
    assert len(terminals) == 5
    assert_baseline(engine)


# ---- versions


def test_an_update_in_the_middle_of_a_plan_of_two_versions() -> None:
    """V2, V3, R3: requests of two versions share steps, each in its version's own forward pass, within one budget."""
    engine = tiny_engine(scheduler={"max_step_tokens": 8, "max_num_seqs": 8})
    submit(engine, "old", 3, n=2)
    engine.step()
    engine.install(tiny_weights(engine.spec, 1))
    submit(engine, "new", 12, first=40)
    engine.step()
    batches = engine._parts.stepper.last_plan.batches
    assert [batch.version for batch in batches] == [0, 1]
    assert sum(batch.num_tokens for batch in batches) == 8
    done = drain(engine)
    versions = {name: {c.versions[0].version for c in output.completions} for name, output in done.items()}
    assert versions == {"old": {0}, "new": {1}}


@pytest.mark.parametrize("on_update", list(OnUpdate))
def test_a_preempted_request_follows_its_rule_too(on_update: OnUpdate) -> None:
    """V2, V3, R1: a flip while a started sequence waits without KV is treated like one while it runs."""
    engine = tiny_engine(cache={"num_tokens": 256, "prefix_caching": False})
    engine.submit(GenerateRequest("a", (5, 6, 7), PARAMS, on_update=on_update))
    engine.step()
    engine.step()
    scheduler = engine._parts.scheduler
    scheduler._preempt(scheduler._running[0])
    engine.install(tiny_weights(engine.spec, 1))
    completion = drain(engine)["a"].completions[0]
    spans = [(span.version, span.first, span.end) for span in completion.versions]
    if on_update is OnUpdate.FINISH:
        assert spans == [(0, 0, 6)]
    elif on_update is OnUpdate.ABORT:
        assert (spans, completion.finish_reason) == ([(0, 0, 2)], FinishReason.ABORTED)
    else:
        assert spans == [(0, 0, 2), (1, 2, 6)]
        assert [(span.version, span.end) for span in completion.kv_versions] == [(1, 8)]
    assert_baseline(engine)
