"""TorchAttention(exact=True): a query's bits don't depend on phase, chunk or batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from unison.engine.attention.torch_cpu import TorchAttention

LENGTHS = [1, 2, 33, 64, 65, 130, 300, 520]


@pytest.mark.parametrize("heads", [(9, 3), (4, 4)])
@pytest.mark.parametrize("window", [0, 50])
def test_phases_and_batches_agree_in_bits(sequences: Callable, heads: tuple[int, int], window: int) -> None:
    """R3: bf16; prefill from anywhere, decode alone, together and reversed, all equal to packed sequences."""
    case = sequences(LENGTHS, heads=heads, dim=64, dtype=torch.bfloat16, window=window)
    backend = TorchAttention(True)
    wanted = case.packed(backend)
    case.store(backend)
    for row, length in enumerate(LENGTHS):
        for first in {0, length // 3, max(0, length - 5), length - 1}:
            expected = wanted[case.starts[row] + first : case.starts[row + 1]]
            assert torch.equal(case.prefill(backend, [(row, first, length)]), expected)
            assert torch.equal(case.decode(backend, [(row, first)])[0], expected[0])
    places = [(row, length - 1) for row, length in enumerate(LENGTHS)]
    last = wanted[[end - 1 for end in case.starts[1:]]]
    assert torch.equal(case.decode(backend, places), last)
    assert torch.equal(case.decode(backend, places[::-1]), last.flip(0))


FLOAT32 = """
import sys, torch
from conftest import make_sequences
from unison.engine.attention.torch_cpu import TorchAttention
lengths = [1, 2, 33, 130, 520]
case, backend = make_sequences(lengths, heads=(9, 3), dim=64), TorchAttention(True)
wanted = case.packed(backend)
case.store(backend)
for row, length in enumerate(lengths):
    for first in {0, length // 3, length - 1}:
        expected = wanted[case.starts[row] + first : case.starts[row + 1]]
        assert torch.equal(case.prefill(backend, [(row, first, length)]), expected), ("prefill", length, first)
        assert torch.equal(case.decode(backend, [(row, first)])[0], expected[0]), ("decode", length, first)
"""


@pytest.mark.slow
def test_phases_agree_in_bits_in_float32_where_mkl_is_told_to() -> None:
    """R3: float32 needs MKL_CBWR before the first product, hence a process of its own."""
    isa = "AVX512" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "AVX2"
    search = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    environment = {**os.environ, "MKL_CBWR": f"{isa},STRICT", "PYTHONPATH": search}
    done = subprocess.run([sys.executable, "-c", FLOAT32], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
