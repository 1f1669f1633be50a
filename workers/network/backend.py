"""Backend: what the server asks of the engine behind it.

Owns: the protocol; what crosses it are the messages and types of `ipc`. Knows no socket and no text. `ipc`'s
asynchronous client fills it in; so does the in-process engine of the tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from ...ipc.messages import Welcome, WorkerStatus
from ...ipc.types import OnUpdate, PolicyVersion, RequestOutput, SamplingParams, ScoreOutput, TokenDelta


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
    def worker(self) -> Welcome:
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
