"""Tool calls out of text: any split gives the same, nothing is lost, and arguments are always JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unison.workers.network.choice import joined_parts
from unison.workers.network.tool_parser import HermesParser, LlamaParser, Part, ToolCall, ToolParser

NAMES = ("get_weather", "f")
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
UNCHANGED: list[Part] = []
"""The text itself."""
F1 = ToolCall("f", '{"x": 1}')


def parse(parser: ToolParser, text: str, sizes: Sequence[int] = ()) -> list[Part]:
    parts, at = [], 0
    for size in [*sizes, len(text)]:
        parts += parser.push(text[at : at + size])
        at += size
    return joined_parts([*parts, *parser.finish()])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plain text", ["plain text"]),
        (CALL, [F1]),
        (f"I'll ask.\n{CALL}\n{CALL}", ["I'll ask.", F1, F1]),
        (f"{CALL} and then", [F1, "and then"]),
        (CALL.removesuffix("</tool_call>"), [F1]),
        ('<tool_call>{"name": "f", "arguments": {"x": ', ['<tool_call>{"name": "f", "arguments": {"x": ']),
        ("<tool_call>oops</tool_call> b", UNCHANGED),
        ("a\n<tool_call>oops</tool_call>", UNCHANGED),
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', UNCHANGED),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', UNCHANGED),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', UNCHANGED),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [F1]),
        ('<tool_call>{"name": "f"}</tool_call>', [ToolCall("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
         [ToolCall("f", '{"x": "</tool_call>"}')]),
        ("a < b <tool", ["a < b <tool"]),
        ("ends with space \n", ["ends with space \n"]),
    ],
)  # fmt: skip
def test_hermes(text: str, parts: list[Part]) -> None:
    parts = parts or [text]
    assert parse(HermesParser(NAMES), text) == parts
    assert parse(HermesParser(NAMES), text, [1] * len(text)) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plain {text}", ["plain {text}"]),
        ('{"name": "f", "parameters": {"x": 1}}', [F1]),
        ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', [F1]),
        ('{"name": "f", "parameters": {"x": 1}}; {"name": "f", "arguments": {"x": 1}}', [F1, F1]),
        ('{"answer": 4}', ['{"answer": 4}']),
        ('{"name": "f", "parameters": {"x"', ['{"name": "f", "parameters": {"x"']),
        ("  ", ["  "]),
    ],
)
def test_llama(text: str, parts: list[Part]) -> None:
    assert parse(LlamaParser(NAMES), text) == parts
    assert parse(LlamaParser(NAMES), text, [1] * len(text)) == parts


FRAGMENTS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x": 1}}', "{", '"', "\n", " ", "text", "<"]
    ),
    max_size=9,
).map("".join)  # fmt: skip


@given(FRAGMENTS, st.lists(st.integers(0, 9), max_size=20), st.sampled_from([HermesParser, LlamaParser]))
def test_any_split_gives_the_same(text: str, sizes: list[int], kind: type[ToolParser]) -> None:
    """Arguments are JSON objects whatever the text was, and text without calls comes out unchanged."""
    parts = parse(kind(NAMES), text)
    assert parse(kind(NAMES), text, sizes) == parts
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    if not calls:
        assert "".join(map(str, parts)) == text


@pytest.mark.parametrize(
    ("prefix", "text", "parts"),
    [
        ('<tool_call>\n{"name": "f", "arguments":', ' {"x": 1}, and so on', [F1]),
        ('<tool_call>\n{"name": "', 'f", "arguments": {"x": 1}}', [F1]),
        ('<tool_call>\n{"name": "', 'g", "arguments": {}}', ['<tool_call>\n{"name": "g", "arguments": {}}']),
        ('{"name": "f", "parameters":', ' {"x": 1}', [F1]),
        ('{"name": "f", "parameters":', " no", ['{"name": "f", "parameters": no']),
    ],
)
def test_a_forced_call_is_complete_with_its_arguments(prefix: str, text: str, parts: list[Part]) -> None:
    for kind in (HermesParser, LlamaParser):
        parser = kind(NAMES, prefix)
        assert parse(parser, text, [1] * len(text)) == parts
        assert parser.is_complete == isinstance(parts[0], ToolCall)
