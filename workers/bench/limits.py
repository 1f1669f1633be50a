"""What the machine can do at most: reading and copying memory, and matrix products.

Owns: the measurements, which the bench takes in the same run as the contenders' and before them. The C library's
`memchr`, looking for a byte that isn't there, reads as fast as a core can; `memmove` copies. Both let other threads run
meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from time import perf_counter

BUFFER_BYTES = 512 << 20
REPEATS = 5
MATRIX = 2048


def measure_limits(threads: int) -> dict[str, float]:
    """Bytes per second of reading (one thread, all threads) and copying (read and written bytes counted both), and
    floating-point operations per second of a large square matrix product."""
    with mmap.mmap(-1, BUFFER_BYTES) as source, mmap.mmap(-1, BUFFER_BYTES) as target:
        for buffer in (source, target):
            if hasattr(mmap, "MADV_HUGEPAGE"):
                buffer.madvise(mmap.MADV_HUGEPAGE)
        start, end = _address(source), _address(target)
        ctypes.memset(start, 1, BUFFER_BYTES)
        ctypes.memset(end, 1, BUFFER_BYTES)
        return {
            "read_bytes_per_s, 1 thread": _rate(_read(start), 1),
            "read_bytes_per_s": _rate(_read(start), threads),
            "copy_bytes_per_s": 2 * _rate(lambda offset, size: ctypes.memmove(end + offset, start + offset, size),
                                          threads),
            "bfloat16_flop_per_s": _matrix_rate("bfloat16", threads),
            "float32_flop_per_s": _matrix_rate("float32", threads),
        }  # fmt: skip


def _read(start: int) -> Callable[[int, int], object]:
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    return lambda offset, size: search(start + offset, 0, size)


def _rate(work: Callable[[int, int], object], threads: int) -> float:
    """Bytes per second of `work` over the buffer, cut into one part per thread; the best of some repeats."""
    size = BUFFER_BYTES // threads
    best_s = float("inf")
    for _ in range(REPEATS):
        gate = threading.Barrier(threads + 1)

        def part(offset: int, gate: threading.Barrier = gate) -> None:
            gate.wait()
            work(offset, size)

        team = [threading.Thread(target=part, args=(at * size,)) for at in range(threads)]
        for thread in team:
            thread.start()
        gate.wait()
        started = perf_counter()
        for thread in team:
            thread.join()
        best_s = min(best_s, perf_counter() - started)
    return size * threads / best_s


def _matrix_rate(dtype: str, threads: int) -> float:
    import torch

    torch.set_num_threads(threads)
    left, right = (torch.randn(MATRIX, MATRIX).to(getattr(torch, dtype)) for _ in range(2))
    best_s = float("inf")
    for _ in range(REPEATS):
        started = perf_counter()
        torch.mm(left, right)
        best_s = min(best_s, perf_counter() - started)
    return float(2 * MATRIX**3 / best_s)


def _address(buffer: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(buffer)
    return ctypes.addressof(view)
