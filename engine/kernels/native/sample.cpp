// Drawing one token per row of logits: the plain rows, which have a temperature and nothing else.
//
// Each row's result depends on that row alone: sums as in row_sum.h, the random number as in draw.h.
#include "draw.h"
#include "pool.h"
#include "row_sum.h"

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
        call->status[row] = kDrawn;
        int64_t token = 0;
        if (temperature == 0.0f) {
            token = first_equal(x, V, raw.max);
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
        // The scaled logit in fp32, as a trainer has it that scales the whole row first.
        const double above = temperature == 1.0f ? static_cast<double>(x[token]) - static_cast<double>(raw.max)
                                                 : static_cast<double>((x[token] - raw.max) / temperature);
        call->tokens[row] = token;
        call->logprobs[row] = static_cast<float>(above - log_sum);
        call->raw_logprobs[row] = log_prob(x, V, token, raw);
        call->log_support_mass[row] = 0.0f;
    });
}
}
