// Gradients of the row-wise operations, and the softmax that the gradient of a log-prob is made of. fp32 inside, one
// rounding at the end. The one promise about bits: they don't depend on the number of threads.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "row_sum.h"
#include "simd.h"

namespace unison {
namespace {

constexpr int64_t kBlockRows = 32;  // whose sums are added up together

template <class T> struct NormGradient {
    const T* x;         // [M, H], dense, as all of these
    const T* weight;    // [H]
    const T* upstream;  // of the norm
    const T* residual;  // of x itself; null: none
    T* grad_x;
    T* grad_weight;  // [H]
    int64_t M, H;
    float eps;
};

// Adds a row's part of the weight's gradient to `sums` [H].
template <class T> void norm_row_gradient(const NormGradient<T>& job, int64_t row, float* sums) {
    const T* x = job.x + row * job.H;
    const T* upstream = job.upstream + row * job.H;
    const T* residual = job.residual != nullptr ? job.residual + row * job.H : nullptr;
    T* grad = job.grad_x + row * job.H;
    F8 squares = zero8(), products = zero8();
    const auto measure = [&](F8 value, F8 up, F8 weight) {
        squares = fma8(value, value, squares);
        products = fma8(mul8(up, weight), value, products);
    };
    eights(
        job.H, [&](int64_t k) { measure(load8(x + k), load8(upstream + k), load8(job.weight + k)); },
        [&](int64_t k, int n) { measure(load_part(x + k, n), load_part(upstream + k, n), load_part(job.weight + k, n)); });
    const float width = static_cast<float>(job.H);
    const float scale = 1.0f / __builtin_sqrtf(hsum(squares) / width + job.eps);
    const F8 factor = set8(scale), mean = set8(hsum(products) * scale / width);
    // grad = scale (inner - normal mean(inner normal)), where inner = upstream weight and normal = x scale
    const auto gradient = [&](F8 value, F8 up, F8 weight, F8 more) {
        const F8 normal = mul8(value, factor);
        return add8(mul8(factor, sub8(mul8(up, weight), mul8(normal, mean))), more);
    };
    const auto part = [&](F8 value, F8 up) { return mul8(up, round_to<T>(mul8(value, factor))); };
    eights(
        job.H,
        [&](int64_t k) {
            const F8 value = load8(x + k), up = load8(upstream + k);
            store8(grad + k, gradient(value, up, load8(job.weight + k), residual ? load8(residual + k) : zero8()));
            store8(sums + k, add8(load8(sums + k), part(value, up)));
        },
        [&](int64_t k, int n) {
            const F8 value = load_part(x + k, n), up = load_part(upstream + k, n);
            const F8 more = residual ? load_part(residual + k, n) : zero8();
            store_part(grad + k, gradient(value, up, load_part(job.weight + k, n), more), n);
            store_part(sums + k, add8(load_part(sums + k, n), part(value, up)), n);
        });
}

template <class T> void norm_gradient(const NormGradient<T>& job) {
    const int64_t blocks = (job.M + kBlockRows - 1) / kBlockRows;
    float* sums = static_cast<float*>(scratch(0, static_cast<size_t>((blocks + 1) * job.H) * sizeof(float)));
    parallel_for(blocks, [&](int64_t block, int) {
        float* mine = sums + block * job.H;
        std::fill(mine, mine + job.H, 0.0f);
        for (int64_t row = block * kBlockRows; row < std::min(job.M, (block + 1) * kBlockRows); ++row)
            norm_row_gradient(job, row, mine);
    });
    float* total = sums + blocks * job.H;
    std::fill(total, total + job.H, 0.0f);
    for (int64_t block = 0; block < blocks; ++block)  // in ascending order, whoever computed them
        for (int64_t k = 0; k < job.H; ++k) total[k] += sums[block * job.H + k];
    for (int64_t k = 0; k < job.H; ++k) job.grad_weight[k] = narrow<T>(total[k]);
}

// With s = sigmoid(gate): d gate = up' u s (1 + gate (1 - s)), d up = up' gate s, where up' is the upstream gradient.
template <class T> void silu_mul_gradient(const T* gate_up, const T* upstream, T* grad, int64_t M, int64_t I) {
    parallel_for(M, [&](int64_t row, int) {
        const T *gate = gate_up + row * 2 * I, *up = gate + I, *from = upstream + row * I;
        T *grad_gate = grad + row * 2 * I, *grad_up = grad_gate + I;
        const auto slope = [](F8 g, F8 u, F8 f, F8& by_up) {
            const F8 one = set8(1.0f), s = div8(one, add8(one, exp8(sub8(zero8(), g))));
            by_up = mul8(f, mul8(g, s));
            return mul8(mul8(f, u), mul8(s, fma8(g, sub8(one, s), one)));
        };
        F8 by_up;
        eights(
            I,
            [&](int64_t k) {
                store8(grad_gate + k, slope(load8(gate + k), load8(up + k), load8(from + k), by_up));
                store8(grad_up + k, by_up);
            },
            [&](int64_t k, int n) {
                store_part(grad_gate + k, slope(load_part(gate + k, n), load_part(up + k, n), load_part(from + k, n), by_up), n);
                store_part(grad_up + k, by_up, n);
            });
    });
}

// Log-prob of each row's target, as unison_row_logprobs has it to the bit, and the softmax of the row. A row without a
// finite distribution has a softmax of NaN.
template <class T>
void row_softmax(const float* x, int64_t stride, const int64_t* targets, float* logprobs, T* out, int64_t rows, int64_t V) {
    parallel_for(rows, [&](int64_t row, int) {
        const float* logits = x + row * stride;
        T* to = out + row * V;
        const RowSum sum = log_sum_exp(logits, V);
        logprobs[row] = log_prob(logits, V, targets[row], sum);
        const F8 shift = set8(is_finite(sum.max) ? sum.max : __builtin_nanf(""));
        const F8 share = set8(static_cast<float>(__builtin_exp(-sum.log_sum)));
        eights(
            V, [&](int64_t k) { store8(to + k, mul8(exp8(sub8(load8(logits + k), shift)), share)); },
            [&](int64_t k, int n) { store_part(to + k, mul8(exp8(sub8(load_part(logits + k, n), shift)), share), n); });
    });
}

// Gradient of log softmax at each row's target, times the row's factor: factor (onehot - softmax). A target outside
// [0, V) counts for nothing.
template <class T>
void logprob_gradient(const T* softmax, const int64_t* targets, const float* factors, T* out, int64_t rows, int64_t V) {
    parallel_for(rows, [&](int64_t row, int) {
        const T* from = softmax + row * V;
        T* to = out + row * V;
        const F8 minus = set8(-factors[row]);
        eights(
            V, [&](int64_t k) { store8(to + k, mul8(load8(from + k), minus)); },
            [&](int64_t k, int n) { store_part(to + k, mul8(load_part(from + k, n), minus), n); });
        const int64_t at = targets[row];
        if (at >= 0 && at < V) to[at] = narrow<T>(factors[row] - factors[row] * widen(from[at]));
    });
}

}  // namespace
}  // namespace unison

extern "C" {

// Dense rows throughout, but for the stride of logits, in elements. residual may be null.
#define UNISON_GRADIENTS(SUFFIX, TYPE)                                                                                \
    UNISON_EXPORT void unison_rms_norm_gradient_##SUFFIX(const void* x, const void* weight, float eps,                \
                                                         const void* upstream, const void* residual, void* grad_x,    \
                                                         void* grad_weight, int64_t M, int64_t H) {                   \
        unison::norm_gradient<TYPE>({static_cast<const TYPE*>(x), static_cast<const TYPE*>(weight),                   \
                                     static_cast<const TYPE*>(upstream), static_cast<const TYPE*>(residual),          \
                                     static_cast<TYPE*>(grad_x), static_cast<TYPE*>(grad_weight), M, H, eps});        \
    }                                                                                                                 \
    UNISON_EXPORT void unison_silu_mul_gradient_##SUFFIX(const void* gate_up, const void* upstream, void* grad,       \
                                                         int64_t M, int64_t I) {                                      \
        unison::silu_mul_gradient<TYPE>(static_cast<const TYPE*>(gate_up), static_cast<const TYPE*>(upstream),        \
                                        static_cast<TYPE*>(grad), M, I);                                              \
    }                                                                                                                 \
    UNISON_EXPORT void unison_row_softmax_##SUFFIX(const float* x, int64_t stride, const int64_t* targets,            \
                                                   float* logprobs, void* out, int64_t rows, int64_t V) {             \
        unison::row_softmax<TYPE>(x, stride, targets, logprobs, static_cast<TYPE*>(out), rows, V);                    \
    }                                                                                                                 \
    UNISON_EXPORT void unison_logprob_gradient_##SUFFIX(const void* softmax, const int64_t* targets,                  \
                                                        const float* factors, void* out, int64_t rows, int64_t V) {   \
        unison::logprob_gradient<TYPE>(static_cast<const TYPE*>(softmax), targets, factors, static_cast<TYPE*>(out),  \
                                       rows, V);                                                                      \
    }
UNISON_GRADIENTS(bf16, unison::bf16)
UNISON_GRADIENTS(f32, float)
#undef UNISON_GRADIENTS
}
