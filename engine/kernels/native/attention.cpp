// Causal attention with grouped KV heads: decode, prefill and packed sequences by one algorithm, so that a query's bits
// depend on its own sequence alone, not on phase, batch, chunk, block size, tile, threads or other queries.
//
// The order of arithmetic of one query at position p, which is the contract:
//   * keys are taken in groups of 32 consecutive positions, aligned to absolute position; only positions <= p inside the
//     window are read or counted, whatever else the group holds;
//   * score = (8-lane dot over the head dim, hsum tree) * scale; group maximum; where the maximum grows, sums and
//     accumulators are multiplied by exp8(old - new) (where it doesn't, that factor would be exactly 1);
//   * weights are exp8(score - maximum); lane (position mod 8) of the sum collects them; V is accumulated position by
//     position with fused multiply-adds, fp32;
//   * positions are cut into partitions of `split_tokens` (a multiple of 32). Each yields (maximum, sum, accumulator); these
//     are merged in ascending order by `merge`, whether or not several threads computed them.
//
// Source of the online softmax: Milakov and Gimelshein 2018; of the partitioned decode: Dao et al., Flash-Decoding, 2023.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace unison {
namespace {

constexpr int kGroup = 32;
constexpr int kMaxHeadDim = 256;
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr size_t kMaxWorkspaceBytes = size_t{64} << 20;

enum Status : int { kOk = 0, kBadStarts = 1, kBadPosition = 2, kUnmapped = 3, kBadSlot = 4 };
enum Phase : int64_t { kPacked = 0, kPrefill = 1, kDecode = 2 };

}  // namespace

// Fields that stay the same for all layers of a step; engine/attention/native.py has the same list. Strides in elements.
struct AttentionRows {
    int64_t phase;
    int64_t num_rows;
    const int32_t* query_starts;  // [num_rows + 1]; null for decode
    const int64_t* positions;     // prefill: position of the first query; decode: length; null for packed
    const int32_t* tables;        // [num_rows, table_stride]; null for packed
    int64_t table_stride;
    int64_t table_width;
    int64_t block_size;
    int64_t split_tokens;
    int64_t tile_rows;
};

// Fields that follow from the tensors.
struct AttentionShape {
    int64_t is_bf16;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t num_slots;
    int64_t q_token_stride;
    int64_t q_head_stride;
    int64_t k_slot_stride;
    int64_t k_head_stride;
    int64_t v_slot_stride;
    int64_t v_head_stride;
};

namespace {

// Consecutive queries of one sequence that share one pass over the keys.
struct Unit {
    int64_t row;
    int64_t token;     // index of the first query in q and out
    int64_t position;  // of the first query
    int64_t rows;
    int64_t first_key;  // first position that any of the queries sees; the last one is position + rows - 1
    int64_t key_end() const { return position + rows; }
    int64_t cost() const { return rows * (key_end() - first_key); }
};

// One unit and KV head, over the partitions [first, last).
struct Item {
    int64_t unit;
    int64_t kv_head;
    int64_t first;
    int64_t last;
    int64_t partial;  // index of the first partial result in the workspace; -1: the item writes the output itself
    int64_t counter;  // counts the partitions of (unit, kv_head) that are still missing
};

struct Call {
    const AttentionRows* rows;
    const AttentionShape* shape;
    const void* q;
    const void* k;
    const void* v;
    void* out;
    float scale;
    int64_t window;
    std::atomic<int> status{kOk};
};

// Results of several query rows: accumulators [n][D], maxima [n], sums [n].
struct Partial {
    float* acc;
    float* top;
    float* sum;
    static size_t floats(int64_t n, int64_t dim) { return static_cast<size_t>(n * (dim + 2) + 15) / 16 * 16; }
    static Partial at(float* memory, int64_t n, int64_t dim) { return {memory, memory + n * dim, memory + n * dim + n}; }
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

// acc[0 .. 8*N) = acc * factor + sum of weight[k] * values[k], k ascending.
template <int N>
UNISON_INLINE void accumulate(float* acc, const float* values, int64_t dim, const float* weights, int lo, int hi, F8 factor) {
    F8 a[N];
    for (int j = 0; j < N; ++j) a[j] = mul8(load8(acc + 8 * j), factor);
    for (int k = lo; k < hi; ++k) {
        const F8 weight = set8(weights[k]);
        const float* value = values + k * dim;
        for (int j = 0; j < N; ++j) a[j] = fma8(weight, load8(value + 8 * j), a[j]);
    }
    for (int j = 0; j < N; ++j) store8(acc + 8 * j, a[j]);
}

void accumulate_rest(int lanes, float* acc, const float* values, int64_t dim, const float* weights, int lo, int hi, F8 factor) {
    switch (lanes) {
        case 1: return accumulate<1>(acc, values, dim, weights, lo, hi, factor);
        case 2: return accumulate<2>(acc, values, dim, weights, lo, hi, factor);
        case 3: return accumulate<3>(acc, values, dim, weights, lo, hi, factor);
        case 4: return accumulate<4>(acc, values, dim, weights, lo, hi, factor);
        case 5: return accumulate<5>(acc, values, dim, weights, lo, hi, factor);
        case 6: return accumulate<6>(acc, values, dim, weights, lo, hi, factor);
        case 7: return accumulate<7>(acc, values, dim, weights, lo, hi, factor);
        default: return;
    }
}

// One query row over keys lo..hi-1 of a group. `sums` are the eight lanes of the sum of weights.
UNISON_INLINE void attend_group(const float* q, const float* keys, const float* values, int64_t dim, int lo, int hi,
                                float scale, float* acc, float& top, float* sums) {
    float scores[kGroup];
    F8 best = set8(kNone);
    const int begin = lo / 8 * 8, end = (hi + 7) / 8 * 8;
    for (int k = begin; k < end; k += 8) {
        F8 a[8];
        for (int j = 0; j < 8; ++j) a[j] = zero8();
        const float* key = keys + k * dim;
        for (int64_t d = 0; d < dim; d += 8) {
            const F8 x = load8(q + d);
            for (int j = 0; j < 8; ++j) a[j] = fma8(x, load8(key + j * dim + d), a[j]);
        }
        store8(scores + k, mul8(hsum_each(a), set8(scale)));
    }
    for (int k = begin; k < lo; ++k) scores[k] = kNone;
    for (int k = hi; k < end; ++k) scores[k] = kNone;
    for (int k = begin; k < end; k += 8) best = max8(best, load8(scores + k));
    const float group_top = hmax(best);
    const float new_top = group_top > top ? group_top : top;
    F8 factor = set8(1.0f);
    if (new_top != top) {
        factor = exp8(set8(top - new_top));
        top = new_top;
    }
    F8 sum = mul8(load8(sums), factor);
    for (int k = begin; k < end; k += 8) {
        const F8 weight = exp8(sub8(load8(scores + k), set8(new_top)));
        store8(scores + k, weight);
        sum = add8(sum, weight);
    }
    store8(sums, sum);
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) accumulate<8>(acc + d, values + d, dim, scores, lo, hi, factor);
    accumulate_rest(static_cast<int>((dim - d) / 8), acc + d, values + d, dim, scores, lo, hi, factor);
}

// Slot of a position, or -1 where the table has none; consecutive positions of a block are consecutive slots.
UNISON_INLINE int64_t slot_of(const Call& call, int64_t row, int64_t position) {
    const AttentionRows& rows = *call.rows;
    if (rows.phase == kPacked) return rows.query_starts[row] + position;
    const int64_t block = rows.tables[row * rows.table_stride + position / rows.block_size];
    return block < 0 ? -1 : block * rows.block_size + position % rows.block_size;
}

// Widens positions [from, to) of one KV head into keys/values at index (position mod 32); other indices become zero.
template <class T>
bool load_group(Call& call, int64_t row, int64_t kv_head, int64_t from, int64_t to, float* keys, float* values) {
    const AttentionShape& shape = *call.shape;
    const int64_t dim = shape.head_dim;
    const int64_t first = from % kGroup, last = first + (to - from);
    std::memset(keys, 0, static_cast<size_t>(first * dim) * 4);
    std::memset(keys + last * dim, 0, static_cast<size_t>((kGroup - last) * dim) * 4);
    const int64_t block_size = call.rows->phase == kPacked ? std::numeric_limits<int64_t>::max() : call.rows->block_size;
    for (int64_t position = from; position < to;) {
        const int64_t slot = slot_of(call, row, position);
        const int64_t run = std::min(to - position, block_size - position % block_size);
        if (slot < 0 || slot + run > shape.num_slots) return false;
        const T* k = static_cast<const T*>(call.k) + slot * shape.k_slot_stride + kv_head * shape.k_head_stride;
        const T* v = static_cast<const T*>(call.v) + slot * shape.v_slot_stride + kv_head * shape.v_head_stride;
        float* key = keys + position % kGroup * dim;
        float* value = values + position % kGroup * dim;
        for (int64_t i = 0; i < run; ++i) {
            for (int64_t d = 0; d < dim; d += 8) {
                store8(key + d, load8(k + d));
                store8(value + d, load8(v + d));
            }
            k += shape.k_slot_stride, v += shape.v_slot_stride;
            key += dim, value += dim;
        }
        position += run;
    }
    return true;
}

// Asks for the memory of the group that comes next, one touch per line.
template <class T> UNISON_INLINE void prefetch_group(const Call& call, int64_t row, int64_t kv_head, int64_t from, int64_t to) {
    const AttentionShape& shape = *call.shape;
    for (int64_t position = from; position < to; ++position) {
        const int64_t slot = slot_of(call, row, position);
        const T* k = static_cast<const T*>(call.k) + slot * shape.k_slot_stride + kv_head * shape.k_head_stride;
        const T* v = static_cast<const T*>(call.v) + slot * shape.v_slot_stride + kv_head * shape.v_head_stride;
        for (int64_t d = 0; d < shape.head_dim; d += 64 / static_cast<int64_t>(sizeof(T))) prefetch(k + d), prefetch(v + d);
    }
}

// A thread's memory for one item.
struct Tile {
    float* keys;
    float* values;
    float* q;
    float* sums;
    Partial part;
    Partial total;
    Tile(int64_t n, int64_t dim) {
        const size_t group = kGroup * dim, partial = Partial::floats(n, dim);
        float* memory = static_cast<float*>(scratch(0, (2 * group + n * dim + 8 * n + 2 * partial) * sizeof(float)));
        keys = memory;
        values = keys + group;
        q = values + group;
        sums = q + n * dim;
        part = Partial::at(sums + 8 * n, n, dim);
        total = Partial::at(sums + 8 * n + partial, n, dim);
    }
};

template <class T> void load_queries(const Call& call, const Unit& unit, int64_t kv_head, Tile& tile) {
    const AttentionShape& shape = *call.shape;
    const int64_t heads = shape.num_heads / shape.num_kv_heads, dim = shape.head_dim;
    for (int64_t i = 0; i < unit.rows; ++i)
        for (int64_t h = 0; h < heads; ++h) {
            const T* q = static_cast<const T*>(call.q) + (unit.token + i) * shape.q_token_stride +
                         (kv_head * heads + h) * shape.q_head_stride;
            for (int64_t d = 0; d < dim; d += 8) store8(tile.q + (i * heads + h) * dim + d, load8(q + d));
        }
}

// All queries of the unit over one partition's keys, into tile.part.
template <class T> bool attend_partition(Call& call, const Unit& unit, int64_t kv_head, int64_t partition, Tile& tile) {
    const int64_t heads = call.shape->num_heads / call.shape->num_kv_heads, dim = call.shape->head_dim;
    const int64_t n = unit.rows * heads;
    std::fill(tile.part.acc, tile.part.acc + n * dim, 0.0f);
    std::fill(tile.sums, tile.sums + 8 * n, 0.0f);
    std::fill(tile.part.top, tile.part.top + n, kNone);
    const int64_t begin = std::max(unit.first_key, partition * call.rows->split_tokens);
    const int64_t end = std::min(unit.key_end(), (partition + 1) * call.rows->split_tokens);
    for (int64_t from = begin, to; from < end; from = to) {
        const int64_t base = from / kGroup * kGroup;
        to = std::min(end, base + kGroup);
        if (!load_group<T>(call, unit.row, kv_head, from, to, tile.keys, tile.values)) return false;
        if (to < end) prefetch_group<T>(call, unit.row, kv_head, to, std::min(end, to + kGroup));
        for (int64_t i = 0; i < unit.rows; ++i) {
            const int64_t position = unit.position + i;
            const int64_t oldest = call.window ? position - call.window + 1 : 0;
            const int lo = static_cast<int>(std::max(from, oldest) - base);
            const int hi = static_cast<int>(std::min(to, position + 1) - base);
            if (lo >= hi) continue;
            for (int64_t h = i * heads; h < (i + 1) * heads; ++h)
                attend_group(tile.q + h * dim, tile.keys, tile.values, dim, lo, hi, call.scale, tile.part.acc + h * dim,
                             tile.part.top[h], tile.sums + 8 * h);
        }
    }
    for (int64_t i = 0; i < n; ++i) tile.part.sum[i] = hsum(load8(tile.sums + 8 * i));
    return true;
}

template <class T> void write_output(const Call& call, const Unit& unit, int64_t kv_head, const Partial& total) {
    const AttentionShape& shape = *call.shape;
    const int64_t heads = shape.num_heads / shape.num_kv_heads, dim = shape.head_dim;
    for (int64_t i = 0; i < unit.rows * heads; ++i) {
        T* out = static_cast<T*>(call.out) + ((unit.token + i / heads) * shape.num_heads + kv_head * heads + i % heads) * dim;
        const F8 sum = set8(total.sum[i]);
        for (int64_t d = 0; d < dim; d += 8) store8(out + d, div8(load8(total.acc + i * dim + d), sum));
    }
}

void clear(Partial total, int64_t n) {
    std::fill(total.top, total.top + n, kNone);
    std::fill(total.sum, total.sum + n, 0.0f);
}

// What one call does, in order of falling cost.
struct Plan {
    std::vector<Unit> units;
    std::vector<Item> items;
    std::vector<int32_t> missing;  // per (unit, kv head), where partitions are spread over threads
    float* workspace = nullptr;
};

template <class T> void run_item(Call& call, Plan& plan, const Item& item) {
    const Unit& unit = plan.units[static_cast<size_t>(item.unit)];
    const int64_t dim = call.shape->head_dim;
    const int64_t n = unit.rows * (call.shape->num_heads / call.shape->num_kv_heads);
    Tile tile(n, dim);
    load_queries<T>(call, unit, item.kv_head, tile);
    if (item.partial >= 0) {
        tile.part = Partial::at(plan.workspace + item.partial + (item.first - unit.first_key / call.rows->split_tokens) *
                                static_cast<int64_t>(Partial::floats(n, dim)), n, dim);
        if (!attend_partition<T>(call, unit, item.kv_head, item.first, tile)) call.status = kUnmapped;
        // The thread that brings the last partition merges them all: acquire-release makes the others' results visible.
        if (__atomic_sub_fetch(&plan.missing[static_cast<size_t>(item.counter)], 1, __ATOMIC_ACQ_REL) != 0) return;
        clear(tile.total, n);
        const int64_t partitions = (unit.key_end() - 1) / call.rows->split_tokens - unit.first_key / call.rows->split_tokens + 1;
        for (int64_t p = 0; p < partitions; ++p) {
            float* memory = plan.workspace + item.partial + p * static_cast<int64_t>(Partial::floats(n, dim));
            for (int64_t i = 0; i < n; ++i) merge(tile.total, Partial::at(memory, n, dim), i, dim);
        }
    } else {
        clear(tile.total, n);
        for (int64_t partition = item.first; partition < item.last; ++partition) {
            if (!attend_partition<T>(call, unit, item.kv_head, partition, tile)) call.status = kUnmapped;
            for (int64_t i = 0; i < n; ++i) merge(tile.total, tile.part, i, dim);
        }
    }
    write_output<T>(call, unit, item.kv_head, tile.total);
}

Status make_units(const Call& call, std::vector<Unit>& units) {
    const AttentionRows& rows = *call.rows;
    units.clear();
    int64_t token = 0;
    if (rows.phase != kDecode && rows.query_starts[0] != 0) return kBadStarts;
    for (int64_t row = 0; row < rows.num_rows; ++row) {
        const int64_t end = rows.phase == kDecode ? row + 1 : rows.query_starts[row + 1];
        int64_t position = rows.phase == kPacked ? 0 : rows.positions[row] - (rows.phase == kDecode ? 1 : 0);
        if (end < token || end > call.shape->num_tokens) return kBadStarts;
        if (position < 0) return kBadPosition;
        if (rows.phase != kPacked && position + (end - token) > rows.table_width * rows.block_size) return kBadPosition;
        while (token < end) {
            const int64_t count = std::min(end - token, rows.tile_rows);
            const int64_t first_key = call.window ? std::max<int64_t>(0, position - call.window + 1) : 0;
            units.push_back({row, token, position, count, first_key});
            token += count, position += count;
        }
    }
    return token == call.shape->num_tokens ? kOk : kBadStarts;
}

// Cuts units into items. Partitions become items of their own where the largest unit would keep the other threads waiting.
void make_items(const Call& call, Plan& plan) {
    const int64_t split = call.rows->split_tokens, kv_heads = call.shape->num_kv_heads, dim = call.shape->head_dim;
    const int64_t heads = call.shape->num_heads / kv_heads;
    int64_t total = 0, largest = 0;
    size_t floats = 0;
    for (const Unit& unit : plan.units) {
        total += unit.cost() * kv_heads;
        largest = std::max(largest, unit.cost());
        const int64_t partitions = (unit.key_end() - 1) / split - unit.first_key / split + 1;
        if (partitions > 1) floats += static_cast<size_t>(kv_heads * partitions) * Partial::floats(unit.rows * heads, dim);
    }
    const bool is_spread = num_threads() > 1 && floats > 0 && floats * sizeof(float) <= kMaxWorkspaceBytes &&
                           largest * 2 * num_threads() > total;
    if (is_spread) plan.workspace = static_cast<float*>(scratch(1, floats * sizeof(float)));
    std::stable_sort(plan.units.begin(), plan.units.end(), [](const Unit& a, const Unit& b) { return a.cost() > b.cost(); });
    plan.items.clear();
    plan.missing.clear();
    int64_t used = 0;
    for (int64_t u = 0; u < static_cast<int64_t>(plan.units.size()); ++u) {
        const Unit& unit = plan.units[static_cast<size_t>(u)];
        const int64_t first = unit.first_key / split, last = (unit.key_end() - 1) / split + 1;
        for (int64_t head = 0; head < kv_heads; ++head) {
            if (!is_spread || last - first == 1) {
                plan.items.push_back({u, head, first, last, -1, -1});
                continue;
            }
            const int64_t counter = static_cast<int64_t>(plan.missing.size());
            plan.missing.push_back(static_cast<int32_t>(last - first));
            for (int64_t p = first; p < last; ++p) plan.items.push_back({u, head, p, p + 1, used, counter});
            used += (last - first) * static_cast<int64_t>(Partial::floats(unit.rows * heads, dim));
        }
    }
}

}  // namespace
}  // namespace unison

extern "C" {

// Returns 0, or why nothing sensible was computed: 1 query starts don't rise from 0 to num_tokens, 2 a position is negative
// or beyond its table, 3 a visible position has no block or one outside the slots. Shapes are the caller's to check.
UNISON_EXPORT int unison_attention(const unison::AttentionRows* rows, const unison::AttentionShape* shape, const void* q,
                                   const void* k, const void* v, void* out, float scale, int64_t window) {
    using namespace unison;
    thread_local Plan plan;
    Call call{rows, shape, q, k, v, out, scale, window};
    const Status status = make_units(call, plan.units);
    if (status != kOk) return status;
    make_items(call, plan);
    Plan& shared = plan;  // a thread_local named in the body would be the helper's own
    parallel_for(static_cast<int64_t>(shared.items.size()), [&](int64_t i, int) {
        const Item& item = shared.items[static_cast<size_t>(i)];
        shape->is_bf16 ? run_item<bf16>(call, shared, item) : run_item<float>(call, shared, item);
    });
    return call.status;
}

// Copies each token's K and V (one row of kv_heads * head_dim elements) into its slot; negative slots are skipped. Strides
// and row length in bytes. Returns 4 when a slot is beyond num_slots; the tokens before it are stored.
UNISON_EXPORT int unison_store_kv(const char* k, const char* v, const int32_t* slots, char* k_slots, char* v_slots,
                                  int64_t num_tokens, int64_t num_slots, int64_t row_bytes, int64_t k_stride,
                                  int64_t v_stride, int64_t k_slot_stride, int64_t v_slot_stride) {
    for (int64_t i = 0; i < num_tokens; ++i) {
        const int64_t slot = slots[i];
        if (slot < 0) continue;
        if (slot >= num_slots) return unison::kBadSlot;
        std::memcpy(k_slots + slot * k_slot_stride, k + i * k_stride, static_cast<size_t>(row_bytes));
        std::memcpy(v_slots + slot * v_slot_stride, v + i * v_stride, static_cast<size_t>(row_bytes));
    }
    return unison::kOk;
}

}
