"""Tapes: steady decode replayed as one native call gives what Python gives, or isn't replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.tiny_model import oracle_logprobs, tiny_engine, tiny_spec, tiny_weights
from unison.engine.engine import Engine
from unison.engine.kernels import NativeKernels
from unison.engine.kernels.build import library
from unison.engine.kernels.tape import Tape, recording
from unison.engine.runtime import tapes
from unison.ipc.errors import InvariantError
from unison.ipc.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels here")

PROMPTS = [[5], [7, 8, 9], list(range(10, 27)), [9] * 8, [11, 12]]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """The tape of each replay."""
    seen: list[Tape] = []
    replay = Tape.replay

    def counted(self: Tape) -> tuple[str, int] | None:
        seen.append(self)
        return replay(self)

    monkeypatch.setattr(Tape, "replay", counted)
    return seen


def samples(engine: Engine, **params: Any) -> list[tuple[Any, ...]]:
    wanted = SamplingParams(**({"max_tokens": 24, "seed": 4} | params))
    return [(c.token_ids, c.logprobs) for out in engine.run_batch(PROMPTS, wanted, n=2) for c in out.completions]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("params", [{}, {"ignore_eos": True}, {"repetition_penalty": 1.3, "top_k": 5}], ids=str)
def test_replayed_steps_give_the_bits_of_python(replays: list[Tape], dtype: str, params: dict[str, Any]) -> None:
    """R3, R4: ragged ends, blocks that fill up, penalties that are counted on."""
    plain = samples(tiny_engine(dtype=dtype, runtime={"tapes": False}), **params)
    assert not replays
    engine = tiny_engine(dtype=dtype)
    assert samples(engine, **params) == plain
    assert len(replays) > 12
    assert engine.status().kernels["decode"] == "tapes"


def test_a_tape_is_dropped_with_its_version(replays: list[Tape]) -> None:
    """P14, V3: after a flip nothing of the old weights is read, though rows and addresses are the same."""
    engine = tiny_engine()
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    engine.run_batch([[5]], params)
    old, num_old = set(replays), len(replays)
    assert old
    engine.install(tiny_weights(tiny_spec(), 9))
    (output,) = engine.run_batch([[5]], params)
    (completion,) = output.completions
    assert completion.raw_logprobs == oracle_logprobs(engine, [5], completion, 1)
    assert len(replays) > num_old and old.isdisjoint(replays[num_old:])
    engine.retire(0)
    engine.step()
    graphs = engine._parts.stepper._executor._graphs
    assert isinstance(graphs, tapes.DecodeTapes)
    assert {ordinal for ordinal, _ in graphs._recorded} == {1}


def test_a_model_that_torch_has_a_part_in_is_not_replayed(replays: list[Tape]) -> None:
    """Head norms copy: a replay would leave the copy out."""
    spec = tiny_spec(model_type="qwen3")
    engine = tiny_engine(spec=spec)
    (output,) = engine.run_batch([PROMPTS[2]], SamplingParams(max_tokens=9, seed=2, ignore_eos=True), n=3)
    for completion in output.completions:
        assert completion.raw_logprobs == oracle_logprobs(engine, PROMPTS[2], completion)
    assert "torch computes" in str(engine.status().kernels["decode"])
    assert not replays


def test_tapes_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapes, "MAX_TAPES", 2)
    engine = tiny_engine()
    plain = samples(tiny_engine(runtime={"tapes": False}))
    assert samples(engine) == plain == samples(engine)
    graphs = engine._parts.stepper._executor._graphs
    assert isinstance(graphs, tapes.DecodeTapes)
    assert len(graphs._recorded) == 2


def test_a_recording_refuses_what_torch_computes() -> None:
    kernels, lib = NativeKernels(), library()
    assert lib is not None
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    passive, copied = Tape(lib), Tape(lib)
    with recording(passive):
        kernels.linear(x[:2].view(2, 8), w)
    assert passive.why_not is None
    with recording(copied):
        kernels.linear(x + 1.0, w)
    assert copied.why_not is not None and "add" in copied.why_not


def test_a_replay_reads_its_inputs_anew_and_names_the_call_that_fails() -> None:
    kernels, lib = NativeKernels(), library()
    assert lib is not None
    table, ids, w = torch.randn(6, 8), torch.tensor([1, 2]), torch.randn(5, 8)
    tape = Tape(lib)
    with recording(tape):
        out = kernels.linear(kernels.gather_rows(table, ids), w)
    first = out.clone()
    ids.copy_(torch.tensor([5, 1]))
    assert tape.replay() is None
    assert torch.equal(out, kernels.linear(table[[5, 1]], w))
    assert torch.equal(out[1], first[0])
    ids[0] = 6
    assert tape.replay() == ("unison_gather_rows", 1)


def test_a_step_that_fails_in_a_replay_says_which_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    monkeypatch.setattr(Tape, "replay", lambda self: ("unison_attention", 3))
    engine.submit(GenerateRequest("a", (5, 6), SamplingParams(max_tokens=9, ignore_eos=True)))
    with pytest.raises(InvariantError, match="unison_attention returned 3"):
        for _ in range(9):
            engine.step()


@pytest.mark.parametrize("ids", [[-1], [6], [0, 2**40]])
def test_gather_rows_reads_nothing_outside_the_table(ids: list[int]) -> None:
    with pytest.raises(IndexError, match="outside the table of 6 rows"):
        NativeKernels().gather_rows(torch.randn(6, 8), torch.tensor(ids))
