"""AdamW in one pass and the sum of squares: formula, bits, rounding, and what they touch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from unison.engine.kernels import NativeKernels, adamw
from unison.engine.kernels.adamw import AdamWRates, AdamWRun, adamw_, reference_adamw_, sum_of_squares
from unison.engine.kernels.build import library

needs_native = pytest.mark.skipif(library() is None, reason="no native kernels here")
fuses = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
RATES = AdamWRates(learning_rate=0.01, beta1=0.9, beta2=0.99, eps=1e-8, num_updates=3)
SEVERAL_ITEMS = 3 * 32768 + 13
"""Elements that make more than three items, the last of which ends with a partial eight."""


def make_run(count: int, out: torch.dtype | None = torch.bfloat16, decay: float = 0.1, seed: int = 0) -> AdamWRun:
    """Random state: moments as after some updates."""
    generator = torch.Generator().manual_seed(seed)
    gradient, master, first, second = (torch.randn(count, generator=generator) for _ in range(4))
    written = None if out is None else torch.zeros(count, dtype=out)
    return AdamWRun(gradient, master, 0.1 * first, 0.1 * second.square(), written, decay)


def copied(run: AdamWRun) -> AdamWRun:
    """The same values elsewhere."""
    out = None if run.out is None else run.out.clone()
    return AdamWRun(
        run.gradient.clone(), run.master.clone(), run.exp_avg.clone(), run.exp_avg_sq.clone(), out, run.weight_decay
    )


def bits(run: AdamWRun) -> list[Tensor]:
    """Representations of everything that is written, with every NaN alike."""
    written = [run.master, run.exp_avg, run.exp_avg_sq] + ([] if run.out is None else [run.out])
    plain = [torch.where(each.isnan(), torch.full_like(each, math.nan), each) for each in written]
    return [each.view(torch.int16 if each.dtype == torch.bfloat16 else torch.int32) for each in plain]


def assert_same(one: AdamWRun, other: AdamWRun) -> None:
    """To the bit."""
    for left, right in zip(bits(one), bits(other), strict=True):
        assert torch.equal(left, right)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], object]]:
    """Sets the threads of the pool; as before afterwards."""
    kernels = NativeKernels()
    before = kernels.num_threads
    yield kernels.set_num_threads
    kernels.set_num_threads(before)


# ---- the formula -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta1", [0.9, 0.3, 0.0])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_one_update_is_the_papers(beta1: float, scale: float) -> None:
    """Loshchilov and Hutter 2019, alg. 2, in float64: moments within two roundings of their terms, masters within four
    of the step and one of their own."""
    run, rates = make_run(5000), replace(RATES, beta1=beta1, scale=scale)
    g, p, m, v = (each.double() for each in (run.gradient, run.master, run.exp_avg, run.exp_avg_sq))
    adamw_([run], rates)
    unit = 2.0**-23
    g = g * scale
    m_bound = 2 * unit * (m.abs() + g.abs())
    m, v = beta1 * m + (1 - beta1) * g, 0.99 * v + 0.01 * g**2
    step = (m / (1 - beta1**3)) / ((v / (1 - 0.99**3)).sqrt() + 1e-8)
    wanted = p - 0.01 * (0.1 * p + step)
    assert bool(((run.exp_avg.double() - m).abs() <= m_bound).all())
    assert bool(((run.exp_avg_sq.double() - v).abs() <= 4 * unit * v).all())
    step_bound = 0.01 * (4 * unit * step.abs() + m_bound / (1 - beta1**3) / (v / (1 - 0.99**3)).sqrt())
    assert bool(((run.master.double() - wanted).abs() <= 2 * unit * p.abs() + step_bound).all())


@pytest.mark.skipif(not fuses, reason="torch has no fused multiply-add here")
@pytest.mark.parametrize(("beta1", "beta2", "decay"), [(0.9, 0.99, 0.0), (0.8, 0.999, 0.1), (0.5, 0.9, 0.3)])
@pytest.mark.parametrize("is_fused", [False, True])
def test_bits_are_torchs(beta1: float, beta2: float, decay: float, is_fused: bool) -> None:
    """Over six updates with changing rates: moments have the bits of torch.optim.AdamW(foreach=False); its fused form
    rounds the second moment elsewhere, its other form leaves roots to MKL, so masters agree within rounding."""
    run = make_run(70_001, decay=decay)
    run.exp_avg.zero_()
    run.exp_avg_sq.zero_()
    theirs = torch.nn.Parameter(run.master.clone())
    optimizer = torch.optim.AdamW(
        [theirs], betas=(beta1, beta2), eps=1e-8, weight_decay=decay, foreach=False, fused=is_fused
    )
    for count in range(1, 7):
        learning_rate, scale = 0.003 * count, 1.0 / count
        run.gradient.copy_(make_run(70_001, seed=count).gradient)
        theirs.grad = run.gradient * scale
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()
        adamw_([run], AdamWRates(learning_rate, beta1, beta2, 1e-8, count, scale))
    state = optimizer.state[theirs]
    assert torch.equal(run.exp_avg, state["exp_avg"])
    assert is_fused or torch.equal(run.exp_avg_sq, state["exp_avg_sq"])
    assert torch.allclose(run.exp_avg_sq, state["exp_avg_sq"], rtol=1e-6, atol=0)
    assert torch.allclose(run.master, theirs.detach(), rtol=1e-6, atol=1e-8)
    assert run.out is not None and torch.equal(run.out, run.master.bfloat16())


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32, None], ids=["bf16", "f32", "none"])
def test_without_native_code(monkeypatch: pytest.MonkeyPatch, out: torch.dtype | None) -> None:
    """The reference, in blocks, has the bits of the native code where torch fuses, and is within rounding elsewhere."""
    monkeypatch.setattr(adamw, "_BLOCK", 1000)
    run = make_run(4321, out)
    other = copied(run)
    adamw_([run], RATES)
    with monkeypatch.context() as patch:
        patch.setattr(adamw, "library", lambda: None)
        adamw_([other], RATES)
        squares = sum_of_squares(run.gradient)
    if fuses:
        assert_same(run, other)
    assert torch.allclose(run.master, other.master, rtol=1e-6, atol=1e-7)
    assert squares == pytest.approx(sum_of_squares(run.gradient), rel=1e-12)


def test_a_gradient_is_only_read() -> None:
    run = make_run(100)
    before = run.gradient.clone()
    adamw_([run], replace(RATES, scale=0.5))
    assert torch.equal(run.gradient, before)


# ---- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 8, 20])
def test_weights_are_rounded_to_even(length: int) -> None:
    """At a learning rate of 0 the master stays and its bfloat16 is written: ties go to even, in whole eights and in
    the rest; what is too large becomes infinite."""
    ties = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20, 3.4e38] * 4
    wanted = [1.0, 1 + 2**-6, -1.0, 1 + 2**-7, math.inf] * 4
    run = make_run(length)
    run.master.copy_(torch.tensor(ties[:length]))
    adamw_([run], replace(RATES, learning_rate=0.0))
    assert run.out is not None and run.out.tolist() == wanted[:length]
    assert run.master.tolist() == torch.tensor(ties[:length]).tolist()


def test_any_master_is_rounded_as_torch_rounds() -> None:
    """Random bit patterns, NaN, infinities and denormals among them."""
    run = make_run(40_000)
    words = torch.randint(-(2**31), 2**31 - 1, (40_000,), generator=torch.Generator().manual_seed(0))
    run.master.copy_(words.int().view(torch.float32))
    adamw_([run], replace(RATES, learning_rate=0.0))
    assert run.out is not None
    assert_same(run, replace(run, out=run.master.bfloat16()))


# ---- what decides nothing: threads, alignment, company ---------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_change_no_bit(set_threads: Callable[[int], object], num_threads: int) -> None:
    """P28: neither of the update nor of the norm."""
    run = make_run(SEVERAL_ITEMS)
    alone, squares = copied(run), sum_of_squares(run.gradient)
    set_threads(1)
    for begin in range(0, SEVERAL_ITEMS, 10_001):
        part = slice(begin, begin + 10_001)
        assert alone.out is not None
        adamw_([AdamWRun(
            alone.gradient[part], alone.master[part], alone.exp_avg[part], alone.exp_avg_sq[part], alone.out[part], 0.1
        )], RATES)  # fmt: skip
    set_threads(num_threads)
    adamw_([run], RATES)
    assert_same(run, alone)
    assert sum_of_squares(run.gradient) == squares


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 15, 16, 17, 100])
def test_lengths_and_offsets(count: int, offset: int) -> None:
    """Elements of a view get the bits they get in company, and its neighbours in memory keep theirs."""
    whole = make_run(200)
    views, before = copied(whole), copied(whole)
    adamw_([whole], RATES)
    part, rest = slice(offset, offset + count), [*range(offset), *range(offset + count, 200)]
    assert views.out is not None and whole.out is not None
    adamw_([AdamWRun(
        views.gradient[part], views.master[part], views.exp_avg[part], views.exp_avg_sq[part], views.out[part], 0.1
    )], RATES)  # fmt: skip
    for got, inside, outside in zip(bits(views), bits(whole), bits(before), strict=True):
        assert torch.equal(got[part], inside[part]) and torch.equal(got[rest], outside[rest])
    exact = math.fsum(float(value) ** 2 for value in whole.gradient[part])
    assert sum_of_squares(whole.gradient[part]) == pytest.approx(exact, rel=1e-14)


def test_extreme_gradients_reach_only_their_own_elements() -> None:
    """P18: NaN, infinities, the largest and the smallest numbers, in whole eights and in the rest."""
    odd = [math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 1e-38]
    run = make_run(1003)
    plain = copied(run)
    places = [*range(100, 108), *range(995, 1003)]
    run.gradient[places] = torch.tensor(odd * 2)
    other = copied(run)
    adamw_([run], RATES)
    adamw_([plain], RATES)
    reference_adamw_(other, RATES)
    kept = [place for place in range(1003) if place not in places]
    for got, wanted, reference in zip(bits(run), bits(plain), bits(other), strict=True):
        assert torch.equal(got[kept], wanted[kept])
        assert not fuses or torch.equal(got, reference)
    assert run.master[100:103].isnan().all()
    assert run.master[103:108].isfinite().all()


def test_denormal_state_is_kept() -> None:
    """Nothing is flushed to zero, whatever the calling thread has asked torch for."""
    run = make_run(20, decay=0.0)
    run.gradient.zero_()
    run.exp_avg.fill_(1e-40)
    run.exp_avg_sq.fill_(1e-40)
    adamw_([run], RATES)
    assert run.exp_avg.tolist() == pytest.approx([0.9e-40] * 20, rel=1e-4)
    assert run.exp_avg_sq.tolist() == pytest.approx([0.99e-40] * 20, rel=1e-4)


# ---- the sum of squares ----------------------------------------------------------------------------------------------


def test_sum_of_squares_of_many() -> None:
    """Against float64, where a sum in float32 is off in the second digit: two million times 1e-3 among larger ones."""
    flat = torch.full((2_000_003,), 1e-3)
    flat[::1000] = 3.0
    exact = float(flat.double().square().sum())
    assert sum_of_squares(flat) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, SEVERAL_ITEMS])
def test_sum_of_squares_of_extremes(count: int) -> None:
    """Squares of any float fit; NaN and infinities show."""
    for value in (3e38, 1e-45):
        assert sum_of_squares(torch.full((count,), value)) == pytest.approx(
            count * float(torch.tensor(value)) ** 2, rel=1e-12
        )
    for bad in (math.nan, math.inf, -math.inf):
        flat = torch.ones(count)
        flat[-1:] = bad
        assert count == 0 or not math.isfinite(sum_of_squares(flat))


# ---- what is refused -------------------------------------------------------------------------------------------------

SHARED = torch.zeros(16)
REFUSED: list[tuple[type[Exception], dict[str, Any]]] = [
    (TypeError, {"gradient": torch.zeros(8, dtype=torch.bfloat16)}),
    (TypeError, {"master": torch.zeros(8, dtype=torch.float64)}),
    (TypeError, {"exp_avg": torch.zeros(8, device="meta")}),
    (TypeError, {"out": torch.zeros(8, dtype=torch.float16)}),
    (ValueError, {"gradient": torch.zeros(9)}),
    (ValueError, {"exp_avg_sq": torch.zeros(7)}),
    (ValueError, {"exp_avg": torch.zeros(16)[::2]}),
    (ValueError, {"out": torch.zeros(2, 4)}),
    (ValueError, {"exp_avg": SHARED[:8], "exp_avg_sq": SHARED[7:15]}),
    (ValueError, {"master": SHARED[:8], "out": SHARED[:8]}),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_wrong_arguments_change_nothing(case: int) -> None:
    """Also not the runs before the wrong one."""
    kind, wrong = REFUSED[case]
    good = make_run(8)
    before = copied(good)
    with pytest.raises(kind):
        adamw_([good, replace(make_run(8, seed=1), **wrong)], RATES)
    assert_same(good, before)


def test_other_refusals() -> None:
    run = make_run(8)
    with pytest.raises(ValueError, match="num_updates"):
        adamw_([run], replace(RATES, num_updates=0))
    with pytest.raises(ValueError, match="overlap"):
        adamw_([run, run], RATES)
    with pytest.raises(TypeError, match="float32"):
        sum_of_squares(torch.zeros(8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="contiguous"):
        sum_of_squares(torch.zeros(16)[::2])
