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
#include "elements.h"
#include "exports.h"
#include "gemm.h"
#include "row_addresses.h"
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

// What becomes of a block's sums, a row's vector `part` of each panel at a time. Left in memory, [rows][32]:
struct LeftInMemory {
  float* sums;

  template <int kPanels>
  SPMD_INLINE_MEMBER void take(int row, int part, const Floats* of_panels) const {
    for (int panel = 0; panel < kPanels; ++panel)
      store(sums + row * 32 + panel * kPanel + part * kLanes, of_panels[panel]);
  }
};

// Written with their biases as results: straight from registers where they are there.
template <class Element, bool kIsGated>
struct Written {
  Element* to;
  int64_t stride;
  Floats biases[2][kPanelVectors];

  template <int kPanels>
  SPMD_INLINE_MEMBER void take(int row, int part, const Floats* of_panels) const {
    Element* const place = to + row * stride + part * kLanes;
    const Floats first = of_panels[0] + biases[0][part];
    if constexpr (!kIsGated) store_floats(place, first);
    if constexpr (kPanels == 2) {
      const Floats second = of_panels[1] + biases[1][part];
      if constexpr (!kIsGated)
        store_floats(place + kPanel, second);
      else
        store_floats(place, as_kept<Element>(silu(as_kept<Element>(first))) * as_kept<Element>(second));
    }
  }
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
};
#endif

// kRows rows by kPanels panels, one after the other in memory.
template <class Element, class Ending, int kRows, int kPanels>
void multiply_block(const Operands<Element>& operands, const Ending& ending) {
  using Step = Steps<Element>;
  constexpr int kVectors = Step::kVectors, kElements = 64 / sizeof(Element);
  Floats totals[kRows][kPanels][kVectors] = {};
  const Element *panels = operands.panels, *ahead = operands.ahead;
  const int64_t panel_size = operands.panel_size();
  RowAddresses<Element, kRows> x(operands.x, operands.x_stride);
  for (int64_t num_left = operands.num_inputs; num_left > 0; num_left -= 2) {
    Floats right[kPanels][kVectors];
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = panel * panel_size + v * kElements;
        right[panel][v] = load<Floats>(panels + at);
        __builtin_prefetch(ahead + at, 0, 2);
      }
    panels += 2 * kPanel, ahead += 2 * kPanel;
#pragma GCC unroll 14
    for (int row = 0; row < kRows; ++row) {
      const Floats left = Step::left(x.row(row));
#pragma GCC unroll 2
      for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          totals[row][panel][v] = Step::step(totals[row][panel][v], left, right[panel][v]);
    }
    x.advance(2);
  }
#pragma GCC unroll 14
  for (int row = 0; row < kRows; ++row) {
    Floats of_panels[kPanels];
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel) of_panels[panel] = Step::joined(totals[row][panel]);
    ending.template take<kPanels>(row, 0, of_panels);
  }
}

#else

// As above, with half as many registers of half the size: kRows rows with a panel of bfloat16, or half a panel of float32.
template <class Element>
struct Steps;

template <>
struct Steps<float> {
  static constexpr int kRows = 6;
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

// kRows rows by kPanels panels, one after the other in memory.
template <class Element, class Ending, int kRows, int kPanels>
void multiply_block(const Operands<Element>& operands, const Ending& ending) {
  alignas(64) float sums[kRows * 32];
  for (int panel = 0; panel < kPanels; ++panel) {
    const int64_t at = panel * operands.panel_size();
    Steps<Element>::template multiply<kRows>(
        operands.x, operands.x_stride, operands.num_inputs, operands.panels + at, operands.ahead + at,
        sums + panel * kPanel);
  }
  for (int row = 0; row < kRows; ++row)
    for (int part = 0; part < kPanelVectors; ++part) {
      Floats of_panels[kPanels];
      for (int panel = 0; panel < kPanels; ++panel)
        of_panels[panel] = load<Floats>(sums + row * 32 + panel * kPanel + part * kLanes);
      ending.template take<kPanels>(row, part, of_panels);
    }
}

#endif

template <class Element, class Ending>
using Block = void (*)(const Operands<Element>&, const Ending&);

// By the number of rows.
template <class Element, class Ending, int kPanels, int... kRows>
constexpr std::array<Block<Element, Ending>, sizeof...(kRows)> blocks_of(std::integer_sequence<int, kRows...>) {
  return {multiply_block<Element, Ending, kRows + 1, kPanels>...};
}

template <class Element, class Ending, int kPanels>
constexpr auto kBlocks = blocks_of<Element, Ending, kPanels>(std::make_integer_sequence<int, Steps<Element>::kRows>());

// What one thread computes.
template <class Element>
struct Worker {
  using Step = Steps<Element>;
  const ProductOf<Element>& gemm;
  const RowArgmax* argmax;  // or null
  LaneArgmax by_lane;       // of as many rows as are looked through

  Worker(const ProductOf<Element>& product, const RowArgmax* wanted)
      : gemm(product), argmax(wanted), by_lane(wanted == nullptr ? 0 : product.num_rows) {}

  // Rows from `row` up to `end`, at most as many as a block has, by one pair of panels; fetches the pair `ahead`.
  void run_block(int64_t row, int64_t end, int64_t pair, int64_t ahead) {
    if (argmax != nullptr) {
      alignas(64) float sums[Step::kRows * 32];
      multiply(row, end, pair, ahead, LeftInMemory{sums});
      look_through(row, end, pair, has_two(pair), sums);
    } else if (gemm.is_gated) {
      multiply(row, end, pair, ahead, results<true>(row, pair));
    } else {
      multiply(row, end, pair, ahead, results<false>(row, pair));
    }
  }

  bool has_two(int64_t pair) const { return pair * 2 + 1 < gemm.num_panels(); }

  template <class Ending>
  void multiply(int64_t row, int64_t end, int64_t pair, int64_t ahead, const Ending& ending) const {
    const auto& blocks = has_two(pair) ? kBlocks<Element, Ending, 2> : kBlocks<Element, Ending, 1>;
    if (has_two(pair) && !has_two(ahead)) ahead = pair;  // there are not as many panels to fetch
    const Element* const x = gemm.x + row * gemm.x_stride;
    blocks[end - row - 1]({x, gemm.x_stride, gemm.num_inputs, gemm.panel(pair * 2), gemm.panel(ahead * 2)}, ending);
  }

  template <bool kIsGated>
  Written<Element, kIsGated> results(int64_t row, int64_t pair) const {
    const int64_t half = gemm.num_outputs / 2, column = kIsGated ? pair * kPanel : pair * 2 * kPanel;
    const int64_t stride = kIsGated ? half : gemm.num_outputs;
    Written<Element, kIsGated> results = {gemm.to + row * stride + column, stride, {}};
    if (gemm.bias != nullptr)
      for (int part = 0; part < kPanelVectors; ++part) {
        const Element* const bias = gemm.bias + column + part * kLanes;
        results.biases[0][part] = load_floats(bias);
        if (has_two(pair)) results.biases[1][part] = load_floats(bias + (kIsGated ? half : kPanel));
      }
    return results;
  }

  void look_through(int64_t row, int64_t end, int64_t pair, bool has_two, const float* sums) {
    const int64_t first = pair * 2 * kPanelVectors;
    for (; row < end; ++row, sums += 32)
      for (int64_t v = 0; v < (1 + has_two) * kPanelVectors; ++v) {
        Floats values = as_kept<Element>(load<Floats>(sums + v * kLanes));
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
  // Items of whole pairs, as long as they are long: a pair that two threads share moves from cache to cache.
  const int64_t together = cut.num_groups == 1 ? cut.num_blocks : 1;
  const ShrinkingItems all(cut.num_units(), num_threads, kMostProducts / unit_products, together);
  std::mutex merging;
  run_by_team(all.size(), num_threads, [&](Items& items) {
    Worker<Element> worker(gemm, argmax);
    for (int64_t item = items.next(), following = -1; item >= 0; item = following) {
      const int64_t end = all.end(item);
      Cut::Unit unit = cut.unit(all.start(item));
      for (int64_t number = all.start(item); number < end;) {
        // All blocks by one pair. The first fetches the pair that this thread comes to next, if need be by taking an item
        // early; after it what is fetched is there.
        const int64_t pair = unit.pair, last = std::min(end, number + cut.first_block(unit.group + 1) - unit.block);
        int64_t ahead = (pair + 1) % cut.num_pairs;
        if (last == end) {
          following = items.next();
          ahead = following < 0 ? pair : cut.unit(all.start(following)).pair;
        }
        for (; number < last; ++number, unit = cut.unit_after(unit), ahead = pair)
          worker.run_block(cut.first_row(unit.block), cut.first_row(unit.block + 1), pair, ahead);
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
