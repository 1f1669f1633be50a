"""The weights are in memory once: what trainer and worker map are the same pages, and an update copies nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from harness.serving import serving
from harness.tiny_directory import write_tiny_directory
from unison.ipc.arena.publisher import WeightPublisher
from unison.ipc.client import Client
from unison.ipc.types import SamplingParams

pytestmark = pytest.mark.slow

OPTIONS = ("--no-http", "--set", "engine.cache.num_tokens=4096", "--set", "engine.runtime.num_threads=2")
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
MIB = 1 << 20


def arena_bytes(pid: int) -> dict[str, int]:
    """Sums over a process's mappings of the arena, in bytes, by smaps key."""
    sums = {"Rss": 0, "Pss": 0, "maps": 0, "writable": 0}
    is_arena = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_arena = "memfd:unison-weights" in line
            sums["maps"] += is_arena
        elif is_arena and line.startswith(("Rss:", "Pss:")):
            sums[line.split(":")[0]] += int(line.split()[1]) * 1024
        elif is_arena and line.startswith("VmFlags:") and " wr " in line:
            sums["writable"] += 1
    return sums


def anonymous_bytes(pid: int) -> int:
    """Memory of a process's own."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found.group(1)) * 1024


def test_weights_are_counted_once(tmp_path: Path, model_dir: Path) -> None:
    """P49, P48, V2: the worker's own memory holds no weights, its mappings of them can't be written, and with a
    publisher that maps them too every page is still there once."""
    write_tiny_directory(tmp_path / "tiny")
    with serving(tmp_path / "t", tmp_path / "tiny", *OPTIONS) as run, Client.connect(run.run_dir) as client:
        client.generate([1, 2, 3], SHORT)
        without = anonymous_bytes(run.worker_pid)
    with serving(tmp_path / "r", model_dir, *OPTIONS) as run, Client.connect(run.run_dir) as client:
        client.generate([1, 2, 3], SHORT)
        worker = run.worker_pid
        alone = arena_bytes(worker)
        with WeightPublisher(client) as publisher:
            one = publisher.arena.layout.buffer_bytes
            assert 0.95 * one < alone["Rss"] < 1.05 * one + 4 * MIB, "the live buffer, and no other, was touched"
            assert alone["writable"] <= 1, "only the header's pages can be written"
            held = anonymous_bytes(worker) - without
            kv_bytes = 4096 * 30 * 2 * 3 * 64 * 2
            assert held < kv_bytes + 96 * MIB < one, f"{held / MIB:.0f} MiB of the worker's own memory"

            publisher.arena.manifest(0)  # this process reads every page of the live buffer
            pss = arena_bytes(worker)["Pss"] + arena_bytes_of_self()["Pss"]
            assert 0.95 * one < pss < 1.05 * one + 4 * MIB, "two mappings, one memory"


def arena_bytes_of_self() -> dict[str, int]:
    """The same for this process."""
    return arena_bytes(os.getpid())


def test_publishing_allocates_nothing_in_the_engine(tmp_path: Path, model_dir: Path) -> None:
    """P30, P09: what was written into the inactive buffer is what is read after the flip: no copy, no new mapping."""
    with serving(tmp_path / "r", model_dir, *OPTIONS) as run, Client.connect(run.run_dir) as client:
        worker = run.worker_pid
        with WeightPublisher(client) as publisher, torch.no_grad():
            base = {name: tensor.clone() for name, tensor in publisher.arena.tensors(publisher.arena.flat(0)).items()}
            base.pop("lm_head.weight")
            results = []
            for round_ in range(6):
                base["model.norm.weight"][round_] *= -1
                live = publisher.publish(base)
                results.append(client.generate([1, 2, 3], SHORT).completions[0].raw_logprobs)
                assert client.status().versions[-1].version == live.version
                if round_ == 1:
                    before, maps = anonymous_bytes(worker), arena_bytes(worker)["maps"]
            assert arena_bytes(worker)["maps"] == maps
            assert anonymous_bytes(worker) - before < 4 * MIB
            assert len(set(results)) == len(results), "each round's bytes were read"
