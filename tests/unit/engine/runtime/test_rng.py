"""The counter RNG: published vectors, equal bits everywhere, uniform and independent streams."""

import ctypes

import numpy as np
import pytest
import torch
from unison.engine.kernels import build
from unison.engine.runtime.rng import philox_words, philox_words_torch, uniforms, uniforms_torch

ONES = 0xFFFFFFFF
# Source: kat_vectors of the Random123 distribution, philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter,key,words", VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """R3: the generator is Philox4x32-10, in numpy and in torch."""
    found = philox_words(np.array(counter, np.uint64).reshape(4, 1), np.array(key, np.uint64).reshape(2, 1))
    assert tuple(int(word) for word in found[:, 0]) == words
    there = philox_words_torch(torch.tensor(counter).reshape(4, 1), torch.tensor(key).reshape(2, 1))
    assert tuple(there[:, 0].tolist()) == words


def many(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    source = np.random.default_rng(3)
    seeds = source.integers(0, 2**63 - 1, count)
    return seeds, source.integers(0, 1024, count), source.integers(0, 2**40, count)


def test_numpy_and_torch_give_the_same_bits() -> None:
    """R3: a draw doesn't depend on where it is made."""
    parts = many(2000)
    here = uniforms(*parts)
    there = uniforms_torch(*(torch.from_numpy(part) for part in parts))
    assert here.tobytes() == there.numpy().tobytes()
    assert here.min() > 0 and here.max() < 1


@pytest.mark.skipif(build.library() is None, reason="no native kernels here")
def test_native_gives_the_same_bits() -> None:
    """R3: nor on whether native code makes it."""
    library = build.library()
    assert library is not None
    parts = many(2000)
    found = np.empty(2000)
    pointers = [ctypes.c_void_p(part.ctypes.data) for part in (*parts, found)]
    library.unison_uniforms(*pointers, ctypes.c_int64(2000))
    assert found.tobytes() == uniforms(*parts).tobytes()


def test_streams_are_uniform_and_apart() -> None:
    """P40: the samples of one seed differ, and so do positions and seeds; none is biased."""
    index = np.arange(20000)
    zero = np.zeros_like(index)
    streams = [uniforms(zero + 5, zero, index), uniforms(zero + 5, index, zero), uniforms(index, zero, zero)]
    for stream in streams:
        counts = np.histogram(stream, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 50  # 19 degrees of freedom: p < 1e-4
        assert len(np.unique(stream)) == len(stream)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(streams[a], streams[b])[0, 1]) < 0.03


def test_no_draws_and_one() -> None:
    empty = np.zeros(0, dtype=np.int64)
    assert uniforms(empty, empty, empty).shape == (0,)
    assert uniforms_torch(*(torch.zeros(1, dtype=torch.int64),) * 3).shape == (1,)
