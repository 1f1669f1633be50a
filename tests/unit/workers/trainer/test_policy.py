"""The trainer's forward and gradient on the tiny model."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from harness.tiny_model import tiny_engine, tiny_spec, tiny_weights
from torch import Tensor
from unison.engine.config import EngineConfig
from unison.engine.models.packed import PackedTokens, packed_hidden, packed_logprobs
from unison.ipc.types import SamplingParams
from unison.workers.trainer.policy import TrainablePolicy

GROUPS = [([5, 6, 7], [[8, 9, 10, 11], [12], [], [13, 14]]), ([20], [[21, 22]]), ([30] * 40, [[31] * 25, [32] * 3])]


def policy(dtype: str = "float32", is_checkpointed: bool = False) -> TrainablePolicy:
    made = TrainablePolicy(tiny_spec(), EngineConfig(dtype=dtype), is_checkpointed)
    made.read(tiny_weights(tiny_spec(), 0, getattr(torch, dtype)))
    return made


def gradient_of(made: TrainablePolicy, groups: list[tuple[list[int], list[list[int]]]]) -> Tensor:
    made.zero_gradient()
    for group in groups:
        logprobs = made.logprobs([group])
        if logprobs.requires_grad:
            (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return made.gradient.clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_prompts_change_no_bit(dtype: str) -> None:
    """R3: a prompt that is computed once for its completions gives the bits that each sequence has alone."""
    made = policy(dtype)
    with torch.no_grad():
        together = made.logprobs(GROUPS)
        alone = [made.logprobs([(prompt, [each])]) for prompt, completions in GROUPS for each in completions]
    assert torch.equal(together, torch.cat(alone))
    weights = made.layout.bind(tiny_weights(tiny_spec(), 0, getattr(torch, dtype)))
    parts = made._parts
    whole = packed_logprobs(parts.decoder, weights, parts.attention, [[*GROUPS[0][0], *GROUPS[0][1][0]]])[0]
    assert torch.equal(together[:4], whole[2:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engines_bits(dtype: str, temperature: float) -> None:
    """S35, P19: log-probs that the engine reports are the trainer's, at every temperature."""
    engine = tiny_engine(dtype=dtype)
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
    output = engine.run_batch([[5, 6, 7]], params, n=4)[0]
    made = policy(dtype)
    ours = made.logprobs([([5, 6, 7], [list(each.token_ids) for each in output.completions])], temperature)
    reported = [value for each in output.completions for value in each.logprobs]
    assert ours.tolist() == reported


def dense_logprobs(views: Mapping[str, Tensor], prompt: list[int], tokens: list[int]) -> Tensor:
    """The tiny Llama once more, in plain torch and float32."""
    spec = tiny_spec()
    ids = torch.tensor(prompt + tokens)
    x = views["model.embed_tokens.weight"][ids]

    def norm(x: Tensor, name: str) -> Tensor:
        return views[name] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps))

    cos, sin = (each[: len(ids)] for each in spec.rope.table(spec.max_position_embeddings))

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    for index in range(spec.num_layers):
        layer = f"model.layers.{index}."
        h = norm(x, layer + "input_layernorm.weight")
        q, k, v = (
            (h @ views[f"{layer}self_attn.{name}_proj.weight"].T).view(len(ids), -1, spec.head_dim) for name in "qkv"
        )
        q, k = rotate(q), rotate(k)
        k, v = (each.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.attention_scale
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + out @ views[layer + "self_attn.o_proj.weight"].T
        h = norm(x, layer + "post_attention_layernorm.weight")
        gate, up = (h @ views[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ views[layer + "mlp.down_proj.weight"].T
    logits = norm(x, "model.norm.weight") @ views["model.embed_tokens.weight"].T
    rows = logits[len(prompt) - 1 : len(ids) - 1].log_softmax(-1)
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_gradient_is_autograds() -> None:
    """The gradient of every tensor equals plain autograd's through an independent dense forward."""
    made = policy()
    ours = gradient_of(made, GROUPS)
    flat = made.gradient_layout.allocate()
    made.gradient_layout.views(flat)
    leaves = {
        name: view.clone().requires_grad_(True)
        for name, view in tiny_weights(tiny_spec(), 0, torch.float32).items() if name != "lm_head.weight"
    }  # fmt: skip
    for prompt, completions in GROUPS:
        logprobs = torch.cat([dense_logprobs(leaves, prompt, each) for each in completions if each])
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    mine = made.gradient_layout.views(ours)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        scale = float(leaf.grad.abs().max())
        assert float((mine[name] - leaf.grad).abs().max()) <= 1e-5 * max(1.0, scale), name


def test_gradient_does_not_depend_on_sharing_or_cutting() -> None:
    """P27: prompts computed once or per completion, one backward or several: the same gradient."""
    made = policy()
    together = gradient_of(made, GROUPS)
    made.zero_gradient()
    for prompt, completions in GROUPS:
        lengths = [len(each) for each in completions]
        weights = torch.linspace(-1, 1, sum(lengths)).split(lengths)
        for each, weight in zip(completions, weights, strict=True):
            if each:
                (made.logprobs([(prompt, [each])]) * weight).sum().backward()
    assert torch.allclose(made.gradient, together, atol=1e-5, rtol=1e-5)


def test_checkpointing_changes_nothing() -> None:
    """Activation checkpointing computes the same gradient again."""
    assert torch.equal(gradient_of(policy(is_checkpointed=True), GROUPS), gradient_of(policy(), GROUPS))


def test_long_sequences_have_the_gradient_of_short_ones() -> None:
    """Attention's gradient goes by batches of short sequences and by strips of long ones: both are autograd's."""
    made = policy()
    prompt, tokens = [7] * 5, [3 + at % 100 for at in range(300)]
    ours = made.gradient_layout.views(gradient_of(made, [(prompt, [tokens])]))
    leaves = {
        name: view.clone().requires_grad_(True)
        for name, view in tiny_weights(tiny_spec(), 0, torch.float32).items() if name != "lm_head.weight"
    }  # fmt: skip
    (dense_logprobs(leaves, prompt, tokens) * torch.linspace(-1, 1, 300)).sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert float((ours[name] - leaf.grad).abs().max()) <= 1e-5 * max(1.0, float(leaf.grad.abs().max())), name


def test_nothing_to_compute() -> None:
    """P24: no groups, or completions of no tokens, give no log-probs."""
    made = policy()
    assert made.logprobs([]).shape == (0,) and made.logprobs([([1, 2], [[], []])]).shape == (0,)
    with pytest.raises(ValueError, match="prompt is empty"):
        made.logprobs([([], [[1]])])
    with pytest.raises(ValueError, match="no weights yet"):
        TrainablePolicy(tiny_spec(), EngineConfig(dtype="float32")).logprobs([([1], [[2]])])


def test_packed_tokens_of_nothing_shared() -> None:
    """Whole sequences need no spreading, and predict all but their first token."""
    tokens = PackedTokens.of([[1, 2, 3], [4]])
    assert tokens.spread is None and tokens.predicts.tolist() == [0, 1]
    made = policy()
    weights = made.layout.bind(tiny_weights(tiny_spec(), 0, torch.float32))
    assert packed_hidden(made._parts.decoder, weights, made._parts.attention, tokens).shape[0] == 4
