"""Sampling: from checked request fields to the engine's sampling parameters.

Owns: the mapping of names and the defaults where a request is silent. Knows no endpoint. Called by the protocols.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...ipc.types import MAX_SEED, OnUpdate, SamplingParams

PASSED_ON = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "stop_token_ids", "allowed_token_ids", "min_tokens", "ignore_eos",
)  # fmt: skip
"""Fields that mean the same to the engine, under the same name."""


@dataclass(frozen=True)
class Extension:
    """What a request says in its `unison` object."""

    on_update: OnUpdate = OnUpdate.FINISH
    """What happens when a new version goes live meanwhile."""
    pin_version: int | None = None
    """Version to run on."""
    has_detail: bool = False
    """True where token ids and both log-probs are wanted."""


def extension_of(fields: Mapping[str, Any]) -> Extension:
    """The `unison` object; `true` alone asks for details."""
    given = fields.get("unison", {})
    if isinstance(given, bool):
        return Extension(has_detail=given)
    on_update = OnUpdate(given.get("on_update", OnUpdate.FINISH.value))
    return Extension(on_update, given.get("pin_version"), given.get("detail", False))


def sampling_of(
    fields: Mapping[str, Any], max_tokens: int, num_top: int = 0, prompt_top: int | None = None
) -> SamplingParams:
    """Sampling parameters with a seed: the server draws one where the request has none, and tells it.

    Raises:
        InvalidRequestError: a value is out of range or contradicts another.
    """
    seed = fields.get("seed")
    return SamplingParams(
        max_tokens=max_tokens,
        top_k=max(fields.get("top_k", 0), 0),
        seed=secrets.randbelow(MAX_SEED) if seed is None else seed,
        logprobs=num_top,
        prompt_logprobs=prompt_top,
        **{name: fields[name] for name in PASSED_ON if name in fields},
    )


def stops_of(fields: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    """Stop strings: one, or several."""
    stops = fields.get(name, ())
    return (stops,) if isinstance(stops, str) else tuple(stops)
