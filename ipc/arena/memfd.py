"""MemfdBuffers: weight buffers behind the arena's header, in the same memfd; the backend for CPU.

The pages are allocated when the arena is created, and the memory has no name. The engine's mapping can't be written; a
publisher's can. Each buffer is mapped once per process. Owns: the mappings. Called by WeightArena.
"""

from __future__ import annotations

import mmap
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..memory import SharedMemory
from .header import BUFFER_ALIGNMENT_BYTES, ArenaHeader
from .layout import ArenaLayout


class MemfdBuffers:
    """One process's mappings. Life: made with the arena, closed with it."""

    def __init__(self, memory: SharedMemory, header: ArenaHeader) -> None:
        self._memory = memory
        self._header = header
        self._layout = header.layout
        self._maps: dict[tuple[int, bool], mmap.mmap] = {}

    def vector(self, buffer: int, is_writable: bool) -> Tensor:
        """One buffer [elements] over the shared pages."""
        dtype: torch.dtype = getattr(torch, self._layout.dtype)
        with warnings.catch_warnings(), torch.inference_mode(False):
            # torch warns that it can't keep anyone from writing to read-only memory; the kernel does.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            mapping = self._mapping(buffer, is_writable)
            return torch.frombuffer(mapping, dtype=dtype, count=self._layout.buffer_bytes // dtype.itemsize)

    def hashable(self, tensor: Tensor) -> memoryview:
        """The tensor's own bytes, without a copy."""
        return tensor.detach().view(torch.uint8).numpy().data.cast("B")

    def fence(self) -> None:
        """Nothing to wait for: a store is visible to every mapping of the page."""

    def aside(self) -> AbstractContextManager[None]:
        """Another thread is aside enough; hashing lets go of the GIL."""
        return nullcontext()

    def describe(self) -> bytes:
        """The memfd is all there is."""
        return b""

    def close(self) -> None:
        """Unmap what no tensor looks at."""
        while self._maps:
            _, mapping = self._maps.popitem()
            try:
                mapping.close()
            except BufferError:  # a tensor still looks at it; it is unmapped when that goes
                pass

    def _mapping(self, buffer: int, is_writable: bool) -> mmap.mmap:
        key = (buffer, is_writable)
        if key not in self._maps:
            offset = self._header.offset_of(buffer)
            mapping = self._memory.map(writable=is_writable, offset=offset, length=self._header.stride_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                try:
                    mapping.madvise(mmap.MADV_HUGEPAGE)
                except OSError:  # the kernel was built without them, which costs speed and nothing else
                    pass
            self._maps[key] = mapping
        return self._maps[key]


def stride_of(layout: ArenaLayout) -> int:
    """Bytes from one buffer to the next: whole huge pages."""
    return -(-layout.buffer_bytes // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
