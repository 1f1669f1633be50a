"""BatchGradient: the gradient of the configured loss over one batch, and what is to be known of it.

Owns: the walk over micro-batches, the reference policy, the account of ratios. The gradient is left in the policy;
nothing is updated here. Called by the training loop, in its one thread.

Shapes: N completion tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...engine.models.layout import DecoderWeights
from ...engine.models.loader import load_into
from ..rollout.records import RolloutResult
from .batching import TokenColumns, TrainBatch, TrainGroup, as_groups, behaviour_logprobs, micro_batches
from .config import TrainConfig
from .losses import LossTerms, LossTokens, kl_estimate, policy_loss
from .policy import TrainablePolicy


@dataclass
class StepAccount:
    """Sums over the counting tokens of a batch."""

    loss: float = 0.0
    """The loss."""
    num_tokens: float = 0.0
    """Tokens that count."""
    sums: dict[str, float] = field(default_factory=dict)
    """By name."""
    max_ratio_deviation: float = 0.0
    """Largest |ratio - 1| over all tokens."""
    max_difference: float = 0.0
    """Largest |trainer's log-prob - engine's| over fresh tokens: the canary; 0 where they agree in every bit."""
    num_compared: int = 0
    """Fresh tokens that were compared."""

    def add(self, tokens: LossTokens, terms: LossTerms, columns: TokenColumns) -> None:
        """Count one micro-batch."""
        self.loss += float(terms.loss.detach())
        self.num_tokens += float(tokens.mask.sum())
        logprobs = tokens.logprobs.detach()
        log_ratio = logprobs - tokens.behaviour
        values = {
            "kl": torch.exp(log_ratio) - 1.0 - log_ratio, "clip_fraction": terms.is_clipped.float(),
            "entropy": -tokens.behaviour, "ratio": terms.ratio, "correction": terms.weight,
        }  # fmt: skip
        if tokens.reference is not None:
            values["kl_reference"] = kl_estimate(logprobs, tokens.reference, "k3")
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float((value * tokens.mask).sum())
        if len(logprobs):
            self.max_ratio_deviation = max(self.max_ratio_deviation, float((terms.ratio - 1.0).abs().max()))
        fresh = log_ratio[columns.is_fresh]
        if len(fresh):
            self.num_compared += len(fresh)
            self.max_difference = max(self.max_difference, float(fresh.abs().max()))

    def metrics(self) -> dict[str, float]:
        """Means per counting token, and the extremes."""
        means = {name: value / max(1.0, self.num_tokens) for name, value in self.sums.items()}
        found = {"loss": self.loss, **means, "ratio_max_deviation": self.max_ratio_deviation}
        if self.num_compared:
            found["canary_max_difference"] = self.max_difference
        return found


class BatchGradient:
    """Computes gradients. Life: built beside the policy → one `compute` per step."""

    def __init__(self, policy: TrainablePolicy, config: TrainConfig, base_model: Path) -> None:
        """`base_model` is where the reference policy comes from; it is loaded where a KL term needs one."""
        self._policy = policy
        self._config = config
        self._reference: DecoderWeights | None = None
        if config.algorithm.kl_coef:
            views = policy.layout.views(policy.layout.allocate(config.serve.engine.device))
            load_into(base_model, policy.layout, views)
            self._reference = policy.layout.bind(views)

    def penalties(self, results: Sequence[RolloutResult]) -> Mapping[int, tuple[float, ...]]:
        """KL to the reference per sample, times its coefficient, where it belongs into the reward."""
        algorithm = self._config.algorithm
        if self._reference is None or algorithm.kl_in != "reward":
            return {}
        found = {}
        for result in results:
            completions = [completion.token_ids for completion in result.completions]
            reference = self._reference_logprobs([(result.prompt_ids, completions)])
            drawn = [value for each in result.completions for value in behaviour_logprobs(each, self._config)]
            behaviour = torch.tensor(drawn, device=self._policy.device)
            kl = kl_estimate(behaviour, reference, algorithm.kl_estimator).split([len(ids) for ids in completions])
            found[result.order_id] = tuple(algorithm.kl_coef * float(part.sum()) for part in kl)
        return found

    def compute(self, batch: TrainBatch) -> StepAccount:
        """Leave the gradient of the whole batch in the policy.

        The policy must have `read` the weights to be trained. Invariant: the result doesn't depend on
        `optimizer.micro_batch_tokens` (but for rounding).
        """
        account = StepAccount()
        self._policy.zero_gradient()
        for part in micro_batches(batch.groups, self._config.optimizer.micro_batch_tokens):
            columns = TokenColumns.of(part, self._policy.device)
            tokens = self._tokens(part, columns)
            terms = policy_loss(tokens, batch.scale, self._config.algorithm)
            if terms.loss.requires_grad:
                terms.loss.backward()
            account.add(tokens, terms, columns)
            if not math.isfinite(account.loss):
                break  # the gradient's norm says so too
        return account

    def _tokens(self, part: Sequence[TrainGroup], columns: TokenColumns) -> LossTokens:
        algorithm = self._config.algorithm
        groups = as_groups(part)
        logprobs = self._policy.logprobs(groups, self._config.rollout.temperature)
        is_decoupled = algorithm.correction != "none" and self._config.rollout.mode == "async"
        reference = None
        if self._reference is not None and algorithm.kl_in == "loss":
            reference = self._reference_logprobs(groups)
        return LossTokens(
            logprobs, logprobs.detach() if is_decoupled else columns.behaviour, columns.behaviour, columns.advantages,
            columns.mask, columns.sequence, columns.num_sequences, reference,
        )  # fmt: skip

    def _reference_logprobs(self, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> Tensor:
        with torch.no_grad():
            return self._policy.logprobs(groups, self._config.rollout.temperature, self._reference)
