"""Batches of random rollouts against plain loops: what is trained, what is left out, denominators, cuts, columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.examples import num_examples
from harness.rollouts import completion, result
from hypothesis import given, settings
from hypothesis import strategies as st
from unison.ipc.types import Completion, FinishReason, KVEpoch, VersionSpan
from unison.workers.rollout.records import RolloutResult
from unison.workers.trainer.advantages import ESTIMATORS
from unison.workers.trainer.batching import (
    TokenColumns,
    TrainGroup,
    TrainSample,
    as_groups,
    lag_of,
    make_batch,
    micro_batches,
)
from unison.workers.trainer.config import RECIPES, TrainConfig

CUT, STOP = FinishReason.LENGTH, FinishReason.STOP
MAX_TOKENS = 8
Draw = st.DrawFn


def config(algorithm: str = "grpo", **rollout: Any) -> TrainConfig:
    """A configuration of groups of any size."""
    values = {"rollout": {"max_tokens": MAX_TOKENS, "group_size": 4} | rollout, "algorithm": {"name": algorithm}}
    return TrainConfig.from_dict(values)


def whole(index: int, length: int, is_cut: bool = False, version: int = 0) -> Completion:
    """A completion whose tokens and log-probs are its own: no two of a group are alike."""
    values = tuple(-(1 + index + at / 16) for at in range(length))
    return completion(
        index, length, version, token_ids=tuple(100 * index + at for at in range(length)), raw_logprobs=values,
        logprobs=tuple(value - 0.5 for value in values), finish_reason=CUT if is_cut else STOP,
    )  # fmt: skip


@st.composite
def rollouts(draw: Draw) -> list[RolloutResult]:
    """Groups with ids in any order, completions of 0 and more tokens, some cut off for length."""
    made = []
    for order_id in draw(st.lists(st.integers(0, 50), min_size=1, max_size=5, unique=True)):
        shapes = draw(st.lists(st.tuples(st.integers(0, MAX_TOKENS), st.booleans()), min_size=1, max_size=5))
        rewards = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(shapes), max_size=len(shapes)))
        completions = [whole(at, length, is_cut) for at, (length, is_cut) in enumerate(shapes)]
        made.append(result(order_id, rewards, completions))
    return made


def is_cut(each: Completion) -> bool:
    """Ended for length."""
    return each.finish_reason is CUT


# ---- make_batch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncated", ["train", "mask", "drop"])
@given(rollouts(), st.sampled_from(sorted(RECIPES)))
def test_batch(truncated: str, results: list[RolloutResult], algorithm: str) -> None:
    """P23, P26, P27: samples, masks, advantages and denominators of any batch are what the rule for truncated ones
    says; groups come by their order ids."""
    batch = make_batch(results, config(algorithm, truncated=truncated), 0, {})
    ordered = sorted(results, key=lambda each: each.order_id)
    kept = [
        [at for at, each in enumerate(group.completions) if truncated != "drop" or not is_cut(each)]
        for group in ordered
    ]  # fmt: skip
    rewards = [[group.rewards[at].total for at in at_kept] for group, at_kept in zip(ordered, kept, strict=True)]
    estimates = ESTIMATORS[RECIPES[algorithm].advantages](rewards)

    num_tokens, groups = 0, iter(batch.groups)
    for group, at_kept, values in zip(ordered, kept, estimates, strict=True):
        by_index = dict(zip(at_kept, values, strict=True))
        assert batch.advantages[group.order_id] == tuple(by_index.get(at, 0.0) for at in range(len(group.completions)))
        if not at_kept:
            continue
        made = next(groups)
        assert made.prompt_ids == group.prompt_ids
        for sample, at in zip(made.samples, at_kept, strict=True):
            each = group.completions[at]
            counts = 0.0 if truncated == "mask" and is_cut(each) else 1.0
            num_tokens += int(counts) * len(each.token_ids)
            length = len(each.token_ids)
            assert sample == TrainSample(
                group.order_id, at, each.token_ids, (counts,) * length, each.raw_logprobs, (by_index[at],) * length, 0
            )
    assert next(groups, None) is None
    num_samples = sum(map(len, kept))
    assert (batch.scale.num_sequences, batch.scale.num_tokens) == (num_samples, num_tokens)
    assert batch.scale.max_tokens == MAX_TOKENS and batch.num_samples == num_samples


@given(rollouts(), st.randoms(use_true_random=False))
def test_who_came_first_changes_nothing(results: list[RolloutResult], draw: Any) -> None:
    """P27: a batch is the same in whatever order its groups came back."""
    shuffled = list(results)
    draw.shuffle(shuffled)
    assert make_batch(shuffled, config(), 0, {}) == make_batch(results, config(), 0, {})


def test_dropped_completions_have_no_say() -> None:
    """P26: what is left out counts in no mean and no std, of group or batch, and has advantage 0."""
    first = [whole(0, 3), whole(1, 8, True), whole(2, 2)]
    second = [whole(0, 1), whole(1, 2)]
    for algorithm, recipe in RECIPES.items():
        results = [result(0, [1.0, 99.0, 0.0], first), result(1, [0.5, 0.0], second)]
        batch = make_batch(results, config(algorithm, truncated="drop"), 0, {})
        (a, b), (c, d) = ESTIMATORS[recipe.advantages]([[1.0, 0.0], [0.5, 0.0]])
        assert batch.advantages == {0: (a, 0.0, b), 1: (c, d)}, algorithm
        assert a > 0


def test_a_group_of_which_one_is_left() -> None:
    """What remains of a group alone has nothing to be compared with, and is no signal."""
    rollout = result(0, [1.0, 0.0], [whole(0, 3), whole(1, 8, True)])
    batch = make_batch([rollout], config(truncated="drop"), 0, {})
    assert batch.num_samples == 1 and batch.advantages == {0: (0.0, 0.0)} and not batch.has_signal


def test_penalties_go_by_index() -> None:
    """A KL in the reward is taken off the completion it belongs to, also where others are left out."""
    rollout = result(7, [0.0, 0.0, 0.0], [whole(0, 8, True), whole(1, 2), whole(2, 3)])
    batch = make_batch([rollout], config("dr_grpo", truncated="drop"), 0, {7: (100.0, 1.0, 0.0)})
    assert batch.advantages[7] == (0.0, -0.5, 0.5)


@pytest.mark.parametrize("temperature", [0.01, 0.7, 0.999, 1.0, 1.001, 1.5])
def test_log_probs_are_of_the_sampling_temperature(temperature: float) -> None:
    """P19: `raw_logprobs` at temperature 1, and `logprobs` at every other one, however near."""
    rollout = result(0, [0.0, 1.0], [whole(0, 3), whole(1, 2)])
    batch = make_batch([rollout], config(temperature=temperature), 0, {})
    name = "raw_logprobs" if temperature == 1.0 else "logprobs"
    assert [each.behaviour for each in batch.groups[0].samples] == [getattr(at, name) for at in rollout.completions]


def test_equal_rewards_are_no_signal() -> None:
    """Rounding in a mean makes no signal: a batch whose rewards are equal moves nothing, whatever their value."""
    for reward in (0.0, 1.0, 0.1, 0.7, 0.92):
        for size in range(1, 12):
            rollout = result(0, [reward] * size, [whole(at, 3) for at in range(size)])
            assert not make_batch([rollout], config(), 0, {}).has_signal, (reward, size)


def test_signal_needs_tokens_that_count() -> None:
    """An advantage on a completion without tokens, or on masked ones alone, is nothing to learn from."""
    empty = result(0, [1.0, 0.0], [whole(0, 0), whole(1, 0)])
    assert not make_batch([empty], config(), 0, {}).has_signal
    masked = result(0, [1.0, 0.0], [whole(0, 8, True), whole(1, 8, True)])
    assert not make_batch([masked], config(truncated="mask"), 0, {}).has_signal
    assert make_batch([masked], config(truncated="train"), 0, {}).has_signal


# ---- lag -------------------------------------------------------------------------------------------------------------

VERSIONS = st.lists(st.integers(0, 9), max_size=4)


def spans(versions: list[int]) -> tuple[VersionSpan, ...]:
    """One position each."""
    return tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(versions))


@given(VERSIONS, VERSIONS, st.lists(VERSIONS, max_size=3), st.integers(0, 12))
def test_lag(made_by: list[int], kv: list[int], history: list[list[int]], base: int) -> None:
    """V6: the oldest of all versions that made tokens, their KV, or KV that was replaced, decides; of none, 0."""
    epochs = tuple(KVEpoch(at, spans(versions)) for at, versions in enumerate(history))
    each = completion(versions=spans(made_by), kv_versions=spans(kv), kv_history=epochs)
    every = [*made_by, *kv, *(version for versions in history for version in versions)]
    assert lag_of(each, base) == (base - min(every) if every else 0)


def test_samples_know_their_lag() -> None:
    """V6: each sample has its own, and only those of lag 0 are fresh."""
    rollout = result(0, [1.0, 0.0, 0.5], [whole(at, 2, version=version) for at, version in enumerate((5, 3, 4))])
    batch = make_batch([rollout], config(), 5, {})
    assert [sample.lag for sample in batch.groups[0].samples] == [0, 2, 1]
    assert TokenColumns.of(batch.groups).is_fresh.tolist() == [True, True, False, False, False, False]


# ---- micro-batches and columns ---------------------------------------------------------------------------------------


@st.composite
def train_groups(draw: Draw) -> list[TrainGroup]:
    """Groups as `make_batch` leaves them: prompts of 1 and more tokens, 1 and more samples of 0 and more tokens."""
    groups = []
    for order_id in range(draw(st.integers(0, 5))):
        prompt = tuple(range(draw(st.integers(1, 6))))
        samples = []
        for index, length in enumerate(draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))):
            values = [order_id + index / 8 + at / 64 for at in range(length)]
            samples.append(TrainSample(
                order_id, index, tuple(range(length)), tuple(float(at % 2) for at in range(length)), tuple(values),
                tuple(-value for value in values), draw(st.integers(0, 2)),
            ))  # fmt: skip
        groups.append(TrainGroup(prompt, tuple(samples)))
    return groups


def places(groups: Any) -> list[tuple[int, int]]:
    """Which samples, in order."""
    return [(sample.order_id, sample.index) for group in groups for sample in group.samples]


@settings(max_examples=num_examples(200))
@given(train_groups(), st.integers(1, 60))
def test_cut(groups: list[TrainGroup], budget: int) -> None:
    """P27: nothing is lost, doubled or turned around; the budget holds but for a lone sample; no two neighbours would
    fit into one; every sample has its prompt with it."""
    parts = list(micro_batches(groups, budget))
    assert places(group for part in parts for group in part) == places(groups)
    prompts = {place: group.prompt_ids for group in groups for place in places([group])}
    samples = {place: sample for group in groups for place, sample in zip(places([group]), group.samples, strict=True)}
    sizes = []
    for part in parts:
        assert part
        for piece in part:
            assert piece.samples
            for place, sample in zip(places([piece]), piece.samples, strict=True):
                assert piece.prompt_ids == prompts[place] and sample == samples[place]
        sizes.append(sum(len(piece.prompt_ids) + sum(len(each.token_ids) for each in piece.samples) for piece in part))
        assert sizes[-1] <= budget or len(places(part)) == 1
    for part, following in zip(parts, parts[1:], strict=False):
        assert sum(piece.num_tokens for piece in part) + following[0].num_tokens > budget


def test_cut_at_the_budget() -> None:
    """Two groups of 5 tokens fill a budget of 10 exactly; at 9 they are two parts; a group of 5 is cut at 4."""
    one = TrainGroup((1, 2), (TrainSample(0, 0, (3, 4, 5), (1.0,) * 3, (0.0,) * 3, (0.0,) * 3, 0),))
    two = replace(one, samples=(replace(one.samples[0], order_id=1),))
    assert [len(part) for part in micro_batches([one, two], 10)] == [2]
    assert [len(part) for part in micro_batches([one, two], 9)] == [1, 1]
    pair = TrainGroup((1, 2), (replace(one.samples[0], token_ids=(3,)), replace(one.samples[0], token_ids=(4, 5))))
    assert [places(part) for part in micro_batches([pair], 5)] == [[(0, 0), (0, 0)]]
    assert [[piece.num_tokens for piece in part] for part in micro_batches([pair], 4)] == [[3], [4]]
    assert list(micro_batches([], 4)) == []


@given(train_groups())
def test_columns(groups: list[TrainGroup]) -> None:
    """P08, P24: row i of every column is of the token that the policy computes as its i-th."""
    columns = TokenColumns.of(groups)
    rows = [
        (number, sample.behaviour[at], sample.advantages[at], sample.mask[at], sample.lag == 0)
        for number, sample in enumerate(sample for group in groups for sample in group.samples)
        for at in range(len(sample.token_ids))
    ]
    found = zip(
        columns.sequence.tolist(), columns.behaviour.tolist(), columns.advantages.tolist(), columns.mask.tolist(),
        columns.is_fresh.tolist(), strict=True,
    )  # fmt: skip
    assert list(found) == rows
    assert columns.num_sequences == len(places(groups))
    assert columns.sequence.dtype is torch.int64 and columns.is_fresh.dtype is torch.bool
    assert {columns.behaviour.dtype, columns.advantages.dtype, columns.mask.dtype} == {torch.float32}
    computed = [list(tokens) for _, completions in as_groups(groups) for tokens in completions]
    assert computed == [list(sample.token_ids) for group in groups for sample in group.samples]
    assert [prompt for prompt, _ in as_groups(groups)] == [group.prompt_ids for group in groups]
