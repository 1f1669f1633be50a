"""NativeAttention: equal bits whatever the phase, batch, chunk, block size, tile and threads; and its refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from unison.engine.attention import DecodeDescriptor, LayerAttention, LayerKV
from unison.engine.attention.native import NativeAttention
from unison.engine.attention.reference import ReferenceAttention
from unison.ipc.errors import InvariantError

LENGTHS = [1, 31, 32, 63, 64, 65, 128, 129, 200]
SPLIT = 64


def chunks_of(lengths: list[int], seed: int, longest: int = 70) -> list[list[tuple[int, int, int]]]:
    """Calls of (row, first, end) that together cover every row in random pieces, in random company."""
    draw = random.Random(seed)
    done, calls = [0] * len(lengths), []
    while any(done[row] < lengths[row] for row in range(len(lengths))):
        waiting = [row for row in range(len(lengths)) if done[row] < lengths[row]]
        call = []
        for row in draw.sample(waiting, draw.randint(1, len(waiting))):
            end = min(lengths[row], done[row] + draw.randint(1, longest))
            call.append((row, done[row], end))
            done[row] = end
        calls.append(call)
    return calls


def by_row(case: Any, calls: list[list[tuple[int, int, int]]], outputs: list[Tensor]) -> Tensor:
    """The outputs of the calls, put into packed order."""
    out = torch.empty_like(case.q)
    for call, output in zip(calls, outputs, strict=True):
        index = torch.cat([torch.arange(case.starts[row] + a, case.starts[row] + b) for row, a, b in call])
        out[index] = output
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (7, 1)])
@pytest.mark.parametrize("window", [0, 50])
def test_chunked_prefill_and_decode_equal_packed_in_bits(
    native: Callable, sequences: Callable, dtype: torch.dtype, heads: tuple[int, int], window: int
) -> None:
    """R3: random chunks in random company, decode in random batches and orders, and packed: the same bits."""
    case = sequences(LENGTHS, heads=heads, dtype=dtype, window=window)
    backend = native(SPLIT, 16)
    wanted = case.packed(backend)
    case.store(backend)
    calls = chunks_of(LENGTHS, seed=heads[0])
    assert torch.equal(by_row(case, calls, [case.prefill(backend, call) for call in calls]), wanted)
    draw = random.Random(5)
    places = [(row, position) for row, length in enumerate(LENGTHS) for position in range(length)]
    draw.shuffle(places)
    while places:
        batch = [places.pop() for _ in range(min(len(places), draw.randint(1, 40)))]
        index = torch.tensor([case.starts[row] + position for row, position in batch])
        assert torch.equal(case.decode(backend, batch), wanted[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads_tiles_or_blocks(
    native: Callable, sequences: Callable, threads: Callable[[int], int], dtype: torch.dtype
) -> None:
    """R3: one long sequence (its partitions spread over threads) and short ones, 1 to 3 threads, four tile sizes."""
    lengths = [700, 5]
    wanted = sequences(lengths, heads=(6, 2), dtype=dtype).packed(native(SPLIT, 64))
    for block_size, tile, count in [(1, 1, 1), (16, 3, 2), (32, 64, 3), (700, 1024, 2)]:
        threads(count)
        case = sequences(lengths, heads=(6, 2), dtype=dtype, block_size=block_size)
        other = sequences(lengths, heads=(6, 2), dtype=dtype)
        case.q, case.k, case.v = other.q, other.k, other.v
        backend = native(SPLIT, tile)
        assert torch.equal(case.packed(backend), wanted)
        case.store(backend)
        assert torch.equal(case.prefill(backend, [(0, 0, 700), (1, 0, 5)]), wanted)
        assert torch.equal(case.decode(backend, [(0, 699)])[0], wanted[699])
        assert torch.equal(case.decode(backend, [(1, 4), (0, 640), (0, 63)]), wanted[[704, 640, 63]])


def test_split_boundaries(native: Callable, sequences: Callable, threads: Callable[[int], int]) -> None:
    """Positions just before, at and after the ends of partitions, alone (spread over threads) and in a prefill."""
    case = sequences([200])
    backend = native(SPLIT)
    wanted = case.packed(backend)
    case.store(backend)
    for position in (0, 31, 32, 62, 63, 64, 65, 127, 128, 129, 191, 192, 199):
        for count in (1, 2):
            threads(count)
            assert torch.equal(case.decode(backend, [(0, position)])[0], wanted[position])
            assert torch.equal(case.prefill(backend, [(0, position, 200)]), wanted[position:])


def test_poison_beside_a_sequence_is_never_touched(native: Callable, sequences: Callable) -> None:
    """Positions after a query's own hold NaN: the answer is that of a cache which never had them."""
    case = sequences([100])
    backend = native(SPLIT)
    wanted = case.packed(backend)
    case.store(backend)
    slots = case.slots().long()
    for last in (90, 63, 40, 32, 0):
        case.kv.k_SHD[slots[last + 1 :]] = float("nan")
        case.kv.v_SHD[slots[last + 1 :]] = float("inf")
        case.tables[0, last // case.block_size + 1 :] = -1
        assert torch.equal(case.decode(backend, [(0, last)])[0], wanted[last])
        first = max(0, last - 5)
        assert torch.equal(case.prefill(backend, [(0, first, last + 1)]), wanted[first : last + 1])


def test_window_never_reads_older_positions(native: Callable, sequences: Callable) -> None:
    """Blocks that have left the window may be unmapped and their slots given away."""
    case = sequences([150], window=20)
    backend = native(SPLIT)
    wanted = case.packed(backend)
    case.store(backend)
    case.kv.k_SHD[case.slots()[:129].long()] = float("nan")
    case.tables[0, :8] = -1
    assert torch.equal(case.decode(backend, [(0, 149)])[0], wanted[149])


def test_results_depend_on_split_tokens_only_in_the_last_places(native: Callable, sequences: Callable) -> None:
    """`split_tokens` is part of what the bits depend on, and is reported."""
    case = sequences([300], heads=(6, 2), dim=64)
    one, other = case.packed(native(64)), case.packed(native(320))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert native(320).describe() == {"name": "native", "exact": True, "split_tokens": 320}


def test_nan_shows(native: Callable, sequences: Callable) -> None:
    """A NaN among the visible keys or values makes the answer NaN; earlier queries keep theirs."""
    case = sequences([80])
    wanted = case.packed(native(SPLIT))
    case.k[50, 0, 3] = float("nan")
    out = case.packed(native(SPLIT))
    assert torch.equal(out[:50], wanted[:50])
    assert out[50:, :3].isnan().all() and torch.equal(out[:, 3:], wanted[:, 3:])


def test_views_give_the_bits_of_copies(native: Callable, sequences: Callable) -> None:
    """q, K and V as slices of one projection, transposed ones, KV slots as a slice of a larger buffer."""
    case = sequences([70, 9])
    backend = native(SPLIT)
    wanted = case.packed(backend)
    qkv = torch.cat((case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)), 1)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in qkv.split([96, 32, 32], 1))
    case.q, case.k, case.v = q, k, v
    assert torch.equal(case.packed(backend), wanted)
    pool = torch.full((case.kv.k_SHD.shape[0], 2, 2, 16), float("nan"))
    case.kv = LayerKV(pool[:, 0], pool[:, 1])
    case.store(backend)
    assert torch.equal(case.prefill(backend, [(0, 0, 70), (1, 0, 9)]), wanted)
    case.q = q.transpose(0, 1).contiguous().transpose(0, 1)
    case.k = k.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    out = case.packed(backend)
    assert torch.equal(out, wanted) and out.is_contiguous()


def test_a_descriptor_may_be_reused_with_new_contents(native: Callable, sequences: Callable) -> None:
    """Tables and lengths are read at each call: a steady decode changes them in place."""
    case = sequences([40, 40])
    backend = native(SPLIT)
    wanted = case.packed(backend)
    case.store(backend)
    lengths = torch.tensor([10, 40])
    descriptor = DecodeDescriptor(case.tables, case.block_size, lengths, 40)
    for _ in range(3):
        index = torch.tensor([0, 40]) + lengths - 1
        q, k = case.q[index], case.k[index]
        assert torch.equal(backend.forward(q, k, k, descriptor, case.layer, case.kv), wanted[index])
        other = LayerAttention(case.layer.scale * 2)
        assert not torch.equal(backend.forward(q, k, k, descriptor, other, case.kv), wanted[index])
        lengths += torch.tensor([1, -1])


def test_faulty_descriptors_end_in_an_error_not_in_wild_reads(native: Callable, sequences: Callable) -> None:
    """No block at a visible position, a block outside the pool, a position beyond the table, starts that don't fit."""
    case = sequences([100])
    backend = native(SPLIT)
    case.store(backend)
    good = case.tables.clone()
    case.tables[0, 1] = -1
    with pytest.raises(InvariantError, match="no block"):
        case.decode(backend, [(0, 99)])
    case.tables[0, 1] = 10_000
    with pytest.raises(InvariantError, match="outside the KV slots"):
        case.prefill(backend, [(0, 90, 100)])
    case.tables = good[:, :2].clone()
    with pytest.raises(InvariantError, match="beyond the block table"):
        case.decode(backend, [(0, 99)])
    case.lengths = [60]
    with pytest.raises(InvariantError, match="query starts"):
        case.packed(backend)
    with pytest.raises(InvariantError, match="beyond the KV slots"):
        backend.store(case.k[:1], case.v[:1], torch.tensor([10_000], dtype=torch.int32), case.kv)


def test_unsupported_settings_are_refused(native: Callable) -> None:
    for split in (0, 16, 100):
        with pytest.raises(ValueError, match="split_tokens"):
            native(split)
    with pytest.raises(ValueError, match="query_tile_rows"):
        native(64, 0)
    q = torch.randn(2, 2, 20)
    with pytest.raises(ValueError, match="multiples of 8 up to 256"):
        native(64).forward(q, q, q, None, LayerAttention(1.0), None)
    q = torch.randn(2, 2, 16, dtype=torch.float16)
    with pytest.raises(TypeError, match="bfloat16 and float32"):
        native(64).forward(q, q, q, None, LayerAttention(1.0), None)


@pytest.mark.parametrize("window", [0, 90])
def test_gradients_across_strips(native: Callable, sequences: Callable, window: int) -> None:
    """Sequences longer than a strip of the backward, against the reference's; the forward's bits don't change."""
    case = sequences([300, 2], heads=(4, 2), window=window)
    tensors, weight, grads = (case.q, case.k, case.v), torch.randn(case.q.shape), []
    plain = case.packed(native(SPLIT))
    for backend in (native(SPLIT), ReferenceAttention()):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        case.q, case.k, case.v = inputs
        out = case.packed(backend)
        if isinstance(backend, NativeAttention):
            assert torch.equal(out, plain)
        (out * weight).sum().backward()
        grads.append([tensor.grad for tensor in inputs])
    for actual, wanted in zip(*grads, strict=True):
        assert (actual - wanted).abs().max() <= 2e-5 * wanted.abs().max()
