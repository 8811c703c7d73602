// Weights of 4 bits a number, which a product expands to panels of bfloat16 (gemm.h) while it reads them.
//
// The expanded numbers are those of the dequantised weight, rounded once: value = (number - zero) * scale in float. So the
// product has the bits of one with the dequantised weight, and reads a quarter of its bytes.
//
// Packed, a weight is a run of panels of 16 outputs. A panel is a line of 64 bytes with its head; a block of 256 bytes for
// every 32 inputs; the scales of its groups of inputs; and zeros up to a multiple of 64 bytes. A block is four lines, of
// which line i has outputs i, 4 + i, 8 + i and 12 + i, 16 bytes each: byte b has input b in its low bits, and input 16 + b in
// its high ones. A group of integers (GPTQ, AWQ and their like) has 16 floats, the scales, and 16 bytes, the zero points; a
// group of FP4 (MXFP4) has 16 exponents.
//
// Expanding. In a group an output has 16 values. They are computed once, as a table of low and one of high bytes, and numbers
// are looked up 16 at a time by a shuffle of bytes; three steps of interleaving then put pairs of inputs of 16 outputs side by
// side. Line i of a block has the outputs that the interleaving takes from its vector i.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "vector.h"

namespace {

constexpr int64_t kNibbleLine = 64, kNibbleBlock = 256, kNibbleInputs = 32;

enum NibbleKind : int32_t { kIntegers, kFp4 };

// Inputs of a group, a multiple of 32, and how its scales are stored.
struct NibbleHead {
  int32_t group_inputs, kind;

  int64_t group_bytes() const { return kPanel * (kind == kFp4 ? 1 : 5); }
};

SPMD_INLINE NibbleHead nibble_head(const uint8_t* panel) {
  NibbleHead head;
  std::memcpy(&head, panel, sizeof head);
  return head;
}

inline int64_t nibble_panel_bytes(const uint8_t* panel, int64_t num_inputs) {
  const NibbleHead head = nibble_head(panel);
  const int64_t scales = num_inputs / head.group_inputs * head.group_bytes();
  return kNibbleLine + num_inputs * kPanel / 2 + (scales + kNibbleLine - 1) / kNibbleLine * kNibbleLine;
}

// Values of a group's numbers, as bfloat16: line i has those of the outputs of line i of a block.
struct NibbleTables {
  alignas(64) uint8_t low[4][kNibbleLine], high[4][kNibbleLine];
};

alignas(64) constexpr float kLevels[2][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f}};

SPMD_INLINE void fill_tables(const uint8_t* group, int32_t kind, NibbleTables& tables) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  for (int output = 0; output < kPanel; ++output) {
    float scale, zero = 0.0f;
    if (kind == kFp4) {
      // 2^-127 is subnormal.
      const uint32_t bits = group[output] == 0 ? 1u << 22 : uint32_t(group[output]) << 23;
      std::memcpy(&scale, &bits, sizeof scale);
    } else {
      std::memcpy(&scale, group + output * 4, sizeof scale);
      zero = float(group[kPanel * 4 + output]);
    }
    const int at = output / 4 * 16, line = output % 4;
    for (int first = 0; first < 16; first += kLanes) {
      const Words bits = (Words)((load<Floats>(kLevels[kind] + first) - broadcast(zero)) * broadcast(scale));
      // To the nearest, ties to even: weights are finite.
      const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
      store(tables.low[line] + at + first, __builtin_convertvector(rounded >> 16, Bytes));
      store(tables.high[line] + at + first, __builtin_convertvector(rounded >> 24, Bytes));
    }
  }
}

#if defined(SPMD_AVX512)
constexpr int kNibbleBytes = 64;  // of a vector
typedef __m512i NibbleVector;
#define SPMD_OF_NIBBLES(operation) _mm512_##operation
#define SPMD_ALL_NIBBLES(operation) _mm512_##operation##_si512
#elif defined(SPMD_AVX2)
constexpr int kNibbleBytes = 32;
typedef __m256i NibbleVector;
#define SPMD_OF_NIBBLES(operation) _mm256_##operation
#define SPMD_ALL_NIBBLES(operation) _mm256_##operation##_si256
#endif

#if defined(SPMD_AVX512) || defined(SPMD_AVX2)

// Four vectors with four pairs of each output -> four pairs of all outputs, one after the other.
SPMD_INLINE void store_pairs(const NibbleVector (&outputs)[4], uint16_t* to) {
  const NibbleVector first = SPMD_OF_NIBBLES(unpacklo_epi32)(outputs[0], outputs[1]),
                     second = SPMD_OF_NIBBLES(unpackhi_epi32)(outputs[0], outputs[1]),
                     third = SPMD_OF_NIBBLES(unpacklo_epi32)(outputs[2], outputs[3]),
                     fourth = SPMD_OF_NIBBLES(unpackhi_epi32)(outputs[2], outputs[3]);
  store(to, SPMD_OF_NIBBLES(unpacklo_epi64)(first, third));
  store(to + 2 * kPanel, SPMD_OF_NIBBLES(unpackhi_epi64)(first, third));
  store(to + 4 * kPanel, SPMD_OF_NIBBLES(unpacklo_epi64)(second, fourth));
  store(to + 6 * kPanel, SPMD_OF_NIBBLES(unpackhi_epi64)(second, fourth));
}

// Some blocks of one group; blocks from `ahead` on are fetched.
SPMD_INLINE void expand_blocks(
    const uint8_t* blocks, int64_t count, const NibbleTables& tables, uint16_t* to, const uint8_t* ahead) {
  const NibbleVector mask = SPMD_OF_NIBBLES(set1_epi8)(15);
  for (int at = 0; at < kNibbleLine; at += kNibbleBytes) {
    NibbleVector low[4], high[4];
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      low[line] = load<NibbleVector>(tables.low[line] + at);
      high[line] = load<NibbleVector>(tables.high[line] + at);
    }
    for (int64_t block = 0; block < count; ++block) {
      const uint8_t* const from = blocks + block * kNibbleBlock + at;
      uint16_t* const of_block = to + block * kNibbleInputs * kPanel + at / 4 * 2;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        NibbleVector first[4], second[4];
#pragma GCC unroll 4
        for (int line = 0; line < 4; ++line) {
          const NibbleVector both = load<NibbleVector>(from + line * kNibbleLine);
          if (half == 0 && at == 0) __builtin_prefetch(ahead + block * kNibbleBlock + line * kNibbleLine, 0, 2);
          const NibbleVector numbers =
              SPMD_ALL_NIBBLES(and)(half == 0 ? both : SPMD_OF_NIBBLES(srli_epi16)(both, 4), mask);
          const NibbleVector low_bytes = SPMD_OF_NIBBLES(shuffle_epi8)(low[line], numbers),
                             high_bytes = SPMD_OF_NIBBLES(shuffle_epi8)(high[line], numbers);
          first[line] = SPMD_OF_NIBBLES(unpacklo_epi8)(low_bytes, high_bytes);
          second[line] = SPMD_OF_NIBBLES(unpackhi_epi8)(low_bytes, high_bytes);
        }
        store_pairs(first, of_block + half * 16 * kPanel);
        store_pairs(second, of_block + (half * 16 + 8) * kPanel);
      }
    }
  }
}

#else

inline void expand_blocks(
    const uint8_t* blocks, int64_t count, const NibbleTables& tables, uint16_t* to, const uint8_t*) {
  for (int64_t input = 0; input < count * kNibbleInputs; ++input)
    for (int output = 0; output < kPanel; ++output) {
      const int line = output % 4, at = output / 4 * 16;
      const int64_t in_block = input % kNibbleInputs, byte = at + in_block % 16;
      const uint8_t both = blocks[input / kNibbleInputs * kNibbleBlock + line * kNibbleLine + byte];
      const int number = at + (in_block < 16 ? both & 15 : both >> 4);
      to[(input / 2 * kPanel + output) * 2 + input % 2] =
          uint16_t(tables.low[line][number] | tables.high[line][number] << 8);
    }
}

#endif

// Inputs `first` to `first + count` of a panel, both multiples of 32, to [count / 2][16][2]; `ahead` is a panel of which the
// inputs from `ahead_first` on are needed next.
inline void expand_panel(
    const uint8_t* panel, int64_t num_inputs, int64_t first, int64_t count, uint16_t* to, const uint8_t* ahead,
    int64_t ahead_first) {
  const NibbleHead head = nibble_head(panel);
  const uint8_t* const blocks = panel + kNibbleLine;
  const uint8_t* const groups = blocks + num_inputs * kPanel / 2;
  const uint8_t* const next = ahead + kNibbleLine + ahead_first * kPanel / 2;
  NibbleTables tables;
  for (int64_t input = first; input < first + count;) {
    const int64_t group = input / head.group_inputs;
    const int64_t end = group * head.group_inputs + head.group_inputs < first + count
                            ? group * head.group_inputs + head.group_inputs
                            : first + count;
    fill_tables(groups + group * head.group_bytes(), head.kind, tables);
    expand_blocks(
        blocks + input * kPanel / 2, (end - input) / kNibbleInputs, tables, to + (input - first) * kPanel,
        next + (input - first) * kPanel / 2);
    input = end;
  }
}

}  // namespace
