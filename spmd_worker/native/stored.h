// Weights as their files store them, in 4 or 8 bits a number, which a product expands to panels of bfloat16 (gemm.h) while
// it reads them.
//
// The expanded numbers are those of the dequantised weight, rounded once: value = (number - zero) * scale in float, a
// number's level times scale, or number times scale less a minimum. So the product has the bits of one with the dequantised
// weight, and reads a quarter of its bytes, or half of them. (AVX-512's rounding takes subnormal values, below 1.2e-38, as
// zero.)
//
// Packed, a weight is a run of panels of 16 outputs. A panel is a line of 64 bytes with its head; its numbers, for inputs
// filled up to a multiple of 128; the scales of its groups of inputs; and what is left up to a multiple of 64 bytes. A group
// of integers (GPTQ, AWQ and their like) has 16 floats, the scales, and 16 bytes, the zero points, one of NF4 (bitsandbytes)
// has zeros for them; a group of FP4 (MXFP4) has 16 exponents, one of FP8 (e4m3) 16 floats. A group of GGUF's numbers has 16
// steps and 16 steps of minima in float16, and 16 whole numbers, in a byte each, by which the latter are multiplied, and 16
// by which the former are: of affine ones of 8 bits 16 more, for its later 16 inputs. Its products with numbers are exact in
// float. Numbers are in one of two orders, that of the library (`spmd_stored_are_rows`):
//
//   pairs  4 bits: a block of 256 bytes for every 32 inputs: four lines, of which line i has outputs i, 4 + i, 8 + i and
//          12 + i, 16 bytes each: byte b has input b in its low bits, and input 16 + b in its high ones. FP8: such a
//          block for every 16 inputs. Affine ones of 8 bits: 16 bytes for every input, one of each output
//   rows   for every 128 inputs a line of each output: half b of 32 has input b in its lowest bits, then 32 + b, 64 + b,
//          96 + b; FP8 two lines, of which half b has input b in its low byte and 32 + b in its high one, a byte
//          beginning with three bits of the exponent, then the sign, then what is left: `fp8_of_row`; affine ones of 8 bits
//          two lines, input by input
//
// Expanding 4 bits. In a group an output has 16 values. They are computed once, and numbers are looked up. Vector
// instructions take panels as pairs of inputs of 16 outputs: `PairExpansion` looks up low and high bytes, 16 numbers of an
// output at a time, and three steps of interleaving put pairs side by side. Line i of a block has the outputs that the
// interleaving takes from its vector i. Tiles take outputs as rows, too: `RowExpansion` looks up 32 numbers of an output,
// which is all. Groups of FP4 are short, and their scales powers of two: pairs come from a common table, and their exponents
// are added afterwards.
//
// Expanding FP8. The last bit of the exponent and the mantissa choose one of 16 values of the output. What is left of the
// exponent is added to that of the value, as it is even: rounding does not depend on exponents. Numbers without an exponent
// (zero, and subnormal ones) have a table of their own, which is made when one is found. Scales that are too small for this,
// zero among them, are multiplied number by number. NaN is not looked for: files with it are refused.
//
// Expanding affine numbers of 8 bits. They are converted: in pairs a vector has an input of outputs, in rows one's inputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "vector.h"

constexpr int64_t kLine = 64, kBlockInputs = 32, kLineInputs = 128;

enum StoredKind : int32_t { kIntegers, kFp4, kNf4, kFp8, kAffine4 = 5, kIq4, kAffine8 };
constexpr int32_t kSmallFp8 = 4;  // a kind of tables
constexpr int kNumKinds = 8;

// Scales from here on have expanded values that are not subnormal.
constexpr float kLeastFp8Scale = 0x1p-100f;

// Inputs of a group, a multiple of 32, and how its scales are stored.
struct StoredHead {
  int32_t group_inputs, kind;

  int64_t group_bytes() const {
    constexpr uint8_t kOfOutput[kNumKinds] = {5, 1, 5, 4, 0, 6, 6, 7};
    return kPanel * kOfOutput[kind];
  }
  // Of a panel's numbers of an input.
  int64_t input_bytes() const { return kind == kFp8 || kind == kAffine8 ? kPanel : kPanel / 2; }
  int64_t number_bytes(int64_t num_inputs) const {
    return (num_inputs + kLineInputs - 1) / kLineInputs * kLineInputs * input_bytes();
  }
};

SPMD_INLINE StoredHead stored_head(const uint8_t* panel) {
  StoredHead head;
  std::memcpy(&head, panel, sizeof head);
  return head;
}

inline int64_t stored_panel_bytes(const uint8_t* panel, int64_t num_inputs) {
  const StoredHead head = stored_head(panel);
  const int64_t scales = num_inputs / head.group_inputs * head.group_bytes();
  return kLine + head.number_bytes(num_inputs) + (scales + kLine - 1) / kLine * kLine;
}

// Values of a group's numbers, as bfloat16: line i has those of the outputs of line i of a block.
struct NumberTables {
  alignas(64) uint8_t low[4][kLine], high[4][kLine];
};

// By `StoredKind`; of FP8 those of the exponents 0 and 1, were 0 one like others, and then those without an exponent.
alignas(64) constexpr float kLevels[kNumKinds][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f},
    // https://arxiv.org/abs/2305.14314, appendix E.
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
     0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    {8 * 0x1p-10f, 9 * 0x1p-10f, 10 * 0x1p-10f, 11 * 0x1p-10f, 12 * 0x1p-10f, 13 * 0x1p-10f, 14 * 0x1p-10f,
     15 * 0x1p-10f, 8 * 0x1p-9f, 9 * 0x1p-9f, 10 * 0x1p-9f, 11 * 0x1p-9f, 12 * 0x1p-9f, 13 * 0x1p-9f, 14 * 0x1p-9f,
     15 * 0x1p-9f},
    {0, 1 * 0x1p-9f, 2 * 0x1p-9f, 3 * 0x1p-9f, 4 * 0x1p-9f, 5 * 0x1p-9f, 6 * 0x1p-9f, 7 * 0x1p-9f,
     0, 1 * 0x1p-9f, 2 * 0x1p-9f, 3 * 0x1p-9f, 4 * 0x1p-9f, 5 * 0x1p-9f, 6 * 0x1p-9f, 7 * 0x1p-9f},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};

#if defined(SPMD_AVX512)
constexpr int kVectorBytes = 64;  // of a vector
typedef __m512i ByteVector;
#define SPMD_OF_BYTES(operation) _mm512_##operation
#define SPMD_ALL_BYTES(operation) _mm512_##operation##_si512
#elif defined(SPMD_AVX2)
constexpr int kVectorBytes = 32;
typedef __m256i ByteVector;
#define SPMD_OF_BYTES(operation) _mm256_##operation
#define SPMD_ALL_BYTES(operation) _mm256_##operation##_si256
#endif


// kLanes numbers of float16, which are finite.
SPMD_INLINE Floats floats_of_halves(const uint8_t* from) {
#if defined(SPMD_AVX512)
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(SPMD_AVX2) && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
  const Words bits = zero_extended(load<Halves>(from));
  return (Floats)((bits & 0x8000u) << 16 | (bits & 0x7fffu) << 13) * broadcast(0x1p112f);
#endif
}

// kLanes whole numbers of 8 bits and a sign.
SPMD_INLINE Floats floats_of_bytes(const uint8_t* from) {
#if defined(SPMD_AVX512)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif defined(SPMD_AVX2)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load<int64_t>(from))));
#else
  return __builtin_convertvector((Ints)(zero_extended(load<Bytes>(from)) << 24) >> 24, Floats);
#endif
}

// Of kLanes outputs of a group: value = (level - zero) * scale + offset. `later` are scales of its later 16 inputs.
struct GroupScales {
  Floats scales, zeros, offsets, later;
};

// From `output` on. An offset of minus zero changes no product.
SPMD_INLINE GroupScales load_scales(const uint8_t* group, int32_t kind, int output) {
  GroupScales found = {Floats{}, Floats{}, broadcast(-0.0f), Floats{}};
  if (kind == kFp4) {
    const Words exponents = zero_extended(load<Bytes>(group + output));
    // 2^-127 is subnormal.
    found.scales = (Floats)(exponents == 0 ? Words{} + (1u << 22) : exponents << 23);
  } else if (kind == kFp8 || kind == kSmallFp8) {
    found.scales = load<Floats>(group + output * 4);
  } else if (kind >= kAffine4) {
    const uint8_t* const factors = group + kPanel * 5 + output;
    const Floats steps = floats_of_halves(group + output * 2);
    const Floats minima = floats_of_halves(group + (kPanel + output) * 2) * floats_of_bytes(factors - kPanel);
    found.scales = steps * floats_of_bytes(factors), found.offsets = -minima;
    if (kind == kAffine8) found.later = steps * floats_of_bytes(factors + kPanel);
  } else {
    found.scales = load<Floats>(group + output * 4);
    found.zeros = __builtin_convertvector((Ints)zero_extended(load<Bytes>(group + kPanel * 4 + output)), Floats);
  }
  return found;
}

// To the nearest, ties to even, in the upper halves: weights are finite.
SPMD_INLINE Words rounded_up_halves(Floats value) {
  const Words bits = (Words)value;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

// Each lane's two floats as bfloat16, the first in the low half.
SPMD_INLINE Words pairs_of(Floats first, Floats second) {
#if defined(SPMD_AVX512) && defined(__AVX512BF16__)
  return zero_extended(narrowed_vector(first)) | zero_extended(narrowed_vector(second)) << 16;
#else
  return (rounded_up_halves(first) >> 16) | (rounded_up_halves(second) & 0xffff0000u);
#endif
}

// Numbers of FP4 times one.
struct Fp4Tables : NumberTables {
  constexpr Fp4Tables() : NumberTables{} {
    constexpr uint16_t kHalves[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    for (int line = 0; line < 4; ++line)
      for (int at = 0; at < kLine; ++at) {
        low[line][at] = uint8_t(kHalves[at % 8]);
        high[line][at] = uint8_t(kHalves[at % 8] >> 8 | (at % 16 < 8 ? 0 : 0x80));
      }
  }
};

// What is added to the exponents of a group of FP4, twice an output; false if a product may be subnormal or too large.
SPMD_INLINE bool has_exponents(const uint8_t* group, uint32_t* exponents) {
  for (int output = 0; output < kPanel; output += kLanes) {
    const Words each = (zero_extended(load<Bytes>(group + output)) - 127u) << 7;
    store(exponents + output, (each & 0xffffu) | each << 16);
  }
#if defined(__SSE2__)
  const __m128i found = load<__m128i>(group);
  const __m128i near = _mm_min_epu8(_mm_max_epu8(found, _mm_set1_epi8(2)), _mm_set1_epi8(char(252)));
  return _mm_movemask_epi8(_mm_cmpeq_epi8(found, near)) == 0xffff;
#else
  return std::all_of(group, group + kPanel, [](uint8_t each) { return each >= 2 && each <= 252; });
#endif
}

#if defined(SPMD_AVX512) || defined(SPMD_AVX2)

// Transposes 32-bit numbers within lanes of 128 bits: number j of vector i becomes number i of vector j.
SPMD_INLINE void transpose(ByteVector (&vectors)[4]) {
  const ByteVector first = SPMD_OF_BYTES(unpacklo_epi32)(vectors[0], vectors[1]),
                     second = SPMD_OF_BYTES(unpackhi_epi32)(vectors[0], vectors[1]),
                     third = SPMD_OF_BYTES(unpacklo_epi32)(vectors[2], vectors[3]),
                     fourth = SPMD_OF_BYTES(unpackhi_epi32)(vectors[2], vectors[3]);
  vectors[0] = SPMD_OF_BYTES(unpacklo_epi64)(first, third);
  vectors[1] = SPMD_OF_BYTES(unpackhi_epi64)(first, third);
  vectors[2] = SPMD_OF_BYTES(unpacklo_epi64)(second, fourth);
  vectors[3] = SPMD_OF_BYTES(unpackhi_epi64)(second, fourth);
}

#if defined(SPMD_AVX512)

// Indices of every second number of two vectors.
template <class Number>
struct EveryOther {
  alignas(64) Number indices[64 / sizeof(Number)] = {};
  constexpr explicit EveryOther(int first) {
    for (size_t i = 0; i < 64 / sizeof(Number); ++i) indices[i] = Number(2 * i + first);
  }
};

// As bfloat16, one after the other.
SPMD_INLINE __m512i halves_of(Floats first, Floats second) {
#if defined(__AVX512BF16__)
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
  static constexpr EveryOther<uint16_t> kUpper(1);
  const __m512i one = (__m512i)rounded_up_halves(first), other = (__m512i)rounded_up_halves(second);
  return _mm512_permutex2var_epi16(one, load<__m512i>(kUpper.indices), other);
#endif
}

// Byte `kByte` of each number.
template <int kByte>
SPMD_INLINE __m512i bytes_of(__m512i first, __m512i second) {
#if defined(__AVX512VBMI__)
  static constexpr EveryOther<uint8_t> kBytes(kByte);
  return _mm512_permutex2var_epi8(first, load<__m512i>(kBytes.indices), second);
#else
  const __m512i mask = _mm512_set1_epi16(255);
  first = kByte == 0 ? _mm512_and_si512(first, mask) : _mm512_srli_epi16(first, 8);
  second = kByte == 0 ? _mm512_and_si512(second, mask) : _mm512_srli_epi16(second, 8);
  return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), _mm512_packus_epi16(first, second));
#endif
}

// Whole numbers from -255 to 15, of which 16 are the levels less a zero point.
struct LevelsLessZero {
  float numbers[271] = {};
  constexpr LevelsLessZero() {
    for (int i = 0; i < 271; ++i) numbers[i] = float(i - 255);
  }
};

// A vector has the 16 values of an output.
SPMD_INLINE void fill_tables(const uint8_t* group, int32_t kind, NumberTables& tables) {
  static constexpr LevelsLessZero kLessZero;
  alignas(64) static constexpr uint8_t kNone[kPanel] = {};
  alignas(64) static constexpr float kNoOffsets[kPanel] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f,
                                                           -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};
  alignas(64) float computed[2][kPanel];
  const float *levels = kLessZero.numbers + 255, *scales = reinterpret_cast<const float*>(group);
  const float* offsets = kNoOffsets;
  const uint8_t* zeros = group + kPanel * 4;
  if (kind != kIntegers) levels = kLevels[kind];
  if (kind != kIntegers && kind != kNf4) zeros = kNone;
  if (kind == kFp4 || kind >= kAffine4) {
    const GroupScales of_group = load_scales(group, kind, 0);
    store(computed[0], of_group.scales), store(computed[1], of_group.offsets);
    scales = computed[0], offsets = computed[1];
  }
#pragma GCC unroll 4
  for (int line = 0; line < 4; ++line) {
    Floats values[4];
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; ++lane) {
      const int output = 4 * lane + line;
      values[lane] =
          fused(load<Floats>(levels - zeros[output]), broadcast(scales[output]), broadcast(offsets[output]));
    }
    const __m512i first = halves_of(values[0], values[1]), second = halves_of(values[2], values[3]);
    store(tables.low[line], bytes_of<0>(first, second)), store(tables.high[line], bytes_of<1>(first, second));
  }
}

#else

// Lanes are outputs until pairs of values have been put into them.
SPMD_INLINE void fill_tables(const uint8_t* group, int32_t kind, NumberTables& tables) {
  for (int output = 0; output < kPanel; output += kLanes) {
    const GroupScales of_group = load_scales(group, kind, output);
    const auto value_of = [&](float level) {
      return fused(broadcast(level) - of_group.zeros, of_group.scales, of_group.offsets);
    };
    ByteVector pairs[2][4];
#pragma GCC unroll 8
    for (int pair = 0; pair < 8; ++pair) {
      const float* const levels = kLevels[kind] + 2 * pair;
      pairs[pair / 4][pair % 4] = (ByteVector)pairs_of(value_of(levels[0]), value_of(levels[1]));
    }
    transpose(pairs[0]), transpose(pairs[1]);
    const ByteVector mask = SPMD_OF_BYTES(set1_epi16)(255);
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      const ByteVector first = pairs[0][line], second = pairs[1][line];
      store(
          tables.low[line] + output * 4,
          SPMD_OF_BYTES(packus_epi16)(SPMD_ALL_BYTES(and)(first, mask), SPMD_ALL_BYTES(and)(second, mask)));
      store(
          tables.high[line] + output * 4,
          SPMD_OF_BYTES(packus_epi16)(SPMD_OF_BYTES(srli_epi16)(first, 8), SPMD_OF_BYTES(srli_epi16)(second, 8)));
    }
  }
}

#endif

// Adds to the exponents of what is not zero.
SPMD_INLINE ByteVector scaled(ByteVector halves, ByteVector exponents) {
  const ByteVector magnitude = SPMD_OF_BYTES(set1_epi16)(0x7fff);
#if defined(SPMD_AVX512)
  return _mm512_mask_add_epi16(halves, _mm512_test_epi16_mask(halves, magnitude), halves, exponents);
#else
  const __m256i is_zero = _mm256_cmpeq_epi16(_mm256_and_si256(halves, magnitude), __m256i{});
  return _mm256_add_epi16(halves, _mm256_andnot_si256(is_zero, exponents));
#endif
}

// Blocks of a group; the memory `ahead` bytes behind each is fetched. `kScales`: values of tables are scaled.
template <bool kScales>
SPMD_INLINE void expand_blocks(
    const uint8_t* blocks, int64_t count, int64_t ahead, const NumberTables& tables, const uint32_t* exponents,
    uint16_t* to) {
  const ByteVector mask = SPMD_OF_BYTES(set1_epi8)(15);
  for (int at = 0; at < kLine; at += kVectorBytes) {
    ByteVector low[4], high[4];
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      low[line] = load<ByteVector>(tables.low[line] + at);
      high[line] = load<ByteVector>(tables.high[line] + at);
    }
    ByteVector scales;
    if constexpr (kScales) scales = load<ByteVector>(exponents + at / 4);
    for (int64_t block = 0; block < count; ++block) {
      const uint8_t* const from = blocks + block * kBlockInputs * kPanel / 2 + at;
      uint16_t* const of_block = to + block * kBlockInputs * kPanel + at / 2;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        ByteVector first[4], second[4];
#pragma GCC unroll 4
        for (int line = 0; line < 4; ++line) {
          const ByteVector both = load<ByteVector>(from + line * kLine);
          if (half == 0 && at == 0) __builtin_prefetch(from + ahead + line * kLine, 0, 2);
          const ByteVector numbers =
              SPMD_ALL_BYTES(and)(half == 0 ? both : SPMD_OF_BYTES(srli_epi16)(both, 4), mask);
          const ByteVector low_bytes = SPMD_OF_BYTES(shuffle_epi8)(low[line], numbers),
                             high_bytes = SPMD_OF_BYTES(shuffle_epi8)(high[line], numbers);
          first[line] = SPMD_OF_BYTES(unpacklo_epi8)(low_bytes, high_bytes);
          second[line] = SPMD_OF_BYTES(unpackhi_epi8)(low_bytes, high_bytes);
        }
        transpose(first), transpose(second);
        if constexpr (kScales)
#pragma GCC unroll 4
          for (int pair = 0; pair < 4; ++pair)
            first[pair] = scaled(first[pair], scales), second[pair] = scaled(second[pair], scales);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
          store(of_block + (half * 8 + pair) * 2 * kPanel, first[pair]);
          store(of_block + (half * 8 + 4 + pair) * 2 * kPanel, second[pair]);
        }
      }
    }
  }
}

#else

inline void fill_tables(const uint8_t* group, int32_t kind, NumberTables& tables) {
  for (int output = 0; output < kPanel; output += kLanes) {
    const GroupScales of_group = load_scales(group, kind, output);
    for (int level = 0; level < 16; ++level) {
      const Words halves = rounded_up_halves(
          fused(broadcast(kLevels[kind][level]) - of_group.zeros, of_group.scales, of_group.offsets));
      for (int lane = 0; lane < kLanes; ++lane) {
        const int line = (output + lane) % 4, at = (output + lane) / 4 * 16 + level;
        tables.low[line][at] = uint8_t(halves[lane] >> 16), tables.high[line][at] = uint8_t(halves[lane] >> 24);
      }
    }
  }
}

template <bool kScales>
inline void expand_blocks(
    const uint8_t* blocks, int64_t count, int64_t, const NumberTables& tables, const uint32_t* exponents,
    uint16_t* to) {
  for (int64_t input = 0; input < count * kBlockInputs; ++input)
    for (int output = 0; output < kPanel; ++output) {
      const uint8_t* const block = blocks + input / kBlockInputs * kBlockInputs * kPanel / 2;
      const int line = output % 4, at = output / 4 * 16;
      const uint8_t both = block[line * kLine + at + input % 16];
      const int number = at + (input % kBlockInputs < 16 ? both & 15 : both >> 4);
      const int half = tables.low[line][number] | tables.high[line][number] << 8;
      const bool is_scaled = kScales && (half & 0x7fff) != 0;
      to[(input / 2 * kPanel + output) * 2 + input % 2] = uint16_t(half + (is_scaled ? exponents[output] : 0));
    }
}

#endif

// ---- FP8 ----------------------------------------------------------------------------------------------------------

SPMD_INLINE uint8_t fp8_of_row(uint8_t byte) { return uint8_t((byte & 0xe0) >> 1 | (byte & 0x10) << 3 | (byte & 0x0f)); }

inline float fp8_value(uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const float level = exponent == 0 ? kLevels[kSmallFp8][bits & 7] : kLevels[kFp8][bits & 15];
  const float value = level * float(1 << exponent / 2 * 2);
  return bits < 128 ? value : -value;
}

SPMD_INLINE uint16_t scaled_fp8(uint8_t bits, float scale) { return narrowed(fp8_value(bits) * scale); }

SPMD_INLINE bool is_small_scale(float scale) { return !(std::abs(scale) >= kLeastFp8Scale); }

SPMD_INLINE bool has_small_scales(const float* scales) {
  return std::any_of(scales, scales + kPanel, is_small_scale);
}

// Number by number.
inline void expand_fp8_slowly(const uint8_t* blocks, int64_t count, const float* scales, uint16_t* to) {
  for (int64_t input = 0; input < count * kBlockInputs; ++input)
    for (int output = 0; output < kPanel; ++output) {
      const uint8_t bits = blocks[input / 16 * 256 + output % 4 * kLine + output / 4 * 16 + input % 16];
      to[(input / 2 * kPanel + output) * 2 + input % 2] = scaled_fp8(bits, scales[output]);
    }
}

#if defined(SPMD_AVX512) || defined(SPMD_AVX2)

struct Fp8Tables {
  NumberTables usual, small;
  bool has_small;
};

SPMD_INLINE ByteVector nibbles(ByteVector bytes) { return SPMD_ALL_BYTES(and)(bytes, SPMD_OF_BYTES(set1_epi8)(15)); }

// The upper bytes of exponents and signs, from upper halves of bytes.
SPMD_INLINE ByteVector upper_bytes(ByteVector halves) {
  alignas(64) static constexpr uint8_t kUpper[16] = {0, 1, 2, 3, 4, 5, 6, 7, 128, 129, 130, 131, 132, 133, 134, 135};
#if defined(SPMD_AVX512)
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(kUpper)), halves);
#else
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(kUpper)), halves);
#endif
}

// Whether any number has no exponent.
SPMD_INLINE bool has_small(ByteVector numbers) {
  const ByteVector exponent = SPMD_OF_BYTES(set1_epi8)(0x78);
#if defined(SPMD_AVX512)
  return _mm512_testn_epi8_mask(numbers, exponent) != 0;
#else
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(numbers, exponent), __m256i{})) != 0;
#endif
}

// `other` where numbers have no exponent.
SPMD_INLINE ByteVector with_small(ByteVector numbers, ByteVector bytes, ByteVector other) {
  const ByteVector exponent = SPMD_OF_BYTES(set1_epi8)(0x78);
#if defined(SPMD_AVX512)
  return _mm512_mask_mov_epi8(bytes, _mm512_testn_epi8_mask(numbers, exponent), other);
#else
  return _mm256_blendv_epi8(bytes, other, _mm256_cmpeq_epi8(_mm256_and_si256(numbers, exponent), __m256i{}));
#endif
}

__attribute__((noinline)) inline void fill_small(const uint8_t* group, Fp8Tables& tables) {
  fill_tables(group, kSmallFp8, tables.small), tables.has_small = true;
}

// Blocks of 32 inputs of a group; the memory `ahead` bytes behind each is fetched.
SPMD_INLINE void expand_fp8(
    const uint8_t* blocks, int64_t count, int64_t ahead, const uint8_t* group, Fp8Tables& tables, uint16_t* to) {
  for (int at = 0; at < kLine; at += kVectorBytes)
    for (int64_t half = 0; half < 2 * count; ++half) {
      const uint8_t* const from = blocks + half * 16 * kPanel + at;
      ByteVector first[4], second[4];
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) {
        const ByteVector numbers = load<ByteVector>(from + line * kLine), low = nibbles(numbers);
        if (at == 0) __builtin_prefetch(from + ahead + line * kLine, 0, 2);
        const ByteVector upper = upper_bytes(nibbles(SPMD_OF_BYTES(srli_epi16)(numbers, 4)));
        const auto lookup = [&](const uint8_t* table) {
          return SPMD_OF_BYTES(shuffle_epi8)(load<ByteVector>(table + at), low);
        };
        ByteVector low_bytes = lookup(tables.usual.low[line]), high_bytes = lookup(tables.usual.high[line]);
        if (__builtin_expect(has_small(numbers), false)) {
          if (!tables.has_small) fill_small(group, tables);
          low_bytes = with_small(numbers, low_bytes, lookup(tables.small.low[line]));
          high_bytes = with_small(numbers, high_bytes, lookup(tables.small.high[line]));
        }
        high_bytes = SPMD_OF_BYTES(add_epi8)(high_bytes, upper);
        first[line] = SPMD_OF_BYTES(unpacklo_epi8)(low_bytes, high_bytes);
        second[line] = SPMD_OF_BYTES(unpackhi_epi8)(low_bytes, high_bytes);
      }
      transpose(first), transpose(second);
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair) {
        store(to + (half * 8 + pair) * 2 * kPanel + at / 2, first[pair]);
        store(to + (half * 8 + 4 + pair) * 2 * kPanel + at / 2, second[pair]);
      }
    }
}

#else

struct Fp8Tables {
  NumberTables usual;
  bool has_small;
};

inline void expand_fp8(
    const uint8_t* blocks, int64_t count, int64_t, const uint8_t* group, Fp8Tables&, uint16_t* to) {
  expand_fp8_slowly(blocks, count, reinterpret_cast<const float*>(group), to);
}

#endif

// ---- Affine numbers of 8 bits -------------------------------------------------------------------------------------

// A block of 32 inputs, which is a group; the memory `ahead` bytes behind it is fetched.
SPMD_INLINE void expand_bytes(const uint8_t* block, int64_t ahead, const uint8_t* group, uint16_t* to) {
  for (int output = 0; output < kPanel; output += kLanes) {
    const GroupScales of_group = load_scales(group, kAffine8, output);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Floats scales = half == 0 ? of_group.scales : of_group.later;
#pragma GCC unroll 8
      for (int pair = 8 * half; pair < 8 * half + 8; ++pair) {
        const uint8_t* const from = block + pair * 2 * kPanel + output;
        if (output == 0 && pair % 2 == 0) __builtin_prefetch(from + ahead, 0, 2);
        const Floats first = fused(floats_of_bytes(from), scales, of_group.offsets);
        const Floats second = fused(floats_of_bytes(from + kPanel), scales, of_group.offsets);
        store(to + (pair * kPanel + output) * 2, pairs_of(first, second));
      }
    }
  }
}

// The expansion of some inputs of one or two panels, in pieces.
class Expansion {
 public:
  // Inputs `first` to `end`, multiples of 32, of panels of `num_inputs`, with `stride` elements of each from `to` on.
  void begin(
      const uint8_t* panels, int64_t panel_bytes, int num_panels, int64_t num_inputs, int64_t first, int64_t end,
      uint16_t* to, int64_t stride) {
    head_ = stored_head(panels), panel_ = panels, panel_bytes_ = panel_bytes, num_panels_ = num_panels;
    num_inputs_ = num_inputs, first_ = input_ = first, end_ = end, to_ = to, stride_ = stride;
    ahead_ = scales_ahead_ = 0;
  }
  // Meanwhile numbers and scales from input `first` of `panels` on are fetched.
  void fetch(const uint8_t* panels, int64_t first) {
    const int64_t panels_between = panels - panel_;
    ahead_ = panels_between + (first - first_) * head_.input_bytes();
    scales_ahead_ = panels_between + (first / head_.group_inputs - first_ / head_.group_inputs) * head_.group_bytes();
  }
  // Blocks of 32 inputs of a panel.
  int64_t num_left() const {
    return num_panels_ == 0 ? 0 : (end_ - input_ + (num_panels_ - 1) * (end_ - first_)) / kBlockInputs;
  }

 protected:
  const uint8_t* group_at(int64_t input) const {
    const uint32_t group_inputs = uint32_t(head_.group_inputs);
    // A division takes the time of ten other instructions.
    const int64_t group = group_inputs == kBlockInputs ? input / kBlockInputs : uint32_t(input) / group_inputs;
    return panel_ + kLine + head_.number_bytes(num_inputs_) + group * head_.group_bytes();
  }
  // Of one group, or of several from it on.
  void fetch_scales(const uint8_t* group, int64_t num_groups = 1) const {
    const int64_t num_bytes = num_groups * head_.group_bytes();
    for (int64_t at = 0; at <= num_bytes; at += kLine) __builtin_prefetch(group + scales_ahead_ + at, 0, 2);
  }
  // Inputs of the panel before `end` are done.
  void advance(int64_t end) {
    input_ = end;
    if (input_ == end_) input_ = first_, panel_ += panel_bytes_, to_ += stride_, --num_panels_;
  }

  StoredHead head_ = {32, kIntegers};
  const uint8_t* panel_ = nullptr;
  int64_t panel_bytes_ = 0, num_inputs_ = 0, first_ = 0, input_ = 0, end_ = 0, stride_ = 0;
  int64_t ahead_ = 0, scales_ahead_ = 0;
  int num_panels_ = 0;
  uint16_t* to_ = nullptr;
};

// To [panel][inputs / 2][16][2].
class PairExpansion : public Expansion {
 public:
  // `count` blocks more, or all that are left.
  void take(int64_t count) {
    while (count > 0 && num_panels_ > 0) {
      const int64_t end_of_group = (input_ / head_.group_inputs + 1) * head_.group_inputs;
      const int64_t end = std::min(std::min(end_, end_of_group), input_ + count * kBlockInputs);
      if (input_ == first_ || input_ % head_.group_inputs == 0) begin_group(group_at(input_));
      const int64_t num_blocks = (end - input_) / kBlockInputs;
      const uint8_t* const blocks = panel_ + kLine + input_ * head_.input_bytes();
      uint16_t* const to = to_ + (input_ - first_) * kPanel;
      if (head_.kind == kFp8)
        expand_fp8_blocks(blocks, num_blocks, group_at(input_), to);
      else if (head_.kind == kAffine8)
        expand_bytes(blocks, ahead_, group_at(input_), to);
      else if (is_scaled_)
        expand_blocks<true>(blocks, num_blocks, ahead_, kUnscaled, exponents_, to);
      else
        expand_blocks<false>(blocks, num_blocks, ahead_, tables_, exponents_, to);
      count -= num_blocks;
      advance(end);
    }
  }

 private:
  void begin_group(const uint8_t* group) {
    fetch_scales(group);
    if (head_.kind == kFp8) {
      is_slow_ = has_small_scales(reinterpret_cast<const float*>(group));
      if (!is_slow_) fill_tables(group, kFp8, fp8_.usual), fp8_.has_small = false;
      return;
    }
    if (head_.kind == kAffine8) return;
    is_scaled_ = head_.kind == kFp4 && has_exponents(group, exponents_);
    if (!is_scaled_) fill_tables(group, head_.kind, tables_);
  }

  void expand_fp8_blocks(const uint8_t* blocks, int64_t count, const uint8_t* group, uint16_t* to) {
    if (is_slow_)
      expand_fp8_slowly(blocks, count, reinterpret_cast<const float*>(group), to);
    else
      expand_fp8(blocks, count, ahead_, group, fp8_, to);
  }

  static constexpr Fp4Tables kUnscaled = {};
  bool is_scaled_ = false, is_slow_ = false;
  alignas(64) uint32_t exponents_[kPanel];
  NumberTables tables_;
  Fp8Tables fp8_;
};
