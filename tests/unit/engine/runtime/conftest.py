"""What the sampler's tests share: kernels of both kinds, rows, and an oracle in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from unison.engine.kernels import build
from unison.engine.kernels.kernels import Kernels
from unison.engine.kernels.native_kernels import NativeKernels
from unison.engine.kernels.torch_kernels import TorchKernels
from unison.engine.runtime.sample import RowSampling, Sampled, Sampler
from unison.ipc.types import SamplingParams

Oracle = Callable[[np.ndarray, RowSampling, Sequence[int]], tuple[np.ndarray, float]]


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Both ways to do the arithmetic; native where it can be had."""
    if request.param == "torch":
        return TorchKernels()
    if build.library() is None:
        pytest.skip("no native kernels here")
    return NativeKernels()


@pytest.fixture
def row_of() -> Callable[..., RowSampling]:
    """A row from keywords of SamplingParams, and its seed, index, stops, window and prompt."""

    def make(
        seed: int = 7,
        index: int = 0,
        eos: Sequence[int] = (),
        window: int = 0,
        prompt: Sequence[int] = (1,),
        **params: object,
    ) -> RowSampling:
        return RowSampling(SamplingParams(**params), seed, index, frozenset(eos), window, tuple(prompt))  # type: ignore[arg-type]

    return make


@pytest.fixture
def bits() -> Callable[[Sampled, int], tuple[bytes, ...]]:
    """All that one row got, as bytes, so that NaN equals NaN."""

    def of(sampled: Sampled, row: int) -> tuple[bytes, ...]:
        tensors = (
            sampled.token_ids,
            sampled.logprobs,
            sampled.raw_logprobs,
            sampled.log_support_mass,
            sampled.status,
        )
        return tuple(tensor[row].numpy().tobytes() for tensor in tensors)

    return of


@pytest.fixture
def oracle() -> Oracle:
    """Distribution [V] that a row draws from and the log of the mass it kept, by sorting lists in float64."""
    return _oracle


def _oracle(logits: np.ndarray, row: RowSampling, generated: Sequence[int]) -> tuple[np.ndarray, float]:
    params = row.params
    x = logits.astype(np.float64).copy()
    for token, value in params.logit_bias:
        x[token] += value
    window = row.window or 10**9
    for token in set([*row.prompt_ids, *generated][-window:]):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    recent = list(generated)[-window:]
    for token in set(recent):
        x[token] -= params.presence_penalty + params.frequency_penalty * recent.count(token)
    whole = _softmax(x / (params.temperature or 1.0))
    banned = set(params.bad_token_ids)
    if params.allowed_token_ids is not None:
        banned |= set(range(len(x))) - set(params.allowed_token_ids)
    if len(generated) < params.min_tokens:
        banned |= row.eos_ids
    order = [token for token in np.argsort(-whole, kind="stable").tolist() if token not in banned and whole[token] > 0]
    if params.is_greedy:
        order = order[:1]
    else:
        order = order[: params.top_k or None]
        kept, mass = [], 0.0
        for token in order:
            if params.top_p < 1 and mass >= params.top_p * whole[order].sum():
                break
            kept.append(token)
            mass += whole[token]
        order = [token for token in kept if whole[token] >= params.min_p * whole[kept[0]]]
    result = np.zeros_like(whole)
    result[order] = whole[order] / whole[order].sum()
    return result, float(np.log(whole[order].sum()))


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


@pytest.fixture
def draw_many(kernels: Kernels) -> Callable[[torch.Tensor, RowSampling, Sequence[int], int], Sampled]:
    """Draws that differ in their sample index alone, in one call."""

    def draw(logits_V: torch.Tensor, row: RowSampling, generated: Sequence[int], count: int) -> Sampled:
        sampler = Sampler(len(logits_V), kernels, "cpu")
        rows = [
            RowSampling(row.params, row.seed, index, row.eos_ids, row.window, row.prompt_ids) for index in range(count)
        ]
        return sampler.sample(logits_V.expand(count, -1), sampler.prepare(rows, [generated] * count))

    return draw
