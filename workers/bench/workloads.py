"""The workloads: what is generated, for which prompts, and which tokens count.

Owns: plain descriptions; knows nothing of who runs them. Prompts are drawn from the model's own vocabulary with fixed
seeds, so that every contender gets the same ids.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Workload:
    """A batch of prompts, each completed `n` times."""

    name: str
    """Row of the table."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    n: int
    """Completions per prompt."""
    max_tokens: int
    """Most tokens per completion."""
    temperature: float
    """0 is greedy."""
    ignore_eos: bool
    """True: every completion has `max_tokens` tokens; False: ragged ends."""

    @property
    def batch_size(self) -> int:
        """Completions in all."""
        return len(self.prompts) * self.n


def decode(batch_size: int, prompt_len: int, new_tokens: int, vocab_size: int) -> Workload:
    """Greedy decode of `batch_size` unrelated prompts, EOS ignored."""
    draw = random.Random(batch_size * 100_003 + prompt_len)
    prompts = tuple(tuple(draw.randrange(100, vocab_size) for _ in range(prompt_len)) for _ in range(batch_size))
    name = f"decode B={batch_size}" if prompt_len <= 128 else f"context {prompt_len} B={batch_size}"
    return Workload(name, prompts, 1, new_tokens, 0.0, True)


def rollout(system_ids: list[int], question_ids: list[list[int]], max_tokens: int, n: int = 8) -> Workload:
    """The shape of an RL step: prompts that share a system prefix, n samples each at temperature 1, ragged ends."""
    prompts = tuple(tuple(system_ids + question) for question in question_ids)
    return Workload("RL rollout", prompts, n, max_tokens, 1.0, False)


def with_first_token(work: Workload, token: int) -> Workload:
    """The same shapes with another first token in every prompt, so that no prefix of an earlier run is met again."""
    return replace(work, prompts=tuple((token, *prompt[1:]) for prompt in work.prompts))
