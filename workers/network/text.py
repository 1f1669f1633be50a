"""Text as it grows: incremental detokenizing, and stop strings across token boundaries.

Owns: `Detokenizer` (token ids in, text that won't change any more out) and `StopMatcher` (text in, text that is not
part of a stop string out). Knows no socket, clock or tokenizer: decoding is a function that comes in. Called by
choice.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that aren't UTF-8, or aren't yet."""

MAX_HELD_TOKENS = 64
"""With more tokens held back than this, text that can't become a character is let go."""

CONTEXT_TOKENS = 8
"""Last tokens that stay held then: any character is complete within them."""


class Detokenizer:
    """Token ids one by one to pieces of text whose concatenation is the text of all.

    Life: `push` per token → `flush` once. A piece is held back while it ends in the middle of a character. Decoders
    may treat the first token differently (SentencePiece drops its space), so a piece is decoded behind the tokens of
    the piece before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_context = 0

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""
        self._ids.append(token_id)
        whole = self._decode(self._ids)
        if whole.endswith(REPLACEMENT):
            return self._relieve() if len(self._ids) - self._num_context > MAX_HELD_TOKENS else ""
        return self._give(whole, len(self._ids))

    def flush(self) -> str:
        """What is still held back, when no more tokens come."""
        return self._give(self._decode(self._ids), len(self._ids))

    def _give(self, whole: str, end: int) -> str:
        """Text of the held tokens before `end`, which become the context of the rest."""
        known = self._decode(self._ids[: self._num_context])
        # Where the context reads differently beside new tokens, those are decoded alone.
        is_extension = whole.startswith(known)
        new = whole[len(known) :] if is_extension else self._decode(self._ids[self._num_context : end])
        if new:
            self._ids = self._ids[self._num_context :]
            self._num_context = end - self._num_context
        elif end - self._num_context > MAX_HELD_TOKENS:
            del self._ids[self._num_context : end]  # so many tokens without text have none to give later
        return new

    def _relieve(self) -> str:
        whole = self._decode(self._ids)
        for end in range(len(self._ids) - CONTEXT_TOKENS, self._num_context, -1):
            head = self._decode(self._ids[:end])
            if head + self._decode(self._ids[end:]) == whole:
                return self._give(head, end)
        return ""


class StopMatcher:
    """Cuts a growing text before the first stop string, and holds back what may be the beginning of one.

    The first one is the one that is complete first as the text grows character by character; of several that are
    complete at the same character, the longest. So the result doesn't depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, piece: str) -> str:
        """Text that is certainly not part of a stop string; nothing once one was found."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        held = self._held + piece
        found = [(held.find(stop) + len(stop), stop) for stop in self._stops if stop in held]
        if found:
            end, self.matched = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return held[: end - len(self.matched)]
        keep = max(tail_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def tail_overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`, and not all of it."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
