// The bf16 linear layers of linear.cpp, to the same bits, by the dot product instruction of AVX-512 (VDPBF16PS): twice the
// multiplications per second, and no widening, because the instruction takes both operands as they lie in memory. Lane
// j of its sixteen takes the odd element of its pair, then the even one, rounds after each, and takes subnormal operands
// and results for zero: the order of linear.cpp is this instruction's.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS.
//
// How it is fast. Tiles of six rows of activations by four of weights keep 24 sums in registers. A thread takes a block
// of weight rows that stays in its second-level cache while all activations pass; with few rows of activations the
// weights stream from memory, and the next tile's are fetched meanwhile.
#include "linear_call.h"
#include "pool.h"
#include "simd.h"

namespace unison {
#if defined(UNISON_DOT)
namespace {

constexpr int kStep = 32;                    // elements of K per instruction
constexpr int kTileRows = 6, kTileColumns = 4;
constexpr int64_t kRowsBytes = 192 * 1024;   // of activations per pass: with a block of weights they fit the L2 cache

using Pairs = __m512bh;

UNISON_INLINE Pairs load_pairs(const bf16* p) { return reinterpret_cast<Pairs>(_mm512_loadu_si512(p)); }
UNISON_INLINE Pairs load_pairs(const bf16* p, __mmask32 present) {
    return reinterpret_cast<Pairs>(_mm512_maskz_loadu_epi16(present, p));
}
UNISON_INLINE F8 halves(__m512 a) {
    return {_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1))};
}

// Fetches `Lines` cache lines per step from `ahead` on: memory gives most when it is read in its own order.
template <int MR, int NR, int Lines>
__attribute__((noinline)) void dot_tile(const LinearCall& job, int64_t m, int64_t n, const bf16* ahead) {
    const bf16* x = static_cast<const bf16*>(job.x) + m * job.x_stride;
    const bf16* w = static_cast<const bf16*>(job.w) + n * job.w_stride;
    const int64_t x_stride = job.x_stride, w_stride = job.w_stride;
    __m512 acc[MR][NR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) acc[i][j] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + kStep <= job.K; k += kStep) {
        Pairs xs[MR];
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) xs[i] = load_pairs(x + i * x_stride + k);
#pragma GCC unroll 8
        for (int i = 0; i < Lines; ++i) prefetch(ahead + k * Lines + i * kStep);
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) {
            const Pairs ws = load_pairs(w + j * w_stride + k);
#pragma GCC unroll 8
            for (int i = 0; i < MR; ++i) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], xs[i], ws);
        }
    }
    if (k < job.K) {
        const __mmask32 present = static_cast<__mmask32>((uint64_t{1} << (job.K - k)) - 1);
        Pairs xs[MR];
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) xs[i] = load_pairs(x + i * x_stride + k, present);
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) {
            const Pairs ws = load_pairs(w + j * w_stride + k, present);
#pragma GCC unroll 8
            for (int i = 0; i < MR; ++i) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], xs[i], ws);
        }
    }
    F8 sums[MR * NR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) sums[i * NR + j] = halves(acc[i][j]);
    finish_tile<bf16, MR, NR>(job, sums, m, n);
}

template <int MR, int Lines>
UNISON_INLINE void dot_columns(const LinearCall& job, int64_t m, int64_t n, int columns, const bf16* ahead) {
    if (columns == kTileColumns) dot_tile<MR, kTileColumns, Lines>(job, m, n, ahead);
    else dot_tile<MR, 1, 0>(job, m, n, ahead);
}

template <int Lines>
void dot_rows(const LinearCall& job, int64_t m, int rows, int64_t n, int columns, const bf16* ahead) {
    switch (rows) {
        case 6: return dot_columns<6, Lines>(job, m, n, columns, ahead);
        case 5: return dot_columns<5, Lines>(job, m, n, columns, ahead);
        case 4: return dot_columns<4, Lines>(job, m, n, columns, ahead);
        case 3: return dot_columns<3, Lines>(job, m, n, columns, ahead);
        case 2: return dot_columns<2, Lines>(job, m, n, columns, ahead);
        default: return dot_columns<1, Lines>(job, m, n, columns, ahead);
    }
}

// Rows of a tile out of `left`: sixes, and what is left in even parts (seven are four and three).
UNISON_INLINE int next_rows(int64_t left) {
    if (left <= 6) return static_cast<int>(left);
    return left < 12 && left % 6 != 0 ? static_cast<int>((left + 1) / 2) : 6;
}

// All rows [m_first, m_end) against the weight rows at n. The lines of the next tile of weights are shared out among the
// tiles of activations to fetch: four quarters, two halves, or all at once.
void dot_tiles(const LinearCall& job, int64_t m_first, int64_t m_end, int64_t n, int columns, bool fetches) {
    const int64_t rows = m_end - m_first, share = columns * job.K / 4;
    const int lines = !fetches ? 0 : rows <= kTileRows ? 4 : rows <= 2 * kTileRows ? 2 : 1;
    const bf16* ahead = static_cast<const bf16*>(job.w) + (n + columns) * job.w_stride;
    int quarters = fetches ? 4 : 0;
    for (int64_t m = m_first; m < m_end;) {
        const int count = next_rows(m_end - m);
        if (quarters == 0) dot_rows<0>(job, m, count, n, columns, ahead);
        else if (lines == 1) dot_rows<1>(job, m, count, n, columns, ahead);
        else if (lines == 2) dot_rows<2>(job, m, count, n, columns, ahead);
        else dot_rows<4>(job, m, count, n, columns, ahead);
        quarters = std::max(0, quarters - lines);
        ahead += lines * share;
        m += count;
    }
}

void dot_block(const LinearCall& job, int64_t n_first, int64_t n_end) {
    const int64_t pass = std::max<int64_t>(24, kRowsBytes / (2 * job.K) / 12 * 12);
    for (int64_t m = 0; m < job.M; m += pass)
        for (int64_t n = n_first; n < n_end;) {
            const int64_t left = n_end - n;
            const int columns = left >= kTileColumns ? kTileColumns : 1;
            dot_tiles(job, m, std::min(job.M, m + pass), n, columns, m == 0 && left >= 2 * columns);
            n += columns;
        }
}

}  // namespace

void run_dot(const LinearCall& job) {
    if (job.M <= 0 || job.N <= 0 || job.K <= 0) return;
    const int64_t rows = rows_per_item(job.M, job.N, job.K, num_threads());
    parallel_for((job.N + rows - 1) / rows, [&](int64_t item, int) {
        const FlushSubnormals floats(true);
        dot_block(job, item * rows, std::min(job.N, (item + 1) * rows));
    });
}

#else
void run_dot(const LinearCall&) {}
#endif
}  // namespace unison
