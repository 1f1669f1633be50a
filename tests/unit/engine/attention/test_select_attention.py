"""Which backend a device and a configuration get."""

from __future__ import annotations

import pytest
import torch
from unison.engine.attention import select_attention, split_tokens_for
from unison.engine.attention.cuda import CudaAttention
from unison.engine.attention.native import NativeAttention
from unison.engine.attention.torch_cpu import TorchAttention
from unison.engine.kernels.build import library
from unison.ipc.errors import ConfigError


def test_the_choice_follows_device_and_configuration() -> None:
    chosen = select_attention("cpu", "auto", True, 128, 32)
    if library() is None:
        assert isinstance(chosen, TorchAttention) and chosen.exact
    else:
        assert isinstance(chosen, NativeAttention)
        assert (chosen.split_tokens, chosen.query_tile_rows) == (128, 32)
    fast = select_attention(torch.device("cpu"), "torch", False, 128, 32)
    assert isinstance(fast, TorchAttention) and not fast.exact
    assert isinstance(select_attention("cuda:0", "auto", True, 128, 32), CudaAttention)


def test_impossible_choices_are_refused() -> None:
    """P4: the configuration's field is named."""
    with pytest.raises(ConfigError, match="runtime.kernels"):
        select_attention("cuda", "native", True, 128, 32)
    with pytest.raises(ConfigError, match="auto, native, torch"):
        select_attention("cpu", "fastest", True, 128, 32)


@pytest.mark.parametrize(
    ("context", "splits", "tokens"), [(8192, 32, 256), (2048, 32, 64), (2049, 32, 128), (100, 1, 128), (1, 1024, 64)]
)
def test_partitions_are_multiples_of_64_and_no_more_than_asked(context: int, splits: int, tokens: int) -> None:
    assert split_tokens_for(context, splits) == tokens
    assert -(-context // tokens) <= splits
