"""Filters: what a row's parameters do to its logits, and the draw from what they leave, in torch on any device.

Owns: `FilteredRow` (bias, penalties and bans of one request that has any parameter beside the temperature) and `draw`
(temperature, top-k, top-p, min-p, inverse CDF). Knows nothing of batches of requests; called by the sampler, whose
native code does the same faster on the CPU.

Weights e^(z - max) are rounded to multiples of 2^-40 and summed as integers. Integer sums don't depend on their order,
so a row gets the same bits alone or in company, from any device's parallel scan and any number of threads (R3). What
that loses is a token 10^12 times less probable than the most probable one.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...ipc.types import SamplingParams

_ONE = float(2**40)
"""Fixed-point weight of the most probable token; 2^23 such still fit an int64."""
_LARGEST = torch.finfo(torch.float32).max


def is_plain(params: SamplingParams) -> bool:
    """Whether the temperature is all that shapes the draw, now and for the rest of the request."""
    return (
        params.top_k == 0
        and params.top_p >= 1.0
        and params.min_p == 0.0
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and not params.logit_bias
        and params.allowed_token_ids is None
        and not params.bad_token_ids
        and params.min_tokens == 0
    )


class FilteredRow:
    """One request's penalties, bias and bans, and the tokens they look at.

    Owned by a sampling batch. Ids outside the vocabulary are ignored. The tensors lie on the CPU.
    """

    def __init__(
        self, params: SamplingParams, eos_ids: frozenset[int], window: int, tokens: tuple[Sequence[int], Sequence[int]],
        vocab_size: int,
    ) -> None:  # fmt: skip
        """`window` 0 means all; `tokens` are those of the prompt and those generated so far."""
        prompt, generated = tokens
        self.params = params
        self.vocab_size = vocab_size
        self._window = window
        self._num_prompt = len(prompt) if params.repetition_penalty != 1.0 else 0
        self._num_generated = len(generated)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self._has_history = penalties != (1.0, 0.0, 0.0)
        self._history = np.array([*prompt[: self._num_prompt], *generated] if self._has_history else [], dtype=np.int64)
        self._length = len(self._history)
        self._stops = self._known(sorted(eos_ids))
        self.bad = self._known(params.bad_token_ids)
        """int64: never drawn."""
        self.allowed = None if params.allowed_token_ids is None else self._known(params.allowed_token_ids)
        """int64: nothing else is drawn; None allows all."""
        bias = [(token, value) for token, value in params.logit_bias if token < vocab_size]
        self.bias_ids = torch.tensor([token for token, _ in bias], dtype=torch.int64)
        """int64 [N]: tokens with a bias."""
        self.bias = torch.tensor([value for _, value in bias], dtype=torch.float32)
        """float32 [N]: what is added to their logits."""

    def append(self, token: int) -> None:
        """One more generated token."""
        self._num_generated += 1
        if not self._has_history:
            return
        if self._length == len(self._history):
            self._history = np.concatenate((self._history, np.zeros(max(64, self._length), dtype=np.int64)))
        self._history[self._length] = token
        self._length += 1

    def seen(self) -> tuple[np.ndarray, int]:
        """Tokens in the penalties' window, in order, and how many of them, from the first, are the prompt's.

        Only the repetition penalty looks at those of the prompt; without it they are left out.
        """
        first = max(0, self._length - self._window) if self._window else 0
        return self._history[first : self._length], max(0, self._num_prompt - first)

    def early(self) -> Tensor:
        """int64: stop tokens that must not come yet."""
        return self._stops if self._num_generated < self.params.min_tokens else self._stops[:0]

    def shape_(self, logits_V: Tensor) -> None:
        """The bias, then repetition, presence and frequency penalties, in place."""
        params, device = self.params, logits_V.device
        if len(self.bias_ids):
            ids = self.bias_ids.to(device)
            logits_V[ids] = (logits_V[ids] + self.bias.to(device)).clamp(max=_LARGEST)
        tokens, num_prompt = self.seen()
        if params.repetition_penalty != 1.0 and len(tokens):
            ids = torch.from_numpy(self._inside(np.unique(tokens))).to(device)
            seen, penalty = logits_V[ids], params.repetition_penalty
            logits_V[ids] = torch.where(seen > 0, seen / penalty, seen * penalty).clamp(max=_LARGEST)
        generated = self._inside(tokens[num_prompt:])
        if (params.presence_penalty or params.frequency_penalty) and len(generated):
            unique, counts = np.unique(generated, return_counts=True)
            amount = (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
            ids = torch.from_numpy(unique).to(device)
            logits_V[ids] = (logits_V[ids] - torch.from_numpy(amount).to(device)).clamp(max=_LARGEST)

    def ban_(self, allowed_V: Tensor) -> None:
        """Take what must not be drawn now out of a mask that starts all true: not allowed, bad, stops too early."""
        device = allowed_V.device
        if self.allowed is not None:
            allowed_V.zero_()
            allowed_V[self.allowed.to(device)] = True
        for banned in (self.bad, self.early()):
            if len(banned):
                allowed_V[banned.to(device)] = False

    def _known(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([token for token in ids if token < self.vocab_size], dtype=torch.int64)

    def _inside(self, ids: np.ndarray) -> np.ndarray:
        return ids[(ids >= 0) & (ids < self.vocab_size)]


@dataclass(frozen=True, eq=False)
class RowLimits:
    """Per row: how far the distribution is cut. All on the logits' device."""

    temperature_R: Tensor
    """float32: 0 is greedy."""
    top_k_R: Tensor
    """int64: tokens kept, the vocabulary where there is no limit."""
    top_p_R: Tensor
    """float64 in (0, 1]."""
    min_p_R: Tensor
    """float64 in [0, 1]."""
    has_order: bool
    """Whether any row needs its tokens in order of probability (top-k or top-p)."""

    def select(self, rows: Tensor, may_order: bool) -> RowLimits:
        """The limits of some rows; `may_order` False where none of them has top-k or top-p."""
        return RowLimits(
            self.temperature_R[rows], self.top_k_R[rows], self.top_p_R[rows], self.min_p_R[rows],
            self.has_order and may_order,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Drawn:
    """One token per row, and how probable it was."""

    token_ids_R: Tensor
    """int64; 0 where the support is empty."""
    log_kept_R: Tensor
    """float64: log-prob of the token among those that were kept."""
    log_mass_R: Tensor
    """float64: log of the mass that was kept, among all tokens; 0 exactly where nothing was taken away."""
    is_empty_R: Tensor
    """bool: nothing to draw from."""


def scaled(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """Logits divided by the temperature, below their maximum so that nothing overflows; unchanged at 1 and at 0."""
    is_scaled = (temperature_R != 0) & (temperature_R != 1)
    divisor = torch.where(is_scaled, temperature_R, torch.ones_like(temperature_R)).unsqueeze(1)
    shifted = (logits_RV - logits_RV.amax(-1, keepdim=True)) / divisor
    return torch.where(is_scaled.unsqueeze(1), shifted, logits_RV)


def draw(scaled_RV: Tensor, allowed_RV: Tensor | None, limits: RowLimits, uniform_R: Tensor) -> Drawn:
    """Keep what bans and limits leave, and draw from it by inverse CDF in ascending order of ids.

    `scaled_RV` comes from `scaled`, each row with a finite maximum; `allowed_RV` None allows all. Greedy rows keep
    their most probable allowed token, the lowest id of equals.
    """
    vocab_size = scaled_RV.shape[1]
    banned = scaled_RV if allowed_RV is None else scaled_RV.masked_fill(~allowed_RV, float("-inf"))
    top_R = banned.amax(-1)
    is_empty = top_R == float("-inf")
    top_R = torch.where(is_empty, torch.zeros_like(top_R), top_R)
    weights = _weights(banned, top_R)
    kept = _kept(banned, weights, limits)
    ids = torch.arange(vocab_size, device=scaled_RV.device)
    first_best = torch.where(banned == top_R.unsqueeze(1), ids, vocab_size - 1).amin(-1, keepdim=True)
    kept = torch.where((limits.temperature_R == 0).unsqueeze(1), ids == first_best, kept)
    cumulative = (weights * kept).cumsum(-1)
    kept_sum = cumulative[:, -1]
    # First token whose running sum passes floor(u * sum): integers below 2^63, so the floor is below the sum as well.
    target = torch.minimum((uniform_R * kept_sum.double()).long(), kept_sum - 1).clamp_(min=0)
    token = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1).clamp_(max=vocab_size - 1)
    token = torch.where(is_empty, torch.zeros_like(token), token)
    log_sum = _log(kept_sum.double() / _ONE)
    log_kept = banned.gather(1, token.unsqueeze(1)).squeeze(1).double() - top_R.double() - log_sum
    whole_top = scaled_RV.amax(-1)
    log_whole = _log(_weights(scaled_RV, whole_top).sum(-1).double() / _ONE) + whole_top.double()
    is_whole = (kept | (scaled_RV == float("-inf"))).all(-1)
    log_mass = torch.where(is_whole, 0.0, log_sum + top_R.double() - log_whole)
    return Drawn(token, log_kept, log_mass, is_empty)


def _weights(scaled_RV: Tensor, top_R: Tensor) -> Tensor:
    """Fixed-point e^(z - top), int64 [R, V]."""
    below = scaled_RV.double() - top_R.double().unsqueeze(1)
    # On the CPU torch's exp and log differ between the middle and the end of a run, which depends on its threads.
    exponential = torch.from_numpy(np.exp(below.numpy())) if below.is_cpu else below.exp()
    return (exponential * _ONE).round().long()


def _log(x_R: Tensor) -> Tensor:
    with np.errstate(divide="ignore"):  # of an empty support
        return torch.from_numpy(np.log(x_R.numpy())) if x_R.is_cpu else x_R.log()


def _kept(banned_RV: Tensor, weights_RV: Tensor, limits: RowLimits) -> Tensor:
    """Mask of the tokens that pass top-k, then top-p, then min-p."""
    kept = banned_RV > float("-inf")
    if limits.has_order:
        order = banned_RV.sort(dim=-1, descending=True, stable=True).indices  # stable: of equals the lowest id first
        rank = torch.arange(banned_RV.shape[1], device=banned_RV.device).expand_as(order)
        by_rank = rank < limits.top_k_R.unsqueeze(1)
        cumulative = (weights_RV.gather(1, order) * by_rank).cumsum(-1)
        before = torch.cat((torch.zeros_like(cumulative[:, :1]), cumulative[:, :-1]), dim=1)
        reach = (limits.top_p_R * cumulative[:, -1].double()).unsqueeze(1)
        by_rank &= (before.double() < reach) | (limits.top_p_R >= 1.0).unsqueeze(1)
        kept &= torch.zeros_like(by_rank).scatter_(1, order, by_rank)
    return kept & (weights_RV.double() >= (limits.min_p_R * _ONE).unsqueeze(1))
