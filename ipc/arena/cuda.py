"""CudaBuffers: weight buffers in device memory, allocated by the worker and mapped by publishers through CUDA IPC.

Each buffer is one plain cudaMalloc of its own: torch's caching allocator, its reference-count files, its expandable
segments and its limit of interprocess events play no part (P30, P31). A buffer is opened once per process and stays
mapped, so captured graphs keep their addresses (P14). The owner of the memory is the worker; a publisher's mapping ends
with the publisher. Devices are told apart by UUID, since an index means something else in every process.

The version protocol needs no CUDA event: the publisher waits for its device before it hashes and seals, and the engine
starts reading after the message that follows.

Owns: allocation, handles, mappings. Called by WeightArena. Source: CUDA Runtime API, "Device Management" and "Memory
Management" (cudaIpcGetMemHandle, cudaIpcOpenMemHandle).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArenaError, CapacityError
from ..wire import Codec
from .header import ArenaHeader

HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE."""
_LAZY_PEER_ACCESS = 1
_SUCCESS, _OUT_OF_MEMORY = 0, 2


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@dataclass(frozen=True)
class CudaBuffer:
    """How another process opens one buffer."""

    handle: bytes
    """cudaIpcMemHandle_t of the allocation."""
    num_bytes: int
    """Its length."""


@dataclass(frozen=True)
class CudaArena:
    """How another process opens all buffers."""

    device_uuid: str
    """The GPU that holds them."""
    owner_pid: int
    """The process that allocated them, which can't open its own handles."""
    buffers: tuple[CudaBuffer, ...]
    """By index."""

    def __post_init__(self) -> None:
        for at, buffer in enumerate(self.buffers):
            if len(buffer.handle) != HANDLE_BYTES or buffer.num_bytes <= 0:
                raise ArenaError(
                    f"buffer {at} has a handle of {len(buffer.handle)} bytes for {buffer.num_bytes} bytes; a CUDA IPC "
                    f"handle has {HANDLE_BYTES}"
                )


CUDA_CODEC = Codec((CudaArena,))


class CudaRuntime:
    """The few calls of libcudart that are needed, with errors that say what failed. Works on the current device."""

    def __init__(self) -> None:
        """Find the runtime that torch has loaded.

        Raises:
            ArenaError: this torch has no CUDA, or its runtime can't be found.
        """
        if not torch.cuda.is_available() or torch.version.cuda is None:
            raise ArenaError("there is no CUDA device here; use device=cpu, whose arena is a memfd")
        name = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise ArenaError(f"{name}, the CUDA runtime of this torch, can't be loaded: {error}") from error
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), IpcHandle, ctypes.c_uint)

    def malloc(self, num_bytes: int) -> int:
        """Address of a new allocation.

        Raises:
            CapacityError: the device has no such memory left.
        """
        pointer = ctypes.c_void_p()
        code = self._library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        if code == _OUT_OF_MEMORY:
            raise CapacityError(f"{num_bytes} bytes of device memory for a weight buffer aren't to be had")
        self._check("cudaMalloc", code)
        assert pointer.value is not None
        return pointer.value

    def free(self, address: int) -> None:
        """Give an allocation back."""
        self._check("cudaFree", self._library.cudaFree(ctypes.c_void_p(address)))

    def export(self, address: int) -> bytes:
        """The IPC handle of an allocation."""
        handle = IpcHandle()
        code = self._library.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address))
        self._check("cudaIpcGetMemHandle", code)
        return ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns its address here."""
        own = IpcHandle.from_buffer_copy(handle)
        pointer = ctypes.c_void_p()
        code = self._library.cudaIpcOpenMemHandle(ctypes.byref(pointer), own, _LAZY_PEER_ACCESS)
        self._check("cudaIpcOpenMemHandle", code)
        assert pointer.value is not None
        return pointer.value

    def close(self, address: int) -> None:
        """Unmap another process's allocation."""
        self._check("cudaIpcCloseMemHandle", self._library.cudaIpcCloseMemHandle(ctypes.c_void_p(address)))

    def _check(self, call: str, code: int) -> None:
        if code != _SUCCESS:
            text = self._library.cudaGetErrorString(code)
            raise ArenaError(f"{call} failed with {code}: {(text or b'?').decode()}")


class _DeviceMemory:
    """A run of device bytes as torch reads it (CUDA Array Interface, version 3)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class CudaBuffers:
    """One process's view of the device buffers. Life: created by the worker or opened by a publisher → closed."""

    def __init__(self, header: ArenaHeader, device: torch.device, addresses: list[int], is_owner: bool) -> None:
        """Use `create` or `open`."""
        self._layout = header.layout
        self._device = device
        self._addresses = addresses
        self._is_owner = is_owner
        self._runtime = CudaRuntime()
        self._num_bytes = header.stride_bytes
        self._aside = torch.cuda.Stream(device)
        self._staging: Tensor | None = None

    @staticmethod
    def create(header: ArenaHeader, device: torch.device) -> CudaBuffers:
        """Allocate every buffer on `device`.

        Raises:
            ArenaError: there is no CUDA device. CapacityError: it has no memory left.
        """
        runtime = CudaRuntime()
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        addresses: list[int] = []
        with torch.cuda.device(device):
            torch.cuda.init()
            try:
                for _ in range(header.num_buffers):
                    addresses.append(runtime.malloc(header.stride_bytes))
            except BaseException:
                for address in addresses:
                    runtime.free(address)
                raise
        return CudaBuffers(header, device, addresses, is_owner=True)

    @staticmethod
    def open(header: ArenaHeader, description: bytes) -> CudaBuffers:
        """Map the buffers of another process.

        Raises:
            ArenaError: the GPU isn't visible here, the lengths don't fit the header, or CUDA refuses.
        """
        _, arena = CUDA_CODEC.decode(description)
        runtime = CudaRuntime()
        device = device_of(arena.device_uuid)
        if len(arena.buffers) != header.num_buffers or any(b.num_bytes != header.stride_bytes for b in arena.buffers):
            raise ArenaError("the device buffers aren't those of this arena's header; ask for the arena again")
        addresses: list[int] = []
        with torch.cuda.device(device):
            torch.cuda.init()
            try:
                for buffer in arena.buffers:
                    addresses.append(runtime.open(buffer.handle))
            except BaseException:
                for address in addresses:
                    runtime.close(address)
                raise
        return CudaBuffers(header, device, addresses, is_owner=False)

    def vector(self, buffer: int, is_writable: bool) -> Tensor:
        """One buffer [elements] on the device. Device memory can't be mapped read-only: `is_writable` False is a
        promise of the engine's code, and the digest of every version is what checks it."""
        del is_writable
        with torch.inference_mode(False):
            memory = _DeviceMemory(self._addresses[buffer], self._layout.buffer_bytes)
            raw = torch.as_tensor(memory, device=self._device)
            vector: Tensor = raw.view(getattr(torch, self._layout.dtype))
            return vector

    def hashable(self, tensor: Tensor) -> memoryview:
        """The tensor's bytes, copied to pinned host memory on the stream of `aside`; valid until the next call."""
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        if self._staging is None or self._staging.numel() < flat.numel():
            self._staging = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)
        host = self._staging[: flat.numel()]
        host.copy_(flat, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return host.numpy().data.cast("B")

    def fence(self) -> None:
        """Wait for everything that this process has queued on the device."""
        torch.cuda.synchronize(self._device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A stream of its own: hashing neither waits for a forward pass nor holds one up."""
        with torch.cuda.stream(self._aside):
            yield

    def describe(self) -> bytes:
        """What `open` needs, as bytes; of an opened arena too, though its handles can't be exported again."""
        if not self._is_owner:
            return b"opened"
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        buffers = tuple(CudaBuffer(self._runtime.export(address), self._num_bytes) for address in self._addresses)
        return CUDA_CODEC.encode(0, CudaArena(uuid, os.getpid(), buffers))

    def close(self) -> None:
        """The owner frees, others unmap. Tensors given out must be gone."""
        while self._addresses:
            address = self._addresses.pop()
            if self._is_owner:
                self._runtime.free(address)
            else:
                self._runtime.close(address)


def device_of(uuid: str) -> torch.device:
    """The device with this UUID, under whatever index it has here.

    Raises:
        ArenaError: it isn't visible to this process.
    """
    visible = {}
    for index in range(torch.cuda.device_count()):
        visible[str(torch.cuda.get_device_properties(index).uuid)] = index
    if uuid not in visible:
        raise ArenaError(
            f"the arena lies on GPU {uuid}, which this process doesn't see (CUDA_VISIBLE_DEVICES); it sees "
            f"{', '.join(visible) or 'none'}"
        )
    return torch.device("cuda", visible[uuid])
