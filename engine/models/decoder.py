"""Decoder: the one model definition, for the engine (cached, no gradient) and the trainer (packed, autograd).

Owns: the order of operations of a pre-norm transformer decoder (Llama and its relatives). All arithmetic goes through
`Kernels`, all attention through the caller's `attend`; whether there is a cache is the caller's business. Stateless but
for the rotary table.

Shapes (legend of the package): T tokens · H query heads · Hk KV heads · D head dim · R rows that need logits · V
vocabulary. Source: Touvron et al. 2023 (LLaMA), sec. 2.2; GQA: Ainslie et al. 2023; q/k norm: Qwen3; NoPE layers:
SmolLM3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..kernels import Kernels, differentiable
from ..kernels.tape import keep
from .layout import DecoderWeights, LayerWeights
from .spec import ModelSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, H, D], k [T, Hk, D], v [T, Hk, D]) → [T, H, D]; q and k are rotated."""

Rotary = tuple[Tensor, Tensor]
"""cos and sin [T, D2] of a pass's positions, float32."""


@dataclass(frozen=True, eq=False)
class _Scratch:
    """Outputs that one layer writes and the next one overwrites, where nothing needs gradients."""

    qkv: Tensor | None = None
    branch: Tensor | None = None
    gated: Tensor | None = None
    hidden: Tensor | None = None

    @classmethod
    def of(cls, layer: LayerWeights, hidden: Tensor) -> _Scratch:
        """For any layer of the model: their shapes are alike. `hidden` [T, hidden] is taken into use."""
        widths = (layer.qkv.shape[0], hidden.shape[1], layer.gate_up.shape[0] // 2)
        qkv, branch, gated = (hidden.new_empty(hidden.shape[0], width) for width in widths)
        keep((qkv, branch, gated))
        return cls(qkv, branch, gated, hidden)


class Decoder:
    """Runs any weight set of its spec. Invariant R3: a token's output depends on its own sequence alone."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.kernels = kernels
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = spec.rope.table(spec.max_position_embeddings)
            self._cos, self._sin = cos.to(device), sin.to(device)

    def forward(
        self, weights: DecoderWeights, token_ids_T: Tensor, positions_T: Tensor, attend: Attend,
        is_checkpointed: bool = False,
    ) -> Tensor:  # fmt: skip
        """Hidden states [T, hidden] after the final norm; `is_checkpointed` trades a second forward for memory.

        Shapes: token ids and positions int64 [T].
        """
        kernels, eps = self.kernels, self.spec.rms_norm_eps
        rotary = kernels.gather_rows(self._cos, positions_T), kernels.gather_rows(self._sin, positions_T)
        residual = differentiable.embedding(kernels, weights.embedding, token_ids_T)
        hidden = differentiable.rms_norm(kernels, residual, weights.layers[0].input_norm, eps)
        scratch = _Scratch()
        if kernels.writes_into_outputs and not hidden.requires_grad:
            scratch = _Scratch.of(weights.layers[0], hidden)
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            run = partial(self._layer, index, layer, next_norm, rotary, attend, scratch)
            if is_checkpointed:
                residual, hidden = checkpoint(run, residual, hidden, use_reentrant=False)
            else:
                residual, hidden = run(residual, hidden)
        return hidden

    def logits(self, weights: DecoderWeights, hidden_RH: Tensor) -> Tensor:
        """Logits of the next token, float32 [R, V]."""
        return differentiable.logits(self.kernels, hidden_RH, weights.head)

    def _layer(
        self, index: int, layer: LayerWeights, next_norm: Tensor, rotary: Rotary, attend: Attend, to: _Scratch,
        residual: Tensor, hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One layer, and the norm that the next one begins with: (residual, hidden)."""
        kernels, eps = self.kernels, self.spec.rms_norm_eps
        branch = self._attention(index, layer, hidden, rotary, attend, to)
        residual, hidden = differentiable.add_rms_norm(kernels, residual, branch, layer.post_norm, eps, to.hidden)
        gated = differentiable.linear_silu_mul(kernels, hidden, layer.gate_up, layer.gate_up_bias, to.gated)
        branch = differentiable.linear(kernels, gated, layer.down, layer.down_bias, to.branch)
        return differentiable.add_rms_norm(kernels, residual, branch, next_norm, eps, to.hidden)

    def _attention(
        self, index: int, layer: LayerWeights, hidden: Tensor, rotary: Rotary, attend: Attend, to: _Scratch
    ) -> Tensor:
        spec, kernels = self.spec, self.kernels
        num_tokens, head_dim = hidden.shape[0], spec.head_dim
        qkv = differentiable.linear(kernels, hidden, layer.qkv, layer.qkv_bias, to.qkv)
        heads = qkv.view(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, head_dim)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._head_norm(q, layer.q_norm), self._head_norm(k, layer.k_norm)
        if spec.rope_layers[index]:
            q, k = differentiable.rope(kernels, q, k, *rotary)
        out = attend(index, q, k, v)
        flat = out.reshape(num_tokens, spec.num_heads * head_dim)
        return differentiable.linear(kernels, flat, layer.o, layer.o_bias, to.branch)

    def _head_norm(self, heads: Tensor, weight: Tensor) -> Tensor:
        flat = heads.reshape(-1, self.spec.head_dim)
        return differentiable.rms_norm(self.kernels, flat, weight, self.spec.rms_norm_eps).view(heads.shape)
