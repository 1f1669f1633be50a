// Row-wise operations of the decoder: norm, rotary embedding, gated activation, log-softmax.
//
// Each row's result depends on that row alone. Sums over a row are in lane order: lane j takes k = 8i + j, fused or
// plain as written, zeros (or the neutral element) behind the end, then hsum. Roundings to the storage type are where
// the reference model has them; bf16 inputs are widened exactly.
#include <algorithm>

#include "linear_call.h"
#include "pool.h"
#include "row_sum.h"
#include "silu.h"
#include "simd.h"
#include "tape.h"

namespace unison {
namespace {

constexpr int64_t kItemElements = 48 * 1024;  // of an item: ten microseconds or more, so that waking a helper pays

// Runs body(row) for every row, in parallel only when there are several items' worth of elements.
template <class Body> void for_rows(int64_t rows, int64_t row_elements, const Body& body) {
    const int64_t per_item = std::max<int64_t>(1, kItemElements / std::max<int64_t>(1, row_elements));
    parallel_for((rows + per_item - 1) / per_item, [&](int64_t item, int) {
        for (int64_t r = item * per_item; r < std::min(rows, (item + 1) * per_item); ++r) body(r);
    });
}

// ---- norm ----

template <class T> struct Norm {
    const T* x;
    T* residual;  // null: the norm of x; else residual += x first, and the norm of that
    const T* weight;
    T* out;
    int64_t x_stride, residual_stride, out_stride, H;
    float eps;
};

template <class T> void norm_row(const Norm<T>& job, int64_t row) {
    const T* x = job.x + row * job.x_stride;
    T* out = job.out + row * job.out_stride;
    if (job.residual != nullptr) {
        T* residual = job.residual + row * job.residual_stride;
        eights(
            job.H, [&](int64_t k) { store8(residual + k, add8(load8(residual + k), load8(x + k))); },
            [&](int64_t k, int n) {
                store_part(residual + k, add8(load_part(residual + k, n), load_part(x + k, n)), n);
            });
        x = residual;
    }
    F8 squares = zero8();
    eights(
        job.H,
        [&](int64_t k) {
            const F8 v = load8(x + k);
            squares = fma8(v, v, squares);
        },
        [&](int64_t k, int n) {
            const F8 v = load_part(x + k, n);
            squares = fma8(v, v, squares);
        });
    const float mean = hsum(squares) / static_cast<float>(job.H);
    const F8 scale = set8(1.0f / __builtin_sqrtf(mean + job.eps));
    eights(
        job.H, [&](int64_t k) { store8(out + k, mul8(round_to<T>(mul8(load8(x + k), scale)), load8(job.weight + k))); },
        [&](int64_t k, int n) {
            const F8 normal = round_to<T>(mul8(load_part(x + k, n), scale));
            store_part(out + k, mul8(normal, load_part(job.weight + k, n)), n);
        });
}

template <class T> void run_norm(const Norm<T>& job, int64_t rows) {
    for_rows(rows, job.H, [&](int64_t row) { norm_row(job, row); });
}

// ---- rotary embedding ----

template <class T> struct Rope {
    T* x;  // [T, heads, D], strides of token and head
    int64_t token_stride, head_stride, heads;
};

// (a, b) := (a cos - b sin, b cos + a sin) for the halves of the rotary part: one fma on a rounded product each.
template <class T> void rotate_head(T* x, const float* cosine, const float* sine, int64_t half) {
    eights(
        half,
        [&](int64_t k) {
            const F8 a = load8(x + k), b = load8(x + half + k), c = load8(cosine + k), s = load8(sine + k);
            store8(x + k, fma8(a, c, sub8(zero8(), mul8(b, s))));
            store8(x + half + k, fma8(b, c, mul8(a, s)));
        },
        [&](int64_t k, int n) {
            const F8 a = load_part(x + k, n), b = load_part(x + half + k, n);
            const F8 c = load_part(cosine + k, n), s = load_part(sine + k, n);
            store_part(x + k, fma8(a, c, sub8(zero8(), mul8(b, s))), n);
            store_part(x + half + k, fma8(b, c, mul8(a, s)), n);
        });
}

template <class T>
void run_rope(const Rope<T>& q, const Rope<T>& k, const float* cosine, int64_t cosine_stride, const float* sine,
              int64_t sine_stride, int64_t tokens, int64_t half) {
    for_rows(tokens, (q.heads + k.heads) * half * 2, [&](int64_t t) {
        for (const Rope<T>* part : {&q, &k})
            for (int64_t h = 0; h < part->heads; ++h)
                rotate_head(part->x + t * part->token_stride + h * part->head_stride, cosine + t * cosine_stride,
                            sine + t * sine_stride, half);
    });
}

// ---- gated activation ----

template <class T>
void run_silu_mul(const T* gate_up, int64_t stride, T* out, int64_t out_stride, int64_t rows, int64_t inner) {
    for_rows(rows, inner * 4, [&](int64_t row) {  // an exponential weighs more than a copy
        const T* gate = gate_up + row * stride;
        silu_mul_span(gate, gate + inner, out + row * out_stride, inner);
    });
}

}  // namespace
}  // namespace unison

extern "C" {

// Strides in elements throughout; residual may be null.
#define UNISON_ROWS(SUFFIX, TYPE)                                                                                     \
    UNISON_EXPORT void unison_rms_norm_##SUFFIX(const void* x, int64_t x_stride, void* residual,                      \
                                                int64_t residual_stride, const void* weight, float eps, void* out,    \
                                                int64_t out_stride, int64_t rows, int64_t H) {                        \
        unison::run_norm<TYPE>({static_cast<const TYPE*>(x), static_cast<TYPE*>(residual),                            \
                                static_cast<const TYPE*>(weight), static_cast<TYPE*>(out), x_stride,                  \
                                residual_stride, out_stride, H, eps},                                                 \
                               rows);                                                                                 \
    }                                                                                                                 \
    UNISON_EXPORT void unison_rope_##SUFFIX(void* q, int64_t q_token, int64_t q_head, int64_t q_heads, void* k,       \
                                            int64_t k_token, int64_t k_head, int64_t k_heads,                         \
                                            const float* cosine, int64_t cosine_stride, const float* sine,            \
                                            int64_t sine_stride, int64_t tokens, int64_t half) {                      \
        unison::run_rope<TYPE>({static_cast<TYPE*>(q), q_token, q_head, q_heads},                                     \
                               {static_cast<TYPE*>(k), k_token, k_head, k_heads}, cosine, cosine_stride, sine,        \
                               sine_stride, tokens, half);                                                            \
    }                                                                                                                 \
    UNISON_EXPORT void unison_silu_mul_##SUFFIX(const void* gate_up, int64_t stride, void* out,                       \
                                                int64_t out_stride, int64_t rows, int64_t inner) {                    \
        unison::run_silu_mul<TYPE>(static_cast<const TYPE*>(gate_up), stride, static_cast<TYPE*>(out),                \
                                   out_stride, rows, inner);                                                          \
    }                                                                                                                 \
    UNISON_WORDS(unison_rms_norm_##SUFFIX)                                                                            \
    UNISON_WORDS(unison_rope_##SUFFIX)                                                                                \
    UNISON_WORDS(unison_silu_mul_##SUFFIX)
UNISON_ROWS(bf16, unison::bf16)
UNISON_ROWS(f32, float)
#undef UNISON_ROWS

// Row ids[i] of the table, into row i of out. Returns 1 where an id is outside the table; the rows before it are written.
UNISON_EXPORT int unison_gather_rows(const char* table, int64_t table_rows, int64_t row_bytes, const int64_t* ids,
                                     char* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= table_rows) return 1;
        std::memcpy(out + i * row_bytes, table + ids[i] * row_bytes, static_cast<size_t>(row_bytes));
    }
    return 0;
}
UNISON_WORDS(unison_gather_rows)

UNISON_EXPORT void unison_row_logsumexp(const float* x, int64_t stride, float* out, int64_t rows, int64_t V) {
    unison::for_rows(rows, V * 4, [&](int64_t row) {
        const unison::RowSum sum = unison::log_sum_exp(x + row * stride, V);
        out[row] = static_cast<float>(static_cast<double>(sum.max) + sum.log_sum);
    });
}

// A target outside [0, V) gives NaN.
UNISON_EXPORT void unison_row_logprobs(const float* x, int64_t stride, const int64_t* targets, float* out, int64_t rows,
                                       int64_t V) {
    unison::for_rows(rows, V * 4, [&](int64_t row) {
        const float* logits = x + row * stride;
        out[row] = unison::log_prob(logits, V, targets[row], unison::log_sum_exp(logits, V));
    });
}

// What this library computes with: the instruction set of simd.h, and that of the bf16 linear layers where it is another.
UNISON_EXPORT const char* unison_variant() {
    if (unison::tiles_state() == unison::kTilesWork) return "avx2, amx_bf16";
    return unison::has_dot() ? "avx2, avx512_bf16" : unison::kVariant;
}

UNISON_EXPORT void unison_exp(const float* x, float* out, int64_t count) {
    using namespace unison;
    eights(
        count, [&](int64_t k) { store8(out + k, exp8(load8(x + k))); },
        [&](int64_t k, int n) { store_part(out + k, exp8(load_part(x + k, n)), n); });
}
}
