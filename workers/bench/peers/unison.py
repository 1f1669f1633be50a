"""This engine, as one synchronous batch in a process of its own.

Owns: how it is called. The option `is_exact` chooses between the exact path and torch's fastest inexact one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ....engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from ....engine.engine import Engine
from ....ipc.types import SamplingParams
from .protocol import Load, Loaded, Work, speak


def load(request: Load) -> Loaded:
    """A warm engine with room for 128 sequences."""
    is_exact = request.options["is_exact"]
    config = EngineConfig(
        dtype=request.dtype,
        cache=CacheConfig(num_tokens=65536, prefix_caching=True),
        scheduler=SchedulerConfig(max_num_seqs=128, max_step_tokens=512),
        runtime=RuntimeConfig(kernels="auto" if is_exact else "torch", exact=is_exact, num_threads=request.threads),
    )
    engine = Engine.from_pretrained(Path(request.model), config)
    engine.warm_up()

    def run(work: Work) -> tuple[float, int]:
        params = SamplingParams(
            max_tokens=work.max_tokens, temperature=work.temperature, ignore_eos=work.ignore_eos, seed=1
        )
        started = time.perf_counter()
        outputs = engine.run_batch(work.prompts, params, n=work.n)
        seconds = time.perf_counter() - started
        return seconds, sum(len(completion.token_ids) for output in outputs for completion in output.completions)

    return Loaded(run, ("torch",), "all", f"Engine.run_batch, exact={is_exact}, kernels={config.runtime.kernels}")


if __name__ == "__main__":
    sys.exit(speak(load))
