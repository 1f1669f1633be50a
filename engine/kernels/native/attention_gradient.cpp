// Gradient of causal attention over packed sequences. Softmax weights are computed again from q and k; sums are fp32.
//
// An item is one sequence and one KV head: its keys, values and their gradients belong to one thread, so the result is
// the same for any number of threads. Within it, tiles of six query rows (tokens and heads of the KV head) meet all keys
// that they see. Rows without an upstream gradient are left out: a prompt that several completions share is there once for
// each of them, and only one copy has gradients.
//
// Source: Dao et al., FlashAttention (2022), appendix B.2: dS = P * (dO V^T - rowsum(dO * O)).
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "simd.h"

namespace unison {
namespace {

constexpr int kRows = 6;

// What Python fills in; engine/attention/native.py has the same list of fields. Strides in elements.
struct AttentionGradient {
    const int32_t* starts;  // [num_sequences + 1]
    int64_t num_sequences;
    const void* q;  // [T, num_heads, head_dim], as out and grad
    const void* k;  // [T, num_kv_heads, head_dim], as v
    const void* v;
    const void* out;
    const void* grad;
    void* grad_q;  // of the shapes of q, k and v, contiguous; the first one zeros
    void* grad_k;
    void* grad_v;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, grad_token, grad_head;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t window;  // 0: none
    double scale;
    int64_t is_bf16;
};

// Rows [length][dim] in fp32 and the same transposed, [dim][padded].
struct Panel {
    float* rows;
    float* turned;
};

template <class T> void widen_panel(const T* from, int64_t stride, int64_t length, int64_t dim, int64_t padded, Panel to) {
    for (int64_t j = 0; j < length; ++j)
        for (int64_t d = 0; d < dim; d += 8) store8(to.rows + j * dim + d, load8(from + j * stride + d));
    for (int64_t d = 0; d < dim; ++d) {
        float* line = to.turned + d * padded;
        for (int64_t j = 0; j < length; ++j) line[j] = to.rows[j * dim + d];
        std::fill(line + length, line + padded, 0.0f);
    }
}

// Query rows that meet the keys together, the first `count` of them; those behind are zeros.
struct Tile {
    int count;
    int64_t first_key[kRows], end_key[kRows];
    float *q, *grad, *grad_q;    // [kRows][dim]
    float *weights, *slopes;     // [kRows][padded]: P, and dP or dS
    float corrections[kRows];    // rowsum(dO * O)
    int64_t low, high;           // keys that any row sees
};

// scores[r][j] = rows[r] . column j, for j in [low, high), in whole eights.
void multiply_turned(const float* rows, const float* turned, int64_t dim, int64_t padded, int64_t low, int64_t high,
                     float* scores) {
    for (int64_t j = low / 8 * 8; j < high; j += 8) {
        F8 sums[kRows];
        for (int r = 0; r < kRows; ++r) sums[r] = zero8();
        for (int64_t d = 0; d < dim; ++d) {
            F8 column = load8(turned + d * padded + j);
            hold(column);
            for (int r = 0; r < kRows; ++r) sums[r] = fma8(set8(rows[r * dim + d]), column, sums[r]);
        }
        for (int r = 0; r < kRows; ++r) store8(scores + r * padded + j, sums[r]);
    }
}

// Turns scores into softmax weights and products with V into gradients of scores; both are 0 where a row sees nothing.
void softmax_gradient(Tile& tile, int64_t padded, float scale) {
    const int64_t begin = tile.low / 8 * 8, end = (tile.high + 7) / 8 * 8;
    for (int r = 0; r < kRows; ++r) {
        float* weights = tile.weights + r * padded;
        float* slopes = tile.slopes + r * padded;
        if (r >= tile.count) {
            std::fill(weights + begin, weights + end, 0.0f);
            std::fill(slopes + begin, slopes + end, 0.0f);
            continue;
        }
        const float none = -__builtin_inff();
        for (int64_t j = begin; j < tile.first_key[r]; ++j) weights[j] = none;
        for (int64_t j = tile.end_key[r]; j < end; ++j) weights[j] = none;
        F8 best = set8(none);
        for (int64_t j = begin; j < end; j += 8) best = max8(best, load8(weights + j));
        const F8 top = set8(hmax(best) * scale), factor = set8(scale);
        F8 sum = zero8();
        for (int64_t j = begin; j < end; j += 8) {
            const F8 weight = exp8(sub8(mul8(load8(weights + j), factor), top));
            store8(weights + j, weight);
            sum = add8(sum, weight);
        }
        const F8 share = set8(1.0f / hsum(sum)), correction = set8(tile.corrections[r]);
        for (int64_t j = begin; j < end; j += 8) {
            const F8 weight = mul8(load8(weights + j), share);
            store8(weights + j, weight);
            store8(slopes + j, mul8(mul8(sub8(load8(slopes + j), correction), weight), factor));
        }
    }
}

// grad_q[r] = sum over keys of slopes[r][j] * key j.
void gather_query_gradients(const Tile& tile, const float* keys, int64_t dim, int64_t padded) {
    for (int64_t d = 0; d < dim; d += 8) {
        F8 sums[kRows];
        for (int r = 0; r < kRows; ++r) sums[r] = zero8();
        for (int64_t j = tile.low; j < tile.high; ++j) {
            F8 key = load8(keys + j * dim + d);
            hold(key);
            for (int r = 0; r < kRows; ++r) sums[r] = fma8(set8(tile.slopes[r * padded + j]), key, sums[r]);
        }
        for (int r = 0; r < kRows; ++r) store8(tile.grad_q + r * dim + d, sums[r]);
    }
}

// into[j] += sum over rows of factors[r][j] * rows[r], for each key j.
void add_key_gradients(const Tile& tile, const float* factors, const float* rows, int64_t dim, int64_t padded,
                       float* into) {
    for (int64_t d = 0; d < dim; d += 8) {
        F8 parts[kRows];
        for (int r = 0; r < kRows; ++r) parts[r] = load8(rows + r * dim + d);
        for (int64_t j = tile.low; j < tile.high; ++j) {
            F8 sum = load8(into + j * dim + d);
            for (int r = 0; r < kRows; ++r) sum = fma8(set8(factors[r * padded + j]), parts[r], sum);
            store8(into + j * dim + d, sum);
        }
    }
}

// One sequence and one KV head.
template <class T> class Item {
  public:
    Item(const AttentionGradient& job, int64_t sequence, int64_t kv_head)
        : job_(job), first_(job.starts[sequence]), length_(job.starts[sequence + 1] - first_), kv_head_(kv_head),
          dim_(job.head_dim), padded_((length_ + 7) / 8 * 8), group_(job.num_heads / job.num_kv_heads) {}

    void run() {
        if (length_ <= 0) return;
        take_memory();
        widen_panel(at(job_.k, job_.k_token, job_.k_head, 0, kv_head_), job_.k_token, length_, dim_, padded_, keys_);
        widen_panel(at(job_.v, job_.v_token, job_.v_head, 0, kv_head_), job_.v_token, length_, dim_, padded_, values_);
        std::fill(grad_keys_, grad_keys_ + length_ * dim_, 0.0f);
        std::fill(grad_values_, grad_values_ + length_ * dim_, 0.0f);
        Tile tile = empty_tile();
        for (int64_t token = 0; token < length_; ++token)
            for (int64_t h = 0; h < group_; ++h)
                if (add_row(tile, token, h) && tile.count == kRows) finish(tile);
        if (tile.count > 0) finish(tile);
        for (int64_t j = 0; j < length_; ++j)
            for (int64_t d = 0; d < dim_; d += 8) {
                const int64_t to = ((first_ + j) * job_.num_kv_heads + kv_head_) * dim_ + d;
                store8(static_cast<T*>(job_.grad_k) + to, load8(grad_keys_ + j * dim_ + d));
                store8(static_cast<T*>(job_.grad_v) + to, load8(grad_values_ + j * dim_ + d));
            }
    }

  private:
    const T* at(const void* base, int64_t token_stride, int64_t head_stride, int64_t token, int64_t head) const {
        return static_cast<const T*>(base) + (first_ + token) * token_stride + head * head_stride;
    }

    void take_memory() {
        const int64_t rows = length_ * dim_, turned = padded_ * dim_, tile = kRows * (3 * dim_ + 2 * padded_);
        float* memory = static_cast<float*>(scratch(0, static_cast<size_t>(4 * rows + 2 * turned + tile) * sizeof(float)));
        keys_ = {memory, memory + 4 * rows};
        values_ = {memory + rows, memory + 4 * rows + turned};
        grad_keys_ = memory + 2 * rows;
        grad_values_ = memory + 3 * rows;
        tile_memory_ = memory + 4 * rows + 2 * turned;
    }

    Tile empty_tile() const {
        Tile tile{};
        tile.q = tile_memory_;
        tile.grad = tile.q + kRows * dim_;
        tile.grad_q = tile.grad + kRows * dim_;
        tile.weights = tile.grad_q + kRows * dim_;
        tile.slopes = tile.weights + kRows * padded_;
        std::fill(tile.q, tile.grad_q, 0.0f);
        return tile;
    }

    // Adds a query row, unless it has no upstream gradient.
    bool add_row(Tile& tile, int64_t token, int64_t h) {
        const int64_t head = kv_head_ * group_ + h;
        const T* upstream = at(job_.grad, job_.grad_token, job_.grad_head, token, head);
        const T* out = at(job_.out, job_.out_token, job_.out_head, token, head);
        const T* q = at(job_.q, job_.q_token, job_.q_head, token, head);
        const int r = tile.count;
        F8 magnitude = zero8(), correction = zero8();  // 0 for zeros alone, NaN for NaN
        for (int64_t d = 0; d < dim_; d += 8) {
            const F8 value = load8(upstream + d);
            magnitude = add8(magnitude, max8(value, sub8(zero8(), value)));
            correction = fma8(value, load8(out + d), correction);
            store8(tile.grad + r * dim_ + d, value);
            store8(tile.q + r * dim_ + d, load8(q + d));
        }
        if (hsum(magnitude) == 0.0f) return false;
        tile.corrections[r] = hsum(correction);
        tile.first_key[r] = job_.window ? std::max<int64_t>(0, token - job_.window + 1) : 0;
        tile.end_key[r] = token + 1;
        tokens_[r] = token, heads_[r] = head;
        tile.count = r + 1;
        return true;
    }

    void finish(Tile& tile) {
        for (int64_t i = tile.count * dim_; i < kRows * dim_; ++i) tile.q[i] = tile.grad[i] = 0.0f;
        tile.low = *std::min_element(tile.first_key, tile.first_key + tile.count);
        tile.high = *std::max_element(tile.end_key, tile.end_key + tile.count);
        multiply_turned(tile.q, keys_.turned, dim_, padded_, tile.low, tile.high, tile.weights);
        multiply_turned(tile.grad, values_.turned, dim_, padded_, tile.low, tile.high, tile.slopes);
        softmax_gradient(tile, padded_, static_cast<float>(job_.scale));
        gather_query_gradients(tile, keys_.rows, dim_, padded_);
        add_key_gradients(tile, tile.slopes, tile.q, dim_, padded_, grad_keys_);
        add_key_gradients(tile, tile.weights, tile.grad, dim_, padded_, grad_values_);
        for (int r = 0; r < tile.count; ++r) {
            T* to = static_cast<T*>(job_.grad_q) + ((first_ + tokens_[r]) * job_.num_heads + heads_[r]) * dim_;
            for (int64_t d = 0; d < dim_; d += 8) store8(to + d, load8(tile.grad_q + r * dim_ + d));
        }
        tile.count = 0;
    }

    const AttentionGradient& job_;
    const int64_t first_, length_, kv_head_, dim_, padded_, group_;
    Panel keys_{}, values_{};
    float *grad_keys_ = nullptr, *grad_values_ = nullptr, *tile_memory_ = nullptr;
    int64_t tokens_[kRows] = {}, heads_[kRows] = {};
};

}  // namespace
}  // namespace unison

extern "C" {

// The caller checks shapes, and that head_dim is a multiple of eight.
UNISON_EXPORT void unison_attention_gradient(const unison::AttentionGradient* job) {
    using namespace unison;
    parallel_for(job->num_sequences * job->num_kv_heads, [&](int64_t i, int) {
        const int64_t sequence = i / job->num_kv_heads, kv_head = i % job->num_kv_heads;
        job->is_bf16 ? Item<bf16>(*job, sequence, kv_head).run() : Item<float>(*job, sequence, kv_head).run();
    });
}
}
