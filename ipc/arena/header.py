"""ArenaHeader: the first pages of the arena: what it is, which buffer is live, and each buffer's record.

Every decision that another process may act on is one aligned 8-byte store, made last: the version word for "this buffer
is live", a record's state for "this buffer is sealed". A record's ordinal and digest are written before its state, by
the only process that may (the writer under its exclusive lock, the engine for a buffer that it holds).

Owns: the bytes of the header. Knows nothing of torch or of the buffers' content. Called by the arena's backends.
"""

from __future__ import annotations

import os
import struct
from mmap import mmap

from ..errors import ArenaError
from ..types import PolicyVersion
from ..wire import MAX_FRAME_BYTES
from .layout import LAYOUT_CODEC, ArenaLayout, BufferRecord, BufferState

PAGE_BYTES = 4096
BUFFER_ALIGNMENT_BYTES = 2 << 20
"""Buffers start at multiples of a huge page."""
MAX_BUFFERS = 16
_MAGIC = b"UNISONW1"
_FIXED = struct.Struct("<8sQQQQ")
"""magic, number of buffers, offset of the first buffer, bytes from one buffer to the next, bytes of the layout."""
_LIVE_WORD = 64 // 8
"""Index of the version word: the live buffer's index + 1, or 0 where none is."""
_HIGHEST_WORD = 72 // 8
"""Index of the word with the highest ordinal that ever was installed, so that a new worker doesn't give one twice."""
_FIRST_RECORD, _RECORD_BYTES = 128, 64
_STATE, _OWNER, _ORDINAL, _DIGEST = 0, 1, 2, 3
"""Words of a record: state, owner's pid, ordinal, two words of digest."""


class ArenaHeader:
    """A view of the mapped header. Life: formatted once by the creator, then attached by everyone."""

    def __init__(self, pages: mmap) -> None:
        """Attach to a formatted header.

        Raises:
            ArenaError: it isn't one.
        """
        self._pages = memoryview(pages)
        self._words = self._pages[:PAGE_BYTES].cast("Q")
        magic, self.num_buffers, self.first_offset, self.stride_bytes, layout_bytes = _FIXED.unpack_from(pages)
        if magic != _MAGIC or not 1 <= self.num_buffers <= MAX_BUFFERS or PAGE_BYTES + layout_bytes > len(pages):
            self.close()
            raise ArenaError("this memory is no weight arena, or one of another format; create a new one")
        _, self.layout = LAYOUT_CODEC.decode(bytes(pages[PAGE_BYTES : PAGE_BYTES + layout_bytes]))

    @staticmethod
    def format(pages: mmap, layout: ArenaLayout, num_buffers: int, stride_bytes: int) -> None:
        """Write a fresh header; every buffer is free."""
        blob = LAYOUT_CODEC.encode(0, layout)
        pages[PAGE_BYTES : PAGE_BYTES + len(blob)] = blob
        pages[: _FIXED.size] = _FIXED.pack(_MAGIC, num_buffers, header_bytes(layout), stride_bytes, len(blob))

    @staticmethod
    def peek_bytes(start: bytes) -> int:
        """Bytes of the whole header, from its first page."""
        if len(start) < _FIXED.size:
            raise ArenaError("this memory is too small for a weight arena")
        magic, _, first_offset, _, _ = _FIXED.unpack_from(start)
        if magic != _MAGIC or not PAGE_BYTES < first_offset <= MAX_FRAME_BYTES + BUFFER_ALIGNMENT_BYTES:
            raise ArenaError("this memory is no weight arena, or one of another format; create a new one")
        return int(first_offset)

    def offset_of(self, buffer: int) -> int:
        """First byte of a buffer in the memfd."""
        self._check(buffer)
        return int(self.first_offset + buffer * self.stride_bytes)

    @property
    def live_buffer(self) -> int | None:
        """Index of the live buffer."""
        word = self._words[_LIVE_WORD]
        return int(word) - 1 if word else None

    def set_live(self, buffer: int | None) -> None:
        """The one store that makes a buffer live for who starts next; the engine's alone."""
        self._words[_LIVE_WORD] = 0 if buffer is None else buffer + 1

    @property
    def highest_ordinal(self) -> int:
        """The highest ordinal ever installed from this arena (V1: ordinals only grow, also over a worker's death)."""
        return int(self._words[_HIGHEST_WORD])

    def raise_ordinal(self, ordinal: int) -> None:
        """Remember an ordinal before its version can go live."""
        self._words[_HIGHEST_WORD] = max(ordinal, self.highest_ordinal)

    def record(self, buffer: int) -> BufferRecord:
        """What is known of a buffer."""
        at = self._record(buffer)
        state = BufferState(min(int(self._words[at + _STATE]), max(BufferState)))
        digest = self._pages[(at + _DIGEST) * 8 : (at + _DIGEST) * 8 + 16].hex()
        is_versioned = state >= BufferState.SEALED
        version = PolicyVersion(int(self._words[at + _ORDINAL]), digest) if is_versioned else None
        return BufferRecord(state, int(self._words[at + _OWNER]), version)

    def set_state(self, buffer: int, state: BufferState) -> None:
        """Change a record's state."""
        at = self._record(buffer)
        self._words[at + _OWNER] = os.getpid()
        self._words[at + _STATE] = state

    def seal(self, buffer: int, version: PolicyVersion) -> None:
        """Ordinal and digest first, the state last."""
        at = self._record(buffer)
        self._words[at + _ORDINAL] = version.ordinal
        self._pages[(at + _DIGEST) * 8 : (at + _DIGEST) * 8 + 16] = bytes.fromhex(version.digest)
        self.set_state(buffer, BufferState.SEALED)

    def close(self) -> None:
        """Let go of the mapping, so that it can be unmapped."""
        self._words.release()
        self._pages.release()

    def _record(self, buffer: int) -> int:
        self._check(buffer)
        return (_FIRST_RECORD + buffer * _RECORD_BYTES) // 8

    def _check(self, buffer: int) -> None:
        if not 0 <= buffer < self.num_buffers:
            raise ArenaError(f"there is no buffer {buffer}; the arena has the buffers 0 … {self.num_buffers - 1}")


def header_bytes(layout: ArenaLayout) -> int:
    """Where the first buffer starts: after the page of words and the layout, at a multiple of a huge page."""
    used = PAGE_BYTES + len(LAYOUT_CODEC.encode(0, layout))
    return -(-used // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
