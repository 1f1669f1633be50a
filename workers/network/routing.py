"""Routing: what a handler is given, and how a request becomes a reply or an error.

Owns: keys, body limits, JSON, the mapping of errors, and the life of a generating request: its slot, its generation,
its response headers, its cancellation. Knows no field and no protocol: those are the handlers' and their shapes'.
Called by app.py (routes) and by the handlers (`answer`).
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ...ipc.errors import InvalidRequestError, InvariantError, UnisonError
from .admission import Admission
from .backend import Backend
from .chat import ChatTemplate
from .generation import Generation, Job
from .kinds import Field, parse_object
from .metrics import NetworkMetrics
from .replies import ClientGoneError, EventStream, Problem, RefusedError, problem_of, unless_disconnected
from .settings import NetworkSettings
from .vocabulary import Vocabulary

GONE_STATUS = 499
"""Status in the metrics for a client that went away; nobody receives it."""


@dataclass(frozen=True)
class Network:
    """Everything that handlers share; one per application."""

    backend: Backend
    """The engine."""
    vocabulary: Vocabulary
    """The tokenizer."""
    template: ChatTemplate
    """The chat template."""
    settings: NetworkSettings
    """Constants."""
    admission: Admission
    """Slots of generating requests."""
    metrics: NetworkMetrics
    """Counters."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digest by ordinal, of the versions seen so far."""

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""
        return self.settings.model_name or self.backend.worker.model

    def check_model(self, fields: dict[str, Any]) -> str:
        """The served model's name, if the request asks for no other."""
        asked = fields.get("model", self.model_name)
        if asked != self.model_name:
            message = f"the model {asked!r} isn't served here; ask for {self.model_name!r}"
            raise RefusedError(404, "model_not_found", message, "model")
        return self.model_name

    async def digest_of(self, ordinal: int) -> str | None:
        """Digest of a version, or None where it can't be had any more."""
        live = self.backend.worker.live
        self.digests[live.ordinal] = live.digest
        if ordinal not in self.digests:
            try:
                status = await self.backend.status(self.settings.status_deadline_s)
            except UnisonError:
                return None
            self.digests.update((entry.version.ordinal, entry.version.digest) for entry in status.versions)
        return self.digests.get(ordinal)


@dataclass(frozen=True)
class Call:
    """One HTTP request on its way through a handler."""

    request: Request
    """The request; its body has been read."""
    fields: dict[str, Any]
    """Checked fields of the body."""
    call_id: str
    """Random part of every id in the answer, and the reply's `x-request-id`."""
    started_s: float
    """When it came, by the monotonic clock."""


Handler = Callable[[Network, Call], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """One method of one path."""

    path: str
    """As Starlette writes it."""
    method: str
    """GET or POST."""
    handler: Handler
    """Answers."""
    fields: tuple[Field, ...] | None = None
    """Fields of the body; None where there is no body."""
    access: str = "user"
    """`open`, `user` (an API key, where there are any) or `admin`."""


class Shape(Protocol):
    """One protocol's way to write an answer down."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer of an ended generation."""

    def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as server-sent events, while the generation runs."""

    def error_event(self, problem: Problem) -> bytes:
        """The last event of a stream that failed."""


def route_function(network: Network, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """The function that Starlette calls for an endpoint."""

    async def run(request: Request) -> Response:
        call_id, started_s = secrets.token_hex(12), monotonic()
        headers = {"x-request-id": call_id, "request-id": call_id}
        try:
            check_access(request, network.settings, endpoint.access)
            fields: dict[str, Any] = {}
            if endpoint.fields is not None:
                fields = parse_object(endpoint.fields, await read_json(request, network.settings.max_body_bytes))
            return await endpoint.handler(network, Call(request, fields, call_id, started_s))
        except RefusedError as error:
            problem = error.problem
        except InvariantError:
            raise
        except UnisonError as error:
            problem = problem_of(error)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=GONE_STATUS)
        if problem.status in (429, 503):
            headers["retry-after"] = str(network.settings.retry_after_s)
        if problem.status == 401:
            headers["www-authenticate"] = "Bearer"
        return problem.response(request.url.path, headers)

    return run


def check_access(request: Request, settings: NetworkSettings, access: str) -> None:
    """Raise RefusedError unless the request shows a key that opens this endpoint."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    shown = {bearer.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")} - {""}
    admin_keys = () if settings.admin_key is None else (settings.admin_key,)
    if access == "admin":
        if not admin_keys:
            message = "no admin key is configured, so that policy versions can't be changed over HTTP"
            raise RefusedError(403, "admin_disabled", message)
        if _has_key(shown, admin_keys):
            return
        if settings.api_keys and _has_key(shown, settings.api_keys):
            raise RefusedError(403, "admin_key_required", "this key may generate, but not change policy versions")
        raise RefusedError(401, "invalid_api_key", "the admin key is missing or wrong; send Authorization: Bearer KEY")
    if access == "user" and settings.api_keys and not _has_key(shown, (*settings.api_keys, *admin_keys)):
        message = "the API key is missing or wrong; send Authorization: Bearer KEY, or x-api-key: KEY"
        raise RefusedError(401, "invalid_api_key", message)


def _has_key(shown: set[str], keys: Sequence[str]) -> bool:
    """Whether any key fits; takes as long whichever fits."""
    hits = [hmac.compare_digest(one.encode(), key.encode()) for one in shown for key in keys]
    return any(hits)


async def read_json(request: Request, max_bytes: int) -> Any:
    """The body as JSON; an empty one is an empty object.

    Raises:
        RefusedError: it is too long. InvalidRequestError: it is no JSON, or holds what no text can hold.
    """
    too_long = RefusedError(413, "request_too_large", f"the body is longer than {max_bytes} bytes, which is the limit")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_long
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant) if body else {}
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
        return value
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("body", f"is no JSON text: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


async def answer(network: Network, call: Call, jobs: Sequence[Job], shape: Shape) -> Response:
    """Generate, and answer whole or as a stream; a client that leaves cancels."""
    backend, settings = network.backend, network.settings
    if not backend.is_connected:
        raise RefusedError(503, "worker_lost", "the engine isn't there at the moment; try again in a moment")
    async with AsyncExitStack() as stack:
        stack.enter_context(network.admission.slot())
        generation = await stack.enter_async_context(Generation(backend, tuple(jobs), settings.request_timeout_s))
        stack.callback(network.metrics.on_generation, generation)
        await unless_disconnected(call.request.receive, generation.start())
        network.metrics.on_first_token(monotonic() - call.started_s)
        headers = await version_headers(network, generation)
        headers |= {"x-request-id": call.call_id, "request-id": call.call_id}
        if call.fields.get("stream", False):
            return EventStream(_events(shape, generation), headers, stack.pop_all().aclose)
        await unless_disconnected(call.request.receive, generation.run())
        return JSONResponse(shape.whole(generation), headers=headers)


async def version_headers(network: Network, generation: Generation) -> dict[str, str]:
    """Which policy version made the first token."""
    ordinal = generation.first_version
    if ordinal is None:
        ordinal = network.backend.worker.live.ordinal
    digest = await network.digest_of(ordinal)
    return {"x-unison-version": str(ordinal)} | ({"x-unison-digest": digest} if digest else {})


async def _events(shape: Shape, generation: Generation) -> AsyncGenerator[bytes, None]:
    """The shape's events; an error after the beginning is the last one."""
    try:
        async for chunk in shape.events(generation):
            yield chunk
    except InvariantError:
        raise
    except UnisonError as error:
        yield shape.error_event(problem_of(error))
