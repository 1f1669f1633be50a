"""Vocabulary: token ids to text and back, for one Hugging Face tokenizer.

Owns: encoding of prompts, decoding, and text and bytes of single tokens. The tokenizer's own Python layer changes its
state when it is called, so this speaks to the `tokenizers` object behind it, which any thread may use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ...ipc.errors import UnsupportedModelError

LONG_TEXT_CHARS = 20_000
"""Texts longer than this are encoded in a thread, so that other requests go on."""

SPACE_MARK = "\u2581"
"""How SentencePiece writes a space inside a token."""


class Vocabulary:
    """One tokenizer, for as long as the server runs; for one event loop and its threads."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a fast tokenizer of `transformers`.

        Raises:
            UnsupportedModelError: the tokenizer isn't a fast one.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModelError("tokenizer", "has no tokenizer.json; the server needs a fast tokenizer")
        self._backend = backend
        self._byte_by_char = _byte_by_char() if "ByteLevel" in str(backend.decoder) else None
        self.special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        """Ids of tokens that are no text: turns, ends, padding."""
        self.piece = lru_cache(maxsize=65536)(self._piece)
        """(token id) → its text alone and its bytes; text of a token inside a character has replacement characters."""

    async def encode(self, text: str, is_rendered: bool = False) -> tuple[int, ...]:
        """Token ids of a text. A rendered chat carries its special tokens already: none is added to it (P22)."""
        if len(text) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self.encode_now, text, is_rendered)
        return self.encode_now(text, is_rendered)

    def encode_now(self, text: str, is_rendered: bool = False) -> tuple[int, ...]:
        """The same in the calling thread."""
        return tuple(self._backend.encode(text, add_special_tokens=not is_rendered).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary are nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _piece(self, token_id: int) -> tuple[str, bytes]:
        text = self.decode((token_id,), skip_special_tokens=False)
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self.special_ids:
            return text, text.encode()
        if self._byte_by_char is not None and all(char in self._byte_by_char for char in token):
            return text, bytes(self._byte_by_char[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return text, bytes([int(token[3:5], 16)])
        text = token.replace(SPACE_MARK, " ") if SPACE_MARK in token else text
        return text, text.encode()


def _byte_by_char() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level vocabularies. Source: GPT-2's byte encoder."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
