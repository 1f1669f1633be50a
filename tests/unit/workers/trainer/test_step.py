"""The gradient of whole batches on the tiny model: cuts, the canary, the reference policy and its KL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.rollouts import completion, result
from harness.tiny_directory import write_tiny_directory
from harness.tiny_model import tiny_spec, tiny_weights
from unison.engine.config import EngineConfig
from unison.engine.models.layout import WeightLayout
from unison.ipc.types import FinishReason
from unison.workers.rollout.records import RolloutResult
from unison.workers.trainer.batching import make_batch
from unison.workers.trainer.config import RECIPES, TrainConfig
from unison.workers.trainer.policy import TrainablePolicy
from unison.workers.trainer.step import BatchGradient, StepAccount

PROMPTS = ((5, 6, 7), (20,), (30, 31, 32, 33))
COMPLETIONS = (((8, 9, 10, 11), (12,), (), (13, 14)), ((21, 22), (23, 24, 25)), ((40,) * 6, (41, 42, 43)))
REWARDS = ((1.0, 0.0, 0.5, 0.25), (0.0, 1.0), (1.0, 0.3))
NOWHERE = Path("/nowhere")
"""No reference policy is loaded where there is no KL."""


def config(budget: int = 4096, temperature: float = 1.0, mode: str = "sync", **algorithm: Any) -> TrainConfig:
    """Small completions, float32."""
    return TrainConfig.from_dict({
        "rollout": {"max_tokens": 8, "temperature": temperature, "mode": mode, "truncated": "mask"},
        "algorithm": algorithm, "optimizer": {"micro_batch_tokens": budget},
        "serve": {"engine": {"dtype": "float32"}},
    })  # fmt: skip


def policy_of(seed: int) -> TrainablePolicy:
    """The tiny model's random weights of a seed."""
    made = TrainablePolicy(tiny_spec(), EngineConfig(device="cpu", dtype="float32"))
    made.read(WeightLayout(tiny_spec(), torch.float32).pack(tiny_weights(tiny_spec(), seed, torch.float32)))
    return made


def drawn(seed: int, temperature: float = 1.0, noise: float = 0.0) -> list[RolloutResult]:
    """Rollouts with the log-probs that a policy has, at temperature 1 and at the sampling temperature."""
    policy, made = policy_of(seed), []
    generator = torch.Generator().manual_seed(seed)
    for order_id, (prompt, texts) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        completions = []
        for index, tokens in enumerate(texts):
            with torch.no_grad():
                both = [policy.logprobs([(prompt, [tokens])], each) for each in (1.0, temperature)]
            raw, cool = (each + noise * torch.randn(each.shape, generator=generator) for each in both)
            reason = FinishReason.LENGTH if len(tokens) == 6 else FinishReason.STOP
            completions.append(completion(
                index, len(tokens), token_ids=tokens, raw_logprobs=tuple(raw.tolist()), logprobs=tuple(cool.tolist()),
                finish_reason=reason,
            ))  # fmt: skip
        group = result(order_id, REWARDS[order_id], completions)
        made.append(RolloutResult(**(vars(group) | {"prompt_ids": prompt})))
    return made


def computed(
    settings: TrainConfig, results: Sequence[RolloutResult], base_model: Path = NOWHERE, seed: int = 0
) -> tuple[torch.Tensor, StepAccount]:
    """Gradient and account of one step."""
    policy = policy_of(seed)
    account = BatchGradient(policy, settings, base_model).compute(make_batch(results, settings, 0, {}))
    return policy.gradient, account


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the tiny model's weights of seed 0: what the run began with."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_directory(directory, 0, torch.float32)
    return directory


@pytest.mark.parametrize("name", RECIPES)
def test_the_budget_changes_nothing(name: str, base_model: Path) -> None:
    """P27: one micro-batch, several, or one per sample give the same loss, gradient and account, with a KL too."""
    results = drawn(0, noise=0.2)
    algorithm = {"name": name, "kl_coef": 0.1}
    whole, account = computed(config(**algorithm), results, base_model, 1)
    assert whole.any() and account.num_tokens == 15
    for budget in (1, 9, 16):
        gradient, again = computed(config(budget, **algorithm), results, base_model, 1)
        assert float((gradient - whole).abs().max() / whole.abs().max()) <= 1e-6
        assert again.metrics() == pytest.approx(account.metrics(), rel=1e-5, abs=1e-6)
        assert again.num_compared == account.num_compared == 21


def test_a_step_forgets_the_one_before() -> None:
    """The gradient is of one batch alone: what another one left in the policy has no part in it."""
    settings, results = config(), drawn(0)
    alone, _ = computed(settings, results[:2])
    policy = policy_of(0)
    step = BatchGradient(policy, settings, NOWHERE)
    step.compute(make_batch(results, settings, 0, {}))
    assert not torch.equal(policy.gradient, alone)
    step.compute(make_batch(results[:2], settings, 0, {}))
    assert torch.equal(policy.gradient, alone)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fresh_samples_have_ratios_of_one(temperature: float) -> None:
    """S35, P19: on samples of the weights in training, the canary's difference is 0 and every ratio is exactly 1."""
    gradient, account = computed(config(temperature=temperature), drawn(0, temperature))
    metrics = account.metrics()
    assert (metrics["canary_max_difference"], metrics["ratio_max_deviation"], metrics["kl"]) == (0.0, 0.0, 0.0)
    assert metrics["ratio"] == 1.0 and metrics["clip_fraction"] == 0.0 and gradient.any()
    _, other = computed(config(temperature=temperature), drawn(0, temperature), seed=1)
    assert other.metrics()["canary_max_difference"] > 0 and other.metrics()["ratio_max_deviation"] > 0


def test_a_correction_moves_the_anchor() -> None:
    """In `async` with a correction, ratios are taken to the policy in training, and the weights bridge to the sampler;
    without one they are taken to the sampler."""
    results = drawn(0, noise=0.2)
    _, plain = computed(config(mode="async"), results)
    assert plain.metrics()["correction"] == 1.0 and plain.metrics()["ratio_max_deviation"] > 0
    _, corrected = computed(config(mode="async", correction="tis"), results)
    assert corrected.metrics()["ratio_max_deviation"] == 0.0
    assert corrected.metrics()["correction"] == pytest.approx(plain.metrics()["ratio"], rel=1e-6)


def test_the_reference_is_what_the_run_began_with(base_model: Path) -> None:
    """A KL in the loss is 0 on the weights of the reference, at any temperature, and above 0 on others."""
    for temperature in (1.0, 0.7):
        settings = config(temperature=temperature, kl_coef=0.5)
        results = drawn(0, temperature)
        _, account = computed(settings, results, base_model, 0)
        assert account.metrics()["kl_reference"] == 0.0
        _, other = computed(settings, results, base_model, 1)
        assert other.metrics()["kl_reference"] > 0.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_penalties(base_model: Path, estimator: str) -> None:
    """A KL in the reward is, per sample, its coefficient times the sum over tokens; samples without tokens have 0."""
    settings = config(kl_coef=0.5, kl_in="reward", kl_estimator=estimator)
    results = drawn(1)
    found = BatchGradient(policy_of(1), settings, base_model).penalties(results)
    assert set(found) == {0, 1, 2}
    reference = policy_of(0)
    for group in results:
        for each, penalty in zip(group.completions, found[group.order_id], strict=True):
            with torch.no_grad():
                log_ratio = torch.tensor(each.raw_logprobs) - reference.logprobs([(group.prompt_ids, [each.token_ids])])
            kl = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": torch.exp(-log_ratio) - 1 + log_ratio}[estimator]
            assert penalty == pytest.approx(0.5 * float(kl.sum()), abs=1e-5)


def test_penalties_are_of_the_sampling_temperature(base_model: Path) -> None:
    """P19: samples that the reference itself drew have no KL to it, at whatever temperature they were drawn."""
    for temperature in (1.0, 0.7):
        settings = config(temperature=temperature, kl_coef=1.0, kl_in="reward")
        found = BatchGradient(policy_of(0), settings, base_model).penalties(drawn(0, temperature))
        assert {penalty for group in found.values() for penalty in group} == {0.0}, temperature


def test_no_penalties_where_the_kl_is_in_the_loss(base_model: Path) -> None:
    """Rewards stay as they are without a KL, and with one in the loss."""
    assert BatchGradient(policy_of(1), config(), NOWHERE).penalties(drawn(0)) == {}
    assert BatchGradient(policy_of(1), config(kl_coef=1.0), base_model).penalties(drawn(0)) == {}
