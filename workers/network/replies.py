"""Replies: errors in each provider's words, server-sent events, and clients that hang up.

Owns: what a status code is called by OpenAI and by Anthropic, how a `UnisonError` becomes a reply, the streamed
response, and the race of work against a disconnecting client. Knows no endpoint. Called by every handler.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ...ipc.errors import ERROR_CODES, InvalidRequestError, PromptTooLongError, RequestFailedError, UnisonError
from ...ipc.types import ErrorReason

T = TypeVar("T")

TYPES_BY_STATUS = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    409: ("conflict_error", "conflict_error"),
    413: ("request_too_large", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("overloaded_error", "overloaded_error"),
}
"""(OpenAI's, Anthropic's) error type for each status that the server answers with."""

PARAMS_BY_FIELD = {"prompt_ids": "prompt", "ordinal": "version"}
"""What HTTP calls a field of the engine's request, where the names differ."""

REASONS_OF_THE_CALLER = {ErrorReason.EMPTY_SUPPORT.value, ErrorReason.KV_EXHAUSTED.value}
"""Reasons of failed requests that come from the request itself."""


class RefusedError(Exception):
    """The server itself refuses a request, before the engine sees it."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(status, code, message, param)


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


@dataclass(frozen=True)
class Problem:
    """An error on its way to a client."""

    status: int
    """HTTP status."""
    code: str
    """Machine-readable cause."""
    message: str
    """What happened, the limit, what to do."""
    param: str | None = None
    """The field of the request that it is about."""

    @property
    def openai(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = TYPES_BY_STATUS[self.status][0]
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic(self) -> dict[str, Any]:
        """Anthropic's error object."""
        kind = TYPES_BY_STATUS[self.status][1]
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str, headers: Mapping[str, str]) -> Response:
        """The reply, in the words of the API that `path` belongs to."""
        body = self.anthropic if path.startswith("/v1/messages") else self.openai
        return JSONResponse(body, self.status, headers=dict(headers))


def problem_of(error: UnisonError) -> Problem:
    """What a client is told of an error of Unison's."""
    row = next(ERROR_CODES[kind] for kind in type(error).__mro__ if kind in ERROR_CODES)
    status = row.http_status if row.http_status in TYPES_BY_STATUS else 500
    code, param, message = row.code, None, str(error)
    if isinstance(error, InvalidRequestError):
        param = PARAMS_BY_FIELD.get(error.field, error.field)
        message = f"{param}: {message.removeprefix(f'{error.field}: ')}"
    if isinstance(error, PromptTooLongError):
        code = "context_length_exceeded"
    if isinstance(error, RequestFailedError):
        code = error.reason
        status = 400 if error.reason in REASONS_OF_THE_CALLER else status
    return Problem(status, code, message, param)


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event. Source: WHATWG HTML, sec. 9.2."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n".encode()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientGoneError: the client went first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError("the client closed the connection")
        return working.result()
    finally:
        await _cancel(working, watching)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A streamed reply. Whatever ends it, the client's leaving included, `close` is awaited once."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str], close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(headers=dict(headers), media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._close = close

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; see the class."""
        try:
            await unless_disconnected(receive, self._send(send))
        except (ClientGoneError, OSError):
            pass  # nobody is there to be told
        finally:
            await self._events.aclose()
            await self._close()

    async def _send(self, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
