// The eight tile registers of AMX, and the instructions that a linear layer needs. -DUNISON_EMULATE_TILES computes the same in
// plain C++, so that the code above them is tested on any machine.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, LDTILECFG and TDPBF16PS; arch_prctl(2).
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(UNISON_EMULATE_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && !defined(UNISON_NO_TILES))
#if defined(UNISON_AVX2) && defined(__AVX512BF16__) && defined(__AVX512BW__)  // the code around them needs these
#define UNISON_TILES 1
#endif
#endif

#if defined(UNISON_TILES)
namespace unison {

constexpr int kTileRowBytes = 64, kTileHeight = 16;

#if defined(UNISON_EMULATE_TILES)

struct EmulatedTile {
    alignas(64) unsigned char rows[kTileHeight][kTileRowBytes];
};
inline EmulatedTile& emulated_tile(int tile) {
    static thread_local EmulatedTile tiles[8];
    return tiles[tile];
}
inline bool may_use_tiles() { return true; }
inline void configure_tiles() {}
inline void release_tiles() {}
template <int T> inline void tile_zero() { std::memset(emulated_tile(T).rows, 0, sizeof(EmulatedTile)); }
template <int T> inline void tile_load(const void* from, int64_t stride_bytes) {
    for (int r = 0; r < kTileHeight; ++r)
        std::memcpy(emulated_tile(T).rows[r], static_cast<const char*>(from) + r * stride_bytes, kTileRowBytes);
}
template <int T> inline void tile_store(void* to, int64_t stride_bytes) {
    for (int r = 0; r < kTileHeight; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride_bytes, emulated_tile(T).rows[r], kTileRowBytes);
}
// Pairs of 32 products: even and odd elements in chains of their own, whose sum is added to C. Subnormals are zero.
template <int C, int A, int B> inline void tile_dot() {
    const FlushSubnormals floats(true);
    for (int m = 0; m < kTileHeight; ++m) {
        bf16 a[32];
        float c[16], even[16] = {}, odd[16] = {};
        std::memcpy(a, emulated_tile(A).rows[m], sizeof a);
        std::memcpy(c, emulated_tile(C).rows[m], sizeof c);
        for (int k = 0; k < 16; ++k) {
            bf16 b[32];
            std::memcpy(b, emulated_tile(B).rows[k], sizeof b);
            for (int n = 0; n < 16; ++n) {
                even[n] = __builtin_fmaf(widen(a[2 * k]), widen(b[2 * n]), even[n]);
                odd[n] = __builtin_fmaf(widen(a[2 * k + 1]), widen(b[2 * n + 1]), odd[n]);
            }
        }
        for (int n = 0; n < 16; ++n) c[n] += even[n] + odd[n];
        std::memcpy(emulated_tile(C).rows[m], c, sizeof c);
    }
}

#else

// Asks the system for the tile registers of this process; false where it refuses.
bool may_use_tiles();
// All eight tiles as 16 rows of 64 bytes, for the calling thread.
inline void configure_tiles() {
    struct alignas(64) Configuration {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } configuration;
    for (int i = 0; i < 8; ++i) configuration.row_bytes[i] = kTileRowBytes, configuration.rows[i] = kTileHeight;
    _tile_loadconfig(&configuration);
}
inline void release_tiles() { _tile_release(); }
template <int T> UNISON_INLINE void tile_zero() { _tile_zero(T); }
template <int T> UNISON_INLINE void tile_load(const void* from, int64_t stride_bytes) {
    _tile_loadd(T, from, stride_bytes);
}
template <int T> UNISON_INLINE void tile_store(void* to, int64_t stride_bytes) { _tile_stored(T, to, stride_bytes); }
template <int C, int A, int B> UNISON_INLINE void tile_dot() { _tile_dpbf16ps(C, A, B); }

#endif
}  // namespace unison
#endif
