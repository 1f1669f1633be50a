"""AllocationStrategy: how slots are cut into blocks, and what a sequence holds of them.

Owns: that arithmetic, and the per-sequence state `RequestCache`. Knows nothing of which blocks are free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from ...ipc.types import VersionSpan


@dataclass(frozen=True)
class BlockCopy:
    """Copy one block's KV before the forward pass: copy-on-write."""

    src: int
    """Block read."""
    dst: int
    """Block written."""


@dataclass(slots=True, eq=False)
class RequestCache:
    """What one running sequence holds of the KV pool."""

    row: int
    """Its row of the block table."""
    blocks: list[int]
    """Its blocks, in the order of positions."""
    num_tokens: int
    """Leading positions whose KV is materialised."""
    version: int | None
    """Policy version that computed all of them; None once they are of several."""
    num_published_blocks: int = 0
    """Leading blocks that the prefix index has seen."""
    kv_spans: list[VersionSpan] = field(default_factory=list)
    """Which version computed which position; tiles [0, num_tokens)."""
    is_open: bool = True
    """False once closed."""


class AllocationStrategy(ABC):
    """How many blocks there are, how large, and how many a sequence needs."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Slots per block."""

    @property
    @abstractmethod
    def can_share(self) -> bool:
        """True where sequences may hold the same block."""

    @abstractmethod
    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions take."""


class PagedStrategy(AllocationStrategy):
    """Small blocks on demand; equal beginnings are shared."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Slots per block."""
        return self._block_size

    @property
    def can_share(self) -> bool:
        """Always."""
        return True

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions take."""
        return -(-num_tokens // self._block_size)


class ContiguousStrategy(AllocationStrategy):
    """One run of slots per sequence, as long as the longest sequence; nothing is shared."""

    def __init__(self, num_rows: int, max_len: int) -> None:
        self._num_rows, self._max_len = num_rows, max_len

    @property
    def num_blocks(self) -> int:
        """Runs of the pool."""
        return self._num_rows

    @property
    def block_size(self) -> int:
        """Slots per run."""
        return self._max_len

    @property
    def can_share(self) -> bool:
        """Never."""
        return False

    def blocks_for(self, num_tokens: int) -> int:
        """One run, or more where `num_tokens` exceeds it (which no pool grants)."""
        return -(-num_tokens // self._max_len)
