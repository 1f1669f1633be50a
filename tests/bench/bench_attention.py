"""Time of attention per forward pass (all layers) on this machine, for each CPU backend.

    python tests/bench/bench_attention.py [--threads 2] [--layers 30] [--heads 9] [--kv-heads 3] [--head-dim 64]

Each layer has its own KV slots, so caches are as cold as in a model. Printed is the best of --repeats, in milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from unison.engine.attention import (
    AttentionBackend,
    DecodeDescriptor,
    LayerAttention,
    LayerKV,
    PackedDescriptor,
    PrefillDescriptor,
    select_attention,
)
from unison.engine.kernels.build import library

BLOCK_SIZE = 16


def best_ms(body: Callable[[], object], repeats: int) -> float:
    """Shortest of several runs."""
    body()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        body()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


class Case:
    """One model shape with its KV slots."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        self.options, self.dtype = options, dtype
        self.layer = LayerAttention(options.head_dim**-0.5)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self.dtype)

    def cached(self, rows: int, length: int) -> tuple[list[LayerKV], torch.Tensor]:
        """Slots of every layer and a shuffled block table."""
        blocks = -(-length // BLOCK_SIZE)
        shape = (rows * blocks * BLOCK_SIZE, self.options.kv_heads, self.options.head_dim)
        layers = [LayerKV(self.random(*shape), self.random(*shape)) for _ in range(self.options.layers)]
        return layers, torch.randperm(rows * blocks).to(torch.int32).view(rows, blocks)

    def decode(self, backend: AttentionBackend, rows: int, length: int) -> float:
        layers, tables = self.cached(rows, length)
        q = self.random(rows, self.options.heads, self.options.head_dim)
        k = self.random(rows, self.options.kv_heads, self.options.head_dim)
        lengths = torch.full((rows,), length, dtype=torch.int64)

        def step() -> None:
            descriptor = DecodeDescriptor(tables, BLOCK_SIZE, lengths, length)
            for kv in layers:
                backend.forward(q, k, k, descriptor, self.layer, kv)

        return best_ms(step, self.options.repeats)

    def store(self, backend: AttentionBackend, rows: int) -> float:
        layers, _ = self.cached(rows, 512)
        k = self.random(rows, self.options.kv_heads, self.options.head_dim)
        slots = (torch.arange(rows) * 512).to(torch.int32)
        return best_ms(lambda: [backend.store(k, k, slots, kv) for kv in layers], self.options.repeats)

    def prefill(self, backend: AttentionBackend, length: int) -> float:
        layers, tables = self.cached(1, length)
        q = self.random(length, self.options.heads, self.options.head_dim)
        k = self.random(length, self.options.kv_heads, self.options.head_dim)
        starts, zero = torch.tensor([0, length], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)

        def step() -> None:
            descriptor = PrefillDescriptor(tables, BLOCK_SIZE, starts, zero, length, length)
            for kv in layers:
                backend.forward(q, k, k, descriptor, self.layer, kv)

        return best_ms(step, max(1, self.options.repeats // 3))

    def packed(self, backend: AttentionBackend, rows: int, length: int, is_training: bool) -> float:
        q = self.random(rows * length, self.options.heads, self.options.head_dim).requires_grad_(is_training)
        k = self.random(rows * length, self.options.kv_heads, self.options.head_dim).requires_grad_(is_training)
        descriptor = PackedDescriptor(torch.arange(0, rows * length + 1, length, dtype=torch.int32), length)

        def step() -> None:
            for _ in range(self.options.layers):
                out = backend.forward(q, k, k, descriptor, self.layer, None)
                if is_training:
                    out.backward(out)

        return best_ms(step, max(1, self.options.repeats // 3))

    def overhead_us(self, backend: AttentionBackend) -> float:
        """Time of a call whose arithmetic is next to nothing: one row of one position."""
        layers, tables = self.cached(1, BLOCK_SIZE)
        q = self.random(1, self.options.heads, self.options.head_dim)
        k = self.random(1, self.options.kv_heads, self.options.head_dim)
        descriptor = DecodeDescriptor(tables, BLOCK_SIZE, torch.ones(1, dtype=torch.int64), 1)
        calls = 2000
        one = layers[0]
        return (
            best_ms(
                lambda: [backend.forward(q, k, k, descriptor, self.layer, one) for _ in range(calls)],
                self.options.repeats,
            )
            * 1e3
            / calls
        )


def main() -> None:
    """Print one table per dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"threads": 2, "layers": 30, "heads": 9, "kv-heads": 3, "head-dim": 64, "repeats": 5}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", default="", help="backend to time: native, torch-exact or torch-fast")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native = library()
    if native is not None:
        native.unison_set_threads(options.threads)
    backends = {
        "native": select_attention("cpu", "native", True, 256, 64),
        "torch-exact": select_attention("cpu", "torch", True, 256, 64),
        "torch-fast": select_attention("cpu", "torch", False, 256, 64),
    }
    for dtype in (torch.bfloat16, torch.float32):
        case = Case(options, dtype)
        print(f"{dtype}, {options.threads} threads, {options.layers} layers; ms (call overhead: µs)")
        for name, backend in backends.items():
            if options.only and name != options.only:
                continue
            with torch.inference_mode():
                figures = {
                    "decode 32×512": case.decode(backend, 32, 512),
                    "decode 1×2048": case.decode(backend, 1, 2048),
                    "decode 1×256": case.decode(backend, 1, 256),
                    "prefill 2048": case.prefill(backend, 2048),
                    "packed 8×256": case.packed(backend, 8, 256, False),
                    "store 32": case.store(backend, 32),
                    "overhead": case.overhead_us(backend),
                }
            figures["train 8×256"] = case.packed(backend, 8, 256, True)
            print(f"  {name:12s}" + " | ".join(f"{what} {value:.1f}" for what, value in figures.items()))


if __name__ == "__main__":
    main()
