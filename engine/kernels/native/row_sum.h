// Log-softmax of one row of logits: the one definition that log-probs for training and for sampling share, to the bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace unison {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr int64_t kBlock = 128;  // elements that are summed in fp32 lanes before they go into a double

// Calls whole(k) for each eight elements at k, and rest(k, n) for the n < 8 that may be left.
template <class Whole, class Rest> UNISON_INLINE void eights(int64_t count, const Whole& whole, const Rest& rest) {
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) whole(k);
    if (k < count) rest(k, static_cast<int>(count - k));
}

struct RowSum {
    float max;
    double log_sum;  // of e^(x - max)
};

// The maximum of the row; NaN where there is a NaN, an infinity where the row has no finite distribution.
inline float row_max(const float* x, int64_t V) {
    F8 best = set8(kMinusInfinity), odd = zero8();  // x - x is NaN for NaN and for the infinities
    eights(
        V,
        [&](int64_t k) {
            const F8 v = load8(x + k);
            best = max8(v, best);
            odd = add8(odd, sub8(v, v));
        },
        [&](int64_t k, int n) { best = max8(load_part(x + k, n, kMinusInfinity), best); });
    for (int64_t k = V / 8 * 8; k < V; ++k)
        if (x[k] != x[k]) return x[k];
    if (hsum(odd) != 0.0f)  // rare: tell NaN (the answer is NaN) from an infinity
        for (int64_t k = 0; k < V; ++k)
            if (x[k] != x[k]) return x[k];
    return hmax(best);
}

inline bool is_finite(float x) { return x - x == 0.0f; }

// Sums weight(x) over the row in blocks of 128: eight fp32 lanes within a block, the blocks in double. block(i, sum) is
// told each block's sum.
template <class Weight, class Block> UNISON_INLINE double block_sums(const float* x, int64_t V, const Weight& weight, const Block& block) {
    double sum = 0.0;
    for (int64_t k = 0; k < V; k += kBlock) {
        F8 lanes = zero8();
        eights(
            std::min<int64_t>(kBlock, V - k), [&](int64_t i) { lanes = add8(lanes, weight(load8(x + k + i))); },
            [&](int64_t i, int n) { lanes = add8(lanes, weight(load_part(x + k + i, n, kMinusInfinity))); });
        const double part = static_cast<double>(hsum(lanes));
        block(k / kBlock, part);
        sum += part;
    }
    return sum;
}

// log sum e^x as a maximum and the rest; block(i, sum) is told each block's sum of e^(x - max).
template <class Block> UNISON_INLINE RowSum log_sum_exp(const float* x, int64_t V, const Block& block) {
    const float max = row_max(x, V);
    if (!is_finite(max)) return {max, 0.0};
    const F8 shift = set8(max);
    return {max, log_positive(block_sums(x, V, [&](F8 v) { return exp8(sub8(v, shift)); }, block))};
}
inline RowSum log_sum_exp(const float* x, int64_t V) {
    return log_sum_exp(x, V, [](int64_t, double) {});
}

// Log-prob of a token; NaN for a token outside [0, V).
inline float log_prob(const float* x, int64_t V, int64_t token, const RowSum& sum) {
    const double picked = token >= 0 && token < V ? static_cast<double>(x[token]) : __builtin_nan("");
    return static_cast<float>(picked - static_cast<double>(sum.max) - sum.log_sum);
}

}  // namespace unison
