"""/tokenize and /detokenize: text to token ids and back, as the generating endpoints do it.

Called by app.py's routes.
"""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from ...ipc.errors import InvalidRequestError
from .messages import chat_of
from .routing import Call, Network


async def tokenize(network: Network, call: Call) -> Response:
    """POST /tokenize."""
    fields = call.fields
    network.check_model(fields)
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequestError("prompt", "and messages exclude each other, and one of them must be there")
    if "messages" in fields:
        ids = (await network.template.render(chat_of(fields))).prompt_ids
    else:
        is_bare = not fields.get("add_special_tokens", True)
        ids = await network.vocabulary.encode(fields["prompt"], is_rendered=is_bare)
    return JSONResponse({"tokens": list(ids), "count": len(ids), "max_model_len": network.backend.worker.max_len})


async def detokenize(network: Network, call: Call) -> Response:
    """POST /detokenize."""
    network.check_model(call.fields)
    ids, limit = call.fields["tokens"], network.backend.worker.vocab_size
    if ids and max(ids) >= limit:
        raise InvalidRequestError("tokens", f"holds {max(ids)}; the vocabulary has the ids 0 … {limit - 1}")
    text = network.vocabulary.decode(ids, skip_special_tokens=call.fields.get("skip_special_tokens", False))
    return JSONResponse({"prompt": text})
