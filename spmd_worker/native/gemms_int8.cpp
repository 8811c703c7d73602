// Products of int8 rows with a packed weight: by the AMX unit, by AVX-512 VNNI, by AVX2, or in plain C++, with the same
// sums. See int8.h for what is multiplied; int8_rows.cpp makes rows of bytes of numbers, and numbers of sums.

#include "int8.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "amx_int8.h"
#include "row_addresses.h"
#include "vector.h"

namespace {

constexpr int64_t kRowsBytes = 512 << 10;  // of rows that stay in the second-level cache while panels pass
constexpr int kMostRows = 32;              // of a block
constexpr int kWidth = 32;                 // sums of a row in a block, for two panels

// What one block is of: rows, and one panel or two, one after the other in memory; and what to fetch meanwhile.
struct Operands {
  const int8_t* x;
  int64_t x_stride, num_inputs;
  const int8_t *panels, *ahead;
};

SPMD_INLINE int32_t quad_at(const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, sizeof quad);
  return quad;
}

// kRows rows by kPanels panels: sums go to [kRows][32].
#if defined(SPMD_AVX512) && defined(__AVX512VNNI__)

constexpr int kBlockRows = 14;  // with the panels of a pair as many sums as there are registers for

template <int kRows, int kPanels>
void multiply_block(const Operands& operands, int32_t* sums) {
  const int64_t end = operands.num_inputs, panel_size = panel_bytes(end);
  const int8_t *panels = operands.panels, *ahead = operands.ahead;
  __m512i totals[kRows][kPanels];
#pragma GCC unroll 2
  for (int panel = 0; panel < kPanels; ++panel) {
    // The rows are 128 larger than they are.
    const __m512i start = _mm512_loadu_si512(panels + panel * panel_size + end * kBytePanel + 64);
#pragma GCC unroll 14
    for (int row = 0; row < kRows; ++row) totals[row][panel] = start;
  }
  RowAddresses<int8_t, kRows> x(operands.x, operands.x_stride);
  for (int64_t num_left = end; num_left > 0; num_left -= 4) {
    __m512i right[kPanels];
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel) {
      right[panel] = _mm512_loadu_si512(panels + panel * panel_size);
      __builtin_prefetch(ahead + panel * panel_size, 0, 2);
    }
    panels += 4 * kBytePanel, ahead += 4 * kBytePanel;
#pragma GCC unroll 14
    for (int row = 0; row < kRows; ++row) {
      const __m512i left = _mm512_set1_epi32(quad_at(x.row(row)));
#pragma GCC unroll 2
      for (int panel = 0; panel < kPanels; ++panel)
        totals[row][panel] = _mm512_dpbusd_epi32(totals[row][panel], left, right[panel]);
    }
    x.advance(4);
  }
#pragma GCC unroll 14
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel)
      _mm512_storeu_si512(sums + row * kWidth + panel * kBytePanel, totals[row][panel]);
}

#elif defined(SPMD_AVX2) || defined(SPMD_AVX512)

constexpr int kBlockRows = 3;

// In 16 bits, whose products' sums of two fit in 32: the instruction for bytes saturates at 16.
template <int kRows>
void multiply_panel(const Operands& operands, const int8_t* panel, const int8_t* ahead, int32_t* sums) {
  __m256i totals[kRows][4] = {};
  for (int64_t input = 0; input < operands.num_inputs; input += 4) {
    const int8_t* rights = panel + input * kBytePanel;
    __builtin_prefetch(ahead + input * kBytePanel, 0, 2);
    __m256i left[kRows];
#pragma GCC unroll 3
    for (int row = 0; row < kRows; ++row)
      left[row] = _mm256_cvtepi8_epi16(_mm_set1_epi32(quad_at(operands.x + row * operands.x_stride + input)));
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const __m256i right =
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rights + v * 16)));
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
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(sums + row * kWidth + v * 4), _mm256_permute4x64_epi64(added, 0xd8));
    }
}

template <int kRows, int kPanels>
void multiply_block(const Operands& operands, int32_t* sums) {
  const int64_t panel_size = panel_bytes(operands.num_inputs);
  for (int panel = 0; panel < kPanels; ++panel)
    multiply_panel<kRows>(
        operands, operands.panels + panel * panel_size, operands.ahead + panel * panel_size, sums + panel * kBytePanel);
}

#else

constexpr int kBlockRows = 4;

template <int kRows, int kPanels>
void multiply_block(const Operands& operands, int32_t* sums) {
  const int64_t panel_size = panel_bytes(operands.num_inputs);
  for (int row = 0; row < kRows; ++row)
    for (int panel = 0; panel < kPanels; ++panel) {
      const int8_t *x = operands.x + row * operands.x_stride, *right = operands.panels + panel * panel_size;
      int32_t totals[kBytePanel] = {};
      for (int64_t input = 0; input < operands.num_inputs; input += 4, right += 4 * kBytePanel)
        for (int output = 0; output < kBytePanel; ++output)
          for (int byte = 0; byte < 4; ++byte) totals[output] += x[input + byte] * right[output * 4 + byte];
      std::memcpy(sums + row * kWidth + panel * kBytePanel, totals, sizeof totals);
    }
}

#endif

using Block = void (*)(const Operands&, int32_t*);

// By the number of rows.
template <int kPanels, int... kRows>
constexpr std::array<Block, sizeof...(kRows)> blocks_of(std::integer_sequence<int, kRows...>) {
  return {multiply_block<kRows + 1, kPanels>...};
}

template <int kPanels>
constexpr auto kBlocks = blocks_of<kPanels>(std::make_integer_sequence<int, kBlockRows>());

bool uses_unit() {
#if defined(SPMD_HAS_AMX_INT8)
  return amx::is_granted();
#else
  return false;
#endif
}

#if defined(SPMD_HAS_AMX_INT8)

// Up to 32 rows by one panel or two, 64 inputs at a time: sums go to [32][32].
template <bool kTwoTiles, bool kTwoPanels>
void multiply_by_unit(const Operands& operands, int32_t* sums) {
  const int8_t *x = operands.x, *weight = operands.panels;
  const int8_t* second_x = x + 16 * operands.x_stride;
  const int8_t* second_weight = weight + panel_bytes(operands.num_inputs);
  amx::zero_sums<kTwoTiles, kTwoPanels>();
  for (int64_t input = 0; input < operands.num_inputs; input += kByteStep) {
    amx::load_passing<4>(x + input, operands.x_stride);
    amx::load<6>(weight + input * kBytePanel, 64);
    amx::multiply_bytes<0, 4, 6>();
    if (kTwoPanels) {
      amx::load<7>(second_weight + input * kBytePanel, 64);
      amx::multiply_bytes<1, 4, 7>();
    }
    if (kTwoTiles) {
      amx::load_passing<5>(second_x + input, operands.x_stride);
      amx::multiply_bytes<2, 5, 6>();
    }
    if (kTwoTiles && kTwoPanels) amx::multiply_bytes<3, 5, 7>();
    for (int64_t line = 0; line < 1024; line += 64) __builtin_prefetch(operands.ahead + input * kBytePanel + line, 0, 2);
  }
  // Its bytes are moved as they are.
  amx::store_sums<kTwoTiles, kTwoPanels>(reinterpret_cast<float*>(sums));
}

void multiply_by_unit(const Operands& operands, int64_t num_rows, bool has_two, int32_t* sums) {
  if (num_rows > 16)
    has_two ? multiply_by_unit<true, true>(operands, sums) : multiply_by_unit<true, false>(operands, sums);
  else
    has_two ? multiply_by_unit<false, true>(operands, sums) : multiply_by_unit<false, false>(operands, sums);
}

#endif

// What one thread computes, item after item.
struct Worker {
  const ByteGemm& gemm;
  const ByteSink& sink;
  const bool by_unit = uses_unit();
  int64_t unit_rows = 0;  // how many rows its unit is set up for
  alignas(64) int32_t sums[kMostRows * kWidth];

  Worker(const ByteGemm& product, const ByteSink& results) : gemm(product), sink(results) {}
  ~Worker() {
#if defined(SPMD_HAS_AMX_INT8)
    if (unit_rows > 0) amx::release();
#endif
  }

  // Rows from `row` up to `end` by the panels of one pair.
  void run_pair(int64_t row, int64_t end, int64_t pair) {
    const bool has_two = pair * 2 + 1 < gemm.num_panels();
    const int64_t most = by_unit ? kMostRows : kBlockRows, num_rows = end - row;
    const int64_t num_blocks = (num_rows + most - 1) / most;
    // The first block fetches the next pair; after it what is fetched is there.
    const int64_t next = (pair + 1) * 2 + has_two < gemm.num_panels() ? pair + 1 : pair;
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t first = row + num_rows * block / num_blocks, last = row + num_rows * (block + 1) / num_blocks;
      multiply(
          {gemm.x + first * gemm.x_stride, gemm.x_stride, gemm.num_inputs, gemm.panel(pair * 2),
           gemm.panel((block == 0 ? next : pair) * 2)},
          last - first, has_two);
      sink.take(first, last, pair, has_two, sums);
    }
  }

  void multiply(const Operands& operands, int64_t num_rows, bool has_two) {
#if defined(SPMD_HAS_AMX_INT8)
    if (by_unit) {
      if (unit_rows != num_rows) amx::set_up_for(int(unit_rows = num_rows));
      return multiply_by_unit(operands, num_rows, has_two, sums);
    }
#endif
    (has_two ? kBlocks<2> : kBlocks<1>)[num_rows - 1](operands, sums);
  }
};

}  // namespace

bool rows_are_offset() {
#if defined(SPMD_AVX512) && defined(__AVX512VNNI__)
  return !uses_unit();
#else
  return false;
#endif
}

ByteCut::ByteCut(const ByteGemm& gemm) {
  num_pairs = gemm.num_pairs();
  rows_each = std::max<int64_t>(kRowsBytes / gemm.x_stride / kMostRows, 1) * kMostRows;
  num_row_groups = (gemm.num_rows + rows_each - 1) / rows_each;
}

void run_byte_units(const ByteGemm& gemm, const ByteCut& cut, const ByteSink& sink, int64_t first, int64_t end) {
  Worker worker(gemm, sink);
  for (int64_t unit = first; unit < end; ++unit) {
    const int64_t row = unit / cut.num_pairs * cut.rows_each;
    worker.run_pair(row, std::min(gemm.num_rows, row + cut.rows_each), unit % cut.num_pairs);
  }
}
