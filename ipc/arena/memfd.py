"""WeightArena: weight buffers in one memfd, mapped by the engine (read-only) and by who publishes (writable).

Life of a buffer: free → writing(owner) → sealed(version) → live → draining → free; docs/weights.md has the table of who
holds which lock in each state and what happens when the owner dies there. Invariant V2: a buffer is written only under
its exclusive lock, and the engine holds a shared lock on every buffer that a forward pass may read, so no forward ever
reads what anyone may write. The pages are allocated when the arena is created, and the memory has no name.

Owns: the memory, the mappings, the locks. Knows nothing of models, messages or of when to flip. Called by the worker
(create, attach, hold, set_live) and by publishers (attach, write, seal).
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ArenaError
from ..memory import SharedMemory
from ..types import Manifest, PolicyVersion, TensorEntry
from .header import BUFFER_ALIGNMENT_BYTES, MAX_BUFFERS, ArenaHeader, header_bytes
from .layout import ArenaLayout, BufferRecord, BufferState
from .locks import BufferLocks


class WeightArena:
    """One process's view of the arena. Threads: locks and states belong to one thread; `manifest` may run in any."""

    def __init__(self, memory: SharedMemory) -> None:
        """Attach; takes over `memory`, which `close` closes."""
        self._memory = memory
        self._maps: dict[tuple[int, bool], mmap.mmap] = {}
        self._claimed: set[int] = set()
        with memory.map(writable=False, length=mmap.PAGESIZE) as start:
            length = ArenaHeader.peek_bytes(bytes(start))
        self._pages = memory.map(writable=True, length=length)
        self.header = ArenaHeader(self._pages)
        self.locks = BufferLocks(memory.fd)

    @staticmethod
    def create(layout: ArenaLayout, num_buffers: int = 2) -> WeightArena:
        """Allocate all buffers now.

        Raises:
            ArenaError: fewer than 2 buffers, or more than there can be. CapacityError: there is no memory for them.
        """
        if not 2 <= num_buffers <= MAX_BUFFERS:
            raise ArenaError(f"{num_buffers} buffers were asked for; an arena has 2 (live and next) to {MAX_BUFFERS}")
        stride = -(-layout.buffer_bytes // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
        first = header_bytes(layout)
        memory = SharedMemory.create("unison-weights", first + num_buffers * stride)
        with memory.map(writable=True, length=first) as pages:
            ArenaHeader.format(pages, layout, num_buffers, stride)
        return WeightArena(memory)

    @staticmethod
    def attach(fd: int) -> WeightArena:
        """The arena behind a descriptor that came from another process; takes the descriptor over.

        Raises:
            ArenaError: it isn't one.
        """
        return WeightArena(SharedMemory.attach(fd))

    @property
    def fd(self) -> int:
        """The memfd; whoever holds it keeps the weights alive."""
        return self._memory.fd

    @property
    def layout(self) -> ArenaLayout:
        """Where the tensors lie in each buffer."""
        return self.header.layout

    @property
    def num_buffers(self) -> int:
        """Buffers in all."""
        return self.header.num_buffers

    def record(self, buffer: int) -> BufferRecord:
        """What the header says of a buffer, with a dead writer's claim read as free."""
        record = self.header.record(buffer)
        if record.state is BufferState.WRITING and self._is_abandoned(buffer):
            return BufferRecord(BufferState.FREE, record.owner_pid, None)
        return record

    def _is_abandoned(self, buffer: int) -> bool:
        return buffer not in self._claimed and not self.locks.is_held_by_others(buffer)

    # ---- the engine's side -------------------------------------------------------------------------------------------

    def flat(self, buffer: int) -> Tensor:
        """The buffer as one read-only vector [elements] of the layout's dtype; mapped once."""
        return self._vector(buffer, is_writable=False)

    def hold(self, buffer: int) -> None:
        """Pin a buffer against writers for as long as a forward pass may read it.

        Raises:
            ArenaError: a writer has it.
        """
        if not self.locks.try_shared(buffer):
            raise ArenaError(f"buffer {buffer} is being written by process {self.header.record(buffer).owner_pid}")

    def drop(self, buffer: int) -> None:
        """Nobody here reads the buffer any more: it is free."""
        self.header.set_state(buffer, BufferState.FREE)
        self.locks.release(buffer)

    def set_live(self, buffer: int) -> None:
        """The flip, as a process that starts later will see it: the former live buffer drains."""
        former = self.header.live_buffer
        self.header.set_state(buffer, BufferState.LIVE)
        self.header.set_live(buffer)
        if former is not None and former != buffer:
            self.header.set_state(former, BufferState.DRAINING)

    # ---- the publisher's side ----------------------------------------------------------------------------------------

    def write(self, buffer: int) -> dict[str, Tensor]:
        """Claim a buffer and get its tensors, writable, by name; aliases included.

        Raises:
            ArenaError: it is live, or someone reads or writes it.
        """
        if self.header.live_buffer == buffer or not self.locks.try_exclusive(buffer):
            state = self.header.record(buffer).state.name.lower()
            raise ArenaError(f"buffer {buffer} is in use ({state}); reserve one")
        self._claimed.add(buffer)
        self.header.set_state(buffer, BufferState.WRITING)
        return self.tensors(self._vector(buffer, is_writable=True))

    def seal(self, buffer: int, ordinal: int) -> tuple[PolicyVersion, Manifest]:
        """Hash what was written and mark the buffer complete; from here on it isn't written any more."""
        if buffer not in self._claimed:
            raise ArenaError(f"buffer {buffer} isn't being written by this process; `write` it first")
        manifest = self.manifest(buffer)
        version = PolicyVersion(ordinal, manifest.digest)
        self.header.seal(buffer, version)
        self._claimed.discard(buffer)
        self.locks.try_shared(buffer)
        return version, manifest

    def let_go(self, buffer: int) -> None:
        """End this process's claim or pin on a buffer: published (the engine holds it now), refused or given up."""
        if buffer in self._claimed:
            self._claimed.discard(buffer)
            self.header.set_state(buffer, BufferState.FREE)
        self.locks.release(buffer)

    # ---- both --------------------------------------------------------------------------------------------------------

    def tensors(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a buffer's vector, by name."""
        views = {}
        for tensor in self.layout.tensors:
            first = tensor.offset_bytes // flat.element_size()
            count = self.layout.num_bytes(tensor) // flat.element_size()
            views[tensor.name] = flat[first : first + count].view(tensor.shape)
        return views

    def manifest(self, buffer: int, while_true: Callable[[], bool] = lambda: True) -> Manifest:
        """Hash every tensor of a buffer (V1). `while_true` is asked between tensors; False ends it with ArenaError.

        Source: xxHash, XXH3 128-bit variant; the GIL is free while a tensor is hashed.
        """
        layout, raw = self.layout, memoryview(self._mapping(buffer, buffer in self._claimed))
        entries: dict[str, TensorEntry] = {}
        try:
            for tensor in layout.tensors:
                if not while_true():
                    raise ArenaError("hashing was called off")
                if tensor.alias_of is not None:
                    twin = entries[tensor.alias_of]
                    entries[tensor.name] = TensorEntry(
                        tensor.name, tensor.shape, layout.dtype, twin.digest, tensor.alias_of
                    )
                    continue
                data = raw[tensor.offset_bytes : tensor.offset_bytes + layout.num_bytes(tensor)]
                entries[tensor.name] = TensorEntry.of(tensor.name, tensor.shape, layout.dtype, data)
        finally:
            raw.release()
        return Manifest.of(entries.values())

    def close(self) -> None:
        """Drop locks and mappings. Tensors given out must be gone."""
        self.locks.close()
        self.header.close()
        self._pages.close()
        while self._maps:
            _, mapping = self._maps.popitem()
            try:
                mapping.close()
            except BufferError:  # a tensor still looks at it; it is unmapped when that goes
                pass
        self._memory.close()

    def _vector(self, buffer: int, is_writable: bool) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        with warnings.catch_warnings(), torch.inference_mode(False):
            # torch warns that it can't keep anyone from writing to read-only memory; the kernel does.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            mapping = self._mapping(buffer, is_writable)
            return torch.frombuffer(mapping, dtype=dtype, count=self.layout.buffer_bytes // dtype.itemsize)

    def _mapping(self, buffer: int, is_writable: bool) -> mmap.mmap:
        key = (buffer, is_writable)
        if key not in self._maps:
            offset = self.header.offset_of(buffer)
            mapping = self._memory.map(writable=is_writable, offset=offset, length=self.header.stride_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                try:
                    mapping.madvise(mmap.MADV_HUGEPAGE)
                except OSError:  # the kernel was built without them, which costs speed and nothing else
                    pass
            self._maps[key] = mapping
        return self._maps[key]
