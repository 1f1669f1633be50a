"""The real model, bit for bit: what the engine says of a token is what the packed autograd forward says of it."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from unison.engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from unison.engine.engine import Engine
from unison.engine.models.layout import DecoderWeights, WeightLayout
from unison.engine.models.loader import load
from unison.engine.models.packed import packed_logprobs
from unison.engine.models.spec import ModelSpec
from unison.ipc.types import GenerateRequest, RequestOutput, SamplingParams

pytestmark = [pytest.mark.slow]

NUM_TOKENS = 20
N = 4
LENGTHS = (1, 5, 16, 17, 40, 63, 64, 100)
BASE = EngineConfig(
    cache=CacheConfig(num_tokens=4096, block_size_tokens=16),
    scheduler=SchedulerConfig(max_num_seqs=64, max_step_tokens=256, prefill_chunk_tokens=256),
)
CONFIGS = {
    "paged-16": BASE,
    "paged-1": replace(BASE, cache=replace(BASE.cache, block_size_tokens=1)),
    "paged-32-no-prefix": replace(BASE, cache=replace(BASE.cache, block_size_tokens=32, prefix_caching=False)),
    "contiguous": replace(BASE, cache=CacheConfig(strategy="contiguous", num_tokens=4096), max_model_len=128),
    "chunk-1": replace(BASE, scheduler=replace(BASE.scheduler, prefill_chunk_tokens=1)),
    "chunk-7-few-rows": replace(BASE, scheduler=replace(BASE.scheduler, prefill_chunk_tokens=7, max_num_seqs=5)),
    "chunk-64": replace(BASE, scheduler=replace(BASE.scheduler, prefill_chunk_tokens=64)),
    "one-thread": replace(BASE, runtime=RuntimeConfig(num_threads=1)),
    "preempting": replace(
        BASE, cache=replace(BASE.cache, num_tokens=640), scheduler=replace(BASE.scheduler, watermark_fraction=0.0)
    ),
}


class RealModel:
    """Weights loaded once, and the outputs of the first configuration for all others to equal."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.spec = ModelSpec.from_dir(directory)
        self.layout = WeightLayout(self.spec, dtype)
        self.weights = load(directory, self.layout, torch.device("cpu"))
        self.prompts = prompts()
        self.first: list[RequestOutput] | None = None


def prompts() -> list[list[int]]:
    """Prompts of odd and even lengths, two of which begin alike."""
    draw = random.Random(5)
    tokens = [[draw.randrange(100, 49_000) for _ in range(length)] for length in LENGTHS]
    tokens.append(tokens[-1][:70] + tokens[2])
    return tokens


def params(index: int) -> SamplingParams:
    """Settings that differ between prompts, one greedy among them."""
    if index == 3:
        return SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, seed=index)
    extra = {"top_p": 0.9} if index % 3 == 0 else {}
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True, seed=index, **extra)


@pytest.fixture(scope="module")
def real(model_dir: Path) -> Iterator[RealModel]:
    """The real model in bfloat16."""
    yield RealModel(model_dir, torch.bfloat16)


def generate(engine: Engine, real: RealModel) -> list[RequestOutput]:
    return engine.run_batch(real.prompts, [params(index) for index in range(len(real.prompts))], n=N)


def differentiable_weights(real: RealModel) -> DecoderWeights:
    """The same bytes as one flat leaf that requires a gradient, as a trainer holds them."""
    base = real.weights["model.norm.weight"]._base
    assert base is not None
    flat = base.view(real.layout.dtype)[: real.layout.num_elements].detach().requires_grad_()
    return real.layout.bind(real.layout.views(flat))


def assert_equals_packed(engine: Engine, real: RealModel, outputs: list[RequestOutput]) -> int:
    """Every raw log-prob equals the packed forward's with gradients on; returns the tokens compared."""
    weights = differentiable_weights(real)
    parts = engine._parts
    samples = [(output.prompt_ids, completion) for output in outputs for completion in output.completions]
    count = 0
    for first in range(0, len(samples), 6):
        group = samples[first : first + 6]
        sequences = [[*prompt, *completion.token_ids] for prompt, completion in group]
        packed = packed_logprobs(parts.decoder, weights, parts.attention, sequences)
        assert packed[0].requires_grad
        for (prompt, completion), logprobs in zip(group, packed, strict=True):
            ours = torch.tensor(completion.raw_logprobs)
            theirs = logprobs.detach()[len(prompt) - 1 :]
            assert torch.equal(ours, theirs), f"differ by up to {(ours - theirs).abs().max()}"
            count += len(ours)
    return count


def fingerprint(outputs: list[RequestOutput]) -> str:
    """Hash of all tokens and log-probs."""
    rows = [[c.token_ids, c.logprobs, c.raw_logprobs, c.log_support_mass] for o in outputs for c in o.completions]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


@pytest.mark.parametrize("name", CONFIGS)
def test_engine_equals_packed_forward_in_every_bit(real: RealModel, name: str) -> None:
    """R3, V3, P41: tokens and log-probs depend on request, seed and version alone, and equal the trainer's forward."""
    engine = Engine(real.spec, real.weights, CONFIGS[name])
    assert engine.status().exact.is_exact, engine.status().exact.reason
    outputs = generate(engine, real)
    if name == "preempting":
        assert engine.stats().num_preemptions > 0
    if real.first is None:
        real.first = outputs
        assert assert_equals_packed(engine, real, outputs) == len(real.prompts) * N * NUM_TOKENS
    assert [o.completions for o in outputs] == [
        tuple(
            replace(c, kv_versions=mine.kv_versions) for c, mine in zip(first.completions, out.completions, strict=True)
        )
        for first, out in zip(real.first, outputs, strict=True)
    ]


def test_order_company_and_forced_preemption_change_nothing(real: RealModel) -> None:
    """R3, P41: submitted in another order, in steps, with preemptions forced at random."""
    engine = Engine(real.spec, real.weights, BASE)
    draw = random.Random(11)
    order = list(range(len(real.prompts)))
    draw.shuffle(order)
    done: dict[str, RequestOutput] = {}
    while order or engine.has_work:
        for _ in range(min(len(order), draw.randrange(3))):
            index = order.pop()
            engine.submit(GenerateRequest(str(index), tuple(real.prompts[index]), params(index), n=N))
        scheduler = engine._parts.scheduler
        if scheduler._running and draw.random() < 0.3:
            scheduler._preempt(draw.choice(scheduler._running))
            scheduler.check_invariants()
        done.update((output.request_id, output) for output in engine.step().finished)
    outputs = [done[str(index)] for index in range(len(real.prompts))]
    assert_equals_packed(engine, real, outputs)
    alone = engine.run_batch([real.prompts[4]], params(4), n=N)
    assert fingerprint(alone) == fingerprint([outputs[4]])
    if real.first is not None:
        assert fingerprint(outputs) == fingerprint(real.first)


def test_another_process_gives_the_same_bits(real: RealModel, model_dir: Path) -> None:
    """R3: across processes and thread counts."""
    engine = Engine(real.spec, real.weights, BASE)
    mine = fingerprint(engine.run_batch(real.prompts[:4], [params(index) for index in range(4)], n=2))
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); import test_exactness as t; import torch\n"
        "from pathlib import Path\n"
        "real = t.RealModel(Path(sys.argv[1]), torch.bfloat16)\n"
        "engine = t.Engine(real.spec, real.weights, t.CONFIGS['one-thread'])\n"
        "print(t.fingerprint(engine.run_batch(real.prompts[:4], [t.params(i) for i in range(4)], n=2)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(model_dir), str(Path(__file__).parent)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == mine


def test_fp32_engine_equals_packed_forward(model_dir: Path) -> None:
    """R3: the same promise in float32."""
    real = RealModel(model_dir, torch.float32)
    engine = Engine(real.spec, real.weights, replace(BASE, dtype="float32"))
    assert engine.status().exact.is_exact
    outputs = engine.run_batch(real.prompts, [params(index) for index in range(len(real.prompts))], n=2)
    assert_equals_packed(engine, real, outputs)
