// Sixteen lanes at once, for the kernels that are built for AVX-512 alone.
#pragma once

#include "simd.h"

#if defined(UNISON_AVX2) && defined(__AVX512BF16__) && defined(__AVX512BW__)
namespace unison {

// Sixteen floats rounded to nearest even; NaN is 0x7FC0. None may be subnormal.
UNISON_INLINE __m256i narrow16(__m512 a) {
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a));
    return _mm256_mask_blend_epi16(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), rounded, _mm256_set1_epi16(0x7fc0));
}

// Rows become columns.
UNISON_INLINE void transpose16(__m512 (&rows)[16]) {
    __m512 pairs[16], fours[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const __m512d low = _mm512_castps_pd(pairs[4 * i + j]), high = _mm512_castps_pd(pairs[4 * i + 2 + j]);
            fours[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            fours[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    // fours[4 i + c]: 128-bit part p has column 4 p + c of rows 4 i .. 4 i + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512 a = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0x88);        // parts 0 and 2 of rows 0-3, 4-7
        const __m512 b = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0x88);   // of rows 8-11, 12-15
        const __m512 d = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0xdd);        // parts 1 and 3
        const __m512 e = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0xdd);
        rows[c] = _mm512_shuffle_f32x4(a, b, 0x88);
        rows[8 + c] = _mm512_shuffle_f32x4(a, b, 0xdd);
        rows[4 + c] = _mm512_shuffle_f32x4(d, e, 0x88);
        rows[12 + c] = _mm512_shuffle_f32x4(d, e, 0xdd);
    }
}

}  // namespace unison
#endif
