"""Backend: what the server asks of the engine behind it.

Owns: the protocol, and the snapshots that cross it. Knows no socket and no text. `ipc`'s asynchronous client fills it
in; so does the in-process engine of the tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from ...ipc.types import OnUpdate, PolicyVersion, RequestOutput, SamplingParams, ScoreOutput, TokenDelta


class WorkerInfo(Protocol):
    """Who answers: one life of one engine worker."""

    @property
    def epoch(self) -> str:
        """Another one after every restart."""

    @property
    def pid(self) -> int:
        """Process id of the worker."""

    @property
    def model(self) -> str:
        """Name under which the model is served."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def max_len(self) -> int:
        """Most tokens of prompt and completion together."""

    @property
    def live(self) -> PolicyVersion:
        """Version that new requests start on, as far as is known."""


class VersionStatus(Protocol):
    """One installed version."""

    @property
    def version(self) -> PolicyVersion:
        """Ordinal and digest."""

    @property
    def state(self) -> str:
        """Its state in the version protocol."""

    @property
    def num_pins(self) -> int:
        """Requests that keep it from being retired."""


class WorkerStatus(Protocol):
    """What the worker is doing; a snapshot."""

    @property
    def step(self) -> int:
        """Steps since the start."""

    @property
    def step_age_s(self) -> float:
        """Seconds since the last step ended."""

    @property
    def loop_age_s(self) -> float:
        """How long a message to the worker may have waited lately."""

    @property
    def is_paused(self) -> bool:
        """True while no step is run on purpose."""

    @property
    def num_running(self) -> int:
        """Sequences with KV."""

    @property
    def num_waiting(self) -> int:
        """Sequences without KV."""

    @property
    def num_blocks(self) -> int:
        """KV blocks of the pool."""

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that could be taken now."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, lately."""

    @property
    def versions(self) -> Sequence[VersionStatus]:
        """Installed policy versions."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Totals since the worker's start, by name."""

    @property
    def latencies_s(self) -> Mapping[str, float]:
        """Percentiles of recent durations, by name; a name is absent before the first."""


class TokenStream(Protocol):
    """The tokens of one request as they come. Leaving it before its end cancels the request."""

    @property
    def request_id(self) -> str:
        """Id of the request."""

    @property
    def output(self) -> RequestOutput | None:
        """The whole, once the iteration has ended; None before that and after a cancellation."""

    def __aiter__(self) -> AsyncIterator[tuple[TokenDelta, ...]]:
        """Yields the deltas that arrived together."""

    async def __aenter__(self) -> TokenStream:
        """Nothing happens before the iteration begins."""

    async def __aexit__(self, *_: object) -> None:
        """Cancels what hasn't ended."""


class Backend(Protocol):
    """An engine that may be asked from one event loop. Every method may raise a `UnisonError`."""

    @property
    def worker(self) -> WorkerInfo:
        """The worker that answers at present."""

    @property
    def is_connected(self) -> bool:
        """False while there is no worker."""

    def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        n: int = 1,
        on_update: OnUpdate = OnUpdate.FINISH,
        pin_version: int | None = None,
        deadline_s: float | None = None,
        resubmit: bool = False,
    ) -> TokenStream:
        """Tokens of one request as they come; refusals are raised by the iteration."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        n: int = 1,
        on_update: OnUpdate = OnUpdate.FINISH,
        pin_version: int | None = None,
        deadline_s: float | None = None,
        resubmit: bool = False,
    ) -> RequestOutput:
        """The whole of one request."""

    async def score(
        self,
        prompt_ids: Sequence[int],
        continuation_ids: Sequence[int],
        top_k: int = 0,
        pin_version: int | None = None,
    ) -> ScoreOutput:
        """Log-probs of a given continuation."""

    async def status(self, deadline_s: float = 5.0) -> WorkerStatus:
        """What the worker is doing."""

    async def rollback(self, ordinal: int) -> PolicyVersion:
        """Make an installed version live again."""

    async def pin(self, ordinal: int) -> None:
        """Keep a version installed until `unpin`."""

    async def unpin(self, ordinal: int) -> None:
        """Undo one `pin`."""

    async def pause(self) -> None:
        """Run no steps until `resume`."""

    async def resume(self) -> None:
        """Run steps again."""
