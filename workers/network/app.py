"""The ASGI application: routes, and what every route has in common.

Owns: the list of endpoints and the putting together. It starts no task and holds nothing open, so that it needs no
lifespan: the backend belongs to whoever made it. Called by the process that serves, and by tests.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from . import anthropic, fields, openai_chat, openai_shape, openai_text, policy, probes, tokens
from .admission import Admission
from .backend import Backend
from .chat import ChatTemplate
from .metrics import NetworkMetrics
from .openapi import describe
from .replies import TYPES_BY_STATUS, Problem
from .routing import Call, Endpoint, Network, route_function
from .settings import NetworkSettings
from .vocabulary import Vocabulary

API_VERSION = "1"


def create_app(backend: Backend, tokenizer: Any, settings: NetworkSettings | None = None) -> Starlette:
    """The application over one backend; `tokenizer` is the model's fast tokenizer of `transformers`.

    Raises:
        UnsupportedModelError: the tokenizer isn't a fast one.
    """
    settings = settings or NetworkSettings()
    vocabulary = Vocabulary(tokenizer)
    template = ChatTemplate(tokenizer, vocabulary, settings.tool_format)
    metrics = NetworkMetrics()
    network = Network(backend, vocabulary, template, settings, Admission(settings.max_concurrent), metrics)

    def measured(app: ASGIApp) -> ASGIApp:
        return metrics.around(app, {endpoint.path for endpoint in ENDPOINTS})

    return Starlette(
        routes=[
            Route(endpoint.path, route_function(network, endpoint), methods=[endpoint.method])
            for endpoint in ENDPOINTS
        ],
        middleware=[Middleware(measured)],
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )


async def describe_self(_network: Network, _call: Call) -> Response:
    """GET /openapi.json."""
    return JSONResponse(describe(ENDPOINTS, API_VERSION))


ENDPOINTS = (
    Endpoint("/v1/models", "GET", openai_shape.list_models),
    Endpoint("/v1/models/{model:path}", "GET", openai_shape.get_model),
    Endpoint("/v1/chat/completions", "POST", openai_chat.create_chat_completion, fields.CHAT),
    Endpoint("/v1/completions", "POST", openai_text.create_completion, fields.COMPLETIONS),
    Endpoint("/v1/messages", "POST", anthropic.create_message, fields.MESSAGES),
    Endpoint("/v1/messages/count_tokens", "POST", anthropic.count_tokens, fields.ANTHROPIC_PROMPT),
    Endpoint("/tokenize", "POST", tokens.tokenize, fields.TOKENIZE),
    Endpoint("/detokenize", "POST", tokens.detokenize, fields.DETOKENIZE),
    Endpoint("/v1/policy", "GET", policy.get_policy),
    Endpoint("/v1/policy/rollback", "POST", policy.roll_back, fields.VERSION, "admin"),
    Endpoint("/v1/policy/pin", "POST", policy.pin, fields.VERSION, "admin"),
    Endpoint("/v1/policy/unpin", "POST", policy.unpin, fields.VERSION, "admin"),
    Endpoint("/v1/policy/pause", "POST", policy.pause, fields.NOTHING, "admin"),
    Endpoint("/v1/policy/resume", "POST", policy.resume, fields.NOTHING, "admin"),
    Endpoint("/health", "GET", probes.health, access="open"),
    Endpoint("/ready", "GET", probes.ready, access="open"),
    Endpoint("/metrics", "GET", probes.metrics, access="open"),
    Endpoint("/openapi.json", "GET", describe_self, access="open"),
)
"""Every method of every path."""


async def _refused(request: Request, error: Exception) -> Response:
    """Paths and methods that don't exist."""
    if not isinstance(error, HTTPException):
        raise error
    status = error.status_code if error.status_code in TYPES_BY_STATUS else 400
    code = {404: "unknown_path", 405: "unknown_method"}.get(status, "invalid_request")
    message = f"{request.method} {request.url.path}: {error.detail}; /openapi.json lists what there is"
    return Problem(status, code, message).response(request.url.path, error.headers or {})


async def _failed(request: Request, _error: Exception) -> Response:
    """A fault of ours: the client is told that much, and Starlette raises the error on to the process."""
    return Problem(500, "internal_error", "a fault inside the server; its log says more").response(request.url.path, {})
