// The micro-kernels of AVX2, `Avx2` for float32, `Avx2Bf16` for bfloat16 and `Avx2Int8`, and `Portable` for int8 without
// any of these instruction sets.
//
// There are half as many registers as in AVX-512, of half the size: panels are multiplied one at a time. Float32 has the
// chains of AVX-512; bfloat16 one chain, in which a pair's first input comes first.
#pragma once

#include "gemm_by_rows.h"

namespace {

// Sums go to memory, panel by panel: `Panel::multiply_panel<kRows>(block, panel, ahead, sums [kRows][32], kept)`. `kept`,
// or null, has the vectors of sums between two parts of the inputs, [kRows][64].
template <class Panel, class Element, class Sum, int kRowsOf>
struct PanelByPanel : OfVectors<Panel, Element, Sum, kRowsOf> {
  static constexpr bool kHasRegisters = false;

  template <int kRows, int kPanels, class>
  static void multiply(const Block<Element>& block, const InMemory<Sum>& memory) {
    for (int panel = 0; panel < kPanels; ++panel) {
      const int64_t at = panel * block.panel_size;
      Panel::template multiply_panel<kRows>(
          block, block.panels + at, block.to_prefetch() + at * sizeof(Element), memory.sums + panel * kPanel,
          block.kept == nullptr ? nullptr : block.kept + panel * 32);
    }
  }
};

#if defined(SPMD_AVX2)

struct Avx2 : PanelByPanel<Avx2, float, float, 6> {
  static constexpr bool kSplits = true;

  // Each has four outputs: sums of even and of odd inputs, interleaved.
  SPMD_INLINE Floats joined(Floats first, Floats second) {
    const __m256d pairs = _mm256_castps_pd(_mm256_hadd_ps((__m256)first, (__m256)second));
    return (Floats)_mm256_castpd_ps(_mm256_permute4x64_pd(pairs, 0b11011000));
  }
  template <int kRows>
  SPMD_INLINE void multiply_panel(
      const Block<float>& block, const float* panel, const char* ahead, float* sums, float* kept) {
    const float* const x = block.x;
    const int64_t x_stride = block.x_stride, end = block.num_inputs, ahead_step = block.share_of(2 * kPanel);
    // Half a panel at a time: 12 sums of 16 registers.
    for (int half = 0; half < kPanel; half += 8, panel += kPanel, sums += 8) {
      const char* next = ahead + half * 8;
      Floats totals[kRows][2] = {};
      if (kept != nullptr && !block.is_first_part) {
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row)
          for (int v = 0; v < 2; ++v) totals[row][v] = load<Floats>(kept + row * 64 + half * 2 + v * kLanes);
      }
      for (int64_t input = 0; input < end; input += 2) {
        __builtin_prefetch(next, 0, 2);
        next += ahead_step;
        const Floats first = load<Floats>(panel + input * kPanel), second = load<Floats>(panel + input * kPanel + kLanes);
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          const Floats left = (Floats)_mm256_set1_pd(bits_at<double>(x + row * x_stride + input));
          totals[row][0] = fused(left, first, totals[row][0]);
          totals[row][1] = fused(left, second, totals[row][1]);
        }
      }
      if (kept != nullptr && !block.is_last_part) {
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row)
          for (int v = 0; v < 2; ++v) store(kept + row * 64 + half * 2 + v * kLanes, totals[row][v]);
        continue;
      }
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) store(sums + row * 32, joined(totals[row][0], totals[row][1]));
    }
  }
};

struct Avx2Bf16 : PanelByPanel<Avx2Bf16, uint16_t, float, 6> {
  static constexpr bool kSplits = true;
  static constexpr int64_t kExpandingRows = 2;
  // Stored weights alone are cut.
  static constexpr int64_t num_parts(int64_t, int64_t) { return 1; }

  // The pair of inputs in all lanes.
  SPMD_INLINE Words both(const uint16_t* pair) { return (Words)_mm256_set1_ps(bits_at<float>(pair)); }
  // Unrolled, it runs out of registers.
  SPMD_INLINE void in_turn(Floats* sums) { asm volatile("" : "+x"(sums[0]), "+x"(sums[1])); }
  template <int kRows>
  SPMD_INLINE void multiply_panel(
      const Block<uint16_t>& block, const uint16_t* panel, const char* ahead, float* sums, float* kept) {
    const uint16_t* const x = block.x;
    const int64_t x_stride = block.x_stride, ahead_step = block.share_of(2 * kPanel);
    Floats totals[kRows][2] = {};
    if (kept != nullptr && !block.is_first_part) {
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row)
        for (int v = 0; v < 2; ++v) totals[row][v] = load<Floats>(kept + row * 64 + v * kLanes);
    }
    int64_t input = 0;
    while (true) {
      int64_t end = block.num_inputs;
      if constexpr (kRows <= kExpandingRows) end -= expand_some(block, 1, end - input);
      for (; input < end; input += 2) {
        __builtin_prefetch(ahead, 0, 2);
        ahead += ahead_step;
        const uint16_t *first = panel + input * kPanel, *second = first + 2 * kLanes;
        const Floats even[] = {first_of_pairs(load<Words>(first)), first_of_pairs(load<Words>(second))};
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          const Floats left = first_of_pairs(both(x + row * x_stride + input));
          totals[row][0] = fused(left, even[0], totals[row][0]);
          totals[row][1] = fused(left, even[1], totals[row][1]);
          in_turn(totals[row]);
        }
        // Loads the pairs again: no registers are left to keep them.
        asm volatile("" ::: "memory");
        const Floats odd[] = {second_of_pairs(load<Words>(first)), second_of_pairs(load<Words>(second))};
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          const Floats left = second_of_pairs(both(x + row * x_stride + input));
          totals[row][0] = fused(left, odd[0], totals[row][0]);
          totals[row][1] = fused(left, odd[1], totals[row][1]);
          in_turn(totals[row]);
        }
      }
      if (kRows > kExpandingRows || input >= block.num_inputs) break;
    }
    const bool is_kept = kept != nullptr && !block.is_last_part;
    float* const to = is_kept ? kept : sums;
    const int64_t stride = is_kept ? 64 : 32;
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < 2; ++v) store(to + row * stride + v * kLanes, totals[row][v]);
  }
};

#endif

#if defined(SPMD_AVX2) || defined(SPMD_AVX512)

// In 16 bits, where the sum of two products fits into 32: the instruction for bytes saturates at 16.
struct Avx2Int8 : PanelByPanel<Avx2Int8, int8_t, int32_t, 3> {
  template <int kRows>
  SPMD_INLINE void multiply_panel(
      const Block<int8_t>& block, const int8_t* panel, const char* ahead, int32_t* sums, float*) {
    const int8_t* const x = block.x;
    const int64_t x_stride = block.x_stride, end = block.num_inputs, ahead_step = block.share_of(4 * kPanel);
    __m256i totals[kRows][4] = {};
    for (int64_t input = 0; input < end; input += 4) {
      const int8_t* rights = panel + input * kPanel;
      __builtin_prefetch(ahead, 0, 2);
      ahead += ahead_step;
      __m256i left[kRows];
#pragma GCC unroll 3
      for (int row = 0; row < kRows; ++row)
        left[row] = _mm256_cvtepi8_epi16(_mm_set1_epi32(bits_at<int32_t>(x + row * x_stride + input)));
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const __m256i right = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rights + v * 16)));
#pragma GCC unroll 3
        for (int row = 0; row < kRows; ++row)
          totals[row][v] = _mm256_add_epi32(totals[row][v], _mm256_madd_epi16(left[row], right));
      }
    }
#pragma GCC unroll 3
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
      for (int v = 0; v < 4; v += 2) {
        // Two sums an output, of four outputs each.
        const __m256i added = _mm256_hadd_epi32(totals[row][v], totals[row][v + 1]);
        store(sums + row * 32 + v * 4, _mm256_permute4x64_epi64(added, 0xd8));
      }
  }
};

#endif

struct Portable : PanelByPanel<Portable, int8_t, int32_t, 4> {
  template <int kRows>
  SPMD_INLINE void multiply_panel(
      const Block<int8_t>& block, const int8_t* panel, const char*, int32_t* sums, float*) {
    const int8_t* const x = block.x;
    const int64_t x_stride = block.x_stride, end = block.num_inputs;
    for (int row = 0; row < kRows; ++row) {
      int32_t totals[kPanel] = {};
      for (int64_t input = 0; input < end; input += 4)
        for (int output = 0; output < kPanel; ++output)
          for (int byte = 0; byte < 4; ++byte)
            totals[output] += x[row * x_stride + input + byte] * panel[input * kPanel + output * 4 + byte];
      std::memcpy(sums + row * 32, totals, sizeof totals);
    }
  }
};

}  // namespace
