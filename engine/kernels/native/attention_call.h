// What one attention call is given, and where its keys and values lie: the structs that Python fills in, and the look-up
// of up to 32 positions through the block table. Knows nothing of arithmetic or threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "attention_group.h"
#include "simd.h"

namespace unison {

enum Status : int { kOk = 0, kBadStarts = 1, kBadPosition = 2, kUnmapped = 3, kBadSlot = 4 };
enum Phase : int64_t { kPacked = 0, kPrefill = 1, kDecode = 2 };

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

struct Call {
    const AttentionRows* rows;
    const AttentionKeys* keys;
    const void* q;
    void* out;
    std::atomic<int> status{kOk};
    int64_t heads_per_kv() const { return rows->num_heads / keys->num_kv_heads; }
};

// Where the keys and values of positions [from, to) are: entry i belongs to the group's position i, others are zeros.
template <class T> struct Group {
    int64_t from = 0, to = 0;
    const T* k[kGroup];
    const T* v[kGroup];
};

template <class T> const T* zeros() {
    alignas(64) static const T row[kMaxHeadDim] = {};
    return row;
}

// Looks up positions [from, to); false where one has no slot. Consecutive positions of a block are consecutive slots.
template <class T>
bool find_group(const Call& call, int64_t row, int64_t kv_head, int64_t from, int64_t to, Group<T>& group) {
    const AttentionRows& rows = *call.rows;
    const AttentionKeys& keys = *call.keys;
    group.from = from, group.to = to;
    for (int64_t i = 0; i < from % kGroup; ++i) group.k[i] = group.v[i] = zeros<T>();
    for (int64_t i = from % kGroup + (to - from); i < kGroup; ++i) group.k[i] = group.v[i] = zeros<T>();
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
            group.k[position % kGroup] = k + i * keys.k_slot_stride;
            group.v[position % kGroup] = v + i * keys.v_slot_stride;
        }
    }
    return true;
}

// From one KV head to the next.
template <class T> void next_head(const AttentionKeys& keys, Group<T>& group) {
    const int64_t first = group.from % kGroup;
    for (int64_t i = first; i < first + group.to - group.from; ++i) {
        group.k[i] += keys.k_head_stride;
        group.v[i] += keys.v_head_stride;
    }
}

template <class T> void widen_group(const Group<T>& group, int64_t dim, float* keys, float* values) {
    for (int64_t i = 0; i < kGroup; ++i)
        for (int64_t d = 0; d < dim; d += 8) {
            store8(keys + i * dim + d, load8(group.k[i] + d));
            store8(values + i * dim + d, load8(group.v[i] + d));
        }
}

// Lists the memory of a group, of `num_kv_heads` heads from the group's on, in the order in which it lies.
template <class T>
void look_ahead(const AttentionKeys& keys, const Group<T>& group, int64_t num_kv_heads, Ahead& ahead) {
    constexpr int64_t kPerLine = 64 / sizeof(T);
    const int64_t first = group.from % kGroup;
    int count = 0;
    for (int64_t i = first; i < first + group.to - group.from; ++i)
        for (int64_t head = 0; head < num_kv_heads; ++head)
            for (int64_t d = 0; d < keys.head_dim && count < Ahead::kMaxLines; d += kPerLine) {
                ahead.lines[count++] = group.k[i] + head * keys.k_head_stride + d;
                ahead.lines[count++] = group.v[i] + head * keys.v_head_stride + d;
            }
    std::fill(ahead.lines + count, ahead.lines + count + Ahead::kMaxAsked, ahead.lines[count - 1]);
    ahead.next = 0, ahead.end = count;
}

}  // namespace
}  // namespace unison
