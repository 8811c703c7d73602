// Epilogues of a GEMM, row by row (gemm_driver.h): store results, with bias and SwiGLU; keep the argmax of each row without
// storing the results; or store int32 sums.
#pragma once

#include <type_traits>

#include "argmax.h"
#include "byte_rows.h"
#include "gemm_driver.h"

namespace {

template <class Sum>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Type = Floats;
};
template <>
struct VectorOf<int32_t> {
  using Type = Ints;
};

// Takes the sums of a row from memory, [2][16]. Those of a missing second panel are read, and nothing is made of them.
template <class Epilogue, class Sum>
SPMD_INLINE void take_row(Epilogue& epilogue, int64_t row, int64_t pair, int num_panels, const Sum* sums) {
  using Vector = typename VectorOf<Sum>::Type;
  Vector of_row[2 * kPanelVectors];
  for (int v = 0; v < 2 * kPanelVectors; ++v) of_row[v] = load<Vector>(sums + v * kLanes);
  epilogue.take(row, pair, num_panels, of_row);
}

// Sums -> numbers, for float: adds the bias, or zero without one.
struct Unscaled {
  static constexpr float kNoBias = 0.0f;
  SPMD_INLINE_MEMBER float row_scale(int64_t) const { return 1.0f; }
  SPMD_INLINE_MEMBER Floats number(Floats sums, float, int64_t, int) const { return sums; }
};

struct Dequantised {
  const Gemm<int8_t>& gemm;
  const float* maxima;  // of the rows

  static constexpr float kNoBias = -0.0f;
  SPMD_INLINE_MEMBER float row_scale(int64_t row) const { return scale_of(maxima[row]); }
  SPMD_INLINE_MEMBER Floats number(Ints sums, float row_scale, int64_t panel, int lane) const {
    const int8_t* const scales = gemm.panel(panel) + gemm.num_inputs * kPanel;
    return __builtin_convertvector(sums, Floats) * broadcast(row_scale) * load<Floats>(scales + lane * 4);
  }
};

// Results [rows][outputs], or half as many columns of a gated weight. The bias, or null, has all gates first.
template <class Element, class Scaling>
struct Store {
  static constexpr bool kTakesRegisters = std::is_same_v<Scaling, Unscaled>;
  Scaling scaling;
  int64_t num_outputs;
  const Element* bias;
  Element* to;
  bool is_gated;
  bool passes_caches = false;  // complete lines of results, too large to stay in a cache until they are read
  int64_t to_stride = 0;       // elements from one row of results to the next; 0: the rows are adjacent

  template <class Vector>
  SPMD_INLINE_MEMBER void take(int64_t row, int64_t pair, int num_panels, const Vector* sums) const {
    const int64_t half = num_outputs / 2, column = first_column(pair);
    Element* const first_to = place(row, column);
    const float row_scale = scaling.row_scale(row);
    for (int part = 0; part < kPanelVectors; ++part) {
      const int lane = part * kLanes;
      const Floats first = biased(scaling.number(sums[part], row_scale, pair * 2, lane), column + lane);
      if (num_panels == 1) {
        store_floats(first_to + lane, first);
        continue;
      }
      const Floats second = biased(
          scaling.number(sums[kPanelVectors + part], row_scale, pair * 2 + 1, lane),
          column + lane + (is_gated ? half : kPanel));
      if (is_gated)
        store_floats(first_to + lane, as_kept<Element>(silu(as_kept<Element>(first))) * as_kept<Element>(second));
      else if (!passes_caches)
        store_floats(first_to + lane, first), store_floats(first_to + lane + kPanel, second);
#if defined(SPMD_AVX512) && defined(__AVX512BF16__)
      else if constexpr (sizeof(Element) == 2)
        _mm512_stream_si512(
            reinterpret_cast<__m512i*>(first_to), (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
      else
        _mm512_stream_ps(first_to, (__m512)first), _mm512_stream_ps(first_to + kPanel, (__m512)second);
#endif
    }
  }
  void finish() const {}

  // Has the lines of a row by a pair brought to the cache for `take`.
  SPMD_INLINE_MEMBER void expect(int64_t row, int64_t pair) const {
    if (passes_caches) return;
    const Element* const first = place(row, first_column(pair));
    __builtin_prefetch(first, 1, 2);
    if (!is_gated) __builtin_prefetch(first + 2 * kPanel - 1, 1, 2);
  }

  SPMD_INLINE_MEMBER int64_t first_column(int64_t pair) const { return pair * kPanel * (is_gated ? 1 : 2); }
  SPMD_INLINE_MEMBER Element* place(int64_t row, int64_t column) const {
    return to + row * (to_stride > 0 ? to_stride : is_gated ? num_outputs / 2 : num_outputs) + column;
  }

  SPMD_INLINE_MEMBER Floats biased(Floats value, int64_t column) const {
    return value + (bias == nullptr ? broadcast(Scaling::kNoBias) : load_floats(bias + column));
  }
};

// The maximum of each row and its first index among the first `count` outputs, rounded as results are.
template <class Element, class Scaling>
struct Argmax {
  static constexpr bool kTakesRegisters = false;
  Scaling scaling;
  int64_t num_rows, count;
  float* values;
  int64_t* indices;
  LaneArgmax by_lane;

  Argmax(Scaling of_sums, int64_t rows, int64_t outputs, float* of_rows, int64_t* at)
      : scaling(of_sums), num_rows(rows), count(outputs), values(of_rows), indices(at), by_lane(rows) {
    std::fill_n(values, rows, -kInfinity), std::fill_n(indices, rows, 0);
  }

  template <class Vector>
  SPMD_INLINE_MEMBER void take(int64_t row, int64_t pair, int num_panels, const Vector* sums) {
    const float row_scale = scaling.row_scale(row);
    for (int v = 0; v < num_panels * kPanelVectors; ++v) {
      const int64_t number = pair * 2 * kPanelVectors + v;
      Floats numbers = as_kept<Element>(
          scaling.number(sums[v], row_scale, pair * 2 + v / kPanelVectors, v % kPanelVectors * kLanes));
      if ((number + 1) * kLanes > count)
        numbers = lane_numbers() + int(number * kLanes) < int(count) ? numbers : broadcast(-kInfinity);
      by_lane.take(row, int(number), numbers);
    }
  }
  void finish() const {
    for (int64_t row = 0; row < num_rows; ++row) by_lane.merge(row, values[row], indices[row]);
  }
  void expect(int64_t, int64_t) const {}
};

// The sum of all leaves: the bias has been added, and minus zero changes no number.
struct Total : Unscaled {
  static constexpr float kNoBias = -0.0f;
};

// Adds up the leaves of each result by a binary tree, and stores it rounded or as float, a part of a sum over ranks.
//
// What is left of the tree at any time is a stack of subtrees, the largest first. Leaf i is put on level popcount(i); if it
// completes subtrees, the level below is added to it, ctz(i + 1) times.
template <class Element>
struct AddLeaves {
  static constexpr bool kTakesRegisters = false;
  const Gemm<Element>& gemm;
  const Element* bias;  // or null
  Store<Element, Total> rounded;
  Store<float, Total> part;  // used if it stores anywhere
  // Of the block and leaf whose rows are taken, if a leaf is a part of the inputs: found once, because a row has few
  // instructions between those of AMX.
  const Element* leaf_bias = nullptr;
  bool completes = true;
  int num_left = 0;        // subtrees that the leaf completes
  int64_t first_row = 0, level_size = 0;
  float* place = nullptr;  // its level, [rows][32]

  static int level(int64_t leaf) { return __builtin_popcountll(uint64_t(leaf)); }
  static int num_additions(int64_t leaf) { return __builtin_ctzll(uint64_t(leaf) + 1); }
  bool is_last(int64_t of) const { return of + 1 == gemm.leaves.count; }
  bool has_bias(int64_t of) const { return of == 0 && bias != nullptr; }

  void begin(int64_t leaf, int64_t row, float* levels, int64_t size) {
    leaf_bias = has_bias(leaf) ? bias : nullptr, completes = is_last(leaf), num_left = num_additions(leaf);
    first_row = row, level_size = size, place = levels + level(leaf) * size;
  }

  SPMD_INLINE_MEMBER void take(int64_t row, int64_t pair, int num_panels, const Floats* sums) const {
    Floats totals[2 * kPanelVectors];
    for (int v = 0; v < 2 * kPanelVectors; ++v) totals[v] = sums[v];
    if (leaf_bias != nullptr)
      for (int v = 0; v < num_panels * kPanelVectors; ++v)
        totals[v] = totals[v] + load_floats(leaf_bias + pair * 2 * kPanel + v * kLanes);
    float* left = place + (row - first_row) * 32;
    for (int count = num_left; count > 0; --count) {
      left -= level_size;
      for (int v = 0; v < 2 * kPanelVectors; ++v) totals[v] = load<Floats>(left + v * kLanes) + totals[v];
    }
    if (!completes)
      for (int v = 0; v < 2 * kPanelVectors; ++v) store(left + v * kLanes, totals[v]);
    else if (part.to != nullptr)
      part.take(row, pair, num_panels, totals);
    else
      rounded.take(row, pair, num_panels, totals);
  }
  void finish() const {}
  SPMD_INLINE_MEMBER void expect(int64_t row, int64_t pair) const {
    part.to != nullptr ? part.expect(row, pair) : rounded.expect(row, pair);
  }
};

template <class Element>
constexpr bool kHasLeaves<AddLeaves<Element>> = true;

struct StoreSums {
  static constexpr bool kTakesRegisters = false;
  int64_t num_outputs;
  int32_t* to;

  SPMD_INLINE_MEMBER void take(int64_t row, int64_t pair, int num_panels, const Ints* sums) const {
    for (int v = 0; v < num_panels * kPanelVectors; ++v)
      store(to + row * num_outputs + pair * 2 * kPanel + v * kLanes, sums[v]);
  }
  void finish() const {}
  SPMD_INLINE_MEMBER void expect(int64_t row, int64_t pair) const {
    for (int panel = 0; panel < 2; ++panel) __builtin_prefetch(to + row * num_outputs + (pair * 2 + panel) * kPanel, 1, 2);
  }
};

}  // namespace
