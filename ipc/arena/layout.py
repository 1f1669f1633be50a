"""ArenaLayout: where every tensor lies in one buffer of the arena, and what the buffer's record says of its content.

Owns: plain descriptions that travel in the arena's own header, so that a publisher needs nothing but the arena's
descriptor. Knows nothing of torch, memory or locks. Called by the arena's backends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import prod

from ..errors import ArenaError
from ..types import PolicyVersion
from ..wire import Codec

ITEM_BYTES = {"bfloat16": 2, "float32": 4}


class BufferState(IntEnum):
    """Where a buffer is in its life: free → writing → sealed → live → draining → free (docs/weights.md)."""

    FREE = 0
    """Nobody reads it, nobody writes it; what it holds counts for nothing."""
    WRITING = 1
    """Its owner writes; if the owner dies, its lock falls and the buffer counts as free."""
    SEALED = 2
    """Complete, with ordinal and digest; not live yet."""
    LIVE = 3
    """New requests start on it."""
    DRAINING = 4
    """Was live; requests, pins or a possible rollback keep it."""


@dataclass(frozen=True)
class ArenaTensor:
    """One tensor's place in a buffer."""

    name: str
    """Hugging Face parameter name."""
    shape: tuple[int, ...]
    """Elements per dimension."""
    offset_bytes: int
    """First byte, from the start of the buffer."""
    alias_of: str | None = None
    """Name of the tensor whose bytes this one is (tied embeddings), or None."""


@dataclass(frozen=True)
class ArenaLayout:
    """All tensors of one buffer."""

    model: str
    """What the weights are for; shown, not interpreted."""
    dtype: str
    """`bfloat16` or `float32`, for every tensor."""
    buffer_bytes: int
    """Bytes from the start of the first tensor to the end of the last."""
    tensors: tuple[ArenaTensor, ...]
    """In order of their offsets, aliases after what they alias."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ArenaError(f"the layout's dtype is {self.dtype!r}; known are {', '.join(ITEM_BYTES)}")
        places = {tensor.name: tensor for tensor in self.tensors}
        if len(places) != len(self.tensors):
            raise ArenaError("the layout names a tensor twice")
        for tensor in self.tensors:
            end = tensor.offset_bytes + self.num_bytes(tensor)
            if tensor.offset_bytes < 0 or tensor.offset_bytes % ITEM_BYTES[self.dtype] or end > self.buffer_bytes:
                raise ArenaError(f"{tensor.name} lies outside the buffer of {self.buffer_bytes} bytes or is misaligned")
            twin = places.get(tensor.alias_of) if tensor.alias_of is not None else tensor
            if twin is None or (twin.offset_bytes, twin.shape) != (tensor.offset_bytes, tensor.shape):
                raise ArenaError(f"{tensor.name} isn't where {tensor.alias_of} is, though it is its alias")

    def num_bytes(self, tensor: ArenaTensor) -> int:
        """Bytes of one tensor."""
        return prod(tensor.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class BufferRecord:
    """What the arena's header says of one buffer."""

    state: BufferState
    """As last written; a dead writer's WRITING is recognised by its missing lock."""
    owner_pid: int
    """Process that wrote the state."""
    version: PolicyVersion | None
    """Ordinal and digest, from SEALED on."""


LAYOUT_CODEC = Codec((ArenaLayout,))
"""Packs the layout into the header."""
