// Drawing one token per row of logits: the rows that have more than a temperature. And the alternatives to a token.
//
// The steps are those of engine/runtime/sample.py, and engine/runtime/filters.py is the same in torch. Each row's
// result depends on that row alone. A row is worked on in a copy of its logits and never sorted as a whole (select.h).
#include <cfloat>
#include <cstring>

#include "draw.h"
#include "pool.h"
#include "row_sum.h"
#include "select.h"

extern "C" {

// One row's parameters; engine/runtime/filters.py has the same list of fields. Ids may lie outside the vocabulary.
struct unison_filtered_row {
    double top_p, min_p, presence, frequency;
    float temperature, repetition;
    int64_t top_k;  // V or more: no limit
    int64_t has_allowed;
    const int64_t *allowed, *bad, *early, *bias_ids, *history;  // early: stop tokens that must not come yet
    int64_t num_allowed, num_bad, num_early, num_bias, num_history;
    int64_t num_prompt;  // of the history, from its start
    const float* bias;
};

// Row `rows[i]` of the logits and of the results belongs to filters[i]; strides in elements.
struct unison_filtered_call {
    const float* logits;
    int64_t stride, count, V;
    const int64_t* rows;
    const unison_filtered_row* filters;
    const int64_t *seeds, *samples, *positions;  // by row
    int64_t* tokens;
    float *logprobs, *raw_logprobs, *log_support_mass;
    uint8_t* status;
};
}

namespace unison {
namespace {

// A thread's memory for one row. `y` and `w` are filled up to a multiple of 128, with -inf and 0.
struct Room {
    int64_t V, padded;
    float *y, *w, *peaks;
    double* sums;
    uint64_t* keys;
    int32_t* counts;

    explicit Room(int64_t vocab) : V(vocab), padded((vocab + kBlock - 1) / kBlock * kBlock) {
        const size_t floats = static_cast<size_t>(padded) * sizeof(float);
        const size_t blocks = static_cast<size_t>(padded / kBlock) * sizeof(double);
        char* memory = static_cast<char*>(scratch(1, 2 * floats + 2 * blocks));  // a peak per 64, a sum per 128
        y = reinterpret_cast<float*>(memory);
        w = reinterpret_cast<float*>(memory + floats);
        sums = reinterpret_cast<double*>(memory + 2 * floats);
        peaks = reinterpret_cast<float*>(memory + 2 * floats + blocks);
        keys = static_cast<uint64_t*>(scratch(2, static_cast<size_t>(padded) * sizeof(uint64_t)));
        counts = static_cast<int32_t*>(scratch(3, floats));
    }
    void copy(const float* x) {
        std::memcpy(y, x, static_cast<size_t>(V) * sizeof(float));
        std::fill(y + V, y + padded, kMinusInfinity);
    }
    bool holds(int64_t id) const { return id >= 0 && id < V; }
};

float below_infinity(float x) { return std::min(x, FLT_MAX); }

void add_bias(const unison_filtered_row& row, Room& room) {
    for (int64_t i = 0; i < row.num_bias; ++i)
        if (room.holds(row.bias_ids[i])) {
            float& logit = room.y[row.bias_ids[i]];
            logit = below_infinity(logit + row.bias[i]);
        }
}

void penalise(const unison_filtered_row& row, Room& room) {
    if (row.num_history == 0) return;
    constexpr int32_t kSeen = 1 << 30;  // above the count of the generated ones
    std::memset(room.counts, 0, static_cast<size_t>(room.V) * sizeof(int32_t));
    for (int64_t i = 0; i < row.num_history; ++i)
        if (room.holds(row.history[i])) {
            int32_t& count = room.counts[row.history[i]];
            count = (count | kSeen) + (i >= row.num_prompt);
        }
    for (int64_t i = 0; i < row.num_history; ++i) {
        if (!room.holds(row.history[i]) || room.counts[row.history[i]] == 0) continue;
        float& logit = room.y[row.history[i]];
        const int32_t generated = room.counts[row.history[i]] & (kSeen - 1);
        room.counts[row.history[i]] = 0;
        if (row.repetition != 1.0f)
            logit = below_infinity(logit > 0.0f ? logit / row.repetition : logit * row.repetition);
        if (generated > 0)
            logit = below_infinity(logit - static_cast<float>(row.presence + row.frequency * generated));
    }
}

// Bans by making logits -inf; returns whether there was anything to ban.
bool ban(const unison_filtered_row& row, Room& room) {
    if (row.has_allowed != 0) {
        for (int64_t i = 0; i < row.num_allowed; ++i)  // w holds nothing yet that is needed
            if (room.holds(row.allowed[i])) room.w[i] = room.y[row.allowed[i]];
        std::fill(room.y, room.y + room.V, kMinusInfinity);
        for (int64_t i = 0; i < row.num_allowed; ++i)
            if (room.holds(row.allowed[i])) room.y[row.allowed[i]] = room.w[i];
    }
    for (int64_t i = 0; i < row.num_bad; ++i)
        if (room.holds(row.bad[i])) room.y[row.bad[i]] = kMinusInfinity;
    for (int64_t i = 0; i < row.num_early; ++i)
        if (room.holds(row.early[i])) room.y[row.early[i]] = kMinusInfinity;
    return row.has_allowed != 0 || row.num_bad != 0 || row.num_early != 0;
}

// Fills w with e^((y - max) / temperature) and sums with what the blocks weigh.
double weigh(Room& room, float max, float temperature) {
    const F8 shift = set8(max), divisor = set8(temperature);
    float* next = room.w;
    const auto note = [&](int64_t i, double sum) { room.sums[i] = sum; };
    if (temperature == 1.0f)
        return block_sums(
            room.y, room.padded,
            [&](F8 v) {
                const F8 weight = exp8(sub8(v, shift));
                store8(next, weight);
                next += 8;
                return weight;
            },
            note);
    return block_sums(
        room.y, room.padded,
        [&](F8 v) {
            const F8 weight = exp8(div8(sub8(v, shift), divisor));
            store8(next, weight);
            next += 8;
            return weight;
        },
        note);
}

// Takes away the weight of every token behind the last one that top-k, then top-p keep.
void keep_most_probable(const unison_filtered_row& row, Room& room, float max, float temperature, double total) {
    const bool has_top_k = row.top_k < room.V;
    const auto mass = [&](uint64_t key) { return static_cast<double>(room.w[id_of(key)]); };
    find_peaks(room.y, room.padded, room.peaks);
    int64_t count = 0;
    if (has_top_k) {
        count = largest(room.y, room.padded, room.peaks, row.top_k, room.keys);
        total = 0.0;
        for (int64_t i = 0; i < count; ++i) total += mass(room.keys[i]);
    } else {
        // All tokens lighter than this together weigh less than 1 - p, so the set that reaches p is among the others.
        const double least = (1.0 - row.top_p) * total / static_cast<double>(room.V);
        const double bound = static_cast<double>(max) + static_cast<double>(temperature) * (log_positive(least) - 0.01);
        count = collect(room.y, room.padded, room.peaks, static_cast<float>(bound), room.keys);
    }
    if (row.top_p < 1.0) count = select(room.keys, count, mass, row.top_p * total);
    const int64_t last = id_of(*std::min_element(room.keys, room.keys + count));
    const float bound = room.y[last];
    for (int64_t k = 0; k <= last; ++k) room.w[k] = room.y[k] >= bound ? room.w[k] : 0.0f;
    for (int64_t k = last + 1; k < room.V; ++k) room.w[k] = room.y[k] > bound ? room.w[k] : 0.0f;
}

struct Result {
    int64_t token;
    float logprob, log_support_mass;
};

float max_of(const Room& room) {
    F8 best = set8(kMinusInfinity);
    for (int64_t k = 0; k < room.padded; k += 8) best = max8(load8(room.y + k), best);
    return hmax(best);
}

// Steps 3 to 6 on a row that is finite; false where nothing is left to draw.
bool draw_filtered(const unison_filtered_row& row, const float* x, Room& room, double u, Result& result) {
    const bool is_greedy = row.temperature == 0.0f;
    const float temperature = is_greedy ? 1.0f : row.temperature;
    room.copy(x);
    add_bias(row, room);
    penalise(row, room);
    const float whole_max = max_of(room);
    if (whole_max == kMinusInfinity) return false;
    const double whole = weigh(room, whole_max, temperature);
    double total = whole;
    float max = whole_max;
    if (ban(row, room)) {
        max = max_of(room);
        if (max == kMinusInfinity) return false;
        if (!is_greedy) total = weigh(room, max, temperature);
    }
    const double shift = (static_cast<double>(max) - static_cast<double>(whole_max)) / static_cast<double>(temperature);
    if (is_greedy) {
        result = {first_equal(room.y, room.V, max), 0.0f, static_cast<float>(shift - log_positive(whole))};
        return true;
    }
    if (row.top_k < room.V || row.top_p < 1.0) keep_most_probable(row, room, max, temperature, total);
    const float least = static_cast<float>(row.min_p);
    for (int64_t k = 0; k < room.V; ++k) room.w[k] = room.w[k] >= least ? room.w[k] : 0.0f;
    const auto same = [](F8 v) { return v; };
    const double kept = block_sums(room.w, room.padded, same, [&](int64_t i, double sum) { room.sums[i] = sum; });
    const int64_t token = pick(room.w, room.padded, room.sums, u * kept, same);
    const double below_max = static_cast<double>(room.y[token]) - static_cast<double>(max);
    const double log_kept = log_positive(kept);
    const double mass = kept == whole && shift == 0.0 ? 0.0 : std::min(0.0, shift + log_kept - log_positive(whole));
    result = {token, static_cast<float>(below_max / static_cast<double>(temperature) - log_kept), static_cast<float>(mass)};
    return true;
}

void draw_row(const unison_filtered_call& call, int64_t index) {
    const int64_t row = call.rows[index];
    const float* x = call.logits + row * call.stride;
    const RowSum raw = log_sum_exp(x, call.V);
    Room room(call.V);
    const double u = uniform(static_cast<uint64_t>(call.seeds[row]), static_cast<uint64_t>(call.samples[row]),
                             static_cast<uint64_t>(call.positions[row]));
    Result result{0, 0.0f, 0.0f};
    uint8_t status = kDrawn;
    if (!is_finite(raw.max))
        status = kNonFinite;
    else if (!draw_filtered(call.filters[index], x, room, u, result))
        status = kEmptySupport;
    const bool is_drawn = status == kDrawn;
    const float none = __builtin_nanf("");
    call.status[row] = status;
    call.tokens[row] = is_drawn ? result.token : 0;
    call.logprobs[row] = is_drawn ? result.logprob : none;
    call.raw_logprobs[row] = is_drawn ? log_prob(x, call.V, result.token, raw) : none;
    call.log_support_mass[row] = is_drawn ? result.log_support_mass : none;
}

}  // namespace
}  // namespace unison

extern "C" {

UNISON_EXPORT void unison_sample_filtered(const unison_filtered_call* call) {
    unison::parallel_for(call->count, [&](int64_t index, int) { unison::draw_row(*call, index); });
}

// The k most probable tokens of each row, descending, of equals the lower id first, and their log-probs: [rows, k],
// 1 <= k <= V. Tokens at -inf come last, by id; a row that isn't finite gets the ids 0 .. k-1 and NaN.
UNISON_EXPORT void unison_top_logprobs(const float* logits, int64_t stride, int64_t rows, int64_t V, int64_t k,
                                       int64_t* ids, float* logprobs) {
    using namespace unison;
    parallel_for(rows, [&](int64_t row, int) {
        const float* x = logits + row * stride;
        int64_t* row_ids = ids + row * k;
        float* row_logprobs = logprobs + row * k;
        const RowSum sum = log_sum_exp(x, V);
        Room room(V);
        int64_t count = 0;
        if (is_finite(sum.max)) {
            room.copy(x);
            find_peaks(room.y, room.padded, room.peaks);
            count = largest(room.y, room.padded, room.peaks, k, room.keys);
            sort_keys(room.keys, count);
        }
        for (int64_t i = 0; i < count; ++i) {
            row_ids[i] = id_of(room.keys[i]);
            row_logprobs[i] = log_prob(x, V, row_ids[i], sum);
        }
        for (int64_t id = 0, i = count; i < k; ++id) {  // what is left over are tokens that can't be, lowest ids first
            if (count > 0 && x[id] != kMinusInfinity) continue;
            row_ids[i] = id;
            row_logprobs[i++] = log_prob(x, V, id, sum);
        }
    });
}
}
