// AdamW in one pass over memory: gradient, moments and master are read once, and written once together with the rounded
// weight. And the sum of squares that clipping needs.
//
// Source: Loshchilov and Hutter 2019, alg. 2, in the operations and the order of torch.optim.AdamW as torch computes them
// where the CPU has fused multiply-add (adamw.py says how far the bits are the same):
//
//   g = scale gradient      p = decay p      m = m + weight1 (g - m)   one fma; from the other end for weight1 >= 1/2
//   v = (weight2 g) g + (beta2 v)            one fma on the rounded products
//   p = p + (step m) / (sqrt(v) / root + eps)
//
// Every element depends on itself alone, so neither threads nor alignment show in the bits.
#include <algorithm>

#include "pool.h"
#include "row_sum.h"
#include "simd.h"

namespace unison {

// What is the same for all elements of one update. Layout shared with adamw.py.
struct AdamwRates {
    float scale;    // of the gradient
    float decay;    // 1 - learning rate * weight decay
    float weight1;  // 1 - beta1
    float beta2;
    float weight2;  // 1 - beta2
    float root;     // sqrt(1 - beta2^t)
    float eps;
    float step;  // -learning rate / (1 - beta1^t)
};

namespace {

constexpr int64_t kItemElements = 32 * 1024;  // of an item: a megabyte of memory to go through

// The same in all lanes.
struct Rates8 {
    F8 scale, decay, coefficient, beta2, weight2, root, eps, step;
    bool is_from_gradient;  // m is computed from its far end, as torch's lerp does for weights of 1/2 and more

    explicit Rates8(const AdamwRates& r)
        : scale(set8(r.scale)), decay(set8(r.decay)),
          coefficient(set8(r.weight1 < 0.5f ? r.weight1 : r.weight1 - 1.0f)), beta2(set8(r.beta2)),
          weight2(set8(r.weight2)), root(set8(r.root)), eps(set8(r.eps)), step(set8(r.step)),
          is_from_gradient(!(r.weight1 < 0.5f)) {}
};

struct Eight {
    F8 p, m, v;
};

template <bool kFromGradient> UNISON_INLINE Eight updated(const Rates8& r, F8 gradient, Eight old) {
    Eight now;
    const F8 g = mul8(gradient, r.scale);
    now.m = fma8(r.coefficient, sub8(g, old.m), kFromGradient ? g : old.m);
    now.v = fma8(mul8(r.weight2, g), g, mul8(old.v, r.beta2));
    const F8 denominator = add8(div8(sqrt8(now.v), r.root), r.eps);
    now.p = add8(mul8(old.p, r.decay), div8(mul8(r.step, now.m), denominator));
    return now;
}

template <class T> struct Run {
    const float* gradient;
    float *p, *m, *v;
    T* out;  // null: the master is enough
};

template <bool kFromGradient, class T>
void update_span(const Rates8& r, const Run<T>& run, int64_t begin, int64_t count) {
    const float* gradient = run.gradient + begin;
    float *p = run.p + begin, *m = run.m + begin, *v = run.v + begin;
    T* out = run.out == nullptr ? nullptr : run.out + begin;
    eights(
        count,
        [&](int64_t k) {
            const Eight old{load8(p + k), load8(m + k), load8(v + k)};
            const Eight now = updated<kFromGradient>(r, load8(gradient + k), old);
            store8(p + k, now.p);
            store8(m + k, now.m);
            store8(v + k, now.v);
            if (out != nullptr) store8(out + k, now.p);
        },
        [&](int64_t k, int n) {
            const Eight old{load_part(p + k, n), load_part(m + k, n), load_part(v + k, n)};
            const Eight now = updated<kFromGradient>(r, load_part(gradient + k, n), old);
            store_part(p + k, now.p, n);
            store_part(m + k, now.m, n);
            store_part(v + k, now.v, n);
            if (out != nullptr) store_part(out + k, now.p, n);
        });
}

template <class T> void run_adamw(const AdamwRates& rates, const Run<T>& run, int64_t count) {
    const Rates8 r(rates);
    parallel_for((count + kItemElements - 1) / kItemElements, [&](int64_t item, int) {
        const int64_t begin = item * kItemElements, length = std::min(kItemElements, count - begin);
        if (r.is_from_gradient) update_span<true>(r, run, begin, length);
        else update_span<false>(r, run, begin, length);
    });
}

// ---- sum of squares ----

constexpr int kSquareLanes = 16;

// In double, where the square of a float is exact: lane j takes k = 16 i + j, then the lanes in order.
double squares_of(const float* x, int64_t count) {
    double lanes[kSquareLanes] = {};
    int64_t k = 0;
    for (; k + kSquareLanes <= count; k += kSquareLanes)
        for (int j = 0; j < kSquareLanes; ++j) {
            const double wide = static_cast<double>(x[k + j]);
            lanes[j] += wide * wide;
        }
    for (int j = 0; k + j < count; ++j) {
        const double wide = static_cast<double>(x[k + j]);
        lanes[j] += wide * wide;
    }
    double sum = 0.0;
    for (int j = 0; j < kSquareLanes; ++j) sum += lanes[j];
    return sum;
}

}  // namespace
}  // namespace unison

extern "C" {

#define UNISON_ADAMW(SUFFIX, TYPE)                                                                                     \
    UNISON_EXPORT void unison_adamw_##SUFFIX(const unison::AdamwRates* rates, const float* gradient, float* master,    \
                                             float* exp_avg, float* exp_avg_sq, void* out, int64_t count) {            \
        unison::run_adamw<TYPE>(*rates, {gradient, master, exp_avg, exp_avg_sq, static_cast<TYPE*>(out)}, count);      \
    }
UNISON_ADAMW(bf16, unison::bf16)
UNISON_ADAMW(f32, float)
#undef UNISON_ADAMW

// Blocks of kItemElements, each summed by itself, then added in their order.
UNISON_EXPORT double unison_sum_of_squares(const float* x, int64_t count) {
    using namespace unison;
    const int64_t blocks = (count + kItemElements - 1) / kItemElements;
    double* sums = static_cast<double*>(scratch(0, static_cast<size_t>(blocks) * sizeof(double)));
    parallel_for(blocks, [&](int64_t block, int) {
        const int64_t begin = block * kItemElements;
        sums[block] = squares_of(x + begin, std::min(kItemElements, count - begin));
    });
    double sum = 0.0;
    for (int64_t block = 0; block < blocks; ++block) sum += sums[block];
    return sum;
}
}
