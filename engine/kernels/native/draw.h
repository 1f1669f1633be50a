// What every draw is made of: the random number of a token, the token under it, and the first token of a value.
#pragma once

#include <cstdint>

#include "row_sum.h"

namespace unison {

enum SampleStatus : uint8_t { kDrawn = 0, kNonFinite = 1, kEmptySupport = 2 };

// Uniform in the open (0, 1), 52 random bits and a half. Key: the seed; counter: position, then sample index.
// Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
inline double uniform(uint64_t seed, uint64_t sample, uint64_t position) {
    uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                     static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32)};
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c[0], b = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
        for (int i = 0; i < 4; ++i) c[i] = next[i];
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const uint64_t bits = (static_cast<uint64_t>(c[0]) << 20) | (c[1] >> 12);
    return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

// The first token at which the running sum of weights passes `target`; sums[i] is that of block i.
template <class Weight>
int64_t pick(const float* x, int64_t V, const double* sums, double target, const Weight& weight) {
    const int64_t blocks = (V + kBlock - 1) / kBlock;
    int64_t chosen = 0;
    double below = 0.0, before = 0.0;  // before: what precedes the chosen block
    for (int64_t i = 0; i < blocks; ++i) {
        if (sums[i] <= 0.0) continue;
        chosen = i;  // should rounding leave the target above everything, the last block with a weight is it
        before = below;
        below += sums[i];
        if (below > target) break;
    }
    const int64_t first = chosen * kBlock, count = std::min(kBlock, V - first);
    float weights[kBlock];
    eights(
        count, [&](int64_t k) { store8(weights + k, weight(load8(x + first + k))); },
        [&](int64_t k, int n) { store8(weights + k, weight(load_part(x + first + k, n, kMinusInfinity))); });
    int64_t token = first;
    for (int64_t k = 0; k < count; ++k) {
        if (weights[k] <= 0.0f) continue;
        token = first + k;
        before += static_cast<double>(weights[k]);
        if (before > target) break;
    }
    return token;
}

// The lowest index at which the row has this value; the row has it.
inline int64_t first_equal(const float* x, int64_t V, float value) {
    constexpr int64_t kStride = 64;
    int64_t k = 0;
    for (; k + kStride <= V; k += kStride) {
        int is_here = 0;  // without a way out in between, so that the compiler makes vector code of it
        for (int64_t i = 0; i < kStride; ++i) is_here |= x[k + i] == value;
        if (is_here) break;
    }
    while (k + 1 < V && x[k] != value) ++k;
    return k;
}

}  // namespace unison
