// y[m][n] = sum_k x[m][k] w[n][k] (+ bias[n]): the linear layers, straight off plain row-major weights.
//
// Order of the reduction (part of the contract: the same bits whatever M, N, threads, strides or machine).
//   fp32  Eight lanes per output start at zero; lane j takes k = 8i + j for i = 0, 1, ... Each step is one fused
//         multiply-add. Then hsum.
//   bf16  Sixteen fp32 lanes per output start at zero; lane j takes k = 32i + 2j + 1, then 32i + 2j, for i = 0, 1, ...
//         Each step is one fused multiply-add; subnormal operands and results are zero. Then lanes j and j + 8 are added,
//         then hsum. This is what the bf16 dot product of AVX-512 does (linear_dot.cpp): elsewhere it is computed here, lanes
//         0 to 7 over all of K first, then lanes 8 to 15.
// K is padded with zeros to whole groups. Then the bias, then one rounding to the output's type.
//
// How it is fast. Activations are widened to fp32 once per call into a panel of tiles, [half][step][row][lane], so that
// the inner loop walks one pointer. Up to kDirectRows rows, weights are widened in registers while they stream from
// memory; for more rows a tile of weight rows is widened once into the first-level cache and used for every tile of
// activations. The next tile's weights are fetched meanwhile. Items are blocks of weight rows.
#include <algorithm>

#include "linear_call.h"
#include "pool.h"
#include "silu.h"
#include "simd.h"
#include "tape.h"

namespace unison {
namespace {

constexpr int kRows = 3, kColumns = 4;       // of a tile: 12 accumulators, 3 activations and 1 weight fill 16 registers
constexpr int kDirectRows = 3;               // up to here the weights are widened on the fly
constexpr int64_t kChunk = 768;              // most k per pass: a tile of weights and one of activations fit 32 KiB
constexpr int64_t kPanelRows = 1536;         // of activations at a time: bounds the panel's memory
constexpr int64_t kPanelFloats = 48 * 1024;  // of activations per pass: they stay in the second-level cache

// How a storage type is laid out: a group of elements is cut into halves, of which each feeds `kPhases` steps of eight
// lanes.
template <class T> struct Groups;
template <> struct Groups<float> {
    static constexpr int kGroup = 8, kHalves = 1, kPhases = 1;
    template <int Phase> static UNISON_INLINE F8 load(const float* p) { return load8(p); }
};
template <> struct Groups<bf16> {
    static constexpr int kGroup = 32, kHalves = 2, kPhases = 2;
    template <int Phase> static UNISON_INLINE F8 load(const bf16* p) { return Phase == 0 ? load_odd(p) : load_even(p); }
};
template <class T> constexpr int kPart = Groups<T>::kGroup / Groups<T>::kHalves;  // elements of a half

template <class T> struct Linear : LinearCall {
    float* panel;  // x as tiles; the tile of row m begins at m * panel_stride
    int64_t panel_stride;

    explicit Linear(const LinearCall& call) : LinearCall(call), panel(nullptr), panel_stride(0) {}
    const T* x_row(int64_t m) const { return static_cast<const T*>(x) + m * x_stride; }
    const T* w_row(int64_t n) const { return static_cast<const T*>(w) + n * w_stride; }
    static int64_t padded(int64_t k) { return (k + Groups<T>::kGroup - 1) / Groups<T>::kGroup * Groups<T>::kGroup; }
};

// Rows of the tile at row m: threes, and a rest of four as two and two.
UNISON_INLINE int tile_rows(int64_t m, int64_t M) {
    const int64_t left = M - m;
    return left >= 3 && left != 4 ? 3 : left >= 2 ? 2 : 1;
}

// Widens one group of R rows, elements [k, k + kGroup), of which row r's lie at p + r * stride. Plane h of `out` holds half
// h of every group as [step][row][lane], `plane` elements per row.
template <class T, int R>
UNISON_INLINE void widen_group(const T* p, int64_t stride, int64_t k, float* out, int64_t plane) {
    using G = Groups<T>;
    for (int h = 0; h < G::kHalves; ++h) {
        float* at = out + (h * plane + k / G::kHalves) * R;
        for (int r = 0; r < R; ++r) {
            const T* part = p + r * stride + h * kPart<T>;
            store8(at + r * 8, G::template load<0>(part));
            if (G::kPhases == 2) store8(at + (R + r) * 8, G::template load<1>(part));
        }
    }
}

// Widens k in [0, K) of R rows into planes, the last group padded with zeros.
template <class T, int R> void widen_tile(const T* rows, int64_t stride, int64_t K, float* out, int64_t plane) {
    constexpr int kGroup = Groups<T>::kGroup;
    int64_t k = 0;
    for (; k + kGroup <= K; k += kGroup) widen_group<T, R>(rows + k, stride, k, out, plane);
    if (k == K) return;
    T tails[R * kGroup] = {};
    for (int r = 0; r < R; ++r)
        std::memcpy(tails + r * kGroup, rows + r * stride + k, static_cast<size_t>(K - k) * sizeof(T));
    widen_group<T, R>(tails, kGroup, k, out, plane);
}

template <class T> void widen_activations(const Linear<T>& job, int64_t m, int64_t m_end) {
    const int64_t plane = job.panel_stride / Groups<T>::kHalves;
    while (m < m_end) {
        const T* rows = job.x_row(m);
        float* out = job.panel + m * job.panel_stride;
        const int count = tile_rows(m, job.M);
        if (count == 3) widen_tile<T, 3>(rows, job.x_stride, job.K, out, plane);
        else if (count == 2) widen_tile<T, 2>(rows, job.x_stride, job.K, out, plane);
        else widen_tile<T, 1>(rows, job.x_stride, job.K, out, plane);
        m += count;
    }
}

// ---- few rows: weights widened in registers ----

template <class T, int Phase, int MR, int NR>
UNISON_INLINE void direct_step(F8 (&acc)[MR * NR], const float* x, const T* w, int64_t w_stride) {
    F8 xs[MR];
    for (int m = 0; m < MR; ++m) {
        xs[m] = load8(x + (Phase * MR + m) * 8);
        hold(xs[m]);
    }
    for (int n = 0; n < NR; ++n) {
        const F8 ws = Groups<T>::template load<Phase>(w + n * w_stride);
        for (int m = 0; m < MR; ++m) acc[m * NR + n] = fma8(xs[m], ws, acc[m * NR + n]);
    }
}

template <class T, int MR, int NR>
UNISON_INLINE void direct_group(F8 (&acc)[MR * NR], const float* x, const T* w, int64_t w_stride) {
    direct_step<T, 0, MR, NR>(acc, x, w, w_stride);
    if (Groups<T>::kPhases == 2) direct_step<T, 1, MR, NR>(acc, x, w, w_stride);
}

// One half's lanes over all of K. The first half fetches the next tile's weights in the order in which they lie.
template <class T, int MR, int NR>
UNISON_INLINE void direct_half(const Linear<T>& job, int half, const T* w, const T* ahead, F8 (&acc)[MR * NR]) {
    constexpr int kGroup = Groups<T>::kGroup, kHalves = Groups<T>::kHalves;
    const int64_t K = job.K, stride = job.w_stride;
    const float* x = job.panel + half * (job.panel_stride / kHalves) * MR;
    for (int i = 0; i < MR * NR; ++i) acc[i] = zero8();
    int64_t k = 0;
    for (; k + kGroup <= K; k += kGroup) {
        if (half == 0)
            for (int i = 0; i < NR; ++i) prefetch(ahead + k * NR + i * kGroup);
        direct_group<T, MR, NR>(acc, x + k / kHalves * MR, w + k + half * kPart<T>, stride);
    }
    if (k == K) return;
    T tails[NR * kGroup] = {};
    for (int i = 0; i < NR; ++i)
        std::memcpy(tails + i * kGroup, w + i * stride + k, static_cast<size_t>(K - k) * sizeof(T));
    direct_group<T, MR, NR>(acc, x + k / kHalves * MR, tails + half * kPart<T>, kGroup);
}

template <class T, int MR, int NR>
__attribute__((noinline)) void direct_tile(const Linear<T>& job, int64_t n, bool fetch_ahead) {
    const T* w = job.w_row(n);
    F8 first[MR * NR], acc[MR * NR];
    direct_half<T, MR, NR>(job, 0, w, fetch_ahead ? w + NR * job.w_stride : w, Groups<T>::kHalves == 2 ? first : acc);
    if (Groups<T>::kHalves == 2) {
        direct_half<T, MR, NR>(job, 1, w, w, acc);
        for (int i = 0; i < MR * NR; ++i) acc[i] = add8(first[i], acc[i]);
    }
    finish_tile<T, MR, NR>(job, acc, 0, n);
}

template <class T, int MR, int NR> void direct_block(const Linear<T>& job, int64_t n, int64_t n_end) {
    for (; n + NR <= n_end; n += NR) direct_tile<T, MR, NR>(job, n, n + 2 * NR <= n_end);
    for (; n < n_end; ++n) direct_tile<T, MR, 1>(job, n, false);
}

// ---- many rows: weights widened into the cache ----

// Adds `steps` steps to the accumulators. Meanwhile fetches from `ahead` on, `Ahead` times eight elements a step: a line
// several times over, which costs less than a second loop.
template <class T, int MR, int NR, int Ahead>
UNISON_INLINE void cached_steps(F8 (&acc)[MR * NR], const float* x, const float* w, int64_t steps, const T* ahead) {
    for (int64_t s = 0; s < steps; ++s, x += MR * 8, w += NR * 8) {
        F8 xs[MR];
        if (Ahead > 0) prefetch(ahead + s * Ahead * 8);
        for (int m = 0; m < MR; ++m) {
            xs[m] = load8(x + m * 8);
            hold(xs[m]);
        }
        for (int n = 0; n < NR; ++n) {
            F8 ws = load8(w + n * 8);
            hold(ws);
            for (int m = 0; m < MR; ++m) acc[m * NR + n] = fma8(xs[m], ws, acc[m * NR + n]);
        }
    }
}

// A pass over k in [k, k + count) of the tile of weight rows at n, `count` padded to whole groups.
struct Pass {
    int64_t n, k, count;
    const float* w;  // widened, as planes of `count` / halves elements per row
};

// One tile of activations in a pass: begins from zero at k = 0 and finishes the outputs at the end of K; in between the
// sums are kept. Fetches `Ahead` times the pass's k meanwhile.
template <class T, int MR, int NR, int Ahead>
__attribute__((noinline)) void cached_tile(const Linear<T>& job, const Pass& pass, int64_t m, float* kept,
                                           const T* ahead) {
    constexpr int kHalves = Groups<T>::kHalves, kSums = MR * NR;
    const int64_t part = pass.count / kHalves, plane = job.panel_stride / kHalves;
    const bool is_last = pass.k + pass.count >= job.K;
    const float* x = job.panel + m * job.panel_stride + pass.k / kHalves * MR;
    F8 first[kSums], acc[kSums];
    for (int h = 0; h < kHalves; ++h) {
        for (int i = 0; i < kSums; ++i) acc[i] = pass.k == 0 ? zero8() : load8(kept + (h * kSums + i) * 8);
        cached_steps<T, MR, NR, Ahead>(acc, x + h * plane * MR, pass.w + h * part * NR, part / 8, ahead);
        ahead += part * Ahead;
        if (!is_last)
            for (int i = 0; i < kSums; ++i) store8(kept + (h * kSums + i) * 8, acc[i]);
        else if (h + 1 < kHalves)
            for (int i = 0; i < kSums; ++i) first[i] = acc[i];
    }
    if (!is_last) return;
    if (kHalves == 2)
        for (int i = 0; i < kSums; ++i) acc[i] = add8(first[i], acc[i]);
    finish_tile<T, MR, NR>(job, acc, m, pass.n);
}

template <class T, int MR, int NR>
UNISON_INLINE void cached_rows(const Linear<T>& job, const Pass& pass, int64_t m, float* kept, const T* ahead,
                               int fetching) {
    if (fetching == 0) cached_tile<T, MR, NR, 0>(job, pass, m, kept, ahead);
    else if (fetching == 1) cached_tile<T, MR, NR, 1>(job, pass, m, kept, ahead);
    else cached_tile<T, MR, NR, 2>(job, pass, m, kept, ahead);
}

// All rows [m_first, m_end) against NR weight rows at n. The next tile of weights is shared out among the tiles of
// activations to fetch, so that memory is read evenly, and in the order in which it lies.
template <class T, int NR>
void cached_columns(const Linear<T>& job, int64_t m_first, int64_t m_end, int64_t n, bool fetch_ahead) {
    constexpr int kHalves = Groups<T>::kHalves;
    const size_t rows_here = static_cast<size_t>(m_end - m_first);
    float* widened = static_cast<float*>(scratch(1, sizeof(float) * NR * (kChunk + 32)));
    float* kept = static_cast<float*>(scratch(2, sizeof(float) * kHalves * NR * 8 * rows_here));
    const int64_t num_chunks = (job.K + kChunk - 1) / kChunk;
    const int64_t chunk = Linear<T>::padded((job.K + num_chunks - 1) / num_chunks);
    const int share = static_cast<int>((NR * kRows + (m_end - m_first) - 1) / (m_end - m_first));
    for (int64_t k = 0; k < job.K; k += chunk) {
        const int64_t count = std::min(chunk, job.K - k);
        const Pass pass{n, k, Linear<T>::padded(count), widened};
        widen_tile<T, NR>(job.w_row(n) + k, job.w_stride, count, widened, pass.count / kHalves);
        int to_fetch = fetch_ahead ? NR : 0;
        for (int64_t m = m_first; m < m_end;) {
            const int rows = tile_rows(m, job.M), fetching = std::min(share, to_fetch);
            float* sums = kept + (m - m_first) * kHalves * NR * 8;
            const T* ahead = job.w_row(n + NR) + NR * k + (NR - to_fetch) * count;
            if (rows == 3) cached_rows<T, 3, NR>(job, pass, m, sums, ahead, fetching);
            else if (rows == 2) cached_rows<T, 2, NR>(job, pass, m, sums, ahead, fetching);
            else cached_rows<T, 1, NR>(job, pass, m, sums, ahead, fetching);
            to_fetch -= fetching;
            m += rows;
        }
    }
}

template <class T> void cached_block(const Linear<T>& job, int64_t n_first, int64_t n_end) {
    const int64_t rows = std::max<int64_t>(12, kPanelFloats / job.panel_stride / 3 * 3);
    for (int64_t m = 0; m < job.M;) {
        int64_t m_end = std::min(job.M, m + rows);
        if (job.M - m_end == 1) m_end = job.M - 2;  // tiles end in a four as two and two: don't cut it
        int64_t n = n_first;
        for (; n + kColumns <= n_end; n += kColumns)
            cached_columns<T, kColumns>(job, m, m_end, n, m == 0 && n + 2 * kColumns <= n_end);
        for (; n < n_end; ++n) cached_columns<T, 1>(job, m, m_end, n, false);
        m = m_end;
    }
}

// ---- the job ----

template <class T> void block(const Linear<T>& job, int64_t n_first, int64_t n_end) {
    const FlushSubnormals floats(sizeof(T) == 2);
    static_assert(kDirectRows == 3, "one branch for each number of rows");
    if (job.M == 1) direct_block<T, 1, kColumns>(job, n_first, n_end);
    else if (job.M == 2) direct_block<T, 2, kColumns>(job, n_first, n_end);
    else if (job.M == 3) direct_block<T, 3, kColumns>(job, n_first, n_end);
    else cached_block(job, n_first, n_end);
}

template <class T> void run_rows(Linear<T>& job) {
    const int64_t share = std::max<int64_t>(3, 32 * 1024 / job.panel_stride / 3 * 3);
    const int64_t num_shares = std::max<int64_t>(1, (job.M - 2) / share);  // the last one takes the rest
    parallel_for(num_shares, [&](int64_t item, int) {
        widen_activations(job, item * share, item == num_shares - 1 ? job.M : (item + 1) * share);
    });
    const int64_t rows = rows_per_item(job.M, job.N, job.K, num_threads());
    parallel_for((job.N + rows - 1) / rows,
                 [&](int64_t item, int) { block(job, item * rows, std::min(job.N, (item + 1) * rows)); });
}

template <class T> void run_linear(const LinearCall& whole) {
    if (whole.M <= 0 || whole.N <= 0 || whole.K <= 0) return;
    Linear<T> part(whole);
    const int64_t most = std::min(whole.M, kPanelRows);
    part.panel_stride = Linear<T>::padded(whole.K);
    part.panel = static_cast<float*>(scratch(0, static_cast<size_t>(most * part.panel_stride) * sizeof(float)));
    for (int64_t m = 0; m < whole.M; m += most) {
        part.x = static_cast<const T*>(whole.x) + m * whole.x_stride;
        part.y = static_cast<char*>(whole.y) + m * whole.y_stride * (whole.y_is_float ? sizeof(float) : sizeof(T));
        part.M = std::min(most, whole.M - m);
        run_rows(part);
    }
}

void run_bf16(const LinearCall& call) {
    if (tiles_state() == kTilesWork) run_tiles(call);
    else if (has_dot()) run_dot(call);
    else run_linear<bf16>(call);
}

// y = silu_mul of x w^T + bias: N is twice the width of y; gate and up are rounded to T between, as without fusion.
template <class T> void run_silu_mul(const LinearCall& call) {
    if (call.M <= 0 || call.N <= 0) return;
    const bool has_tiles = sizeof(T) == 2 && tiles_state() == kTilesWork;
    if (sizeof(T) == 2 && has_dot() && !has_tiles) return run_dot_silu_mul(call);
    T* gate_up = static_cast<T*>(scratch(3, static_cast<size_t>(call.M * call.N) * sizeof(T)));
    LinearCall both(call);
    both.y = gate_up, both.y_stride = call.N;
    if (has_tiles) run_tiles(both);
    else run_linear<T>(both);
    parallel_for(call.M, [&](int64_t m, int) {
        const T* gate = gate_up + m * call.N;
        silu_mul_span(gate, gate + call.N / 2, static_cast<T*>(call.y) + m * call.y_stride, call.N / 2);
    });
}

}  // namespace
}  // namespace unison

extern "C" {

// Strides in elements. unison_linear_*: y has the operands' type. unison_logits_bf16: y is float, without a rounding
// between. unison_linear_silu_mul_*: N is that of w, twice the width of y.
#define UNISON_LINEAR(NAME, RUN, Y_IS_FLOAT)                                                                          \
    UNISON_EXPORT void NAME(const void* x, int64_t x_stride, const void* w, int64_t w_stride, const void* bias,       \
                            void* y, int64_t y_stride, int64_t M, int64_t N, int64_t K) {                             \
        unison::RUN({x, w, bias, y, x_stride, w_stride, y_stride, M, N, K, Y_IS_FLOAT});                              \
    }                                                                                                                 \
    UNISON_WORDS(NAME)
UNISON_LINEAR(unison_linear_bf16, run_bf16, false)
UNISON_LINEAR(unison_logits_bf16, run_bf16, true)
UNISON_LINEAR(unison_linear_f32, run_linear<float>, true)
UNISON_LINEAR(unison_linear_silu_mul_bf16, run_silu_mul<unison::bf16>, false)
UNISON_LINEAR(unison_linear_silu_mul_f32, run_silu_mul<float>, true)
#undef UNISON_LINEAR
}
