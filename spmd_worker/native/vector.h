// Vectors of float for the instruction set this file is compiled for, and the few operations the kernels need.
//
// Every operation works lane by lane (or in an order written here), so that what a lane computes depends on nothing but
// that lane. Compiled with -ffp-contract=off: a multiplication and an addition are fused by `fused` and nowhere else, so
// that two instances of one template cannot round differently.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SPMD_AVX512 1
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#define SPMD_AVX2 1
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Whether products take bfloat16 as they are. Intel's cores take longer for the dot product of two pairs than for four
// multiplications and additions of floats: there they are widened, as on processors without the instruction. GCC calls
// these cores by the first whose instructions it finds, clang all of them by an older one.
#if defined(SPMD_AVX512) && defined(__AVX512BF16__) && !defined(__cooperlake__) && !defined(__sapphirerapids__) && \
    !defined(__emeraldrapids__) && !defined(__graniterapids__) && !defined(__graniterapids_d__) &&                 \
    !defined(__diamondrapids__) && !defined(__corei7__)
#define SPMD_BF16_DOTS 1
#endif
// Attention too, but where the tile unit computes some of it, which takes rows as pairs.
#if defined(SPMD_BF16_DOTS) || (defined(SPMD_AVX512) && defined(__AVX512BF16__) && \
                                (defined(__AMX_BF16__) || defined(SPMD_EMULATED_AMX)))
#define SPMD_BF16_DOTS_IN_ATTENTION 1
#endif

#define SPMD_INLINE static inline __attribute__((always_inline))
#define SPMD_INLINE_MEMBER inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Minus zero, not plus: that leaves -0 as it is, so nothing is computed.
SPMD_INLINE Floats broadcast(float value) { return value - Floats{}; }

template <class Vector>
SPMD_INLINE Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector>
SPMD_INLINE void store(void* to, Vector vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// a * b + c, rounded once if the instruction set can.
SPMD_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(SPMD_AVX512)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(SPMD_AVX2)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

SPMD_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// The order of the sum is a tree over halves, the same at every call.
SPMD_INLINE float sum_of_lanes(Floats vector) {
#if defined(SPMD_AVX512)
  const __m256 eight = _mm512_castps512_ps256((__m512)vector) + _mm512_extractf32x8_ps((__m512)vector, 1);
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
#else
  float lanes[kLanes];
  store(lanes, vector);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
#endif
}

SPMD_INLINE float argmax_lane(Floats vector) {
#if defined(SPMD_AVX512)
  return _mm512_reduce_max_ps((__m512)vector);
#else
  float lanes[kLanes];
  store(lanes, vector);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane)
      lanes[lane] = lanes[lane] > lanes[lane + width] ? lanes[lane] : lanes[lane + width];
  return lanes[0];
#endif
}

SPMD_INLINE Ints lane_numbers() {
  Ints numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// 2^rest for rest in [-0.5, 0.5], to 2e-7 of it: the best polynomial of degree 5 that is exact at 0.
SPMD_INLINE Floats exp2_of_rest(Floats rest) {
  Floats power = broadcast(1.3264727e-3f);
  power = fused(power, rest, broadcast(9.671513e-3f));
  power = fused(power, rest, broadcast(5.5507336e-2f));
  power = fused(power, rest, broadcast(2.4022242e-1f));
  power = fused(power, rest, broadcast(6.93147e-1f));
  return fused(power, rest, broadcast(1.0f));
}

// 2 to the power x, to 2e-7 of it; 0 below -126, infinite from 128 on (above 127 without AVX-512). NaN stays NaN.
// `exp2_of_falling` is the same for x that is not above 0, in fewer steps if the instruction set has them.
#if defined(SPMD_AVX512)
SPMD_INLINE Floats exp2_of_falling(Floats x) {
  // Subnormal results are zero: processors take hundreds of cycles for them.
  const __m512 lowest = _mm512_set1_ps(-126.0f);
  const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)x, lowest, _CMP_NLT_UQ);
  const __m512 inside = _mm512_max_ps(lowest, (__m512)x);  // the second of the two if one is NaN
  const __m512 whole = _mm512_roundscale_ps(inside, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (Floats)_mm512_maskz_scalef_ps(is_kept, (__m512)exp2_of_rest((Floats)inside - (Floats)whole), whole);
}
// Of large inputs only infinity would have another result, so they are clamped.
SPMD_INLINE Floats exp2(Floats x) { return exp2_of_falling((Floats)_mm512_min_ps(_mm512_set1_ps(200.0f), (__m512)x)); }
#else
SPMD_INLINE Floats exp2(Floats x) {
  const Floats lowest = broadcast(-126.0f), highest = broadcast(127.0f), magic = broadcast(12582912.0f);
  const auto is_low = x < lowest;
  const auto is_high = x > highest;
  Floats inside = is_low ? lowest : x;
  inside = is_high ? highest : inside;
  const Floats whole = (inside + magic) - magic;
  const Ints exponent = __builtin_convertvector(whole, Ints) + 127;
  const Floats scaled = exp2_of_rest(inside - whole) * (Floats)(exponent << 23);
  const Floats kept = is_low ? Floats{} : scaled;
  return is_high ? broadcast(kInfinity) : kept;
}
SPMD_INLINE Floats exp2_of_falling(Floats x) { return exp2(x); }
#endif

// x / (1 + e^-x).
SPMD_INLINE Floats silu(Floats x) {
  return x / (broadcast(1.0f) + exp2(x * broadcast(-1.44269504088896340736f)));
}

// x / (1 + e^(-1.702 x)).
SPMD_INLINE Floats quick_gelu(Floats x) {
  return x / (broadcast(1.0f) + exp2(x * broadcast(-1.702f * 1.44269504088896340736f)));
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), as x times a logistic function (https://arxiv.org/abs/1606.08415).
SPMD_INLINE Floats gelu_tanh(Floats x) {
  const Floats inner = x * fused(x * x, broadcast(0.044715f), broadcast(1.0f));
  return x / (broadcast(1.0f) + exp2(inner * broadcast(-2.0f * 0.7978845608028654f * 1.44269504088896340736f)));
}

// x times the normal CDF at x: half of erfc(|x| / sqrt(2)) is the tail beyond |x| (Abramowitz and
// Stegun, Handbook of Mathematical Functions, 7.1.26, to 1.5e-7).
SPMD_INLINE Floats gelu(Floats x) {
  const Floats one = broadcast(1.0f), far = larger(x, -x) * broadcast(0.70710678118654752f);
  const Floats t = one / fused(far, broadcast(0.3275911f), one);
  Floats sum = fused(t, broadcast(1.061405429f), broadcast(-1.453152027f));
  sum = fused(sum, t, broadcast(1.421413741f));
  sum = fused(sum, t, broadcast(-0.284496736f));
  sum = fused(sum, t, broadcast(0.254829592f));
  const Floats beyond = broadcast(0.5f) * sum * t * exp2(far * far * broadcast(-1.44269504088896340736f));
  return x * (x > Floats{} ? one - beyond : beyond);
}

// tanh(x) to 3e-7 of it: its series near 0, otherwise by an exponential.
SPMD_INLINE Floats tanh_of(Floats x) {
  const Floats square = x * x;
  Floats series = fused(square, broadcast(62.0f / 2835.0f), broadcast(-17.0f / 315.0f));
  series = fused(series, square, broadcast(2.0f / 15.0f));
  series = fused(series, square, broadcast(-1.0f / 3.0f));
  series = fused(series * square, x, x);
  const Floats one = broadcast(1.0f), power = exp2(x * broadcast(2.0f * 1.44269504088896340736f));
  const Floats far = one - broadcast(2.0f) / (one + power);
  return square < broadcast(0.0625f) ? series : far;
}

// cap * tanh(x / cap).
SPMD_INLINE Floats bounded(Floats x, float cap) { return tanh_of(x / broadcast(cap)) * broadcast(cap); }

// ---- numbers of 8 and 16 bits <-> of 32 bits, where compilers make 4 to 60 instructions of one --------------------

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

SPMD_INLINE Words zero_extended(Halves halves) {
#if defined(SPMD_AVX512)
  return (Words)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(SPMD_AVX2)
  return (Words)_mm256_cvtepu16_epi32((__m128i)halves);
#else
  return __builtin_convertvector(halves, Words);
#endif
}

SPMD_INLINE Words zero_extended(Bytes bytes) {
#if defined(SPMD_AVX512)
  return (Words)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(SPMD_AVX2)
  return (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
  return __builtin_convertvector(bytes, Words);
#endif
}

// Of numbers below 2^16.
SPMD_INLINE Halves low_halves(Words words) {
#if defined(SPMD_AVX512)
  return (Halves)_mm512_cvtepi32_epi16((__m512i)words);
#elif defined(SPMD_AVX2)
  return (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)words), _mm256_extracti128_si256((__m256i)words, 1));
#else
  return __builtin_convertvector(words, Halves);
#endif
}

SPMD_INLINE Bytes low_bytes(Words words) {
#if defined(SPMD_AVX512)
  return (Bytes)_mm512_cvtepi32_epi8((__m512i)words);
#elif defined(SPMD_AVX2)
  const Halves halves = low_halves(words & 0xffu);
  return (Bytes)_mm_cvtsi128_si64(_mm_packus_epi16((__m128i)halves, (__m128i)halves));
#else
  return __builtin_convertvector(words, Bytes);
#endif
}

// ---- bfloat16: the upper half of a float --------------------------------------------------------------------------

// To the nearest, ties to even; any NaN becomes the quiet one.
SPMD_INLINE Words rounded_bits(Floats x) {
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return x == x ? rounded : Words{} + 0x7fc0u;
}

#if defined(SPMD_AVX512) && defined(__AVX512BF16__)
// The processor's own rounding, which flushes subnormal floats to zero.
SPMD_INLINE Halves narrowed_vector(Floats x) { return (Halves)_mm512_cvtneps_pbh((__m512)x); }
SPMD_INLINE Floats rounded(Floats x) { return (Floats)(zero_extended(narrowed_vector(x)) << 16); }
#else
SPMD_INLINE Halves narrowed_vector(Floats x) { return low_halves(rounded_bits(x)); }
SPMD_INLINE Floats rounded(Floats x) { return (Floats)(rounded_bits(x) << 16); }
#endif

// The float values of the first (low) or second (high) of each pair of bfloat16.
SPMD_INLINE Floats first_of_pairs(Words pairs) { return (Floats)(pairs << 16); }
SPMD_INLINE Floats second_of_pairs(Words pairs) { return (Floats)(pairs & 0xffff0000u); }

SPMD_INLINE float widened(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

SPMD_INLINE uint16_t narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return value == value ? uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : uint16_t(0x7fc0u);
}

// ---- one vector's worth of elements in memory <-> floats ----------------------------------------------------------

SPMD_INLINE Floats load_floats(const float* from) { return load<Floats>(from); }
SPMD_INLINE Floats load_floats(const uint16_t* from) {
  return (Floats)(zero_extended(load<Halves>(from)) << 16);
}

SPMD_INLINE void store_floats(float* to, Floats vector) { store(to, vector); }
SPMD_INLINE void store_floats(uint16_t* to, Floats vector) {
  store(to, narrowed_vector(vector));
}
