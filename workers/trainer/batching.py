"""Batching: scored groups become training samples, and these become micro-batches under a token budget.

A sample is token ids with a mask, never text (P21). Owns: which completions are trained, their advantages, the
denominators of the whole batch, and the cut into micro-batches. Pure functions; the loss doesn't depend on the cut
(P27).

Shapes: N completion tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ipc.types import Completion, FinishReason
from ..rollout.records import RolloutResult
from .advantages import ESTIMATORS, has_signal, overlong_penalty
from .config import TrainConfig
from .losses import LossScale
from .policy import Group


@dataclass(frozen=True)
class TrainSample:
    """One completion to be trained on."""

    order_id: int
    """Its group."""
    index: int
    """Which of the group's completions."""
    token_ids: tuple[int, ...]
    """The completion."""
    mask: tuple[float, ...]
    """1 where a token counts in the loss, else 0."""
    behaviour: tuple[float, ...]
    """Log-prob of each token as the engine drew it, at the sampling temperature."""
    advantages: tuple[float, ...]
    """Per token."""
    lag: int
    """Versions between the oldest weights that had a part in it and those in training; 0: it is fresh."""


@dataclass(frozen=True)
class TrainGroup:
    """A prompt and its samples."""

    prompt_ids: tuple[int, ...]
    """Computed once for all of them."""
    samples: tuple[TrainSample, ...]
    """In order of their index."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a forward pass over it."""
        return len(self.prompt_ids) + sum(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True)
class TrainBatch:
    """Everything that one optimizer step looks at."""

    groups: tuple[TrainGroup, ...]
    """In order of their order ids, so that a step doesn't depend on who came back first."""
    scale: LossScale
    """Denominators."""
    advantages: Mapping[int, tuple[float, ...]]
    """By order id and sample, also of samples that are left out (0 there)."""

    @property
    def has_signal(self) -> bool:
        """False where no token has an advantage: there is nothing to learn."""
        return any(
            value and counts
            for group in self.groups for sample in group.samples
            for value, counts in zip(sample.advantages, sample.mask, strict=True)
        )  # fmt: skip

    @property
    def num_samples(self) -> int:
        """Completions that are trained on."""
        return sum(len(group.samples) for group in self.groups)


def shaped_rewards(result: RolloutResult, config: TrainConfig) -> list[float]:
    """Total rewards, less what long completions lose (DAPO's soft punishment)."""
    rollout = config.rollout
    return [
        score.total + overlong_penalty(len(each.token_ids), rollout.max_tokens, rollout.overlong_buffer_tokens)
        for score, each in zip(result.rewards, result.completions, strict=True)
    ]


def kept_indices(result: RolloutResult, config: TrainConfig) -> list[int]:
    """Completions that take part in the group: all, or those that weren't truncated (`rollout.truncated=drop`)."""
    is_dropping = config.rollout.truncated == "drop"
    return [
        at for at, each in enumerate(result.completions)
        if not (is_dropping and each.finish_reason is FinishReason.LENGTH)
    ]  # fmt: skip


def group_has_signal(result: RolloutResult, config: TrainConfig) -> bool:
    """Whether the kept completions of a group have different rewards."""
    rewards = shaped_rewards(result, config)
    kept = [rewards[at] for at in kept_indices(result, config)]
    return bool(kept) and has_signal(kept)


def behaviour_logprobs(completion: Completion, config: TrainConfig) -> tuple[float, ...]:
    """Log-probs under the distribution that is trained: the one at the sampling temperature, without filters (P19)."""
    return completion.raw_logprobs if config.rollout.temperature == 1.0 else completion.logprobs


def lag_of(completion: Completion, base: int) -> int:
    """Versions between the oldest that had a part in a completion's tokens or their KV, and version `base` (V6)."""
    epochs = [*completion.versions, *completion.kv_versions]
    epochs += [span for epoch in completion.kv_history for span in epoch.kv_versions]
    return base - min((span.version for span in epochs), default=base)


def make_batch(
    results: Sequence[RolloutResult], config: TrainConfig, base: int, penalties: Mapping[int, Sequence[float]]
) -> TrainBatch:
    """Advantages and samples of a batch of groups, to be trained on version `base`.

    `penalties` (by order id and sample) are subtracted from the rewards: the KL, where it is in the reward.
    """
    results = sorted(results, key=lambda result: result.order_id)
    kept = [kept_indices(result, config) for result in results]
    recipe = config.algorithm.recipe
    rewards = [
        [
            shaped_rewards(result, config)[at] - (penalties[result.order_id][at] if penalties else 0.0)
            for at in indices
        ]
        for result, indices in zip(results, kept, strict=True)
    ]
    estimates = ESTIMATORS[recipe.advantages](rewards)
    groups, advantages = [], {}
    for result, indices, values in zip(results, kept, estimates, strict=True):
        by_index = dict(zip(indices, values, strict=True))
        advantages[result.order_id] = tuple(by_index.get(at, 0.0) for at in range(len(result.completions)))
        samples = tuple(_sample(result, at, by_index[at], base, config) for at in indices)
        if samples:
            groups.append(TrainGroup(result.prompt_ids, samples))
    every = [sample for group in groups for sample in group.samples]
    num_tokens = sum(int(sum(sample.mask)) for sample in every)
    return TrainBatch(tuple(groups), LossScale(len(every), num_tokens, config.rollout.max_tokens), advantages)


def _sample(result: RolloutResult, at: int, advantage: float, base: int, config: TrainConfig) -> TrainSample:
    completion = result.completions[at]
    is_masked = config.rollout.truncated == "mask" and completion.finish_reason is FinishReason.LENGTH
    count = len(completion.token_ids)
    return TrainSample(
        result.order_id, completion.index, completion.token_ids, (0.0 if is_masked else 1.0,) * count,
        behaviour_logprobs(completion, config), (advantage,) * count,
        lag_of(completion, base),
    )  # fmt: skip


def micro_batches(groups: Sequence[TrainGroup], max_tokens: int) -> Iterator[tuple[TrainGroup, ...]]:
    """Groups in order, cut so that each part has at most `max_tokens` tokens, or one sample that is longer by itself.

    A group that is too large is cut between samples; its prompt is then computed once per part.
    """
    part: list[TrainGroup] = []
    total = 0
    for piece in (piece for group in groups for piece in _pieces(group, max_tokens)):
        if part and total + piece.num_tokens > max_tokens:
            yield tuple(part)
            part, total = [], 0
        part.append(piece)
        total += piece.num_tokens
    if part:
        yield tuple(part)


def _pieces(group: TrainGroup, max_tokens: int) -> Iterator[TrainGroup]:
    samples: list[TrainSample] = []
    for sample in group.samples:
        if samples and TrainGroup(group.prompt_ids, (*samples, sample)).num_tokens > max_tokens:
            yield TrainGroup(group.prompt_ids, tuple(samples))
            samples = []
        samples.append(sample)
    yield TrainGroup(group.prompt_ids, tuple(samples))


def as_groups(groups: Sequence[TrainGroup]) -> list[Group]:
    """What a policy computes."""
    return [(group.prompt_ids, [sample.token_ids for sample in group.samples]) for group in groups]


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """What is known of each completion token before the forward pass."""

    behaviour: Tensor
    """float32 [N]."""
    advantages: Tensor
    """float32 [N]."""
    mask: Tensor
    """float32 [N]."""
    sequence: Tensor
    """int64 [N]."""
    is_fresh: Tensor
    """bool [N]: made by the weights in training alone."""
    num_sequences: int
    """Sequences, empty ones included."""

    @staticmethod
    def of(groups: Sequence[TrainGroup], device: torch.device | str = "cpu") -> TokenColumns:
        """Columns of a micro-batch, in the order of `TrainablePolicy.logprobs`."""
        samples = [sample for group in groups for sample in group.samples]

        def column(name: str) -> Tensor:
            values = [value for sample in samples for value in getattr(sample, name)]
            return torch.tensor(values, dtype=torch.float32, device=device)

        lengths = torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int64)
        sequence = torch.repeat_interleave(torch.arange(len(samples)), lengths)
        fresh = torch.tensor([sample.lag == 0 for sample in samples], dtype=torch.bool)[sequence]
        sequence, fresh = sequence.to(device), fresh.to(device)
        return TokenColumns(column("behaviour"), column("advantages"), column("mask"), sequence, fresh, len(samples))
