"""CudaAttention's promises to CUDA graphs, checked on whatever device there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from unison.engine.attention import DecodeDescriptor, LayerKV, PrefillDescriptor
from unison.engine.attention.cuda import CudaAttention

# Operations that wait for the device or whose result's shape depends on contents.
FORBIDDEN = ("_local_scalar_dense", "nonzero", "item", "masked_select", "unique", "_to_copy.cpu", "is_nonzero")


class NoSynchronisation(TorchDispatchMode):
    """Fails on any operation that a captured graph can't hold."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in FORBIDDEN), f"{func} can't be captured"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [0, 20])
def test_nothing_waits_for_the_device(sequences: Callable, window: int) -> None:
    """S14: store, decode and prefill hold no synchronisation and no data-dependent shape."""
    case = sequences([1, 33, 70], window=window)
    backend = CudaAttention()
    slots = case.slots()
    slots[3] = -1
    lengths = torch.tensor([1, 33, 70])
    descriptor = DecodeDescriptor(case.tables, case.block_size, lengths, 80)
    q = case.q[:3].contiguous()
    case.store(backend)
    with NoSynchronisation():
        backend.store(case.k, case.v, slots, case.kv)
        backend.forward(q, case.k[:3], case.v[:3], descriptor, case.layer, case.kv)
        backend.forward(case.q, case.k, case.v, whole_prefill(case), case.layer, case.kv)


def whole_prefill(case: Any) -> PrefillDescriptor:
    starts = torch.tensor(case.starts, dtype=torch.int32)
    return PrefillDescriptor(case.tables, case.block_size, starts, torch.zeros(3, dtype=torch.int64), 70, 70)


def test_padding_rows_disturb_nobody(sequences: Callable) -> None:
    """S14: rows of length 0 with unmapped tables beside real ones, as in a captured batch."""
    case = sequences([33, 70])
    backend = CudaAttention()
    case.store(backend)
    wanted = case.decode(backend, [(0, 32), (1, 69)])
    tables = torch.cat((case.tables, torch.full_like(case.tables, -1)))
    descriptor = DecodeDescriptor(tables, case.block_size, torch.tensor([33, 70, 0, 0]), 70)
    q = torch.cat((case.q[[32, 102]], torch.full((2, 6, 16), float("nan"))))
    out = backend.forward(q, q[:, :2], q[:, :2], descriptor, case.layer, case.kv)
    torch.testing.assert_close(out[:2], wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_equals_eager(sequences: Callable, dtype: torch.dtype) -> None:
    """A captured store and decode, replayed with other contents, gives the bits of the eager calls."""
    case = sequences([33, 70, 64], dtype=dtype, dim=64)
    device = torch.device("cuda")
    backend = CudaAttention()
    kv = LayerKV(case.kv.k_SHD.to(device), case.kv.v_SHD.to(device))
    q, k, v, slots, tables = (x.to(device) for x in (case.q, case.k, case.v, case.slots(), case.tables))
    backend.store(k, v, slots, kv)
    index = torch.tensor([20, 50, 110], device=device)
    lengths = torch.tensor([21, 18, 8], device=device)
    descriptor = DecodeDescriptor(tables, case.block_size, lengths, 80)
    static_q, static_k, static_v, static_slots = q[index], k[index], v[index], slots[index]

    def step() -> torch.Tensor:
        backend.store(static_k, static_v, static_slots, kv)
        return backend.forward(static_q, static_k, static_v, descriptor, case.layer, kv)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for shift in (0, 3, 7):
        static_q.copy_(q[index + shift])
        lengths.copy_(torch.tensor([21, 18, 8]) + shift)
        graph.replay()
        assert torch.equal(out, step())
