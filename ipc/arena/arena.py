"""WeightArena: buffers of weights that the engine reads in place and publishers write in place.

Life of a buffer: free → writing(owner) → sealed(version) → live → draining → free; docs/weights.md has the table of who
holds which lock in each state and what happens when the owner dies there. Invariant V2: a buffer is written only under
its exclusive lock, and the engine holds a shared lock on every buffer that a forward pass may read, so no forward ever
reads what anyone may write.

Header and locks lie in a memfd; the buffers lie behind it in the same memfd (CPU, memfd.py) or in device memory that is
shared through CUDA IPC (GPU, cuda.py). Owns: header and locks, and the rules of who may do what. Knows nothing of
models, messages or of when to flip. Called by the worker (create, attach, hold, set_live) and by publishers (attach,
write, seal).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ArenaError
from ..memory import SharedMemory
from ..types import Manifest, PolicyVersion, TensorEntry
from .cuda import CudaBuffers
from .header import MAX_BUFFERS, ArenaHeader, header_bytes
from .layout import ArenaLayout, BufferRecord, BufferState
from .locks import BufferLocks
from .memfd import MemfdBuffers, stride_of


class Buffers(Protocol):
    """Where the buffers' bytes are."""

    def vector(self, buffer: int, is_writable: bool) -> Tensor:
        """One buffer as a vector of the layout's dtype; the same memory at every call."""

    def hashable(self, tensor: Tensor) -> memoryview:
        """A tensor's bytes in host memory."""

    def fence(self) -> None:
        """Wait until what this process has written is there for others."""

    def aside(self) -> AbstractContextManager[None]:
        """Work inside doesn't wait for, nor hold up, a forward pass."""

    def describe(self) -> bytes:
        """What another process needs besides the memfd, for `attach`."""

    def close(self) -> None:
        """Unmap."""


class WeightArena:
    """One process's view of the arena. Threads: locks and states belong to one thread; `manifest` may run in any."""

    def __init__(self, memory: SharedMemory, open_buffers: Callable[[SharedMemory, ArenaHeader], Buffers]) -> None:
        """Use `create` or `attach`; takes over `memory`, which `close` closes."""
        self._memory = memory
        self._claimed: set[int] = set()
        undo = ExitStack()
        undo.callback(memory.close)
        with undo:
            with memory.map(writable=False, length=mmap.PAGESIZE) as start:
                length = ArenaHeader.peek_bytes(bytes(start))
            self._pages = memory.map(writable=True, length=length)
            undo.callback(self._pages.close)
            self.header = ArenaHeader(self._pages)
            undo.callback(self.header.close)
            self.locks = BufferLocks(memory.fd)
            undo.callback(self.locks.close)
            self.buffers = open_buffers(memory, self.header)
            undo.pop_all()

    @staticmethod
    def create(layout: ArenaLayout, num_buffers: int = 2, device: str = "cpu") -> WeightArena:
        """Allocate all buffers now, on `cpu` or `cuda[:N]`.

        Raises:
            ArenaError: fewer than 2 buffers, more than there can be, or a device that can't share memory.
            CapacityError: there is no memory for them.
        """
        if not 2 <= num_buffers <= MAX_BUFFERS:
            raise ArenaError(f"{num_buffers} buffers were asked for; an arena has 2 (live and next) to {MAX_BUFFERS}")
        on_host = torch.device(device).type == "cpu"
        stride, first = stride_of(layout), header_bytes(layout)
        memory = SharedMemory.create("unison-weights", first + (num_buffers * stride if on_host else 0))
        with memory.map(writable=True, length=first) as pages:
            ArenaHeader.format(pages, layout, num_buffers, stride)
        if on_host:
            return WeightArena(memory, MemfdBuffers)
        return WeightArena(memory, lambda _, header: CudaBuffers.create(header, torch.device(device)))

    @staticmethod
    def attach(fd: int, description: bytes = b"") -> WeightArena:
        """The arena behind a descriptor that came from another process, which is taken over; `description` came along.

        Raises:
            ArenaError: it isn't one, or its device isn't here.
        """
        memory = SharedMemory.attach(fd)
        if not description:
            return WeightArena(memory, MemfdBuffers)
        return WeightArena(memory, lambda _, header: CudaBuffers.open(header, description))

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
        return self.buffers.vector(buffer, is_writable=False)

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
        return self.tensors(self.buffers.vector(buffer, is_writable=True))

    def seal(self, buffer: int, ordinal: int) -> tuple[PolicyVersion, Manifest]:
        """Hash what was written and mark the buffer complete; from here on it isn't written any more."""
        if buffer not in self._claimed:
            raise ArenaError(f"buffer {buffer} isn't being written by this process; `write` it first")
        self.buffers.fence()
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
        layout = self.layout
        views = self.tensors(self.buffers.vector(buffer, buffer in self._claimed))
        entries: dict[str, TensorEntry] = {}
        with self.buffers.aside():
            for tensor in layout.tensors:
                if not while_true():
                    raise ArenaError("hashing was called off")
                name, shape = tensor.name, tensor.shape
                if tensor.alias_of is not None:
                    digest = entries[tensor.alias_of].digest
                    entries[name] = TensorEntry(name, shape, layout.dtype, digest, tensor.alias_of)
                else:
                    entries[name] = TensorEntry.of(name, shape, layout.dtype, self.buffers.hashable(views[name]))
        return Manifest.of(entries.values())

    def close(self) -> None:
        """Drop locks and mappings; memory that a tensor still looks at goes with the tensor."""
        self.locks.close()
        self.header.close()
        self._pages.close()
        self.buffers.close()
        self._memory.close()
