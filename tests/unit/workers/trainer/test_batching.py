"""From scored groups to samples and micro-batches."""

from __future__ import annotations

import random
from typing import Any

from harness.rollouts import completion, result
from unison.ipc.types import FinishReason, KVEpoch, VersionSpan
from unison.workers.trainer.batching import (
    TokenColumns,
    TrainGroup,
    TrainSample,
    group_has_signal,
    kept_indices,
    lag_of,
    make_batch,
    micro_batches,
)
from unison.workers.trainer.config import TrainConfig

CUT = FinishReason.LENGTH


def config(**rollout: Any) -> TrainConfig:
    return TrainConfig.from_dict({"rollout": {"max_tokens": 8, "group_size": 3} | rollout})


def test_order_and_denominators() -> None:
    """P27: groups come in order of their ids whoever came first; denominators are the whole batch's."""
    batch = make_batch([result(5, [0.0, 1.0, 2.0]), result(3, [1.0, 0.0, 0.0])], config(), 0, {})
    assert [group.samples[0].order_id for group in batch.groups] == [3, 5]
    assert (batch.scale.num_sequences, batch.scale.num_tokens, batch.scale.max_tokens) == (6, 18, 8)
    assert set(batch.advantages) == {3, 5} and batch.num_samples == 6


def test_truncated_rules() -> None:
    """P23, P26: completions cut off for length are trained, masked out of the loss, or left out of the group."""
    cut = [completion(0, finish_reason=CUT), completion(1), completion(2)]
    rollout = result(0, [1.0, 0.0, 0.5], cut)
    trained = make_batch([rollout], config(), 0, {})
    assert trained.scale.num_tokens == 9
    masked = make_batch([rollout], config(truncated="mask"), 0, {})
    assert masked.scale.num_tokens == 6 and masked.scale.num_sequences == 3
    assert masked.groups[0].samples[0].mask == (0.0, 0.0, 0.0)
    assert masked.advantages == trained.advantages
    dropped = make_batch([rollout], config(truncated="drop"), 0, {})
    assert [sample.index for sample in dropped.groups[0].samples] == [1, 2]
    assert dropped.advantages[0][0] == 0.0 and dropped.advantages[0][1] == -dropped.advantages[0][2]
    assert kept_indices(rollout, config(truncated="drop")) == [1, 2]


def test_a_group_of_truncated_completions_is_empty() -> None:
    """Nothing is trained as empty: a group without kept completions isn't in the batch."""
    rollout = result(0, [1.0, 0.0], [completion(at, finish_reason=CUT) for at in range(2)])
    batch = make_batch([rollout], config(truncated="drop"), 0, {})
    assert batch.groups == () and not batch.has_signal


def test_signal() -> None:
    """Equal rewards are no signal, also where only the masked ones differ."""
    assert not make_batch([result(0, [0.5, 0.5, 0.5])], config(), 0, {}).has_signal
    assert make_batch([result(0, [0.5, 0.5, 0.6])], config(), 0, {}).has_signal
    assert not group_has_signal(result(0, [0.5, 0.5]), config())
    cut = [completion(0, finish_reason=CUT), completion(1), completion(2)]
    assert not group_has_signal(result(0, [1.0, 0.0, 0.0], cut), config(truncated="drop"))


def test_overlong_shaping() -> None:
    """DAPO: long completions of equal reward are told apart."""
    lengths = [completion(at, length=length) for at, length in enumerate((2, 6, 8))]
    batch = make_batch([result(0, [1.0, 1.0, 1.0], lengths)], config(overlong_buffer_tokens=4), 0, {})
    first, second, third = batch.advantages[0]
    assert first > second > third


def test_kl_in_the_reward() -> None:
    """A penalty per sample is taken off its reward before advantages are made."""
    batch = make_batch([result(0, [1.0, 1.0, 1.0])], config(), 0, {0: (0.0, 0.5, 1.0)})
    assert batch.advantages[0][0] > batch.advantages[0][1] > batch.advantages[0][2]


def test_behaviour_is_of_the_sampling_temperature() -> None:
    """P19: at temperature 1 the raw log-probs, at another one those of the distribution that was drawn from."""
    raw = make_batch([result(0, [0.0, 1.0, 2.0])], config(), 0, {}).groups[0].samples[0]
    cool = make_batch([result(0, [0.0, 1.0, 2.0])], config(temperature=0.5), 0, {}).groups[0].samples[0]
    assert raw.behaviour == completion().raw_logprobs and cool.behaviour == completion().logprobs


def test_lag_counts_every_version_that_had_a_part() -> None:
    """V6, P08: tokens, KV, and KV that was replaced; a completion without tokens is as old as its KV."""
    assert lag_of(completion(version=3), 3) == 0
    mixed = completion(versions=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)), kv_versions=(VersionSpan(4, 0, 4),))
    assert lag_of(mixed, 4) == 1
    old_kv = completion(version=4, kv_versions=(VersionSpan(2, 0, 1), VersionSpan(4, 1, 4)))
    assert lag_of(old_kv, 4) == 2
    replaced = completion(version=4, kv_history=(KVEpoch(1, (VersionSpan(1, 0, 2),)),))
    assert lag_of(replaced, 4) == 3


def test_columns() -> None:
    """P24: columns of sequences with 0, 1 and more tokens, in order."""
    rollout = result(0, [0.0, 1.0, 2.0], [completion(at, length=length) for at, length in enumerate((0, 1, 3))])
    batch = make_batch([rollout], config(), 0, {})
    columns = TokenColumns.of(batch.groups)
    assert columns.sequence.tolist() == [1, 2, 2, 2] and columns.num_sequences == 3
    assert columns.mask.tolist() == [1.0] * 4 and columns.is_fresh.all()
    assert columns.advantages.tolist()[0] != columns.advantages.tolist()[1]


def _group(draw: random.Random, order_id: int) -> TrainGroup:
    prompt = tuple(range(draw.randrange(1, 6)))
    samples = []
    for index in range(draw.randrange(1, 6)):
        length = draw.randrange(0, 7)
        ones = (1.0,) * length
        samples.append(TrainSample(order_id, index, (1,) * length, ones, ones, ones, 0))
    return TrainGroup(prompt, tuple(samples))


def test_micro_batches_keep_everything() -> None:
    """P27: whatever the budget, every sample comes once and in order; only a lone sample may exceed it."""
    draw = random.Random(0)
    for _ in range(200):
        groups = [_group(draw, order_id) for order_id in range(draw.randrange(1, 6))]
        budget = draw.randrange(1, 40)
        parts = list(micro_batches(groups, budget))
        found = [(sample.order_id, sample.index) for part in parts for group in part for sample in group.samples]
        assert found == [(sample.order_id, sample.index) for group in groups for sample in group.samples]
        for part in parts:
            total = sum(group.num_tokens for group in part)
            assert total <= budget or (len(part) == 1 and len(part[0].samples) == 1)
