// Causal attention with grouped KV heads: decode, prefill and packed sequences by one algorithm, so that a query's bits
// depend on its own sequence alone, not on phase, batch, chunk, block size, tile, threads or other queries.
//
// The order of arithmetic of one query at position p, which is the contract:
//   * keys are taken in groups of 32 consecutive positions, aligned to absolute position; only positions <= p inside
//     the window are read or counted, whatever else the group holds;
//   * score = (8-lane dot over the head dim, hsum tree) * scale; group maximum; where the maximum grows, sums and
//     accumulators are multiplied by exp8(old - new) (where it doesn't, that factor would be exactly 1);
//   * weights are exp8(score - maximum); lane (position mod 8) of the sum collects them; V is accumulated position by
//     position with fused multiply-adds, fp32;
//   * positions are cut into partitions of `split_tokens` (a multiple of 32). Each yields (maximum, sum, accumulator);
//     these are merged in ascending order by `merge`, whether or not several threads computed them.
//
// Sources: the online softmax, Milakov and Gimelshein 2018; the partitioned decode, Dao et al., Flash-Decoding, 2023.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "attention_call.h"
#include "attention_group.h"
#include "pool.h"
#include "simd.h"
#include "tape.h"

namespace unison {
namespace {

// Query rows that read the keys in one pass, so that widening them first doesn't pay.
constexpr int kFewRows = 4;
constexpr size_t kMaxWorkspaceBytes = size_t{64} << 20;

// Consecutive queries of one sequence that share one pass over the keys.
struct Unit {
    int64_t row;
    int64_t token;     // index of the first query in q and out
    int64_t position;  // of the first query
    int64_t rows;
    int64_t first_key;  // first position that any of the queries sees; the last one is position + rows - 1
    int64_t key_end() const { return position + rows; }
    int64_t first_partition(int64_t split) const { return first_key / split; }
    int64_t num_partitions(int64_t split) const { return (key_end() - 1) / split - first_key / split + 1; }
    int64_t cost() const { return rows * (key_end() - first_key); }
};

// One unit and some neighbouring KV heads, over the partitions [first, last).
struct Item {
    int64_t unit;
    int64_t kv_head;
    int64_t num_kv_heads;
    int64_t first;
    int64_t last;
    int64_t partial;  // index of the first partial result in the workspace; -1: the item writes the output itself
    int64_t counter;  // counts the partitions of (unit, kv heads) that are still missing
};

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

// Query rows of a tile are ordered by KV head, query, head within the KV head. Calls body(row, token, head).
template <class Body> void for_each_row(const Call& call, const Unit& unit, const Item& item, Body body) {
    const int64_t heads = call.heads_per_kv();
    int64_t row = 0;
    for (int64_t kv_head = item.kv_head; kv_head < item.kv_head + item.num_kv_heads; ++kv_head)
        for (int64_t i = 0; i < unit.rows; ++i)
            for (int64_t h = 0; h < heads; ++h) body(row++, unit.token + i, kv_head * heads + h);
}

// The tile's rows of one KV head, from row `start` on, over the keys [from, to) of one group.
template <class Source>
void attend_tile(const Call& call, const Unit& unit, int64_t start, int64_t from, int64_t to, const Source& source,
                 Tile& tile, Ahead& ahead) {
    const int64_t heads = call.heads_per_kv(), dim = call.keys->head_dim, window = call.keys->window;
    const int64_t base = from / kGroup * kGroup;
    const float scale = static_cast<float>(call.keys->scale);
    const auto bounds = [&](int64_t i) {
        const int64_t position = unit.position + i, oldest = window ? position - window + 1 : 0;
        return std::pair<int, int>(static_cast<int>(std::max(from, oldest) - base),
                                   static_cast<int>(std::min(to, position + 1) - base));
    };
    for (int64_t i = 0, next; i < unit.rows; i = next) {
        const std::pair<int, int> range = bounds(i);
        for (next = i + 1; next < unit.rows && bounds(next) == range;) ++next;
        if (range.first >= range.second) continue;
        int64_t h = start + i * heads;
        const auto run = [&](auto count, auto kernel) {
            for (; h + count <= start + next * heads; h += count)
                kernel(tile.q + h * dim, source, dim, range.first, range.second, scale, tile.part.acc + h * dim,
                       tile.part.top + h, tile.sums + 8 * h, ahead);
        };
        run(4, attend_group<4, Source>);
        run(3, attend_group<3, Source>);
        run(2, attend_group<2, Source>);
        run(1, attend_group<1, Source>);
    }
}

// All rows of the tile over one partition's keys, into tile.part.
template <class T>
bool attend_partition(const Call& call, const Unit& unit, const Item& item, int64_t partition, Tile& tile) {
    const AttentionKeys& layer = *call.keys;
    const int64_t dim = layer.head_dim, rows_per_head = unit.rows * call.heads_per_kv();
    const int64_t n = rows_per_head * item.num_kv_heads;
    std::fill(tile.part.acc, tile.part.acc + n * dim, 0.0f);
    std::fill(tile.sums, tile.sums + 8 * n, 0.0f);
    std::fill(tile.part.top, tile.part.top + n, kNone);
    const int64_t begin = std::max(unit.first_key, partition * call.rows->split_tokens);
    const int64_t end = std::min(unit.key_end(), (partition + 1) * call.rows->split_tokens);
    Ahead ahead;
    Group<T> groups[2];
    const auto group_end = [&](int64_t from) { return std::min(end, from / kGroup * kGroup + kGroup); };
    if (!find_group(call, unit.row, item.kv_head, begin, group_end(begin), groups[0])) return false;
    for (int current = 0;; current ^= 1) {
        Group<T>& group = groups[current];
        ahead.next = ahead.end = 0;
        if (group.to < end) {
            Group<T>& after = groups[current ^ 1];
            if (!find_group(call, unit.row, item.kv_head, group.to, group_end(group.to), after)) return false;
            look_ahead(layer, after, item.num_kv_heads, ahead);
        }
        for (int64_t start = 0; start < n; start += rows_per_head) {
            if (start > 0) next_head(layer, group);
            if (rows_per_head <= kFewRows) {
                attend_tile(call, unit, start, group.from, group.to, InPlace<T>{group.k, group.v}, tile, ahead);
            } else {
                widen_group(group, dim, tile.keys, tile.values);
                const Widened source{tile.keys, tile.values, dim};
                attend_tile(call, unit, start, group.from, group.to, source, tile, ahead);
            }
        }
        if (group.to >= end) break;
    }
    for (int64_t i = 0; i < n; ++i) tile.part.sum[i] = hsum(load8(tile.sums + 8 * i));
    return true;
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
    const int64_t dim = call.keys->head_dim, split = call.rows->split_tokens;
    const int64_t n = unit.rows * call.heads_per_kv() * item.num_kv_heads;
    Tile tile(n, dim);
    for_each_row(call, unit, item, [&](int64_t row, int64_t token, int64_t head) {
        const T* q = static_cast<const T*>(call.q);
        q += token * call.rows->q_token_stride + head * call.rows->q_head_stride;
        for (int64_t d = 0; d < dim; d += 8) store8(tile.q + row * dim + d, load8(q + d));
    });
    if (item.partial >= 0) {
        float* const partials = plan.workspace + item.partial;
        const int64_t size = static_cast<int64_t>(Partial::floats(n, dim));
        tile.part = Partial::at(partials + (item.first - unit.first_partition(split)) * size, n, dim);
        if (!attend_partition<T>(call, unit, item, item.first, tile)) call.status = kUnmapped;
        // The thread that brings the last partition merges them all: acquire-release makes the others' results visible.
        if (__atomic_sub_fetch(&plan.missing[static_cast<size_t>(item.counter)], 1, __ATOMIC_ACQ_REL) != 0) return;
        clear(tile.total, n);
        for (int64_t p = 0; p < unit.num_partitions(split); ++p)
            for (int64_t i = 0; i < n; ++i) merge(tile.total, Partial::at(partials + p * size, n, dim), i, dim);
    } else {
        clear(tile.total, n);
        for (int64_t partition = item.first; partition < item.last; ++partition) {
            if (!attend_partition<T>(call, unit, item, partition, tile)) call.status = kUnmapped;
            for (int64_t i = 0; i < n; ++i) merge(tile.total, tile.part, i, dim);
        }
    }
    for_each_row(call, unit, item, [&](int64_t row, int64_t token, int64_t head) {
        T* out = static_cast<T*>(call.out) + (token * call.rows->num_heads + head) * dim;
        const F8 sum = set8(tile.total.sum[row]);
        for (int64_t d = 0; d < dim; d += 8) store8(out + d, div8(load8(tile.total.acc + row * dim + d), sum));
    });
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

// Cuts units into items. Few query rows take all KV heads together, which reads the slots in the order in which they
// lie, if that leaves enough items for the threads. Partitions become items of their own where the largest unit would
// keep the other threads waiting.
void make_items(const Call& call, Plan& plan) {
    const int64_t split = call.rows->split_tokens, kv_heads = call.keys->num_kv_heads, dim = call.keys->head_dim;
    const int64_t heads = call.heads_per_kv(), threads = num_threads();
    int64_t total = 0, partitions = 0;
    for (const Unit& unit : plan.units) total += unit.cost() * kv_heads, partitions += unit.num_partitions(split);
    const auto heads_per_item = [&](const Unit& unit) {
        return unit.rows * heads <= kFewRows && partitions >= 4 * threads ? kv_heads : 1;
    };
    int64_t largest = 0;
    size_t floats = 0;
    for (const Unit& unit : plan.units) {
        const int64_t span = heads_per_item(unit), parts = unit.num_partitions(split);
        largest = std::max(largest, unit.cost() * span);
        if (parts == 1) continue;
        floats += static_cast<size_t>(parts * kv_heads / span) * Partial::floats(unit.rows * heads * span, dim);
    }
    const bool is_spread = threads > 1 && floats > 0 && floats * sizeof(float) <= kMaxWorkspaceBytes &&
                           largest * 2 * threads > total;
    if (is_spread) plan.workspace = static_cast<float*>(scratch(1, floats * sizeof(float)));
    std::stable_sort(plan.units.begin(), plan.units.end(),
                     [](const Unit& a, const Unit& b) { return a.cost() > b.cost(); });
    plan.items.clear();
    plan.missing.clear();
    int64_t used = 0;
    for (int64_t u = 0; u < static_cast<int64_t>(plan.units.size()); ++u) {
        const Unit& unit = plan.units[static_cast<size_t>(u)];
        const int64_t first = unit.first_partition(split), last = first + unit.num_partitions(split);
        const int64_t span = heads_per_item(unit);
        for (int64_t head = 0; head < kv_heads; head += span) {
            if (!is_spread || last - first == 1) {
                plan.items.push_back({u, head, span, first, last, -1, -1});
                continue;
            }
            const int64_t counter = static_cast<int64_t>(plan.missing.size());
            plan.missing.push_back(static_cast<int32_t>(last - first));
            for (int64_t p = first; p < last; ++p) plan.items.push_back({u, head, span, p, p + 1, used, counter});
            used += (last - first) * static_cast<int64_t>(Partial::floats(unit.rows * heads * span, dim));
        }
    }
}

}  // namespace
}  // namespace unison

extern "C" {

// Returns 0, or why nothing sensible was computed: 1 query starts don't rise from 0 to num_tokens, 2 a position is
// negative or beyond its table, 3 a visible position has no block or one outside the slots. The caller checks shapes.
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

// Copies each token's K and V (heads * head_dim consecutive elements, as in a slot) into its slot; negative slots are
// skipped. Returns 4 when a slot is beyond the pool; the other tokens may be stored then. Strides in elements.
UNISON_EXPORT int unison_store_kv(const unison::AttentionKeys* keys, const char* k, const char* v, const int32_t* slots,
                                  int64_t num_tokens, int64_t k_stride, int64_t v_stride) {
    constexpr int64_t kItemTokens = 64, kAhead = 8;  // slots lie far apart: their lines are fetched some tokens before
    const int64_t size = keys->is_bf16 ? 2 : 4;
    const int64_t bytes = keys->num_kv_heads * keys->head_dim * size;
    const auto slot_of = [&](char* base, int64_t stride, int64_t i) { return base + slots[i] * stride * size; };
    std::atomic<int> status{unison::kOk};
    unison::parallel_for((num_tokens + kItemTokens - 1) / kItemTokens, [&](int64_t item, int) {
        const int64_t first = item * kItemTokens, end = std::min(num_tokens, first + kItemTokens);
        for (int64_t i = first - kAhead; i < end; ++i) {
            const int64_t next = i + kAhead;
            if (next < end && slots[next] >= 0 && slots[next] < keys->num_slots)
                for (int64_t at = 0; at < bytes; at += 64) {
                    unison::prefetch_to_write(slot_of(keys->k, keys->k_slot_stride, next) + at);
                    unison::prefetch_to_write(slot_of(keys->v, keys->v_slot_stride, next) + at);
                }
            if (i < first || slots[i] < 0) continue;
            if (slots[i] >= keys->num_slots) {
                status = unison::kBadSlot;
                return;
            }
            std::memcpy(slot_of(keys->k, keys->k_slot_stride, i), k + i * k_stride * size, static_cast<size_t>(bytes));
            std::memcpy(slot_of(keys->v, keys->v_slot_stride, i), v + i * v_stride * size, static_cast<size_t>(bytes));
        }
    });
    return status;
}

UNISON_WORDS(unison_attention)
UNISON_WORDS(unison_store_kv)
}
