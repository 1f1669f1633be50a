"""A tiny random decoder, so that an engine is built in milliseconds and still does everything that a real one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from unison.engine.config import EngineConfig
from unison.engine.engine import Engine
from unison.engine.models.layout import WeightLayout
from unison.engine.models.packed import packed_logprobs
from unison.engine.models.spec import ModelSpec
from unison.ipc.types import Completion, GenerateRequest, RequestOutput

VOCAB_SIZE = 160
EOS = 2


def tiny_spec(**overrides: Any) -> ModelSpec:
    """Two layers, four query heads over two KV heads; `overrides` are keys of config.json."""
    config = {
        "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "eos_token_id": [EOS, 3],
    }  # fmt: skip
    return ModelSpec.from_config(config | overrides)


def tiny_weights(spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random weights in one flat layout, large enough that distributions differ between seeds."""
    layout = WeightLayout(spec, dtype)
    flat = layout.allocate()
    generator = torch.Generator().manual_seed(seed)
    flat.copy_((torch.randn(flat.shape, generator=generator) * 0.15).to(dtype))
    views = layout.views(flat)
    for name, view in views.items():
        if "norm" in name:
            view.copy_(1 + 0.1 * view)
    return views


def tiny_engine(seed: int = 0, spec: ModelSpec | None = None, **config: Any) -> Engine:
    """An engine over `tiny_weights`; `config` are nested keys of EngineConfig, e.g. cache={"num_tokens": 64}."""
    spec = spec or tiny_spec()
    values: dict[str, Any] = {"cache": {"num_tokens": 1024, "block_size_tokens": 4}} | config
    settings = EngineConfig.from_dict(values)
    return Engine(spec, tiny_weights(spec, seed, getattr(torch, settings.dtype)), settings)


def run_all(engine: Engine, requests: Sequence[GenerateRequest]) -> dict[str, RequestOutput]:
    """Submit all, step until the engine is idle."""
    for request in requests:
        engine.submit(request)
    return drain(engine)


def drain(engine: Engine) -> dict[str, RequestOutput]:
    """Step until idle, checking invariants after each step."""
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        done.update((output.request_id, output) for output in engine.step().finished)
        engine.check_invariants()
    return done


def oracle_logprobs(
    engine: Engine, prompt: Sequence[int], completion: Completion, ordinal: int = 0
) -> tuple[float, ...]:
    """What the packed forward of an installed version says of a completion's tokens."""
    parts = engine._parts
    weights = parts.guard.weights_of(ordinal)
    with torch.no_grad():
        (logprobs,) = packed_logprobs(parts.decoder, weights, parts.attention, [[*prompt, *completion.token_ids]])
    return tuple(logprobs[len(prompt) - 1 :].tolist())


def assert_baseline(engine: Engine) -> None:
    """Nothing is held for requests: rows, blocks, pins, queue and metrics are as in a new engine (S29)."""
    status, stats = engine.status(), engine.stats()
    assert (status.num_running, status.num_waiting, stats.num_requests_live) == (0, 0, 0)
    assert status.num_free_blocks == status.num_blocks
    assert all(version.num_pins == 0 for version in status.versions)
    pool = engine._parts.caches.pool
    assert pool.rows.num_free == pool.rows.num_rows
    assert (pool.block_tables == -1).all()
    engine.check_invariants()
