// What the linear layers have in common, whatever instructions do the multiplications: the call, how the outputs of a
// tile are finished, and how weight rows are shared out.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace unison {

// y[m][n] = sum_k x[m][k] w[n][k] (+ bias[n]). Strides in elements.
struct LinearCall {
    const void* x;     // [M, K]
    const void* w;     // [N, K]
    const void* bias;  // [N] or null
    void* y;           // [M, N], of the operands' type or float
    int64_t x_stride, w_stride, y_stride;
    int64_t M, N, K;
    bool y_is_float;  // whatever the operands are
};

// Writes `count` (at most 8) outputs of one row, or of two rows of four each.
template <class Out> UNISON_INLINE void write_outputs(Out* y, int64_t y_stride, int columns, F8 sums, int count) {
    Out out[8];
    store8(out, sums);
    if (columns == 8) std::memcpy(y, out, sizeof out);
    else if (columns == 1) {
        for (int i = 0; i < count; ++i) y[i * y_stride] = out[i];
    } else {
        std::memcpy(y, out, 4 * sizeof(Out));
        if (count == 8) std::memcpy(y + y_stride, out + 4, 4 * sizeof(Out));
    }
}

// Finishes the outputs of rows [m, m + MR) and weight rows [n, n + NR): reduces eight accumulators at a time, adds the
// bias, rounds and writes. NR is 1, 4 or 8.
template <class T, int MR, int NR>
UNISON_INLINE void finish_tile(const LinearCall& job, const F8 (&acc)[MR * NR], int64_t m, int64_t n) {
    constexpr int kCount = MR * NR;
    F8 bias = zero8();
    if (job.bias != nullptr) {
        float values[8];
        for (int i = 0; i < 8; ++i) values[i] = widen(static_cast<const T*>(job.bias)[n + i % NR]);
        bias = load8(values);
    }
    for (int i = 0; i < kCount; i += 8) {
        F8 eight[8];
        for (int j = 0; j < 8; ++j) eight[j] = i + j < kCount ? acc[(i + j) % kCount] : zero8();
        F8 sums = hsum_each(eight);
        if (job.bias != nullptr) sums = add8(sums, bias);
        const int64_t at = (m + i / NR) * job.y_stride + n;
        const int count = kCount - i < 8 ? kCount - i : 8;
        if (job.y_is_float) write_outputs(static_cast<float*>(job.y) + at, job.y_stride, NR, sums, count);
        else write_outputs(static_cast<T*>(job.y) + at, job.y_stride, NR, sums, count);
    }
}

// Whether this library was built for a CPU with bf16 dot products, and the linear layers by them (linear_dot.cpp).
#if defined(UNISON_AVX2) && defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(UNISON_NO_DOT)
#define UNISON_DOT 1
#endif
constexpr bool has_dot() {
#if defined(UNISON_DOT)
    return true;
#else
    return false;
#endif
}
void run_dot(const LinearCall& job);
void run_dot_silu_mul(const LinearCall& job);

// The same by tile registers (linear_tiles.cpp), where they work; the answer is found at the first call.
enum TilesState : int { kTilesAbsent = 0, kTilesWork = 1, kTilesRefused = 2, kTilesWrong = 3 };
int tiles_state();
void run_tiles(const LinearCall& job);

// Weight rows per item: about ten microseconds of work, and several items per thread.
inline int64_t rows_per_item(int64_t M, int64_t N, int64_t K, int threads) {
    const double row_ns = static_cast<double>(K) * std::max(0.25, 0.02 * static_cast<double>(M));
    const int64_t by_time = static_cast<int64_t>(10000.0 / row_ns);
    const int64_t by_share = N / (threads * 6);
    return std::max<int64_t>(8, std::min(by_time, by_share) / 8 * 8);
}

}  // namespace unison
