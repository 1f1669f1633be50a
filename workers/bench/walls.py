"""Walls: what it costs to put the engine into its own process: channel, HTTP, ring.

Every figure is a ratio to, or a difference from, the same engine in this process, taken alternately in one run. The
load generator shares the machine with what it measures, so its own work counts against the walls.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

from ...engine.config import CacheConfig, EngineConfig
from ...engine.engine import Engine
from ...ipc.client import Client
from ...ipc.types import GenerateRequest, SamplingParams
from .ring import measure_ring
from .served import ServedRun, served

Rows = dict[str, dict[str, float]]
PROMPT_TOKENS = 64
CACHE_TOKENS = 65536
SERVED_NAME = "bench"
Through = Callable[[list[list[int]], SamplingParams], int]
"""Generates for all prompts through a wall; returns the number of tokens."""


def measure_walls(model: Path, dtype: str, repeats: int, new_tokens: int) -> Rows:
    """All walls around one model."""
    config = EngineConfig(dtype=dtype, cache=CacheConfig(num_tokens=CACHE_TOKENS))
    engine = Engine.from_pretrained(model, config)
    engine.warm_up()
    with served(model, dtype, "--served-name", SERVED_NAME, "--set", f"engine.cache.num_tokens={CACHE_TOKENS}") as run:
        with Client.connect(run.run_dir) as client:
            rows = {
                "client, 32 requests": _throughput(
                    engine, lambda prompts, params: _through_client(client, prompts, params), 32, repeats, new_tokens
                ),
                "client, added latency per token": _added_latency(engine, client, repeats, new_tokens),
                "HTTP, 64 streams": _throughput(
                    engine, lambda prompts, params: _through_http(run, prompts, params), 64, repeats, new_tokens
                ),
            }
    small, large = measure_ring(200_000, 200), measure_ring(20_000, 20_000)
    return rows | {"ring, frames of 200 bytes": small, "ring, frames of 20 kB": large}


def _prompts(count: int, salt: int) -> list[list[int]]:
    """Prompts that share no beginning with those of another round."""
    return [[100 + (salt * 1009 + at * 31 + place * 7) % 9000 for place in range(PROMPT_TOKENS)] for at in range(count)]


def _params(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, temperature=1.0, seed=1, ignore_eos=True)


def _throughput(engine: Engine, through: Through, batch: int, repeats: int, new_tokens: int) -> dict[str, float]:
    """Tokens per second in this process and through a wall, and their ratio, as medians of alternating rounds."""
    params, inside, outside = _params(new_tokens), [], []
    for round_ in range(repeats + 1):
        started = perf_counter()
        engine.run_batch(_prompts(batch, 2 * round_), params)
        inside.append(batch * new_tokens / (perf_counter() - started))
        started = perf_counter()
        num_tokens = through(_prompts(batch, 2 * round_ + 1), params)
        outside.append(num_tokens / (perf_counter() - started))
    here, there = statistics.median(inside[1:]), statistics.median(outside[1:])  # the first round warms both up
    return {"tokens/s in process": here, "tokens/s through": there, "ratio": there / here}


def _through_client(client: Client, prompts: list[list[int]], params: SamplingParams) -> int:
    outputs = client.generate_all(prompts, params)
    return sum(len(completion.token_ids) for output in outputs for completion in output.completions)


def _added_latency(engine: Engine, client: Client, repeats: int, new_tokens: int) -> dict[str, float]:
    """Median time between two tokens of a lone stream, minus the median step of the engine in this process."""
    steps_s, gaps_s = [], []
    for round_ in range(repeats + 1):
        (prompt,) = _prompts(1, 1000 + 2 * round_)
        engine.submit(GenerateRequest(f"bench-{round_}", tuple(prompt), _params(new_tokens)))
        engine.step()
        while engine.has_work:
            started = perf_counter()
            engine.step()
            steps_s.append(perf_counter() - started)
        (prompt,) = _prompts(1, 1001 + 2 * round_)
        last = None
        for _ in client.stream(prompt, _params(new_tokens)):
            now = perf_counter()
            if last is not None:
                gaps_s.append(now - last)
            last = now
    step, gap = statistics.median(steps_s), statistics.median(gaps_s)
    return {"ms in process": step * 1e3, "ms through": gap * 1e3, "added ms": (gap - step) * 1e3}


def _through_http(run: ServedRun, prompts: list[list[int]], params: SamplingParams) -> int:
    async def everything() -> int:
        return sum(await asyncio.gather(*(_stream(run.url, prompt, params) for prompt in prompts)))

    return asyncio.run(everything())


async def _stream(url: str, prompt: list[int], params: SamplingParams) -> int:
    """One streamed completion over a bare connection; returns the tokens that the usage report names."""
    where = urlsplit(url)
    body = json.dumps({
        "model": SERVED_NAME, "prompt": prompt, "max_tokens": params.max_tokens, "temperature": params.temperature,
        "seed": params.seed, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    answer = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    return int(answer.rpartition(b'"completion_tokens":')[2].partition(b",")[0])
