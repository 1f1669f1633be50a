"""The engine's edge: a request is checked against the model and the pool before anything is allocated (R2).

Owns: the checks that need to know the model (vocabulary, context) and the pool. What a field may be at all is checked
by the types themselves. Called by `Engine.submit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ipc.errors import InvalidRequestError, PromptTooLongError
from ..ipc.types import GenerateRequest


@dataclass(frozen=True)
class Limits:
    """What a request has to fit into."""

    vocab_size: int
    """Token ids are below it."""
    max_model_len: int
    """Most tokens of one sequence that the model or the configuration allows."""
    pool_tokens: int
    """Slots of the whole KV pool."""

    @property
    def max_len(self) -> int:
        """Most tokens of one sequence."""
        return min(self.max_model_len, self.pool_tokens)


def validate(request: GenerateRequest, limits: Limits) -> None:
    """Raise InvalidRequestError, naming the field, where a request can't be served by this engine."""
    params = request.params
    _check_vocabulary("prompt_ids", request.prompt_ids, limits.vocab_size)
    _check_vocabulary("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _check_vocabulary("bad_token_ids", params.bad_token_ids, limits.vocab_size)
    _check_vocabulary("allowed_token_ids", params.allowed_token_ids or (), limits.vocab_size)
    _check_vocabulary("logit_bias", [token for token, _ in params.logit_bias], limits.vocab_size)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs or 0)):
        if count > limits.vocab_size:
            raise InvalidRequestError(name, f"is {count}, above the vocabulary of {limits.vocab_size} tokens")
    longest = limits.max_len - (1 if params.max_tokens else 0)
    if len(request.prompt_ids) > longest:
        source = (
            "the model's context" if limits.max_model_len <= limits.pool_tokens else "the KV pool (cache.num_tokens)"
        )
        raise PromptTooLongError(
            "prompt_ids",
            f"has {len(request.prompt_ids)} tokens; at most {longest} fit {source} of {limits.max_len}; "
            "shorten the prompt",
        )


def _check_vocabulary(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and max(tokens) >= vocab_size:
        raise InvalidRequestError(name, f"holds {max(tokens)}; the vocabulary has the ids 0 … {vocab_size - 1}")
