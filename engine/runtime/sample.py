"""Sampler: one token per row of logits, with its log-probs, whatever mixture of parameters the rows have.

Owns: the order of the steps below, the tensors that steady decode reuses, and the choice between native code and torch.
Knows nothing of requests, caches or finish reasons. Called by the executor, in its thread.

Steps, per row:
 1. finite check: NaN or +inf is NON_FINITE_LOGITS; -inf is probability 0, and a row of nothing else NON_FINITE_LOGITS;
 2. raw log-prob: log softmax of the logits as they came, to the bit that of `Kernels.row_logprobs`;
 3. logit_bias, then penalties, as in vLLM: repetition (Keskar et al., "CTRL", 2019, sec. 4.1; prompt and completion),
    presence, frequency (completion only), each within the window that ends at the last token;
 4. bans: bad tokens, those not allowed, stop tokens before min_tokens;
 5. temperature, top-k (of equals the lowest ids stay), top-p (of the mass that is left then; the token that crosses p
    stays; Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020), min-p (Nguyen et al., "Turning Up the
    Heat", 2024);
 6. inverse CDF of one uniform over the kept tokens in ascending order of ids.
Greedy takes the most probable token after step 4 (of equals the lowest id): log-prob 0, and the mass it left is its
probability at temperature 1. `log_support_mass` is the log of the mass that steps 4 and 5 left under the softmax after
step 3 and the temperature; at temperature 1 without step 3, raw = logprob + mass up to rounding, and rows that nothing
was taken from have mass 0 and, there, logprob = raw to the bit.

A row's result depends on its own logits, parameters, seed, sample index and position alone (R3). So does the path: rows
with only a temperature are plain for life, all others are filtered for life, also while nothing is banned. The native
library draws each kind in one call, parallel over rows; without it torch does both.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ...ipc.types import SamplingParams, TopLogprobs
from ..kernels import Kernels
from ..kernels.build import library
from .filters import FilteredRow, RowLimits, draw, is_plain, scaled
from .native_sample import DrawBuffers, NativeDraws
from .rng import uniforms_torch

CPU_CHUNK, DEVICE_CHUNK = 2**20, 2**23
"""Logits that the torch path works on at once; its temporaries take some 100 bytes for each."""


class SampleStatus(IntEnum):
    """What became of a row."""

    OK = 0
    """A token was drawn."""
    NON_FINITE_LOGITS = 1
    """The logits hold NaN or +inf, or no finite value."""
    EMPTY_SUPPORT = 2
    """Bans left no token that has a probability."""


@dataclass(frozen=True)
class RowSampling:
    """How one row draws, fixed for the life of its completion."""

    params: SamplingParams
    """Temperature, filters, penalties and bans."""
    seed: int
    """Key of the counter RNG, in [0, 2^63)."""
    sample_index: int
    """Which completion of its request; completions of one seed draw apart."""
    eos_ids: frozenset[int]
    """Stop tokens that must not come before `params.min_tokens`."""
    window: int
    """Last tokens that penalties look at; 0 is all."""
    prompt_ids: tuple[int, ...]
    """The prompt; the repetition penalty looks at it too."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """What one call drew. A row whose status isn't OK has token 0 and NaN as its numbers."""

    token_ids: Tensor
    """int64 [R]."""
    logprobs: Tensor
    """float32 [R]: under the distribution that was drawn from."""
    raw_logprobs: Tensor
    """float32 [R]: under the full softmax of the logits."""
    log_support_mass: Tensor
    """float32 [R]: log of the mass that bans, filters and greediness left."""
    status: Tensor
    """uint8 [R]: a `SampleStatus` each."""
    top: tuple[TopLogprobs | None, ...]
    """Alternatives per row, None where not asked for or not OK; empty when no row asked."""

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> Sampled:
        """Room for `num_rows` rows, contents unspecified."""
        integers = torch.empty(num_rows, dtype=torch.int64, device=device)
        first, second, third = (torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(3))
        return cls(integers, first, second, third, torch.empty(num_rows, dtype=torch.uint8, device=device), ())


class SamplingBatch:
    """The rows of a step as tensors, which `advance` moves one token on. Made by `Sampler.prepare`."""

    def __init__(
        self, rows: Sequence[RowSampling], generated: Sequence[Sequence[int]], vocab_size: int, device: torch.device
    ) -> None:
        params = [row.params for row in rows]
        self.num_rows = len(rows)
        self.seeds_R = torch.tensor([row.seed for row in rows], dtype=torch.int64, device=device)
        self.samples_R = torch.tensor([row.sample_index for row in rows], dtype=torch.int64, device=device)
        self.positions_R = torch.tensor([len(tokens) for tokens in generated], dtype=torch.int64, device=device)
        self.limits = RowLimits(
            temperature_R=torch.tensor([each.temperature for each in params], dtype=torch.float32, device=device),
            top_k_R=torch.tensor([each.top_k or vocab_size for each in params], dtype=torch.int64, device=device),
            top_p_R=torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device),
            min_p_R=torch.tensor([each.min_p for each in params], dtype=torch.float64, device=device),
            has_order=any(_has_order(each) for each in params),
        )
        self.num_top = tuple(each.logprobs for each in params)
        plain = [is_plain(each) for each in params]
        self.plain_rows = torch.tensor(
            [i for i, is_one in enumerate(plain) if is_one], dtype=torch.int64, device=device
        )
        self.filtered_rows = tuple(i for i, is_one in enumerate(plain) if not is_one)
        self.filtered_rows_F = torch.tensor(self.filtered_rows, dtype=torch.int64, device=device)
        self.filtered = tuple(
            FilteredRow(rows[i].params, rows[i].eos_ids, rows[i].window, (rows[i].prompt_ids, generated[i]), vocab_size)
            for i in self.filtered_rows
        )
        # A negative temperature tells the native code to leave a row alone.
        self.plain_temperature_R = self.limits.temperature_R.clone()
        if self.filtered_rows:
            self.plain_temperature_R[list(self.filtered_rows)] = -1.0

    def advance(self, token_ids: Tensor) -> None:
        """Move every row on by the token that it drew: the state that `prepare` would make with it appended.

        Shapes: int64 [R].
        """
        if self.positions_R.is_inference() and not torch.is_inference_mode_enabled():
            self.positions_R = self.positions_R + 1
        else:
            self.positions_R.add_(1)
        if self.filtered:
            drawn = token_ids.tolist()
            for i, row in zip(self.filtered_rows, self.filtered, strict=True):
                row.append(drawn[i])


class Sampler:
    """Draws for every row of a step. Stateless but for its batches; one call at a time."""

    def __init__(self, vocab_size: int, kernels: Kernels, device: torch.device | str) -> None:
        """`kernels` give the raw log-probs; native ones bring the native sampler along."""
        self.kernels = kernels
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        native = library() if kernels.name == "native" and self._device.type == "cpu" else None
        self._native = None if native is None else NativeDraws(native)

    def prepare(self, rows: Sequence[RowSampling], generated: Sequence[Sequence[int]]) -> SamplingBatch:
        """The batch of these rows; `generated[i]` are the tokens that row i has drawn so far.

        Raises: ValueError where the two differ in length.
        """
        if len(rows) != len(generated):
            raise ValueError(f"{len(rows)} rows came with {len(generated)} lists of tokens; each row needs one")
        return SamplingBatch(rows, generated, self._vocab_size, self._device)

    def sample(self, logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
        """One token per row. The logits stay as they are.

        Shapes: float32 [R, V] on the sampler's device.
        Raises: ValueError for another shape, TypeError for another dtype.
        """
        self._check(logits_RV, batch.num_rows)
        result = Sampled.empty(batch.num_rows, logits_RV.device)
        if self._native is not None:
            self._draw_native(self._native, logits_RV, batch, result)
        else:
            self._draw_rows(logits_RV, batch, batch.plain_rows, (), result)
            self._draw_rows(logits_RV, batch, batch.filtered_rows_F, batch.filtered, result)
        if any(batch.num_top):
            return Sampled(
                result.token_ids, result.logprobs, result.raw_logprobs, result.log_support_mass, result.status,
                self._alternatives(logits_RV, batch, result.status),
            )  # fmt: skip
        return result

    def top_logprobs(self, logits_RV: Tensor, k: int) -> list[TopLogprobs]:
        """The k >= 1 most probable tokens of each row by raw log-prob, descending, of equals the lower id first.

        Shapes: float32 [R, V]. A vocabulary of fewer tokens gives them all. A row with a NaN has NaN as its log-probs.
        """
        k = min(k, self._vocab_size)
        if not len(logits_RV):
            return []
        if self._native is not None:
            ids, values = self._native.top_logprobs(logits_RV, k)
        else:
            ids = torch.stack([_top_ids(row, k) for row in logits_RV])
            columns = [self.kernels.row_logprobs(logits_RV, ids[:, j].contiguous()) for j in range(k)]
            values = torch.stack(columns, dim=1)
        rows = zip(ids.tolist(), values.tolist(), strict=True)
        return [TopLogprobs(tuple(row), tuple(value)) for row, value in rows]

    def _check(self, logits: Tensor, num_rows: int) -> None:
        if logits.dtype is not torch.float32:
            raise TypeError(f"logits are {logits.dtype}; sample takes float32")
        if logits.shape != (num_rows, self._vocab_size) or logits.stride(1) != 1:
            raise ValueError(
                f"logits are {tuple(logits.shape)} with strides {logits.stride()}; this batch takes "
                f"({num_rows}, {self._vocab_size}) with rows that are contiguous"
            )

    def _draw_native(self, native: NativeDraws, logits: Tensor, batch: SamplingBatch, result: Sampled) -> None:
        buffers = DrawBuffers(
            batch.seeds_R, batch.samples_R, batch.positions_R, result.token_ids, result.logprobs, result.raw_logprobs,
            result.log_support_mass, result.status,
        )  # fmt: skip
        if len(batch.plain_rows):
            native.draw_plain(logits, batch.plain_temperature_R, buffers)
        if batch.filtered:
            native.draw_filtered(logits, batch.filtered_rows_F, batch.filtered, buffers)

    def _draw_rows(
        self, logits: Tensor, batch: SamplingBatch, rows: Tensor, filtered: tuple[FilteredRow, ...], result: Sampled
    ) -> None:
        """Draws the given rows in torch, a bounded number at a time; `filtered` is empty or has one entry per row."""
        if not len(rows):
            return
        uniform_R = uniforms_torch(batch.seeds_R[rows], batch.samples_R[rows], batch.positions_R[rows])
        size = max(1, (CPU_CHUNK if logits.is_cpu else DEVICE_CHUNK) // self._vocab_size)
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            limits = batch.limits.select(part, bool(filtered))
            self._draw_chunk(
                logits[part], limits, (part, uniform_R[first : first + size]), filtered[first : first + size], result
            )

    def _draw_chunk(
        self,
        logits: Tensor,
        limits: RowLimits,
        part: tuple[Tensor, Tensor],
        filtered: tuple[FilteredRow, ...],
        result: Sampled,
    ) -> None:
        """`logits` are a copy of the rows `part[0]`, their uniforms `part[1]`."""
        rows, uniform_R = part
        is_broken = ~logits.amax(-1).isfinite()
        logits = logits.masked_fill(is_broken.unsqueeze(1), 0.0)
        shaped, allowed = logits, None
        if filtered:
            shaped, allowed = logits.clone(), torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
            for index, row in enumerate(filtered):
                row.shape_(shaped[index])
                row.ban_(allowed[index])
        scores = scaled(shaped, limits.temperature_R)
        drawn = draw(scores, allowed, limits, uniform_R)
        token_ids = drawn.token_ids_R
        full = self.kernels.row_logprobs(scores, token_ids)  # of the row before bans and filters
        is_greedy = limits.temperature_R == 0
        is_whole = (drawn.log_mass_R == 0) & ~is_greedy
        logprobs = torch.where(is_whole, full, drawn.log_kept_R.float()).masked_fill(is_greedy, 0.0)
        mass = torch.where(is_greedy, full, drawn.log_mass_R.float())
        raw = self.kernels.row_logprobs(logits, token_ids)
        empty = drawn.is_empty_R * int(SampleStatus.EMPTY_SUPPORT)
        status = torch.where(is_broken, int(SampleStatus.NON_FINITE_LOGITS), empty)
        is_bad = status != SampleStatus.OK
        result.token_ids[rows] = token_ids.masked_fill(is_bad, 0)
        result.logprobs[rows] = logprobs.masked_fill(is_bad, float("nan"))
        result.raw_logprobs[rows] = raw.masked_fill(is_bad, float("nan"))
        result.log_support_mass[rows] = mass.masked_fill(is_bad, float("nan"))
        result.status[rows] = status.to(torch.uint8)

    def _alternatives(self, logits: Tensor, batch: SamplingBatch, status: Tensor) -> tuple[TopLogprobs | None, ...]:
        is_ok = (status == SampleStatus.OK).tolist()
        wanted = [i for i, count in enumerate(batch.num_top) if count and is_ok[i]]
        top: list[TopLogprobs | None] = [None] * batch.num_rows
        if wanted:
            most = max(batch.num_top[i] for i in wanted)
            asked = logits if len(wanted) == batch.num_rows else logits[torch.tensor(wanted, device=logits.device)]
            found = self.top_logprobs(asked, most)
            for i, row in zip(wanted, found, strict=True):
                count = batch.num_top[i]
                top[i] = TopLogprobs(row.token_ids[:count], row.logprobs[:count])
        return tuple(top)


def _has_order(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _top_ids(logits_V: Tensor, k: int) -> Tensor:
    """int64 [k]: ids by descending logit, of equals the lower first."""
    row = torch.nan_to_num(logits_V, nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    threshold = row.topk(k).values[-1]
    candidates = (row >= threshold).nonzero().squeeze(1)  # ascending ids, and more than k where values are equal
    order = row[candidates].sort(descending=True, stable=True).indices
    return candidates[order[:k]]
