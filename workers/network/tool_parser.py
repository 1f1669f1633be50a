"""Tool calls out of generated text, as it comes.

Owns: two formats. Hermes (also Qwen's): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them
between other text. Llama 3: the whole answer is `{"name": …, "parameters": {…}}`, several parted by `;`, after an
optional `<|python_tag|>`. A call names a tool that was offered and has a JSON object of arguments; whatever else the
model wrote between the marks stays text. Knows no socket and no protocol. Called by choice.py.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .text import tail_overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')


@dataclass(frozen=True)
class ToolCall:
    """One call that the model asks for."""

    name: str
    """Name of an offered tool."""
    arguments: str
    """A JSON object, as text."""


Part = str | ToolCall
"""What a parser gives: text, or a call."""


class ToolParser(ABC):
    """Text in, text and calls out, in order; nothing is lost. Life: `push` per piece → `finish` once.

    A parser that was made for a forced call starts inside the call, and `is_complete` as soon as the call is whole.
    """

    def __init__(self, names: Collection[str], forced_prefix: str | None = None) -> None:
        self.names = frozenset(names)
        """Tools that may be called."""
        self.is_forced = forced_prefix is not None
        """True where the prompt ends with the beginning of a call."""
        self.is_complete = False
        """True when a forced call is whole, so that no more text is wanted."""
        self._held = forced_prefix or ""

    def push(self, piece: str) -> list[Part]:
        """Parts that are certain with this piece."""
        if self.is_complete:
            return []
        self._held += piece
        if not self.is_forced:
            return self._advance()
        if "}" in piece and (call := self._forced_call()) is not None:
            self._held, self.is_complete = "", True
            return [call]
        return []

    def finish(self) -> list[Part]:
        """What was held back, when no more text comes."""
        if not self.is_forced or self.is_complete:
            return self._end()
        held, self._held = self._held, ""
        return [held] if held else []

    @abstractmethod
    def _advance(self) -> list[Part]:
        """Take what is certain out of `_held`."""

    @abstractmethod
    def _end(self) -> list[Part]:
        """Take the rest out of `_held`."""

    def _forced_call(self) -> ToolCall | None:
        """The call whose arguments are whole, whatever comes behind them."""
        head = _HEAD.match(self._held.removeprefix(OPEN))
        if head is None:
            return None
        try:
            arguments, _ = _DECODER.raw_decode(head.string, head.end())
        except (ValueError, RecursionError):
            return None
        return as_call({"name": head["name"], "arguments": arguments}, self.names)


class HermesParser(ToolParser):
    """Calls between tags, text around them. White space beside a call belongs to neither."""

    def __init__(self, names: Collection[str], forced_prefix: str | None = None) -> None:
        super().__init__(names, forced_prefix)
        self._is_after_call = False

    def _advance(self) -> list[Part]:
        parts: list[Part] = []
        while True:
            if not self._held.startswith(OPEN):
                text, is_open = self._take_text()
                parts += [text] if text else []
                if not is_open:
                    return parts
            part = self._take_call()
            if part is None:
                return parts
            parts.append(part)

    def _take_text(self) -> tuple[str, bool]:
        """Text before the next opening tag, and whether there is one now."""
        if self._is_after_call:
            self._held = self._held.lstrip()
            self._is_after_call = not self._held
        at = self._held.find(OPEN)
        certain = at if at >= 0 else len(self._held) - tail_overlap(self._held, OPEN)
        # White space before a tag is held back, since it goes if a call follows.
        certain = len(self._held[:certain].rstrip())
        text, self._held = self._held[:certain], self._held[certain:]
        if at < 0:
            return text, False
        self._gap = self._held[: at - certain]
        self._held = self._held[at - certain :]
        return text, True

    def _take_call(self) -> Part | None:
        """The call or, where it isn't one, the text up to its closing tag; None while it isn't closed."""
        at = self._held.find(CLOSE)
        while at >= 0:
            body, end = self._held[len(OPEN) : at], at + len(CLOSE)
            call = parse_call(body, self.names)
            if call is not None or not _is_inside_string(body):
                text, self._held = self._held[:end], self._held[end:]
                gap, self._gap = getattr(self, "_gap", ""), ""
                self._is_after_call = call is not None
                return call or gap + text
            at = self._held.find(CLOSE, end)
        return None

    def _end(self) -> list[Part]:
        held, self._held = self._held, ""
        if not held.startswith(OPEN):
            return [held] if held and not (self._is_after_call and not held.strip()) else []
        call = parse_call(held[len(OPEN) :], self.names)
        return [call or getattr(self, "_gap", "") + held]


class LlamaParser(ToolParser):
    """The whole answer is calls, or the whole answer is text."""

    def __init__(self, names: Collection[str], forced_prefix: str | None = None) -> None:
        super().__init__(names, forced_prefix)
        self._is_text = False

    def _advance(self) -> list[Part]:
        start = self._held.lstrip()
        may_be_call = start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start)
        if may_be_call and not self._is_text:
            return []
        self._is_text = True
        text, self._held = self._held, ""
        return [text] if text else []

    def _end(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._is_text or not held:
            return [held] if held else []
        calls: list[Part] = []
        rest = held.strip().removeprefix(PYTHON_TAG).lstrip()
        while rest:
            try:
                value, end = _DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                return [held]
            call = as_call(value, self.names)
            if call is None:
                return [held]
            calls.append(call)
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
        return calls or [held]


def parse_call(body: str, names: Collection[str]) -> ToolCall | None:
    """The call in a JSON text, or None where it isn't one."""
    try:
        return as_call(_DECODER.decode(body.strip()), names)
    except (ValueError, RecursionError):
        return None


def as_call(value: Any, names: Collection[str]) -> ToolCall | None:
    """The call that a JSON value says, or None: an offered name, and an object of arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _is_inside_string(body: str) -> bool:
    """True where a JSON text ends inside a string, so that a tag there is part of the string."""
    return len(re.findall(r'(?<!\\)(?:\\\\)*"', body)) % 2 == 1


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
