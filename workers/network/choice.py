"""Choice: one completion on its way from tokens to text, tool calls and a finish reason.

Owns: the chain detokenizer → stop strings → tool parser, the tokens that were used, and their version spans. Knows no
socket and no protocol; whole answers are the streamed ones put together, so the two can't differ. Called by
generation.py; the protocols read `ChoiceDelta` and `Choice`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from ...ipc.types import FinishReason, SamplingParams, TokenDelta, TopLogprobs, VersionSpan
from .text import Detokenizer, StopMatcher
from .tool_parser import Part, ToolCall, ToolParser
from .vocabulary import Vocabulary

FINISH_WORDS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.ERROR: "error",
}


@dataclass(frozen=True)
class TokenRecord:
    """One generated token with what is known of it."""

    token_id: int
    """The token."""
    logprob: float
    """Log-prob under the distribution that it was drawn from."""
    raw_logprob: float
    """Log-prob under the full softmax of the model's logits."""
    log_support_mass: float
    """Log of the mass that the filters left."""
    top: TopLogprobs | None
    """Alternatives, where asked for."""
    text_offset: int
    """Characters of the completion's text before this token."""
    is_stop: bool
    """True for the stop token that ended the completion; it has no text."""


@dataclass(frozen=True)
class ChoiceDelta:
    """What one step added to one choice."""

    choice: Choice
    """The choice, as it is after the step."""
    parts: tuple[Part, ...]
    """Text and tool calls, in order."""
    tokens: tuple[TokenRecord, ...]
    """New tokens; their text may come later, or not at all behind a stop string."""

    @property
    def text(self) -> str:
        """Text alone."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True)
class ChoicePlan:
    """How the choices of one request become text."""

    vocabulary: Vocabulary
    """Decodes."""
    params: SamplingParams
    """What the engine was asked for."""
    stops: tuple[str, ...] = ()
    """Stop strings; looked for from the `min_tokens`-th token on."""
    skip_special_tokens: bool = True
    """True where special tokens give no text."""
    make_parser: Callable[[], ToolParser] | None = None
    """Makes a parser for tool calls, where tools are offered."""


class Choice:
    """One completion. Life: `push` per delta of its index, until `finish_reason` is set; later deltas change
    nothing."""

    def __init__(self, index: int, sample_index: int, plan: ChoicePlan) -> None:
        self.index = index
        """Its index in the HTTP answer."""
        self.sample_index = sample_index
        """Its index among the completions of its prompt: with the seed it repeats the completion (R3)."""
        self.seed = plan.params.seed
        """Seed of its prompt's request."""
        self.finish_reason: str | None = None
        """stop, length, tool_calls, abort or error, once it has ended."""
        self.tokens: list[TokenRecord] = []
        """Every token that was used, the stop token included."""
        self.parts: list[Part] = []
        """Text and calls so far."""
        self.spans: list[VersionSpan] = []
        """Which version made which token."""
        self._plan = plan
        self._matcher = StopMatcher(plan.stops)
        self._parser = plan.make_parser() if plan.make_parser else None
        self._detokenizer = Detokenizer(
            partial(plan.vocabulary.decode, skip_special_tokens=plan.skip_special_tokens)
        )
        self._num_chars = 0

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCall]:
        """All tool calls so far."""
        return [part for part in self.parts if isinstance(part, ToolCall)]

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended it."""
        return self._matcher.matched

    @property
    def failed_to_call(self) -> bool:
        """True where a call was forced, and what the model wrote isn't one."""
        return self._parser is not None and self._parser.is_forced and not self.calls

    def push(self, delta: TokenDelta) -> ChoiceDelta | None:
        """Take a delta of this choice; None once it has ended."""
        if self.finish_reason is not None:
            return None
        first, parts = len(self.tokens), []
        for at in range(len(delta.token_ids)):
            is_stop = delta.finish_reason is FinishReason.STOP and at == len(delta.token_ids) - 1
            piece = self._take(delta, at, is_stop)
            parts += self._parse(self._search(piece))
            if self._is_cut:
                break
        if self._is_cut or delta.finish_reason is not None:
            parts += self._finish()
            self.finish_reason = self._reason(delta.finish_reason or FinishReason.STOP, parts)
        joined = joined_parts(parts)
        self.parts += joined
        return ChoiceDelta(self, tuple(joined), tuple(self.tokens[first:]))

    @property
    def _is_cut(self) -> bool:
        return self._matcher.matched is not None or (self._parser is not None and self._parser.is_complete)

    def _take(self, delta: TokenDelta, at: int, is_stop: bool) -> str:
        token, top = delta.token_ids[at], delta.top_logprobs[at] if delta.top_logprobs else None
        self.tokens.append(
            TokenRecord(
                token, delta.logprobs[at], delta.raw_logprobs[at], delta.log_support_mass[at], top, self._num_chars,
                is_stop,
            )
        )  # fmt: skip
        position = delta.first + at
        version = next(span.version for span in delta.versions if span.first <= position < span.end)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].first, position + 1)
        else:
            self.spans.append(VersionSpan(version, position, position + 1))
        plan = self._plan
        if is_stop or (plan.skip_special_tokens and token in plan.vocabulary.special_ids):
            return ""
        piece = self._detokenizer.push(token)
        self._num_chars += len(piece)
        return piece

    def _search(self, piece: str) -> str:
        return self._matcher.push(piece) if len(self.tokens) >= self._plan.params.min_tokens else piece

    def _parse(self, text: str) -> list[Part]:
        if self._parser is None:
            return [text] if text else []
        return self._parser.push(text) if text else []

    def _reason(self, reason: FinishReason, parts: Sequence[Part]) -> str:
        word = "stop" if self._is_cut else FINISH_WORDS[reason]
        has_calls = any(isinstance(part, ToolCall) for part in (*self.parts, *parts))
        return "tool_calls" if word == "stop" and has_calls else word

    def _finish(self) -> list[Part]:
        parts: list[Part] = []
        if not self._is_cut:
            parts += self._parse(self._search(self._detokenizer.flush()))
            parts += self._parse(self._matcher.flush())
        if self._parser is not None:
            parts += self._parser.finish()
        return parts


def joined_parts(parts: Sequence[Part]) -> list[Part]:
    """The same parts, neighbouring texts as one."""
    joined: list[Part] = []
    for kind, group in groupby(parts, key=type):
        run = list(group)
        joined += ["".join(str(part) for part in run)] if kind is str else run
    return joined
