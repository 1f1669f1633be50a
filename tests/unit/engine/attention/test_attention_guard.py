"""The shared guard, the store, and what every backend owes the base class."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from unison.engine.attention import AttentionBackend, LayerAttention, LayerKV

LAYER = LayerAttention(0.25)


def test_bogus_descriptor_is_refused_by_name(backend: AttentionBackend) -> None:
    """S7: only None and the three descriptor types pass."""
    q = torch.randn(3, 2, 16)
    for bogus in ("prefill", 3, object(), {"block_tables": None}):
        with pytest.raises(TypeError, match=type(bogus).__name__):
            backend.forward(q, q, q, bogus, LAYER, None)  # type: ignore[arg-type]


def test_cache_and_descriptor_come_together(backend: AttentionBackend, sequences: Callable) -> None:
    """S7: a cached descriptor needs KV slots, and KV slots need a cached descriptor."""
    case = sequences([3])
    decode = case.decode
    case.kv, kv = None, case.kv
    with pytest.raises(TypeError, match="DecodeDescriptor needs"):
        decode(backend, [(0, 2)])
    with pytest.raises(TypeError, match="without a prefill or decode descriptor"):
        backend.forward(case.q, case.k, case.v, None, LAYER, kv)


@pytest.mark.parametrize(
    ("shapes", "error", "words"),
    [
        (((3, 4, 16), (3, 3, 16)), ValueError, "multiple of 3 heads"),
        (((3, 4, 16), (3, 2, 8)), ValueError, r"\[tokens, heads, 8\]"),
        (((3, 4, 16), (2, 2, 16)), ValueError, "must be equal"),
    ],
)
def test_shapes_must_fit(backend: AttentionBackend, shapes: tuple, error: type, words: str) -> None:
    q, k = torch.randn(shapes[0]), torch.randn(shapes[1])
    with pytest.raises(error, match=words):
        backend.forward(q, k, k, None, LAYER, None)


def test_dtypes_must_agree(backend: AttentionBackend) -> None:
    q = torch.randn(2, 2, 16)
    with pytest.raises(TypeError, match="bfloat16"):
        backend.forward(q.bfloat16(), q, q, None, LAYER, None)
    with pytest.raises(TypeError, match=r"slots_T is torch.int64"):
        backend.store(q, q, torch.zeros(2, dtype=torch.int64), LayerKV(q, q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[4, -1, 0], [-1, -1, -1], [-1, 0, 5], [3, 1, 2]])
def test_store_skips_negative_slots(backend: AttentionBackend, slots: list[int], dtype: torch.dtype) -> None:
    """Tokens without a slot change nothing, whichever slots they stand beside."""
    k, v = torch.randn(3, 2, 16).to(dtype), torch.randn(3, 2, 16).to(dtype)
    kv = LayerKV(torch.randn(6, 2, 16).to(dtype), torch.randn(6, 2, 16).to(dtype))
    wanted_k, wanted_v = kv.k_SHD.clone(), kv.v_SHD.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted_k[slot], wanted_v[slot] = k[token], v[token]
    backend.store(k, v, torch.tensor(slots, dtype=torch.int32), kv)
    assert torch.equal(kv.k_SHD, wanted_k) and torch.equal(kv.v_SHD, wanted_v)


def test_store_takes_views(backend: AttentionBackend) -> None:
    """K and V may be slices of one projection, and the slots slices of one buffer."""
    qkv, pool = torch.randn(3, 8 * 16), torch.zeros(2, 6, 2, 16)
    k, v = qkv[:, 64:96].view(3, 2, 16), qkv[:, 96:].view(3, 2, 16)
    backend.store(k, v, torch.tensor([5, 0, 2], dtype=torch.int32), LayerKV(pool[0], pool[1]))
    assert torch.equal(pool[0][[5, 0, 2]], k) and torch.equal(pool[1][[5, 0, 2]], v)


def test_an_empty_call_gives_an_empty_answer(backend: AttentionBackend, sequences: Callable) -> None:
    case = sequences([])
    assert case.packed(backend).shape == (0, 6, 16)
    backend.store(case.k, case.v, case.slots(), case.kv)


@pytest.mark.slow
def test_attention_does_not_import_the_cache() -> None:
    """S24: the package can be imported with no module of engine.cache being loaded."""
    code = (
        "import sys, unison.engine.attention, unison.engine.attention.reference;"
        "print([name for name in sys.modules if name.startswith('unison.engine.cache')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
