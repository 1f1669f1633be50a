"""Each operation against a float64 reference, with a stated bound, for the native and the torch kernels."""

import math

import pytest
import torch
from unison.engine.kernels import Kernels, NativeKernels, TorchKernels
from unison.engine.kernels.build import library

EPS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""Half a unit in the last place, relative: the error of one rounding."""

KERNELS: list[Kernels] = [TorchKernels(exact=True), TorchKernels(exact=False)]
if library() is not None:
    KERNELS.append(NativeKernels())


@pytest.fixture(params=KERNELS, ids=lambda k: f"{k.name}-{'exact' if k.exact else 'fast'}")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return request.param


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, slack: torch.Tensor | float, rounding: float) -> None:
    """|actual - expected| <= slack + rounding * |expected|, elementwise, in float64."""
    error = (actual.double() - expected).abs()
    bound = slack + rounding * expected.abs() + 1e-300
    worst = (error / bound).max().item() if error.numel() else 0.0
    assert worst <= 1.0, f"error is {worst:.2f} times its bound"


@pytest.mark.parametrize("m", [0, 1, 2, 3, 4, 5, 8, 33])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 7), (259, 33), (12, 16), (30, 1600)])
def test_linear_stays_within_the_bound_of_a_dot_product(
    kernels: Kernels, dtype: torch.dtype, m: int, n: int, k: int
) -> None:
    x, w, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
    exact = x.double() @ w.double().t()
    slack = (k + 8) * EPS[torch.float32] * (x.double().abs() @ w.double().abs().t() + bias.double().abs())
    assert_near(kernels.linear(x, w, bias), exact + bias.double(), slack, 1.01 * EPS[dtype])
    assert_near(kernels.linear(x, w), exact, slack, 1.01 * EPS[dtype])
    logits = kernels.logits(x, w)
    assert logits.dtype == torch.float32 and logits.shape == (m, n)
    assert_near(logits, exact, slack, EPS[torch.float32])


def test_linear_writes_into_a_strided_out_and_reads_strided_operands(kernels: Kernels, dtype: torch.dtype) -> None:
    whole_x, whole_w = random(6, 50, dtype=dtype), random(20, 60, dtype=dtype, seed=1)
    x, w = whole_x[:, 5:45], whole_w[::2, 3:43]
    out = torch.full((6, 16), 9.0, dtype=dtype)
    assert kernels.linear(x, w, None, out[:, 1:11]).data_ptr() == out[:, 1:11].data_ptr()
    plain = kernels.linear(x.contiguous(), w.contiguous())
    torch.testing.assert_close(out[:, 1:11], plain, **({"rtol": 0, "atol": 0} if kernels.exact else {}))
    assert torch.equal(out[:, 0], torch.full((6,), 9.0, dtype=dtype)) and bool((out[:, 11:] == 9.0).all())


@pytest.mark.parametrize("width", [1, 7, 8, 33, 576])
def test_rms_norm_rounds_where_the_reference_models_round(kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    x, weight = random(5, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    wide = x.double()
    exact = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    y = kernels.rms_norm(x, weight, 1e-5)
    assert_near(y, exact, 0.0, 2.02 * EPS[dtype] + 8 * EPS[torch.float32] + width * EPS[torch.float32] / 8)
    residual, expected = random(5, width, dtype=dtype, seed=3), random(5, width, dtype=dtype, seed=3)
    out = kernels.add_rms_norm(residual, x, weight, 1e-5)
    assert torch.equal(residual, expected + x)
    assert torch.equal(out, kernels.rms_norm(expected + x, weight, 1e-5))
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5, x), y) and torch.equal(x, y)


@pytest.mark.parametrize(("head", "half"), [(64, 32), (20, 7), (16, 8), (9, 3)])
def test_rope_rotates_halves_and_leaves_the_rest(kernels: Kernels, dtype: torch.dtype, head: int, half: int) -> None:
    q, k = random(5, 3, head, dtype=dtype), random(5, 2, head, dtype=dtype, seed=1)
    angles = random(5, half, seed=2, scale=3.0)
    cos, sin = angles.cos(), angles.sin()
    expected = []
    for x in (q, k):
        a, b, c, s = (
            x[..., :half].double(),
            x[..., half : 2 * half].double(),
            cos.double()[:, None],
            sin.double()[:, None],
        )
        expected.append((torch.cat((a * c - b * s, b * c + a * s, x[..., 2 * half :].double()), -1), a.abs() + b.abs()))
    qkv = torch.cat((q.flatten(1), k.flatten(1)), dim=1)  # as the decoder has them: views of one matrix
    q_view, k_view = qkv[:, : 3 * head].view(5, 3, head), qkv[:, 3 * head :].view(5, 2, head)
    kernels.rope_(q_view, k_view, cos, sin)
    for actual, (exact, size) in ((q_view, expected[0]), (k_view, expected[1])):
        slack = 4 * EPS[torch.float32] * torch.cat((size, size, size.new_zeros(*size.shape[:2], head - 2 * half)), -1)
        assert_near(actual, exact, slack, 1.01 * EPS[dtype])


@pytest.mark.parametrize("inner", [1, 7, 32, 100])
def test_silu_mul(kernels: Kernels, dtype: torch.dtype, inner: int) -> None:
    gate_up = random(5, 2 * inner, dtype=dtype, scale=4.0)
    gate, up = gate_up.double().chunk(2, -1)
    exact = gate * torch.sigmoid(gate) * up
    assert_near(kernels.silu_mul(gate_up), exact, 1e-30, 2.02 * EPS[dtype] + 12 * EPS[torch.float32])


@pytest.mark.parametrize("vocab", [1, 7, 128, 1000, 49152])
def test_row_logprobs_and_logsumexp(kernels: Kernels, vocab: int) -> None:
    logits = random(4, vocab, scale=8.0)
    targets = torch.tensor([0, vocab - 1, vocab // 2, vocab // 3])
    lse = torch.logsumexp(logits.double(), -1)
    picked = logits.double().gather(-1, targets[:, None])[:, 0]
    # torch sums 49152 fp32 exponentials in one go; the native kernel in blocks.
    slack = 3e-7 if kernels.name == "native" else 4e-6
    assert_near(kernels.row_logsumexp(logits), lse, slack, 2 * EPS[torch.float32])
    assert_near(kernels.row_logprobs(logits, targets), picked - lse, slack, 2 * EPS[torch.float32])
    assert_near(kernels.row_logsumexp(logits + 1e4), torch.logsumexp((logits + 1e4).double(), -1), slack, 2.0**-23)


def test_masked_and_broken_rows(kernels: Kernels) -> None:
    """P18: a NaN or an infinity in one row shows in that row's result, and in no other's."""
    logits = random(5, 40)
    logits[0, 3:] = -math.inf
    logits[1, 38] = math.nan
    logits[2, 5] = math.inf
    logits[3] = -math.inf
    targets = torch.tensor([2, 0, 0, 0, 0])
    got = kernels.row_logprobs(logits, targets)
    assert abs(got[0].item() - torch.log_softmax(logits[0, :3].double(), 0)[2].item()) < 1e-6
    assert not got[1:4].isfinite().any() and got[1].isnan() and got[3].isnan()
    assert got[4] == kernels.row_logprobs(logits[4:], targets[4:])[0]
    assert kernels.row_logsumexp(logits)[1].isnan()


def test_huge_and_broken_values_reach_only_their_own_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    """P18: overflow, NaN and infinities come out as such, in their own rows only."""
    x, w = random(6, 48, dtype=dtype), random(16, 48, dtype=dtype, seed=1)
    clean = kernels.linear(x, w)
    x[1, 5], x[2, 47], x[3, 0], x[4, :] = math.nan, math.inf, 3e38, 1e-42
    y = kernels.linear(x, w)
    assert y[1].isnan().all() and not y[2].isfinite().any()
    assert torch.equal(y[0], clean[0]) and torch.equal(y[5], clean[5])
    assert y[4].abs().max() < 1e-38
    normal = kernels.rms_norm(x, torch.ones(48, dtype=dtype), 1e-5)
    assert normal[1].isnan().all() and normal[0].isfinite().all() and normal[5].isfinite().all()
    gate_up = torch.tensor([[math.inf, -200.0, math.nan, 1.0, 2.0, 3.0]], dtype=dtype)
    out = kernels.silu_mul(gate_up)[0]
    assert out[0] == math.inf and abs(out[1].item()) < 1e-30 and out[2].isnan()
