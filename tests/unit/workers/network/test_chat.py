"""Conversations to prompts: the whole history reaches the template, with tools or without."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from harness.byte_tokenizer import CHAT_TEMPLATE, TOOL_TEMPLATE, byte_tokenizer
from unison.ipc.errors import InvalidRequestError
from unison.workers.network.anthropic_messages import anthropic_chat
from unison.workers.network.chat import ChatPrompt, ChatTemplate
from unison.workers.network.fields import CHAT, MESSAGES
from unison.workers.network.kinds import parse_object
from unison.workers.network.messages import chat_of
from unison.workers.network.tool_parser import HermesParser
from unison.workers.network.vocabulary import Vocabulary

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
HISTORY = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "text", "text": "U1"}, {"type": "text", "text": "U2"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "R1"},
    {"role": "tool", "tool_call_id": "c2", "content": "R2"},
]


def template(text: str | None, tool_format: str = "auto") -> tuple[ChatTemplate, Vocabulary]:
    tokenizer = byte_tokenizer(text)
    vocabulary = Vocabulary(tokenizer)
    return ChatTemplate(tokenizer, vocabulary, tool_format), vocabulary


def rendered(text: str | None, chat: ChatPrompt, tool_format: str = "auto") -> str:
    chat_template, vocabulary = template(text, tool_format)
    ids = asyncio.run(chat_template.render(chat)).prompt_ids
    return vocabulary.decode(ids, skip_special_tokens=False)


def openai(**fields: Any) -> ChatPrompt:
    return chat_of(parse_object(CHAT, {"messages": HISTORY} | fields))


def anthropic(**fields: Any) -> ChatPrompt:
    return anthropic_chat(parse_object(MESSAGES, {"model": "m", "max_tokens": 1} | fields))


def test_a_template_without_tools_gets_them_as_text() -> None:
    """S32: every message arrives, in order; tools, calls and results are written in Hermes format."""
    text = rendered(CHAT_TEMPLATE, openai(tools=[TOOL]))
    assert text.startswith("<|im_start|>system\nS\n\nYou can call functions.") and json.dumps(TOOL) in text
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    results = "<tool_response>\nR1\n</tool_response>\n<tool_response>\nR2\n</tool_response>"
    assert text.endswith(
        f"<|im_start|>user\nU1\nU2<|im_end|>\n<|im_start|>assistant\n{call}<|im_end|>\n"
        f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_with_tools_gets_the_messages_themselves() -> None:
    text = rendered(TOOL_TEMPLATE, openai(tools=[TOOL]))
    assert '"name": "f"' in text and "<|im_start|>tool\nR1<|im_end|>" in text and "You can call" not in text
    assert '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>' in text


def test_choice_none_leaves_tools_out() -> None:
    chat = openai(tools=[TOOL], tool_choice="none")
    assert "You can call" not in rendered(CHAT_TEMPLATE, chat)
    chat_template, _ = template(CHAT_TEMPLATE)
    assert asyncio.run(chat_template.render(chat)).make_parser is None


@pytest.mark.parametrize(
    ("choice", "tools", "tool_format", "end"),
    [
        ({"type": "function", "function": {"name": "f"}}, [TOOL], "auto", '<tool_call>\n{"name": "f", "arguments":'),
        ("required", [TOOL], "auto", '<tool_call>\n{"name": "f", "arguments":'),
        ("required", [TOOL], "llama3", '{"name": "f", "parameters":'),
        ("required", [TOOL, {"type": "function", "function": {"name": "g"}}], "auto", '<tool_call>\n{"name": "'),
    ],
)
def test_a_forced_call_has_begun_already(choice: Any, tools: list[Any], tool_format: str, end: str) -> None:
    text = rendered(CHAT_TEMPLATE, openai(tools=tools, tool_choice=choice), tool_format)
    assert text.endswith("<|im_start|>assistant\n" + end)


def test_the_format_is_read_off_the_template() -> None:
    assert template(TOOL_TEMPLATE)[0].tool_format == template(CHAT_TEMPLATE)[0].tool_format == "hermes"
    llama = TOOL_TEMPLATE.replace("<tool_call>", '{"name": function name, "parameters": {} }')
    assert template(llama)[0].tool_format == "llama3"


def test_anthropic_blocks_become_messages() -> None:
    chat = anthropic(
        system=[{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "U1\nU2"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "R1"},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "R2"}]},
            ]},
        ],
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    )  # fmt: skip
    assert rendered(CHAT_TEMPLATE, chat) == rendered(CHAT_TEMPLATE, openai(tools=[TOOL]))


def test_an_answer_that_has_begun_is_continued() -> None:
    chat = anthropic(messages=[{"role": "user", "content": "U"}, {"role": "assistant", "content": "It is"}])
    assert rendered(CHAT_TEMPLATE, chat).endswith("<|im_start|>assistant\nIt is")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[]"}}]}]},
         "messages.0.tool_calls.0.function.arguments"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        openai(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize("text", [None, "{{ raise_exception('roles must alternate') }}", "{{ messages.x.y }}"])
def test_what_the_template_refuses_is_the_callers_error(text: str | None) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        rendered(text, openai())


def test_a_forced_call_that_is_none_is_given_as_text(http: httpx.Client) -> None:
    """Where the model doesn't write the call that was asked for, the answer says so and shows the text."""
    body = {"messages": HISTORY[:2], "tools": [TOOL], "tool_choice": "required", "max_tokens": 5, "seed": 1}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] != "tool_calls" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith('<tool_call>\n{"name": "f", "arguments":')
    assert "no call" in choice["unison"]["tool_error"]


@pytest.mark.parametrize("kind", [HermesParser])
def test_without_tools_marks_are_text(http: httpx.Client, kind: type) -> None:
    body = {"messages": HISTORY[:2], "max_tokens": 3, "allowed_token_ids": [5 + ord("<")]}
    assert kind and http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "<<<"
