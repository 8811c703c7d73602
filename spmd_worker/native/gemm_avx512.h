// The micro-kernels of AVX-512: `Avx512` for float32, `Avx512Bf16` or `Avx512Widened` for bfloat16, `Vnni` for int8.
//
// A float32 chain is two chains, of even and of odd inputs, interleaved in a vector and added at the end; a bfloat16 chain
// takes two inputs per step, in the processor's order, and widened one after the other, as that of AVX2; an int8 chain four.
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

// Gives the sums of all rows to the epilogue.
template <class Step, class Element, class Sums, int kRows, int kPanels, class Epilogue>
SPMD_INLINE void take_rows(const Block<Element>& block, const Sums (&totals)[kRows][kPanels], const Epilogue& epilogue) {
  using Vector = decltype(Step::joined(totals[0][0]));
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

// Calls `each` with every vector of sums and its place in memory.
template <class Vector, int kRows, int kPanels, int kVectors, class Each>
SPMD_INLINE void each_vector(Vector (&totals)[kRows][kPanels][kVectors], const Each& each) {
#pragma GCC unroll 14
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) each(totals[row][panel][v], ((row * 2 + panel) * kVectors + v) * kLanes);
}

// One step: kInputs inputs of a row by those of a panel's 16 outputs, which are kVectors vectors. The sums of kRowsOf rows by
// a pair of panels fill the registers.
template <class Step, class Element, class Sum, int kRowsOf, int kInputs, int kVectors>
struct InRegisters : OfVectors<Step, Element, Sum, kRowsOf> {
  static constexpr bool kHasRegisters = true;
  static constexpr bool kSplits = true;
  static constexpr int64_t kExpandingRows = sizeof(Element) == 2 ? 4 : 0;

  template <int kRows, int kPanels, class Epilogue>
  static void multiply(const Block<Element>& block, const Epilogue& epilogue) {
    using Vector = typename VectorOf<Sum>::Type;
    constexpr int kElements = 64 / sizeof(Element);
    Vector totals[kRows][kPanels][kVectors];
    const Element* panels = block.panels;
    const char* ahead = block.to_prefetch();
    const int64_t panel_size = block.panel_size, ahead_step = block.share_of(kInputs * kPanel);
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel) {
      const Vector start =
          block.is_first_part ? Step::start(panels + panel * panel_size + block.num_all_inputs * kPanel) : Vector{};
#pragma GCC unroll 14
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) totals[row][panel][v] = start;
    }
    if (block.kept != nullptr && !block.is_first_part)
      each_vector(totals, [&](Vector& total, int at) { total = load<Vector>(block.kept + at); });
    RowAddresses<Element, kRows> x(block.x, block.x_stride);
    int64_t num_left = block.num_inputs;
    while (true) {
      int64_t end = 0;
      if constexpr (kRows <= InRegisters::kExpandingRows) end = expand_some(block, kPanels, num_left);
      for (; num_left > end; num_left -= kInputs) {
        Vector right[kPanels][kVectors];
#pragma GCC unroll 2
        for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            const int64_t at = panel * panel_size + v * kElements;
            right[panel][v] = load<Vector>(panels + at);
            __builtin_prefetch(ahead + at * sizeof(Element), 0, 2);
          }
        panels += kInputs * kPanel, ahead += ahead_step;
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
        asm volatile("" : "+r"(num_left));  // otherwise compilers keep where it ends in a register, too
      }
      if (kRows > InRegisters::kExpandingRows || num_left <= 0) break;
    }
    if (block.kept != nullptr && !block.is_last_part)
      return each_vector(totals, [&](const Vector& total, int at) { store(block.kept + at, total); });
    take_rows<Step>(block, totals, epilogue);
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

#if defined(SPMD_BF16_DOTS)
struct Avx512Bf16 : InRegisters<Avx512Bf16, uint16_t, float, 14, 2, 1> {
  SPMD_INLINE Floats start(const uint16_t*) { return Floats{}; }
  SPMD_INLINE Floats left(const uint16_t* pair) { return (Floats)_mm512_set1_epi32(bits_at<int32_t>(pair)); }
  SPMD_INLINE Floats step(Floats sum, Floats left, Floats right) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)right, (__m512bh)left);
  }
  SPMD_INLINE Floats joined(const Floats* sums) { return sums[0]; }
};
#else
// Multiplies inputs of up to 14 rows of floats, written out: compilers add up an address for each row, keep some in mask
// registers, on ports that multiply, and move sums to memory.
class FloatRows {
 public:
  SPMD_INLINE_MEMBER FloatRows(const float* first, int64_t stride)
      : first_(first), fourth_(first + 3 * stride), seventh_(first + 6 * stride), tenth_(first + 9 * stride),
        thirteenth_(first + 12 * stride), stride_(stride * 4) {
    // The instructions below do not tell what they read: their addresses are known here, where memory is written.
    asm volatile("" : "+r"(first_), "+r"(fourth_), "+r"(seventh_), "+r"(tenth_), "+r"(thirteenth_)::"memory");
  }
  // Adds input `kInput` of row `kRow` by `right` to the row's sums.
  template <int kRow, int kInput>
  SPMD_INLINE_MEMBER void add(Floats (&sums)[2][1], const Floats (&right)[2]) const {
    Floats left;
    if constexpr (kRow % 3 == 0)
      asm("vbroadcastss %c6(%5), %2\n\tvfmadd231ps %3, %2, %0\n\tvfmadd231ps %4, %2, %1"
          : "+v"(sums[0][0]), "+v"(sums[1][0]), "=&v"(left)
          : "v"(right[0]), "v"(right[1]), "r"(rows_of<kRow>()), "i"(kInput * 4));
    else
      asm("vbroadcastss %c6(%5,%7,%c8), %2\n\tvfmadd231ps %3, %2, %0\n\tvfmadd231ps %4, %2, %1"
          : "+v"(sums[0][0]), "+v"(sums[1][0]), "=&v"(left)
          : "v"(right[0]), "v"(right[1]), "r"(rows_of<kRow>()), "i"(kInput * 4), "r"(stride_), "i"(kRow % 3));
  }
  template <int kRow, int kInput>
  SPMD_INLINE_MEMBER void add(Floats (&sums)[1][1], const Floats (&right)[1]) const {
    const char* const at = reinterpret_cast<const char*>(rows_of<kRow>()) + kRow % 3 * stride_;
    sums[0][0] = fused((Floats)_mm512_set1_ps(bits_at<float>(at + kInput * 4)), right[0], sums[0][0]);
  }
  SPMD_INLINE_MEMBER void advance(int count) {
    first_ += count, fourth_ += count, seventh_ += count, tenth_ += count, thirteenth_ += count;
    asm volatile("" : "+r"(first_), "+r"(fourth_), "+r"(seventh_), "+r"(tenth_), "+r"(thirteenth_));
  }

 private:
  template <int kRow>
  SPMD_INLINE_MEMBER const float* rows_of() const {
    return kRow < 3 ? first_ : kRow < 6 ? fourth_ : kRow < 9 ? seventh_ : kRow < 12 ? tenth_ : thirteenth_;
  }
  const float *first_, *fourth_, *seventh_, *tenth_, *thirteenth_;
  int64_t stride_;  // bytes
};

// Rows are floats already (`OwnRows`); of the panels' pairs the first inputs are widened, and then the second.
struct Avx512Widened : OfVectors<Avx512Widened, uint16_t, float, 14> {
  static constexpr bool kHasRegisters = true, kWidens = true, kSplits = true;
  static constexpr int64_t kExpandingRows = 4;
  static constexpr int64_t kRowsBytes = 256 << 10;  // twice as many of floats
  static constexpr int64_t kPanelsBytes = 64 << 10;

  template <int kRows, int kPanels, class Epilogue>
  static void multiply(const Block<uint16_t>& block, const Epilogue& epilogue) {
    Floats totals[kRows][kPanels][1] = {};
    if (block.kept != nullptr && !block.is_first_part)
      each_vector(totals, [&](Floats& total, int at) { total = load<Floats>(block.kept + at); });
    const uint16_t* panels = block.panels;
    const char* ahead = block.to_prefetch();
    const int64_t panel_size = block.panel_size, ahead_step = block.share_of(2 * kPanel);
    FloatRows x(reinterpret_cast<const float*>(block.x), block.x_stride / 2);
    constexpr std::make_integer_sequence<int, kRows> rows;
    int64_t num_left = block.num_inputs;
    while (true) {
      int64_t end = 0;
      if constexpr (kRows <= kExpandingRows) end = expand_some(block, kPanels, num_left);
      for (; num_left > end; num_left -= 2) {
        Floats right[kPanels];
#pragma GCC unroll 2
        for (int panel = 0; panel < kPanels; ++panel) {
          right[panel] = first_of_pairs(load<Words>(panels + panel * panel_size));
          __builtin_prefetch(ahead + panel * panel_size * 2, 0, 2);
        }
        add<0>(totals, x, right, rows);
        // Loads the pairs again: no registers are left to keep them.
        asm volatile("" ::: "memory");
#pragma GCC unroll 2
        for (int panel = 0; panel < kPanels; ++panel)
          right[panel] = second_of_pairs(load<Words>(panels + panel * panel_size));
        add<1>(totals, x, right, rows);
        panels += 2 * kPanel, ahead += ahead_step;
        x.advance(2);
      }
      if (kRows > kExpandingRows || num_left <= 0) break;
    }
    if (block.kept != nullptr && !block.is_last_part)
      return each_vector(totals, [&](const Floats& total, int at) { store(block.kept + at, total); });
    take_rows<Avx512Widened>(block, totals, epilogue);
  }
  SPMD_INLINE Floats joined(const Floats* sums) { return sums[0]; }

 private:
  template <int kInput, int kRows, int kPanels, int... kRow>
  SPMD_INLINE void add(
      Floats (&totals)[kRows][kPanels][1], const FloatRows& x, const Floats (&right)[kPanels],
      std::integer_sequence<int, kRow...>) {
    (x.add<kRow, kInput>(totals[kRow], right), ...);
  }
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
