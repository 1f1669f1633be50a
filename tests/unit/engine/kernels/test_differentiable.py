"""Gradients against torch's own autograd of the reference formulas, in fp32."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from unison.engine.kernels import Kernels, TorchKernels, differentiable, select_kernels


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return select_kernels("cpu", request.param)


def compare(
    ours: Callable[..., object], reference: Callable[..., object], *inputs: torch.Tensor, tolerance: float = 2e-5
) -> None:
    """Same outputs, and same gradients of a random weighting of them."""
    sides = []
    for function in (ours, reference):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weights = [torch.randn(y.shape, generator=torch.Generator().manual_seed(5)) for y in outputs]
        sum((y.float() * weight).sum() for y, weight in zip(outputs, weights, strict=True)).backward()
        sides.append(([y.detach() for y in outputs], [x.grad for x in leaves]))
    for kind in (0, 1):
        for mine, theirs in zip(sides[0][kind], sides[1][kind], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_linear_and_logits(kernels: Kernels) -> None:
    x, w, bias = torch.randn(5, 33), torch.randn(9, 33), torch.randn(9)
    compare(lambda *t: differentiable.linear(kernels, *t), F.linear, x, w, bias)
    compare(lambda *t: differentiable.linear(kernels, *t), F.linear, x, w)
    compare(lambda *t: differentiable.logits(kernels, *t), F.linear, x, w)


@pytest.mark.parametrize("is_slow", [False, True], ids=["fast", "slow"])
def test_products_are_rounded_once(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, with and without a fast GEMM of torch's for them: within half a bf16 step of the float64 product."""
    monkeypatch.setattr(differentiable, "_is_slow", lambda dtype, device: is_slow)
    a, b = torch.randn(33, 65).bfloat16(), torch.randn(17, 65).bfloat16().t()
    exact = a.double() @ b.double()
    got = differentiable.product(a, b)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-5)


def test_what_torch_lacks_a_fast_product_for() -> None:
    """float32 is never widened, and neither is anything on another device than the CPU."""
    assert not differentiable._is_slow(torch.float32, "cpu")
    assert not differentiable._is_slow(torch.bfloat16, "cuda")


def test_norms(kernels: Kernels) -> None:
    x, residual, weight = torch.randn(5, 33), torch.randn(5, 33), torch.randn(33)
    compare(
        lambda x, w: differentiable.rms_norm(kernels, x, w, 1e-5), lambda x, w: F.rms_norm(x, (33,), w, 1e-5), x, weight
    )
    compare(
        lambda r, x, w: differentiable.add_rms_norm(kernels, r, x, w, 1e-5),
        lambda r, x, w: (r + x, F.rms_norm(r + x, (33,), w, 1e-5)),
        residual, x, weight,
    )  # fmt: skip


def test_rope(kernels: Kernels) -> None:
    q, k, angles = torch.randn(5, 3, 20), torch.randn(5, 2, 20), torch.randn(5, 7)
    cos, sin = angles.cos(), angles.sin()

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b, rest = x.split((7, 7, 6), dim=-1)
        return torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None], rest), dim=-1)

    compare(lambda q, k: differentiable.rope(kernels, q, k, cos, sin), lambda q, k: (turn(q), turn(k)), q, k)


def test_silu_mul(kernels: Kernels) -> None:
    compare(
        lambda x: differentiable.silu_mul(kernels, x),
        lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        torch.randn(5, 18) * 3,
    )


def test_row_logprobs_and_logsumexp(kernels: Kernels) -> None:
    logits, targets = torch.randn(5, 40) * 3, torch.tensor([0, 39, 3, 3, 7])
    compare(
        lambda x: differentiable.row_logprobs(kernels, x, targets),
        lambda x: F.log_softmax(x, -1).gather(-1, targets[:, None])[:, 0],
        logits,
    )
    compare(lambda x: differentiable.row_logsumexp(kernels, x), lambda x: torch.logsumexp(x, -1), logits)


def test_forward_with_and_without_gradients_gives_the_same_bits(kernels: Kernels) -> None:
    """R3: what the trainer computes while recording is what the engine computes without."""
    x, w = torch.randn(5, 48).bfloat16(), torch.randn(48, 48).bfloat16()
    leaf = w.clone().requires_grad_()
    assert torch.equal(differentiable.linear(kernels, x, leaf).detach(), kernels.linear(x, w))
    assert torch.equal(differentiable.rms_norm(kernels, x, leaf[0], 1e-5).detach(), kernels.rms_norm(x, w[0], 1e-5))
    residual = x.clone()
    total, normal = differentiable.add_rms_norm(kernels, residual, x, leaf[0], 1e-5)
    assert torch.equal(residual, x), "with gradients the arguments stay as they were"
    assert torch.equal(normal.detach(), kernels.add_rms_norm(residual, x, w[0], 1e-5))
    assert torch.equal(total.detach(), residual)


def test_bf16_gradients_have_their_operands_dtype(kernels: Kernels) -> None:
    x, w = torch.randn(5, 48).bfloat16().requires_grad_(), torch.randn(7, 48).bfloat16().requires_grad_()
    differentiable.row_logsumexp(kernels, differentiable.logits(kernels, x, w)).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16 and w.grad is not None
    wide = [t.detach().float().requires_grad_() for t in (x, w)]
    torch.logsumexp(F.linear(*wide), -1).sum().backward()
    torch.testing.assert_close(x.grad.float(), wide[0].grad, rtol=0.02, atol=0.02)
    torch.testing.assert_close(w.grad.float(), wide[1].grad, rtol=0.02, atol=0.02)


def test_no_gradient_calls_the_kernel_itself() -> None:
    kernels = TorchKernels()
    with torch.no_grad():
        x = torch.randn(2, 8, requires_grad=True)
        assert differentiable.silu_mul(kernels, x).grad_fn is None
    assert differentiable.silu_mul(kernels, torch.randn(2, 8)).grad_fn is None
    gated = differentiable.linear_silu_mul(kernels, torch.randn(2, 8), torch.randn(6, 8))
    assert gated.grad_fn is None and gated.shape == (2, 3)
