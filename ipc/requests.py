"""What a client makes of its arguments before a request leaves, and of a scored sequence when it comes back.

Owns: minting of request ids and seeds; the two ends of scoring. Knows nothing of transport. Called by the clients.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from .errors import InvalidRequestError, RequestFailedError
from .types import MAX_SEED, GenerateRequest, OnUpdate, RequestOutput, SamplingParams, ScoreOutput


def new_request(
    prompt_ids: Sequence[int], params: SamplingParams | None, n: int, on_update: OnUpdate, pin_version: int | None,
    request_id: str | None,
) -> GenerateRequest:  # fmt: skip
    """A request with an id and a seed of its own, so that sending it again gives the same tokens (R3, P40)."""
    params = params or SamplingParams()
    if params.seed is None:
        params = replace(params, seed=secrets.randbelow(MAX_SEED))
    return GenerateRequest(request_id or secrets.token_hex(16), tuple(prompt_ids), params, n, on_update, pin_version)


def score_of(output: RequestOutput, num_prompt_tokens: int) -> ScoreOutput:
    """The continuation's part of a scored sequence, and the one version that computed it.

    Raises:
        RequestFailedError: it ended without prompt log-probs, or the KV is of more than one version.
    """
    (completion,) = output.completions
    versions = {span.version for span in completion.kv_versions}
    if output.prompt_logprobs is None or len(versions) != 1:
        reason = completion.error.value if completion.error is not None else "internal"
        raise RequestFailedError(f"scoring ended with {completion.finish_reason.value} ({reason})", reason)
    first = num_prompt_tokens - 1
    return ScoreOutput(output.prompt_logprobs[first:], (output.prompt_top_logprobs or ())[first:], versions.pop())


def scoring_params(prompt_ids: Sequence[int], continuation_ids: Sequence[int], top_k: int) -> SamplingParams:
    """Parameters that score a prompt and generate nothing.

    Raises:
        InvalidRequestError: there is nothing to score, or nothing to score it after.
    """
    if not prompt_ids or not continuation_ids:
        raise InvalidRequestError(
            "continuation_ids" if prompt_ids else "prompt_ids", "is empty; scoring needs at least one token"
        )
    return SamplingParams(max_tokens=0, prompt_logprobs=top_k, seed=0)
