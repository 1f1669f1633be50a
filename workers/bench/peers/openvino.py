"""OpenVINO GenAI: continuous batching over the model as its own converter writes it.

Owns: conversion (once, into the peer's cache folder) and how it is called. Weights, arithmetic and KV cache are all in
the precision that the bench asks for; its default would be an 8-bit KV cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from .protocol import Load, Loaded, Work, speak, stop_tokens

CACHE_GB = 4
MAX_SEQUENCES = 128
WEIGHT_FORMATS = {"bfloat16": "fp16", "float32": "fp32"}
"""Of the converted file; the converter writes no bfloat16, and two bytes are two bytes."""


def load(request: Load) -> Loaded:
    """The converted model in a continuous-batching pipeline with a prefix cache."""
    import numpy
    import openvino
    import openvino_genai

    precision = {"bfloat16": "bf16", "float32": "f32"}[request.dtype]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = MAX_SEQUENCES
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(converted(Path(request.model), Path(request.cache), request.dtype)), scheduler, "CPU",
        {"INFERENCE_NUM_THREADS": request.threads, "INFERENCE_PRECISION_HINT": precision,
         "KV_CACHE_PRECISION": precision},
    )  # fmt: skip
    stops = stop_tokens(request.model)

    def run(work: Work) -> tuple[float, int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = work.max_tokens
        config.num_return_sequences = work.n
        config.logprobs = 1
        config.ignore_eos = work.ignore_eos
        config.stop_token_ids = stops
        config.eos_token_id = min(stops, default=-1)
        config.do_sample = work.temperature > 0
        if config.do_sample:
            config.temperature = work.temperature
            config.top_p = 1.0
        prompts = [openvino.Tensor(numpy.array([prompt], numpy.int64)) for prompt in work.prompts]
        started = time.perf_counter()
        handles = [pipeline.add_request(at, prompt, config) for at, prompt in enumerate(prompts)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        outputs = [output for handle in handles for output in handle.read_all()]
        seconds = time.perf_counter() - started
        if any(len(output.generated_log_probs) != len(output.generated_ids) for output in outputs):
            raise ValueError("a token without its log-prob")
        return seconds, sum(len(output.generated_ids) for output in outputs)

    notes = f"continuous batching, prefix cache, weights, arithmetic and KV cache in {precision}"
    return Loaded(run, ("openvino-genai", "openvino", "optimum-intel"), "all", notes)


def converted(model: Path, cache: Path, dtype: str) -> Path:
    """The model as OpenVINO's files, made by optimum-intel at the first call."""
    weights = (model / "model.safetensors").stat() if (model / "model.safetensors").exists() else model.stat()
    target = cache / f"{model.name}-{dtype}-{weights.st_size}-{int(weights.st_mtime)}"
    if not (target / "openvino_model.xml").exists():
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        tool = Path(sys.executable).with_name("optimum-cli")
        subprocess.run(
            [str(tool), "export", "openvino", "--model", str(model), "--task", "text-generation-with-past",
             "--weight-format", WEIGHT_FORMATS[dtype], str(partial)],
            stdin=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        partial.rename(target)
    return target


if __name__ == "__main__":
    sys.exit(speak(load))
