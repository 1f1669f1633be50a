"""Random numbers by counting: one uniform per (seed, sample index, position), whoever else draws (R3).

Owns: Philox4x32-10 in numpy and in torch; the native sampler has a third copy with the same bits. There is no state:
the 64-bit seed is the key and (position, sample index) the 128-bit counter, so a draw doesn't depend on draws before
it, on the batch or on the device.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
Shapes: R draws.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_UNIT = 2.0**-52


def philox_words(counter_4R: np.ndarray, key_2R: np.ndarray) -> np.ndarray:
    """Four random 32-bit words per column: Philox4x32-10 of the counter under the key.

    Shapes: counter uint64 [4, R] and key uint64 [2, R], each value below 2^32; result uint64 [4, R].
    """
    mask, half = np.uint64(_MASK), np.uint64(32)
    c0, c1, c2, c3 = counter_4R.astype(np.uint64)
    k0, k1 = key_2R.astype(np.uint64)
    for _ in range(_ROUNDS):
        a, b = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & mask, (a >> half) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & mask, (k1 + np.uint64(_WEYL[1])) & mask
    return np.stack((c0, c1, c2, c3))


def philox_words_torch(counter_4R: Tensor, key_2R: Tensor) -> Tensor:
    """`philox_words` on any device, in int64 whose products wrap to the same 64 bits."""
    c0, c1, c2, c3 = counter_4R.unbind()
    k0, k1 = key_2R.unbind()
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # A shift of int64 carries the sign along; the mask takes it off again.
        c0, c1, c2, c3 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3))


def uniforms(seeds_R: np.ndarray, samples_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """float64 [R] in the open (0, 1): 52 random bits, and a half so that neither end is hit.

    Shapes: int64 [R] each, not negative.
    """
    parts = (seeds_R, samples_R, positions_R)
    seeds, samples, positions = (np.asarray(part, dtype=np.int64).astype(np.uint64) for part in parts)
    mask, half = np.uint64(_MASK), np.uint64(32)
    counter = np.stack((positions & mask, positions >> half, samples & mask, samples >> half))
    words = philox_words(counter, np.stack((seeds & mask, seeds >> half)))
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * _UNIT


def uniforms_torch(seeds_R: Tensor, samples_R: Tensor, positions_R: Tensor) -> Tensor:
    """`uniforms` on the tensors' device, the same bits."""
    counter = torch.stack((positions_R & _MASK, positions_R >> 32, samples_R & _MASK, samples_R >> 32))
    words = philox_words_torch(counter, torch.stack((seeds_R & _MASK, seeds_R >> 32)))
    return (((words[0] << 20) | (words[1] >> 12)).double() + 0.5) * _UNIT
