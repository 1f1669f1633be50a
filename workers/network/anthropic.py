"""/v1/messages and /v1/messages/count_tokens: Anthropic's protocol, whole and streamed.

Owns: what a request means and how its answer is written. Called by app.py's routes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from .anthropic_messages import anthropic_chat
from .choice import Choice, ChoicePlan, joined_parts
from .generation import Generation, Job
from .openai_shape import num_cached_tokens, num_completion_tokens, num_prompt_tokens, unison_of
from .replies import Problem, event
from .routing import Call, Network, answer
from .sampling import extension_of, sampling_of, stops_of
from .tool_parser import Part, ToolCall

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "abort"}


async def create_message(network: Network, call: Call) -> Response:
    """POST /v1/messages."""
    fields = call.fields
    model = network.check_model(fields)
    chat = await network.template.render(anthropic_chat(fields))
    params = sampling_of(fields, fields["max_tokens"])
    stops = stops_of(fields, "stop_sequences")
    plan = ChoicePlan(
        network.vocabulary, params, stops, fields.get("skip_special_tokens", True), chat.make_parser
    )
    extension = extension_of(fields)
    job = Job(chat.prompt_ids, params, plan, 1, extension.on_update, extension.pin_version)
    return await answer(network, call, [job], MessageShape(f"msg_{call.call_id}", model, extension.has_detail))


async def count_tokens(network: Network, call: Call) -> Response:
    """POST /v1/messages/count_tokens."""
    network.check_model(call.fields)
    chat = await network.template.render(anthropic_chat(call.fields))
    return JSONResponse({"input_tokens": len(chat.prompt_ids)})


@dataclass(frozen=True)
class MessageShape:
    """How one message is written."""

    call_id: str
    """Id of the message."""
    model: str
    """Name of the served model."""
    has_detail: bool = False
    """True where the `unison` field is to be long."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The message."""
        choice = generation.choices[0][0]
        content, num_calls = [], 0
        for part in joined_parts(choice.parts):
            content.append(self._block(part, num_calls))
            num_calls += isinstance(part, ToolCall)
        end = {"content": content, "stop_reason": stop_reason(choice), "stop_sequence": choice.matched_stop}
        return self._head() | end | {"usage": usage_of(generation), "unison": unison_of(choice, self.has_detail)}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """message_start, the blocks, message_delta, message_stop."""
        blocks = _Blocks(self)
        usage = {"input_tokens": num_prompt_tokens(generation), "output_tokens": 0}
        start = self._head() | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield event({"type": "message_start", "message": start}, "message_start")
        async for deltas in generation:
            for delta in deltas:
                for part in delta.parts:
                    for chunk in blocks.push(part):
                        yield chunk
        for chunk in blocks.close():
            yield chunk
        choice = generation.choices[0][0]
        end = {"stop_reason": stop_reason(choice), "stop_sequence": choice.matched_stop}
        unison = unison_of(choice, self.has_detail)
        yield event(
            {"type": "message_delta", "delta": end, "usage": usage_of(generation), "unison": unison}, "message_delta"
        )
        yield event({"type": "message_stop"}, "message_stop")

    def error_event(self, problem: Problem) -> bytes:
        """An error event."""
        return event(problem.anthropic, "error")

    def _head(self) -> dict[str, Any]:
        return {"id": self.call_id, "type": "message", "role": "assistant", "model": self.model}

    def _block(self, part: Part, num_calls: int) -> dict[str, Any]:
        if isinstance(part, ToolCall):
            return self.tool_use(part, num_calls) | {"input": json.loads(part.arguments)}
        return {"type": "text", "text": part}

    def tool_use(self, call: ToolCall, at: int) -> dict[str, Any]:
        """A tool_use block without its input."""
        return {"type": "tool_use", "id": f"toolu_{self.call_id.removeprefix('msg_')}_{at}", "name": call.name}


class _Blocks:
    """Content blocks of a stream: one open at most."""

    def __init__(self, shape: MessageShape) -> None:
        self._shape = shape
        self._index = 0
        self._num_calls = 0
        self._is_open = False

    def push(self, part: Part) -> list[bytes]:
        """Events for a part: text goes on in the open block, a call is a block of its own."""
        if isinstance(part, str):
            opening = [] if self._is_open else [self._start({"type": "text", "text": ""})]
            self._is_open = True
            return [*opening, self._delta({"type": "text_delta", "text": part})]
        closing = self.close()
        block = self._shape.tool_use(part, self._num_calls) | {"input": {}}
        self._num_calls += 1
        self._is_open = True
        delta = {"type": "input_json_delta", "partial_json": part.arguments}
        return [*closing, self._start(block), self._delta(delta), *self.close()]

    def close(self) -> list[bytes]:
        """The end of the open block."""
        if not self._is_open:
            return []
        ended = event({"type": "content_block_stop", "index": self._index}, "content_block_stop")
        self._index += 1
        self._is_open = False
        return [ended]

    def _start(self, block: dict[str, Any]) -> bytes:
        data = {"type": "content_block_start", "index": self._index, "content_block": block}
        return event(data, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta")


def stop_reason(choice: Choice) -> str:
    """Anthropic's word for why a choice ended."""
    return "stop_sequence" if choice.matched_stop is not None else STOP_REASONS[choice.finish_reason or "stop"]


def usage_of(generation: Generation) -> dict[str, Any]:
    """Anthropic's usage object: input tokens are those that weren't cached."""
    cached = num_cached_tokens(generation)
    return {
        "input_tokens": num_prompt_tokens(generation) - (cached or 0),
        "cache_read_input_tokens": cached or 0,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_completion_tokens(generation),
    }
