"""Memory for operands of native kernels, such that a byte too far is noticed.

Three kinds: `heap` gives each operand a block of exactly its size from malloc, whose ends AddressSanitizer watches;
`end` puts it flush against a page that can't be touched, `start` right behind one, where a touch ends the process with
SIGSEGV. Knows nothing of torch, so that it works under a sanitizer that is preloaded.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import DTypeLike, NDArray

KINDS = ("heap", "end", "start")

_PAGE = mmap.PAGESIZE
_PROT_NONE = 0
_UNWRITTEN = 0xA5
"""Byte that fills what kernels are to write: as numbers of any type, nothing that comes out of a kernel by chance."""

Array = NDArray[np.generic]


class KernelMemory:
    """Life: operands are placed, kernels run, `release` frees all of them at once."""

    def __init__(self, kind: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; there are {', '.join(KINDS)}")
        self._kind = kind
        self._libc = ctypes.CDLL(None)  # under a sanitizer: its malloc
        self._libc.malloc.argtypes, self._libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
        self._libc.free.argtypes = (ctypes.c_void_p,)
        self._libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._blocks: list[int] = []
        self._maps: list[mmap.mmap] = []

    def place(self, array: Array) -> Array:
        """A dense copy in memory of its own, which begins with its first element and ends with its last."""
        size = array.nbytes
        address = self._heap(size) if self._kind == "heap" else self._beside_a_guard(size)
        buffer = (ctypes.c_char * size).from_address(address)
        placed: Array = np.frombuffer(buffer, dtype=array.dtype, count=array.size).reshape(array.shape)
        placed[...] = array
        return placed

    def room(self, size: int, dtype: DTypeLike) -> Array:
        """`size` elements to be written to."""
        return self.place(np.full(size * np.dtype(dtype).itemsize, _UNWRITTEN, dtype=np.uint8).view(dtype))

    def rows(self, matrix: Array, stride: int) -> Array:
        """The rows of a matrix `stride` elements apart, flat; between them lies what kernels are to leave alone."""
        count, width = matrix.shape
        flat = np.full(((count - 1) * stride + width) * matrix.itemsize, _UNWRITTEN, np.uint8).view(matrix.dtype)
        for row in range(count):
            flat[row * stride : row * stride + width] = matrix[row]
        return self.place(flat)

    def release(self) -> None:
        """Frees everything that was placed."""
        for block in self._blocks:
            self._libc.free(block)
        self._blocks, self._maps = [], []

    def _heap(self, num_bytes: int) -> int:
        block: int | None = self._libc.malloc(max(1, num_bytes))
        if block is None:
            raise MemoryError(f"no {num_bytes} bytes")
        self._blocks.append(block)
        return block

    def _beside_a_guard(self, num_bytes: int) -> int:
        size = max(1, -(-num_bytes // _PAGE)) * _PAGE
        pages = mmap.mmap(-1, size + 2 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._maps.append(pages)
        base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for guard in (base, base + _PAGE + size):
            if self._libc.mprotect(guard, _PAGE, _PROT_NONE) != 0:
                raise OSError("mprotect refused a guard page")
        return base + _PAGE if self._kind == "start" else base + _PAGE + size - num_bytes
