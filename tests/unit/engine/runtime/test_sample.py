"""The sampler: right distributions, right numbers, and rows that don't see each other."""

import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from unison.engine.kernels import build
from unison.engine.kernels.kernels import Kernels
from unison.engine.kernels.native_kernels import NativeKernels
from unison.engine.kernels.torch_kernels import TorchKernels
from unison.engine.runtime.rng import uniforms
from unison.engine.runtime.sample import RowSampling, Sampled, Sampler, SampleStatus

RowOf = Callable[..., RowSampling]
Bits = Callable[[Sampled, int], tuple[bytes, ...]]
Oracle = Callable[[np.ndarray, RowSampling, Sequence[int]], tuple[np.ndarray, float]]
DrawMany = Callable[[torch.Tensor, RowSampling, Sequence[int], int], Sampled]

VOCAB = 300
HISTORY = (3, 9, 3, 11, 3)
MIXTURE: list[dict[str, object]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_k": 1, "temperature": 2.0},
    {"top_p": 0.8},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.1, "temperature": 1.3},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "window": 4},
    {"repetition_penalty": 0.6, "frequency_penalty": -1.0, "window": 3, "top_p": 0.9},
    {"logit_bias": ((4, 5.0), (8, -100.0)), "temperature": 0.5},
    {"allowed_token_ids": (2, 3, 50), "top_k": 2},
    {"bad_token_ids": (0, 1, 2, 250), "temperature": 0.0},
    {"min_tokens": 20, "eos": (5, 6), "top_p": 0.95},
    {"min_tokens": 2, "eos": (5, 6)},
    {"temperature": 0.0, "repetition_penalty": 5.0},
    {"temperature": 100.0, "top_k": VOCAB},
    {"temperature": 0.01, "min_p": 1.0},
    {"logit_bias": ((3, 2.0), (9, -2.0)), "repetition_penalty": 1.5, "allowed_token_ids": (3, 9, 11, 40), "top_k": 3},
]


def logits_of(rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 2.5) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("keywords", MIXTURE)
def test_numbers_equal_the_oracle(
    keywords: dict[str, object], row_of: RowOf, oracle: Oracle, draw_many: DrawMany
) -> None:
    """P19, P20, S35: token, log-prob and mass are those of the defined distribution; raw comes beside them."""
    for trial in range(4):
        logits = logits_of(1, trial)[0]
        row = row_of(seed=trial, **keywords)
        probs, mass = oracle(logits.numpy(), row, HISTORY)
        sampled = draw_many(logits, row, HISTORY, 25)
        tokens = sampled.token_ids.numpy()
        index = np.arange(25)
        u = uniforms(np.full(25, trial), index, np.full(25, len(HISTORY)))
        expected = np.searchsorted(probs.cumsum(), u * probs.sum(), side="right")
        assert tokens.tolist() == expected.tolist()
        np.testing.assert_allclose(sampled.logprobs, np.log(probs[tokens]), atol=2e-5)
        np.testing.assert_allclose(sampled.log_support_mass, mass, atol=2e-5)
        raw = torch.log_softmax(logits.double(), 0)[sampled.token_ids]
        np.testing.assert_allclose(sampled.raw_logprobs, raw, atol=2e-5)
        assert (sampled.status == SampleStatus.OK).all()


@pytest.mark.parametrize("keywords", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 6, "top_p": 0.8},
                                      {"temperature": 0.6, "min_p": 0.05, "bad_token_ids": (1,)},
                                      {"repetition_penalty": 1.5, "temperature": 1.4}])  # fmt: skip
def test_frequencies_follow_the_distribution(
    keywords: dict[str, object], row_of: RowOf, oracle: Oracle, draw_many: DrawMany
) -> None:
    """P40: the samples of one seed are independent draws of the distribution, by chi-square."""
    logits, row, count = logits_of(1, 4, vocab=12, scale=1.0)[0], row_of(seed=99, **keywords), 6000
    probs, _ = oracle(logits.numpy(), row, (3, 3))
    found = np.bincount(draw_many(logits, row, (3, 3), count).token_ids, minlength=12)
    assert found[probs == 0].sum() == 0
    support = probs > 0
    expected = probs[support] * count
    statistic = ((found[support] - expected) ** 2 / expected).sum()
    freedom = support.sum() - 1
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom) + 6


@pytest.mark.parametrize("vocab", [VOCAB, 1031])
def test_rows_are_the_same_in_any_company(vocab: int, kernels: Kernels, row_of: RowOf, bits: Bits) -> None:
    """R3, P40: a row gets the same bits alone, in a mixture, in another order, and beside broken rows."""
    logits = logits_of(len(MIXTURE), 1, vocab)
    rows = [row_of(seed=5, index=i, **keywords) for i, keywords in enumerate(MIXTURE)]
    sampler = Sampler(vocab, kernels, "cpu")
    history = [list(HISTORY[: i % 6]) for i in range(len(rows))]
    mixed = sampler.sample(logits, sampler.prepare(rows, history))
    back = sampler.sample(logits.flip(0).contiguous(), sampler.prepare(rows[::-1], history[::-1]))
    doubled = torch.full((2 * len(rows), vocab), float("nan"))
    doubled[1::2] = logits
    twice = sampler.prepare([row for row in rows for _ in (0, 1)], [each for each in history for _ in (0, 1)])
    beside = sampler.sample(doubled, twice)
    for i, row in enumerate(rows):
        alone = sampler.sample(logits[i : i + 1], sampler.prepare([row], [history[i]]))
        assert bits(alone, 0) == bits(mixed, i) == bits(back, len(rows) - 1 - i) == bits(beside, 2 * i + 1)
        assert beside.status[2 * i] == SampleStatus.NON_FINITE_LOGITS


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_the_same_for_any_number_of_threads(threads: int, row_of: RowOf, bits: Bits, kernels: Kernels) -> None:
    """R3: nor does the number of threads matter, at a vocabulary that is worth cutting."""
    rows = [row_of(index=i, **keywords) for i, keywords in enumerate(MIXTURE[:9])]
    logits = logits_of(len(rows), 2, 40_003)
    sampler = Sampler(40_003, kernels, "cpu")
    before = torch.get_num_threads()
    reference = sampler.sample(logits, sampler.prepare(rows, [()] * len(rows)))
    try:
        torch.set_num_threads(threads)
        again = sampler.sample(logits, sampler.prepare(rows, [()] * len(rows)))
    finally:
        torch.set_num_threads(before)
    assert all(bits(reference, i) == bits(again, i) for i in range(len(rows)))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_raw_is_the_trainers_to_the_bit(mode: Callable[[], object], kernels: Kernels, row_of: RowOf) -> None:
    """S35, P19: raw log-probs are those of row_logprobs; at temperature 1 unfiltered, logprob is that too."""
    logits = logits_of(len(MIXTURE), 3)
    sampler = Sampler(VOCAB, kernels, "cpu")
    rows = [row_of(index=i, **keywords) for i, keywords in enumerate(MIXTURE)]
    with mode():  # type: ignore[attr-defined]
        batch = sampler.prepare(rows, [()] * len(rows))
        sampled = sampler.sample(logits, batch)
        batch.advance(sampled.token_ids)
        assert sampler.sample(logits, batch).status.sum() == 0
    assert torch.equal(sampled.raw_logprobs, kernels.row_logprobs(logits, sampled.token_ids))
    assert sampled.logprobs[0] == sampled.raw_logprobs[0] and sampled.log_support_mass[0] == 0
    past = sampler.sample(logits[16:17], sampler.prepare([rows[16]], [(1, 2)]))  # min_tokens reached: nothing banned
    assert past.logprobs[0] == past.raw_logprobs[0] and past.log_support_mass[0] == 0


@pytest.mark.skipif(build.library() is None, reason="no native kernels here")
def test_native_and_torch_agree(row_of: RowOf) -> None:
    """P20: both paths draw the same tokens and give the same numbers up to rounding."""
    logits = logits_of(400, 6, 2000)
    rows = [row_of(seed=i, **MIXTURE[i % len(MIXTURE)]) for i in range(400)]
    results = []
    for each in (NativeKernels(), TorchKernels()):
        sampler = Sampler(2000, each, "cpu")
        results.append(sampler.sample(logits, sampler.prepare(rows, [HISTORY] * 400)))
    a, b = results
    assert (a.token_ids != b.token_ids).sum() <= 1  # a uniform may fall between two roundings of one boundary
    same = a.token_ids == b.token_ids
    for field in ("logprobs", "raw_logprobs", "log_support_mass"):
        torch.testing.assert_close(getattr(a, field)[same], getattr(b, field)[same], atol=3e-5, rtol=0)


@pytest.mark.skipif(build.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("shape", ["flat", "steep", "few values", "mostly impossible", "rising", "zeros of both signs"])
def test_native_selection_never_misses_a_token(shape: str, row_of: RowOf) -> None:
    """P20: rows that are never sorted as a whole keep the very set that sorting keeps, whatever the logits look
    like."""
    vocab, kinds = 5003, [{"top_k": 1}, {"top_k": 40}, {"top_k": 79}, {"top_k": 1500}, {"top_p": 0.01}, {"top_p": 0.5},
                          {"top_p": 0.999}, {"top_k": 700, "top_p": 0.9}, {"top_p": 0.9, "temperature": 30.0},
                          {"top_k": 5002, "top_p": 0.95, "temperature": 0.05}]  # fmt: skip
    base = logits_of(1, 30, vocab, 1.0)[0]
    logits = {
        "flat": base * 1e-3,
        "steep": base * 20,
        "few values": (base * 2).round(),
        "mostly impossible": base.masked_fill(base < 2.5, float("-inf")),
        "rising": torch.linspace(-9, 9, vocab),
        "zeros of both signs": torch.where(base > 0, 0.0, -0.0),
    }[shape]
    rows = [row_of(index=i, **kinds[i % len(kinds)]) for i in range(4 * len(kinds))]
    native, reference = (
        sampler.sample(logits.expand(len(rows), -1), sampler.prepare(rows, [()] * len(rows)))
        for sampler in (Sampler(vocab, each, "cpu") for each in (NativeKernels(), TorchKernels()))
    )
    assert native.token_ids.tolist() == reference.token_ids.tolist()
    # A set that is one token larger or smaller would show: the lightest token kept here weighs more than this.
    torch.testing.assert_close(native.log_support_mass, reference.log_support_mass, atol=1e-6, rtol=2e-6)
    torch.testing.assert_close(native.logprobs, reference.logprobs, atol=2e-5, rtol=0)


def test_penalties_look_at_long_histories(kernels: Kernels, row_of: RowOf, oracle: Oracle, draw_many: DrawMany) -> None:
    """P20: counts over a window of hundreds of tokens, prompt and completion told apart."""
    rng = np.random.default_rng(5)
    prompt, generated = rng.integers(0, 40, 300).tolist(), rng.integers(20, 60, 200).tolist()
    logits = logits_of(1, 31)[0]
    for window in (0, 150, 350):
        row = row_of(
            window=window, prompt=prompt, repetition_penalty=1.3, presence_penalty=-0.5, frequency_penalty=0.05
        )
        probs, mass = oracle(logits.numpy(), row, generated)
        sampled = draw_many(logits, row, generated, 30)
        np.testing.assert_allclose(sampled.logprobs, np.log(probs[sampled.token_ids]), atol=2e-5)
        np.testing.assert_allclose(sampled.log_support_mass, mass, atol=2e-5)


@pytest.mark.parametrize("keywords", [{}, {"temperature": 0.5}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}])
@pytest.mark.parametrize("where", [0, 7, VOCAB - 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_rows_say_so(
    keywords: dict[str, object], where: int, value: float, kernels: Kernels, row_of: RowOf, bits: Bits
) -> None:
    """P18: NaN or infinite logits end their own row with a status; the neighbours get what they got before."""
    sampler, rows = Sampler(VOCAB, kernels, "cpu"), [row_of(index=i, **keywords) for i in range(4)]
    logits = logits_of(4, 8)
    clean = sampler.sample(logits, sampler.prepare(rows, [()] * 4))
    logits[1, where] = value
    logits[2] = float("-inf")
    sampled = sampler.sample(logits, sampler.prepare(rows, [()] * 4))
    assert sampled.status.tolist() == [0, 1, 1, 0]
    assert sampled.token_ids[1:3].tolist() == [0, 0] and sampled.logprobs[1:3].isnan().all()
    assert bits(sampled, 0) == bits(clean, 0) and bits(sampled, 3) == bits(clean, 3)


def test_minus_infinity_is_probability_zero(kernels: Kernels, row_of: RowOf) -> None:
    """P18: masked logits are no fault; all the rest is drawn as if they weren't there."""
    sampler = Sampler(VOCAB, kernels, "cpu")
    logits = torch.full((3, VOCAB), float("-inf"))
    logits[:, [4, 200]] = torch.tensor([1.0, 2.0])
    rows = [row_of(index=1), row_of(temperature=0.0), row_of(index=2, top_p=0.99)]
    sampled = sampler.sample(logits, sampler.prepare(rows, [()] * 3))
    assert sampled.status.tolist() == [0, 0, 0] and set(sampled.token_ids.tolist()) <= {4, 200}
    assert sampled.token_ids[1] == 200 and sampled.raw_logprobs.isfinite().all()


def test_nothing_left_to_draw(kernels: Kernels, row_of: RowOf, bits: Bits) -> None:
    """P18: bans that leave nothing give EMPTY_SUPPORT, and the neighbour doesn't notice."""
    sampler = Sampler(8, kernels, "cpu")
    logits = logits_of(4, 9, 8)
    logits[2, 3] = float("-inf")
    rows = [row_of(bad_token_ids=tuple(range(8))), row_of(top_k=2), row_of(allowed_token_ids=(3,)),
            row_of(min_tokens=1, eos=range(8), temperature=0.0)]  # fmt: skip
    sampled = sampler.sample(logits, sampler.prepare(rows, [()] * 4))
    assert sampled.status.tolist() == [2, 0, 2, 2]
    alone = sampler.sample(logits[1:2], sampler.prepare([rows[1]], [()]))
    assert bits(alone, 0) == bits(sampled, 1)


def test_an_improbable_allowed_token_keeps_its_numbers(kernels: Kernels, row_of: RowOf) -> None:
    """P20: the mass of a support as improbable as e^-80 is exact, and its token certain."""
    logits = torch.zeros(1, 64)
    logits[0, 5] = -80.0
    sampler = Sampler(64, kernels, "cpu")
    sampled = sampler.sample(logits, sampler.prepare([row_of(allowed_token_ids=(5,), temperature=1.0)], [()]))
    assert sampled.token_ids.tolist() == [5] and sampled.logprobs[0] == 0
    assert sampled.log_support_mass[0].item() == pytest.approx(-80 - np.log(63), abs=1e-4)


def test_ties_go_to_the_lowest_ids(kernels: Kernels, row_of: RowOf) -> None:
    """R3: where probabilities are equal, ids decide: for greedy, top-k and top-p."""
    logits = torch.zeros(60, 50)
    logits[:, 30:] = 1.0
    kinds = ({"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.05})
    rows = [row_of(index=i, **kinds[i % 3]) for i in range(60)]
    sampler = Sampler(50, kernels, "cpu")
    tokens = sampler.sample(logits, sampler.prepare(rows, [()] * 60)).token_ids
    assert set(tokens[0::3].tolist()) == {30}
    assert set(tokens[1::3].tolist()) == {30, 31, 32}
    assert set(tokens[2::3].tolist()) == {30, 31}  # each has mass 0.0366


def test_min_tokens_holds_stops_back(kernels: Kernels, row_of: RowOf) -> None:
    """S35: no stop token before min_tokens, and the mass says what was held back; afterwards it is free."""
    logits = torch.zeros(1, 16)
    logits[0, 5] = 20.0
    row = row_of(min_tokens=2, eos=(5,))
    sampler = Sampler(16, kernels, "cpu")
    batch = sampler.prepare([row], [[]])
    tokens, masses = [], []
    for _ in range(3):
        sampled = sampler.sample(logits, batch)
        tokens.append(int(sampled.token_ids[0]))
        masses.append(float(sampled.log_support_mass[0]))
        batch.advance(sampled.token_ids)
    assert 5 not in tokens[:2] and tokens[2] == 5
    assert masses[0] == pytest.approx(np.log(15) - 20, abs=1e-4) and masses[2] == 0


def test_advance_equals_a_fresh_batch(kernels: Kernels, row_of: RowOf, bits: Bits) -> None:
    """R3: steady decode and a rebuilt batch are the same, for every kind of row, penalties' windows included."""
    sampler = Sampler(VOCAB, kernels, "cpu")
    rows = [row_of(index=i, prompt=(3, 4, 3), **keywords) for i, keywords in enumerate(MIXTURE)]
    generated: list[list[int]] = [[] for _ in rows]
    batch = sampler.prepare(rows, generated)
    for step in range(6):
        logits = logits_of(len(rows), 20 + step)
        steady = sampler.sample(logits, batch)
        fresh = sampler.sample(logits, sampler.prepare(rows, generated))
        assert all(bits(steady, i) == bits(fresh, i) for i in range(len(rows)))
        batch.advance(steady.token_ids)
        for tokens, token in zip(generated, steady.token_ids.tolist(), strict=True):
            tokens.append(token)


def test_tokens_drawn_follow_seed_index_and_position(kernels: Kernels, row_of: RowOf) -> None:
    """P40: the samples of a group differ, and the same seed gives the same completion again."""
    sampler, logits = Sampler(5000, kernels, "cpu"), torch.zeros(64, 5000)
    rows = [row_of(seed=11, index=i) for i in range(64)]
    first = sampler.sample(logits, sampler.prepare(rows, [()] * 64)).token_ids
    again = sampler.sample(logits, sampler.prepare(rows, [()] * 64)).token_ids
    later = sampler.sample(logits, sampler.prepare(rows, [(1,)] * 64)).token_ids
    assert torch.equal(first, again)
    assert len(set(first.tolist())) > 55 and (first == later).sum() < 5


def test_alternatives(kernels: Kernels, row_of: RowOf) -> None:
    """S35: alternatives are raw log-probs, descending, of equals the lower id first, only where asked for."""
    sampler, logits = Sampler(VOCAB, kernels, "cpu"), logits_of(4, 12)
    logits[0] = 0.0
    logits[3, 1] = float("nan")
    rows = [row_of(logprobs=3), row_of(), row_of(logprobs=5, top_k=2, temperature=0.3), row_of(logprobs=2)]
    sampled = sampler.sample(logits, sampler.prepare(rows, [()] * 4))
    first, nothing, third, broken = sampled.top
    assert nothing is None and broken is None and first is not None and third is not None
    assert first.token_ids == (0, 1, 2)
    expected = logits[2].sort(descending=True, stable=True).indices[:5]
    assert third.token_ids == tuple(expected.tolist())
    assert torch.equal(
        torch.tensor(third.logprobs), kernels.row_logprobs(logits[2].expand(5, -1).contiguous(), expected)
    )
    assert sampler.top_logprobs(logits[2:3], 5) == [third] and sampler.top_logprobs(logits[:0], 5) == []
    assert len(sampler.top_logprobs(logits[:1], VOCAB + 5)[0].token_ids) == VOCAB
    assert sampler.sample(logits[1:2], sampler.prepare([rows[1]], [()])).top == ()


def test_smallest_batches_and_vocabularies(kernels: Kernels, row_of: RowOf) -> None:
    """R3: no rows, one row, one token, strided rows and ids beyond the vocabulary are no special cases."""
    sampler = Sampler(VOCAB, kernels, "cpu")
    assert sampler.sample(logits_of(0), sampler.prepare([], [])).token_ids.shape == (0,)
    one = Sampler(1, kernels, "cpu")
    sampled = one.sample(torch.zeros(2, 1), one.prepare([row_of(), row_of(top_p=0.5)], [(), ()]))
    assert sampled.token_ids.tolist() == [0, 0] and sampled.logprobs.tolist() == [0.0, 0.0]
    wide = logits_of(3, 1, VOCAB + 5)
    rows = [row_of(), row_of(top_k=9), row_of(bad_token_ids=(10**6,), repetition_penalty=1.2, prompt=(10**6,))]
    batch = sampler.prepare(rows, [()] * 3)
    whole = sampler.sample(wide[:, :VOCAB].contiguous(), batch)
    assert torch.equal(sampler.sample(wide[:, :VOCAB], batch).logprobs, whole.logprobs)


def test_huge_logits_do_not_overflow(kernels: Kernels, row_of: RowOf) -> None:
    """P18: logits near the end of fp32 divided by a small temperature or penalty stay numbers."""
    logits = torch.zeros(3, 32)
    logits[:, 3], logits[:, 4] = 3e38, -3e38
    rows = [
        row_of(temperature=0.01),
        row_of(temperature=0.01, top_p=0.9),
        row_of(repetition_penalty=0.01, prompt=(3, 4)),
    ]
    sampler = Sampler(32, kernels, "cpu")
    sampled = sampler.sample(logits, sampler.prepare(rows, [()] * 3))
    assert sampled.status.tolist() == [0, 0, 0] and sampled.token_ids.tolist() == [3, 3, 3]
    assert sampled.logprobs.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_sampling_stands_without_the_executor() -> None:
    """S21: the sampler lies beside the executor and doesn't load it."""
    program = "import sys, unison.engine.runtime.sample; print('unison.engine.runtime.executor' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout.strip() == "False"


def test_wrong_arguments_are_refused(row_of: RowOf) -> None:
    sampler = Sampler(VOCAB, TorchKernels(), "cpu")
    batch = sampler.prepare([row_of()], [()])
    with pytest.raises(TypeError, match="float32"):
        sampler.sample(logits_of(1).double(), batch)
    with pytest.raises(ValueError, match=r"takes \(1, 300\)"):
        sampler.sample(logits_of(2), batch)
    with pytest.raises(ValueError, match="each row needs one"):
        sampler.prepare([row_of()], [])
