// The bf16 linear layers of linear.cpp, to the same bits, by the dot product instruction of AVX-512 (VDPBF16PS): twice the
// multiplications per second, and no widening, because the instruction takes both operands as they lie in memory. Lane
// j of its sixteen takes the odd element of its pair, then the even one, rounds after each, and takes subnormal operands
// and results for zero: the order of linear.cpp is this instruction's.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS.
//
// How it is fast. Tiles of six rows of activations by four of weights keep 24 sums in registers. A thread takes a block
// of weight rows that stays in its second-level cache while the activations pass, as many at a time as the first-level
// cache holds. Meanwhile the weights that come next are fetched. A tile's sums are added up sixteen at a time.
#include "linear_call.h"
#include "pool.h"
#include "silu.h"
#include "simd.h"
#include "wide.h"

namespace unison {
#if defined(UNISON_DOT)
namespace {

constexpr int kStep = 32;                    // elements of K per instruction
constexpr int kTileRows = 6, kTileColumns = 4;
constexpr int64_t kRowsBytes = 16 * 1024;  // of activations per pass: with two tiles of weights they fit the L1 cache
constexpr int64_t kItemRows = 48, kItemBytes = 256 * 1024;  // of weights: they stay in the L2 cache from pass to pass

using Pairs = __m512bh;

UNISON_INLINE Pairs load_pairs(const bf16* p) { return reinterpret_cast<Pairs>(_mm512_loadu_si512(p)); }
UNISON_INLINE Pairs load_pairs(const bf16* p, __mmask32 present) {
    return reinterpret_cast<Pairs>(_mm512_maskz_loadu_epi16(present, p));
}
// ---- sixteen sums at once: the tree of hsum, after lanes j and j + 8 are added ----

// Each 128-bit part of the result has four partial sums: of a[0], a[1], a[2], a[3].
UNISON_INLINE __m512 add_parts(const __m512* a) {
    __m512 halves[2];
    for (int i = 0; i < 2; ++i) {
        const __m512 low = _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x44);
        const __m512 high = _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xee);
        halves[i] = _mm512_add_ps(low, high);  // eight lanes each of a[2i] and a[2i + 1]
    }
    const __m512 low = _mm512_shuffle_f32x4(halves[0], halves[1], 0x88);
    const __m512 high = _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd);
    return _mm512_add_ps(low, high);
}

// Part r of the result has the sums of parts r of a[0], a[1], a[2], a[3].
UNISON_INLINE __m512 add_within_parts(const __m512 (&a)[4]) {
    __m512 pairs[2];
    for (int i = 0; i < 2; ++i) {
        const __m512 low = _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44);
        const __m512 high = _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee);
        pairs[i] = _mm512_add_ps(low, high);
    }
    return _mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
}

// Finishes the outputs of rows [m, m + MR) and four weight rows from n on.
template <int MR>
UNISON_INLINE void finish_four_columns(const LinearCall& job, const __m512 (&acc)[MR][4], int64_t m, int64_t n) {
    __m512 bias = _mm512_setzero_ps();
    if (job.bias != nullptr) {
        float values[4];
        for (int j = 0; j < 4; ++j) values[j] = widen(static_cast<const bf16*>(job.bias)[n + j]);
        bias = _mm512_broadcast_f32x4(_mm_loadu_ps(values));
    }
#pragma GCC unroll 2
    for (int i = 0; i < MR; i += 4) {
        __m512 columns[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            __m512 rows[4];
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) rows[r] = acc[i + r < MR ? i + r : MR - 1][j];
            columns[j] = add_parts(rows);
        }
        __m512 sums = add_within_parts(columns);
        if (job.bias != nullptr) sums = _mm512_add_ps(sums, bias);
        alignas(64) char out[64];
        const int64_t at = (m + i) * job.y_stride + n;
        if (job.y_is_float) _mm512_store_ps(out, sums);
        else _mm256_store_si256(reinterpret_cast<__m256i*>(out), narrow16(sums));
        for (int r = 0; r < 4 && i + r < MR; ++r) {
            if (job.y_is_float) std::memcpy(static_cast<float*>(job.y) + at + r * job.y_stride, out + 16 * r, 16);
            else std::memcpy(static_cast<bf16*>(job.y) + at + r * job.y_stride, out + 8 * r, 8);
        }
    }
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
        for (int i = 0; i < Lines; ++i) prefetch_to_l2(ahead + k * Lines + i * kStep);
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
    if constexpr (NR == kTileColumns) return finish_four_columns<MR>(job, acc, m, n);
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

// A tile of weights to fetch while another one meets all activations, in quarters; each tile of activations takes `share`.
struct Ahead {
    const bf16* at;
    int64_t quarter;  // elements
    int left, share;
    int next() const { return std::min(share, left); }
    void advance(int quarters) {
        at += quarters * quarter;
        left -= quarters;
    }
};

void dot_tiles(const LinearCall& job, int64_t m, int64_t m_end, int64_t n, int columns, Ahead ahead) {
    while (m < m_end) {
        const int rows = next_rows(m_end - m), quarters = ahead.next();
        if (quarters == 0) dot_rows<0>(job, m, rows, n, columns, ahead.at);
        else if (quarters == 1) dot_rows<1>(job, m, rows, n, columns, ahead.at);
        else if (quarters == 2) dot_rows<2>(job, m, rows, n, columns, ahead.at);
        else dot_rows<4>(job, m, rows, n, columns, ahead.at);
        ahead.advance(quarters);
        m += rows;
    }
}

// How a job is cut: items of weight rows for the threads, passes of activations within an item.
struct Cut {
    int64_t rows, pass;
    int64_t next_item;  // rows from an item to the one that the same thread is likely to take next

    Cut(const LinearCall& job, int64_t N) {
        const int threads = num_threads();
        const int64_t most = std::min({kItemRows, kItemBytes / (2 * job.K), N / (threads * 6)}) / 8 * 8;
        rows = std::max(most, rows_per_item(job.M, N, job.K, threads));
        pass = std::max<int64_t>(kTileRows, kRowsBytes / (2 * job.K) / kTileRows * kTileRows);
        next_item = threads * rows;
    }
};

// One pass of activations, from row m on, against weight rows [n_first, n_end); outputs go to `y`, where that of row m and
// weight row n_first belongs. What is fetched ahead is the next tile where all activations pass at once; else the item
// that comes next, so that later passes overlap with memory too. Nothing is fetched from weight row `end` on.
void dot_pass(const LinearCall& job, const Cut& cut, int64_t m, int64_t n_first, int64_t n_end, int64_t end, char* y) {
    const bool is_whole = job.M <= cut.pass;
    const int64_t distance = is_whole ? kTileColumns : cut.next_item, last = is_whole ? n_end : end;
    LinearCall part(job);
    part.x = static_cast<const bf16*>(job.x) + m * job.x_stride;
    part.w = static_cast<const bf16*>(job.w) + n_first * job.w_stride;
    if (job.bias != nullptr) part.bias = static_cast<const bf16*>(job.bias) + n_first;
    part.y = y;
    const int share = job.M <= kTileRows ? 4 : job.M < 4 * kTileRows ? 2 : 1;
    for (int64_t n = 0; n < n_end - n_first;) {
        const int columns = n_end - n_first - n >= kTileColumns ? kTileColumns : 1;
        Ahead ahead{static_cast<const bf16*>(part.w) + (n + distance) * job.w_stride, columns * job.K / 4, 4, share};
        ahead.advance(static_cast<int>(std::min<int64_t>(4, share * (m / kTileRows))));
        if (n_first + n + distance + columns > last) ahead.left = 0;
        dot_tiles(part, 0, std::min(job.M - m, cut.pass), n, columns, ahead);
        n += columns;
    }
}

}  // namespace

void run_dot(const LinearCall& job) {
    if (job.M <= 0 || job.N <= 0 || job.K <= 0) return;
    const Cut cut(job, job.N);
    const int64_t size = job.y_is_float ? sizeof(float) : sizeof(bf16);
    parallel_for((job.N + cut.rows - 1) / cut.rows, [&](int64_t item, int) {
        const FlushSubnormals floats(true);
        const int64_t first = item * cut.rows, end = std::min(job.N, first + cut.rows);
        for (int64_t m = 0; m < job.M; m += cut.pass)
            dot_pass(job, cut, m, first, end, job.N, static_cast<char*>(job.y) + (m * job.y_stride + first) * size);
    });
}

void run_dot_silu_mul(const LinearCall& job) {
    const int64_t inner = job.N / 2;
    if (job.M <= 0 || inner <= 0 || job.K <= 0) return;
    const Cut cut(job, inner);
    parallel_for((inner + cut.rows - 1) / cut.rows, [&](int64_t item, int) {
        const int64_t first = item * cut.rows, count = std::min(inner - first, cut.rows);
        bf16* gate = static_cast<bf16*>(scratch(0, static_cast<size_t>(2 * cut.pass * count) * sizeof(bf16)));
        bf16* up = gate + count;
        LinearCall both(job);
        both.y_stride = 2 * count;
        for (int64_t m = 0; m < job.M; m += cut.pass) {
            {
                const FlushSubnormals floats(true);
                const int64_t half = inner + first;
                dot_pass(both, cut, m, first, first + count, inner, reinterpret_cast<char*>(gate));
                dot_pass(both, cut, m, half, half + count, job.N, reinterpret_cast<char*>(up));
            }
            for (int64_t i = 0; i < std::min(job.M - m, cut.pass); ++i)
                silu_mul_span(gate + i * 2 * count, up + i * 2 * count,
                              static_cast<bf16*>(job.y) + (m + i) * job.y_stride + first, count);
        }
    });
}

#else
void run_dot(const LinearCall&) {}
void run_dot_silu_mul(const LinearCall&) {}
#endif
}  // namespace unison
