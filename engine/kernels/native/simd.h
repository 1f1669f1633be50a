// Eight fp32 lanes, the only vector type of these kernels, and the arithmetic whose bits never depend on the machine.
//
// Everything here is made of IEEE operations that round correctly (add, mul, div, sqrt, fused multiply-add) and of
// integer operations, in an order that is part of the definition. The AVX2, NEON and portable variants therefore give
// equal bits. NaNs stay NaN; only their payload is unspecified in fp32, and narrowing to bf16 makes it 0x7FC0.
//
//   hsum    t[j] = a[j] + a[j+4] (j < 4), u[j] = t[j] + t[j+2] (j < 2), u[0] + u[1]
//   max8    a > b ? a : b, lane by lane (b when unordered); min8 likewise with <
//   exp8    see there: error <= 2 ulp, exp(-inf) = 0
//
// Compile with -ffp-contract=off and without -ffast-math. -DUNISON_SCALAR forces the portable variant.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(UNISON_SCALAR) && defined(__AVX2__) && defined(__FMA__)
#define UNISON_AVX2 1
#include <immintrin.h>
#elif !defined(UNISON_SCALAR) && defined(__aarch64__)
#define UNISON_NEON 1
#include <arm_neon.h>
#endif

#define UNISON_INLINE inline __attribute__((always_inline))

namespace unison {

constexpr int kLanes = 8;

// Storage of a bfloat16; arithmetic happens in fp32.
struct bf16 {
    uint16_t bits;
};

UNISON_INLINE float widen(float x) { return x; }
UNISON_INLINE float widen(bf16 x) {
    const uint32_t word = static_cast<uint32_t>(x.bits) << 16;
    float out;
    std::memcpy(&out, &word, 4);
    return out;
}

// Round to nearest even; NaN becomes 0x7FC0.
UNISON_INLINE bf16 narrow_bf16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    if ((word & 0x7fffffffu) > 0x7f800000u) return bf16{0x7fc0};
    return bf16{static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16)};
}
template <class T> UNISON_INLINE T narrow(float x);
template <> UNISON_INLINE float narrow<float>(float x) { return x; }
template <> UNISON_INLINE bf16 narrow<bf16>(float x) { return narrow_bf16(x); }

UNISON_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }
UNISON_INLINE void prefetch_to_l2(const void* address) { __builtin_prefetch(address, 0, 2); }
UNISON_INLINE void prefetch_to_write(const void* address) { __builtin_prefetch(address, 1, 3); }

// ---- the lanes: one struct and its primitive operations per instruction set ----
#if defined(UNISON_AVX2)

constexpr const char* kVariant = "avx2";
struct F8 { __m256 v; };
struct I8 { __m256i v; };

UNISON_INLINE F8 zero8() { return {_mm256_setzero_ps()}; }
UNISON_INLINE F8 set8(float x) { return {_mm256_set1_ps(x)}; }
UNISON_INLINE I8 iset8(int32_t x) { return {_mm256_set1_epi32(x)}; }
UNISON_INLINE F8 load8(const float* p) { return {_mm256_loadu_ps(p)}; }
UNISON_INLINE void store8(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
UNISON_INLINE F8 add8(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
UNISON_INLINE F8 sub8(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
UNISON_INLINE F8 mul8(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
UNISON_INLINE F8 div8(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
UNISON_INLINE F8 sqrt8(F8 a) { return {_mm256_sqrt_ps(a.v)}; }
UNISON_INLINE F8 max8(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }
UNISON_INLINE F8 min8(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }
UNISON_INLINE F8 fma8(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
UNISON_INLINE F8 as_float(I8 a) { return {_mm256_castsi256_ps(a.v)}; }
UNISON_INLINE I8 as_int(F8 a) { return {_mm256_castps_si256(a.v)}; }
UNISON_INLINE I8 iadd8(I8 a, I8 b) { return {_mm256_add_epi32(a.v, b.v)}; }
UNISON_INLINE I8 isub8(I8 a, I8 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
template <int N> UNISON_INLINE I8 ishl8(I8 a) { return {_mm256_slli_epi32(a.v, N)}; }
template <int N> UNISON_INLINE I8 isar8(I8 a) { return {_mm256_srai_epi32(a.v, N)}; }

// Eight consecutive bf16, lane j = p[j].
UNISON_INLINE F8 load8(const bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
// Sixteen consecutive bf16 as pairs: even lane j = p[2j], odd lane j = p[2j+1].
UNISON_INLINE F8 load_even(const bf16* p) {
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(word, 16))};
}
UNISON_INLINE F8 load_odd(const bf16* p) {
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_and_si256(word, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
UNISON_INLINE __m256i rounded_words(F8 a) {  // the bf16 of each lane in the low half of a 32-bit word
    const __m256i word = _mm256_castps_si256(a.v);
    const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(word, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), is_nan);
}
UNISON_INLINE void store8(bf16* p, F8 a) {
    const __m256i word = rounded_words(a);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(word, word), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
UNISON_INLINE F8 round_bf16(F8 a) { return {_mm256_castsi256_ps(_mm256_slli_epi32(rounded_words(a), 16))}; }

UNISON_INLINE float hsum(F8 a) {
    const __m128 t = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 u = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
}
// Lane i of the result is hsum(a[i]): the same tree, eight sums at once.
UNISON_INLINE F8 hsum_each(const F8 (&a)[8]) {
    __m256 t[4], u[2];
    for (int i = 0; i < 4; ++i) {  // low half: four partial sums of a[i], high half: of a[i+4]
        const __m256 low = _mm256_permute2f128_ps(a[i].v, a[i + 4].v, 0x20);
        const __m256 high = _mm256_permute2f128_ps(a[i].v, a[i + 4].v, 0x31);
        t[i] = _mm256_add_ps(low, high);
    }
    for (int i = 0; i < 2; ++i) {  // lanes: u0 u1 of a[2i], u0 u1 of a[2i+1]
        const __m256 low = _mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44);
        const __m256 high = _mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee);
        u[i] = _mm256_add_ps(low, high);
    }
    return {_mm256_add_ps(_mm256_shuffle_ps(u[0], u[1], 0x88), _mm256_shuffle_ps(u[0], u[1], 0xdd))};
}

#elif defined(UNISON_NEON)

constexpr const char* kVariant = "neon";
struct F8 { float32x4_t lo, hi; };
struct I8 { int32x4_t lo, hi; };

UNISON_INLINE F8 set8(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
UNISON_INLINE F8 zero8() { return set8(0.0f); }
UNISON_INLINE I8 iset8(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
UNISON_INLINE F8 load8(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
UNISON_INLINE void store8(float* p, F8 a) {
    vst1q_f32(p, a.lo);
    vst1q_f32(p + 4, a.hi);
}
UNISON_INLINE F8 add8(F8 a, F8 b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
UNISON_INLINE F8 sub8(F8 a, F8 b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
UNISON_INLINE F8 mul8(F8 a, F8 b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
UNISON_INLINE F8 div8(F8 a, F8 b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
UNISON_INLINE F8 sqrt8(F8 a) { return {vsqrtq_f32(a.lo), vsqrtq_f32(a.hi)}; }
UNISON_INLINE F8 max8(F8 a, F8 b) {
    return {vbslq_f32(vcgtq_f32(a.lo, b.lo), a.lo, b.lo), vbslq_f32(vcgtq_f32(a.hi, b.hi), a.hi, b.hi)};
}
UNISON_INLINE F8 min8(F8 a, F8 b) {
    return {vbslq_f32(vcltq_f32(a.lo, b.lo), a.lo, b.lo), vbslq_f32(vcltq_f32(a.hi, b.hi), a.hi, b.hi)};
}
UNISON_INLINE F8 fma8(F8 a, F8 b, F8 c) { return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
UNISON_INLINE F8 as_float(I8 a) { return {vreinterpretq_f32_s32(a.lo), vreinterpretq_f32_s32(a.hi)}; }
UNISON_INLINE I8 as_int(F8 a) { return {vreinterpretq_s32_f32(a.lo), vreinterpretq_s32_f32(a.hi)}; }
UNISON_INLINE I8 iadd8(I8 a, I8 b) { return {vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)}; }
UNISON_INLINE I8 isub8(I8 a, I8 b) { return {vsubq_s32(a.lo, b.lo), vsubq_s32(a.hi, b.hi)}; }
template <int N> UNISON_INLINE I8 ishl8(I8 a) { return {vshlq_n_s32(a.lo, N), vshlq_n_s32(a.hi, N)}; }
template <int N> UNISON_INLINE I8 isar8(I8 a) { return {vshrq_n_s32(a.lo, N), vshrq_n_s32(a.hi, N)}; }

UNISON_INLINE F8 load8(const bf16* p) {
    const uint16x8_t half = vld1q_u16(reinterpret_cast<const uint16_t*>(p));
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(half), 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(half), 16))};
}
UNISON_INLINE F8 load_even(const bf16* p) {
    const uint16_t* word = reinterpret_cast<const uint16_t*>(p);
    return {vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(word)), 16)),
            vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(word + 8)), 16))};
}
UNISON_INLINE F8 load_odd(const bf16* p) {
    const uint16_t* word = reinterpret_cast<const uint16_t*>(p);
    const uint32x4_t mask = vdupq_n_u32(0xffff0000u);
    return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(vld1q_u16(word)), mask)),
            vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(vld1q_u16(word + 8)), mask))};
}
UNISON_INLINE uint32x4_t rounded_words(float32x4_t a) {
    const uint32x4_t word = vreinterpretq_u32_f32(a);
    const uint32x4_t lsb = vandq_u32(vshrq_n_u32(word, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(word, vaddq_u32(lsb, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(a, a), vshrq_n_u32(sum, 16), vdupq_n_u32(0x7fc0));
}
UNISON_INLINE void store8(bf16* p, F8 a) {
    const uint16x8_t packed = vcombine_u16(vmovn_u32(rounded_words(a.lo)), vmovn_u32(rounded_words(a.hi)));
    vst1q_u16(reinterpret_cast<uint16_t*>(p), packed);
}
UNISON_INLINE F8 round_bf16(F8 a) {
    return {vreinterpretq_f32_u32(vshlq_n_u32(rounded_words(a.lo), 16)),
            vreinterpretq_f32_u32(vshlq_n_u32(rounded_words(a.hi), 16))};
}
UNISON_INLINE float hsum(F8 a) {
    const float32x4_t t = vaddq_f32(a.lo, a.hi);
    const float32x2_t u = vadd_f32(vget_low_f32(t), vget_high_f32(t));
    return vget_lane_f32(u, 0) + vget_lane_f32(u, 1);
}
UNISON_INLINE F8 hsum_each(const F8 (&a)[8]) {
    float sums[8];
    for (int i = 0; i < 8; ++i) sums[i] = hsum(a[i]);
    return load8(sums);
}

#else

constexpr const char* kVariant = "scalar";
struct F8 { float v[8]; };
struct I8 { int32_t v[8]; };

template <class Out, class Body> UNISON_INLINE Out each8(Body body) {
    Out out;
    for (int j = 0; j < 8; ++j) out.v[j] = body(j);
    return out;
}
UNISON_INLINE F8 set8(float x) { return each8<F8>([&](int) { return x; }); }
UNISON_INLINE F8 zero8() { return set8(0.0f); }
UNISON_INLINE I8 iset8(int32_t x) { return each8<I8>([&](int) { return x; }); }
UNISON_INLINE F8 load8(const float* p) { return each8<F8>([&](int j) { return p[j]; }); }
UNISON_INLINE void store8(float* p, F8 a) { std::memcpy(p, a.v, sizeof a.v); }
UNISON_INLINE F8 add8(F8 a, F8 b) { return each8<F8>([&](int j) { return a.v[j] + b.v[j]; }); }
UNISON_INLINE F8 sub8(F8 a, F8 b) { return each8<F8>([&](int j) { return a.v[j] - b.v[j]; }); }
UNISON_INLINE F8 mul8(F8 a, F8 b) { return each8<F8>([&](int j) { return a.v[j] * b.v[j]; }); }
UNISON_INLINE F8 div8(F8 a, F8 b) { return each8<F8>([&](int j) { return a.v[j] / b.v[j]; }); }
UNISON_INLINE F8 sqrt8(F8 a) { return each8<F8>([&](int j) { return __builtin_sqrtf(a.v[j]); }); }
UNISON_INLINE F8 max8(F8 a, F8 b) { return each8<F8>([&](int j) { return a.v[j] > b.v[j] ? a.v[j] : b.v[j]; }); }
UNISON_INLINE F8 min8(F8 a, F8 b) { return each8<F8>([&](int j) { return a.v[j] < b.v[j] ? a.v[j] : b.v[j]; }); }
UNISON_INLINE F8 fma8(F8 a, F8 b, F8 c) {
    return each8<F8>([&](int j) { return __builtin_fmaf(a.v[j], b.v[j], c.v[j]); });
}
UNISON_INLINE F8 as_float(I8 a) {
    F8 out;
    std::memcpy(out.v, a.v, sizeof out.v);
    return out;
}
UNISON_INLINE I8 as_int(F8 a) {
    I8 out;
    std::memcpy(out.v, a.v, sizeof out.v);
    return out;
}
UNISON_INLINE int32_t wrap32(uint32_t word) { return static_cast<int32_t>(word); }
UNISON_INLINE I8 iadd8(I8 a, I8 b) {
    return each8<I8>([&](int j) { return wrap32(static_cast<uint32_t>(a.v[j]) + static_cast<uint32_t>(b.v[j])); });
}
UNISON_INLINE I8 isub8(I8 a, I8 b) {
    return each8<I8>([&](int j) { return wrap32(static_cast<uint32_t>(a.v[j]) - static_cast<uint32_t>(b.v[j])); });
}
template <int N> UNISON_INLINE I8 ishl8(I8 a) {
    return each8<I8>([&](int j) { return wrap32(static_cast<uint32_t>(a.v[j]) << N); });
}
template <int N> UNISON_INLINE I8 isar8(I8 a) { return each8<I8>([&](int j) { return a.v[j] >> N; }); }

UNISON_INLINE F8 load8(const bf16* p) { return each8<F8>([&](int j) { return widen(p[j]); }); }
UNISON_INLINE F8 load_even(const bf16* p) { return each8<F8>([&](int j) { return widen(p[2 * j]); }); }
UNISON_INLINE F8 load_odd(const bf16* p) { return each8<F8>([&](int j) { return widen(p[2 * j + 1]); }); }
UNISON_INLINE void store8(bf16* p, F8 a) {
    for (int j = 0; j < 8; ++j) p[j] = narrow_bf16(a.v[j]);
}
UNISON_INLINE F8 round_bf16(F8 a) { return each8<F8>([&](int j) { return widen(narrow_bf16(a.v[j])); }); }
UNISON_INLINE float hsum(F8 a) {
    float t[4];
    for (int j = 0; j < 4; ++j) t[j] = a.v[j] + a.v[j + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}
UNISON_INLINE F8 hsum_each(const F8 (&a)[8]) {
    return each8<F8>([&](int j) { return hsum(a[j]); });
}

#endif

// Keeps a value that was just loaded in a register, where the compiler would load it again for each use.
UNISON_INLINE void hold(F8& a) {
#if defined(UNISON_AVX2)
    asm("" : "+x"(a.v));
#elif defined(UNISON_NEON)
    asm("" : "+w"(a.lo), "+w"(a.hi));
#else
    (void)a;
#endif
}

// Takes subnormal operands and results for zero during the life of this object, if asked to and where the CPU can.
class FlushSubnormals {
#if defined(__x86_64__)
  public:
    explicit FlushSubnormals(bool wanted) : saved_(__builtin_ia32_stmxcsr()), wanted_(wanted) {
        if (wanted_) __builtin_ia32_ldmxcsr(saved_ | kFlush);
    }
    ~FlushSubnormals() {
        if (wanted_) __builtin_ia32_ldmxcsr(saved_);
    }

  private:
    static constexpr unsigned kFlush = 0x8040;  // FTZ and DAZ
    unsigned saved_;
    bool wanted_;
#elif defined(__aarch64__)
  public:
    explicit FlushSubnormals(bool wanted) : wanted_(wanted) {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        if (wanted_) asm volatile("msr fpcr, %0" ::"r"(saved_ | kFlush));
    }
    ~FlushSubnormals() {
        if (wanted_) asm volatile("msr fpcr, %0" ::"r"(saved_));
    }

  private:
    static constexpr uint64_t kFlush = uint64_t{1} << 24;
    uint64_t saved_;
    bool wanted_;
#else
  public:
    explicit FlushSubnormals(bool) {}
#endif
};

// ---- built from the primitives: one definition for every machine ----

// Round each lane to the storage type and back.
template <class T> UNISON_INLINE F8 round_to(F8 a);
template <> UNISON_INLINE F8 round_to<float>(F8 a) { return a; }
template <> UNISON_INLINE F8 round_to<bf16>(F8 a) { return round_bf16(a); }

// The first n (0..8) elements, the other lanes `fill`; never touches memory beyond them.
template <class T> UNISON_INLINE F8 load_part(const T* p, int n, float fill = 0.0f) {
    float lanes[8];
    for (int j = 0; j < 8; ++j) lanes[j] = j < n ? widen(p[j]) : fill;
    return load8(lanes);
}
template <class T> UNISON_INLINE void store_part(T* p, F8 a, int n) {
    float lanes[8];
    store8(lanes, a);
    for (int j = 0; j < n; ++j) p[j] = narrow<T>(lanes[j]);
}

// Same tree as hsum, with max; NaN lanes may or may not show, so look for them elsewhere.
UNISON_INLINE float hmax(F8 a) {
    float v[8];
    store8(v, a);
    for (int width = 4; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) v[j] = v[j] > v[j + width] ? v[j] : v[j + width];
    return v[0];
}

// e^x within 2 ulp for every x (results below 2^-126 are denormal and within one unit of 2^-149). x = n ln2 + r with
// |r| <= ln2/2 (Cody and Waite, two constants, fused), e^r by its degree-7 Taylor polynomial (truncation 5e-9
// relative), then two exact powers of two, so that denormals and infinities come out of the last multiplication.
// exp(-inf) = 0, exp(inf) = inf, NaN gives NaN.
UNISON_INLINE F8 exp8(F8 x) {
    const F8 magic = set8(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
    x = max8(set8(-105.0f), min8(set8(89.0f), x));  // NaN is the second operand and comes through
    const F8 z = fma8(x, set8(0x1.715476p+0f), magic);
    const F8 n = sub8(z, magic);
    F8 r = fma8(n, set8(-0x1.62e400p-1f), x);
    r = fma8(n, set8(-0x1.7f7d1cp-20f), r);
    F8 p = fma8(r, set8(0x1.a01a02p-13f), set8(0x1.6c16c2p-10f));
    p = fma8(p, r, set8(0x1.111112p-7f));
    p = fma8(p, r, set8(0x1.555556p-5f));
    p = fma8(p, r, set8(0x1.555556p-3f));
    p = fma8(p, r, set8(0.5f));
    p = fma8(p, r, set8(1.0f));
    p = fma8(p, r, set8(1.0f));
    const I8 exponent = isub8(as_int(z), as_int(magic));
    const I8 half = isar8<1>(exponent);
    const F8 first = as_float(ishl8<23>(iadd8(half, iset8(127))));
    const F8 second = as_float(ishl8<23>(iadd8(isub8(exponent, half), iset8(127))));
    return mul8(mul8(p, first), second);
}

// x / (1 + e^-x); NaN gives NaN, -inf gives NaN as in torch.
UNISON_INLINE F8 silu8(F8 x) { return div8(x, add8(set8(1.0f), exp8(sub8(zero8(), x)))); }

// Natural logarithm of a positive, finite, normal double, relative error below 1e-13; no libm, whose bits differ
// between versions.
inline double log_positive(double x) {
    uint64_t word;
    std::memcpy(&word, &x, 8);
    int64_t exponent = static_cast<int64_t>(word >> 52) - 1023;
    word = (word & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    std::memcpy(&m, &word, 8);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1;
    }
    const double f = (m - 1.0) / (m + 1.0);  // log m = 2 atanh f, |f| < 0.172
    const double s = f * f;
    double p = 1.0 / 19.0;
    for (int k = 17; k >= 1; k -= 2) p = __builtin_fma(p, s, 1.0 / k);
    return __builtin_fma(static_cast<double>(exponent), 0.69314718055994530942, 2.0 * f * p);
}

}  // namespace unison
