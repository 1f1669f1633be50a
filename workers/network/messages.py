"""Messages: OpenAI's conversations, tools and tool choice as a `ChatPrompt`.

Owns: parts joined to text, arguments read from JSON, and what tools and tool choice must have in common. Knows no
template. Called by openai_chat.py and tokens.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...ipc.errors import InvalidRequestError
from .chat import ChatPrompt


def chat_of(fields: Mapping[str, Any]) -> ChatPrompt:
    """The conversation of a checked request.

    Raises:
        InvalidRequestError: messages or tools contradict themselves or each other.
    """
    messages = tuple(_message(index, message) for index, message in enumerate(fields["messages"]))
    tools = tuple(tool_of(tool["function"]) for tool in fields.get("tools", ()))
    check_names(tools)
    choice = fields.get("tool_choice", "auto")
    if isinstance(choice, str):
        return ChatPrompt(messages, tools, checked_choice(choice, None, tools))
    name = choice["function"]["name"]
    return ChatPrompt(messages, tools, checked_choice("named", name, tools), name)


def tool_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with everything that templates look for."""
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description", ""),
            "parameters": function.get("parameters", {"type": "object", "properties": {}}),
        },
    }


def check_names(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless every tool has a name of its own."""
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError("tools", f"holds two tools of the name {name!r}; a call couldn't say which")


def checked_choice(choice: str, name: str | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """The choice, if the tools allow it."""
    names = [tool["function"]["name"] for tool in tools]
    if choice in ("required", "named") and not tools:
        raise InvalidRequestError("tool_choice", "asks for a call, but there are no tools")
    if choice == "named" and name not in names:
        raise InvalidRequestError("tool_choice", f"names {name!r}; the tools are {', '.join(names)}")
    return choice


def joined_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a message; several parts are parted by line ends."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages.{index}"
    role = "system" if message["role"] == "developer" else message["role"]
    calls = message.get("tool_calls", ())
    if "content" not in message and not calls:
        raise InvalidRequestError(f"{where}.content", "is missing; only an assistant that calls tools may say nothing")
    read: dict[str, Any] = {"role": role, "content": joined_text(message.get("content", ""))}
    read |= {name: message[name] for name in ("name", "tool_call_id") if name in message}
    if calls:
        read["tool_calls"] = [_call(f"{where}.tool_calls.{at}", call) for at, call in enumerate(calls)]
    return read


def _call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{where}.function.arguments", "must be the text of a JSON object")
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}
