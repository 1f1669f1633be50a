// y[m][n] = sum_k x[m][k] w[n][k] (+ bias[n]): the linear layers, straight off plain row-major weights.
//
// Order of the reduction (part of the contract: the same bits whatever M, N, threads, strides or machine). Eight fp32
// lanes per output start at zero. fp32: lane j takes k = 8i + j for i = 0, 1, ... bf16: lane j takes k = 16i + 2j,
// then 16i + 2j + 1, so that a 32-bit word splits into its two values with one shift and one mask. Each step is one
// fused multiply-add; K is padded with zeros to whole groups. Then hsum, then the bias, then one rounding to the
// output's type.
//
// How it is fast. Activations are widened to fp32 once per call into a panel of tiles: [step][row][lane], so that the
// inner loop walks one pointer. Up to kDirectRows rows, weights are widened in registers while they stream from
// memory; for more rows a tile of weight rows is widened once into the first-level cache and used for every tile of
// activations. The next tile's weights are fetched meanwhile. Items are blocks of weight rows.
#include <algorithm>

#include "pool.h"
#include "simd.h"

namespace unison {
namespace {

constexpr int kRows = 3, kColumns = 4;       // of a tile: 12 accumulators, 3 activations and 1 weight fill 16 registers
constexpr int kDirectRows = 3;               // up to here the weights are widened on the fly
constexpr int64_t kChunk = 768;              // most k per pass: a tile of weights and one of activations fit 32 KiB
constexpr int64_t kPanelRows = 1536;         // of activations at a time: bounds the panel's memory
constexpr int64_t kPanelFloats = 48 * 1024;  // of activations per pass: they stay in the second-level cache

// How a storage type is laid out: a group of elements feeds `kPhases` steps of eight lanes.
template <class T> struct Groups;
template <> struct Groups<float> {
    static constexpr int kGroup = 8, kPhases = 1;
    template <int Phase> static UNISON_INLINE F8 load(const float* p) { return load8(p); }
};
template <> struct Groups<bf16> {
    static constexpr int kGroup = 16, kPhases = 2;
    template <int Phase> static UNISON_INLINE F8 load(const bf16* p) { return Phase == 0 ? load_even(p) : load_odd(p); }
};

template <class T> struct Linear {
    const T* x;     // [M, K], row stride x_stride
    const T* w;     // [N, K], row stride w_stride
    const T* bias;  // [N] or null
    void* y;        // [M, N], row stride y_stride, of T or float
    int64_t x_stride, w_stride, y_stride;
    int64_t M, N, K;
    bool y_is_float;  // y holds float although T is bf16
    float* panel;     // x as tiles; the tile of row m begins at m * panel_stride
    int64_t panel_stride;

    static int64_t padded(int64_t k) { return (k + Groups<T>::kGroup - 1) / Groups<T>::kGroup * Groups<T>::kGroup; }
};

// Rows of the tile at row m: threes, and a rest of four as two and two.
UNISON_INLINE int tile_rows(int64_t m, int64_t M) {
    const int64_t left = M - m;
    return left >= 3 && left != 4 ? 3 : left >= 2 ? 2 : 1;
}

// Widens k in [0, K) of R rows into [step][row][lane], the last group padded with zeros.
template <class T, int R> void widen_tile(const T* rows, int64_t stride, int64_t K, float* out) {
    constexpr int kGroup = Groups<T>::kGroup;
    int64_t k = 0;
    for (; k + kGroup <= K; k += kGroup) {
        float* at = out + k * R;
        for (int r = 0; r < R; ++r) {
            const T* p = rows + r * stride + k;
            store8(at + r * 8, Groups<T>::template load<0>(p));
            if (Groups<T>::kPhases == 2) store8(at + (R + r) * 8, Groups<T>::template load<1>(p));
        }
    }
    if (k == K) return;
    for (int r = 0; r < R; ++r) {
        T tail[kGroup] = {};
        std::memcpy(tail, rows + r * stride + k, static_cast<size_t>(K - k) * sizeof(T));
        store8(out + k * R + r * 8, Groups<T>::template load<0>(tail));
        if (Groups<T>::kPhases == 2) store8(out + k * R + (R + r) * 8, Groups<T>::template load<1>(tail));
    }
}

template <class T> void widen_activations(const Linear<T>& job, int64_t m, int64_t m_end) {
    while (m < m_end) {
        const T* rows = job.x + m * job.x_stride;
        float* out = job.panel + m * job.panel_stride;
        const int count = tile_rows(m, job.M);
        if (count == 3) widen_tile<T, 3>(rows, job.x_stride, job.K, out);
        else if (count == 2) widen_tile<T, 2>(rows, job.x_stride, job.K, out);
        else widen_tile<T, 1>(rows, job.x_stride, job.K, out);
        m += count;
    }
}

// Writes `count` (at most 8) outputs of one row, or of two rows of four each.
template <class Out> UNISON_INLINE void write(Out* y, int64_t y_stride, int columns, F8 sums, int count) {
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

// Finishes the outputs of rows [m, m + MR) and weight rows [n, n + NR): reduces eight accumulators at a time.
template <class T, int MR, int NR>
UNISON_INLINE void finish(const Linear<T>& job, const F8 (&acc)[MR * NR], int64_t m, int64_t n) {
    constexpr int kCount = MR * NR;
    F8 bias = zero8();
    if (job.bias != nullptr) {
        float values[8];
        for (int i = 0; i < 8; ++i) values[i] = widen(job.bias[n + i % NR]);
        bias = load8(values);
    }
    for (int i = 0; i < kCount; i += 8) {
        F8 eight[8];
        for (int j = 0; j < 8; ++j) eight[j] = i + j < kCount ? acc[(i + j) % kCount] : zero8();
        F8 sums = hsum_each(eight);
        if (job.bias != nullptr) sums = add8(sums, bias);
        const int64_t at = (m + i / NR) * job.y_stride + n;
        const int count = kCount - i < 8 ? kCount - i : 8;
        if (job.y_is_float) write(static_cast<float*>(job.y) + at, job.y_stride, NR, sums, count);
        else write(static_cast<T*>(job.y) + at, job.y_stride, NR, sums, count);
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

template <class T, int MR, int NR>
__attribute__((noinline)) void direct_tile(const Linear<T>& job, int64_t n, bool fetch_ahead) {
    constexpr int kGroup = Groups<T>::kGroup, kLine = 64 / static_cast<int>(sizeof(T));
    const int64_t K = job.K, stride = job.w_stride;
    const float* x = job.panel;
    const T* w = job.w + n * stride;
    F8 acc[MR * NR];
    for (int i = 0; i < MR * NR; ++i) acc[i] = zero8();
    int64_t k = 0;
    const T* ahead = fetch_ahead ? w + NR * stride : w;  // fetching what is at hand costs next to nothing
    for (; k + kLine <= K; k += kLine) {
        for (int i = 0; i < NR; ++i) prefetch(ahead + i * stride + k);
        for (int part = 0; part < kLine; part += kGroup)
            direct_group<T, MR, NR>(acc, x + (k + part) * MR, w + k + part, stride);
    }
    for (; k + kGroup <= K; k += kGroup) direct_group<T, MR, NR>(acc, x + k * MR, w + k, stride);
    if (k < K) {
        T tails[NR * kGroup] = {};
        for (int i = 0; i < NR; ++i)
            std::memcpy(tails + i * kGroup, w + i * stride + k, static_cast<size_t>(K - k) * sizeof(T));
        direct_group<T, MR, NR>(acc, x + k * MR, tails, kGroup);
    }
    finish<T, MR, NR>(job, acc, 0, n);
}

template <class T, int MR, int NR> void direct_block(const Linear<T>& job, int64_t n, int64_t n_end) {
    for (; n + NR <= n_end; n += NR) direct_tile<T, MR, NR>(job, n, n + 2 * NR <= n_end);
    for (; n < n_end; ++n) direct_tile<T, MR, 1>(job, n, false);
}

// ---- many rows: weights widened into the cache ----

// Adds `steps` steps to the accumulators. Meanwhile fetches the same k of `Ahead` weight rows: the same line several
// times over, which costs less than a second loop.
template <class T, int MR, int NR, int Ahead>
UNISON_INLINE void cached_steps(F8 (&acc)[MR * NR], const float* x, const float* w, int64_t steps, const T* ahead,
                                int64_t ahead_stride) {
    for (int64_t s = 0; s < steps; ++s, x += MR * 8, w += NR * 8) {
        F8 xs[MR];
        for (int r = 0; r < Ahead; ++r) prefetch(ahead + r * ahead_stride + s * 8);
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
    const float* w;  // widened: [step][row][lane]
};

// One tile of activations in a pass: begins from zero at k = 0 and finishes the outputs at the end of K. Fetches the
// pass's k of `Ahead` weight rows meanwhile.
template <class T, int MR, int NR, int Ahead>
__attribute__((noinline)) void cached_tile(const Linear<T>& job, const Pass& pass, int64_t m, float* kept,
                                           const T* ahead) {
    const float* x = job.panel + m * job.panel_stride + pass.k * MR;
    F8 acc[MR * NR];
    for (int i = 0; i < MR * NR; ++i) acc[i] = pass.k == 0 ? zero8() : load8(kept + i * 8);
    cached_steps<T, MR, NR, Ahead>(acc, x, pass.w, pass.count / 8, ahead, job.w_stride);
    if (pass.k + pass.count >= job.K) return finish<T, MR, NR>(job, acc, m, pass.n);
    for (int i = 0; i < MR * NR; ++i) store8(kept + i * 8, acc[i]);
}

template <class T, int MR, int NR>
UNISON_INLINE void cached_rows(const Linear<T>& job, const Pass& pass, int64_t m, float* kept, const T* ahead,
                               int fetching) {
    if (fetching == 0) cached_tile<T, MR, NR, 0>(job, pass, m, kept, ahead);
    else if (fetching == 1) cached_tile<T, MR, NR, 1>(job, pass, m, kept, ahead);
    else cached_tile<T, MR, NR, 2>(job, pass, m, kept, ahead);
}

// All rows [m_first, m_end) against NR weight rows at n. The rows of the next tile of weights are shared out among the
// tiles of activations to fetch, so that memory is read evenly.
template <class T, int NR>
void cached_columns(const Linear<T>& job, int64_t m_first, int64_t m_end, int64_t n, bool fetch_ahead) {
    float* widened = static_cast<float*>(scratch(1, sizeof(float) * NR * (kChunk + 16)));
    float* kept = static_cast<float*>(scratch(2, sizeof(float) * NR * 8 * static_cast<size_t>(m_end - m_first)));
    const int64_t num_chunks = (job.K + kChunk - 1) / kChunk;
    const int64_t chunk = Linear<T>::padded((job.K + num_chunks - 1) / num_chunks);
    const int share = static_cast<int>((NR * kRows + (m_end - m_first) - 1) / (m_end - m_first));
    for (int64_t k = 0; k < job.K; k += chunk) {
        const int64_t count = std::min(chunk, job.K - k);
        const T* w = job.w + n * job.w_stride + k;
        widen_tile<T, NR>(w, job.w_stride, count, widened);
        const Pass pass{n, k, Linear<T>::padded(count), widened};
        int to_fetch = fetch_ahead ? NR : 0;
        for (int64_t m = m_first; m < m_end;) {
            const int rows = tile_rows(m, job.M), fetching = std::min(share, to_fetch);
            float* sums = kept + (m - m_first) * NR * 8;
            const T* ahead = w + (2 * NR - to_fetch) * job.w_stride;
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
    static_assert(kDirectRows == 3, "one branch for each number of rows");
    if (job.M == 1) direct_block<T, 1, 8>(job, n_first, n_end);
    else if (job.M == 2) direct_block<T, 2, kColumns>(job, n_first, n_end);
    else if (job.M == 3) direct_block<T, 3, kColumns>(job, n_first, n_end);
    else cached_block(job, n_first, n_end);
}

// Weight rows per item: about ten microseconds of work, and several items per thread.
int64_t rows_per_item(int64_t M, int64_t N, int64_t K, int threads) {
    const double row_ns = static_cast<double>(K) * std::max(0.25, 0.02 * static_cast<double>(M));
    const int64_t by_time = static_cast<int64_t>(10000.0 / row_ns);
    const int64_t by_share = N / (threads * 6);
    return std::max<int64_t>(8, std::min(by_time, by_share) / 8 * 8);
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

template <class T> void run_linear(const Linear<T>& whole) {
    if (whole.M <= 0 || whole.N <= 0 || whole.K <= 0) return;
    const int64_t stride = Linear<T>::padded(whole.K), most = std::min(whole.M, kPanelRows);
    float* panel = static_cast<float*>(scratch(0, static_cast<size_t>(most * stride) * sizeof(float)));
    for (int64_t m = 0; m < whole.M; m += most) {
        Linear<T> part = whole;
        part.x += m * whole.x_stride;
        part.y = static_cast<char*>(whole.y) + m * whole.y_stride * (whole.y_is_float ? sizeof(float) : sizeof(T));
        part.M = std::min(most, whole.M - m);
        part.panel = panel;
        part.panel_stride = stride;
        run_rows(part);
    }
}

}  // namespace
}  // namespace unison

extern "C" {

// Strides in elements. unison_linear_*: y has the operands' type. unison_logits_bf16: y is float, without a rounding
// between.
#define UNISON_LINEAR(NAME, TYPE, Y_IS_FLOAT)                                                                         \
    UNISON_EXPORT void NAME(const void* x, int64_t x_stride, const void* w, int64_t w_stride, const void* bias,       \
                            void* y, int64_t y_stride, int64_t M, int64_t N, int64_t K) {                             \
        unison::run_linear<TYPE>({static_cast<const TYPE*>(x), static_cast<const TYPE*>(w),                           \
                                  static_cast<const TYPE*>(bias), y, x_stride, w_stride, y_stride, M, N, K,           \
                                  Y_IS_FLOAT, nullptr, 0});                                                           \
    }
UNISON_LINEAR(unison_linear_bf16, unison::bf16, false)
UNISON_LINEAR(unison_logits_bf16, unison::bf16, true)
UNISON_LINEAR(unison_linear_f32, float, true)
#undef UNISON_LINEAR
}
