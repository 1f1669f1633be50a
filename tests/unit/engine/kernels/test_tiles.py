"""Linear layers by AMX tiles, with the registers computed in plain C++, so that they are tested on any machine."""

from __future__ import annotations

import pytest
import torch
from unison.engine.kernels import NativeKernels
from unison.engine.kernels.build import build, library, load

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels here")
SHAPES = ((1, 1, 1), (1, 16, 32), (2, 33, 31), (16, 48, 64), (17, 50, 75), (37, 64, 33), (70, 7, 100))


@pytest.fixture(scope="module")
def tiles() -> NativeKernels:
    made = NativeKernels(lib=load(build(["-DUNISON_EMULATE_TILES"])))
    if not made.has_tiles:
        pytest.skip("the code around the tiles needs AVX-512 with bf16")
    return made


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def by_the_book(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """TDPBF16PS as its manual has it, in float64 with a rounding after each step: a fused multiply-add's product of two
    bfloat16 is exact there."""

    def single(value: torch.Tensor) -> torch.Tensor:
        return value.float().double()

    padding = -x.shape[1] % 32
    x, w = (torch.nn.functional.pad(each, (0, padding)).double() for each in (x, w))
    sums = torch.zeros(len(x), len(w), dtype=torch.float64)
    for k in range(0, x.shape[1], 32):
        even, odd = torch.zeros_like(sums), torch.zeros_like(sums)
        for at in range(k, k + 32, 2):
            even = single(even + x[:, None, at] * w[None, :, at])
            odd = single(odd + x[:, None, at + 1] * w[None, :, at + 1])
        sums = single(sums + single(even + odd))
    return sums.float()


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_output_is_the_instructions(tiles: NativeKernels, m: int, n: int, k: int) -> None:
    """R3: the order of reduction is the instruction's; padding adds zeros. A row depends on itself alone."""
    x, w, bias = random(m, k), random(n, k, seed=1), random(n, seed=2)
    expected = by_the_book(x, w)
    assert tiles.describe()["variant"] == "avx2, amx_bf16" and tiles.describe()["amx"] == "used"
    assert torch.equal(tiles.logits(x, w), expected)
    assert torch.equal(tiles.linear(x, w), expected.to(torch.bfloat16))
    assert torch.equal(tiles.linear(x, w, bias), (expected + bias.float()).to(torch.bfloat16))
    assert torch.equal(tiles.logits(x[-1:], w), expected[-1:])


def test_a_gated_layer_is_its_two_parts(tiles: NativeKernels) -> None:
    x, w, bias = random(19, 75), random(2 * 37, 75, seed=1), random(2 * 37, seed=2)
    assert torch.equal(tiles.linear_silu_mul(x, w, bias), tiles.silu_mul(tiles.linear(x, w, bias)))


def test_strides_nan_and_infinity(tiles: NativeKernels) -> None:
    x, w = random(5, 64), random(20, 64, seed=1)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    wide_x, wide_w, wide_y = (torch.zeros(shape).bfloat16() for shape in ((5, 80), (20, 90), (5, 33)))
    wide_x[:, 3:67], wide_w[:, 1:65] = x, w
    tiles.linear(wide_x[:, 3:67], wide_w[:, 1:65], None, wide_y[:, 5:25])
    plain = tiles.linear(x, w)
    torch.testing.assert_close(wide_y[:, 5:25], plain, rtol=0, atol=0, equal_nan=True)
    assert plain[1].isnan().all() and plain[2].isinf().all() and plain[[0, 3, 4]].isfinite().all()
    assert not wide_y[:, :5].any() and not wide_y[:, 25:].any()


def test_threads_change_nothing(tiles: NativeKernels) -> None:
    x, w = random(40, 96), random(200, 96, seed=1)
    before = tiles.num_threads
    try:
        results = []
        for threads in (1, 2, 3):
            tiles.set_num_threads(threads)
            results.append(tiles.linear(x, w))
    finally:
        tiles.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)
