"""/openapi.json: every endpoint, from the same tables that check requests.

Owns: what each endpoint answers with, and the putting together. Called by app.py, which serves it; a test demands that
every endpoint is described.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import schemas
from .kinds import Field, object_schema
from .routing import Endpoint

GENERATING = (400, 404, 408, 409, 413, 429, 500, 503)
PLAIN = (400, 404, 413)
POLICY = (400, 404, 408, 409, 413, 429, 500, 503)


@dataclass(frozen=True)
class Answer:
    """What an endpoint answers with."""

    summary: str
    """One line."""
    schema: schemas.Schema
    """Schema of the good answer; empty for text."""
    problems: tuple[int, ...] = ()
    """Statuses of errors, beside 401 and 403 where keys are asked for."""
    problem_schema: schemas.Schema | None = None
    """Schema of the errors; None takes that of the path's protocol."""
    has_stream: bool = False
    """True where the answer may come as server-sent events."""


ANSWERS = {
    "/v1/models": Answer("The served model.", schemas.MODELS),
    "/v1/models/{model:path}": Answer("One model.", schemas.MODEL, (404,)),
    "/v1/chat/completions": Answer("Answer a conversation.", schemas.CHAT, GENERATING, has_stream=True),
    "/v1/completions": Answer("Continue texts.", schemas.TEXT, GENERATING, has_stream=True),
    "/v1/messages": Answer("Answer a conversation.", schemas.MESSAGE, GENERATING, has_stream=True),
    "/v1/messages/count_tokens": Answer("Count a conversation's tokens.", schemas.COUNTED, PLAIN),
    "/tokenize": Answer("Text to token ids.", schemas.TOKENIZED, PLAIN),
    "/detokenize": Answer("Token ids to text.", schemas.DETOKENIZED, PLAIN),
    "/v1/policy": Answer("Policy versions.", schemas.POLICY, (408, 503)),
    "/v1/policy/rollback": Answer("Make an installed version live.", schemas.ROLLED_BACK, POLICY),
    "/v1/policy/pin": Answer("Keep a version installed.", schemas.POLICY, POLICY),
    "/v1/policy/unpin": Answer("Undo a pin.", schemas.POLICY, POLICY),
    "/v1/policy/pause": Answer("Run no steps.", schemas.POLICY, POLICY),
    "/v1/policy/resume": Answer("Run steps again.", schemas.POLICY, POLICY),
    "/health": Answer("Does the engine make progress?", schemas.HEALTHY, (503,), schemas.PROBE_FAILED),
    "/ready": Answer("Can requests be served?", schemas.READY, (503,), schemas.PROBE_FAILED),
    "/metrics": Answer("Prometheus text.", {}),
    "/openapi.json": Answer("This description.", schemas.OBJECT),
}
"""By path, as Starlette writes it."""


def describe(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """The OpenAPI document. Source: OpenAPI 3.1.0."""
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, ANSWERS[endpoint.path])
    return {
        "openapi": "3.1.0",
        "info": {"title": "Unison", "version": version, "description": "OpenAI- and Anthropic-compatible endpoints."},
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
    }


def _operation(endpoint: Endpoint, answer: Answer) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer.schema}}
    if not answer.schema:
        content = {"text/plain": {"schema": schemas.STRING}}
    if answer.has_stream:
        content["text/event-stream"] = {"schema": schemas.STRING}
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "summary": answer.summary,
        "responses": {"200": {"description": "Done.", "content": content}} | _problems(endpoint, answer),
    }
    if "{" in endpoint.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": schemas.STRING}]
    if endpoint.fields is not None:
        operation["requestBody"] = _body(endpoint.fields)
    if endpoint.access != "open":
        operation["security"] = [{"bearer": []}, {"key": []}] + ([{}] if endpoint.access == "user" else [])
    return operation


def _problems(endpoint: Endpoint, answer: Answer) -> dict[str, Any]:
    statuses = {*answer.problems, *{"open": (), "user": (401,), "admin": (401, 403)}[endpoint.access]}
    is_anthropic = endpoint.path.startswith("/v1/messages")
    schema = answer.problem_schema or (schemas.ANTHROPIC_ERROR if is_anthropic else schemas.OPENAI_ERROR)
    described = {"description": "Refused or failed.", "content": {"application/json": {"schema": schema}}}
    return {str(status): described for status in sorted(statuses)}


def _body(fields: tuple[Field, ...]) -> dict[str, Any]:
    is_required = any(field.is_required for field in fields)
    return {"required": is_required, "content": {"application/json": {"schema": object_schema(fields)}}}
