"""TorchKernels: the operations in plain torch, for every device, and the reference beside the native code.

Owns the recipe that makes torch's GEMM row-invariant: blocks of at most `max_rows` rows, short blocks padded with
zeros to `min_rows`. Which numbers hold depends on the library that torch calls (oneDNN with or without AMX, MKL,
cuBLAS) and on the weight's shape, so they are measured once per device, dtype and shape by a small probe: the first
recipe under which every tried M gives the bits of a whole block. A recipe in which every block has the same size always
holds, because at a fixed M a row doesn't depend on its company.

On CUDA no call waits for the device; only the probe does, at its first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from .kernels import Kernels

REMAINDER = 2.0**-18
"""What is left of the probe's sums: near the rounding of the terms that cancel, so that their order shows in bf16."""
HEAD_ROWS = 4096
"""Rows of a bf16 head that are widened at a time for `logits` on CPU."""
SILU_WIDTH = 32
"""torch's fp32 silu treats the end of a run otherwise than its middle unless widths are multiples of this."""


@dataclass(frozen=True)
class RowRecipe:
    """How many rows one GEMM may have."""

    min_rows: int
    """Fewer are padded with zero rows."""
    max_rows: int
    """More are cut into blocks."""
    holds: bool
    """Whether the probe saw equal bits for every M tried."""


RECIPES = ((1, 256), (2, 256), (4, 256), (8, 256), (16, 256), (1, 32), (2, 32), (4, 32), (8, 32), (16, 32), (32, 32))
"""(min_rows, max_rows), the cheapest first."""


@cache
def probe_recipe(device: str, dtype: torch.dtype, n: int, k: int) -> RowRecipe:
    """The cheapest recipe under which a row's bits don't depend on M, for weights [n, k] of this dtype on this device.

    Two sets of operands: random ones, and ones whose terms cancel in pairs up to a small remainder. With the first,
    another order of addition seldom survives the rounding to bf16; with the second it nearly always does.
    """
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(256, k, generator=generator)
    w = torch.randn(min(n, 1024), k, generator=generator)
    pairs = torch.randperm(k, generator=generator)[: k // 4 * 2].view(2, -1)
    x_cancelling, w_cancelling = x.to(dtype).float(), w.to(dtype).float()
    x_cancelling[:, pairs[1]], w_cancelling[:, pairs[1]] = x_cancelling[:, pairs[0]], -w_cancelling[:, pairs[0]]
    rest = torch.ones(k, dtype=torch.bool)
    rest[pairs.flatten()] = False
    w_cancelling[:, rest] *= REMAINDER
    cases: list[tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]] = [
        (a.to(device=device, dtype=dtype), b.to(device=device, dtype=dtype), {})
        for a, b in ((x, w), (x_cancelling, w_cancelling))
    ]
    for min_rows, max_rows in RECIPES:
        recipe = RowRecipe(min_rows, max_rows, True)
        if all(_is_invariant(x, w, recipe, known) for x, w, known in cases):
            return recipe
    return RowRecipe(RECIPES[-1][0], RECIPES[-1][1], False)


def _is_invariant(x: torch.Tensor, w: torch.Tensor, recipe: RowRecipe, known: dict[int, torch.Tensor]) -> bool:
    """Compares GEMMs of the sizes that the recipe may call; `known` keeps results, because recipes share sizes."""
    sizes = sorted({*range(1, 18), 23, 31, 32, 33, 48, 63, 64, 70, 100, 128, 131, 200, 256})
    called = [m for m in sizes if recipe.min_rows <= m <= recipe.max_rows]
    for m in called:
        if m not in known:
            known[m] = F.linear(x[:m], w)
    whole = known[called[-1]]
    return all(torch.equal(known[m], whole[:m]) for m in called)


class TorchKernels(Kernels):
    """Plain torch. `exact=True` follows the recipe, `exact=False` is the fastest way that torch has."""

    def __init__(self, exact: bool = True) -> None:
        self._wants_exact = exact
        self._used: dict[str, RowRecipe] = {}

    @property
    def name(self) -> str:
        return "torch"

    @property
    def exact(self) -> bool:
        return self._wants_exact and all(recipe.holds for recipe in self._used.values())

    def can_be_exact(self, x_MK: torch.Tensor, w_NK: torch.Tensor) -> bool:
        """Whether some recipe holds for weights of this shape here."""
        return probe_recipe(str(x_MK.device), x_MK.dtype, *w_NK.shape).holds

    def describe(self) -> dict[str, object]:
        recipes = {key: f"{r.min_rows}..{r.max_rows} rows, holds: {r.holds}" for key, r in self._used.items()}
        return {"name": self.name, "exact": self.exact, "gemm_blocks": recipes, "torch": torch.__version__}

    def gather_rows(self, table_VH: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        return table_VH.index_select(0, ids_T)

    def linear(
        self,
        x_MK: torch.Tensor,
        w_NK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _check_linear(x_MK, w_NK)
        if self._wants_exact:
            return self._by_rows(lambda x: F.linear(x, w_NK, bias_N), x_MK, w_NK, out)
        return _into(out, F.linear(x_MK, w_NK, bias_N))

    def logits(self, x_MK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        _check_linear(x_MK, w_NK)
        if x_MK.dtype == torch.float32:
            return self.linear(x_MK, w_NK, None, out)
        if x_MK.is_cuda:
            # One fp32 result from bf16 operands without a rounding in between.
            def whole(x: torch.Tensor) -> torch.Tensor:
                return torch.mm(x, w_NK.t(), out_dtype=torch.float32)

            if self._wants_exact:
                return self._by_rows(whole, x_MK, w_NK, out, torch.float32)
            return _into(out, whole(x_MK))
        result = x_MK.new_empty((x_MK.shape[0], w_NK.shape[0]), dtype=torch.float32) if out is None else out
        wide = x_MK.float()
        for first in range(0, w_NK.shape[0], HEAD_ROWS):
            part = w_NK[first : first + HEAD_ROWS].float()
            result[:, first : first + HEAD_ROWS] = self.linear(wide, part)
        return result

    def rms_norm(
        self, x_MH: torch.Tensor, weight_H: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        wide = x_MH.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return _into(out, weight_H * normal.to(x_MH.dtype))

    def add_rms_norm(
        self,
        residual_MH: torch.Tensor,
        x_MH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        residual_MH.add_(x_MH)
        return self.rms_norm(residual_MH, weight_H, eps, out)

    def rope_(self, q_THD: torch.Tensor, k_THkD: torch.Tensor, cos_TD2: torch.Tensor, sin_TD2: torch.Tensor) -> None:
        half = cos_TD2.shape[-1]
        cos, sin = cos_TD2.unsqueeze(1), sin_TD2.unsqueeze(1)
        for x in (q_THD, k_THkD):
            a, b = x[..., :half].float(), x[..., half : 2 * half].float()
            first, second = a * cos - b * sin, b * cos + a * sin  # both before either is written: a and b may be views
            x[..., :half] = first.to(x.dtype)
            x[..., half : 2 * half] = second.to(x.dtype)

    def silu_mul(self, gate_up_M2I: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = gate_up_M2I.chunk(2, dim=-1)
        width = gate.shape[-1]
        if self._wants_exact and width % SILU_WIDTH:
            padded = F.pad(gate, (0, SILU_WIDTH - width % SILU_WIDTH))
            return _into(out, F.silu(padded)[:, :width] * up)
        return _into(out, F.silu(gate) * up)

    def row_logprobs(self, logits_RV: torch.Tensor, targets_R: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits_RV, dim=-1).gather(-1, targets_R.unsqueeze(-1)).squeeze(-1)

    def row_logsumexp(self, logits_RV: torch.Tensor) -> torch.Tensor:
        if not self._wants_exact:
            return torch.logsumexp(logits_RV, dim=-1)
        # torch.logsumexp isn't row-invariant; log_softmax is, and at the maximum it loses nothing.
        return logits_RV.amax(-1) - torch.log_softmax(logits_RV, dim=-1).amax(-1)

    def _by_rows(
        self,
        gemm: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        w: torch.Tensor,
        out: torch.Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        width = w.shape[0]
        recipe = probe_recipe(str(x.device), x.dtype, *w.shape)
        self._used[f"{x.device} {x.dtype} {tuple(w.shape)}"] = recipe
        rows = x.shape[0]
        if recipe.min_rows <= rows <= recipe.max_rows:
            return _into(out, gemm(x))
        result = x.new_empty((rows, width), dtype=dtype) if out is None else out
        for first in range(0, rows, recipe.max_rows):
            block = x[first : first + recipe.max_rows]
            count = block.shape[0]
            if count < recipe.min_rows:
                block = F.pad(block, (0, 0, 0, recipe.min_rows - count))
            result[first : first + count] = gemm(block)[:count]
        return result


def _check_linear(x: torch.Tensor, w: torch.Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32) or w.dtype != x.dtype:
        raise TypeError(f"linear takes operands of one dtype, bfloat16 or float32; x is {x.dtype}, w is {w.dtype}")
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or x.shape[1] == 0:
        raise ValueError(f"linear takes x [M, K] and w [N, K] with K > 0; x is {tuple(x.shape)}, w is {tuple(w.shape)}")


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)
