"""What a step's result means for its sequences: tokens taken, who goes on, who ends and why.

Owns: the rules of ending (stop tokens, lengths, faults) and the events that leave a step. Knows nothing of KV, queues
or tensors on a device. Called by `Scheduler.apply`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..ipc.types import ErrorReason, FinishReason, RequestOutput, TokenDelta
from .plan import BatchResult, SubBatch
from .request import Request, Sequence
from .runtime.sample import SampleStatus

_ERROR_BY_STATUS = {
    SampleStatus.NON_FINITE_LOGITS: ErrorReason.NON_FINITE_LOGITS,
    SampleStatus.EMPTY_SUPPORT: ErrorReason.EMPTY_SUPPORT,
}


@dataclass(frozen=True)
class Outcome:
    """How a sequence ended."""

    finish_reason: FinishReason
    """The closed set of R1."""
    error: ErrorReason | None = None
    """Cause of an error."""
    matched_stop: int | None = None
    """The stop token drawn."""


@dataclass
class StepEvents:
    """What came out of a step: new tokens and finished requests."""

    pending: list[tuple[Sequence, int]] = field(default_factory=list)
    """(sequence, first new position); a sequence appears once per token or terminal event."""
    finished: list[Request] = field(default_factory=list)
    """Requests whose last sequence ended."""

    def __bool__(self) -> bool:
        return bool(self.pending or self.finished)

    def add_delta(self, seq: Sequence, first: int) -> None:
        """Positions from `first` on are new; the delta itself is built when it is asked for."""
        self.pending.append((seq, first))

    def deltas(self) -> tuple[TokenDelta, ...]:
        """The new tokens as messages; call before the next step."""
        return tuple(seq.delta(first) for seq, first in self.pending)

    def outputs(self) -> tuple[RequestOutput, ...]:
        """The finished requests as results."""
        return tuple(request.output() for request in self.finished)


def absorb(batch: SubBatch, rows: BatchResult, max_len: int) -> Iterator[tuple[Sequence, int, Outcome | None]]:
    """Give each drawing sequence its token; yields (sequence, first new position, outcome or None to go on).

    A row without a token (NaN logits, nothing left to draw) ends its sequence with an error and appends nothing (P18).
    """
    failed = set()
    for chunk, logprobs, top in rows.prompt_scores:
        scores = chunk.sequence.request.prompt_scores
        assert scores is not None
        if np.isnan(logprobs).any():
            failed.add(id(chunk.sequence))
            yield chunk.sequence, 0, Outcome(FinishReason.ERROR, ErrorReason.NON_FINITE_LOGITS)
        else:
            scores.fill(chunk.first, logprobs, top)
    columns = zip(
        rows.token_ids.tolist(),
        rows.logprobs.tolist(),
        rows.raw_logprobs.tolist(),
        rows.log_support_mass.tolist(),
        rows.status.tolist(),
        rows.top or (None,) * len(rows.token_ids),
        strict=True,
    )
    for chunk in batch.chunks:
        for seq in chunk.draws:
            token, logprob, raw_logprob, mass, status, top_logprobs = next(columns)
            if id(seq) in failed:
                continue
            first = len(seq.generated)
            if status:
                yield seq, first, Outcome(FinishReason.ERROR, _ERROR_BY_STATUS[SampleStatus(status)])
                continue
            seq.append(token, logprob, raw_logprob, mass, batch.version)
            if top_logprobs is not None:
                seq.top_logprobs.append(top_logprobs)
            yield seq, first, _ending(seq, token, max_len)
        if chunk.reaches_end and not chunk.draws and id(chunk.sequence) not in failed:
            yield chunk.sequence, 0, Outcome(FinishReason.LENGTH)


def _ending(seq: Sequence, token: int, max_len: int) -> Outcome | None:
    """Why the sequence ends with this token, or None."""
    params = seq.request.spec.params
    if token in seq.request.stop_ids:
        return Outcome(FinishReason.STOP, matched_stop=token)
    if len(seq.generated) >= params.max_tokens or seq.num_tokens >= max_len:
        return Outcome(FinishReason.LENGTH)
    return None
