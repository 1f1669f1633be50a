"""Chat: a conversation and its tools as the token ids of a prompt.

Owns: the chat template, whether it knows tools, and how tools, calls and results are written where it doesn't. The
whole history reaches the template. A rendered chat is encoded without further special tokens (P22). Knows no endpoint:
OpenAI's and Anthropic's conversations come in as the same `ChatPrompt`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...ipc.errors import InvalidRequestError
from .tool_parser import CLOSE, OPEN, HermesParser, LlamaParser, ToolParser
from .vocabulary import Vocabulary

HERMES_INTRODUCTION = """You can call functions. Their signatures are between the tags <tools></tools>:
<tools>
{tools}
</tools>
For each call, write a JSON object with the function's name and its arguments between the tags {open}{close}:
{open}
{{"name": <function name>, "arguments": <object of arguments>}}
{close}"""

PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3": LlamaParser}
ARGUMENTS_KEY = {"hermes": "arguments", "llama3": "parameters"}


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the template takes it."""

    messages: tuple[dict[str, Any], ...]
    """Messages with text content; calls have their arguments as objects."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools as OpenAI describes them."""
    choice: str = "auto"
    """`auto`, `none`, `required`, or `named`."""
    name: str | None = None
    """The tool to call, with `named`."""
    is_continued: bool = False
    """True where the last message is the beginning of the answer."""

    @property
    def offered(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model is told of."""
        return () if self.choice == "none" else self.tools


@dataclass(frozen=True)
class RenderedChat:
    """A prompt, and how to read what comes after it."""

    prompt_ids: tuple[int, ...]
    """Token ids."""
    make_parser: Callable[[], ToolParser] | None
    """Makes a parser for the answer's tool calls; None without tools."""


class ChatTemplate:
    """One model's chat template, for as long as the server runs."""

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, tool_format: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self.is_there = bool(getattr(tokenizer, "chat_template", None))
        """False for models without a chat template."""
        self.knows_tools = self.is_there and self._mentions_tools()
        """True where the template itself renders tools."""
        self.tool_format = tool_format if tool_format != "auto" else self._guess_format()
        """How calls are written."""

    async def render(self, chat: ChatPrompt) -> RenderedChat:
        """Token ids of the prompt, and the parser for the answer.

        Raises:
            InvalidRequestError: there is no template, or it refuses this conversation.
        """
        names = [tool["function"]["name"] for tool in chat.offered]
        prefix = self._forced_prefix(chat, names)
        text = self._text(chat) + (prefix or "")
        prompt_ids = await self._vocabulary.encode(text, is_rendered=True)
        if not names:
            return RenderedChat(prompt_ids, None)
        parser = PARSERS[self.tool_format]
        return RenderedChat(prompt_ids, lambda: parser(names, prefix))

    def _text(self, chat: ChatPrompt) -> str:
        if not self.is_there:
            raise InvalidRequestError("messages", "the served model has no chat template; use /v1/completions")
        messages: Sequence[Mapping[str, Any]] = chat.messages
        tools: list[dict[str, Any]] | None = list(chat.offered) or None
        if not self.knows_tools:
            messages, tools = in_plain_messages(messages, chat.offered), None
        try:
            text = self._apply(messages, tools, chat.is_continued)
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            raise InvalidRequestError("messages", f"the model's chat template refuses them: {error}") from error
        return text

    def _apply(self, messages: Sequence[Mapping[str, Any]], tools: Any, is_continued: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=not is_continued,
                continue_final_message=is_continued,
            )
        )

    def _forced_prefix(self, chat: ChatPrompt, names: Sequence[str]) -> str | None:
        """The beginning of a call, put behind the prompt so that the model can't but go on with it."""
        if chat.choice not in ("required", "named"):
            return None
        start = f"{OPEN}\n" if self.tool_format == "hermes" else ""
        name = chat.name if chat.choice == "named" else names[0] if len(names) == 1 else None
        if name is None:
            return f'{start}{{"name": "'
        # No space at the end: tokens of JSON begin with it.
        return f'{start}{{"name": {json.dumps(name)}, "{ARGUMENTS_KEY[self.tool_format]}":'

    def _mentions_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": "probe_of_tools", "description": "", "parameters": {}}}
        try:
            return "probe_of_tools" in self._apply([{"role": "user", "content": "x"}], [tool])
        except Exception:  # a template is a program of the model's author: it may raise anything
            return False

    def _guess_format(self) -> str:
        template = str(getattr(self._tokenizer, "chat_template", "") or "")
        is_llama = self.knows_tools and OPEN not in template and '"parameters"' in template
        return "llama3" if is_llama else "hermes"


def in_plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The same conversation for a template that knows no tools: they stand in the texts, in Hermes format."""
    plain: list[dict[str, Any]] = []
    is_results = False
    for message in messages:
        content = str(message.get("content") or "")
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if is_results:
                plain[-1]["content"] += "\n" + content
                continue
            plain.append({"role": "user", "content": content})
        else:
            calls = [written_call(call) for call in message.get("tool_calls", ())]
            content = "\n".join([*([content] if content else []), *calls])
            plain.append({"role": message["role"], "content": content})
        is_results = message["role"] == "tool"
    if not tools:
        return plain
    introduction = HERMES_INTRODUCTION.format(
        tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools), open=OPEN, close=CLOSE
    )
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{introduction}"}, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def written_call(call: Mapping[str, Any]) -> str:
    """A call as the model would have written it."""
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"{OPEN}\n{json.dumps(function, ensure_ascii=False)}\n{CLOSE}"
