"""The shared vocabulary: what a request asks, what a completion says, and what a policy version is.

Owns: frozen, torch-free data types that cross process boundaries. Knows nothing of queues, tensors or models.
Used by every folder; imports only the standard library and the hash function of the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import xxhash

from .errors import InvalidRequestError

MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_COMPLETIONS = 1024
MAX_TOP_LOGPROBS = 64


class FinishReason(str, Enum):
    """Why a completion ended (R1). The set is closed: a consumer may switch over it."""

    STOP = "stop"
    """A stop token was sampled; `Completion.matched_stop` is its id."""
    LENGTH = "length"
    """`max_tokens` or the model's context was reached."""
    ABORTED = "aborted"
    """Ended on request: cancelled, or the policy was updated under `on_update=abort`."""
    ERROR = "error"
    """Ended by a fault; `Completion.error` says which."""


class ErrorReason(str, Enum):
    """Machine-readable cause behind `FinishReason.ABORTED` or `FinishReason.ERROR`."""

    CANCELLED = "cancelled"
    """The caller aborted the request."""
    POLICY_UPDATED = "policy_updated"
    """A new version went live and the request asked to be aborted then."""
    NON_FINITE_LOGITS = "non_finite_logits"
    """The model returned NaN or infinite logits for this request (P18)."""
    EMPTY_SUPPORT = "empty_support"
    """Bans, allowed tokens and filters left no token to draw."""
    KV_EXHAUSTED = "kv_exhausted"
    """The sequence outgrew the whole KV pool."""
    CLIENT_TOO_SLOW = "client_too_slow"
    """The client didn't read its events, and what waited for it passed the limit."""
    SHUTDOWN = "shutdown"
    """The worker was told to stop and the request didn't end within the drain time."""
    INTERNAL = "internal"
    """A fault inside the engine while this request ran."""


class OnUpdate(str, Enum):
    """What a request in flight does when a new version goes live."""

    FINISH = "finish"
    """Stay on the version it started with (default)."""
    CARRY = "carry"
    """Keep the KV and go on under the new weights; the version spans show it."""
    RECOMPUTE = "recompute"
    """Compute the KV again under the new weights, keep the tokens, go on. Requests take turns, a share of a step each,
    and go on under the old version until then."""
    ABORT = "abort"
    """End with what there is, reason `policy_updated`."""


@dataclass(frozen=True)
class TensorEntry:
    """One line of a manifest: a tensor by name, and the hash of its bytes."""

    name: str
    """Hugging Face parameter name."""
    shape: tuple[int, ...]
    """Elements per dimension."""
    dtype: str
    """`bfloat16` or `float32`."""
    digest: str
    """xxh3-128 of the row-major bytes, 32 hex digits."""
    alias_of: str | None = None
    """Name of the tensor whose bytes this one shares (tied embeddings), or None."""

    @staticmethod
    def of(name: str, shape: Sequence[int], dtype: str, data: memoryview, alias_of: str | None = None) -> TensorEntry:
        """Hash `data` (contiguous bytes of the tensor). Source: xxHash, XXH3 128-bit variant."""
        return TensorEntry(name, tuple(shape), dtype, xxhash.xxh3_128_hexdigest(data), alias_of)


@dataclass(frozen=True)
class Manifest:
    """What a version's weights are: every tensor's name, shape, dtype and bytes, aliases included (V1)."""

    entries: tuple[TensorEntry, ...]
    """Sorted by name."""

    @staticmethod
    def of(entries: Iterable[TensorEntry]) -> Manifest:
        """Order the entries; the same tensors give the same manifest in whatever order they come."""
        return Manifest(tuple(sorted(entries, key=lambda entry: entry.name)))

    @property
    def digest(self) -> str:
        """Root of the hash tree: xxh3-128 over every entry's name, shape, dtype, alias and digest; 32 hex digits."""
        root = xxhash.xxh3_128()
        for entry in self.entries:
            shape = ",".join(map(str, entry.shape))
            root.update(f"{entry.name}|{shape}|{entry.dtype}|{entry.alias_of or ''}|{entry.digest}\n".encode())
        return root.hexdigest()

    def differing(self, other: Manifest) -> tuple[str, ...]:
        """Names of the tensors that are not the same in both, sorted."""
        mine, theirs = set(self.entries), set(other.entries)
        return tuple(sorted({entry.name for entry in mine ^ theirs}))


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """Which weights: an ordinal that only grows, and the digest of every byte of them (V1)."""

    ordinal: int
    """0 for the weights that the engine was built with, then growing."""
    digest: str
    """Root digest of the manifest, 32 hex digits."""


@dataclass(frozen=True)
class VersionSpan:
    """Positions `first <= i < end` belong to version `version` (an ordinal). Spans of one list tile their range."""

    version: int
    """Ordinal of the policy version."""
    first: int
    """First position, inclusive."""
    end: int
    """Last position, exclusive."""


@dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens. Checked on construction; an error names the field, the value and the bound."""

    max_tokens: int = 256
    """Most tokens to generate per completion; at least 1. 0 only together with `prompt_logprobs` (scoring)."""
    min_tokens: int = 0
    """No stop token is drawn before this many tokens are there."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy. In [0, 100], and 0 or at least 0.01."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches top_p; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as probable as the most probable one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in the window; in (0, 10]. Source: CTRL, sec.
    4.1."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens generated in the window; in [-2, 2]. Source: OpenAI API."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence among the tokens generated in the window; in [-2, 2]. Source: OpenAI API."""
    penalty_window: int | None = None
    """Last tokens that penalties look at; None takes the engine's `sampling.penalty_window`; 0 means all."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, value in [-100, 100]) added to the logits."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these may be drawn; None allows all."""
    bad_token_ids: tuple[int, ...] = ()
    """These are never drawn."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends the completion when drawn, besides the model's own EOS ids; the matched one is reported."""
    ignore_eos: bool = False
    """Don't stop at the model's EOS ids (`stop_token_ids` still stop)."""
    seed: int | None = None
    """Key of the counter RNG, in [0, 2^63); None has the engine draw one and record it in the completion."""
    logprobs: int = 0
    """Alternatives to report per generated token, by raw log-prob; the drawn token's own log-probs always come."""
    prompt_logprobs: int | None = None
    """Report prompt log-probs with this many alternatives (0: the prompt's tokens only); None: none."""

    def __post_init__(self) -> None:
        _check_range("max_tokens", self.max_tokens, 0 if self.prompt_logprobs is not None else 1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.temperature != 0:
            _check_range("temperature", self.temperature, 0.01, 100.0)
        _check_range("top_k", self.top_k, 0, MAX_TOKEN_ID)
        _check_range("top_p", self.top_p, math.ulp(0.0), 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.penalty_window is not None:
            _check_range("penalty_window", self.penalty_window, 0, 2**31 - 1)
        for token, value in self.logit_bias:
            _check_range("logit_bias", token, 0, MAX_TOKEN_ID)
            _check_range("logit_bias", value, -100.0, 100.0)
        _check_unique("logit_bias", [token for token, _ in self.logit_bias])
        _check_tokens("bad_token_ids", self.bad_token_ids)
        _check_tokens("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            _check_tokens("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "allowed_token_ids", "is empty, so nothing could be drawn; leave it None to allow all"
                )
        if self.seed is not None:
            _check_range("seed", self.seed, 0, MAX_SEED)
        _check_range("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        """True where the most probable token is taken and no random number is used."""
        return self.temperature == 0


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to complete `n` times."""

    request_id: str
    """Unique among the requests in flight; minted by the client, and its idempotency id (P2)."""
    prompt_ids: tuple[int, ...]
    """Token ids of the prompt, at least one."""
    params: SamplingParams = field(default_factory=SamplingParams)
    """How to draw, shared by the n completions."""
    n: int = 1
    """Completions of the same prompt; sample index 0 … n-1 makes their draws differ (R3)."""
    on_update: OnUpdate = OnUpdate.FINISH
    """What to do when a new version goes live while this request runs."""
    pin_version: int | None = None
    """Ordinal of the version to run on from start to end; None takes the version that is live at the start."""

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InvalidRequestError("request_id", "is empty; give each request a unique id")
        if not self.prompt_ids:
            raise InvalidRequestError("prompt_ids", "is empty; a prompt has at least one token (add the BOS token)")
        _check_tokens("prompt_ids", self.prompt_ids, unique=False)
        _check_range("n", self.n, 1, MAX_COMPLETIONS)
        if self.params.max_tokens == 0 and self.n != 1:
            raise InvalidRequestError("n", f"is {self.n}, but max_tokens=0 only scores the prompt; use n=1")
        if self.pin_version is not None:
            _check_range("pin_version", self.pin_version, 0, MAX_SEED)


@dataclass(frozen=True)
class TopLogprobs:
    """The most probable tokens at one position, by raw log-prob, descending (ties: lower id first)."""

    token_ids: tuple[int, ...]
    """k token ids."""
    logprobs: tuple[float, ...]
    """Their raw log-probs."""


@dataclass(frozen=True)
class TokenDelta:
    """What one step added to one completion; `finish_reason` is set in the last one (R1)."""

    request_id: str
    """The request."""
    index: int
    """Which of its n completions."""
    first: int
    """Position of the first token of this delta among the completion's tokens."""
    token_ids: tuple[int, ...]
    """New tokens; may be empty in a terminal delta."""
    logprobs: tuple[float, ...]
    """Log-prob of each under the distribution it was drawn from."""
    raw_logprobs: tuple[float, ...]
    """Log-prob of each under the full softmax of the model's logits."""
    log_support_mass: tuple[float, ...]
    """Log of the mass that the filters left, under the penalised, temperature-scaled softmax; 0 without filters."""
    versions: tuple[VersionSpan, ...]
    """Which version made each, over the completion's positions."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """Alternatives per token, where asked for."""
    finish_reason: FinishReason | None = None
    """Set once, in the terminal delta."""


@dataclass(frozen=True)
class KVEpoch:
    """KV that a completion had before it was computed again, under other versions (V3)."""

    end: int
    """Tokens at positions below it, and not of an epoch before, were drawn over this KV."""
    kv_versions: tuple[VersionSpan, ...]
    """Version of the KV of each position of prompt + completion that was there then."""


@dataclass(frozen=True)
class Completion:
    """One finished completion: a sample that can be attributed, replayed and trained on (R5).

    Invariants: `token_ids`, `logprobs`, `raw_logprobs`, `log_support_mass` have one length and are finite; `versions`
    tile [0, len(token_ids)); `kv_versions` tile [0, prompt tokens + generated tokens whose KV was computed).
    """

    index: int
    """Which of the request's n completions."""
    token_ids: tuple[int, ...]
    """Generated tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """Log-prob of each token under the distribution it was drawn from."""
    raw_logprobs: tuple[float, ...]
    """Log-prob of each token under the full softmax of the model's logits (fp32)."""
    log_support_mass: tuple[float, ...]
    """Log of the mass that top-k, top-p, min-p, bans and greediness left; 0 without filters."""
    finish_reason: FinishReason
    """Why it ended."""
    versions: tuple[VersionSpan, ...]
    """Version whose weights computed each token's logits (V3)."""
    kv_versions: tuple[VersionSpan, ...]
    """Version whose weights computed the KV of each position of prompt + completion (V3)."""
    seed: int
    """Seed of the request, also when the engine drew it: with `index` it replays the completion (R3)."""
    matched_stop: int | None = None
    """The stop token that ended it, with `FinishReason.STOP`."""
    error: ErrorReason | None = None
    """The cause, with `FinishReason.ABORTED` or `FinishReason.ERROR`."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """Alternatives per token, where asked for."""
    kv_history: tuple[KVEpoch, ...] = ()
    """Where KV was computed again under other versions (a preemption after `carry`, or `recompute`): what earlier
    tokens were drawn over, in order of `end`. Empty: all tokens were drawn over the KV of `kv_versions`."""


@dataclass(frozen=True)
class RequestOutput:
    """All completions of one request."""

    request_id: str
    """The request."""
    prompt_ids: tuple[int, ...]
    """Its prompt."""
    completions: tuple[Completion, ...]
    """n completions by index."""
    prompt_logprobs: tuple[float, ...] | None = None
    """Raw log-prob of prompt tokens 1 … P-1 given those before (length P-1), where asked for."""
    prompt_top_logprobs: tuple[TopLogprobs, ...] | None = None
    """Alternatives at the same positions, where asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix index when the first completion started."""


@dataclass(frozen=True)
class ScoreOutput:
    """Teacher-forced log-probs of a given continuation."""

    logprobs: tuple[float, ...]
    """Raw log-prob of each continuation token given the prompt and those before it."""
    top_logprobs: tuple[TopLogprobs, ...]
    """Alternatives per continuation token; empty when none were asked for."""
    version: int
    """Ordinal of the version that computed all of them."""


def _check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise unless low <= value <= high; NaN is out of every range."""
    if isinstance(low, int) and isinstance(high, int) and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidRequestError(name, f"is {value!r}; must be an integer in [{low}, {high}]")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidRequestError(name, f"is {value!r}; must be in [{low}, {high}]")


def _check_tokens(name: str, tokens: Sequence[int], unique: bool = True) -> None:
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidRequestError(name, f"holds {token!r}; token ids are integers in [0, {MAX_TOKEN_ID}]")
    if unique:
        _check_unique(name, tokens)


def _check_unique(name: str, tokens: Sequence[int]) -> None:
    if len(set(tokens)) != len(tokens):
        raise InvalidRequestError(name, "names a token id twice")
