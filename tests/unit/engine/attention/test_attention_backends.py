"""Every backend, in every phase, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from unison.engine.attention import AttentionBackend, LayerAttention, PackedDescriptor
from unison.engine.attention.gradient import packed_backward
from unison.engine.attention.native_gradient import native_packed_backward
from unison.engine.attention.reference import ReferenceAttention
from unison.engine.kernels.build import library

LENGTHS = [1, 2, 33, 64, 65, 130]
REFERENCE = ReferenceAttention()


def assert_close(actual: Tensor, wanted: Tensor, v: Tensor) -> None:
    """fp32: 4e-6 of the largest value. bf16: 2^-7 of it (inputs are exact; torch rounds weights to bf16 as well)."""
    bound = 4e-6 if actual.dtype is torch.float32 else 2**-7
    assert actual.shape == wanted.shape and actual.dtype is wanted.dtype
    assert (actual - wanted).abs().max() <= bound * v.abs().max()


def compare_all_phases(backend: AttentionBackend, case: Any) -> None:
    rows = range(len(case.lengths))
    wanted = case.packed(REFERENCE)
    assert_close(case.packed(backend), wanted, case.v)
    case.store(backend)
    assert_close(case.prefill(backend, [(row, 0, case.lengths[row]) for row in rows]), wanted, case.v)
    runs = [(row, case.lengths[row] // 2, case.lengths[row]) for row in reversed(rows)]
    index = torch.cat([torch.arange(case.starts[row] + a, case.starts[row] + b) for row, a, b in runs])
    assert_close(case.prefill(backend, runs), wanted[index], case.v)
    places = [(row, case.lengths[row] - 1) for row in rows]
    index = torch.tensor([case.starts[row] + position for row, position in places])
    assert_close(case.decode(backend, places), wanted[index], case.v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 40])
def test_backend_equals_reference(
    backend: AttentionBackend, sequences: Callable, dtype: torch.dtype, window: int
) -> None:
    """S7: packed, prefill (whole and from the middle) and decode, with free slots full of NaN and unmapped blocks."""
    compare_all_phases(backend, sequences(LENGTHS, dtype=dtype, window=window))


@pytest.mark.parametrize("block_size", [1, 32, 130])
def test_backend_equals_reference_for_every_block_size(
    backend: AttentionBackend, sequences: Callable, block_size: int
) -> None:
    """S7: from one slot per block to one block per sequence."""
    compare_all_phases(backend, sequences(LENGTHS, block_size=block_size))


@pytest.mark.parametrize(("heads", "dim"), [((3, 3), 64), ((9, 3), 64), ((8, 1), 24), ((4, 2), 128), ((2, 2), 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backend_equals_reference_for_every_head_shape(
    backend: AttentionBackend, sequences: Callable, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    compare_all_phases(backend, sequences([1, 70, 37], heads=heads, dim=dim, dtype=dtype))


def test_no_descriptor_means_one_whole_sequence(backend: AttentionBackend, sequences: Callable) -> None:
    """S7: "no cache" is the packed call with a single sequence."""
    case = sequences([45])
    out = backend.forward(case.q, case.k, case.v, None, case.layer, None)
    assert torch.equal(out, case.packed(backend))


def test_gradients_of_packed_sequences(backend: AttentionBackend, sequences: Callable) -> None:
    """Every backend's gradients equal those of the reference by torch's autograd, fp32."""
    case = sequences([1, 40, 17], window=20)
    weight = torch.randn(case.q.shape)
    grads = []
    for one in (backend, REFERENCE):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (case.q, case.k, case.v)]
        case.q, case.k, case.v = inputs
        (case.packed(one) * weight).sum().backward()
        grads.append([tensor.grad for tensor in inputs])
    for actual, wanted in zip(*grads, strict=True):
        assert (actual - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.skipif(library() is None, reason="no native kernels here")
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("heads", [(6, 2), (8, 1), (3, 3)])
def test_native_gradients_leave_out_what_has_none(sequences: Callable, heads: tuple[int, int], window: int) -> None:
    """Query rows without an upstream gradient change nothing: in bfloat16 and beside the torch formula, whose float32
    results are rounded once as well."""
    case = sequences([1, 33, 0, 20], heads=heads, dim=24, dtype=torch.bfloat16, window=window)
    out = case.packed(REFERENCE)
    upstream = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    upstream[5:20] = 0
    saved, descriptor = (case.q, case.k, case.v, out), PackedDescriptor(torch.tensor([0, 1, 34, 34, 54]).int(), 33)
    found = native_packed_backward(upstream, saved, descriptor, case.layer)
    wanted = packed_backward(upstream, saved, descriptor, case.layer)
    assert torch.equal(found[0][5:20], torch.zeros_like(found[0][5:20]))
    for actual, expected in zip(found, wanted, strict=True):
        assert (actual - expected).abs().max() <= 2.0**-7 * expected.abs().max()


def test_reference_is_softmax_attention() -> None:
    """The oracle itself, against torch's own plain formula."""
    q, k, v = (torch.randn(20, 4, 16, dtype=torch.float64) for _ in range(3))
    out = REFERENCE.forward(q, k, v, None, LayerAttention(0.25), None)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=0.25
    )
    torch.testing.assert_close(out, wanted.transpose(0, 1))
