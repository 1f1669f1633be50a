"""Workspace: the step's input buffers, allocated once and written in place on every step.

Owns: one staging copy on the host and one on the device (the same tensors on a CPU). Knows nothing of what the numbers
mean. Written by the executor, in the thread that steps the engine.

Shapes: T tokens of a step · R rows of a step · NB blocks per table row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StepInputs:
    """One set of buffers, on the host or on the device."""

    token_ids_T: Tensor
    """int64 [T]: tokens to embed."""
    positions_T: Tensor
    """int64 [T]: position of each in its sequence."""
    slots_T: Tensor
    """int32 [T]: KV slot that each writes (S13)."""
    seq_lens_R: Tensor
    """int64 [R]: tokens of each decode row, its new one included."""
    start_positions_R: Tensor
    """int64 [R]: position of the first query of each prefill row."""
    query_starts_R1: Tensor
    """int32 [R+1]: where each prefill row's queries begin."""
    block_tables_RB: Tensor
    """int32 [R, NB]: KV blocks of each row, -1 where unmapped."""


class Workspace:
    """All step buffers of one engine.

    Invariants: every buffer is an ordinary tensor, whoever builds the engine and in whatever grad mode (S10–S12); host
    buffers are pinned exactly when the device is CUDA (S3).
    """

    def __init__(self, max_tokens: int, max_rows: int, max_blocks: int, device: torch.device) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.host = _allocate(max_tokens, max_rows, max_blocks, torch.device("cpu"), device.type == "cuda")
            is_cpu = device.type == "cpu"
            self.device = self.host if is_cpu else _allocate(max_tokens, max_rows, max_blocks, device, False)
        self._views = {name: tensor.numpy() for name, tensor in vars(self.host).items()}

    def array(self, name: str) -> np.ndarray:
        """The host buffer `name` as an array, to be written in place."""
        return self._views[name]

    def upload(self, name: str, *size: int) -> Tensor:
        """The first `size` elements per dimension of buffer `name` on the device, after copying them there."""
        index = tuple(slice(0, length) for length in size)
        source: Tensor = getattr(self.host, name)[index]
        if self.device is self.host:
            return source
        target: Tensor = getattr(self.device, name)[index]
        return target.copy_(source, non_blocking=True)


def _allocate(max_tokens: int, max_rows: int, max_blocks: int, device: torch.device, pin: bool) -> StepInputs:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device, pin_memory=pin)

    return StepInputs(
        token_ids_T=zeros(max_tokens),
        positions_T=zeros(max_tokens),
        slots_T=zeros(max_tokens, dtype=torch.int32),
        seq_lens_R=zeros(max_rows),
        start_positions_R=zeros(max_rows),
        query_starts_R1=zeros(max_rows + 1, dtype=torch.int32),
        block_tables_RB=torch.full((max_rows, max_blocks), -1, dtype=torch.int32, device=device, pin_memory=pin),
    )
