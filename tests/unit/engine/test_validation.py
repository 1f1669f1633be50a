"""Validation: every refusal names its field and its limit, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness.tiny_model import VOCAB_SIZE, assert_baseline, drain, tiny_engine
from unison.engine.engine import Engine
from unison.engine.validation import Limits, validate
from unison.ipc.errors import InvalidRequestError, PromptTooLongError, UnknownVersionError
from unison.ipc.types import GenerateRequest, SamplingParams

LIMITS = Limits(vocab_size=100, max_model_len=32, pool_tokens=64)


def request(prompt: tuple[int, ...] = (1, 2), **params: Any) -> GenerateRequest:
    return GenerateRequest("r", prompt, SamplingParams(**params))


# ---- what the model and the pool refuse

UNFIT: list[tuple[str, Callable[[], GenerateRequest]]] = [
    ("prompt_ids", lambda: request((5, 100))),
    ("stop_token_ids", lambda: request(stop_token_ids=(3, 100))),
    ("bad_token_ids", lambda: request(bad_token_ids=(100,))),
    ("allowed_token_ids", lambda: request(allowed_token_ids=(0, 2**31 - 1))),
    ("logit_bias", lambda: request(logit_bias=((1, 2.0), (100, -1.0)))),
    ("prompt_ids", lambda: request((1,) * 32)),
    ("prompt_ids", lambda: request((1,) * 33, max_tokens=0, prompt_logprobs=0)),
]


@pytest.mark.parametrize("field,make", UNFIT)
def test_what_does_not_fit_is_named(field: str, make: Callable[[], GenerateRequest]) -> None:
    """R2, S8: ids outside the vocabulary and prompts beyond the context, by field."""
    with pytest.raises(InvalidRequestError) as caught:
        validate(make(), LIMITS)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_the_last_that_fits_fits() -> None:
    """P24, R2: the bounds themselves are inside: the last id, a prompt with room for one token, a scored full
    context."""
    last = LIMITS.vocab_size - 1
    validate(request((last,) * 31, stop_token_ids=(last,), bad_token_ids=(0,), logit_bias=((last, 1.0),)), LIMITS)
    validate(request((1,) * 32, max_tokens=0, prompt_logprobs=0), LIMITS)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_alternatives_than_tokens_are_refused(name: str) -> None:
    """R2: k alternatives need a vocabulary of k."""
    limits = Limits(vocab_size=8, max_model_len=32, pool_tokens=64)
    validate(request(**{name: 8}), limits)
    with pytest.raises(InvalidRequestError, match="vocabulary of 8") as caught:
        validate(request(**{name: 9}), limits)
    assert caught.value.field == name


def test_the_narrower_limit_is_named() -> None:
    """R2: the message says whether context or pool is too small, and how many tokens would fit."""
    with pytest.raises(PromptTooLongError, match="at most 31 fit the model's context of 32"):
        validate(request((1,) * 40), LIMITS)
    with pytest.raises(PromptTooLongError, match=r"at most 15 fit the KV pool \(cache.num_tokens\) of 16"):
        validate(request((1,) * 40), Limits(100, 32, 16))


# ---- what the types refuse by themselves

MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 2.0}),
    ("max_tokens", {"max_tokens": True}),
    ("min_tokens", {"max_tokens": 3, "min_tokens": 4}),
    ("min_tokens", {"min_tokens": -1}),
    ("temperature", {"temperature": -0.5}),
    ("temperature", {"temperature": 0.001}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("top_k", {"top_k": -1}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.1}),
    ("top_p", {"top_p": float("nan")}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": float("inf")}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("penalty_window", {"penalty_window": -1}),
    ("logit_bias", {"logit_bias": ((1, 101.0),)}),
    ("logit_bias", {"logit_bias": ((-1, 1.0),)}),
    ("logit_bias", {"logit_bias": ((1, float("nan")),)}),
    ("logit_bias", {"logit_bias": ((1, 1.0), (1, 2.0))}),
    ("bad_token_ids", {"bad_token_ids": (-1,)}),
    ("bad_token_ids", {"bad_token_ids": (4, 4)}),
    ("stop_token_ids", {"stop_token_ids": (True,)}),
    ("stop_token_ids", {"stop_token_ids": (1.5,)}),
    ("allowed_token_ids", {"allowed_token_ids": ()}),
    ("allowed_token_ids", {"allowed_token_ids": (2**31,)}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**63}),
    ("logprobs", {"logprobs": 65}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
]


@pytest.mark.parametrize("field,params", MALFORMED)
def test_malformed_parameters_never_become_an_object(field: str, params: dict[str, Any]) -> None:
    """P4, R2: what no engine could serve is refused where it is written, NaN included, by its field."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**params)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "field,values",
    [
        ("request_id", {"request_id": ""}),
        ("prompt_ids", {"prompt_ids": ()}),
        ("prompt_ids", {"prompt_ids": (1, -2)}),
        ("prompt_ids", {"prompt_ids": (1, "2")}),
        ("prompt_ids", {"prompt_ids": (2**31,)}),
        ("n", {"n": 0}),
        ("n", {"n": 1025}),
        ("n", {"n": 2, "params": SamplingParams(max_tokens=0, prompt_logprobs=0)}),
        ("pin_version", {"pin_version": -1}),
    ],
)
def test_malformed_requests_never_become_an_object(field: str, values: dict[str, Any]) -> None:
    """P4, R2, P24: an empty prompt, a count of zero, an id that is none."""
    with pytest.raises(InvalidRequestError) as caught:
        GenerateRequest(**({"request_id": "r", "prompt_ids": (1,)} | values))
    assert caught.value.field == field


# ---- a refusal leaves no trace


def snapshot(engine: Engine) -> tuple[object, ...]:
    """All that a request could have taken."""
    pool = engine._parts.caches.pool
    stats, status = engine.stats(), engine.status()
    return (
        list(pool._free), list(pool._refcounts), list(pool.rows._free), pool.block_tables.copy(),
        stats.num_requests_submitted, stats.num_requests_live, status.num_waiting, status.num_running, status.versions,
    )  # fmt: skip


@pytest.mark.parametrize("field,make", [
    ("prompt_ids", lambda: request((VOCAB_SIZE,))),
    ("stop_token_ids", lambda: request(stop_token_ids=(VOCAB_SIZE,))),
    ("bad_token_ids", lambda: request(bad_token_ids=(VOCAB_SIZE,))),
    ("allowed_token_ids", lambda: request(allowed_token_ids=(VOCAB_SIZE,))),
    ("logit_bias", lambda: request(logit_bias=((VOCAB_SIZE, 1.0),))),
    ("prompt_ids", lambda: request((1,) * 512)),
    ("request_id", lambda: GenerateRequest("runs", (1,))),
    ("pin_version", lambda: GenerateRequest("r", (1,), pin_version=7)),
])  # fmt: skip
def test_a_refusal_in_the_middle_of_work_changes_nothing(field: str, make: Callable[[], GenerateRequest]) -> None:
    """R2, S8, S29: pool, block tables, rows, queue, pins and metrics are the same before and after; work goes on."""
    engine = tiny_engine()
    engine.submit(GenerateRequest("runs", (1, 2, 3), SamplingParams(max_tokens=5, seed=1, ignore_eos=True), n=2))
    engine.step()
    before = snapshot(engine)
    with pytest.raises((InvalidRequestError, UnknownVersionError)) as caught:
        engine.submit(make())
    assert getattr(caught.value, "field", field) == field
    for old, new in zip(before, snapshot(engine), strict=True):
        assert np.array_equal(old, new) if isinstance(old, np.ndarray) else old == new
    assert [len(completion.token_ids) for completion in drain(engine)["runs"].completions] == [5, 5]
    assert_baseline(engine)


def test_a_batch_is_refused_as_a_whole() -> None:
    """R2, S28: one bad prompt, one parameter too few, an unknown version: nothing of the batch has run."""
    engine = tiny_engine()
    before = snapshot(engine)
    for prompts, params, pin in (
        ([[1], [VOCAB_SIZE]], SamplingParams(), None),
        ([[1], []], SamplingParams(), None),
        ([[1], [2]], [SamplingParams()], None),
        ([[1], [2]], SamplingParams(), 9),
    ):
        with pytest.raises((InvalidRequestError, UnknownVersionError)):
            engine.run_batch(prompts, params, pin_version=pin)
        for old, new in zip(before, snapshot(engine), strict=True):
            assert np.array_equal(old, new) if isinstance(old, np.ndarray) else old == new


@pytest.mark.parametrize("field,prompt,continuation", [("prompt_ids", [], [1]), ("continuation", [1], [])])
def test_scoring_needs_both_parts(field: str, prompt: list[int], continuation: list[int]) -> None:
    """R2, P24: an empty part is refused by its name; one token each is enough."""
    engine = tiny_engine()
    with pytest.raises(InvalidRequestError) as caught:
        engine.score(prompt, continuation)
    assert caught.value.field == field
    assert len(engine.score([1], [2]).logprobs) == 1
