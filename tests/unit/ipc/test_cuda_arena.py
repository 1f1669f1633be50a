"""The CUDA IPC backend, as far as a machine without a GPU goes: descriptions, refusals, structures."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from harness.tiny_directory import write_tiny_directory
from harness.tiny_model import tiny_spec
from unison.engine.models.layout import WeightLayout
from unison.ipc.arena.arena import WeightArena
from unison.ipc.arena.cuda import CUDA_CODEC, HANDLE_BYTES, CudaArena, CudaBuffer, IpcHandle, device_of
from unison.ipc.errors import ArenaError, WireError
from unison.workers.gpu.weights import arena_layout, fill_arena

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")


def test_a_description_crosses_with_named_fields() -> None:
    """P31: handles travel as named fields with the device's UUID, never as positions in a tuple."""
    arena = CudaArena("GPU-1", 7, (CudaBuffer(bytes(range(64)), 1 << 21), CudaBuffer(bytes(64), 1 << 21)))
    frame = CUDA_CODEC.encode(0, arena)
    assert CUDA_CODEC.decode(frame) == (0, arena)
    for name in (b"device_uuid", b"owner_pid", b"handle", b"num_bytes"):
        assert name in frame


@pytest.mark.parametrize("handle", [b"", bytes(HANDLE_BYTES - 1), bytes(HANDLE_BYTES + 1)])
def test_a_handle_of_another_length_is_refused(handle: bytes) -> None:
    with pytest.raises(ArenaError, match="CUDA IPC handle has 64"):
        CudaArena("GPU-1", 7, (CudaBuffer(handle, 1),))


def test_the_handle_is_the_runtime_s_structure() -> None:
    """cudaIpcMemHandle_t: 64 bytes, passed by value, zero bytes inside included."""
    assert ctypes.sizeof(IpcHandle) == HANDLE_BYTES
    raw = bytes([0, 1, 0, 255] * 16)
    handle = IpcHandle.from_buffer_copy(raw)
    assert ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES) == raw


@without_gpu
def test_a_device_that_is_not_here_is_named() -> None:
    """P31: checked at the start, with what to do, before anything is allocated."""
    layout = arena_layout(WeightLayout(tiny_spec(), torch.bfloat16), "tiny")
    with pytest.raises(ArenaError, match="no CUDA device here; use device=cpu"):
        WeightArena.create(layout, 2, "cuda")
    with pytest.raises(ArenaError, match="GPU-7, which this process doesn't see"):
        device_of("GPU-7")


@without_gpu
def test_attaching_to_a_device_arena_without_the_device(tmp_path: Path) -> None:
    """P32: a refused attachment gives everything back."""
    write_tiny_directory(tmp_path)
    arena = fill_arena(tmp_path, WeightLayout(tiny_spec(), torch.bfloat16), "tiny", 2)
    description = CUDA_CODEC.encode(0, CudaArena("GPU-1", 7, (CudaBuffer(bytes(64), 8), CudaBuffer(bytes(64), 8))))
    for bad, error in ((description, ArenaError), (b"nonsense", WireError)):
        with pytest.raises(error):
            WeightArena.attach(os.dup(arena.fd), bad)
    arena.close()
