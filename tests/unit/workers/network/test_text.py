"""Text as it grows: pieces put together are the whole, however tokens and texts are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from harness.byte_tokenizer import BYTES_FROM, byte_tokenizer, ids_of
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from unison.workers.network.text import MAX_HELD_TOKENS, Detokenizer, StopMatcher, tail_overlap
from unison.workers.network.vocabulary import Vocabulary

BYTES = Vocabulary(byte_tokenizer())


def sentencepiece_decode() -> Callable[[Sequence[int]], str]:
    """Decoder of Llama 2's kind: bytes as <0xNN>, spaces as ▁, the first space dropped."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "\u2581a", "a", "\u2581the", "é", "\u2581\u2581"]
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda ids: str(tokenizer.decode(list(ids)))


SENTENCEPIECE = sentencepiece_decode()


def pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(st.one_of(st.text().map(ids_of), st.lists(st.integers(BYTES_FROM, BYTES_FROM + 255), max_size=40)))
@example(ids_of("👩‍👩‍👧‍👦 ñ \ufffd"))
@example([BYTES_FROM + 0xE4] * 90)
@example([BYTES_FROM + 0xFF] * 200)
def test_pieces_are_the_whole_text(ids: list[int]) -> None:
    """Byte-level vocabularies: any bytes at all."""
    assert "".join(pieces(BYTES.decode, ids)) == BYTES.decode(ids)


@given(st.lists(st.one_of(st.integers(256, 261), st.text().map(lambda text: list(text.encode())[:1] or [256]).map(
    lambda ids: ids[0] if ids[0] < 128 or ids[0] == 256 else 257)), max_size=30))
def test_pieces_are_the_whole_text_with_sentencepiece(ids: list[int]) -> None:
    """The space before a word depends on the word before it."""
    assert "".join(pieces(SENTENCEPIECE, ids)) == SENTENCEPIECE(ids)


@given(st.lists(st.sampled_from(["a", "é", "你", "👍", " "]), max_size=12))
def test_characters_made_of_byte_tokens(characters: list[str]) -> None:
    ids = [byte for character in characters for byte in character.encode()]
    assert "".join(pieces(SENTENCEPIECE, ids)) == SENTENCEPIECE(ids)


def test_no_piece_ends_inside_a_character() -> None:
    assert pieces(BYTES.decode, ids_of("a你b")) == ["a", "", "", "你", "b", ""]


def test_bytes_that_are_no_text_are_let_go() -> None:
    """What can't become a character any more is given out, and the work per token stays bounded."""
    given_out = pieces(BYTES.decode, [BYTES_FROM + 0xFF] * (MAX_HELD_TOKENS + 2))
    assert given_out[MAX_HELD_TOKENS] and len(given_out[-1]) < MAX_HELD_TOKENS


def cut(text: str, stops: Sequence[str], sizes: Sequence[int]) -> tuple[str, str | None]:
    matcher, out, at = StopMatcher(stops), "", 0
    for size in [*sizes, len(text)]:
        out += matcher.push(text[at : at + size])
        at += size
    return out + matcher.flush(), matcher.matched


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The same, character by character and without holding anything back."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text("ab\n", max_size=25),
    st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 4), max_size=25),
)
def test_stop_strings_are_found_at_any_split(text: str, stops: list[str], sizes: list[int]) -> None:
    assert cut(text, stops, sizes) == first_stop(text, stops)


@pytest.mark.parametrize(
    ("text", "mark", "length"), [("ab<to", "<tool>", 3), ("ab", "<t", 0), ("aa", "aab", 2), ("", "a", 0)]
)
def test_tail_overlap(text: str, mark: str, length: int) -> None:
    assert tail_overlap(text, mark) == length


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["###"])
    assert [matcher.push(piece) for piece in ("a#", "#", "b##", "#c")] == ["a", "", "##b", ""]
    assert matcher.matched == "###" and matcher.push("more") == "" and matcher.flush() == ""


@given(st.text())
def test_bytes_of_tokens_are_the_bytes_of_the_text(text: str) -> None:
    assert b"".join(BYTES.piece(token_id)[1] for token_id in ids_of(text)) == text.encode()
