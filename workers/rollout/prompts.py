"""Prompts: what a task asks, and the token ids that the model is given for it.

Owns: the type, the mapping of instruction/input/output to turns, and rendering. Text is rendered and tokenized once,
here; a rendered chat carries its special tokens already, so none is added to it (P22). Called by tasks and by the
rollout generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...ipc.errors import InvalidRequestError

Message = dict[str, Any]
"""`{"role": …, "content": …}`."""

ROLES = (("instruction", "system"), ("input", "user"), ("output", "assistant"))
"""Column of an instruction dataset → role of the turn that it becomes (S30)."""


@dataclass(frozen=True)
class Prompt:
    """One question of a task: a conversation or a plain text."""

    prompt_id: str
    """Unique in its task, in both splits together."""
    messages: tuple[Message, ...] = ()
    """Turns of the conversation; empty for a plain text."""
    text: str = ""
    """The plain text, given to the model as it is; empty for a conversation."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What the reward functions need to know besides: passed to them by name."""

    @property
    def is_chat(self) -> bool:
        """True for a conversation."""
        return bool(self.messages)


def messages_of(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The turns of a row with `instruction`, `input` and `output`: system, user and assistant, each a turn of its own,
    empty ones left out (S30)."""
    return tuple({"role": role, "content": str(row[name])} for name, role in ROLES if str(row.get(name) or "").strip())


def messages_of_columns(
    instructions: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]
) -> list[tuple[Message, ...]]:
    """The same for parallel lists, as a collate function delivers them; in their order (S31).

    Raises:
        ValueError: the lists differ in length.
    """
    rows = zip(instructions, inputs, outputs, strict=True)
    return [messages_of(dict(zip(("instruction", "input", "output"), row, strict=True))) for row in rows]


class PromptRenderer:
    """Prompts to token ids with one Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, system_prompt: str = "") -> None:
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
            InvalidRequestError: a conversation for a model without a chat template, one that the template refuses, or
                a prompt of no tokens.
        """
        ids = self._chat(prompt) if prompt.is_chat else self._text(prompt.text)
        if not ids:
            raise InvalidRequestError("prompt", f"{prompt.prompt_id!r} has no tokens")
        bos = getattr(self._tokenizer, "bos_token_id", None)
        if bos is not None and len(ids) > 1 and ids[0] == bos == ids[1]:
            raise InvalidRequestError("prompt", f"{prompt.prompt_id!r} begins with two BOS tokens")
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _text(self, text: str) -> list[int]:
        """A text that begins with the BOS token itself gets no second one."""
        has_bos = bool(self._tokenizer.bos_token) and text.startswith(str(self._tokenizer.bos_token))
        ids: list[int] = self._tokenizer(text, add_special_tokens=not has_bos)["input_ids"]
        return ids

    def _chat(self, prompt: Prompt) -> list[int]:
        if not self._has_template:
            raise InvalidRequestError("messages", "the model has no chat template; give the task's prompts as text")
        messages = [dict(message) for message in prompt.messages]
        if self._system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        is_continued = messages[-1].get("role") == "assistant"
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not is_continued, continue_final_message=is_continued
            )
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            raise InvalidRequestError("messages", f"the chat template refuses {prompt.prompt_id!r}: {error}") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
