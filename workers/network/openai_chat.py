"""/v1/chat/completions: OpenAI's chat protocol, whole and streamed.

Owns: what a chat request means and how its answer is written. Called by app.py's routes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from ...ipc.errors import InvalidRequestError
from .choice import Choice, ChoiceDelta, ChoicePlan
from .generation import Generation, Job
from .messages import chat_of
from .openai_shape import DONE, chat_logprobs, unison_of, usage_of
from .replies import Problem, event
from .routing import Call, Network, answer
from .sampling import extension_of, sampling_of, stops_of
from .tool_parser import Part, ToolCall
from .vocabulary import Vocabulary


async def create_chat_completion(network: Network, call: Call) -> Response:
    """POST /v1/chat/completions."""
    fields = call.fields
    model = network.check_model(fields)
    has_logprobs, num_top = fields.get("logprobs", False), fields.get("top_logprobs", 0)
    if num_top and not has_logprobs:
        raise InvalidRequestError("top_logprobs", f"is {num_top}, but logprobs isn't true; set it")
    chat = await network.template.render(chat_of(fields))
    rest = network.backend.worker.max_len - len(chat.prompt_ids)
    max_tokens = fields.get("max_completion_tokens", fields.get("max_tokens", max(rest, 1)))
    params = sampling_of(fields, max_tokens, num_top)
    plan = ChoicePlan(
        network.vocabulary, params, stops_of(fields), fields.get("skip_special_tokens", True), chat.make_parser
    )
    extension = extension_of(fields)
    job = Job(chat.prompt_ids, params, plan, fields.get("n", 1), extension.on_update, extension.pin_version)
    shape = ChatShape(
        call_id=f"chatcmpl-{call.call_id}",
        model=model,
        vocabulary=network.vocabulary,
        has_logprobs=has_logprobs,
        has_detail=extension.has_detail,
        has_usage=fields.get("stream_options", {}).get("include_usage", False),
    )
    return await answer(network, call, [job], shape)


@dataclass(frozen=True)
class ChatShape:
    """How one chat answer is written."""

    call_id: str
    """Id of the answer."""
    model: str
    """Name of the served model."""
    vocabulary: Vocabulary
    """Texts of tokens."""
    has_logprobs: bool = False
    """True where log-probs were asked for."""
    has_detail: bool = False
    """True where the `unison` field is to be long."""
    has_usage: bool = False
    """True where a stream ends with usage."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the answer, in seconds."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The chat completion."""
        choices = [self._choice(choice) for choices in generation.choices for choice in choices]
        return self._head("chat.completion") | {"choices": choices, "usage": usage_of(generation)}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """Chunks: the role, then what comes, then a finish reason per choice."""
        for choices in generation.choices:
            for choice in choices:
                yield self._chunk(choice, {"role": "assistant", "content": ""})
        async for deltas in generation:
            for delta in deltas:
                for chunk in self._chunks(delta):
                    yield chunk
        if self.has_usage:
            yield event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage_of(generation)})
        yield DONE

    def error_event(self, problem: Problem) -> bytes:
        """An error object as data, as OpenAI's clients expect it."""
        return event(problem.openai)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.call_id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text, calls = choice.text, choice.calls
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [self._tool_call(choice, at, call) for at, call in enumerate(calls)]
        logprobs = chat_logprobs(self.vocabulary, choice.tokens) if self.has_logprobs else None
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "unison": unison_of(choice, self.has_detail),
        }

    def _tool_call(self, choice: Choice, at: int, call: ToolCall) -> dict[str, Any]:
        call_id = f"call_{self.call_id.removeprefix('chatcmpl-')}_{choice.index}_{at}"
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _chunks(self, delta: ChoiceDelta) -> list[bytes]:
        choice = delta.choice
        logprobs = None
        if self.has_logprobs and delta.tokens:
            logprobs = chat_logprobs(self.vocabulary, delta.tokens)
        parts: tuple[Part, ...] = delta.parts or (("",) if logprobs else ())
        chunks = []
        num_calls = len(choice.calls) - sum(isinstance(part, ToolCall) for part in parts)
        for part in parts:
            if isinstance(part, ToolCall):
                entry = {"index": num_calls} | self._tool_call(choice, num_calls, part)
                chunks.append(self._chunk(choice, {"tool_calls": [entry]}, logprobs))
                num_calls += 1
            else:
                chunks.append(self._chunk(choice, {"content": part}, logprobs))
            logprobs = None
        if choice.finish_reason not in (None, "error"):
            chunks.append(self._chunk(choice, {}, is_last=True))
        return chunks

    def _chunk(self, choice: Choice, delta: dict[str, Any], logprobs: Any = None, is_last: bool = False) -> bytes:
        entry = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason if is_last else None,
        }
        if is_last:
            entry["unison"] = unison_of(choice, self.has_detail)
        usage = {"usage": None} if self.has_usage else {}
        return event(self._head("chat.completion.chunk") | {"choices": [entry]} | usage)
