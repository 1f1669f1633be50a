"""Speed of the linear layers of a 135M model and of the small operations, native beside torch, in one run.

Not a test: prints milliseconds and GF/s. The shapes are SmolLM2-135M's: 30 layers, hidden 576, 9 query and 3 KV heads
of 64, intermediate 1536, vocabulary 49152 (tied head); all weights lie in one mapping that asks for huge pages, as in
the engine. Both kinds run alternately, because a shared machine's speed drifts; compare best and median in one run.

    python tests/bench/bench_kernels.py --rows 1 8 32 64 128 --dtype bfloat16 --threads 2
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable

import torch
from unison.engine.kernels import Kernels, NativeKernels, TorchKernels

LAYERS, HIDDEN, INNER, VOCAB = 30, 576, 1536, 49152
SHAPES = [(960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)] * LAYERS + [(VOCAB, HIDDEN)]
HUGE = 2 << 20


def make_weights(dtype: torch.dtype) -> list[torch.Tensor]:
    """All matrices as views of one huge-page mapping."""
    total = sum(n * k for n, k in SHAPES)
    memory = mmap.mmap(-1, total * dtype.itemsize + 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=dtype)
    flat = flat[(-flat.data_ptr() % HUGE) // dtype.itemsize :][:total].normal_(0.0, 0.05)
    return [part.view(shape) for part, shape in zip(flat.split([n * k for n, k in SHAPES]), SHAPES, strict=True)]


def alternate(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call, one after the other in every round; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: sorted(values[1:]) for name, values in times.items()}


def report(what: str, times: dict[str, list[float]], gflop: float = 0.0) -> None:
    for name, values in times.items():
        speed = f"{gflop / values[0] * 1e3:8.0f} GF/s" if gflop else ""
        print(f"{what:24} {name:12} best {values[0]:9.3f} ms  median {statistics.median(values):9.3f} ms {speed}")


def bench_linears(kinds: dict[str, Kernels], rows: list[int], dtype: torch.dtype, repeats: int) -> None:
    weights = make_weights(dtype)
    gflop = 2e-9 * sum(w.numel() for w in weights)
    for m in rows:
        inputs = {k: torch.randn(m, k).to(dtype) for k in (HIDDEN, INNER)}

        def forward(kernels: Kernels, inputs: dict[int, torch.Tensor] = inputs) -> None:
            for w in weights[:-1]:
                kernels.linear(inputs[w.shape[1]], w)
            kernels.linear(inputs[HIDDEN], weights[-1])

        calls = {name: (lambda k=kernels: forward(k)) for name, kernels in kinds.items()}
        report(f"all linears, M={m}", alternate(calls, repeats), gflop * m)


def bench_rows(kinds: dict[str, Kernels], rows: list[int], dtype: torch.dtype, repeats: int) -> None:
    for m in rows:
        x, residual, weight = (torch.randn(m, HIDDEN).to(dtype) for _ in range(3))
        gate_up = torch.randn(m, 2 * INNER).to(dtype)
        q, k, angles = torch.randn(m, 9, 64).to(dtype), torch.randn(m, 3, 64).to(dtype), torch.randn(m, 32)
        cos, sin = angles.cos(), angles.sin()
        logits, targets = torch.randn(m, VOCAB), torch.arange(m)
        operations: dict[str, Callable[[Kernels], object]] = {
            "rms_norm": lambda n, x=x, w=weight[0]: n.rms_norm(x, w, 1e-5),
            "add_rms_norm": lambda n, r=residual, x=x, w=weight[0]: n.add_rms_norm(r, x, w, 1e-5),
            "rope_": lambda n, q=q, k=k, c=cos, s=sin: n.rope_(q, k, c, s),
            "silu_mul": lambda n, g=gate_up: n.silu_mul(g),
            "row_logprobs": lambda n, x=logits, t=targets: n.row_logprobs(x, t),
        }
        for name, operation in operations.items():
            calls = {kind: (lambda o=operation, n=kernels: o(n)) for kind, kernels in kinds.items()}
            report(f"{name}, M={m}", alternate(calls, repeats * 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    torch.set_num_threads(arguments.threads)
    native = NativeKernels()
    native.set_num_threads(arguments.threads)
    kinds: dict[str, Kernels] = {"native": native, "torch": TorchKernels(exact=False)}
    print(native.describe())
    with torch.no_grad():
        bench_linears(kinds, arguments.rows, dtype, arguments.repeats)
        bench_rows(kinds, arguments.rows, dtype, arguments.repeats)


if __name__ == "__main__":
    main()
