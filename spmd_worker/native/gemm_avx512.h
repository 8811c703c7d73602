// The micro-kernels of AVX-512: `Avx512` for float32, `Avx512Bf16` for bfloat16, `Vnni` for int8.
//
// A float32 chain is two chains, of even and of odd inputs, interleaved in a vector and added at the end; a bfloat16 chain
// takes two inputs per step, in the processor's order; an int8 chain four.
#pragma once

#include "gemm_by_rows.h"

#if defined(SPMD_AVX512)

namespace {

// A pointer to every third row; the others are one and two strides away. With a pointer to each of 14 rows compilers keep
// some in vector registers, and moving those occupies a port that multiplies.
template <class Element, int kRows>
class RowAddresses {
 public:
  SPMD_INLINE_MEMBER RowAddresses(const Element* first, int64_t stride) : stride_(stride) {
#pragma GCC unroll 5
    for (int third = 0; third < kThirds; ++third) thirds_[third] = first + third * 3 * stride;
  }
  SPMD_INLINE_MEMBER const Element* row(int number) const { return thirds_[number / 3] + number % 3 * stride_; }
  SPMD_INLINE_MEMBER void advance(int count) {
#pragma GCC unroll 5
    for (int third = 0; third < kThirds; ++third) {
      thirds_[third] += count;
      asm volatile("" : "+r"(thirds_[third]));  // otherwise compilers make one pointer per row again
    }
  }

 private:
  static constexpr int kThirds = (kRows + 2) / 3;
  const Element* thirds_[kThirds];
  int64_t stride_;
};

// One step: kInputs inputs of a row by those of a panel's 16 outputs, which are kVectors vectors. The sums of kRowsOf rows by
// a pair of panels fill the registers.
template <class Step, class Element, class Sum, int kRowsOf, int kInputs, int kVectors>
struct InRegisters : OfVectors<Step, Element, Sum, kRowsOf> {
  static constexpr bool kHasRegisters = true;

  template <int kRows, int kPanels, class Epilogue>
  static void multiply(const Block<Element>& block, const Epilogue& epilogue) {
    using Vector = typename VectorOf<Sum>::Type;
    constexpr int kElements = 64 / sizeof(Element);
    Vector totals[kRows][kPanels][kVectors];
    const Element *panels = block.panels, *ahead = block.to_prefetch();
    const int64_t panel_size = block.panel_size;
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel) {
      const Vector start = Step::start(panels + panel * panel_size + block.num_inputs * kPanel);
#pragma GCC unroll 14
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) totals[row][panel][v] = start;
    }
    RowAddresses<Element, kRows> x(block.x, block.x_stride);
    for (int64_t num_left = block.num_inputs; num_left > 0; num_left -= kInputs) {
      Vector right[kPanels][kVectors];
#pragma GCC unroll 2
      for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = panel * panel_size + v * kElements;
          right[panel][v] = load<Vector>(panels + at);
          __builtin_prefetch(ahead + at, 0, 2);
        }
      panels += kInputs * kPanel, ahead += kInputs * kPanel;
#pragma GCC unroll 14
      for (int row = 0; row < kRows; ++row) {
        const Vector left = Step::left(x.row(row));
#pragma GCC unroll 2
        for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v)
            totals[row][panel][v] = Step::step(totals[row][panel][v], left, right[panel][v]);
      }
      x.advance(kInputs);
    }
    if constexpr (std::is_same_v<Epilogue, AddInMemory>) {
      AddInMemory own = epilogue;  // a copy, which no store changes
#pragma GCC unroll 14
      for (int row = 0; row < kRows; ++row) {
        Vector of_row[2];
#pragma GCC unroll 2
        for (int panel = 0; panel < kPanels; ++panel) of_row[panel] = Step::joined(totals[row][panel]);
        own.take<kPanels>(row, of_row);
      }
    } else {
#pragma GCC unroll 14
      for (int row = 0; row < kRows; ++row) {
        Vector of_row[2];
#pragma GCC unroll 2
        for (int panel = 0; panel < kPanels; ++panel) of_row[panel] = Step::joined(totals[row][panel]);
        epilogue.take(block.row + row, block.pair, kPanels, of_row);
      }
    }
  }
};

struct Avx512 : InRegisters<Avx512, float, float, 6, 2, 2> {
  SPMD_INLINE Floats start(const float*) { return Floats{}; }
  SPMD_INLINE Floats left(const float* pair) { return (Floats)_mm512_set1_pd(bits_at<double>(pair)); }
  SPMD_INLINE Floats step(Floats sum, Floats left, Floats right) { return fused(left, right, sum); }
  SPMD_INLINE Floats joined(const Floats* sums) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    const __m512 first = (__m512)sums[0], second = (__m512)sums[1];
    return (Floats)_mm512_permutex2var_ps(first, even, second) + (Floats)_mm512_permutex2var_ps(first, odd, second);
  }
};

#if defined(__AVX512BF16__)
struct Avx512Bf16 : InRegisters<Avx512Bf16, uint16_t, float, 14, 2, 1> {
  SPMD_INLINE Floats start(const uint16_t*) { return Floats{}; }
  SPMD_INLINE Floats left(const uint16_t* pair) { return (Floats)_mm512_set1_epi32(bits_at<int32_t>(pair)); }
  SPMD_INLINE Floats step(Floats sum, Floats left, Floats right) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)right, (__m512bh)left);
  }
  SPMD_INLINE Floats joined(const Floats* sums) { return sums[0]; }
};
#endif

#if defined(__AVX512VNNI__)
// Rows are offset by 128; the initial sums in the panel compensate for it.
struct Vnni : InRegisters<Vnni, int8_t, int32_t, 14, 4, 1> {
  SPMD_INLINE Ints start(const int8_t* end) { return load<Ints>(end + 64); }
  SPMD_INLINE Ints left(const int8_t* quad) { return (Ints)_mm512_set1_epi32(bits_at<int32_t>(quad)); }
  SPMD_INLINE Ints step(Ints sum, Ints left, Ints right) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
  }
  SPMD_INLINE Ints joined(const Ints* sums) { return sums[0]; }
};
#endif

}  // namespace

#endif
