"""The error tree: every error that Unison raises on purpose, and what crosses a process boundary for it.

    UnisonError
    ├── InvalidRequestError      the caller's fault: a field is wrong; nothing was allocated
    │   └── PromptTooLongError   prompt and max_tokens don't fit the model or the KV pool
    ├── ConfigError              a configuration key or value is unknown or out of bounds
    ├── ModelError               a model directory can't be served as asked
    │   ├── UnsupportedModelError    the configuration asks for something that isn't implemented
    │   └── WeightsError             tensors are missing, unexpected, misshapen or outside the layout
    ├── VersionError             the policy-version protocol refused
    │   ├── StaleVersionError        an ordinal that doesn't grow
    │   ├── DigestMismatchError      the bytes are not those that the manifest names
    │   ├── UnknownVersionError      a version that isn't installed (any more)
    │   └── VersionBusyError         every buffer is still pinned, or a batch holds the guard
    ├── CapacityError            no room now; trying again later may work
    ├── RequestFailedError       an accepted request ended in an error
    │   └── BatchFailedError         some prompts of a batch did; carries indices and reasons
    ├── WireError                a frame isn't a message of this protocol; nothing was done
    ├── HandshakeError           two processes don't belong together: token, schema, role, user or run directory
    ├── WorkerLostError          the worker that held a call is gone; it may be asked again
    │   └── ShuttingDownError        it is about to go: it drains and takes nothing new
    ├── ArenaError               the weight arena refused: a buffer in use, another layout, a foreign device
    ├── RingCorruptedError       a shared-memory ring holds what no producer of ours writes
    ├── ProcessFailedError       a child process didn't start, or died too often; carries its story
    ├── RewardError              reward functions failed on a group; `reason` says how
    ├── RolloutFailedError       rollouts failed, so a batch can't be trained; carries indices and reasons
    ├── TrainingError            a training step can't be taken: gradients that aren't finite, a mismatch, no signal
    ├── CheckpointError          a checkpoint can't be written, or isn't what its digests say
    ├── DeadlineError            a wait ran out; says what it waited for
    └── InvariantError           Unison's own fault: a promise is broken; never caught below a process's outermost loop

Owns: the classes and the one table from class to wire code, HTTP status and "may be retried". Knows nothing of
transport. Called by everyone.
"""

from __future__ import annotations

from dataclasses import dataclass


class UnisonError(Exception):
    """Root of all errors that Unison raises on purpose. Its text says what happened, the limit, and what to do."""


class InvalidRequestError(UnisonError, ValueError):
    """A request's field is out of range or contradicts another; nothing was allocated (R2).

    `field` names the offending field.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class PromptTooLongError(InvalidRequestError):
    """The prompt and the tokens asked for exceed the model's context or the whole KV pool."""


class ConfigError(UnisonError, ValueError):
    """A configuration key is unknown or its value is out of bounds (P4). `field` is the dotted name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ModelError(UnisonError):
    """A model directory can't be served as asked."""


class UnsupportedModelError(ModelError):
    """The model's configuration asks for something that isn't implemented. `option` names it."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


class WeightsError(ModelError):
    """Tensors are missing, unexpected, of a wrong shape or dtype, or outside the flat layout."""


class VersionError(UnisonError):
    """The policy-version protocol refused; the live version is what it was before the call (V5)."""


class StaleVersionError(VersionError):
    """The ordinal isn't above every ordinal seen so far (V1)."""


class DigestMismatchError(VersionError):
    """The tensors' bytes differ from the digest that came with them (V1). `tensors` names those that differ."""

    def __init__(self, message: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors


class UnknownVersionError(VersionError):
    """The version isn't installed, or is installed no more."""


class VersionBusyError(VersionError):
    """The version can't change or go now: requests pin every buffer, or a synchronous batch holds the guard."""


class CapacityError(UnisonError):
    """There is no room at the moment (queue, rows or KV); trying again later may work."""


class RequestFailedError(UnisonError):
    """An accepted request ended in an error. `reason` is the machine-readable cause (an `ErrorReason` value)."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BatchFailedError(RequestFailedError):
    """Some completions of a synchronous batch failed (S28).

    `failures` maps the prompt's index in the batch to the reason of its first failure.
    """

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message, next(iter(failures.values())))
        self.failures = failures


class WireError(UnisonError, ValueError):
    """A frame isn't a message of this protocol: malformed, oversize, of an unknown tag, or with wrong fields."""


class HandshakeError(UnisonError):
    """Two processes don't belong together: the token, the schema, the role, the user or the run directory differ."""


class WorkerLostError(UnisonError):
    """The worker that held a call is gone: it died, was restarted under a new epoch, or doesn't answer (R1)."""


class ShuttingDownError(WorkerLostError):
    """The worker drains and takes no new request; ask the next one."""


class ArenaError(UnisonError):
    """The weight arena refused: a buffer is in use, the layout or the device is another, or memory ran out."""


class RingCorruptedError(UnisonError):
    """A shared-memory ring holds what no producer of ours writes: a wrong checksum, length, position or header."""


class ProcessFailedError(UnisonError):
    """A child process didn't start, or died more often than allowed. The text carries the end of its log."""


class RewardError(UnisonError):
    """Reward functions failed on a group; it is rejected, never scored 0. `reason` is one of the rejection reasons."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RolloutFailedError(UnisonError):
    """Rollouts of a batch failed, and it isn't trained (S28). `failures` maps order ids to reasons."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


class TrainingError(UnisonError):
    """A training step can't be taken; nothing has advanced."""


class CheckpointError(UnisonError):
    """A checkpoint can't be written, or isn't what its digests say."""


class DeadlineError(UnisonError, TimeoutError):
    """A wait ran out (P2). The text says what was waited for and how long."""


class InvariantError(UnisonError, AssertionError):
    """A promise of Unison's own is broken: a bug here, not at the caller's. The process that sees it must end."""


@dataclass(frozen=True)
class ErrorCode:
    """What crosses a process boundary for an error class."""

    code: str
    """Stable machine-readable name on the wire."""
    http_status: int
    """Status of an HTTP reply that reports it."""
    is_retryable: bool
    """True where the same call may succeed later without being changed."""


ERROR_CODES: dict[type[UnisonError], ErrorCode] = {
    UnisonError: ErrorCode("error", 500, False),
    InvalidRequestError: ErrorCode("invalid_request", 400, False),
    PromptTooLongError: ErrorCode("prompt_too_long", 400, False),
    ConfigError: ErrorCode("invalid_config", 400, False),
    ModelError: ErrorCode("model_error", 500, False),
    UnsupportedModelError: ErrorCode("unsupported_model", 400, False),
    WeightsError: ErrorCode("invalid_weights", 400, False),
    VersionError: ErrorCode("version_error", 409, False),
    StaleVersionError: ErrorCode("stale_version", 409, False),
    DigestMismatchError: ErrorCode("digest_mismatch", 409, False),
    UnknownVersionError: ErrorCode("unknown_version", 404, False),
    VersionBusyError: ErrorCode("version_busy", 409, True),
    CapacityError: ErrorCode("no_capacity", 429, True),
    RequestFailedError: ErrorCode("request_failed", 500, False),
    BatchFailedError: ErrorCode("batch_failed", 500, False),
    WireError: ErrorCode("malformed_message", 400, False),
    HandshakeError: ErrorCode("handshake_refused", 403, False),
    WorkerLostError: ErrorCode("worker_lost", 503, True),
    ShuttingDownError: ErrorCode("shutting_down", 503, True),
    ArenaError: ErrorCode("arena_refused", 409, False),
    RingCorruptedError: ErrorCode("ring_corrupted", 500, False),
    ProcessFailedError: ErrorCode("process_failed", 503, False),
    RewardError: ErrorCode("reward_failed", 500, False),
    RolloutFailedError: ErrorCode("rollout_failed", 500, False),
    TrainingError: ErrorCode("training_failed", 500, False),
    CheckpointError: ErrorCode("checkpoint_error", 500, False),
    DeadlineError: ErrorCode("deadline_exceeded", 408, True),
    InvariantError: ErrorCode("internal_error", 500, False),
}
"""One row per class; a test demands that no class is missing and no code appears twice."""
