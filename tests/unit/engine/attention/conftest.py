"""Random sequences laid out both packed and in a paged cache whose unwritten slots are NaN."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from unison.engine.attention import (
    AttentionBackend,
    DecodeDescriptor,
    LayerAttention,
    LayerKV,
    PackedDescriptor,
    PrefillDescriptor,
)
from unison.engine.attention.cuda import CudaAttention
from unison.engine.attention.native import NativeAttention
from unison.engine.attention.reference import ReferenceAttention
from unison.engine.attention.torch_cpu import TorchAttention
from unison.engine.kernels.build import library


@dataclass
class Sequences:
    """Whole sequences, and a pool that `store` fills from them."""

    lengths: list[int]
    block_size: int
    q: Tensor
    k: Tensor
    v: Tensor
    layer: LayerAttention
    kv: LayerKV
    tables: Tensor

    @property
    def starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    def slots(self) -> Tensor:
        """int32 [T]: slot of every token."""
        parts = [torch.empty(0, dtype=torch.int64)]
        for row, length in enumerate(self.lengths):
            position = torch.arange(length)
            parts.append(self.tables[row, position // self.block_size] * self.block_size + position % self.block_size)
        return torch.cat(parts).int()

    def store(self, backend: AttentionBackend) -> None:
        backend.store(self.k, self.v, self.slots(), self.kv)

    def packed(self, backend: AttentionBackend) -> Tensor:
        descriptor = PackedDescriptor(torch.tensor(self.starts, dtype=torch.int32), max(self.lengths, default=0))
        return backend.forward(self.q, self.k, self.v, descriptor, self.layer, None)

    def prefill(self, backend: AttentionBackend, runs: list[tuple[int, int, int]]) -> Tensor:
        """Queries of (row, first position, end), concatenated in that order."""
        index = torch.cat([torch.arange(self.starts[row] + a, self.starts[row] + b) for row, a, b in runs])
        descriptor = PrefillDescriptor(
            self.tables[[row for row, _, _ in runs]],
            self.block_size,
            torch.tensor([0, *itertools.accumulate(b - a for _, a, b in runs)], dtype=torch.int32),
            torch.tensor([a for _, a, _ in runs]),
            max(b - a for _, a, b in runs),
            max(b for _, _, b in runs),
        )
        return backend.forward(self.q[index], self.k[index], self.v[index], descriptor, self.layer, self.kv)

    def decode(self, backend: AttentionBackend, places: list[tuple[int, int]]) -> Tensor:
        """One query per (row, position)."""
        index = torch.tensor([self.starts[row] + position for row, position in places])
        lengths = torch.tensor([position + 1 for _, position in places])
        descriptor = DecodeDescriptor(
            self.tables[[row for row, _ in places]], self.block_size, lengths, int(lengths.max())
        )
        return backend.forward(self.q[index], self.k[index], self.v[index], descriptor, self.layer, self.kv)


def make_sequences(
    lengths: list[int],
    block_size: int = 16,
    heads: tuple[int, int] = (6, 2),
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
) -> Sequences:
    """Blocks are shuffled, two are left over, and every slot starts as NaN."""
    generator = torch.Generator().manual_seed(len(lengths) * 1000 + block_size + dim)
    columns = max((-(-length // block_size) for length in lengths), default=0) + 1
    blocks = list(range(sum(-(-length // block_size) for length in lengths) + 2))
    random.Random(7).shuffle(blocks)
    tables = torch.full((len(lengths), columns), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for column in range(-(-length // block_size)):
            tables[row, column] = blocks.pop()
    total, size = sum(lengths), (len(blocks) + int((tables >= 0).sum())) * block_size

    def draw(num_heads: int) -> Tensor:
        return torch.randn(total, num_heads, dim, generator=generator).to(dtype)

    def empty() -> Tensor:
        return torch.full((size, heads[1], dim), float("nan"), dtype=dtype)

    layer = LayerAttention(dim**-0.5, window)
    kv = LayerKV(empty(), empty())
    return Sequences(lengths, block_size, draw(heads[0]), draw(heads[1]), draw(heads[1]), layer, kv, tables)


@pytest.fixture
def sequences() -> Callable[..., Sequences]:
    return make_sequences


@pytest.fixture
def native() -> Callable[..., NativeAttention]:
    if library() is None:
        pytest.skip("no C++ compiler here")
    return NativeAttention


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "native": lambda: NativeAttention(64, 8),
    "torch-exact": lambda: TorchAttention(True),
    "torch": lambda: TorchAttention(False),
    "cuda": CudaAttention,
    "reference": ReferenceAttention,
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "native" and library() is None:
        pytest.skip("no C++ compiler here")
    return BACKENDS[request.param]()


@pytest.fixture
def threads() -> Iterator[Callable[[int], int]]:
    """Sets the native threads; puts back what was set."""
    kernels = library()
    if kernels is None:
        pytest.skip("no C++ compiler here")
    before = kernels.unison_get_threads()
    yield kernels.unison_set_threads
    kernels.unison_set_threads(before)
