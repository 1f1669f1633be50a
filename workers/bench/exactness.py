"""Exactness over random schedules: the largest difference between a log-prob of the engine and the packed forward's.

A schedule is an engine with drawn settings (block size, prefix cache, chunk, rows, tokens per step, threads, a pool so
small that sequences are preempted) and a batch of prompts of drawn lengths, some of which begin alike. Each has one to
eight samples, and they are submitted a few at a time. The difference is exactly 0 where engine and trainer agree (R3).

Owns: the drawing and the comparison. Called by `bin/bench exactness`.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from ...engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from ...engine.engine import Engine
from ...engine.models.layout import WeightLayout
from ...engine.models.loader import load
from ...engine.models.packed import packed_logprobs
from ...engine.models.spec import ModelSpec
from ...ipc.types import GenerateRequest, RequestOutput, SamplingParams

NUM_PROMPTS, MAX_PROMPT, MAX_TOKENS = 4, 96, 16
SEQUENCES_AT_ONCE = 8


def measure_exactness(model: Path, dtype: str, schedules: int) -> dict[str, dict[str, float]]:
    """Figures over that many schedules."""
    spec = ModelSpec.from_dir(model)
    layout = WeightLayout(spec, getattr(torch, dtype))
    weights = load(model, layout, torch.device("cpu"))
    bound = layout.bind(weights)
    tokens = preempted = hits = inexact = 0
    worst = 0.0
    for seed in range(schedules):
        draw = random.Random(seed)
        engine = Engine(spec, weights, _config(draw, dtype))
        inexact += not engine.status().exact.is_exact
        outputs = _run(engine, draw, spec.vocab_size)
        samples = [(output.prompt_ids, sample) for output in outputs for sample in output.completions]
        for first in range(0, len(samples), SEQUENCES_AT_ONCE):
            group = samples[first : first + SEQUENCES_AT_ONCE]
            parts = engine._parts
            with torch.inference_mode():
                packed = packed_logprobs(
                    parts.decoder, bound, parts.attention, [[*prompt, *sample.token_ids] for prompt, sample in group]
                )
            for (prompt, sample), logprobs in zip(group, packed, strict=True):
                difference = torch.tensor(sample.raw_logprobs) - logprobs[len(prompt) - 1 :]
                worst = max(worst, float(difference.abs().max()))
                tokens += len(difference)
        stats = engine.stats()
        preempted += stats.num_preemptions
        hits += stats.num_cached_tokens
    return {
        "schedules": {"number": float(schedules), "that don't claim exactness": float(inexact)},
        "tokens compared": {"number": float(tokens), "largest difference of a log-prob": worst},
        "on the way": {"preemptions": float(preempted), "prompt tokens from the prefix cache": float(hits)},
    }


def _config(draw: random.Random, dtype: str) -> EngineConfig:
    most = MAX_PROMPT + MAX_TOKENS
    return EngineConfig(
        dtype=dtype, max_model_len=2 * most,
        cache=CacheConfig(
            num_tokens=draw.choice((256, 512, 4096)), block_size_tokens=draw.choice((1, 16, 32)),
            prefix_caching=draw.random() < 0.7,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=draw.choice((3, 16, 64)), max_step_tokens=draw.choice((64, 100, 512)),
            prefill_chunk_tokens=draw.choice((1, 7, 33, 64)), watermark_fraction=0.0,
        ),
        runtime=RuntimeConfig(num_threads=draw.choice((1, 2))),
    )  # fmt: skip


def _run(engine: Engine, draw: random.Random, vocab_size: int) -> list[RequestOutput]:
    """The outputs of a batch that is submitted a few requests at a time."""
    common = [draw.randrange(100, vocab_size) for _ in range(draw.randrange(1, MAX_PROMPT))]
    waiting = []
    for at in range(NUM_PROMPTS):
        own = [draw.randrange(100, vocab_size) for _ in range(draw.randrange(1, MAX_PROMPT))]
        prompt = (common + own)[:MAX_PROMPT] if draw.random() < 0.5 else own
        params = SamplingParams(max_tokens=draw.randrange(1, MAX_TOKENS + 1), temperature=1.0, ignore_eos=True, seed=at)
        waiting.append(GenerateRequest(str(at), tuple(prompt), params, n=draw.randrange(1, 9)))
    outputs: list[RequestOutput] = []
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), draw.randrange(3))):
            engine.submit(waiting.pop())
        outputs += engine.step().finished
    return outputs
