"""Requests and sequences: the state of one sample, alone."""

from __future__ import annotations

import numpy as np
import pytest
from unison.engine.cache.strategy import RequestCache
from unison.engine.request import PromptScores, Request, Sequence, SequenceStatus, SpanRecorder
from unison.ipc.errors import InvariantError
from unison.ipc.types import FinishReason, GenerateRequest, SamplingParams, TopLogprobs, VersionSpan

PROMPT = (10, 11, 12, 13)


def make(n: int = 1, **params: object) -> Request:
    return Request(GenerateRequest("r", PROMPT, SamplingParams(**params), n), 1, 77, frozenset((2,)))


def cache(num_tokens: int = 0) -> RequestCache:
    spans = [VersionSpan(3, 0, num_tokens)] if num_tokens else []
    return RequestCache(0, [], num_tokens, 3, kv_spans=spans)


def grow(seq: Sequence, *tokens: int, version: int = 3) -> None:
    for token in tokens:
        seq.append(token, -0.5, -0.25, 0.0, version)


def test_spans_tile_and_merge() -> None:
    """V3: neighbours of one version are one span; nothing overlaps, nothing is left out."""
    recorder = SpanRecorder()
    assert recorder.end == 0
    for version, end in ((1, 3), (1, 4), (2, 5), (1, 9)):
        recorder.extend(version, end)
    assert recorder.spans == [VersionSpan(1, 0, 4), VersionSpan(2, 4, 5), VersionSpan(1, 5, 9)]
    assert recorder.end == 9


@pytest.mark.parametrize("first,end", [(first, end) for first in range(8) for end in range(first, 8)])
def test_tokens_of_any_range(first: int, end: int) -> None:
    """S25: positions run through prompt and completion as through one list."""
    seq = make().sequences[0]
    grow(seq, 20, 21, 22)
    assert seq.num_tokens == 7
    assert seq.tokens(first, end) == [10, 11, 12, 13, 20, 21, 22][first:end]


def test_every_start_is_a_new_incarnation() -> None:
    """R4, S1, S6: a sequence that comes back is somebody else to the step before it."""
    request = make()
    seq = request.sequences[0]
    identities = {seq.identity}
    assert not request.has_started and seq.num_computed == 0
    for num_tokens in (2, 4):
        seq.start(cache(num_tokens))
        assert (seq.status, seq.num_computed, request.has_started) == (SequenceStatus.RUNNING, num_tokens, True)
        identities.add(seq.identity)
        seq.leave(SequenceStatus.WAITING)
        assert (seq.status, seq.cache) == (SequenceStatus.WAITING, None)
        assert seq.kv_spans == (VersionSpan(3, 0, num_tokens),)
    assert len(identities) == 3
    assert request.has_started
    with pytest.raises(InvariantError, match="holds no cache"):
        seq.leave(SequenceStatus.FINISHED)


def test_a_delta_is_what_came_since() -> None:
    """R1, V3, S35: tokens, all three numbers and spans of a delta begin at the same position."""
    seq = make().sequences[0]
    grow(seq, 20, 21)
    grow(seq, 22, 23, version=4)
    delta = seq.delta(1)
    assert (delta.first, delta.token_ids, delta.finish_reason) == (1, (21, 22, 23), None)
    assert len(delta.logprobs) == len(delta.raw_logprobs) == len(delta.log_support_mass) == 3
    assert delta.versions == (VersionSpan(3, 1, 2), VersionSpan(4, 2, 4))
    assert seq.delta(4).token_ids == seq.delta(4).versions == ()


def test_no_completion_before_the_end() -> None:
    """R1, R5: a sample without a finish reason isn't one."""
    request = make(n=2)
    with pytest.raises(InvariantError, match="no terminal event"):
        request.output()
    for seq in request.sequences:
        grow(seq, 20, 2)
        seq.status, seq.finish_reason, seq.matched_stop = SequenceStatus.FINISHED, FinishReason.STOP, 2
    assert request.is_done
    output = request.output()
    assert [completion.index for completion in output.completions] == [0, 1]
    for completion in output.completions:
        assert (completion.token_ids, completion.seed, completion.matched_stop) == ((20, 2), 77, 2)
        assert completion.versions == (VersionSpan(3, 0, 2),)
    assert (output.prompt_ids, output.prompt_logprobs, output.prompt_top_logprobs) == (PROMPT, None, None)


def test_prompt_scores_fill_in_any_order() -> None:
    """S35: chunks may come in any order, and twice after a preemption; complete means every position."""
    scores = PromptScores(5)
    tops = [TopLogprobs((index,), (-1.0,)) for index in range(4)]
    scores.fill(2, np.array([-3, -4], dtype=np.float32), tops[2:])
    assert not scores.is_complete
    scores.fill(2, np.array([-3, -4], dtype=np.float32), tops[2:])
    scores.fill(0, np.array([-1, -2], dtype=np.float32), tops[:2])
    assert scores.is_complete
    assert scores.logprobs.tolist() == [-1, -2, -3, -4]
    assert scores.top == tops
    assert PromptScores(1).is_complete


@pytest.mark.parametrize("top", [0, 1])
def test_prompt_scores_are_whole_or_absent(top: int) -> None:
    """R5, P18: a request that ended in its prompt has no half-filled, NaN-padded scores."""
    request = make(prompt_logprobs=top)
    assert request.prompt_scores is not None and request.needs_prompt_scores
    (seq,) = request.sequences
    seq.status, seq.finish_reason = SequenceStatus.FINISHED, FinishReason.ABORTED
    alternatives = [TopLogprobs((1,), (-1.0,))] * 3 if top else []
    request.prompt_scores.fill(0, np.array([-1, -2], dtype=np.float32), alternatives[:2])
    assert (request.output().prompt_logprobs, request.output().prompt_top_logprobs) == (None, None)
    request.prompt_scores.fill(2, np.array([-3], dtype=np.float32), alternatives[2:])
    assert request.output().prompt_logprobs == (-1, -2, -3)
    assert request.output().prompt_top_logprobs == (tuple(alternatives) if top else None)
    assert not request.needs_prompt_scores
