"""Every message between processes, grouped by who receives it.

Requests are verbs, facts are past tense. Each message belongs to a call: the caller numbers its calls, and every answer
carries the number of the call that it answers. docs/wire.md lists them and is compared with this file.

Owns: the message types, the set of them (`CODEC`), and how an error crosses. Knows nothing of sockets. Called by the
channels, the worker and the client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import ERROR_CODES, UnisonError
from .types import GenerateRequest, Manifest, PolicyVersion, RequestOutput, TokenDelta
from .wire import Codec

# ---- to the worker: about the connection -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """First message of a connection; anything else before it is refused."""

    schema: str
    """Schema digest of the sender's codec."""
    token: str
    """The run's secret, from the address file."""
    role: str
    """What the sender is: `server`, `trainer`, `rollout`, `supervisor` or `user`."""
    pid: int
    """Process id of the sender, watched for its death where it is on the same machine."""
    epoch: str
    """Worker epoch that the sender read in the address file."""


@dataclass(frozen=True)
class Ping:
    """Heartbeat; answered by `Pong`."""


@dataclass(frozen=True)
class Goodbye:
    """The sender leaves: its requests are aborted, its pins and reservations are given back. Not answered."""


# ---- to the worker: requests -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SubmitRequest:
    """Generate. Answers: `RequestAccepted`, then `TokensGenerated` where streamed, then one `RequestFinished`."""

    request: GenerateRequest
    """What to generate; `request_id` is unique per client and makes a retry act once."""
    stream: bool
    """True: tokens are reported as they come."""


@dataclass(frozen=True)
class CancelRequest:
    """End a request of this client; answered by `CancelHandled`. Overtakes queued requests."""

    request_id: str
    """The request."""


# ---- to the worker: policy versions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReserveBuffer:
    """Ask for an arena buffer to write the next version into; answered by `BufferReserved`.

    A version that is only retained for rollback is retired for it. The reservation ends with the publication, with
    `AbandonBuffer`, or with the client.
    """

    wait_s: float
    """How long to wait for a buffer whose requests haven't ended, in seconds; 0 answers at once."""


@dataclass(frozen=True)
class AbandonBuffer:
    """Give a reservation back unpublished; answered by `Acknowledged`."""

    buffer: int
    """Index of the buffer."""


@dataclass(frozen=True)
class PublishWeights:
    """A sealed buffer holds a new version; answered by `WeightsLive` after verification and flip."""

    version: PolicyVersion
    """Ordinal and root digest; also the idempotency id."""
    buffer: int
    """Index of the buffer, reserved before."""
    manifest: Manifest
    """Every tensor with its digest."""


@dataclass(frozen=True)
class RollbackPolicy:
    """Go back to an installed version; answered by `WeightsLive`."""

    ordinal: int
    """The version."""


@dataclass(frozen=True)
class PinVersion:
    """Keep a version installed for this client until `UnpinVersion` or the client's end; answered by
    `Acknowledged`."""

    ordinal: int
    """The version."""


@dataclass(frozen=True)
class UnpinVersion:
    """Give one pin of this client's back; answered by `Acknowledged`."""

    ordinal: int
    """The version."""


@dataclass(frozen=True)
class ReleaseVersion:
    """Retire a version that is only retained, so that its buffer is free; answered by `Acknowledged`."""

    ordinal: int
    """The version."""


# ---- to the worker: operation ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PauseGeneration:
    """Stop stepping after the present step; KV is kept, requests queue up; answered by `Acknowledged`."""


@dataclass(frozen=True)
class ResumeGeneration:
    """Go on stepping; answered by `Acknowledged`."""


@dataclass(frozen=True)
class GetStatus:
    """Answered by `WorkerStatus`."""


# ---- to the client ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """Answer to `Hello`: whom you are talking to."""

    epoch: str
    """Drawn anew at each start of a worker; calls of another epoch are gone."""
    pid: int
    """Process id of the worker."""
    model: str
    """Name under which the model is served."""
    vocab_size: int
    """Token ids are below it."""
    max_len: int
    """Most tokens of one sequence, prompt and completion."""
    num_buffers: int
    """Weight buffers of the arena."""
    live: PolicyVersion
    """The version that new requests start on at the moment."""


@dataclass(frozen=True)
class Pong:
    """Answer to `Ping`."""


@dataclass(frozen=True)
class Failed:
    """The call was refused or failed; nothing is held for it."""

    code: str
    """Wire code of the error class (docs/errors.md)."""
    message: str
    """What happened, the limit, what to do."""
    details: dict[str, str]
    """Attributes of the error, e.g. `field`."""


@dataclass(frozen=True)
class Acknowledged:
    """The call was carried out."""


@dataclass(frozen=True)
class RequestAccepted:
    """The request is queued; from here on it ends in exactly one `RequestFinished` (R1)."""

    request_id: str
    """The request."""


@dataclass(frozen=True)
class TokensGenerated:
    """New tokens of one request, of one or more engine steps."""

    deltas: tuple[TokenDelta, ...]
    """In order, per completion without a gap."""


@dataclass(frozen=True)
class RequestFinished:
    """Every completion of the request has ended."""

    output: RequestOutput
    """The whole result."""


@dataclass(frozen=True)
class CancelHandled:
    """The cancellation was looked at; the request's terminal events come in its own call."""

    was_in_flight: bool
    """False where the request had ended before or never was this client's."""


@dataclass(frozen=True)
class BufferReserved:
    """A buffer to write, and the ordinal to publish it under."""

    buffer: int
    """Index of the buffer; nobody reads it."""
    next_ordinal: int
    """Lowest ordinal that the guard accepts."""


@dataclass(frozen=True)
class WeightsLive:
    """The version is live: new requests start on it."""

    version: PolicyVersion
    """Ordinal and digest."""
    step: int
    """Engine steps run before it went live."""
    waited_s: float
    """From the message's arrival to the flip, verification included."""


@dataclass(frozen=True)
class VersionStatus:
    """One installed version."""

    version: PolicyVersion
    """Ordinal and digest."""
    state: str
    """`pending`, `live`, `draining` or `retained`."""
    num_pins: int
    """Requests and clients that keep it."""
    buffer: int
    """Its buffer in the arena."""


@dataclass(frozen=True)
class WorkerStatus:
    """How the worker is; a snapshot."""

    epoch: str
    """The worker's epoch."""
    uptime_s: float
    """Since its start."""
    step: int
    """Engine steps run."""
    step_age_s: float
    """Since the last step ended, or since the start."""
    loop_age_s: float
    """Longest turn of the loop within the last minute: how long a message may have waited."""
    is_paused: bool
    """True between pause and resume."""
    is_draining: bool
    """True after a request to stop."""
    is_exact: bool
    """Whether engine and packed forward agree to the bit on this machine (self-test)."""
    num_clients: int
    """Connected clients."""
    num_running: int
    """Sequences with KV."""
    num_waiting: int
    """Sequences without."""
    num_queued: int
    """Requests received and not yet handed to the scheduler."""
    num_blocks: int
    """KV blocks in all."""
    num_free_blocks: int
    """KV blocks that can be taken."""
    tokens_per_s: float
    """Generated tokens per second over the last ten seconds."""
    versions: tuple[VersionStatus, ...]
    """Installed policy versions."""
    counters: dict[str, int]
    """Totals since the start, by name (docs/wire.md)."""
    latencies_s: dict[str, float]
    """p50 and p99 of step, time to first token and time per token; absent before the first."""


MESSAGES: tuple[type, ...] = (
    Hello, Ping, Goodbye, SubmitRequest, CancelRequest, ReserveBuffer, AbandonBuffer, PublishWeights, RollbackPolicy,
    PinVersion, UnpinVersion, ReleaseVersion, PauseGeneration, ResumeGeneration, GetStatus, Welcome, Pong, Failed,
    Acknowledged, RequestAccepted, TokensGenerated, RequestFinished, CancelHandled, BufferReserved, WeightsLive,
    WorkerStatus,
)  # fmt: skip

CODEC = Codec(MESSAGES)
"""The one codec; its schema digest is compared in the handshake."""

_ERROR_BY_CODE = {row.code: kind for kind, row in ERROR_CODES.items()}
_DETAILS = ("field", "option", "reason")


def failure(error: UnisonError) -> Failed:
    """An error as a message."""
    details = {name: str(getattr(error, name)) for name in _DETAILS if hasattr(error, name)}
    if hasattr(error, "tensors"):
        details["tensors"] = ",".join(error.tensors)
    return Failed(ERROR_CODES[type(error)].code, str(error)[:10_000], details)


def error_of(failed: Failed) -> UnisonError:
    """The error that a message carries, as an instance of the same class; an unknown code gives a plain UnisonError."""
    kind = _ERROR_BY_CODE.get(failed.code, UnisonError)
    error = kind.__new__(kind)
    error.args = (failed.message,)
    attributes: dict[str, Any] = {name: text for name, text in failed.details.items() if name in _DETAILS}
    if "tensors" in failed.details:
        attributes["tensors"] = tuple(filter(None, failed.details["tensors"].split(",")))
    for name, value in attributes.items():
        setattr(error, name, value)
    return error
