"""TrainablePolicy: log-probs of samples with gradients, by the engine's own model code on the engine's own weights.

The weights are read where the engine reads them (a buffer of the arena, or any tensors in the engine's layout), in the
engine's dtype; nothing is copied. Gradients are gathered in float32 in one flat vector with the layout of the weights,
whatever the number of micro-batches.

Owns: the gradient vector and its wiring to the leaves. Knows nothing of losses, optimizers or processes.

Shapes: N completion tokens · R rows of logits at once · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ...engine.assembly import forward_parts
from ...engine.config import EngineConfig
from ...engine.kernels import Kernels, differentiable
from ...engine.models.layout import DecoderWeights, LayerWeights, WeightLayout
from ...engine.models.packed import PackedTokens, packed_hidden
from ...engine.models.spec import ModelSpec
from ...engine.runtime.filters import scaled

Group = tuple[Sequence[int], Sequence[Sequence[int]]]
"""A prompt's token ids, and those of its completions."""

HEAD_ROWS = 512
"""Rows of logits that are held at once: 100 MB at a vocabulary of 49,152."""


class TrainablePolicy:
    """One model to be trained. Life: built → `read` whenever there are new weights → `logprobs`, backward, `gradients`.

    One thread.
    """

    def __init__(self, spec: ModelSpec, config: EngineConfig, is_checkpointed: bool = False) -> None:
        """`config` is the engine's own, so that both compute the same; `is_checkpointed`: activation checkpointing.

        Raises:
            ConfigError: the machine can't do what is asked for.
        """
        self.spec = spec
        self.layout = WeightLayout(spec, getattr(torch, config.dtype))
        self.gradient_layout = WeightLayout(spec, torch.float32)
        self._parts = forward_parts(spec, config)
        self._is_checkpointed = is_checkpointed
        self.device = torch.device(config.device)
        """Where everything is computed."""
        self.gradient = self.gradient_layout.allocate(self.device)
        """float32 [elements]: the sum of all backward passes since `zero_gradient`; padding between tensors is 0."""
        self.gradients = self.gradient_layout.views(self.gradient)
        """Views of it by Hugging Face name."""
        self._weights: DecoderWeights | None = None

    @property
    def kernels(self) -> Kernels:
        """What does the arithmetic."""
        return self._parts.kernels

    def describe(self) -> dict[str, object]:
        """What computes, and the settings that its bits depend on, as plain values."""
        return self._parts.describe() | {"dtype": str(self.layout.dtype).removeprefix("torch.")}

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these weights from now on, where they are; they must not change while they are used.

        Raises:
            WeightsError: they aren't laid out as the engine's are.
        """
        self._weights = _leaves(self.layout.bind(tensors), self.gradient_layout.bind(self.gradients))

    def zero_gradient(self) -> None:
        """Forget the backward passes so far."""
        self.gradient.zero_()

    def logprobs(
        self, groups: Sequence[Group], temperature: float = 1.0, weights: DecoderWeights | None = None
    ) -> Tensor:
        """Log-prob of every completion token under softmax(logits / temperature), one completion after the other:
        float32 [N]. With gradients where they are enabled.

        At temperature 1 these are the bits of the engine's `raw_logprobs`; at another one, of its `logprobs` (without
        filters and penalties). `weights` (from `layout.bind`) takes others than those read: a reference policy.
        """
        tokens = PackedTokens.of_groups(groups, self.device)
        targets = torch.tensor(
            [token for _, completions in groups for completion in completions for token in completion],
            dtype=torch.int64, device=self.device,
        )  # fmt: skip
        weights = weights or self._weights
        if weights is None:
            raise ValueError("there are no weights yet; `read` some")
        if not len(targets):
            return torch.zeros(0, device=self.device)
        decoder = self._parts.decoder
        hidden = packed_hidden(decoder, weights, self._parts.attention, tokens, self._is_checkpointed)
        rows = hidden.index_select(0, tokens.predicts)
        return torch.cat([
            _head_logprobs(self.kernels, part, weights.head, wanted, temperature)
            for part, wanted in zip(rows.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True)
        ])  # fmt: skip


class _HeadLogprobs(torch.autograd.Function):
    """log softmax(h W^T / temperature) at the targets. Only h and a 16-bit softmax are kept, not the logits."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, hidden: Any, head: Any, targets: Any, temperature: float) -> Tensor:
        logits = kernels.logits(hidden, head)
        logits = _at_temperature(logits, temperature)
        out, softmax = kernels.row_softmax(logits, targets, hidden.dtype)
        ctx.save_for_backward(hidden, head, targets, softmax)
        ctx.kernels, ctx.temperature = kernels, temperature
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, head, targets, softmax = ctx.saved_tensors
        grad = ctx.kernels.gradients.logprobs(softmax, targets, grads[0] / ctx.temperature)
        return None, differentiable.product(grad, head), differentiable.product(grad.t(), hidden), None, None


def _head_logprobs(kernels: Kernels, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> Tensor:
    if torch.is_grad_enabled():
        return _HeadLogprobs.apply(kernels, hidden, head, targets, temperature)
    logits = differentiable.logits(kernels, hidden, head)
    return kernels.row_logprobs(_at_temperature(logits, temperature), targets)


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """As the sampler scales them, to the bit."""
    if temperature == 1.0:
        return logits
    return scaled(logits, torch.full((len(logits),), temperature, device=logits.device))


def _leaves(weights: DecoderWeights, gradients: DecoderWeights) -> DecoderWeights:
    """The same tensors as leaves of the graph, whose gradients end up in `gradients`; a tied head is one leaf."""
    known: dict[int, Tensor] = {}

    def leaf(tensor: Tensor | None, total: Tensor | None) -> Any:
        if tensor is None or total is None:
            return None
        if tensor.data_ptr() not in known:
            known[tensor.data_ptr()] = _leaf(tensor, total)
        return known[tensor.data_ptr()]

    layers = tuple(
        LayerWeights(
            **{item.name: leaf(getattr(layer, item.name), getattr(total, item.name)) for item in fields(layer)}
        )
        for layer, total in zip(weights.layers, gradients.layers, strict=True)
    )
    embedding = leaf(weights.embedding, gradients.embedding)
    return DecoderWeights(embedding, layers, leaf(weights.norm, gradients.norm), leaf(weights.head, gradients.head))


def _leaf(tensor: Tensor, total: Tensor) -> Tensor:
    made = tensor.detach().requires_grad_(True)

    def gather(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    made.register_post_accumulate_grad_hook(gather)
    return made
