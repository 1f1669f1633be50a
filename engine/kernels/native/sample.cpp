// Drawing one token per row of logits: the plain rows, which have a temperature and nothing else.
//
// Each row's result depends on that row alone: sums as in row_sum.h, the random number from a counter (Philox4x32-10,
// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
#include "pool.h"
#include "row_sum.h"

namespace unison {
namespace {

enum Status : uint8_t { kOk = 0, kNonFinite = 1 };

// Uniform in the open (0, 1), 52 random bits and a half. Key: the seed; counter: position, then sample index.
double uniform(uint64_t seed, uint64_t sample, uint64_t position) {
    uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                     static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32)};
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c[0], b = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
        for (int i = 0; i < 4; ++i) c[i] = next[i];
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const uint64_t bits = (static_cast<uint64_t>(c[0]) << 20) | (c[1] >> 12);
    return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

// The first token at which the running sum of weights passes `target`; sums[i] is that of block i.
template <class Weight>
int64_t pick(const float* x, int64_t V, const double* sums, double target, const Weight& weight) {
    const int64_t blocks = (V + kBlock - 1) / kBlock;
    int64_t chosen = 0;
    double below = 0.0, before = 0.0;  // before: what precedes the chosen block
    for (int64_t i = 0; i < blocks; ++i) {
        if (sums[i] <= 0.0) continue;
        chosen = i;  // should rounding leave the target above everything, the last block with a weight is it
        before = below;
        below += sums[i];
        if (below > target) break;
    }
    const int64_t first = chosen * kBlock, count = std::min(kBlock, V - first);
    float weights[kBlock];
    eights(
        count, [&](int64_t k) { store8(weights + k, weight(load8(x + first + k))); },
        [&](int64_t k, int n) { store8(weights + k, weight(load_part(x + first + k, n, kMinusInfinity))); });
    int64_t token = first;
    for (int64_t k = 0; k < count; ++k) {
        if (weights[k] <= 0.0f) continue;
        token = first + k;
        before += static_cast<double>(weights[k]);
        if (before > target) break;
    }
    return token;
}

}  // namespace
}  // namespace unison

extern "C" {

// A step's rows; strides in elements. A row whose temperature is negative is left alone; 0 is greedy.
struct unison_sample_call {
    const float* logits;
    int64_t stride, rows, V;
    const float* temperatures;
    const int64_t *seeds, *samples, *positions;
    int64_t* tokens;
    float *logprobs, *raw_logprobs, *log_support_mass;
    uint8_t* status;
};

UNISON_EXPORT void unison_uniforms(const int64_t* seeds, const int64_t* samples, const int64_t* positions, double* out,
                                   int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        out[i] = unison::uniform(static_cast<uint64_t>(seeds[i]), static_cast<uint64_t>(samples[i]),
                                 static_cast<uint64_t>(positions[i]));
}

UNISON_EXPORT void unison_sample_plain(const unison_sample_call* call) {
    using namespace unison;
    const int64_t V = call->V, blocks = (V + kBlock - 1) / kBlock;
    double* all_sums = static_cast<double*>(scratch(0, static_cast<size_t>(num_threads() * blocks) * sizeof(double)));
    parallel_for(call->rows, [&](int64_t row, int worker) {
        const float temperature = call->temperatures[row];
        if (temperature < 0.0f) return;
        const float* x = call->logits + row * call->stride;
        double* sums = all_sums + worker * blocks;
        const auto note = [&](int64_t i, double sum) { sums[i] = sum; };
        const RowSum raw = log_sum_exp(x, V, note);
        if (!is_finite(raw.max)) {
            call->tokens[row] = 0;
            call->logprobs[row] = call->raw_logprobs[row] = call->log_support_mass[row] = __builtin_nanf("");
            call->status[row] = kNonFinite;
            return;
        }
        call->status[row] = kOk;
        int64_t token = 0;
        if (temperature == 0.0f) {
            while (x[token] != raw.max) ++token;
            call->logprobs[row] = 0.0f;
            call->log_support_mass[row] = call->raw_logprobs[row] = log_prob(x, V, token, raw);
            call->tokens[row] = token;
            return;
        }
        const double u = uniform(static_cast<uint64_t>(call->seeds[row]), static_cast<uint64_t>(call->samples[row]),
                                 static_cast<uint64_t>(call->positions[row]));
        const F8 shift = set8(raw.max), scale = set8(temperature);
        double log_sum = raw.log_sum;
        if (temperature == 1.0f) {
            double total = 0.0;
            for (int64_t i = 0; i < blocks; ++i) total += sums[i];
            token = pick(x, V, sums, u * total, [&](F8 v) { return exp8(sub8(v, shift)); });
        } else {
            const auto weight = [&](F8 v) { return exp8(div8(sub8(v, shift), scale)); };
            const double total = block_sums(x, V, weight, note);
            log_sum = log_positive(total);
            token = pick(x, V, sums, u * total, weight);
        }
        const double above = static_cast<double>(x[token]) - static_cast<double>(raw.max);
        call->tokens[row] = token;
        call->logprobs[row] = static_cast<float>(above / static_cast<double>(temperature) - log_sum);
        call->raw_logprobs[row] = log_prob(x, V, token, raw);
        call->log_support_mass[row] = 0.0f;
    });
}
}
