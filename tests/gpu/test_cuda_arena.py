"""The CUDA IPC arena on a real device: two processes, one memory, a flip without a copy, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.serving import serving
from harness.tiny_directory import write_tiny_directory
from harness.tiny_model import tiny_spec, tiny_weights
from unison.ipc.arena.publisher import WeightPublisher
from unison.ipc.client import Client
from unison.ipc.types import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.mark.gpu
def test_publish_through_device_memory(tmp_path: Path) -> None:
    """P14, P30, P31: what the publisher writes on the device is what the worker reads after the flip; a thousand
    publications take no more memory than two."""
    write_tiny_directory(tmp_path / "model")
    options = ("--no-http", "--device", "cuda", "--set", "engine.cache.num_tokens=8192")
    with serving(tmp_path / "r", tmp_path / "model", *options) as run, Client.connect(run.run_dir) as client:
        before = client.generate([5, 6], GREEDY)
        with WeightPublisher(client) as publisher:
            publisher.publish({name: t.cuda() for name, t in tiny_weights(tiny_spec(), seed=1).items()})
            after = client.generate([5, 6], GREEDY)
            assert after.completions[0].versions[0].version == 1
            assert after.completions[0].logprobs != before.completions[0].logprobs
            free = torch.cuda.mem_get_info()[0]
            for seed in range(1000):
                publisher.publish({name: t.cuda() for name, t in tiny_weights(tiny_spec(), seed=seed % 3).items()})
            torch.cuda.empty_cache()
            assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)
