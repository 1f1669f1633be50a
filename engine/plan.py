"""The data between scheduler and executor: what one step shall run, and what came of it.

Owns: plain, frozen descriptions. Knows nothing of tensors on a device. Made by `Scheduler.plan`, read by the executor,
answered by `Scheduler.apply`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..ipc.errors import InvariantError
from ..ipc.types import TopLogprobs
from .cache.strategy import BlockCopy, RequestCache
from .request import Sequence


@dataclass(frozen=True)
class Chunk:
    """Positions `first <= i < end` of one sequence, to be computed in this step."""

    sequence: Sequence
    """Whose tokens."""
    first: int
    """First position; those before it are in the KV."""
    end: int
    """Exclusive end."""
    forks: tuple[Sequence, ...] = ()
    """Group members that share this prompt and draw their first token from the same logits."""

    @property
    def cache(self) -> RequestCache:
        """Where its KV lies."""
        if self.sequence.cache is None:
            raise InvariantError(f"{self.sequence.identity} is planned, but holds no cache")
        return self.sequence.cache

    @property
    def reaches_end(self) -> bool:
        """True where the last position's logits give the next token."""
        return self.end == self.sequence.num_tokens

    @property
    def draws(self) -> tuple[Sequence, ...]:
        """Sequences that draw a token from the logits of the chunk's last position."""
        if not self.reaches_end or self.sequence.request.spec.params.max_tokens == 0:
            return ()
        return (self.sequence, *self.forks)

    @property
    def scores_prompt(self) -> bool:
        """True where log-probs of prompt tokens are wanted from this chunk."""
        return self.sequence.request.needs_prompt_scores and self.first < len(self.sequence.request.prompt_ids) - 1


@dataclass(frozen=True)
class SubBatch:
    """The part of a step that runs under one policy version: one forward pass."""

    version: int
    """Ordinal of the version whose weights compute it."""
    decodes: tuple[Chunk, ...]
    """Chunks of one token that end their sequence."""
    prefills: tuple[Chunk, ...]
    """All other chunks."""

    @property
    def chunks(self) -> Iterator[Chunk]:
        """Decodes, then prefills: the order of rows in the forward pass."""
        yield from self.decodes
        yield from self.prefills

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return len(self.decodes) + sum(chunk.end - chunk.first for chunk in self.prefills)


@dataclass(frozen=True)
class StepPlan:
    """One step: at most one forward pass per installed version."""

    batches: tuple[SubBatch, ...]
    """Non-empty sub-batches, by ordinal."""
    copies: tuple[BlockCopy, ...]
    """Copy-on-write copies to do before the forward passes."""


@dataclass(frozen=True)
class BatchResult:
    """What one sub-batch gave, on the host; rows in the order of its chunks' `draws`."""

    token_ids: np.ndarray
    """int64 [R]: drawn tokens."""
    logprobs: np.ndarray
    """float32 [R]: under the sampling distribution."""
    raw_logprobs: np.ndarray
    """float32 [R]: under the full softmax."""
    log_support_mass: np.ndarray
    """float32 [R]: log of the mass that the filters left."""
    status: np.ndarray
    """uint8 [R]: 0 where a token was drawn, else a `SampleStatus`."""
    top: tuple[TopLogprobs | None, ...]
    """[R]: alternatives, None where not asked for; empty when nobody asked."""
    prompt_scores: tuple[tuple[Chunk, np.ndarray, list[TopLogprobs]], ...]
    """Per scoring chunk: log-probs [k] of the prompt tokens that follow its positions, and their alternatives."""


@dataclass(frozen=True)
class StepResult:
    """What one step gave."""

    batches: tuple[BatchResult, ...]
    """One per sub-batch of the plan."""


def by_version(chunks: Iterable[Chunk]) -> tuple[SubBatch, ...]:
    """Group chunks into one forward pass per version; decodes first, each part in order of arrival."""
    parts: dict[int, tuple[list[Chunk], list[Chunk]]] = {}
    for chunk in chunks:
        version = chunk.sequence.request.version
        assert version is not None
        decodes, prefills = parts.setdefault(version, ([], []))
        (decodes if chunk.end - chunk.first == 1 and chunk.reaches_end else prefills).append(chunk)
    return tuple(SubBatch(version, tuple(d), tuple(p)) for version, (d, p) in sorted(parts.items()))
