"""Canary: a few samples per version, scored by the engine and by the trainer, must agree in every bit.

Owns: the comparison. Called by the training loop where no sample of the batch was made by the weights in training; the
others are compared token by token as they are trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ipc.client import Client
from ...ipc.errors import UnisonError
from .batching import TrainGroup
from .policy import TrainablePolicy

DEADLINE_S = 60.0


def compare_with_engine(
    policy: TrainablePolicy, client: Client, groups: Sequence[TrainGroup], num_samples: int, ordinal: int
) -> float | None:
    """Largest difference between a raw log-prob of the engine under version `ordinal` and the trainer's; None where
    nothing could be compared (the engine couldn't score: its worker is being replaced)."""
    pairs = [(group.prompt_ids, sample.token_ids) for group in groups for sample in group.samples if sample.token_ids]
    worst = None
    for prompt_ids, token_ids in pairs[:: max(1, len(pairs) // num_samples)][:num_samples]:
        try:
            scored = client.score(prompt_ids, token_ids, pin_version=ordinal, deadline_s=DEADLINE_S)
        except UnisonError:
            continue
        with torch.no_grad():
            ours = policy.logprobs([(prompt_ids, [token_ids])])
        difference = float((ours - torch.tensor(scored.logprobs)).abs().max())
        worst = max(worst or 0.0, difference)
    return worst
