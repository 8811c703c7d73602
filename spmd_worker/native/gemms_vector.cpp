// Products of rows with a packed weight by vector instructions, where there is no AMX unit: float32 with AVX-512 or AVX2,
// bfloat16 where AVX-512 multiplies pairs of them or with AVX2, as floats.
//
// Every element of the result is a chain of steps over the inputs, a pair at a time in ascending order, summed in float
// (of float32 one chain for the even inputs and one for the odd, which are added), then the bias, then one rounding. The
// chain is the same however many rows there are and whoever computes them.
//
// Weights are packed as gemms.cpp and gemms_float32.cpp have them, and gated gemms and those of which only the argmax is
// wanted end as theirs do.

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <utility>

#include "argmax.h"
#include "exports.h"
#include "gemm.h"
#include "team.h"

#if defined(SPMD_AVX512) || defined(SPMD_AVX2)

namespace {

constexpr int64_t kRowsBytes = 512 << 10;  // of rows that stay in the second-level cache while panels pass
constexpr int64_t kFewProducts = 1 << 18;  // below this a second thread costs more than it brings
constexpr int64_t kMostProducts = 1 << 26;   // of an item: half a millisecond, that a lost core holds the others up
constexpr int kPanelVectors = kPanel / kLanes;

// The rows that one block of sums is of, the panels, and those to fetch meanwhile.
template <class Element>
struct Operands {
  const Element* x;
  int64_t x_stride, num_inputs;
  const Element *panels, *ahead;

  int64_t panel_size() const { return num_inputs * kPanel; }
};

#if defined(SPMD_AVX512)

// How one step is taken: a pair of inputs of a row by those of a panel's 16 outputs. kRows rows with the panels of a
// pair have as many sums as there are registers for.
template <class Element>
struct Steps;

template <>
struct Steps<float> {
  static constexpr int kRows = 6, kVectors = 2;  // of a panel, one input's and the other's side by side
  SPMD_INLINE Floats left(const float* pair) {
    double bits;
    std::memcpy(&bits, pair, sizeof bits);
    return (Floats)_mm512_set1_pd(bits);
  }
  SPMD_INLINE Floats step(Floats sum, Floats left, Floats right) { return fused(left, right, sum); }
  SPMD_INLINE Floats joined(const Floats* sums) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    const __m512 first = (__m512)sums[0], second = (__m512)sums[1];
    return (Floats)_mm512_permutex2var_ps(first, even, second) + (Floats)_mm512_permutex2var_ps(first, odd, second);
  }
  SPMD_INLINE Floats rounded_sum(Floats sum) { return sum; }
};

#if defined(__AVX512BF16__)
template <>
struct Steps<uint16_t> {
  static constexpr int kRows = 14, kVectors = 1;
  SPMD_INLINE Floats left(const uint16_t* pair) {
    int32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
    return (Floats)_mm512_set1_epi32(bits);
  }
  SPMD_INLINE Floats step(Floats sum, Floats left, Floats right) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)right, (__m512bh)left);
  }
  SPMD_INLINE Floats joined(const Floats* sums) { return sums[0]; }
  SPMD_INLINE Floats rounded_sum(Floats sum) { return rounded(sum); }
};
#endif

// kRows rows by kPanels panels, one after the other in memory; sums go to [kRows][32].
template <class Element, int kRows, int kPanels>
void multiply_block(const Operands<Element>& operands, float* sums) {
  using Step = Steps<Element>;
  constexpr int kVectors = Step::kVectors, kElements = 64 / sizeof(Element);
  Floats totals[kRows][kPanels][kVectors] = {};
  const Element *x = operands.x, *panels = operands.panels, *ahead = operands.ahead;
  const int64_t x_stride = operands.x_stride, panel_size = operands.panel_size(), end = operands.num_inputs;
  for (int64_t input = 0; input < end; input += 2) {
    Floats right[kPanels][kVectors];
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = panel * panel_size + input * kPanel + v * kElements;
        right[panel][v] = load<Floats>(panels + at);
        __builtin_prefetch(ahead + at, 0, 2);
      }
#pragma GCC unroll 14
    for (int row = 0; row < kRows; ++row) {
      const Floats left = Step::left(x + row * x_stride + input);
#pragma GCC unroll 2
      for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          totals[row][panel][v] = Step::step(totals[row][panel][v], left, right[panel][v]);
    }
  }
#pragma GCC unroll 14
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel) store(sums + row * 32 + panel * kPanel, Step::joined(totals[row][panel]));
}

#else

// As above, with half as many registers of half the size: kRows rows with a panel of bfloat16, or half a panel of float32.
template <class Element>
struct Steps;

template <>
struct Steps<float> {
  static constexpr int kRows = 6;
  SPMD_INLINE Floats rounded_sum(Floats sum) { return sum; }
  // Of four outputs in each: the even inputs' sums and the odd ones', side by side.
  SPMD_INLINE Floats joined(Floats first, Floats second) {
    const __m256d pairs = _mm256_castps_pd(_mm256_hadd_ps((__m256)first, (__m256)second));
    return (Floats)_mm256_castpd_ps(_mm256_permute4x64_pd(pairs, 0b11011000));
  }
  // One panel's sums [kRows][32] of these rows.
  template <int kCount>
  SPMD_INLINE void multiply(
      const float* x, int64_t x_stride, int64_t end, const float* panel, const float* ahead, float* sums) {
    for (int half = 0; half < kPanel; half += 8, panel += kPanel, ahead += kPanel, sums += 8) {
      Floats totals[kCount][2] = {};
      for (int64_t input = 0; input < end; input += 2) {
        __builtin_prefetch(ahead + input * kPanel, 0, 2);
        const Floats first = load<Floats>(panel + input * kPanel), second = load<Floats>(panel + input * kPanel + kLanes);
#pragma GCC unroll 6
        for (int row = 0; row < kCount; ++row) {
          double pair;
          std::memcpy(&pair, x + row * x_stride + input, sizeof pair);
          const Floats left = (Floats)_mm256_set1_pd(pair);
          totals[row][0] = fused(left, first, totals[row][0]);
          totals[row][1] = fused(left, second, totals[row][1]);
        }
      }
#pragma GCC unroll 6
      for (int row = 0; row < kCount; ++row) store(sums + row * 32, joined(totals[row][0], totals[row][1]));
    }
  }
};

template <>
struct Steps<uint16_t> {
  static constexpr int kRows = 6;
  SPMD_INLINE Floats rounded_sum(Floats sum) { return rounded(sum); }
  // In all lanes the pair of inputs.
  SPMD_INLINE Words both(const uint16_t* pair) {
    float bits;
    std::memcpy(&bits, pair, sizeof bits);
    return (Words)_mm256_set1_ps(bits);
  }
  // Compilers that look for more to do at once run out of registers.
  SPMD_INLINE void in_turn(Floats* sums) { asm volatile("" : "+x"(sums[0]), "+x"(sums[1])); }
  template <int kCount>
  SPMD_INLINE void multiply(
      const uint16_t* x, int64_t x_stride, int64_t end, const uint16_t* panel, const uint16_t* ahead, float* sums) {
    Floats totals[kCount][2] = {};
    for (int64_t input = 0; input < end; input += 2) {
      __builtin_prefetch(ahead + input * kPanel, 0, 2);
      const uint16_t *first = panel + input * kPanel, *second = first + 2 * kLanes;
      const Floats even[] = {first_of_pairs(load<Words>(first)), first_of_pairs(load<Words>(second))};
#pragma GCC unroll 6
      for (int row = 0; row < kCount; ++row) {
        const Floats left = first_of_pairs(both(x + row * x_stride + input));
        totals[row][0] = fused(left, even[0], totals[row][0]);
        totals[row][1] = fused(left, even[1], totals[row][1]);
        in_turn(totals[row]);
      }
      // What was loaded for the even inputs is loaded again: no registers are left to keep it in.
      asm volatile("" ::: "memory");
      const Floats odd[] = {second_of_pairs(load<Words>(first)), second_of_pairs(load<Words>(second))};
#pragma GCC unroll 6
      for (int row = 0; row < kCount; ++row) {
        const Floats left = second_of_pairs(both(x + row * x_stride + input));
        totals[row][0] = fused(left, odd[0], totals[row][0]);
        totals[row][1] = fused(left, odd[1], totals[row][1]);
        in_turn(totals[row]);
      }
    }
#pragma GCC unroll 6
    for (int row = 0; row < kCount; ++row)
      for (int v = 0; v < 2; ++v) store(sums + row * 32 + v * kLanes, totals[row][v]);
  }
};

// kRows rows by kPanels panels, one after the other in memory; sums go to [kRows][32].
template <class Element, int kRows, int kPanels>
void multiply_block(const Operands<Element>& operands, float* sums) {
  for (int panel = 0; panel < kPanels; ++panel) {
    const int64_t at = panel * operands.panel_size();
    Steps<Element>::template multiply<kRows>(
        operands.x, operands.x_stride, operands.num_inputs, operands.panels + at, operands.ahead + at,
        sums + panel * kPanel);
  }
}

#endif

template <class Element>
using Block = void (*)(const Operands<Element>&, float*);

// By the number of rows.
template <class Element, int kPanels, int... kRows>
constexpr std::array<Block<Element>, sizeof...(kRows)> blocks_of(std::integer_sequence<int, kRows...>) {
  return {multiply_block<Element, kRows + 1, kPanels>...};
}

template <class Element, int kPanels>
constexpr auto kBlocks = blocks_of<Element, kPanels>(std::make_integer_sequence<int, Steps<Element>::kRows>());

// What one thread computes.
template <class Element>
struct Worker {
  using Step = Steps<Element>;
  const ProductOf<Element>& gemm;
  const RowArgmax* argmax;  // or null
  LaneArgmax by_lane;       // of as many rows as are looked through

  Worker(const ProductOf<Element>& product, const RowArgmax* wanted)
      : gemm(product), argmax(wanted), by_lane(wanted == nullptr ? 0 : product.num_rows) {}

  // Rows from `row` up to `end`, at most as many as a block has, by one pair of panels; `fetches` the next pair's.
  void run_block(int64_t row, int64_t end, int64_t pair, bool fetches) {
    const bool has_two = pair * 2 + 1 < gemm.num_panels();
    const auto& blocks = has_two ? kBlocks<Element, 2> : kBlocks<Element, 1>;
    const int64_t ahead = fetches && (pair + 1) * 2 + has_two < gemm.num_panels() ? pair + 1 : pair;
    alignas(64) float sums[Step::kRows * 32];
    blocks[end - row - 1](
        {gemm.x + row * gemm.x_stride, gemm.x_stride, gemm.num_inputs, gemm.panel(pair * 2), gemm.panel(ahead * 2)}, sums);
    argmax == nullptr ? write(row, end, pair, has_two, sums) : look_through(row, end, pair, has_two, sums);
  }

  void write(int64_t row, int64_t end, int64_t pair, bool has_two, const float* sums) const {
    for (int part = 0; part < kPanel; part += kLanes) write_part(row, end, pair, has_two, sums, part);
  }

  // A vector of each panel, from its output `part` on.
  void write_part(int64_t row, int64_t end, int64_t pair, bool has_two, const float* sums, int part) const {
    const int64_t half = gemm.num_outputs / 2, column = (gemm.is_gated ? pair * kPanel : pair * 2 * kPanel) + part;
    const int64_t stride = gemm.is_gated ? half : gemm.num_outputs;
    Floats first_bias{}, second_bias{};
    if (gemm.bias != nullptr) {
      first_bias = load_floats(gemm.bias + column);
      if (has_two) second_bias = load_floats(gemm.bias + (gemm.is_gated ? half + column : column + kPanel));
    }
    for (sums += part; row < end; ++row, sums += 32) {
      Element* to = gemm.to + row * stride + column;
      const Floats first = load<Floats>(sums) + first_bias;
      if (!gemm.is_gated) store_floats(to, first);
      if (!has_two) continue;
      const Floats second = load<Floats>(sums + kPanel) + second_bias;
      if (!gemm.is_gated)
        store_floats(to + kPanel, second);
      else
        store_floats(to, Step::rounded_sum(silu(Step::rounded_sum(first))) * Step::rounded_sum(second));
    }
  }

  void look_through(int64_t row, int64_t end, int64_t pair, bool has_two, const float* sums) {
    const int64_t first = pair * 2 * kPanelVectors;
    for (; row < end; ++row, sums += 32)
      for (int64_t v = 0; v < (1 + has_two) * kPanelVectors; ++v) {
        Floats values = Step::rounded_sum(load<Floats>(sums + v * kLanes));
        if ((first + v + 1) * kLanes > argmax->count)
          values = lane_numbers() + int((first + v) * kLanes) < int(argmax->count) ? values : broadcast(-kInfinity);
        by_lane.take(row, int(first + v), values);
      }
  }

  void merge_argmax() const {
    for (int64_t row = 0; row < gemm.num_rows; ++row) by_lane.merge(row, argmax->values[row], argmax->places[row]);
  }
};

// How a gemm is cut: into blocks of rows by pairs of panels. As many neighbouring blocks make a group as stay in the
// cache while the panels pass; of a group the panels come in ascending order, which `LaneArgmax` relies on, and by each all
// blocks.
struct Cut {
  int64_t num_rows, num_pairs, num_blocks, num_groups;

  template <class Element>
  explicit Cut(const ProductOf<Element>& gemm) : num_rows(gemm.num_rows), num_pairs(gemm.num_pairs()) {
    constexpr int64_t kRows = Steps<Element>::kRows;
    const int64_t block_bytes = gemm.num_inputs * int64_t(sizeof(Element)) * kRows;
    const int64_t blocks_each = std::max<int64_t>(kRowsBytes / block_bytes, 1);
    num_blocks = (num_rows + kRows - 1) / kRows;
    num_groups = (num_blocks + blocks_each - 1) / blocks_each;
  }

  // A unit of work.
  struct Unit {
    int64_t group, pair, block;
  };

  int64_t num_units() const { return num_pairs * num_blocks; }
  int64_t first_row(int64_t block) const { return num_rows * block / num_blocks; }
  int64_t first_block(int64_t group) const { return num_blocks * group / num_groups; }

  Unit unit(int64_t number) const {
    int64_t group = number / num_pairs * num_groups / num_blocks;
    while (first_block(group + 1) * num_pairs <= number) ++group;
    const int64_t first = first_block(group), size = first_block(group + 1) - first;
    const int64_t place = number - first * num_pairs;
    return {group, place / size, first + place % size};
  }

  Unit unit_after(Unit unit) const {
    if (++unit.block < first_block(unit.group + 1)) return unit;
    if (++unit.pair == num_pairs) ++unit.group, unit.pair = 0;
    unit.block = first_block(unit.group);
    return unit;
  }
};

template <class Element>
void multiply_all(const ProductOf<Element>& gemm, const RowArgmax* argmax, int num_threads) {
  const bool is_small = gemm.num_rows * gemm.num_inputs * gemm.num_outputs < kFewProducts;
  if (is_small) num_threads = 1;
  const Cut cut(gemm);
  const int64_t unit_products = Steps<Element>::kRows * 2 * kPanel * gemm.num_inputs;
  const ShrinkingItems all(cut.num_units(), num_threads, kMostProducts / unit_products);
  std::mutex merging;
  run_by_team(all.size(), num_threads, [&](Items& items) {
    Worker<Element> worker(gemm, argmax);
    for (int64_t item = items.next(); item >= 0; item = items.next()) {
      Cut::Unit unit = cut.unit(all.start(item));
      int64_t last_pair = -1;
      for (int64_t number = all.start(item); number < all.end(item); ++number, unit = cut.unit_after(unit)) {
        // The first block by a pair fetches the next pair; after it what is fetched is there.
        worker.run_block(
            cut.first_row(unit.block), cut.first_row(unit.block + 1), unit.pair, unit.pair != last_pair);
        last_pair = unit.pair;
      }
    }
    if (argmax == nullptr) return;
    const std::lock_guard<std::mutex> alone(merging);
    worker.merge_argmax();
  });
}

}  // namespace

#endif

// To be called only where `spmd_packs_float32` says so.
void multiply_by_vectors(const ProductOf<float>& gemm, const RowArgmax* argmax, int num_threads) {
#if defined(SPMD_AVX512) || defined(SPMD_AVX2)
  multiply_all(gemm, argmax, num_threads);
#else
  (void)gemm, (void)argmax, (void)num_threads;
#endif
}

// To be called only where `spmd_packs_bfloat16` says so.
void multiply_by_vectors(const ProductOf<uint16_t>& gemm, const RowArgmax* argmax, int num_threads) {
#if defined(SPMD_AVX2) || (defined(SPMD_AVX512) && defined(__AVX512BF16__))
  multiply_all(gemm, argmax, num_threads);
#else
  (void)gemm, (void)argmax, (void)num_threads;
#endif
}
