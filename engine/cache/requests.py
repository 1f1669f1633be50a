"""RequestCaches: the KV of the running sequences: opened, grown, forked, published, closed.

Owns: every RequestCache, the prefix index, and the one decision on steady decode (R4, S5). Knows nothing of scheduling
or tensors: it says which blocks to copy, it copies none. Called by the scheduler (life) and the executor (`bind`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ...ipc.errors import InvariantError
from ...ipc.types import VersionSpan
from .pool import KVPool
from .prefix import PrefixIndex
from .strategy import BlockCopy, RequestCache


@dataclass(frozen=True, eq=False)
class Binding:
    """What the executor may take over from the step before."""

    is_steady: bool
    """True where the very same sequences, in the same order, ran in the step before."""
    rows: np.ndarray
    """int64 [R]: rows of the block table."""
    tables_changed: bool
    """True where one of these rows maps other blocks than in the step before."""


class RequestCaches:
    """The requests' side of the pool.

    Invariant: a block's references are the open caches that list it, plus one where the prefix index holds it.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.index = PrefixIndex(pool)
        self._block_size = pool.strategy.block_size
        self._open: list[RequestCache] = []
        self._bound: tuple[Hashable, ...] | None = None
        self._bound_rows = np.zeros(0, dtype=np.int64)
        self._tables_changed = False

    # ---- life --------------------------------------------------------------------------------------------------------

    def try_open(self, tokens: Sequence[int], version: int, reuse: bool) -> RequestCache | None:
        """A cache for a sequence of these tokens, beginning with what the index knows of them; None without a free row.

        At least the last token stays to be computed, since its logits are needed.
        """
        row = self.pool.rows.try_take()
        if row is None:
            return None
        can_reuse = reuse and self.pool.strategy.can_share
        blocks = self.index.match(version, tokens, len(tokens) - 1) if can_reuse else []
        self.pool.share(blocks)
        num_tokens = len(blocks) * self._block_size
        spans = [VersionSpan(version, 0, num_tokens)] if blocks else []
        return self._add(RequestCache(row, blocks, num_tokens, version, len(blocks), spans))

    def try_fork(self, cache: RequestCache) -> RequestCache | None:
        """A second holder of all of `cache`'s blocks; whoever writes into a shared one first copies it."""
        row = self.pool.rows.try_take() if self.pool.strategy.can_share else None
        if row is None:
            return None
        self.pool.share(cache.blocks)
        fork = RequestCache(
            row, list(cache.blocks), cache.num_tokens, cache.version, cache.num_published_blocks, list(cache.kv_spans)
        )
        return self._add(fork)

    def _add(self, cache: RequestCache) -> RequestCache:
        self.pool.block_tables[cache.row, : len(cache.blocks)] = cache.blocks
        self._open.append(cache)
        return cache

    def close(self, cache: RequestCache) -> None:
        """Give back row and blocks."""
        if not cache.is_open:
            raise InvariantError(f"the cache of row {cache.row} is closed twice")
        cache.is_open = False
        self._open.remove(cache)
        self.pool.release(cache.blocks)
        self.pool.block_tables[cache.row, : len(cache.blocks)] = -1
        self.pool.rows.release(cache.row)

    # ---- growth ------------------------------------------------------------------------------------------------------

    def try_extend(self, cache: RequestCache, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Room to write positions num_tokens(cache) … num_tokens-1, or None and nothing changed.

        Returns the copies that must happen before the write: blocks that others hold too are replaced (copy-on-write).
        """
        blocks, size = cache.blocks, self._block_size
        first = cache.num_tokens // size
        held = len(blocks)
        if num_tokens <= held * size and first == held - 1 and self.pool.refcount(blocks[first]) == 1:
            return ()
        shared = [index for index in range(first, held) if self.pool.refcount(blocks[index]) > 1]
        missing = max(0, self.pool.strategy.blocks_for(num_tokens) - held)
        if held + missing > self.pool.block_tables.shape[1]:
            return None
        fresh = self._take(len(shared) + missing)
        if fresh is None:
            return None
        copies = []
        for index in shared:
            target = fresh.pop()
            if index * size < cache.num_tokens:
                copies.append(BlockCopy(blocks[index], target))
            self.pool.release((blocks[index],))
            blocks[index] = target
        blocks.extend(fresh)
        self.pool.block_tables[cache.row, first : len(blocks)] = blocks[first:]
        self._tables_changed = True
        return tuple(copies)

    def _take(self, count: int) -> list[int] | None:
        short = count - self.pool.num_free
        if short > 0 and self.index.num_evictable >= short:
            self.index.evict(short)
        return self.pool.try_take(count)

    def commit(self, cache: RequestCache, num_tokens: int, version: int) -> None:
        """Positions up to `num_tokens` are now materialised, by `version` (V3)."""
        first = cache.num_tokens
        if num_tokens < first:
            raise InvariantError(f"row {cache.row} has {first} tokens and can't shrink to {num_tokens}")
        if version != cache.version:
            cache.version = None
        spans = cache.kv_spans
        if spans and spans[-1].version == version:
            first = spans.pop().first
        spans.append(VersionSpan(version, first, num_tokens))
        cache.num_tokens = num_tokens

    def publish(self, cache: RequestCache, tokens: Sequence[int]) -> None:
        """Offer the whole materialised blocks to the index; KV of several versions is nobody's prefix (V4).

        Shapes: tokens [at least num_tokens].
        """
        whole = cache.num_tokens // self._block_size
        if cache.version is not None and self.pool.strategy.can_share and whole:
            self.index.publish(cache.version, tokens, cache.blocks[:whole])
        cache.num_published_blocks = whole

    def forget_version(self, ordinal: int) -> None:
        """A version is gone: its blocks serve nobody any more."""
        self.index.forget(ordinal)

    # ---- room --------------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a sequence could take: free ones, and those that only the index holds."""
        return self.pool.num_free + self.index.num_evictable

    def blocks_needed(self, cache: RequestCache | None, num_tokens: int) -> int:
        """Blocks that are missing for `num_tokens` positions."""
        held = len(cache.blocks) if cache is not None else 0
        return max(0, self.pool.strategy.blocks_for(num_tokens) - held)

    # ---- steady decode -----------------------------------------------------------------------------------------------

    def bind(self, identities: tuple[Hashable, ...], caches: Sequence[RequestCache]) -> Binding:
        """The sequences of a pure decode step; steady exactly if they are those of the bind before (S1, S5, S6).

        Identities are (request id, sample index, incarnation): a recycled row never passes for its former owner.
        """
        is_steady = identities == self._bound
        if not is_steady:
            self._bound = identities
            self._bound_rows = np.array([cache.row for cache in caches], dtype=np.int64)
        changed, self._tables_changed = self._tables_changed, False
        return Binding(is_steady, self._bound_rows, changed or not is_steady)

    def unbind(self) -> None:
        """The step was no pure decode, or the weights changed: the next bind is not steady."""
        self._bound = None

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InvariantError where counts, tables or spans disagree with the open caches; for tests."""
        self.pool.check_invariants()
        self.index.check_invariants()
        counts = [0] * self.pool.strategy.num_blocks
        for block in self.index.blocks():
            counts[block] += 1
        for cache in self._open:
            for block in cache.blocks:
                counts[block] += 1
            table = self.pool.block_tables[cache.row]
            if list(table[: len(cache.blocks)]) != cache.blocks or (table[len(cache.blocks) :] != -1).any():
                raise InvariantError(f"the block table's row {cache.row} isn't what its cache holds")
            if cache.num_tokens > len(cache.blocks) * self._block_size:
                raise InvariantError(f"row {cache.row} has more tokens than its blocks hold")
            if (cache.kv_spans[-1].end if cache.kv_spans else 0) != cache.num_tokens:
                raise InvariantError(f"row {cache.row}: version spans don't cover its tokens")
        if any(self.pool.refcount(block) != count for block, count in enumerate(counts)):
            raise InvariantError("a block's references aren't its holders")
        if self.pool.rows.num_free + len(self._open) != self.pool.rows.num_rows:
            raise InvariantError("a row is lost")
