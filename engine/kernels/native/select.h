// The most probable tokens of a row without sorting it: top-k, and top-p's smallest set.
//
// A token is a key: its logit in an order-preserving form above the complement of its id. Keys are distinct, and the
// larger one is the more probable token, of equals the lower id. The partitions are written out, because those of the
// standard library differ between implementations, and with them the order in which masses are summed.
#pragma once

#include <cstdint>
#include <utility>

#include "row_sum.h"

namespace unison {

constexpr int64_t kPeak = 64;  // elements whose maximum is kept, so that most of a row is never looked at

UNISON_INLINE uint64_t key_of(float logit, int64_t id) {
    const float plain = logit + 0.0f;  // -0 becomes +0: equal logits are equal keys but for the id
    uint32_t word;
    std::memcpy(&word, &plain, 4);
    word = (word >> 31) != 0 ? ~word : word | 0x80000000u;
    return (static_cast<uint64_t>(word) << 32) | (0xffffffffu - static_cast<uint32_t>(id));
}
UNISON_INLINE int64_t id_of(uint64_t key) { return static_cast<int64_t>(0xffffffffu - static_cast<uint32_t>(key)); }

// Descending.
inline void sort_keys(uint64_t* keys, int64_t count) {
    std::sort(keys, keys + count, [](uint64_t a, uint64_t b) { return a > b; });
}

// Moves the smallest set of largest keys whose mass reaches `target` to the front; returns how many they are (all of
// them where the mass doesn't reach it). Expected time is linear.
template <class Mass> int64_t select(uint64_t* keys, int64_t count, const Mass& mass, double target) {
    int64_t low = 0, high = count;
    double before = 0.0;  // mass of keys[0 .. low), all of which are kept
    while (high - low > 32) {
        const uint64_t a = keys[low], b = keys[low + (high - low) / 2], c = keys[high - 1];
        const uint64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
        int64_t middle = low, at = low;
        double sum = 0.0;
        for (int64_t i = low; i < high; ++i) {
            if (keys[i] <= pivot) {
                if (keys[i] == pivot) at = i;
                continue;
            }
            sum += mass(keys[i]);
            if (keys[middle] == pivot) at = i;
            std::swap(keys[i], keys[middle++]);
        }
        if (before + sum >= target) {
            high = middle;
            continue;
        }
        std::swap(keys[middle], keys[at]);
        before += sum + mass(pivot);
        low = middle + 1;
        if (before >= target) return low;
    }
    sort_keys(keys + low, high - low);
    for (int64_t i = low; i < high; ++i) {
        before += mass(keys[i]);
        if (before >= target) return i + 1;
    }
    return high;
}

// Maxima of each 64 elements; `V` is a multiple of 64.
inline void find_peaks(const float* x, int64_t V, float* peaks) {
    for (int64_t k = 0; k < V; k += kPeak) {
        F8 best = load8(x + k);
        for (int64_t i = 8; i < kPeak; i += 8) best = max8(load8(x + k + i), best);
        peaks[k / kPeak] = hmax(best);
    }
}

// Keys of all elements that are at least `bound` and not -inf; returns how many.
inline int64_t collect(const float* x, int64_t V, const float* peaks, float bound, uint64_t* keys) {
    int64_t count = 0;
    for (int64_t k = 0; k < V; k += kPeak) {
        if (!(peaks[k / kPeak] >= bound)) continue;
        for (int64_t i = k; i < k + kPeak; ++i)
            if (x[i] >= bound && x[i] != kMinusInfinity) keys[count++] = key_of(x[i], i);
    }
    return count;
}

// Keys of the k largest elements, in no order; returns how many, fewer than k where the rest is -inf. The k-th largest
// peak is a bound that k elements reach.
inline int64_t largest(const float* x, int64_t V, const float* peaks, int64_t k, uint64_t* keys) {
    const auto one = [](uint64_t) { return 1.0; };
    float bound = kMinusInfinity;
    if (k <= V / kPeak) {
        for (int64_t i = 0; i < V / kPeak; ++i) keys[i] = key_of(peaks[i], i);
        const int64_t found = select(keys, V / kPeak, one, static_cast<double>(k));
        bound = peaks[id_of(*std::min_element(keys, keys + found))];
    }
    const int64_t count = collect(x, V, peaks, bound, keys);
    return count <= k ? count : select(keys, count, one, static_cast<double>(k));
}

}  // namespace unison
