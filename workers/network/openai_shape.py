"""What OpenAI's two generating endpoints have in common: ids, usage, log-probs, and the `unison` field.

Owns: the pieces of JSON. Knows no HTTP. Called by openai_chat.py and openai_text.py; /v1/models lives here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from starlette.responses import JSONResponse, Response

from ...ipc.types import TopLogprobs
from .choice import Choice, TokenRecord
from .generation import Generation
from .replies import RefusedError
from .routing import Call, Network
from .vocabulary import Vocabulary

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks. Source: OpenAI API."""

DONE = b"data: [DONE]\n\n"


def num_prompt_tokens(generation: Generation) -> int:
    """Tokens of every prompt, each counted once."""
    return sum(len(job.prompt_ids) for job in generation.jobs)


def num_completion_tokens(generation: Generation) -> int:
    """Tokens that were used; those that the engine made behind a stop string aren't."""
    return sum(len(choice.tokens) for choices in generation.choices for choice in choices)


def num_cached_tokens(generation: Generation) -> int | None:
    """Prompt tokens whose KV was there already; None where a stop string cut the engine's account off."""
    outputs = [output for output in generation.outputs if output is not None]
    return sum(output.num_cached_tokens for output in outputs) if len(outputs) == len(generation.outputs) else None


def usage_of(generation: Generation) -> dict[str, Any]:
    """OpenAI's usage object."""
    prompt, completion = num_prompt_tokens(generation), num_completion_tokens(generation)
    cached = num_cached_tokens(generation)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


def unison_of(choice: Choice, has_detail: bool) -> dict[str, Any]:
    """The `unison` field of an ended choice."""
    said: dict[str, Any] = {
        "versions": [[span.version, span.first, span.end] for span in choice.spans],
        "seed": choice.seed,
    }
    if choice.failed_to_call:
        said["tool_error"] = "the model's text is no call of a tool that was asked for; it is given as content"
    if has_detail:
        said["sample_index"] = choice.sample_index
        said["token_ids"] = [token.token_id for token in choice.tokens]
        said["logprobs"] = [token.logprob for token in choice.tokens]
        said["raw_logprobs"] = [token.raw_logprob for token in choice.tokens]
        said["log_support_mass"] = [token.log_support_mass for token in choice.tokens]
    return said


def shown_logprob(value: float) -> float:
    """A log-prob that JSON can hold."""
    return value if math.isfinite(value) else LOWEST_LOGPROB


def chat_logprobs(vocabulary: Vocabulary, tokens: Iterable[TokenRecord]) -> dict[str, Any]:
    """Log-probs of a chat message; the stop token has no text, so it isn't among them."""
    content = []
    for token in tokens:
        if not token.is_stop:
            entry = _chat_entry(vocabulary, token.token_id, token.raw_logprob)
            top = [_chat_entry(vocabulary, *pair) for pair in pairs(token.top)]
            content.append(entry | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_entry(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = vocabulary.piece(token_id)
    return {"token": text, "logprob": shown_logprob(logprob), "bytes": list(raw)}


def text_logprobs(vocabulary: Vocabulary, tokens: Sequence[TokenRecord], offset: int = 0) -> dict[str, Any]:
    """Log-probs of a text completion, whose text begins at `offset`."""
    shown = [token for token in tokens if not token.is_stop]
    return {
        "tokens": [vocabulary.piece(token.token_id)[0] for token in shown],
        "token_logprobs": [shown_logprob(token.raw_logprob) for token in shown],
        "top_logprobs": [top_by_text(vocabulary, token.token_id, token.raw_logprob, token.top) for token in shown],
        "text_offset": [offset + token.text_offset for token in shown],
    }


def top_by_text(vocabulary: Vocabulary, token_id: int, logprob: float, top: TopLogprobs | None) -> dict[str, float]:
    """Alternatives by text, with the token itself. Tokens of one text are one entry, of the most probable."""
    by_text: dict[str, float] = {}
    for other_id, value in [*pairs(top), (token_id, logprob)]:
        by_text.setdefault(vocabulary.piece(other_id)[0], shown_logprob(value))
    return by_text


def pairs(top: TopLogprobs | None) -> list[tuple[int, float]]:
    """(token id, log-prob) of the alternatives."""
    return list(zip(top.token_ids, top.logprobs, strict=True)) if top else []


def model_entry(network: Network) -> dict[str, Any]:
    """The served model, with the fields of both providers."""
    name = network.model_name
    return {
        "id": name, "object": "model", "created": 0, "owned_by": "unison",
        "type": "model", "display_name": name, "created_at": datetime.fromtimestamp(0, timezone.utc).isoformat(),
    }  # fmt: skip


async def list_models(network: Network, _call: Call) -> Response:
    """GET /v1/models."""
    entry = model_entry(network)
    return JSONResponse(
        {"object": "list", "data": [entry], "has_more": False, "first_id": entry["id"], "last_id": entry["id"]}
    )


async def get_model(network: Network, call: Call) -> Response:
    """GET /v1/models/{id}."""
    asked = call.request.path_params["model"]
    if asked != network.model_name:
        raise RefusedError(404, "model_not_found", f"the model {asked!r} isn't served here", "model")
    return JSONResponse(model_entry(network))
