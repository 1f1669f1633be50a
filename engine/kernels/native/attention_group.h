// Attention of a few query rows over one group of 32 keys, and the merging of partial results: the arithmetic whose
// order attention.cpp promises. Knows nothing of sequences, tables or threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace unison {
namespace {

constexpr int kGroup = 32;
constexpr int kMaxHeadDim = 256;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Results of several query rows: accumulators [n][D], maxima [n], sums [n].
struct Partial {
    float* acc;
    float* top;
    float* sum;
    static size_t floats(int64_t n, int64_t dim) { return static_cast<size_t>(n * (dim + 2) + 15) / 16 * 16; }
    static Partial at(float* memory, int64_t n, int64_t dim) {
        return {memory, memory + n * dim, memory + n * dim + n};
    }
};

// to := to followed by from. A side without keys has the maximum -inf and changes nothing.
UNISON_INLINE void merge(Partial to, Partial from, int64_t i, int64_t dim) {
    if (from.top[i] == kNone) return;
    float* acc = to.acc + i * dim;
    const float* more = from.acc + i * dim;
    if (to.top[i] == kNone) {
        std::memcpy(acc, more, static_cast<size_t>(dim) * 4);
        to.top[i] = from.top[i];
        to.sum[i] = from.sum[i];
        return;
    }
    const float top = from.top[i] > to.top[i] ? from.top[i] : to.top[i];
    const F8 old_factor = exp8(set8(to.top[i] - top));
    const F8 new_factor = exp8(set8(from.top[i] - top));
    for (int64_t d = 0; d < dim; d += 8)
        store8(acc + d, fma8(load8(more + d), new_factor, mul8(load8(acc + d), old_factor)));
    float factors[2][8];
    store8(factors[0], old_factor);
    store8(factors[1], new_factor);
    to.sum[i] = __builtin_fmaf(from.sum[i], factors[1][0], to.sum[i] * factors[0][0]);
    to.top[i] = top;
}

// Memory that the next group needs, asked for bit by bit while this group is computed: the core can wait for some 24
// lines at a time, so asking for all of them at once would stall it.
struct Ahead {
    static constexpr int kMaxLines = 2 * kGroup * (kMaxHeadDim * 4 / 64);
    static constexpr int kMaxAsked = 16;
    const void* lines[kMaxLines + kMaxAsked];
    int next = 0, end = 0;
    template <int Count> UNISON_INLINE void ask() {
        static_assert(Count <= kMaxAsked, "the list is padded by no more");
        if (next >= end) return;
        for (int i = 0; i < Count; ++i) prefetch(lines[next + i]);
        next += Count;
    }
};

// A value that several multiply-adds use: kept in a register, where compilers would rather read memory again for each.
UNISON_INLINE F8 held(F8 a) {
#if defined(UNISON_AVX2)
    asm("" : "+x"(a.v));
#endif
    return a;
}

// A group's keys and values as fp32 rows, widened once for many query rows. Row i belongs to position `base` + i.
struct Widened {
    const float* keys;
    const float* values;
    int64_t dim;
    static constexpr int kElementBytes = 2;  // of the memory behind it, or less: there are many passes to ask in
    UNISON_INLINE const float* key(int i) const { return keys + i * dim; }
    UNISON_INLINE const float* value(int i) const { return values + i * dim; }
};

// The same, read where they lie and widened on the way: what few query rows are best served by.
template <class T> struct InPlace {
    const T* const* keys;
    const T* const* values;
    static constexpr int kElementBytes = sizeof(T);
    UNISON_INLINE const T* key(int i) const { return keys[i]; }
    UNISON_INLINE const T* value(int i) const { return values[i]; }
};

// For R query rows: acc[r][d .. d + 8*N) = acc * factor + sum of weights[r][k] * value(k), k ascending.
template <int R, int N, class Source>
UNISON_INLINE void accumulate(float* acc, const Source& source, int64_t d, int64_t dim, const float (*weights)[kGroup],
                              int lo, int hi, const F8* factors, Ahead& ahead) {
    constexpr int kBytes = N * Source::kElementBytes;  // such that one pass over the values asks for all lines
    F8 a[R][N];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < N; ++j) a[r][j] = mul8(load8(acc + r * dim + d + 8 * j), factors[r]);
    for (int k = lo; k < hi; ++k) {
        const auto* value = source.value(k) + d;
        F8 weight[R];
        for (int r = 0; r < R; ++r) weight[r] = set8(weights[r][k]);
        for (int j = 0; j < N; ++j) {
            const F8 x = R > 1 ? held(load8(value + 8 * j)) : load8(value + 8 * j);
            for (int r = 0; r < R; ++r) a[r][j] = fma8(weight[r], x, a[r][j]);
        }
        ahead.ask<(kBytes > 4 ? kBytes / 4 : 1)>();
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < N; ++j) store8(acc + r * dim + d + 8 * j, a[r][j]);
}

// The head dim in strips of N vectors, what is left in smaller ones.
template <int R, int N, class Source>
UNISON_INLINE void accumulate_from(int64_t d, float* acc, const Source& source, int64_t dim,
                                   const float (*weights)[kGroup], int lo, int hi, const F8* factors, Ahead& ahead) {
    for (; d + 8 * N <= dim; d += 8 * N) accumulate<R, N>(acc, source, d, dim, weights, lo, hi, factors, ahead);
    if constexpr (N > 1) accumulate_from<R, N / 2>(d, acc, source, dim, weights, lo, hi, factors, ahead);
}

// R neighbouring query rows over keys lo..hi-1 of a group. `sums` holds eight lanes of the sum of weights per row.
template <int R, class Source>
void attend_group(const float* q, const Source& source, int64_t dim, int lo, int hi, float scale, float* acc,
                  float* top, float* sums, Ahead& ahead) {
    constexpr int kKeys = 8 / R;  // keys at a time: up to eight dot products in flight
    alignas(32) float scores[R][kGroup];
    const int begin = lo / 8 * 8, end = (hi + 7) / 8 * 8;
    for (int k = begin; k < end; k += kKeys) {
        F8 a[8];
        for (int j = 0; j < 8; ++j) a[j] = zero8();
        decltype(source.key(0)) key[kKeys];
        for (int j = 0; j < kKeys; ++j) key[j] = source.key(k + j);
        for (int64_t d = 0; d < dim; d += 8) {
            F8 x[R];
            for (int r = 0; r < R; ++r) x[r] = held(load8(q + r * dim + d));
            for (int j = 0; j < kKeys; ++j) {
                const F8 y = R > 1 ? held(load8(key[j] + d)) : load8(key[j] + d);
                for (int r = 0; r < R; ++r) a[r * kKeys + j] = fma8(x[r], y, a[r * kKeys + j]);
            }
        }
        alignas(32) float eight[8];
        store8(eight, mul8(hsum_each(a), set8(scale)));
        for (int r = 0; r < R; ++r) std::memcpy(scores[r] + k, eight + r * kKeys, kKeys * sizeof(float));
    }
    F8 factors[R];
    for (int r = 0; r < R; ++r) {
        for (int k = begin; k < lo; ++k) scores[r][k] = kNone;
        for (int k = hi; k < end; ++k) scores[r][k] = kNone;
        F8 best = set8(kNone);
        for (int k = begin; k < end; k += 8) best = max8(best, load8(scores[r] + k));
        const float group_top = hmax(best);
        const float new_top = group_top > top[r] ? group_top : top[r];
        factors[r] = new_top != top[r] ? exp8(set8(top[r] - new_top)) : set8(1.0f);
        top[r] = new_top;
        F8 sum = mul8(load8(sums + 8 * r), factors[r]);
        for (int k = begin; k < end; k += 8) {
            const F8 weight = exp8(sub8(load8(scores[r] + k), set8(new_top)));
            store8(scores[r] + k, weight);
            sum = add8(sum, weight);
        }
        store8(sums + 8 * r, sum);
    }
    accumulate_from<R, R == 3 ? 4 : kKeys>(0, acc, source, dim, scores, lo, hi, factors, ahead);
}

}  // namespace
}  // namespace unison
