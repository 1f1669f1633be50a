"""Rows of the native kernels depend on nothing but themselves, and not on the instruction set."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from unison.engine.kernels import NativeKernels
from unison.engine.kernels.adamw import AdamWRates, AdamWRun, native_adamw_, native_sum_of_squares
from unison.engine.kernels.build import BuildError, build, library, load
from unison.engine.kernels.gradients import RowGradients

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels here")

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return NativeKernels()


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest, kernels: NativeKernels) -> int:
    before = kernels.num_threads
    kernels.set_num_threads(request.param)
    yield request.param
    kernels.set_num_threads(before)


@contextmanager
def one_thread(kernels: NativeKernels, threads: int) -> Iterator[None]:
    kernels.set_num_threads(1)
    yield
    kernels.set_num_threads(threads)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The representation, with every NaN alike: its payload is not part of the promise."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor).view(
        torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32
    )


@DTYPES
@pytest.mark.parametrize(("n", "k"), [(100, 576), (37, 1600), (64, 33)])
def test_linear_rows_are_the_same_for_every_batch(
    kernels: NativeKernels, threads: int, dtype: torch.dtype, n: int, k: int
) -> None:
    """R3: bits of a row for M = 1..70, at any place in the batch, on any number of threads."""
    x, w, bias = random(150, k, dtype=dtype), random(n, k, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
    alone = torch.cat([kernels.linear(x[i : i + 1], w, bias) for i in range(150)])
    for m in [*range(1, 71), 99, 150]:
        assert torch.equal(kernels.linear(x[:m], w, bias), alone[:m]), f"M = {m}"
    assert torch.equal(kernels.linear(x[70:77], w, bias), alone[70:77])
    assert torch.equal(kernels.linear(x.flip(0), w, bias), alone.flip(0))
    logits = kernels.logits(x, w)
    for m in (1, 2, 3, 4, 7, 32, 64):
        assert torch.equal(kernels.logits(x[:m], w), logits[:m])


@DTYPES
def test_linear_columns_do_not_depend_on_how_weights_are_cut(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x, w = random(9, 80, dtype=dtype), random(61, 80, dtype=dtype, seed=1)
    for m in (1, 2, 3, 4, 9):
        whole = kernels.logits(x[:m], w)
        for cut in (1, 3, 8, 20):
            parts = [kernels.logits(x[:m], w[i : i + cut]) for i in range(0, 61, cut)]
            assert torch.equal(torch.cat(parts, 1), whole)


@DTYPES
def test_gradients_are_torchs(kernels: NativeKernels, threads: int, dtype: torch.dtype) -> None:
    """The C++ formulas beside the torch ones, and the same bits for any number of threads."""
    plain, native = RowGradients(), kernels.gradients
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for rows, width in ((0, 8), (1, 1), (3, 9), (70, 576), (33, 64)):
        x, upstream = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype, seed=3)
        weight = random(width, dtype=dtype, seed=4)
        for residual in (None, random(rows, width, dtype=dtype, seed=5)):
            found, wanted = (one.rms_norm(x, weight, 1e-5, upstream, residual) for one in (native, plain))
            with one_thread(kernels, threads):
                assert all(map(torch.equal, found, native.rms_norm(x, weight, 1e-5, upstream, residual)))
            torch.testing.assert_close(found[0], wanted[0], **tolerance)
            torch.testing.assert_close(found[1], wanted[1], rtol=tolerance["rtol"], atol=0.05)
        gate_up = random(rows, 2 * width, dtype=dtype) * 4
        torch.testing.assert_close(native.silu_mul(gate_up, upstream), plain.silu_mul(gate_up, upstream), **tolerance)
        if rows:
            logits, targets = random(rows, width, dtype=torch.float32) * 3, torch.arange(rows) % width
            logprobs, softmax = kernels.row_softmax(logits, targets, dtype)
            assert torch.equal(logprobs, kernels.row_logprobs(logits, targets))
            torch.testing.assert_close(softmax, torch.softmax(logits, -1).to(dtype), **tolerance)
            factors = random(rows, dtype=torch.float32)
            one, other = (each.logprobs(softmax, targets, factors) for each in (native, plain))
            torch.testing.assert_close(one, other, **tolerance)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_layer_is_its_two_parts(
    kernels: NativeKernels, scalar: NativeKernels, threads: int, dtype: torch.dtype, has_bias: bool
) -> None:
    """R3: fused or not, on any variant: the same bits. Widths that no tile or item divides."""
    for m, inner, k in ((1, 1, 3), (2, 5, 32), (7, 33, 40), (13, 100, 576), (70, 61, 64), (3, 250, 1536), (0, 4, 8)):
        x, w = random(m, k, dtype=dtype), random(2 * inner, k, dtype=dtype, seed=1)
        bias = random(2 * inner, dtype=dtype, seed=2) if has_bias else None
        wide = torch.full((m, inner + 3), 7.0, dtype=dtype)
        parts = kernels.silu_mul(kernels.linear(x, w, bias))
        assert torch.equal(bits(kernels.linear_silu_mul(x, w, bias, wide[:, :inner])), bits(parts))
        assert torch.equal(wide[:, inner:], torch.full((m, 3), 7.0, dtype=dtype)), "nothing beside the outputs"
        if m < 10:
            assert torch.equal(bits(scalar.linear_silu_mul(x, w, bias)), bits(parts))


@DTYPES
def test_linear_of_strided_and_unaligned_views(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x, w = random(7, 100, dtype=dtype), random(20, 100, dtype=dtype, seed=1)
    plain = kernels.linear(x, w)
    for shift in (1, 3):
        wide_x, wide_w = torch.zeros(7, 120, dtype=dtype), torch.zeros(20, 130, dtype=dtype)
        wide_x[:, shift : shift + 100], wide_w[:, shift : shift + 100] = x, w
        assert torch.equal(kernels.linear(wide_x[:, shift : shift + 100], wide_w[:, shift : shift + 100]), plain)
    repeated = x[:1].expand(7, 100)
    assert torch.equal(kernels.linear(repeated, w), plain[:1].expand(7, 20))


@DTYPES
def test_row_operations_are_the_same_for_every_batch(kernels: NativeKernels, threads: int, dtype: torch.dtype) -> None:
    """R3: norm, gate, rotary embedding and log-softmax of a row, alone and in company."""
    x, weight, residual = (
        random(70, 576, dtype=dtype),
        random(576, dtype=dtype, seed=1),
        random(70, 576, dtype=dtype, seed=2),
    )
    logits, targets = random(70, 3001, dtype=torch.float32, seed=3), torch.arange(70)
    cos, sin = random(70, 32, dtype=torch.float32, seed=4).cos(), random(70, 32, dtype=torch.float32, seed=4).sin()

    def run(rows: slice) -> list[torch.Tensor]:
        total = residual[rows].clone()
        turned = x[rows].clone().view(-1, 9, 64)
        normal = kernels.add_rms_norm(total, x[rows], weight, 1e-5)
        kernels.rope_(turned[:, :6], turned[:, 6:], cos[rows], sin[rows])
        gated, picked = kernels.silu_mul(x[rows]), kernels.row_logprobs(logits[rows], targets[rows])
        return [total, normal, turned, gated, picked, kernels.row_logsumexp(logits[rows])]

    whole = run(slice(0, 70))
    for rows in (slice(0, 1), slice(3, 4), slice(0, 33), slice(10, 70), slice(69, 70)):
        for part, expected in zip(run(rows), whole, strict=True):
            assert torch.equal(part, expected[rows])


@pytest.fixture(scope="module")
def scalar() -> NativeKernels:
    try:
        return NativeKernels(lib=load(build(["-DUNISON_SCALAR", "-O1"])))
    except BuildError as error:
        pytest.fail(f"the portable variant doesn't build: {error}")


@pytest.fixture(scope="module")
def without_dot() -> NativeKernels:
    return NativeKernels(lib=load(build(["-DUNISON_NO_DOT"])))


def flushed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 2.0**-126, x * 0.0, x)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1e-19, 1e18], ids=["unit", "subnormal", "overflow"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 11, 13, 24, 37, 100])
def test_linear_has_the_bits_of_the_dot_product_instruction_without_it(
    kernels: NativeKernels, without_dot: NativeKernels, m: int, scale: float
) -> None:
    """R3: the bf16 order of reduction is the instruction's, computed by other means where a CPU doesn't have it."""
    for n, k in ((1, 1), (4, 31), (9, 32), (13, 33), (61, 80), (100, 576), (37, 1600)):
        x, w = random(m, k, dtype=torch.float32), random(n, k, dtype=torch.float32, seed=1)
        x, w, bias = (x * scale).bfloat16(), (w * scale).bfloat16(), random(n, dtype=torch.bfloat16, seed=2)
        assert torch.equal(bits(kernels.linear(x, w, bias)), bits(without_dot.linear(x, w, bias)))
        assert torch.equal(bits(kernels.logits(x, w)), bits(without_dot.logits(x, w)))


@pytest.mark.slow
@DTYPES
def test_the_portable_variant_gives_the_same_bits(
    kernels: NativeKernels, scalar: NativeKernels, dtype: torch.dtype
) -> None:
    """R3: the order of reduction is a definition, not the machine's: portable C++ equals the vector unit."""
    assert scalar.describe()["variant"] == "scalar"
    for m, n, k in ((1, 9, 40), (2, 5, 16), (3, 13, 1), (11, 21, 1601), (4, 4, 33)):
        x, w, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
        x[0, 0] = float("inf")
        for one, other in (
            (kernels.linear(x, w, bias), scalar.linear(x, w, bias)),
            (kernels.logits(x, w), scalar.logits(x, w)),
        ):
            assert torch.equal(bits(one), bits(other))
    x, weight = random(5, 77, dtype=dtype), random(77, dtype=dtype, seed=1)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), scalar.rms_norm(x, weight, 1e-5))
    gate_up = random(5, 90, dtype=dtype) * 30
    assert torch.equal(kernels.silu_mul(gate_up), scalar.silu_mul(gate_up))
    logits = random(5, 1003, dtype=torch.float32) * 10
    assert torch.equal(kernels.row_logsumexp(logits), scalar.row_logsumexp(logits))
    assert torch.equal(kernels.row_logprobs(logits, torch.arange(5)), scalar.row_logprobs(logits, torch.arange(5)))
    cos, sin = random(5, 7, dtype=torch.float32).cos(), random(5, 7, dtype=torch.float32).sin()
    q, k = random(5, 2, 20, dtype=dtype), random(5, 1, 20, dtype=dtype)
    q_other, k_other = q.clone(), k.clone()
    kernels.rope_(q, k, cos, sin)
    scalar.rope_(q_other, k_other, cos, sin)
    assert torch.equal(q, q_other) and torch.equal(k, k_other)


def exponential(lib: ctypes.CDLL, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    lib.unison_exp(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(x.numel()))
    return out


def test_exp_is_within_two_units_and_equal_in_both_variants(scalar: NativeKernels) -> None:
    lib = library()
    assert lib is not None
    x = torch.cat((torch.linspace(-110, 90, 400_003), torch.linspace(-1, 1, 100_001), torch.randn(1000) * 1e-6))
    got, exact = exponential(lib, x), x.double().exp()
    unit = torch.exp2(torch.floor(torch.log2(exact)).clamp(min=-126) - 23)
    in_range = exact < 3.4028235e38
    assert ((got.double() - exact).abs() / unit)[in_range].max() <= 2.0
    assert bool((got[~in_range] == float("inf")).all())
    special = torch.tensor([float("-inf"), float("inf"), float("nan"), 0.0, -0.0, -1000.0, 1000.0, -104.0])
    values = exponential(lib, special).tolist()
    assert (
        values[0] == 0.0
        and values[1] == float("inf")
        and values[2] != values[2]
        and values[3:] == [1, 1, 0, values[1], 0]
    )
    whole = torch.cat((x, special))
    assert torch.equal(bits(exponential(lib, whole)), bits(exponential(scalar._lib, whole)))


@pytest.mark.parametrize("ratio", [0.0, 2.0**-9, 2.0**-8, 3.0 * 2.0**-10, -(2.0**-9), 2.0**-15, 1.0, -1.0])
def test_bf16_rounding_is_to_nearest_even_with_nan_kept(
    kernels: NativeKernels, without_dot: NativeKernels, scalar: NativeKernels, ratio: float
) -> None:
    """Every bf16 plus a fraction of itself, ties and overflow among them; torch's rounding is the reference. Linear
    layers take subnormals for zero, as the bf16 dot product does.
    """
    high = torch.arange(0, 65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    low = (high.float() * ratio).to(torch.bfloat16)
    # Sums begin at +0, which swallows -0.
    expected = (flushed(flushed(high.float()) + flushed(low.float())) + 0.0).to(torch.bfloat16)
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    for each in (kernels, without_dot, scalar):
        for rows in (1, 4):
            y = each.linear(ones.expand(rows, 2), torch.stack((high, low), 1))
            assert torch.equal(bits(y), bits(expected).expand(rows, -1))
    residual = high.clone()[None]
    kernels.add_rms_norm(residual, low[None], torch.ones_like(high), 1e-5)
    assert torch.equal(bits(residual[0]), bits((high.float() + low.float()).to(torch.bfloat16)))


def test_denormals_survive_a_caller_who_flushes_them(kernels: NativeKernels, threads: int) -> None:
    """R3: a thread's floating-point mode is not part of the inputs."""
    x, w = torch.full((40, 16), 1e-30), torch.full((40, 16), 1e-12)
    plain = kernels.linear(x, w)
    assert bool((plain > 0).all())
    torch.set_flush_denormal(True)
    try:
        flushed = kernels.linear(x, w)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(plain.view(torch.int32), flushed.view(torch.int32))


@DTYPES
@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_the_portable_variant_updates_to_the_same_bits(
    kernels: NativeKernels, scalar: NativeKernels, dtype: torch.dtype, beta1: float
) -> None:
    """R3: masters, moments, weights and the sum of squares."""
    vector, portable = library(), scalar._lib
    assert vector is not None
    state = [random(1003, dtype=torch.float32, seed=seed) for seed in range(4)]
    state[0][:3], state[0][-2:] = torch.tensor([float("nan"), float("inf"), 1e-42]), torch.tensor([3e38, float("-inf")])
    state[3].square_()
    rates = AdamWRates(0.01, beta1, 0.99, 1e-8, 2, 0.7)
    results = []
    for lib in (vector, portable):
        own = [*(each.clone() for each in state), torch.zeros(1003, dtype=dtype)]
        native_adamw_(AdamWRun(*own, weight_decay=0.1), rates, lib)
        results.append(own)
    for one, other in zip(*results, strict=True):
        assert torch.equal(bits(one), bits(other))
    assert native_sum_of_squares(state[1], vector) == native_sum_of_squares(state[1], portable)
