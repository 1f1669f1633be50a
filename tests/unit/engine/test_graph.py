"""DecodeGraphs as far as a machine without CUDA shows it: buckets, padding, and letting go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from unison.engine.attention import DecodeDescriptor
from unison.engine.runtime import graph
from unison.engine.runtime.graph import DecodeGraphs
from unison.engine.runtime.workspace import Workspace


class Eager:
    """Stands for torch.cuda.CUDAGraph: a replay runs the captured call again, into the same output."""

    def replay(self) -> None:
        """Nothing: the recorder below keeps the inputs' addresses, as a graph does."""


class Recorder(DecodeGraphs):
    """DecodeGraphs with the capture replaced by its forward, which needs no device."""

    def _capture(self, ordinal: int, bucket: int, bound: int) -> graph._Captured:
        inputs = self._inputs
        descriptor = DecodeDescriptor(inputs.block_tables_RB[:bucket], 4, inputs.seq_lens_R[:bucket], bound)
        logits = self._forward(
            ordinal, inputs.token_ids_T[:bucket], inputs.positions_T[:bucket], inputs.slots_T[:bucket], descriptor
        )
        return graph._Captured(Eager(), logits)  # type: ignore[arg-type]


def test_buckets_padding_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: rows are padded to a power of two with rows that write nothing; a version's graphs go with it."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    space = Workspace(8, 6, 4, torch.device("cpu"))
    space.device.token_ids_T.fill_(9)
    space.device.slots_T.fill_(3)
    seen: list[tuple[int, list[int], list[int], int]] = []

    def forward(ordinal: int, tokens: Tensor, _: Tensor, slots: Tensor, descriptor: DecodeDescriptor) -> Tensor:
        seen.append((ordinal, tokens.tolist(), slots.tolist(), descriptor.max_kv_len))
        return tokens[:, None].float()

    graphs = Recorder(space.device, 4, forward)
    assert graphs.logits(0, 3, 5).tolist() == [[9.0]] * 3
    assert graphs.logits(0, 2, 300).tolist() == [[9.0]] * 2
    space.device.token_ids_T.fill_(9)
    space.device.slots_T.fill_(3)
    assert graphs.logits(1, 5, 5).shape == (5, 1)
    assert graphs.logits(0, 3, 7).shape == (3, 1)
    assert seen == [
        (0, [9, 9, 9, 0], [3, 3, 3, -1], 256),
        (0, [9, 9], [3, 3], 512),
        (1, [9, 9, 9, 9, 9, 0], [3, 3, 3, 3, 3, -1], 256),
    ]
    graphs.forget(0)
    assert {key[0] for key in graphs._captured} == {1}
