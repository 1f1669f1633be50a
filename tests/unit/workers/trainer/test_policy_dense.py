"""The trainer's log-probs and gradients against an independent dense decoder in float64, for every family's features,
and against themselves however the work is cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from harness.tiny_model import VOCAB_SIZE, tiny_spec, tiny_weights
from torch import Tensor
from torch.nn.functional import silu
from unison.engine.config import EngineConfig
from unison.engine.models.layout import HEAD, WeightLayout
from unison.engine.models.packed import packed_logprobs
from unison.engine.models.spec import ModelSpec
from unison.ipc.errors import WeightsError
from unison.workers.trainer.policy import HEAD_ROWS, Group, TrainablePolicy

GROUPS: list[Group] = [
    ([5, 6, 7], [[8, 9, 10, 11], [12], [], [13, 14]]),
    ([20], [[21], [22, 23, 24, 25, 26, 27, 28]]),
    ([30, 31, 32, 33, 34, 35, 36, 37], [[40] * 9]),
    ([50, 51], [[]]),
]
"""Shared and lone prompts, completions of 0, 1 and more tokens."""
FAMILIES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3"},
    "window": {"model_type": "mistral", "sliding_window": 4, "tie_word_embeddings": False},
    "nope": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
}
"""Keys of config.json that turn on what a decoder may have."""


def built(spec: ModelSpec, dtype: str = "float32", seed: int = 0, is_checkpointed: bool = False) -> TrainablePolicy:
    """A policy over random weights, packed into a layout of its own."""
    policy = TrainablePolicy(spec, EngineConfig(device="cpu", dtype=dtype), is_checkpointed)
    policy.read(packed(spec, dtype, seed))
    return policy


def packed(spec: ModelSpec, dtype: str = "float32", seed: int = 0) -> dict[str, Tensor]:
    """Random weights in the engine's layout."""
    wanted = getattr(torch, dtype)
    return WeightLayout(spec, wanted).pack(tiny_weights(spec, seed, wanted))


def num_tokens(groups: Sequence[Group]) -> int:
    """Completion tokens."""
    return sum(len(each) for _, completions in groups for each in completions)


def upstream(count: int) -> Tensor:
    """A different weight for every token."""
    return torch.sin(torch.arange(count) + 1.0)


def gradient_of(policy: TrainablePolicy, groups: Sequence[Group], temperature: float = 1.0) -> Tensor:
    """Gradient of the weighted sum of all log-probs, in one backward."""
    policy.zero_gradient()
    (policy.logprobs(groups, temperature) * upstream(num_tokens(groups))).sum().backward()
    return policy.gradient.clone()


def distance(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest value wanted."""
    return float((found.double() - wanted.double()).abs().max() / wanted.abs().max())


# ---- the dense decoder -----------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang and Sennrich 2019."""
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotated(x: Tensor, theta: float) -> Tensor:
    """Su et al. 2021, halves paired as in Hugging Face's Llama: [length, heads, D]."""
    length, _, width = x.shape
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)[:, None]
    first, second = x[..., : width // 2], x[..., width // 2 :]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
    )  # fmt: skip


def attended(spec: ModelSpec, layer: int, views: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Causal attention of one sequence, one head after the other."""
    prefix, length = f"model.layers.{layer}.self_attn.", len(x)

    def projected(name: str) -> Tensor:
        out = x @ views[f"{prefix}{name}_proj.weight"].T
        if spec.qkv_bias:
            out = out + views[f"{prefix}{name}_proj.bias"]
        return out.view(length, -1, spec.head_dim)

    q, k, v = projected("q"), projected("k"), projected("v")
    if spec.qk_norm:
        q = rms_norm(q, views[f"{prefix}q_norm.weight"], spec.rms_norm_eps)
        k = rms_norm(k, views[f"{prefix}k_norm.weight"], spec.rms_norm_eps)
    if spec.rope_layers[layer]:
        q, k = rotated(q, spec.rope.theta), rotated(k, spec.rope.theta)
    age = torch.arange(length)[:, None] - torch.arange(length)
    is_seen = (age >= 0) & (age < (spec.windows[layer] or length))
    heads = []
    for head in range(spec.num_heads):
        shared = head // (spec.num_heads // spec.num_kv_heads)
        scores = (q[:, head] @ k[:, shared].T) / math.sqrt(spec.head_dim)
        heads.append(scores.masked_fill(~is_seen, -math.inf).softmax(-1) @ v[:, shared])
    out = torch.cat(heads, dim=-1) @ views[f"{prefix}o_proj.weight"].T
    return out + views[f"{prefix}o_proj.bias"] if spec.o_bias else out


def dense_logits(spec: ModelSpec, views: Mapping[str, Tensor], ids: Sequence[int]) -> Tensor:
    """Logits of one sequence [length, V]: Touvron et al. 2023, sec. 2.2."""
    x = views["model.embed_tokens.weight"][torch.tensor(ids)]
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."

        def linear(x: Tensor, name: str, prefix: str = prefix) -> Tensor:
            out = x @ views[f"{prefix}mlp.{name}_proj.weight"].T
            return out + views[f"{prefix}mlp.{name}_proj.bias"] if spec.mlp_bias else out

        x = x + attended(spec, layer, views, rms_norm(x, views[f"{prefix}input_layernorm.weight"], spec.rms_norm_eps))
        h = rms_norm(x, views[f"{prefix}post_attention_layernorm.weight"], spec.rms_norm_eps)
        x = x + linear(silu(linear(h, "gate")) * linear(h, "up"), "down")
    head = views["model.embed_tokens.weight" if spec.is_tied else HEAD]
    return rms_norm(x, views["model.norm.weight"], spec.rms_norm_eps) @ head.T


def dense_logprobs(
    spec: ModelSpec, views: Mapping[str, Tensor], groups: Sequence[Group], temperature: float = 1.0
) -> Tensor:
    """log_softmax(logits / temperature) at every completion token, each sequence by itself."""
    found = []
    for prompt, completions in groups:
        for each in completions:
            if each:
                logits = dense_logits(spec, views, [*prompt, *each])[len(prompt) - 1 : -1]
                rows = torch.log_softmax(logits / temperature, dim=-1)
                found.append(rows[torch.arange(len(each)), torch.tensor(each)])
    return torch.cat(found)


def leaves_of(spec: ModelSpec, seed: int = 0, dtype: str = "float32") -> dict[str, Tensor]:
    """The same weights as float64 leaves, tied ones once."""
    views = packed(spec, dtype, seed)
    return {name: views[name].double().requires_grad_(True) for name in WeightLayout(spec, torch.float32).entries}


# ---- log-probs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_company_changes_no_bit(family: str, dtype: str, temperature: float) -> None:
    """R3: shared prompts, other groups and autograd change no bit of a token's log-prob; at temperature 1 they are
    those of `packed_logprobs`."""
    spec = tiny_spec(**FAMILIES[family])
    policy = built(spec, dtype)
    together = policy.logprobs(GROUPS, temperature)
    assert together.dtype is torch.float32 and together.shape == (num_tokens(GROUPS),) and together.requires_grad
    sequences = [(prompt, each) for prompt, completions in GROUPS for each in completions]
    with torch.no_grad():
        assert torch.equal(policy.logprobs(GROUPS, temperature), together.detach())
        alone = [policy.logprobs([(prompt, [each])], temperature) for prompt, each in sequences]
        assert [len(part) for part in alone] == [len(each) for _, each in sequences]
        assert torch.equal(torch.cat(alone), together.detach())
        if temperature == 1.0:
            parts, weights = policy._parts, policy.layout.bind(packed(spec, dtype))
            whole = packed_logprobs(
                parts.decoder, weights, parts.attention, [[*prompt, *each] for prompt, each in sequences]
            )
            tails = [row[len(prompt) - 1 :] for row, (prompt, _) in zip(whole, sequences, strict=True)]
            assert torch.equal(torch.cat(tails), together.detach())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_the_dense_decoders(family: str, temperature: float) -> None:
    """P19: log_softmax(logits / temperature) at the drawn tokens, by an independent forward."""
    spec = tiny_spec(**FAMILIES[family])
    with torch.no_grad():
        found = built(spec).logprobs(GROUPS, temperature)
        wanted = dense_logprobs(spec, leaves_of(spec), GROUPS, temperature)
    assert float((found - wanted).abs().max()) <= 1e-5


def test_half_precision_is_near() -> None:
    """In bfloat16 log-probs are the dense decoder's on the same rounded weights, to a few roundings."""
    spec = tiny_spec()
    with torch.no_grad():
        found = built(spec, "bfloat16").logprobs(GROUPS)
        wanted = dense_logprobs(spec, leaves_of(spec, dtype="bfloat16"), GROUPS)
    assert 0 < float((found - wanted).abs().max()) <= 0.05


def test_lengths() -> None:
    """P24: completions of 0 and 1 tokens have their place and no more, wherever they stand in their group."""
    policy = built(tiny_spec())
    with torch.no_grad():
        single = policy.logprobs([([5], [[6]])])
        assert single.shape == (1,)
        for completions in ([[], [6]], [[6], []], [[], [6], []]):
            assert torch.equal(policy.logprobs([([9], [[]]), ([5], completions), ([7, 7], [])]), single)
        assert policy.logprobs([([5], [[], []]), ([6], [[]])]).shape == (0,)


def test_a_reference_policy_is_another_weight_set() -> None:
    """`weights` takes others than those read, without a gradient and without a change to those read."""
    spec = tiny_spec()
    policy, other = built(spec), built(spec, seed=1)
    mine = policy.logprobs(GROUPS).detach()
    reference = policy.layout.bind(packed(spec, seed=1))
    with torch.no_grad():
        found = policy.logprobs(GROUPS, weights=reference)
        assert torch.equal(found, other.logprobs(GROUPS)) and not torch.equal(found, mine)
    assert not policy.logprobs(GROUPS, weights=reference).requires_grad
    assert torch.equal(policy.logprobs(GROUPS).detach(), mine)


def test_reading_again() -> None:
    """`read` takes the weights where they are: what is written into them later counts; other layouts are refused."""
    spec = tiny_spec()
    policy = built(spec)
    before = policy.logprobs(GROUPS).detach()
    views = packed(spec, seed=1)
    policy.read(views)
    assert torch.equal(policy.logprobs(GROUPS).detach(), built(spec, seed=1).logprobs(GROUPS).detach())
    for name, value in packed(spec).items():
        views[name].copy_(value)
    assert torch.equal(policy.logprobs(GROUPS).detach(), before)
    with pytest.raises(WeightsError, match="bfloat16"):
        policy.read(packed(spec, "bfloat16"))


def test_without_weights() -> None:
    """Nothing can be computed before there are weights, and no prompt may be empty."""
    policy = TrainablePolicy(tiny_spec(), EngineConfig(device="cpu", dtype="float32"))
    with pytest.raises(ValueError, match="read"):
        policy.logprobs(GROUPS)
    policy.read(packed(tiny_spec()))
    with pytest.raises(ValueError, match="prompt is empty"):
        policy.logprobs([([], [[1]])])


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_is_the_dense_decoders(family: str, temperature: float) -> None:
    """Every parameter's gradient (biases, head norms and an untied head too) is plain autograd's to 1e-5."""
    spec = tiny_spec(**FAMILIES[family])
    policy = built(spec)
    found = policy.gradient_layout.views(gradient_of(policy, GROUPS, temperature))
    leaves = leaves_of(spec)
    (dense_logprobs(spec, leaves, GROUPS, temperature) * upstream(num_tokens(GROUPS))).sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.any(), name
        assert distance(found[name], leaf.grad) <= 1e-5, name


def test_half_precision_gradient_is_near() -> None:
    """In bfloat16 each tensor's gradient, gathered in float32, points where the dense decoder's does."""
    spec = tiny_spec()
    policy = built(spec, "bfloat16")
    flat = gradient_of(policy, GROUPS)
    assert flat.dtype is torch.float32
    leaves = leaves_of(spec, dtype="bfloat16")
    (dense_logprobs(spec, leaves, GROUPS) * upstream(num_tokens(GROUPS))).sum().backward()
    for name, found in policy.gradient_layout.views(flat).items():
        if name in leaves:
            wanted = leaves[name].grad
            assert wanted is not None
            cosine = torch.nn.functional.cosine_similarity(found.double().flatten(), wanted.flatten(), dim=0)
            assert float(cosine) > 0.999, name


def pieces(groups: Sequence[Group], is_split: bool) -> list[tuple[Group, Tensor]]:
    """Micro-batches of one group, or of one sequence, with the weights of their tokens."""
    weights, at, found = upstream(num_tokens(groups)), 0, []
    for prompt, completions in groups:
        for part in [[each] for each in completions] if is_split else [completions]:
            count = sum(map(len, part))
            if count:
                found.append(((prompt, part), weights[at : at + count]))
            at += count
    return found


@pytest.mark.parametrize("is_split", [False, True], ids=["by group", "by sequence"])
@pytest.mark.parametrize("family", ["tied", "qwen3", "window"])
def test_gradient_does_not_depend_on_the_cut(family: str, is_split: bool) -> None:
    """P27: one backward, one per group, or one per sequence with its prompt computed again: the same gradient to
    1e-6, in whatever order."""
    policy = built(tiny_spec(**FAMILIES[family]))
    whole = gradient_of(policy, GROUPS)
    for order in (1, -1):
        policy.zero_gradient()
        for group, weights in pieces(GROUPS, is_split)[::order]:
            (policy.logprobs([group]) * weights).sum().backward()
        assert distance(policy.gradient, whole) <= 3e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_changes_nothing(family: str, dtype: str) -> None:
    """Activations that are computed again give the same log-probs and the same gradient, bit for bit."""
    spec = tiny_spec(**FAMILIES[family])
    kept, again = built(spec, dtype), built(spec, dtype, is_checkpointed=True)
    assert torch.equal(kept.logprobs(GROUPS).detach(), again.logprobs(GROUPS).detach())
    assert torch.equal(gradient_of(kept, GROUPS), gradient_of(again, GROUPS))


def test_rows_of_logits_are_computed_in_parts() -> None:
    """More completion tokens than HEAD_ROWS have the bits and the gradient that they have in smaller batches."""
    policy = built(tiny_spec())
    groups: list[Group] = [
        ([number + 3], [[(number * 31 + at * 7) % VOCAB_SIZE for at in range(HEAD_ROWS // 3)]]) for number in range(4)
    ]
    assert HEAD_ROWS < num_tokens(groups) < 2 * HEAD_ROWS
    whole, gradient = policy.logprobs(groups).detach(), gradient_of(policy, groups)
    assert torch.equal(whole, torch.cat([policy.logprobs([group]).detach() for group in groups]))
    policy.zero_gradient()
    for group, weights in pieces(groups, False):
        (policy.logprobs([group]) * weights).sum().backward()
    assert distance(policy.gradient, gradient) <= 1e-6


def test_gradients_add_up() -> None:
    """A second backward doubles the gradient; `zero_gradient` forgets it; what lies between tensors stays 0."""
    spec = tiny_spec(hidden_size=56, model_type="qwen3", head_dim=8)  # sizes that leave gaps
    policy = built(spec)
    once = gradient_of(policy, GROUPS)
    (policy.logprobs(GROUPS) * upstream(num_tokens(GROUPS))).sum().backward()
    assert torch.equal(policy.gradient, 2 * once)
    for name in policy.gradient_layout.entries:
        assert policy.gradients[name].any(), name
        policy.gradients[name].zero_()
    assert policy.gradient.numel() > sum(math.prod(each.shape) for each in policy.gradient_layout.entries.values())
    assert not policy.gradient.any()
    policy.gradient.fill_(1.0)
    policy.zero_gradient()
    assert not policy.gradient.any()


def test_weights_are_only_read() -> None:
    """Forward and backward leave the weights as they were, and no gradient on them."""
    spec = tiny_spec()
    views = packed(spec)
    policy = TrainablePolicy(spec, EngineConfig(device="cpu", dtype="float32"))
    policy.read(views)
    gradient_of(policy, GROUPS)
    for name, value in packed(spec).items():
        assert torch.equal(views[name], value) and not views[name].requires_grad, name


def test_masked_tokens_have_no_gradient() -> None:
    """P26: a gradient of 0 from above reaches no parameter."""
    policy = built(tiny_spec())
    (policy.logprobs(GROUPS) * 0.0).sum().backward()
    assert not policy.gradient.any()
