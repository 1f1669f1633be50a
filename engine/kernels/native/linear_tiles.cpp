// bf16 linear layers by the tile registers of AMX, straight off row-major weights.
//
// Order of the reduction: 32 elements of K at a time, in ascending order; of these the even and the odd products are summed in
// chains of fused multiply-adds, and the chains' sum is added to the output's. K is padded with zeros. That is what the
// instruction does for each output alone, so it depends on neither M nor N nor the threads. It isn't the order of linear.cpp:
// machines with tiles have bits of their own.
//
// How it is fast. Sixteen rows of weights are one operand as they lie; activations are packed once per call, pairs of
// elements side by side, sixteen rows of them to a tile. Two tiles of each give four tiles of sums, which are transposed
// when they are written. The next 32 weight rows are fetched meanwhile.
//
// Used only where the system grants the registers and a small product comes out right (`tiles_state`).
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear_call.h"
#include "pool.h"
#include "simd.h"
#include "tiles.h"
#include "wide.h"

#if defined(UNISON_TILES) && !defined(UNISON_EMULATE_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace unison {
#if defined(UNISON_TILES)
#if !defined(UNISON_EMULATE_TILES)
bool may_use_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif
namespace {

constexpr int64_t kStep = 32, kSide = 16;          // elements of K per instruction, rows of a tile
constexpr int64_t kPacked = kSide * kSide;         // 32-bit pairs of a packed tile of activations
constexpr int64_t kPair = 2 * kSide;               // weight rows, or rows of activations, that are computed together

// Activations as tiles: [block of 16 rows][step of K][pair of elements][row]; rows and elements beyond the end are zeros.
struct Panel {
    uint32_t* pairs;
    int64_t steps;
    const uint32_t* tile(int64_t block, int64_t step) const { return pairs + (block * steps + step) * kPacked; }
};

void pack_block(const LinearCall& job, int64_t block, const Panel& panel) {
    const bf16* x = static_cast<const bf16*>(job.x) + block * kSide * job.x_stride;
    const int64_t rows = std::min(kSide, job.M - block * kSide);
    for (int64_t step = 0; step < panel.steps; ++step) {
        const int64_t count = std::min(kStep, job.K - step * kStep);
        uint32_t lines[kSide][kSide] = {};
        for (int64_t r = 0; r < rows; ++r)
            std::memcpy(lines[r], x + r * job.x_stride + step * kStep, static_cast<size_t>(count) * sizeof(bf16));
        __m512 square[kSide];
        for (int r = 0; r < kSide; ++r) square[r] = _mm512_loadu_ps(lines[r]);
        transpose16(square);
        float* to = reinterpret_cast<float*>(const_cast<uint32_t*>(panel.tile(block, step)));
        for (int r = 0; r < kSide; ++r) _mm512_storeu_ps(to + r * kSide, square[r]);
    }
}

// Loads 16 weight rows at elements [k, k + 32); rows and elements beyond the end are zeros.
template <int T> UNISON_INLINE void load_weights(const LinearCall& job, int64_t n, int64_t k) {
    const bf16* w = static_cast<const bf16*>(job.w) + n * job.w_stride + k;
    if (n + kSide <= job.N && k + kStep <= job.K) return tile_load<T>(w, job.w_stride * 2);
    alignas(64) bf16 part[kSide][kStep] = {};
    for (int64_t r = 0; r < std::min(kSide, job.N - n); ++r)
        std::memcpy(part[r], w + r * job.w_stride, static_cast<size_t>(std::min(kStep, job.K - k)) * sizeof(bf16));
    tile_load<T>(part, sizeof part[0]);
}

// Writes a tile of sums, weight rows [n, n + 16) by rows of activations [m, m + 16), as outputs.
void finish_tile(const LinearCall& job, const float* sums, int64_t m, int64_t n) {
    const int64_t width = std::min(kSide, job.N - n);
    const __mmask16 present = static_cast<__mmask16>((1u << width) - 1);
    float bias[kSide] = {};
    if (job.bias != nullptr)
        for (int64_t i = 0; i < width; ++i) bias[i] = widen(static_cast<const bf16*>(job.bias)[n + i]);
    const __m512 shift = _mm512_loadu_ps(bias);
    __m512 square[kSide];
    for (int r = 0; r < kSide; ++r) square[r] = _mm512_load_ps(sums + r * kSide);
    transpose16(square);
    for (int64_t r = 0; r < std::min(kSide, job.M - m); ++r) {
        const __m512 out = job.bias != nullptr ? _mm512_add_ps(square[r], shift) : square[r];
        const int64_t at = (m + r) * job.y_stride + n;
        if (job.y_is_float) _mm512_mask_storeu_ps(static_cast<float*>(job.y) + at, present, out);
        else _mm256_mask_storeu_epi16(static_cast<bf16*>(job.y) + at, present, narrow16(out));
    }
}

// Weight rows [n, n + 32) by one or two blocks of activations.
template <bool TwoBlocks>
void multiply(const LinearCall& job, const Panel& panel, int64_t n, int64_t block, const bf16* ahead) {
    const bool has_second = n + kSide < job.N;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t step = 0; step < panel.steps; ++step) {
        if (ahead != nullptr)
            for (int64_t r = 0; r < kPair; ++r) prefetch(ahead + r * job.w_stride + step * kStep);
        load_weights<4>(job, n, step * kStep);
        tile_load<6>(panel.tile(block, step), kTileRowBytes);
        tile_dot<0, 4, 6>();
        if (TwoBlocks) {
            tile_load<7>(panel.tile(block + 1, step), kTileRowBytes);
            tile_dot<2, 4, 7>();
        }
        if (has_second) {
            load_weights<5>(job, n + kSide, step * kStep);
            tile_dot<1, 5, 6>();
            if (TwoBlocks) tile_dot<3, 5, 7>();
        }
    }
    alignas(64) float sums[4][kPacked];
    tile_store<0>(sums[0], kTileRowBytes);
    tile_store<1>(sums[1], kTileRowBytes);
    tile_store<2>(sums[2], kTileRowBytes);
    tile_store<3>(sums[3], kTileRowBytes);
    for (int b = 0; b < (TwoBlocks ? 2 : 1); ++b)
        for (int half = 0; half < (has_second ? 2 : 1); ++half)
            finish_tile(job, sums[2 * b + half], (block + b) * kSide, n + half * kSide);
}

void multiply_rows(const LinearCall& job, const Panel& panel, int64_t n) {
    const int64_t blocks = (job.M + kSide - 1) / kSide;
    const bf16* next = static_cast<const bf16*>(job.w) + (n + kPair) * job.w_stride;
    for (int64_t block = 0; block < blocks; block += 2) {
        const bf16* ahead = block == 0 && n + 2 * kPair <= job.N ? next : nullptr;
        if (block + 1 < blocks) multiply<true>(job, panel, n, block, ahead);
        else multiply<false>(job, panel, n, block, ahead);
    }
}

void run(const LinearCall& job) {
    const int64_t blocks = (job.M + kSide - 1) / kSide;
    Panel panel{nullptr, (job.K + kStep - 1) / kStep};
    panel.pairs = static_cast<uint32_t*>(scratch(0, static_cast<size_t>(blocks * panel.steps * kPacked) * 4));
    parallel_for(blocks, [&](int64_t block, int) { pack_block(job, block, panel); });
    const int64_t pairs = (job.N + kPair - 1) / kPair, rows = rows_per_item(job.M, job.N, job.K, num_threads());
    const int64_t per_item = std::max<int64_t>(1, rows / kPair), items = (pairs + per_item - 1) / per_item;
    parallel_for(items, [&](int64_t item, int) {
        const FlushSubnormals floats(true);  // of the bias and what follows; the tiles do so by themselves
        configure_tiles();
        for (int64_t pair = item * per_item; pair < std::min(pairs, (item + 1) * per_item); ++pair)
            multiply_rows(job, panel, pair * kPair);
        release_tiles();
    });
}

// A product with rows, columns and elements to spare comes out right, and a row's bits don't depend on its company.
bool comes_out_right() {
    constexpr int64_t kM = 37, kN = 50, kK = 75;
    bf16 x[kM * kK], w[kN * kK];
    float all[kM * kN], alone[kN];
    for (int64_t i = 0; i < kM * kK; ++i) x[i] = narrow<bf16>(static_cast<float>(i * 37 % 101 - 50) / 16.0f);
    for (int64_t i = 0; i < kN * kK; ++i) w[i] = narrow<bf16>(static_cast<float>(i * 53 % 97 - 48) / 32.0f);
    run({x, w, nullptr, all, kK, kK, kN, kM, kN, kK, true});
    for (int64_t m = 0; m < kM; ++m) {
        run({x + m * kK, w, nullptr, alone, kK, kK, kN, 1, kN, kK, true});
        if (std::memcmp(alone, all + m * kN, sizeof alone) != 0) return false;
        for (int64_t n = 0; n < kN; ++n) {
            double sum = 0.0, size = 0.0;
            for (int64_t k = 0; k < kK; ++k) {
                const double product = static_cast<double>(widen(x[m * kK + k])) * static_cast<double>(widen(w[n * kK + k]));
                sum += product, size += product < 0 ? -product : product;
            }
            const double error = sum - static_cast<double>(all[m * kN + n]);
            if (!((error < 0 ? -error : error) <= 1e-5 * size)) return false;
        }
    }
    return true;
}

}  // namespace

int tiles_state() {
    static const int state = !may_use_tiles() ? kTilesRefused : comes_out_right() ? kTilesWork : kTilesWrong;
    return state;
}

void run_tiles(const LinearCall& job) {
    if (job.M > 0 && job.N > 0 && job.K > 0) run(job);
}

#else
int tiles_state() { return kTilesAbsent; }
void run_tiles(const LinearCall&) {}
#endif
}  // namespace unison

extern "C" {

// 0: not built for this machine; 1: used; 2: the system refuses the registers; 3: a test product came out wrong.
UNISON_EXPORT int unison_tiles_state() { return unison::tiles_state(); }
}
