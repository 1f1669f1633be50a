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
#include <utility>
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

// What a step's layers have in common; engine/attention/native.py has the same lists of fields. Strides in elements.
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
    int64_t num_tokens;  // queries
    int64_t num_heads;
    int64_t q_token_stride;
    int64_t q_head_stride;
};

// One layer's keys and values, and how it attends.
struct AttentionKeys {
    char* k;
    char* v;
    int64_t is_bf16;
    int64_t num_slots;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t k_slot_stride;
    int64_t k_head_stride;
    int64_t v_slot_stride;
    int64_t v_head_stride;
    double scale;
    int64_t window;  // 0: none
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
    const AttentionKeys* keys;
    const void* q;
    void* out;
    std::atomic<int> status{kOk};
    int64_t heads_per_kv() const { return rows->num_heads / keys->num_kv_heads; }
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

// Memory that the next group needs, asked for bit by bit while this group is computed: the core can wait for some 24 lines
// at a time, so asking for all of them at once would stall it.
struct Ahead {
    const void* lines[2 * kGroup * (kMaxHeadDim * 4 / 64)];
    int next = 0, end = 0, per_key = 0;
    UNISON_INLINE void ask() {
        for (int i = 0; i < per_key && next < end; ++i) prefetch(lines[next++]);
    }
};

// A value that several multiply-adds use: kept in a register, where compilers would rather read memory again for each.
UNISON_INLINE F8 held(F8 a) {
#if defined(UNISON_AVX2)
    asm("" : "+x"(a.v));
#endif
    return a;
}

// For R query rows: acc[r][0 .. 8*N) = acc * factor + sum of weights[r][k] * values[k], k ascending.
template <int R, int N>
UNISON_INLINE void accumulate(float* acc, const float* values, int64_t dim, const float (*weights)[kGroup], int lo, int hi,
                              const F8* factors, Ahead& ahead) {
    F8 a[R][N];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < N; ++j) a[r][j] = mul8(load8(acc + r * dim + 8 * j), factors[r]);
    for (int k = lo; k < hi; ++k) {
        const float* value = values + k * dim;
        F8 weight[R];
        for (int r = 0; r < R; ++r) weight[r] = set8(weights[r][k]);
        for (int j = 0; j < N; ++j) {
            const F8 x = R > 1 ? held(load8(value + 8 * j)) : load8(value + 8 * j);
            for (int r = 0; r < R; ++r) a[r][j] = fma8(weight[r], x, a[r][j]);
        }
        ahead.ask();
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < N; ++j) store8(acc + r * dim + 8 * j, a[r][j]);
}

// The head dim in strips of N vectors, what is left in smaller ones.
template <int R, int N>
UNISON_INLINE void accumulate_from(int64_t d, float* acc, const float* values, int64_t dim, const float (*weights)[kGroup],
                                   int lo, int hi, const F8* factors, Ahead& ahead) {
    for (; d + 8 * N <= dim; d += 8 * N) accumulate<R, N>(acc + d, values + d, dim, weights, lo, hi, factors, ahead);
    if constexpr (N > 1) accumulate_from<R, N / 2>(d, acc, values, dim, weights, lo, hi, factors, ahead);
}

// R neighbouring query rows over keys lo..hi-1 of a group. `sums` holds eight lanes of the sum of weights per row.
template <int R>
void attend_group(const float* q, const float* keys, const float* values, int64_t dim, int lo, int hi, float scale,
                  float* acc, float* top, float* sums, Ahead& ahead) {
    constexpr int kKeys = 8 / R;  // keys at a time: eight dot products in flight
    alignas(32) float scores[R][kGroup];
    const int begin = lo / 8 * 8, end = (hi + 7) / 8 * 8;
    for (int k = begin; k < end; k += kKeys) {
        F8 a[8];
        for (int j = 0; j < 8; ++j) a[j] = zero8();
        const float* key = keys + k * dim;
        for (int64_t d = 0; d < dim; d += 8) {
            F8 x[R];
            for (int r = 0; r < R; ++r) x[r] = held(load8(q + r * dim + d));
            for (int j = 0; j < kKeys; ++j) {
                const F8 y = R > 1 ? held(load8(key + j * dim + d)) : load8(key + j * dim + d);
                for (int r = 0; r < R; ++r) a[r * kKeys + j] = fma8(x[r], y, a[r * kKeys + j]);
            }
        }
        alignas(32) float eight[8];
        store8(eight, mul8(hsum_each(a), set8(scale)));
        for (int r = 0; r < R; ++r) std::memcpy(scores[r] + k, eight + r * kKeys, kKeys * sizeof(float));
    }
    F8 factors[R];
    for (int r = 0; r < R; ++r) {
        for (int k = begin; k < lo; ++k) scores[r][k] = kNone;
        for (int k = hi; k < end; ++k) scores[r][k] = kNone;
        F8 best = set8(kNone);
        for (int k = begin; k < end; k += 8) best = max8(best, load8(scores[r] + k));
        const float group_top = hmax(best);
        const float new_top = group_top > top[r] ? group_top : top[r];
        factors[r] = new_top != top[r] ? exp8(set8(top[r] - new_top)) : set8(1.0f);
        top[r] = new_top;
        F8 sum = mul8(load8(sums + 8 * r), factors[r]);
        for (int k = begin; k < end; k += 8) {
            const F8 weight = exp8(sub8(load8(scores[r] + k), set8(new_top)));
            store8(scores[r] + k, weight);
            sum = add8(sum, weight);
        }
        store8(sums + 8 * r, sum);
    }
    accumulate_from<R, kKeys>(0, acc, values, dim, scores, lo, hi, factors, ahead);
}

// Where the keys and values of up to 32 positions are; entry i belongs to position `from` + i.
template <class T> struct Group {
    int64_t from = 0, to = 0;
    const T* k[kGroup];
    const T* v[kGroup];
};

// Looks up positions [from, to); false where one has no slot. Consecutive positions of a block are consecutive slots.
template <class T> bool find_group(const Call& call, int64_t row, int64_t kv_head, int64_t from, int64_t to, Group<T>& group) {
    const AttentionRows& rows = *call.rows;
    const AttentionKeys& keys = *call.keys;
    group.from = from, group.to = to;
    for (int64_t position = from; position < to;) {
        int64_t slot, run = to - position;
        if (rows.phase == kPacked) {
            slot = rows.query_starts[row] + position;
        } else {
            const int64_t column = position / rows.block_size, offset = position - column * rows.block_size;
            const int64_t block = rows.tables[row * rows.table_stride + column];
            if (block < 0) return false;
            slot = block * rows.block_size + offset;
            run = std::min(run, rows.block_size - offset);
        }
        if (slot + run > keys.num_slots) return false;
        const T* k = reinterpret_cast<const T*>(keys.k) + slot * keys.k_slot_stride + kv_head * keys.k_head_stride;
        const T* v = reinterpret_cast<const T*>(keys.v) + slot * keys.v_slot_stride + kv_head * keys.v_head_stride;
        for (int64_t i = 0; i < run; ++i, ++position) {
            group.k[position - from] = k + i * keys.k_slot_stride;
            group.v[position - from] = v + i * keys.v_slot_stride;
        }
    }
    return true;
}

// Widens the group into keys/values at index (position mod 32); the other indices become zero.
template <class T> void load_group(const Group<T>& group, int64_t dim, float* keys, float* values) {
    const int64_t first = group.from % kGroup, count = group.to - group.from;
    std::memset(keys, 0, static_cast<size_t>(first * dim) * 4);
    std::memset(keys + (first + count) * dim, 0, static_cast<size_t>((kGroup - first - count) * dim) * 4);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t d = 0; d < dim; d += 8) {
            store8(keys + (first + i) * dim + d, load8(group.k[i] + d));
            store8(values + (first + i) * dim + d, load8(group.v[i] + d));
        }
}

template <class T> void look_ahead(const Group<T>& group, int64_t dim, int64_t num_calls, Ahead& ahead) {
    constexpr int64_t kPerLine = 64 / sizeof(T);
    int count = 0;
    for (int64_t i = 0; i < group.to - group.from; ++i)
        for (int64_t d = 0; d < dim; d += kPerLine) {
            ahead.lines[count++] = group.k[i] + d;
            ahead.lines[count++] = group.v[i] + d;
        }
    ahead.next = 0, ahead.end = count;
    ahead.per_key = static_cast<int>((count + num_calls * kGroup - 1) / (num_calls * kGroup));
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
    const int64_t heads = call.heads_per_kv(), dim = call.keys->head_dim;
    for (int64_t i = 0; i < unit.rows; ++i)
        for (int64_t h = 0; h < heads; ++h) {
            const T* q = static_cast<const T*>(call.q) + (unit.token + i) * call.rows->q_token_stride +
                         (kv_head * heads + h) * call.rows->q_head_stride;
            for (int64_t d = 0; d < dim; d += 8) store8(tile.q + (i * heads + h) * dim + d, load8(q + d));
        }
}

// All queries of the unit over the keys [from, to) of one group, which tile.keys and tile.values hold.
void attend_tile(const Call& call, const Unit& unit, int64_t from, int64_t to, Tile& tile, Ahead& ahead) {
    const int64_t heads = call.heads_per_kv(), dim = call.keys->head_dim, window = call.keys->window;
    const int64_t base = from / kGroup * kGroup;
    const float scale = static_cast<float>(call.keys->scale);
    const auto bounds = [&](int64_t i) {
        const int64_t position = unit.position + i, oldest = window ? position - window + 1 : 0;
        return std::pair<int, int>(static_cast<int>(std::max(from, oldest) - base),
                                   static_cast<int>(std::min(to, position + 1) - base));
    };
    for (int64_t i = 0, next; i < unit.rows; i = next) {
        const auto [lo, hi] = bounds(i);
        for (next = i + 1; next < unit.rows && bounds(next) == std::pair<int, int>(lo, hi);) ++next;
        if (lo >= hi) continue;
        int64_t h = i * heads;
        const auto run = [&](auto count, auto kernel) {
            for (; h + count <= next * heads; h += count)
                kernel(tile.q + h * dim, tile.keys, tile.values, dim, lo, hi, scale, tile.part.acc + h * dim,
                       tile.part.top + h, tile.sums + 8 * h, ahead);
        };
        run(4, attend_group<4>);
        run(2, attend_group<2>);
        run(1, attend_group<1>);
    }
}

// All queries of the unit over one partition's keys, into tile.part.
template <class T> bool attend_partition(Call& call, const Unit& unit, int64_t kv_head, int64_t partition, Tile& tile) {
    const int64_t heads = call.heads_per_kv(), dim = call.keys->head_dim;
    const int64_t n = unit.rows * heads;
    std::fill(tile.part.acc, tile.part.acc + n * dim, 0.0f);
    std::fill(tile.sums, tile.sums + 8 * n, 0.0f);
    std::fill(tile.part.top, tile.part.top + n, kNone);
    const int64_t begin = std::max(unit.first_key, partition * call.rows->split_tokens);
    const int64_t end = std::min(unit.key_end(), (partition + 1) * call.rows->split_tokens);
    const int64_t num_calls = (n + 3) / 4 * ((dim + 15) / 16);  // strips over which the lines ahead are spread, at most
    Ahead ahead;
    Group<T> group;
    const auto group_end = [&](int64_t from) { return std::min(end, from / kGroup * kGroup + kGroup); };
    if (!find_group(call, unit.row, kv_head, begin, group_end(begin), group)) return false;
    while (true) {
        load_group(group, dim, tile.keys, tile.values);
        const int64_t from = group.from, to = group.to;
        if (to < end) {
            if (!find_group(call, unit.row, kv_head, to, group_end(to), group)) return false;
            look_ahead(group, dim, num_calls, ahead);
        } else {
            ahead.next = ahead.end = 0;
        }
        attend_tile(call, unit, from, to, tile, ahead);
        if (to >= end) break;
    }
    for (int64_t i = 0; i < n; ++i) tile.part.sum[i] = hsum(load8(tile.sums + 8 * i));
    return true;
}

template <class T> void write_output(const Call& call, const Unit& unit, int64_t kv_head, const Partial& total) {
    const int64_t heads = call.heads_per_kv(), dim = call.keys->head_dim;
    for (int64_t i = 0; i < unit.rows * heads; ++i) {
        T* out = static_cast<T*>(call.out) + ((unit.token + i / heads) * call.rows->num_heads + kv_head * heads + i % heads) * dim;
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
    const int64_t dim = call.keys->head_dim, n = unit.rows * call.heads_per_kv();
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
        if (end < token || end > rows.num_tokens) return kBadStarts;
        if (position < 0) return kBadPosition;
        if (rows.phase != kPacked && position + (end - token) > rows.table_width * rows.block_size) return kBadPosition;
        while (token < end) {
            const int64_t count = std::min(end - token, rows.tile_rows);
            const int64_t first_key = call.keys->window ? std::max<int64_t>(0, position - call.keys->window + 1) : 0;
            units.push_back({row, token, position, count, first_key});
            token += count, position += count;
        }
    }
    return token == rows.num_tokens ? kOk : kBadStarts;
}

// Cuts units into items. Partitions become items of their own where the largest unit would keep the other threads waiting.
void make_items(const Call& call, Plan& plan) {
    const int64_t split = call.rows->split_tokens, kv_heads = call.keys->num_kv_heads, dim = call.keys->head_dim;
    const int64_t heads = call.heads_per_kv();
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
UNISON_EXPORT int unison_attention(const unison::AttentionRows* rows, const unison::AttentionKeys* keys, const void* q,
                                   void* out) {
    using namespace unison;
    thread_local Plan plan;
    Call call{rows, keys, q, out};
    const Status status = make_units(call, plan.units);
    if (status != kOk) return status;
    make_items(call, plan);
    Plan& shared = plan;  // a thread_local named in the body would be the helper's own
    parallel_for(static_cast<int64_t>(shared.items.size()), [&](int64_t i, int) {
        const Item& item = shared.items[static_cast<size_t>(i)];
        keys->is_bf16 ? run_item<bf16>(call, shared, item) : run_item<float>(call, shared, item);
    });
    return call.status;
}

// Copies each token's K and V (heads * head_dim consecutive elements, as in a slot) into its slot; negative slots are skipped.
// Returns 4 when a slot is beyond the pool; the tokens before it are stored. Strides in elements.
UNISON_EXPORT int unison_store_kv(const unison::AttentionKeys* keys, const char* k, const char* v, const int32_t* slots,
                                  int64_t num_tokens, int64_t k_stride, int64_t v_stride) {
    const int64_t size = keys->is_bf16 ? 2 : 4;
    const size_t bytes = static_cast<size_t>(keys->num_kv_heads * keys->head_dim * size);
    for (int64_t i = 0; i < num_tokens; ++i) {
        const int64_t slot = slots[i];
        if (slot < 0) continue;
        if (slot >= keys->num_slots) return unison::kBadSlot;
        std::memcpy(keys->k + slot * keys->k_slot_stride * size, k + i * k_stride * size, bytes);
        std::memcpy(keys->v + slot * keys->v_slot_stride * size, v + i * v_stride * size, bytes);
    }
    return unison::kOk;
}

}
