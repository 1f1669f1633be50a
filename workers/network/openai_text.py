"""/v1/completions: OpenAI's text protocol, whole and streamed, for one prompt or several, as text or token ids.

Owns: what a request means and how its answer is written, `echo` included. Called by app.py's routes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.responses import Response

from ...ipc.errors import InvalidRequestError
from ...ipc.types import RequestOutput
from .choice import Choice, ChoiceDelta, ChoicePlan
from .generation import Generation, Job
from .openai_shape import DONE, shown_logprob, text_logprobs, top_by_text, unison_of, usage_of
from .replies import Problem, event
from .routing import Call, Network, answer
from .sampling import extension_of, sampling_of, stops_of
from .text import Detokenizer
from .vocabulary import Vocabulary

DEFAULT_MAX_TOKENS = 16
"""What OpenAI takes where a request is silent."""


async def create_completion(network: Network, call: Call) -> Response:
    """POST /v1/completions."""
    fields = call.fields
    model = network.check_model(fields)
    _check(fields)
    prompts = prompts_of(fields["prompt"])
    if len(prompts) > network.settings.max_prompts:
        limit = network.settings.max_prompts
        raise InvalidRequestError("prompt", f"holds {len(prompts)} prompts; one request may bring {limit}")
    extension, echo, n = extension_of(fields), fields.get("echo", False), fields.get("n", 1)
    num_top, max_tokens = fields.get("logprobs"), fields.get("max_tokens", DEFAULT_MAX_TOKENS)
    prompt_top = (num_top or 0) if echo and (num_top is not None or max_tokens == 0) else None
    jobs, texts = [], []
    for prompt in prompts:
        params = sampling_of(fields, max_tokens, num_top or 0, prompt_top)
        plan = ChoicePlan(
            network.vocabulary, params, stops_of(fields), fields.get("skip_special_tokens", True)
        )
        ids = await network.vocabulary.encode(prompt) if isinstance(prompt, str) else prompt
        jobs.append(Job(ids, params, plan, n, extension.on_update, extension.pin_version))
        texts.append("" if not echo else prompt if isinstance(prompt, str) else _decoded(network.vocabulary, ids))
    shape = TextShape(
        call_id=f"cmpl-{call.call_id}",
        model=model,
        vocabulary=network.vocabulary,
        prompt_texts=tuple(text for text in texts for _ in range(n)),
        has_logprobs=num_top is not None,
        has_detail=extension.has_detail,
        has_usage=fields.get("stream_options", {}).get("include_usage", False),
    )
    return await answer(network, call, jobs, shape)


def prompts_of(prompt: Any) -> list[str | tuple[int, ...]]:
    """The prompts of a request, each a text or token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _check(fields: Mapping[str, Any]) -> None:
    """Raise where fields contradict each other."""
    n, best_of, echo = fields.get("n", 1), fields.get("best_of"), fields.get("echo", False)
    if best_of is not None and best_of != n:
        raise InvalidRequestError("best_of", f"is {best_of}, n is {n}; they must be equal")
    if fields.get("max_tokens") == 0 and not echo:
        raise InvalidRequestError("max_tokens", "is 0; must be at least 1 without echo")
    if echo and fields.get("stream", False) and (fields.get("logprobs") is not None or fields.get("max_tokens") == 0):
        raise InvalidRequestError(
            "echo", "can't be streamed with logprobs of the prompt, which come at the end; leave out stream or echo"
        )


def _decoded(vocabulary: Vocabulary, ids: tuple[int, ...]) -> str:
    return vocabulary.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True)
class TextShape:
    """How one text answer is written."""

    call_id: str
    """Id of the answer."""
    model: str
    """Name of the served model."""
    vocabulary: Vocabulary
    """Texts of tokens."""
    prompt_texts: tuple[str, ...]
    """What `echo` puts before each choice's text; empty without it."""
    has_logprobs: bool = False
    """True where log-probs were asked for."""
    has_detail: bool = False
    """True where the `unison` field is to be long."""
    has_usage: bool = False
    """True where a stream ends with usage."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the answer, in seconds."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The text completion."""
        entries = []
        for choices, output in zip(generation.choices, generation.outputs, strict=True):
            for choice in choices:
                prompt_text = self.prompt_texts[choice.index]
                logprobs = self._logprobs(choice, output, len(prompt_text)) if self.has_logprobs else None
                entries.append(self._entry(choice, prompt_text + choice.text, logprobs, is_last=True))
        return self._head() | {"choices": entries, "usage": usage_of(generation)}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """Chunks with what comes; a choice's last one has its finish reason."""
        for choices in generation.choices:
            for choice in choices:
                if self.prompt_texts[choice.index]:
                    yield self._chunk(self._entry(choice, self.prompt_texts[choice.index], None, is_last=False))
        async for deltas in generation:
            for delta in deltas:
                if delta.parts or (self.has_logprobs and delta.tokens) or delta.choice.finish_reason:
                    yield self._chunk(self._delta_entry(delta))
        if self.has_usage:
            yield event(self._head() | {"choices": [], "usage": usage_of(generation)})
        yield DONE

    def error_event(self, problem: Problem) -> bytes:
        """An error object as data, as OpenAI's clients expect it."""
        return event(problem.openai)

    def _head(self) -> dict[str, Any]:
        return {"id": self.call_id, "object": "text_completion", "created": self.created, "model": self.model}

    def _chunk(self, entry: dict[str, Any]) -> bytes:
        return event(self._head() | {"choices": [entry]} | ({"usage": None} if self.has_usage else {}))

    def _delta_entry(self, delta: ChoiceDelta) -> dict[str, Any]:
        choice = delta.choice
        logprobs = None
        if self.has_logprobs and delta.tokens:
            logprobs = text_logprobs(self.vocabulary, delta.tokens, len(self.prompt_texts[choice.index]))
        return self._entry(choice, delta.text, logprobs, choice.finish_reason not in (None, "error"))

    def _entry(self, choice: Choice, text: str, logprobs: Any, is_last: bool) -> dict[str, Any]:
        entry = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason if is_last else None,
        }
        return entry | ({"unison": unison_of(choice, self.has_detail)} if is_last else {})

    def _logprobs(self, choice: Choice, output: RequestOutput | None, offset: int) -> dict[str, Any]:
        """Log-probs of a choice, behind those of the echoed prompt where they are known."""
        after = text_logprobs(self.vocabulary, choice.tokens, offset)
        if output is None or output.prompt_logprobs is None:
            return after
        before = self._prompt_logprobs(output)
        return {name: before[name] + after[name] for name in after}

    def _prompt_logprobs(self, output: RequestOutput) -> dict[str, list[Any]]:
        ids, values, tops = output.prompt_ids, output.prompt_logprobs or (), output.prompt_top_logprobs or ()
        detokenizer = Detokenizer(partial(self.vocabulary.decode, skip_special_tokens=False))
        offsets, offset = [], 0
        for token_id in ids:
            offsets.append(offset)
            offset += len(detokenizer.push(token_id))
        return {
            "tokens": [self.vocabulary.piece(token_id)[0] for token_id in ids],
            "token_logprobs": [None, *(shown_logprob(value) for value in values)],
            "top_logprobs": [
                None,
                *(
                    top_by_text(self.vocabulary, token_id, value, tops[at] if at < len(tops) else None)
                    for at, (token_id, value) in enumerate(zip(ids[1:], values, strict=True))
                ),
            ],
            "text_offset": offsets,
        }
