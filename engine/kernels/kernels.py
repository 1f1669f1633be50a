"""Kernels: the door through which the decoder does its arithmetic, whatever does it behind.

Owns the contract of each operation: shapes, roundings and what `exact` means. Knows nothing of models, caches or
requests. Called by the decoder, by the sampler and by the trainer's loss; thread rule: any thread, one call at a time
per object.

Shapes: M rows (tokens), K and H input width, N output width, I inner width of the gated layer, T tokens, D head
width, D2 half of the rotary part of a head, R rows of logits, V vocabulary.

`exact` promises that a row of any result depends on that row of the inputs (and on the weights) alone: not on M, on
the other rows, on how a batch was cut, on strides or on the number of threads (R3). Different implementations of
Kernels need not agree with each other to the bit, so one process pair (engine and trainer) uses one.

Every operation computes in fp32 and rounds where the reference models of Hugging Face round, unless it says
otherwise. Operations whose name ends in `_` and `add_rms_norm` write into their arguments. None records gradients:
see `differentiable`. An `out` must not overlap an input, except where the operation says so.

Raises: TypeError for a dtype or device that the operation doesn't take, ValueError for shapes and strides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from .gradients import RowGradients


class Kernels(ABC):
    """The decoder's operations on one kind of device. Stateless apart from scratch memory."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for logs and stats: `native` or `torch`."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether rows are independent of their company (R3); see the module's text."""

    @property
    def writes_into_outputs(self) -> bool:
        """Whether an `out` saves anything: False where results are computed elsewhere and copied there."""
        return False

    @property
    def gradients(self) -> RowGradients:
        """The backward of the row-wise operations."""
        return RowGradients()

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Which path is taken and why, as plain values for stats and the record of a policy version."""

    @abstractmethod
    def gather_rows(self, table_VH: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of a table by their numbers: embeddings, and rotary tables by position.

        Shapes: table [V, H] of any dtype, contiguous; ids int64 [T]; y [T, H]. Raises IndexError for an id outside the
        table (on CUDA, torch's own assertion).
        """

    @abstractmethod
    def linear(
        self,
        x_MK: torch.Tensor,
        w_NK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y = x w^T + bias, accumulated in fp32 and rounded once to x's dtype.

        Shapes: y [M, N]. All operands of one dtype, bfloat16 or float32.
        """

    @abstractmethod
    def logits(self, x_MK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """y = x w^T in float32: the accumulated sums, not rounded to the operands' dtype.

        Shapes: y [M, N], float32.
        """

    @abstractmethod
    def rms_norm(
        self, x_MH: torch.Tensor, weight_H: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """weight * round(x / sqrt(mean(x^2) + eps)), the inner rounding and the product in x's dtype. `out` may be x.

        Shapes: y [M, H].
        Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; roundings as in Hugging Face's Llama.
        """

    @abstractmethod
    def add_rms_norm(
        self,
        residual_MH: torch.Tensor,
        x_MH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """residual += x in place (rounded to its dtype), then `rms_norm` of the new residual. `out` may be x.

        Shapes: y [M, H].
        """

    @abstractmethod
    def rope_(self, q_THD: torch.Tensor, k_THkD: torch.Tensor, cos_TD2: torch.Tensor, sin_TD2: torch.Tensor) -> None:
        """Rotates q and k in place: (a, b) := (a cos - b sin, b cos + a sin) for the halves a, b of a head's first 2
        D2 elements.

        In fp32 with one rounding at the end; Hugging Face rounds cos, sin and both products to the model's dtype, which
        only loses bits. Elements from 2 D2 on stay as they are.

        Shapes: q [T, H, D], k [T, Hk, D], cos and sin [T, D2] float32, already gathered by position.
        Source: Su et al., "RoFormer", 2021; rotate-half layout.
        """

    @abstractmethod
    def silu_mul(self, gate_up_M2I: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """round(silu(gate)) * up, where gate is the first half of each row and up the second.

        Shapes: y [M, I].
        """

    def linear_silu_mul(
        self,
        x_MK: torch.Tensor,
        w_2IK: torch.Tensor,
        bias_2I: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`silu_mul` of `linear`, to the same bits: a gated layer's first half.

        Shapes: w [2 I, K] with the gate's rows first, y [M, I].
        """
        return self.silu_mul(self.linear(x_MK, w_2IK, bias_2I), out)

    @abstractmethod
    def row_logprobs(self, logits_RV: torch.Tensor, targets_R: torch.Tensor) -> torch.Tensor:
        """log softmax of each row at its target. A target outside the vocabulary is the caller's fault; it never
        reads outside.

        Shapes: logits float32 [R, V], targets int64 [R], result float32 [R]. A NaN in a row gives NaN.
        """

    def row_softmax(
        self, logits_RV: torch.Tensor, targets_R: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`row_logprobs`, and the softmax of each row rounded to `dtype`: what a log-prob's gradient is made of.

        Shapes: logits float32 [R, V], targets int64 [R], results float32 [R] and [R, V].
        """
        return self.row_logprobs(logits_RV, targets_R), torch.softmax(logits_RV, dim=-1).to(dtype)

    @abstractmethod
    def row_logsumexp(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """log of the sum of exponentials of each row.

        Shapes: logits float32 [R, V], result float32 [R]. A NaN in a row gives NaN.
        """
