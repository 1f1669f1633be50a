"""RolloutGenerator: a prompt becomes a group of completions, through the engine's own queue and KV.

One request per group, so the prompt is computed once and its KV shared (S34). What comes back is checked before
anything is scored: every completion ended by itself, and every token has its version (V3, R5, P25).

Owns: the sampling parameters of each split, and the check. Called by the rollout worker; usable with any AsyncClient.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ipc.async_client import AsyncClient
from ...ipc.errors import InvalidRequestError, UnisonError
from ...ipc.types import Completion, FinishReason, OnUpdate, SamplingParams
from ..trainer.config import TrainConfig
from .prompts import Prompt, PromptRenderer
from .records import HELD_OUT, RawRollout, RolloutOrder


class RolloutRejectedError(UnisonError):
    """A rollout that must not be trained on; `reason` is one of REJECTIONS, `indices` the completions at fault."""

    def __init__(self, reason: str, message: str, indices: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.reason = reason
        self.indices = tuple(indices)


class RolloutGenerator:
    """Makes raw rollouts. Stateless but for the client; any number of `generate` at once."""

    def __init__(self, client: AsyncClient, renderer: PromptRenderer, config: TrainConfig) -> None:
        self._client = client
        self._renderer = renderer
        self._config = config

    async def generate(self, order: RolloutOrder, prompt: Prompt) -> RawRollout:
        """One group; sent again by itself if the worker dies, with the same draws (R3).

        Raises:
            RolloutRejectedError: nothing came of it that could be trained on.
        """
        try:
            prompt_ids = self._renderer.encode(prompt)
        except InvalidRequestError as error:
            raise RolloutRejectedError("prompt_failed", str(error)) from error
        try:
            output = await self._client.generate(
                prompt_ids, sampling_params(self._config, order.split, order.seed), n=order.num_samples,
                pin_version=order.pin_version, resubmit=True, on_update=OnUpdate(self._config.rollout.on_update),
            )  # fmt: skip
        except InvalidRequestError as error:
            raise RolloutRejectedError("prompt_failed", str(error)) from error
        except UnisonError as error:
            raise RolloutRejectedError("generation_failed", f"{type(error).__name__}: {error}") from error
        check_completions(output.completions, order)
        texts = tuple(self._renderer.decode(completion.token_ids) for completion in output.completions)
        return RawRollout(
            order.order_id, order.incarnation, order.split, order.prompt_id, tuple(prompt_ids), output.completions,
            texts,
        )  # fmt: skip


def sampling_params(config: TrainConfig, split: str, seed: int) -> SamplingParams:
    """How an order's completions are drawn."""
    rollout, evaluation = config.rollout, config.evaluation
    if split == HELD_OUT:
        return SamplingParams(max_tokens=rollout.max_tokens, temperature=evaluation.temperature, seed=seed)
    return SamplingParams(
        max_tokens=rollout.max_tokens, temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p,
        seed=seed,
    )  # fmt: skip


def check_completions(completions: Sequence[Completion], order: RolloutOrder) -> None:
    """Refuse what can't be trained on.

    Raises:
        RolloutRejectedError: with the reason and the indices of the completions at fault.
    """
    if [completion.index for completion in completions] != list(range(order.num_samples)):
        raise RolloutRejectedError(
            "generation_failed", f"{order.num_samples} completions were asked for, {len(completions)} came"
        )
    for reason, is_at_fault in (
        ("generation_failed", lambda each: each.finish_reason is FinishReason.ERROR),
        ("aborted", lambda each: each.finish_reason is FinishReason.ABORTED),
        ("unattributable", lambda each: not is_attributable(each, order.pin_version)),
    ):
        at_fault = [each for each in completions if is_at_fault(each)]
        if at_fault:
            causes = {each.error.value for each in at_fault if each.error is not None} or {reason}
            raise RolloutRejectedError(
                reason, f"{len(at_fault)} of {len(completions)} completions: {', '.join(sorted(causes))}",
                [each.index for each in at_fault],
            )  # fmt: skip


def is_attributable(completion: Completion, pin_version: int | None) -> bool:
    """Whether every token has one version, and the pinned one where one was pinned."""
    position = 0
    for span in completion.versions:
        if span.first != position or span.end <= span.first or pin_version not in (None, span.version):
            return False
        position = span.end
    lengths = {len(completion.token_ids), len(completion.logprobs), len(completion.raw_logprobs)}
    return lengths == {position}
