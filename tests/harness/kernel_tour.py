"""A tour of the native library: every exported function, on awkward shapes, over operands that end where they end.

    python -m harness.kernel_tour LIBRARY MEMORY THREADS    (with tests/ on the path; MEMORY as in kernel_memory.py)

runs in a process of its own, because a fault ends it and because sanitizers have to be preloaded; numpy is all that it
needs. It prints one JSON object: which functions it called, and per stop a digest of all that they wrote, with every
NaN alike. Digests are the same for every variant of the library, every kind of memory and any number of threads. What
can be replayed from a tape is called both ways. The structs are those of the sources, as plain 64-bit words.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
import sys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import DTypeLike

from .kernel_memory import Array, KernelMemory

Argument = int | float | None | Array
BF16 = np.dtype(np.uint16)
F32 = np.dtype(np.float32)
TYPES = (("bf16", BF16), ("f32", F32))
_POISON = {BF16: 0x7FC1, F32: np.nan}
"""What lies between the rows of operands and in unused slots: a number that shows if it is ever taken into account."""


class Tour:
    """Calls functions, directly and from a tape, and keeps account of what they write."""

    def __init__(self, library: str, kind: str) -> None:
        self.kind = kind
        self._lib = ctypes.CDLL(library)
        self._memory = KernelMemory(kind)
        self._random = np.random.default_rng(0)
        self._digest = hashlib.sha256()
        self.called: set[str] = set()

    # ---- operands ----------------------------------------------------------------------------------------------------

    def numbers(self, *shape: int, dtype: np.dtype = F32, scale: float = 1.0) -> Array:
        """Normally distributed, in the kernels' storage type; bf16 as its bits."""
        values = (self._random.standard_normal(shape) * scale).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(BF16) if dtype == BF16 else values

    def place(self, array: object, dtype: DTypeLike = None) -> Array:
        """A copy where a byte too far is noticed."""
        return self._memory.place(np.asarray(array, dtype=dtype))

    def rows(self, matrix: Array, stride: int) -> Array:
        """The matrix with rows `stride` apart and poison between them."""
        wide = np.full((matrix.shape[0], stride), _POISON[matrix.dtype], dtype=matrix.dtype)
        wide[:, : matrix.shape[1]] = matrix
        flat = wide.reshape(-1)
        return self._memory.place(flat[: flat.size - stride + matrix.shape[1]] if matrix.size else flat[:0])

    def room(self, size: int, dtype: DTypeLike) -> Array:
        """Memory to be written to."""
        return self._memory.room(size, dtype)

    def words(self, *fields: Argument) -> Array:
        """A struct of 64-bit fields: whole numbers, doubles and addresses."""
        return self.place([_word(each, "<d") for each in fields], np.int64)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Argument, writes: Sequence[Array] = (), returns: object = None) -> float:
        """Calls a function; where a tape can hold it, replays it on the same inputs and compares."""
        function = getattr(self._lib, name)
        function.argtypes = [_kind(each) for each in arguments]
        function.restype = returns
        before = [each.copy() for each in writes]
        result = function(*(each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments))
        self.called.add(name)
        for each in writes:
            self._digest.update(_plain(each).tobytes())
        if hasattr(self._lib, f"{name}_words"):
            written = [each.copy() for each in writes]
            for each, old in zip(writes, before, strict=True):
                each[...] = old
            replayed = self._replay(name, arguments)
            assert replayed == (result or 0), f"{name} returned {result}, replayed {replayed}"
            for each, first in zip(writes, written, strict=True):
                assert _plain(each).tobytes() == _plain(first).tobytes(), f"{name} replayed is another"
        return result if result is not None else 0

    def _replay(self, name: str, arguments: Sequence[Argument]) -> int:
        words = ctypes.cast(getattr(self._lib, f"{name}_words"), ctypes.c_void_p).value
        functions, starts = self.place([words] * 2, np.int64), self.place([0, 0], np.int64)
        tape, fault = self.place([_word(each, "<f4x") for each in arguments], np.int64), self.room(1, np.int32)
        replay = self._lib.unison_replay
        replay.restype, replay.argtypes = ctypes.c_int64, [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_void_p]
        failed = replay(functions.ctypes.data, starts.ctypes.data, tape.ctypes.data, 1, fault.ctypes.data)
        self.called.add("unison_replay")
        assert failed == (-1 if fault[0] == 0 else 0)
        return int(fault[0])

    def visit(self, stop: Callable[[Tour], None]) -> str:
        """Runs one stop; returns the digest of what was written."""
        self._digest = hashlib.sha256()
        self._random = np.random.default_rng(len(stop.__name__))
        stop(self)
        self._memory.release()
        return self._digest.hexdigest()[:16]


def _kind(argument: Argument) -> object:
    if isinstance(argument, np.ndarray) or argument is None:
        return ctypes.c_void_p
    return ctypes.c_float if isinstance(argument, float) else ctypes.c_int64


def _word(argument: Argument, real: str) -> int:
    """As a struct (`<d`) or a tape (`<f4x`) holds it."""
    if argument is None:
        return 0
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    return struct.unpack("<q", struct.pack(real, argument))[0] if isinstance(argument, float) else argument


def _plain(array: Array) -> Array:
    """With every NaN alike."""
    if array.dtype != BF16:
        return np.where(np.isnan(array), np.float32(np.nan), array) if array.dtype.kind == "f" else array
    return np.where((array & 0x7FFF) > 0x7F80, BF16.type(0x7FC0), array)


# ---- the stops -------------------------------------------------------------------------------------------------------


def linear(tour: Tour) -> None:
    """No row, tiles of every height, K off every boundary, several passes over K and over rows."""
    shapes = [(m, n, k) for m in (0, 1, 2, 3, 4, 5, 7, 13) for n, k in ((1, 1), (4, 7), (5, 31), (13, 33), (9, 72))]
    shapes += [(5, 9, 1601), (70, 6, 1601), (1540, 5, 8), (61, 130, 40), (2, 300, 16)]
    for name, dtype, out in (("linear_bf16", BF16, BF16), ("logits_bf16", BF16, F32), ("linear_f32", F32, F32)):
        for m, n, k in shapes:
            x, w = tour.numbers(m, k, dtype=dtype), tour.numbers(n, k, dtype=dtype)
            bias = tour.place(tour.numbers(n, dtype=dtype))
            results = []
            for gap in (0, 3):
                y = tour.room(m * (n + gap) - gap if m else 0, out)
                x_rows, w_rows = tour.rows(x, k + gap), tour.rows(w, k + gap)
                tour.call(
                    f"unison_{name}", x_rows, k + gap, w_rows, k + gap, bias if n % 2 else None, y, n + gap, m, n, k,
                    writes=[y],
                )  # fmt: skip
                results.append([y[row * (n + gap) : row * (n + gap) + n] for row in range(m)])
            assert _plain(np.array(results[0])).tobytes() == _plain(np.array(results[1])).tobytes()
    for suffix, dtype in TYPES:
        for m, n, k in shapes[:-4]:
            x, w = tour.numbers(m, k, dtype=dtype), tour.numbers(2 * n, k, dtype=dtype)
            bias, y = tour.place(tour.numbers(2 * n, dtype=dtype)), tour.room(max(0, m * (n + 3) - 3), dtype)
            tour.call(
                f"unison_linear_silu_mul_{suffix}", tour.rows(x, k + 3), k + 3, tour.rows(w, k + 1), k + 1,
                bias if n % 2 else None, y, n + 3, m, 2 * n, k, writes=[y],
            )  # fmt: skip


def rows(tour: Tour) -> None:
    """Norm, rotary embedding, activation, log-softmax and exponential, at widths beside eights."""
    for suffix, dtype in TYPES:
        for count, width in ((0, 8), (1, 1), (3, 7), (2, 8), (3, 9), (2, 30), (1, 576), (101, 970)):
            x, weight = tour.numbers(count, width, dtype=dtype), tour.place(tour.numbers(width, dtype=dtype))
            for gap, residual in ((0, None), (5, tour.rows(tour.numbers(count, width, dtype=dtype), width + 2))):
                y = tour.room(max(0, count * (width + gap) - gap), dtype)
                tour.call(
                    f"unison_rms_norm_{suffix}", tour.rows(x, width + gap), width + gap, residual, width + 2, weight,
                    1e-5, y, width + gap, count, width, writes=[y] if residual is None else [y, residual],
                )  # fmt: skip
            gate_up, y = tour.rows(tour.numbers(count, 2 * width, dtype=dtype), 2 * width + 3), tour.room(x.size, dtype)
            tour.call(f"unison_silu_mul_{suffix}", gate_up, 2 * width + 3, y, width, count, width, writes=[y])
        for heads, dim, half in (((3, 1), 64, 32), ((2, 2), 20, 7), ((1, 1), 2, 1), ((9, 3), 24, 8)):
            q, k = (tour.place(tour.numbers(5 * each * dim, dtype=dtype)) for each in heads)
            cosine, sine = (tour.rows(tour.numbers(5, half), half + 1) for _ in range(2))
            tour.call(
                f"unison_rope_{suffix}", q, heads[0] * dim, dim, heads[0], k, heads[1] * dim, dim, heads[1], cosine,
                half + 1, sine, half + 1, 5, half, writes=[q, k],
            )  # fmt: skip
    for width in (1, 7, 8, 127, 128, 129, 1003):
        logits = tour.numbers(4, width, scale=10.0)
        logits[1, width // 2], logits[2, width - 1] = np.nan, np.inf
        x, out = tour.rows(logits, width + 1), tour.room(4, F32)
        tour.call("unison_row_logsumexp", x, width + 1, out, 4, width, writes=[out])
        targets, out = tour.place([width - 1, 0, -1, width], np.int64), tour.room(4, F32)
        tour.call("unison_row_logprobs", x, width + 1, targets, out, 4, width, writes=[out])
        for suffix, dtype in TYPES:
            found, softmax = tour.room(4, F32), tour.room(4 * width, dtype)
            arguments = x, width + 1, targets, found, softmax, 4, width
            tour.call(f"unison_row_softmax_{suffix}", *arguments, writes=[found, softmax])
            assert _plain(found).tobytes() == _plain(out).tobytes()
            factors, grad = tour.place(tour.numbers(4)), tour.room(4 * width, dtype)
            tour.call(f"unison_logprob_gradient_{suffix}", softmax, targets, factors, grad, 4, width, writes=[grad])
    for count in (0, 1, 8, 13):
        out = tour.room(count, F32)
        tour.call("unison_exp", tour.place(tour.numbers(count, scale=50.0)), out, count, writes=[out])


def gradients(tour: Tour) -> None:
    """Norm and gated activation at widths beside eights and over several blocks of rows; attention with and without a
    window, with query rows that have no gradient."""
    for suffix, dtype in TYPES:
        for count, width in ((0, 8), (1, 1), (3, 7), (2, 8), (33, 9), (70, 30), (1, 576)):
            x, up, more = (tour.place(tour.numbers(count, width, dtype=dtype)) for _ in range(3))
            weight = tour.place(tour.numbers(width, dtype=dtype))
            for residual in (None, more):
                grad, by_weight = tour.room(count * width, dtype), tour.room(width, dtype)
                tour.call(
                    f"unison_rms_norm_gradient_{suffix}", x, weight, 1e-5, up, residual, grad, by_weight, count, width,
                    writes=[grad, by_weight],
                )  # fmt: skip
            gate_up, grad = tour.place(tour.numbers(count, 2 * width, dtype=dtype)), tour.room(2 * count * width, dtype)
            tour.call(f"unison_silu_mul_gradient_{suffix}", gate_up, up, grad, count, width, writes=[grad])
    lengths = (1, 33, 0, 20)
    starts, tokens = tour.place(np.cumsum([0, *lengths]), np.int32), sum(lengths)
    for dtype, (heads, kv_heads), dim, window in (
        (BF16, (9, 3), 64, 0), (F32, (2, 2), 8, 5), (BF16, (8, 1), 24, 40), (F32, (3, 1), 16, 0),
    ):  # fmt: skip
        q, out, up = (tour.numbers(tokens, heads, dim, dtype=dtype) for _ in range(3))
        up[3:9] = 0
        k, v = (tour.place(tour.numbers(tokens, kv_heads, dim, dtype=dtype)) for _ in range(2))
        of_q, of_k = (heads * dim, dim), (kv_heads * dim, dim)
        grads = [tour.place(np.zeros(q.size, dtype)), *(tour.room(k.size, dtype) for _ in range(2))]
        call = tour.words(
            starts, len(lengths), tour.place(q), k, v, tour.place(out), tour.place(up), *grads, *of_q, *of_k, *of_k,
            *of_q, *of_q, heads, kv_heads, dim, window, dim**-0.5, int(dtype == BF16),
        )  # fmt: skip
        tour.call("unison_attention_gradient", call, writes=grads)


def gather(tour: Tour) -> None:
    """Rows of odd sizes; an id outside the table ends it."""
    for row_bytes in (1, 6, 64):
        table = tour.place(np.arange(5 * row_bytes) % 251, np.uint8)
        for ids, fault in (([4, 0, 4], 0), ([], 0), ([1, 5, 1], 1), ([-1], 1)):
            out = tour.room(len(ids) * row_bytes, np.uint8)
            arguments = table, 5, row_bytes, tour.place(ids, np.int64), out, len(ids)
            assert tour.call("unison_gather_rows", *arguments, writes=[out], returns=ctypes.c_int) == fault


class Sequences:
    """Keys, values and queries of some sequences, packed and in a pool; siblings share their first blocks."""

    def __init__(self, tour: Tour, dtype: np.dtype, heads: tuple[int, int], dim: int, block: int) -> None:
        self.tour, self.dtype, self.heads, self.dim, self.block = tour, dtype, heads, dim, block
        self.lengths = (70, 1, 33, 70, 66, 64)
        siblings, shared = (3, 4), 64 // block  # of sequence 0, in blocks
        self.width = -(-max(self.lengths) // block)
        self.tables = np.full((len(self.lengths), self.width), -1, np.int32)
        used = 0
        for row, length in enumerate(self.lengths):
            first = shared if row in siblings else 0
            self.tables[row, :first] = self.tables[0, :first]
            count = -(-length // block) - first
            self.tables[row, first : first + count] = used + np.arange(count)[::-1]
            used += count
        self.num_slots = used * block
        self.tokens = [tour.numbers(length, heads[0] + 2 * heads[1], dim, dtype=dtype) for length in self.lengths]
        for row in siblings:
            self.tokens[row][:64, heads[0] :] = self.tokens[0][:64, heads[0] :]
        # The last of the slots ends with the memory, and there is poison in those that no sequence uses.
        self.k, self.v = (tour.place(np.full((self.num_slots, heads[1], dim), _POISON[dtype], dtype)) for _ in range(2))

    def keys(self, window: int, k: Array, v: Array, slots: int) -> Array:
        """AttentionKeys."""
        (_, kv_heads), dim = self.heads, self.dim
        strides = kv_heads * dim, dim, kv_heads * dim, dim
        return self.tour.words(k, v, int(self.dtype == BF16), slots, kv_heads, dim, *strides, dim**-0.5, window)

    def attend(self, phase: int, rows: list[int], spans: list[tuple[int, int]], keys: Array, split: int) -> Array:
        """Queries of positions [first, end) of each row; the call's outputs, a row per query."""
        tour, (heads, kv_heads), dim = self.tour, self.heads, self.dim
        wide = (heads + kv_heads) * dim
        q = np.concatenate([self.tokens[row][a:b, :-kv_heads] for row, (a, b) in zip(rows, spans, strict=True)])
        starts = tour.place(np.cumsum([0, *(b - a for a, b in spans)]), np.int32)
        positions = tour.place([b if phase == 2 else a for a, b in spans], np.int64)
        count = q.shape[0]
        placed = tour.place(q.reshape(-1)[: q.size - kv_heads * dim])  # queries between other columns, like a decoder's
        tables, out = tour.place(self.tables[rows]), tour.room(count * heads * dim, self.dtype)
        call = tour.words(
            phase, len(rows), None if phase == 2 else starts, None if phase == 0 else positions,
            None if phase == 0 else tables, self.width, self.width, self.block, split, 7, count, heads, wide, dim,
        )  # fmt: skip
        assert tour.call("unison_attention", call, keys, placed, out, writes=[out], returns=ctypes.c_int) == 0
        return _plain(out.reshape(count, heads * dim))

    def store(self, row: int) -> None:
        """Puts a sequence into the pool."""
        tour, (heads, kv_heads), dim, length = self.tour, self.heads, self.dim, self.lengths[row]
        position = np.arange(length)
        slots = self.tables[row, position // self.block] * self.block + position % self.block
        k, v = (
            tour.place(self.tokens[row].reshape(length, -1)[:, at * dim : (at + kv_heads) * dim])
            for at in (heads, heads + kv_heads)
        )
        size, keys = kv_heads * dim, self.keys(0, self.k, self.v, self.num_slots)
        arguments = keys, k, v, tour.place(slots, np.int32), length, size, size
        assert tour.call("unison_store_kv", *arguments, writes=[self.k, self.v], returns=ctypes.c_int) == 0


def attention(tour: Tour) -> None:
    """Packed, prefill in pieces, and decode, alone and in company, give the same bits; faults are named."""
    shapes = [(BF16, (9, 3), 64, 16), (F32, (9, 3), 64, 32), (BF16, (2, 2), 8, 1), (F32, (5, 1), 24, 4)]
    shapes += [(BF16, (4, 2), 72, 64), (F32, (7, 7), 16, 16), (BF16, (2, 1), 256, 16)]
    for dtype, heads, dim, block in shapes:
        case = Sequences(tour, dtype, heads, dim, block)
        lengths, everyone = case.lengths, list(range(len(case.lengths)))
        for row in everyone:
            case.store(row)
        k, v = (
            tour.place(np.concatenate([tokens[:, at : at + heads[1]] for tokens in case.tokens]))
            for at in (heads[0], heads[0] + heads[1])
        )
        for window, split in ((0, 32), (40, 64)):
            packed, cached = case.keys(window, k, v, len(k)), case.keys(window, case.k, case.v, case.num_slots)
            whole = case.attend(0, everyone, [(0, length) for length in lengths], packed, split)
            at = np.cumsum([0, *lengths])
            order = [4, 0, 2, 3, 1, 5]
            halves = [(lengths[row] // 2, lengths[row]) for row in order]
            wanted = np.concatenate([
                whole[at[row] + first : at[row] + end] for row, (first, end) in zip(order, halves, strict=True)
            ])  # fmt: skip
            assert np.array_equal(case.attend(1, order, halves, cached, split), wanted, equal_nan=True)
            for rows_, back in (([0], 0), ([0, 3, 4], 1), (order, 0), ([3, 0, 4, 5, 3], 30)):
                spans = [(max(0, lengths[row] - 1 - back), max(1, lengths[row] - back)) for row in rows_]
                wanted = whole[[at[row] + a for row, (a, _) in zip(rows_, spans, strict=True)]]
                assert np.array_equal(case.attend(2, rows_, spans, cached, split), wanted, equal_nan=True)
    _attention_faults(tour, case)


def _attention_faults(tour: Tour, case: Sequences) -> None:
    """Starts that don't rise, a position beyond the table, no block, a slot beyond the pool."""
    (heads, _), dim, keys = case.heads, case.dim, case.keys(0, case.k, case.v, case.num_slots)
    q, out = tour.place(tour.numbers(heads * dim, dtype=case.dtype)), tour.room(heads * dim, case.dtype)
    tables = case.tables[:1].copy()
    tables[0, 1] = -1
    for starts, length, table, fault in (
        ([0, 2], 10, case.tables[:1], 1), ([0, 1], 10_000, case.tables[:1], 2), ([0, 1], 50, tables, 3),
        ([0, 1], 50, case.tables[:1] + 1000, 3),
    ):  # fmt: skip
        call = tour.words(
            1, 1, tour.place(starts, np.int32), tour.place([length], np.int64), tour.place(table), case.width,
            case.width, case.block, 32, 7, 1, heads, heads * dim, dim,
        )  # fmt: skip
        assert tour.call("unison_attention", call, keys, q, out, returns=ctypes.c_int) == fault
    one = tour.place(tour.numbers(case.heads[1] * dim, dtype=case.dtype))
    for slot, fault in ((case.num_slots, 4), (-1, 0)):
        arguments = keys, one, one, tour.place([slot], np.int32), 1, one.size, one.size
        assert tour.call("unison_store_kv", *arguments, writes=[case.k], returns=ctypes.c_int) == fault


def _draws(tour: Tour, rows_: int) -> tuple[list[Array], list[Array]]:
    """Seeds, sample indices and positions of a draw, and the memory for its results."""
    given = [tour.place(np.arange(rows_) * factor, np.int64) for factor in (1 << 40, 3, 7)]
    return given, [tour.room(rows_, np.int64), *(tour.room(rows_, F32) for _ in range(3)), tour.room(rows_, np.uint8)]


def sampling(tour: Tour) -> None:
    """Plain rows, filtered ones, alternatives, at vocabularies beside eights, sixty-fours and blocks."""
    for vocab in (1, 7, 8, 65, 128, 130, 1031):
        logits = tour.numbers(9, vocab, scale=4.0)
        logits[5], logits[6, vocab - 1], logits[7, 1:] = -np.inf, np.nan, -np.inf
        x = tour.rows(logits, vocab + 3)
        temperatures = tour.place([1.0, 0.0, 0.3, -1.0, 2.0, 1.0, 1.0, 1.0, 0.01], F32)
        given, results = _draws(tour, 9)
        call = tour.words(x, vocab + 3, 9, vocab, temperatures, *given, *results)
        tour.call("unison_sample_plain", call, writes=results)
        uniform = tour.room(9, np.float64)
        tour.call("unison_uniforms", *given, uniform, 9, writes=[uniform])
        _filtered(tour, x, vocab)
        for k in {1, min(5, vocab), vocab}:
            ids, logprobs = tour.room(9 * k, np.int64), tour.room(9 * k, F32)
            tour.call("unison_top_logprobs", x, vocab + 3, 9, vocab, k, ids, logprobs, writes=[ids, logprobs])


def _filtered(tour: Tour, x: Array, vocab: int) -> None:
    """Each filter alone and all together; ids that the vocabulary doesn't have; an empty support."""
    ids = [0, vocab - 1, vocab, -1, 1 << 40, vocab // 2]
    some = tour.place(ids, np.int64)
    bias, half = tour.place([1.0, -2.0, 0.5, 0.5, 0.5, 3e38], F32), len(ids) // 2
    none = tour.place([], np.int64)

    def row(
        top_p: float = 1.0, min_p: float = 0.0, top_k: int = vocab, temperature: float = 1.0, **kinds: int
    ) -> bytes:
        """A `unison_filtered_row`."""
        penalty = kinds.get("penalty", 0)
        counts = [len(ids) * kinds.get(kind, 0) for kind in ("allowed", "bad", "early", "bias", "history")]
        lists = [some if count else none for count in counts]
        return struct.pack(
            "<4d2f14q", top_p, min_p, 0.5 * penalty, 0.25 * penalty, temperature, 1.0 + penalty, top_k,
            kinds.get("allowed", 0), *(each.ctypes.data for each in lists), *counts, half, bias.ctypes.data,
        )  # fmt: skip

    everything = {"bias": 1, "history": 1, "penalty": 1}
    filters = [
        row(top_p=0.5), row(top_k=min(3, vocab)), row(min_p=0.3), row(temperature=0.0), row(allowed=1), row(bad=1),
        row(early=1, temperature=0.5), row(**everything), row(0.9, 0.01, min(9, vocab), 1.5, **everything, allowed=1),
        row(allowed=1, bad=1), row(top_p=1e-9), row(top_k=min(70, vocab), top_p=0.99),
    ]  # fmt: skip
    packed = tour.place(np.frombuffer(b"".join(filters), np.uint8))
    for first in range(len(filters)):  # every filter on every kind of row
        given, results = _draws(tour, 9)
        rows_ = tour.place([8, 0, 2, 4, 5, 6, 7, 1], np.int64)
        part = tour.place(np.roll(packed, -first * len(filters[0]))[: 8 * len(filters[0])])
        call = tour.words(x, vocab + 3, 8, vocab, rows_, part, *given, *results)
        tour.call("unison_sample_filtered", call, writes=results)


def updates(tour: Tour) -> None:
    """AdamW in whole eights and the rest, over several items; sums of squares."""
    for suffix, dtype in TYPES:
        for count in (0, 1, 7, 8, 9, 31, 33_001):
            for weight1 in (0.1, 0.7):
                rates = tour.place([0.5, 0.99, weight1, 0.99, 0.01, 0.1, 1e-8, -0.01], F32)
                gradient, master, first, second = (tour.place(tour.numbers(count)) for _ in range(4))
                second[...] = np.square(second)
                out = None if dtype == F32 and count == 7 else tour.room(count, dtype)
                tour.call(
                    f"unison_adamw_{suffix}", rates, gradient, master, first, second, out, count,
                    writes=[master, first, second, *([] if out is None else [out])],
                )  # fmt: skip
            total = tour.call("unison_sum_of_squares", gradient, count, returns=ctypes.c_double)
            assert np.isclose(total, np.sum(gradient.astype(np.float64) ** 2), rtol=1e-12)


def settings(tour: Tour) -> None:
    """Threads within their limits; the variant's name."""
    threads = int(tour.call("unison_get_threads", returns=ctypes.c_int))
    for count, wanted in ((4, 4), (0, -1), (257, -1), (threads, threads)):
        assert tour.call("unison_set_threads", count, returns=ctypes.c_int) == wanted
    assert tour.call("unison_variant", returns=ctypes.c_char_p)
    assert tour.call("unison_tiles_state", returns=ctypes.c_int) in (0, 1, 2, 3)


STOPS = (linear, rows, gradients, gather, attention, sampling, updates, settings)


def too_far(tour: Tour) -> None:
    """What the watch over memory must not let through: one element beyond an end, or before a start."""
    x, out = tour.place(tour.numbers(13)), tour.room(14, F32)
    tour.call("unison_exp", x.ctypes.data - 4, out, 14) if tour.kind == "start" else tour.call("unison_exp", x, out, 14)


def main(library: str, kind: str, threads: str, *stops: str) -> None:
    """Visit every stop, or those that are named."""
    tour = Tour(library, kind)
    tour.call("unison_set_threads", int(threads), returns=ctypes.c_int)
    chosen = [stop for stop in (*STOPS, too_far) if stop.__name__ in stops] if stops else STOPS
    digests = {stop.__name__: tour.visit(stop) for stop in chosen}
    print(json.dumps({"called": sorted(tour.called), "digests": digests}))


if __name__ == "__main__":
    main(*sys.argv[1:])
