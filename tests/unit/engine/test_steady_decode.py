"""Steady decode: the device state of the step before serves the very same sequences, and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from harness.tiny_model import assert_baseline, drain, tiny_engine
from unison.engine.cache.requests import Binding, RequestCaches
from unison.engine.engine import Engine
from unison.ipc.types import GenerateRequest, RequestOutput, SamplingParams

PARAMS = SamplingParams(max_tokens=10, seed=4, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each pure decode step was told about the one before."""
    told: list[bool] = []
    bind = RequestCaches.bind

    def listen(self: RequestCaches, *arguments: object) -> Binding:
        binding = bind(self, *arguments)  # type: ignore[arg-type]
        told.append(binding.is_steady)
        return binding

    monkeypatch.setattr(RequestCaches, "bind", listen)
    return told


def request(name: str, length: int, first: int, max_tokens: int = 10) -> GenerateRequest:
    return GenerateRequest(name, tuple(range(first, first + length)), replace(PARAMS, max_tokens=max_tokens))


def values(output: RequestOutput) -> tuple[object, ...]:
    (completion,) = output.completions
    return completion.token_ids, completion.logprobs, completion.raw_logprobs


def alone(requests: Sequence[GenerateRequest]) -> dict[str, tuple[object, ...]]:
    wanted = {}
    for own in requests:
        engine = tiny_engine()
        engine.submit(own)
        wanted[own.request_id] = values(drain(engine)[own.request_id])
    return wanted


def finish(engine: Engine) -> dict[str, tuple[object, ...]]:
    done = {name: values(output) for name, output in drain(engine).items()}
    assert_baseline(engine)
    return done


def test_the_same_sequences_are_steady(steady: list[bool]) -> None:
    """S1, S5, R4: the first decode after a prompt is not steady, every later one is, also across block borders."""
    engine = tiny_engine()
    requests = [request("a", 3, 5), request("b", 6, 20)]
    for own in requests:
        engine.submit(own)
    done, told = finish(engine), list(steady)
    assert done == alone(requests)
    assert told == [False] + [True] * 8


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_an_heir_at_the_next_position_gets_inputs_of_its_own(lead: int, steady: list[bool]) -> None:
    """S1, S6, S25, R4: A ends, B takes A's only row and decodes where A would have gone on, or a little before."""
    first, heir = request("a", 4, 5, max_tokens=4), request("b", 8 - lead, 40)
    engine = tiny_engine(scheduler={"max_num_seqs": 1}, cache={"num_tokens": 32, "prefix_caching": False})
    for own in (first, heir):
        engine.submit(own)
    done, told = finish(engine), list(steady)
    assert done == alone([first, heir])
    assert told == [False] + [True] * 2 + [False] + [True] * 8


def test_shrink_and_grow_to_the_same_size(steady: list[bool]) -> None:
    """S1, S6, R4: two rows, one leaves, another comes: the same number of rows is not the same rows."""
    requests = [request("a", 2, 5), request("b", 5, 20, max_tokens=3), request("c", 1, 60)]
    engine = tiny_engine(scheduler={"max_num_seqs": 2})
    for own in requests[:2]:
        engine.submit(own)
    done: dict[str, tuple[object, ...]] = {}
    while "b" not in done:
        done.update((output.request_id, values(output)) for output in engine.step().finished)
    engine.submit(requests[2])
    done.update(finish(engine))
    told = list(steady)
    assert done == alone(requests)
    assert told.count(False) == 3


def test_swapped_rows() -> None:
    """S1, R4: both are preempted and come back into each other's rows."""
    requests = [request("a", 3, 5), request("b", 3, 20)]
    engine = tiny_engine(cache={"num_tokens": 256, "prefix_caching": False})
    for own in requests:
        engine.submit(own)
    for _ in range(4):
        engine.step()
    scheduler = engine._parts.scheduler
    before = [seq.cache.row for seq in scheduler._running if seq.cache is not None]
    for seq in list(scheduler._running):
        scheduler._preempt(seq)
    engine.step()
    after = [seq.cache.row for seq in scheduler._running if seq.cache is not None]
    assert after == before[::-1]
    assert finish(engine) == alone(requests)


def test_a_late_prompt_interrupts_and_restores_the_steady_state(steady: list[bool]) -> None:
    """S1, S5, R4: a step with a prefill in it is no pure decode, and neither is the one after it."""
    requests = [request("a", 3, 5, max_tokens=14), request("b", 6, 20, max_tokens=4)]
    engine = tiny_engine()
    engine.submit(requests[0])
    for _ in range(5):
        engine.step()
    engine.submit(requests[1])
    done, told = finish(engine), list(steady)
    assert done == alone(requests)
    assert told == [False] + [True] * 3 + [False] + [True] * 2 + [False] + [True] * 4


def test_an_engine_from_another_thread() -> None:
    """S10, S11, S12: built in one thread, stepped in a second and a third, it gives the same 16 tokens."""
    built: list[Engine] = []
    done: list[dict[str, tuple[object, ...]]] = []
    own = request("a", 5, 5, max_tokens=16)
    _in_thread(lambda: built.append(tiny_engine()))
    (engine,) = built
    _in_thread(lambda: (engine.submit(own), engine.step(), engine.step()))
    _in_thread(lambda: done.append(finish(engine)))
    assert done == [alone([own])]
    assert len(done[0]["a"][0]) == 16  # type: ignore[arg-type]


def _in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_free_slots_are_never_read_when_rows_change_hands(dtype: str) -> None:
    """S25, R2: NaN in every slot that holds no token, also in the unwritten part of a sequence's own blocks."""
    requests = [request(str(index), 1 + 3 * index, 7 * index, max_tokens=3 + index) for index in range(6)]
    config = {"dtype": dtype, "scheduler": {"max_num_seqs": 2, "prefill_chunk_tokens": 4}}
    plain, poisoned = (tiny_engine(**config, cache={"num_tokens": 80, "block_size_tokens": 8}) for _ in range(2))
    parts = poisoned._parts
    for own in requests:
        plain.submit(own)
        poisoned.submit(own)
    done: dict[str, tuple[object, ...]] = {}
    while poisoned.has_work:
        held = {block for cache in parts.caches._open for block in cache.blocks} | set(parts.caches.index.blocks())
        slots = [block * 8 + at for block in set(range(10)) - held for at in range(8)]
        for cache in parts.caches._open:
            tail = range(cache.num_tokens, len(cache.blocks) * 8)
            slots.extend(cache.blocks[at // 8] * 8 + at % 8 for at in tail)
        parts.buffer.poison(slots)
        done.update((output.request_id, values(output)) for output in poisoned.step().finished)
    assert done == finish(plain)
