"""Anthropic's conversations, tools and tool choice as a `ChatPrompt`.

Owns: blocks to messages: a result becomes a message of the tool, a call one of the assistant's calls, a last message
of the assistant the beginning of the answer. Knows no template. Called by anthropic.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ipc.errors import InvalidRequestError
from .chat import ChatPrompt
from .messages import check_names, checked_choice, joined_text, tool_of

CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "named"}


def anthropic_chat(fields: Mapping[str, Any]) -> ChatPrompt:
    """The conversation of a checked request.

    Raises:
        InvalidRequestError: messages or tools contradict themselves or each other.
    """
    system = joined_text(fields.get("system", ""))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(fields["messages"]):
        messages += _messages(f"messages.{index}", message)
    tools = tuple(
        tool_of(
            {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
        )
        for tool in fields.get("tools", ())
    )
    check_names(tools)
    given = fields.get("tool_choice", {"type": "auto"})
    choice, name = CHOICES[given["type"]], given.get("name")
    if choice == "named" and name is None:
        raise InvalidRequestError("tool_choice.name", "is missing; say which tool")
    choice = checked_choice(choice, name, tools)
    is_continued = messages[-1]["role"] == "assistant"
    if is_continued and ("tool_calls" in messages[-1] or not messages[-1]["content"]):
        raise InvalidRequestError("messages", "end with an assistant's call or nothing; a text can be continued")
    if is_continued and choice in ("required", "named"):
        raise InvalidRequestError("tool_choice", "forces a call, but the answer's beginning is given already")
    return ChatPrompt(tuple(messages), tools, choice, name if choice == "named" else None, is_continued)


def _messages(where: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One message of Anthropic's, as one or several of a template's."""
    role, content = message["role"], message["content"]
    blocks = ({"type": "text", "text": content},) if isinstance(content, str) else content
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
    results = [_result(block) for block in blocks if block["type"] == "tool_result"]
    if calls and role != "assistant":
        raise InvalidRequestError(where, "holds a tool_use block, which only an assistant's message may")
    if results and role != "user":
        raise InvalidRequestError(where, "holds a tool_result block, which only a user's message may")
    said: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        said["tool_calls"] = calls
    return [*results, *([said] if texts or calls else [])]


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    text = joined_text(block.get("content", ""))
    content = f"Error: {text}" if block.get("is_error", False) else text
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
