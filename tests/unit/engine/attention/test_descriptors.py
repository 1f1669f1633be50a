"""Descriptors refuse what no kernel should guess about."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from unison.engine.attention import DecodeDescriptor, LayerKV, PackedDescriptor, PrefillDescriptor

TABLES = torch.zeros(2, 3, dtype=torch.int32)


def test_each_phase_has_only_its_own_fields() -> None:
    """S4: start positions make a prefill; fields of the other phase do not exist."""
    decode = {item.name for item in fields(DecodeDescriptor)}
    prefill = {item.name for item in fields(PrefillDescriptor)}
    assert "start_positions" in prefill and "query_starts" in prefill and "seq_lens" not in prefill
    assert "seq_lens" in decode and not decode & {"start_positions", "query_starts", "max_query_len"}


def test_index_dtypes_are_fixed() -> None:
    """S13: tables and starts are int32, lengths and positions int64."""
    lengths, starts = torch.ones(2, dtype=torch.int64), torch.tensor([0, 1, 2], dtype=torch.int32)
    DecodeDescriptor(TABLES, 16, lengths, 1)
    PrefillDescriptor(TABLES, 16, starts, lengths, 1, 2)
    with pytest.raises(TypeError, match="block_tables is torch.int64; must be torch.int32"):
        DecodeDescriptor(TABLES.long(), 16, lengths, 1)
    with pytest.raises(TypeError, match="seq_lens"):
        DecodeDescriptor(TABLES, 16, lengths.int(), 1)
    with pytest.raises(TypeError, match="query_starts"):
        PrefillDescriptor(TABLES, 16, starts.long(), lengths, 1, 2)
    with pytest.raises(TypeError, match="start_positions"):
        PrefillDescriptor(TABLES, 16, starts, lengths.int(), 1, 2)
    with pytest.raises(TypeError, match="seq_starts"):
        PackedDescriptor(starts.long(), 1)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rows, seq_lens 3"):
        DecodeDescriptor(TABLES, 16, torch.ones(3, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="query_starts needs 3 entries"):
        PrefillDescriptor(TABLES, 16, torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), 1, 1)
    with pytest.raises(ValueError, match="block_size is 0"):
        DecodeDescriptor(TABLES, 0, torch.ones(2, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"must have 2 dimension"):
        DecodeDescriptor(TABLES[0], 16, torch.ones(2, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="must be equal"):
        LayerKV(torch.zeros(4, 2, 8), torch.zeros(4, 1, 8))
