"""KVPool: which blocks are free, how often each is used, and the block table.

Owns: reference counts, the free list, rows and the table. Knows nothing of tokens or tensors. Called by the prefix
index and by RequestCaches.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...ipc.errors import CapacityError, InvariantError
from .strategy import AllocationStrategy


class RowPool:
    """Rows of the block table: one per running sequence."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def try_take(self) -> int | None:
        """A row, or None."""
        return self._free.pop() if self._free else None

    def release(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)

    def check_invariants(self) -> None:
        """Raise InvariantError where a row is free twice."""
        if len(set(self._free)) != len(self._free):
            raise InvariantError("a row is free twice")


class KVPool:
    """Blocks with reference counts, taken all or nothing.

    Invariants: a block is free exactly when its count is 0; `block_tables` is -1 where nothing is mapped.
    """

    def __init__(self, strategy: AllocationStrategy, num_rows: int, max_blocks_per_row: int) -> None:
        self._strategy = strategy
        self._rows = RowPool(num_rows)
        self._refcounts = [0] * strategy.num_blocks
        self._free = list(range(strategy.num_blocks - 1, -1, -1))
        self._is_indexed = bytearray(strategy.num_blocks)
        self._num_idle = 0
        self.block_tables = np.full((num_rows, max_blocks_per_row), -1, dtype=np.int32)
        """int32 [rows, blocks per row]: the block of each run of positions (S13)."""

    @property
    def strategy(self) -> AllocationStrategy:
        """How slots are cut into blocks (S23)."""
        return self._strategy

    @property
    def rows(self) -> RowPool:
        """Rows of the block table (S23)."""
        return self._rows

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks that the prefix index alone holds."""
        return self._num_idle

    def refcount(self, block: int) -> int:
        """How many hold the block."""
        return self._refcounts[block]

    def try_take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None and nothing changed."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refcounts[block] = 1
        return taken

    def take(self, count: int) -> list[int]:
        """Like `try_take`; raises CapacityError where there are too few."""
        taken = self.try_take(count)
        if taken is None:
            raise CapacityError(
                f"{count} KV blocks were asked for, {len(self._free)} are free; wait for requests to end"
            )
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each block."""
        for block in blocks:
            count = self._refcounts[block]
            if count < 1:
                raise InvariantError(f"block {block} is free and can't be shared")
            self._refcounts[block] = count + 1
            if count == 1 and self._is_indexed[block]:
                self._num_idle -= 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each block; the last one frees it."""
        for block in blocks:
            count = self._refcounts[block] - 1
            if count < 0:
                raise InvariantError(f"block {block} is released more often than it was taken")
            self._refcounts[block] = count
            if count == 0:
                self._free.append(block)
            elif count == 1 and self._is_indexed[block]:
                self._num_idle += 1

    def enter_index(self, block: int) -> None:
        """The prefix index holds this block from now on, besides a present holder."""
        self.share((block,))
        self._is_indexed[block] = 1

    def leave_index(self, block: int) -> None:
        """The prefix index lets go of this block."""
        if not self._is_indexed[block]:
            raise InvariantError(f"block {block} isn't in the prefix index")
        if self._refcounts[block] == 1:
            self._num_idle -= 1
        self._is_indexed[block] = 0
        self.release((block,))

    def check_invariants(self) -> None:
        """Raise InvariantError where counts, free list and index flags disagree."""
        free = set(self._free)
        if len(free) != len(self._free) or any(
            (count == 0) != (block in free) for block, count in enumerate(self._refcounts)
        ):
            raise InvariantError("the free list and the reference counts disagree")
        idle = sum(1 for block, count in enumerate(self._refcounts) if count == 1 and self._is_indexed[block])
        if idle != self._num_idle or any(self._is_indexed[block] for block in free):
            raise InvariantError(f"{idle} blocks are idle in the index, {self._num_idle} are counted")
        self._rows.check_invariants()
