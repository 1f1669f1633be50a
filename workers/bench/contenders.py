"""The contenders: one way each to run a workload, measured by its own clock.

Owns: building and calling them. Each returns seconds and the tokens that it generated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ...engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from ...engine.engine import Engine
from ...ipc.types import SamplingParams
from .workloads import Workload


@dataclass(frozen=True)
class Measurement:
    """One run."""

    seconds: float
    """Wall-clock time."""
    num_tokens: int
    """Generated tokens, the stop token included."""

    @property
    def tokens_per_s(self) -> float:
        """Output rate, prefill time included."""
        return self.num_tokens / self.seconds


class Contender(Protocol):
    """What the bench compares."""

    name: str

    def run(self, workload: Workload) -> Measurement:
        """Generate everything, with the log-prob of each token, and time it."""


class UnisonContender:
    """This engine, as configured."""

    def __init__(self, name: str, model: Path, dtype: str, threads: int, kernels: str, exact: bool) -> None:
        self.name = name
        config = EngineConfig(
            dtype=dtype,
            cache=CacheConfig(num_tokens=65536, prefix_caching=True),
            scheduler=SchedulerConfig(max_num_seqs=128, max_step_tokens=512),
            runtime=RuntimeConfig(kernels=kernels, exact=exact, num_threads=threads),
        )
        self.engine = Engine.from_pretrained(model, config)
        self.engine.warm_up()
        self._num_runs = 0

    def run(self, workload: Workload) -> Measurement:
        """One synchronous batch; earlier runs' prefix blocks don't help, since each run changes the first token."""
        self._num_runs += 1
        marker = (self._num_runs * 7919 + len(workload.prompts)) % self.engine.spec.vocab_size
        prompts = [(marker, *prompt[1:]) for prompt in workload.prompts]
        params = SamplingParams(
            max_tokens=workload.max_tokens, temperature=workload.temperature, ignore_eos=workload.ignore_eos, seed=1
        )
        started = time.perf_counter()
        outputs = self.engine.run_batch(prompts, params, n=workload.n)
        seconds = time.perf_counter() - started
        return Measurement(seconds, sum(len(c.token_ids) for output in outputs for c in output.completions))


class TransformersContender:
    """`transformers` generate with its default attention (sdpa) and a static batch, log-probs computed from its
    logits."""

    name = "transformers"

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an extra, and slow to import

        torch.set_num_threads(threads)
        self._threads = threads
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        eos = self._model.generation_config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [eos])

    @torch.inference_mode()
    def run(self, workload: Workload) -> Measurement:
        """One call of `generate` for the whole batch, prompts padded on the left."""
        longest = max(map(len, workload.prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in workload.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts])
        options: dict[str, Any] = {"do_sample": workload.temperature > 0, "num_return_sequences": workload.n}
        if workload.temperature:
            options |= {"temperature": workload.temperature, "top_k": 0, "top_p": 1.0}
        if workload.ignore_eos:
            options["min_new_tokens"] = workload.max_tokens
        torch.set_num_threads(self._threads)
        started = time.perf_counter()
        out = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=workload.max_tokens, return_dict_in_generate=True,
            output_logits=True, pad_token_id=0, **options,
        )  # fmt: skip
        tokens = out.sequences[:, longest:]
        for step, logits in enumerate(out.logits):
            torch.log_softmax(logits.float(), -1).gather(1, tokens[:, step : step + 1])
        seconds = time.perf_counter() - started
        return Measurement(seconds, self._count(tokens.tolist(), workload))

    def _count(self, rows: list[list[int]], workload: Workload) -> int:
        if workload.ignore_eos:
            return sum(map(len, rows))
        return sum(next((at + 1 for at, token in enumerate(row) if token in self._eos), len(row)) for row in rows)
