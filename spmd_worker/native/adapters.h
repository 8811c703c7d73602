// Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): rows of a linear layer's outputs += B (A x), each row with
// the matrices of its own adapter.
//
// A is packed as [rank / 16][inputs / 2][16][2] bfloat16 or [rank / 16][inputs][16] float32, B as [outputs / 16][rank][16]:
// both are read from beginning to end, and missing elements are zero. A x is kept in float32: one chain over the inputs in
// ascending order, or two with AVX-512; so is B (A x), one chain over the ranks, which is added to the rounded output and
// rounded once more. Rows that are computed together share the loads of a matrix and nothing else.
//
// Inputs that ranks share are summed in leaves (ranks/leaves.py): each has chains of its own, and A has its inputs from a
// pair on, so that a leaf of an odd number ends with a zero. Leaves are added by a binary tree over neighbours.
#pragma once

#include <cstring>

#include "elements.h"
#include "gemm.h"

namespace {

constexpr int kAdapterRows = kLanes == 16 ? 8 : 4;
constexpr int kChains = kLanes == 16 ? 2 : 1;
constexpr int kMaxRank = 512, kMaxParts = 6;
// Sums of rows are kept at a distance for all parts, or for the subtrees of 64 leaves of the only part.
constexpr int kMaxLevels = 7;
constexpr int64_t kSumsStride = (kMaxParts > kMaxLevels ? kMaxParts : kMaxLevels) * kMaxRank;

// Panels whose sums, `rows` vectors or more each, fit into the registers.
constexpr int panels_at_once(int rows) {
  const int most = (kLanes == 16 ? 24 : 12) / (rows * kPanelVectors);
  return most < 1 ? 1 : most > 4 ? 4 : most;
}

// One adapter's matrices for one part of a layer; `a` is null if it has none. Filled by Python (cpu/adapters.py).
struct AdapterMatrices {
  const void *a, *b;
  int64_t rank;  // columns of B: A has as many rows, rounded up to a multiple of 16
};

// Outputs of a part of a layer.
struct AdapterPart {
  int64_t start, stop;
};

// Rows with one adapter: entries `first` to `first + count` of the step's rows.
struct AdapterBlock {
  int64_t slot, first, count;
};

// The rows of a step that have adapters, ordered by adapter.
struct AdapterRows {
  const int64_t* rows;
  const AdapterBlock* blocks;
  int64_t num_blocks;
};

// One layer: matrices [slots][parts]; null if it takes no adapters. More than one leaf, a power of two, where it has one
// part: they end at `leaf_ends`.
struct AdapterLayer {
  const AdapterMatrices* matrices;
  const AdapterPart* parts;
  const int64_t* leaf_ends;
  int64_t num_parts, num_inputs, num_leaves;
};

// Column of an output. Gated panels have 16 gates, 16 of the up projection and so on: `half` is the number of gates, or 0 for
// columns in the order of outputs.
SPMD_INLINE int64_t column_of(int64_t output, int64_t half) {
  if (half == 0) return output;
  const int64_t within = output < half ? output : output - half;
  return within / kPanel * 2 * kPanel + within % kPanel + (output < half ? 0 : kPanel);
}

// One step of A x for 16 ranks: a pair of bfloat16 inputs, or one float32 input.
struct ShrinkFloat32 {
  using Element = float;
  static constexpr int kInputs = 1;
  using Left = float;
  struct Right {
    Floats vectors[kPanelVectors];
  };
  SPMD_INLINE Right load_right(const float* from) {
    Right right;
    for (int v = 0; v < kPanelVectors; ++v) right.vectors[v] = load<Floats>(from + v * kLanes);
    return right;
  }
  SPMD_INLINE Left left(const float* x) { return *x; }
  SPMD_INLINE Left last(const float* x) { return *x; }
  SPMD_INLINE Floats step(Floats sum, const Right& right, int v, Left left) {
    return fused(broadcast(left), right.vectors[v], sum);
  }
};

#if defined(SPMD_AVX512) && defined(__AVX512BF16__)
struct ShrinkBfloat16 {
  using Element = uint16_t;
  static constexpr int kInputs = 2;
  using Left = int32_t;
  using Right = __m512bh;
  SPMD_INLINE Right load_right(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
  SPMD_INLINE Left left(const uint16_t* x) { return load<int32_t>(x); }
  SPMD_INLINE Left last(const uint16_t* x) { return *x; }
  SPMD_INLINE Floats step(Floats sum, Right right, int, Left left) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, right, (__m512bh)_mm512_set1_epi32(left));
  }
};
#else
struct ShrinkBfloat16 {
  using Element = uint16_t;
  static constexpr int kInputs = 2;
  struct Left {
    float first, second;
  };
  struct Right {
    Words pairs[kPanelVectors];
  };
  SPMD_INLINE Right load_right(const uint16_t* from) {
    Right right;
    for (int v = 0; v < kPanelVectors; ++v) right.pairs[v] = load<Words>(from + v * 2 * kLanes);
    return right;
  }
  SPMD_INLINE Left left(const uint16_t* x) { return {widened(x[0]), widened(x[1])}; }
  SPMD_INLINE Left last(const uint16_t* x) { return {widened(x[0]), 0.0f}; }
  SPMD_INLINE Floats step(Floats sum, const Right& right, int v, Left left) {
    return fused(
        broadcast(left.second), second_of_pairs(right.pairs[v]),
        fused(broadcast(left.first), first_of_pairs(right.pairs[v]), sum));
  }
};
#endif

// Inputs that A has side by side.
template <class Element>
constexpr int kPairOf = sizeof(Element) == 2 ? 2 : 1;

template <class Element>
struct ShrinkOf;
template <>
struct ShrinkOf<float> {
  using Type = ShrinkFloat32;
};
template <>
struct ShrinkOf<uint16_t> {
  using Type = ShrinkBfloat16;
};

// 16 rows of A, and where their products with the inputs go: [rows][stride].
template <class Element>
struct ShrinkPanel {
  const Element* a;
  float* to;
};

// GCC copies a function for each constant that a caller passes: of these that took half of the compile time, and the copies
// are no faster.
#if defined(__GNUC__) && !defined(__clang__)
#define SPMD_NO_COPIES __attribute__((noclone))
#else
#define SPMD_NO_COPIES
#endif

// A x of kRows rows for kPanels panels. Chains of even and of odd steps are added at the end.
template <class Element, int kRows, int kPanels>
SPMD_NO_COPIES void shrink_panels(
    const Element* const* x, int64_t num_inputs, const ShrinkPanel<Element>* panels, int64_t to_stride) {
  using Shrink = typename ShrinkOf<Element>::Type;
  constexpr int kInputs = Shrink::kInputs;
  Floats sums[kChains][kRows][kPanels][kPanelVectors] = {};
  const auto step = [&](Floats(&chain)[kRows][kPanels][kPanelVectors], int64_t input, auto left_of) {
    typename Shrink::Right right[kPanels];
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel) right[panel] = Shrink::load_right(panels[panel].a + input * kPanel);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const typename Shrink::Left left = left_of(x[row] + input);
#pragma GCC unroll 4
      for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v)
          chain[row][panel][v] = Shrink::step(chain[row][panel][v], right[panel], v, left);
    }
  };
  const auto left = [](const Element* inputs) { return Shrink::left(inputs); };
  int64_t input = 0;
  for (; input + kChains * kInputs <= num_inputs; input += kChains * kInputs)
#pragma GCC unroll 2
    for (int chain = 0; chain < kChains; ++chain) step(sums[chain], input + chain * kInputs, left);
  int chain = 0;
  for (; input + kInputs <= num_inputs; input += kInputs, ++chain) step(sums[chain], input, left);
  if (input < num_inputs) step(sums[chain], input, [](const Element* inputs) { return Shrink::last(inputs); });
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) {
        Floats sum = sums[0][row][panel][v];
        for (int other = 1; other < kChains; ++other) sum = sum + sums[other][row][panel][v];
        store(panels[panel].to + row * to_stride + v * kLanes, sum);
      }
}

// All panels, as many at once as fit into the registers.
template <class Element, int kRows>
void shrink_rows(
    const Element* const* x, int64_t num_inputs, const ShrinkPanel<Element>* panels, int64_t count,
    int64_t to_stride) {
  constexpr int kMost = panels_at_once(kRows * kChains);
  while (count > 0) {
    const int64_t number = count < kMost ? count : kMost;
    if constexpr (kMost >= 4)
      if (number == 4) shrink_panels<Element, kRows, 4>(x, num_inputs, panels, to_stride);
    if constexpr (kMost >= 3)
      if (number == 3) shrink_panels<Element, kRows, 3>(x, num_inputs, panels, to_stride);
    if constexpr (kMost >= 2)
      if (number == 2) shrink_panels<Element, kRows, 2>(x, num_inputs, panels, to_stride);
    if (number == 1) shrink_panels<Element, kRows, 1>(x, num_inputs, panels, to_stride);
    panels += number, count -= number;
  }
}

// kPanels panels of outputs of kRows rows, from `output` on, += B of `shrunk` [rows][stride].
template <class Element, int kRows, int kPanels>
SPMD_NO_COPIES void expand_panels(
    const float* shrunk, int64_t stride, const Element* b, int64_t rank, int64_t output, int64_t stop, int64_t half,
    Element* const* y) {
  Floats sums[kRows][kPanels][kPanelVectors] = {};
  for (int64_t k = 0; k < rank; ++k) {
    Floats right[kPanels][kPanelVectors];
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v)
        right[panel][v] = load_floats(b + (panel * rank + k) * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Floats left = broadcast(shrunk[row * stride + k]);
#pragma GCC unroll 4
      for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v)
          sums[row][panel][v] = fused(left, right[panel][v], sums[row][panel][v]);
    }
  }
#pragma GCC unroll 4
  for (int panel = 0; panel < kPanels; ++panel, output += kPanel) {
    if (output + kPanel <= stop && (half == 0 || output % kPanel == 0)) {
      const int64_t column = column_of(output, half);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
          Element* const to = y[row] + column + v * kLanes;
          store_floats(to, load_floats(to) + sums[row][panel][v]);
        }
      continue;
    }
    for (int row = 0; row < kRows; ++row) {
      float lanes[kPanel];
      for (int v = 0; v < kPanelVectors; ++v) store(lanes + v * kLanes, sums[row][panel][v]);
      for (int64_t lane = 0; lane < kPanel && output + lane < stop; ++lane) {
        Element* const to = y[row] + column_of(output + lane, half);
        from_float(to_float(*to) + lanes[lane], to);
      }
    }
  }
}

template <class Element, int kRows>
void expand_rows(
    const float* shrunk, int64_t stride, const Element* b, int64_t rank, AdapterPart part, int64_t half,
    Element* const* y) {
  constexpr int kMost = kRows >= 6 ? 1 : panels_at_once(kRows);
  int64_t output = part.start;
  for (; output + (kMost - 1) * kPanel < part.stop; output += kMost * kPanel, b += kMost * rank * kPanel)
    expand_panels<Element, kRows, kMost>(shrunk, stride, b, rank, output, part.stop, half, y);
  for (; output < part.stop; output += kPanel, b += rank * kPanel)
    expand_panels<Element, kRows, 1>(shrunk, stride, b, rank, output, part.stop, half, y);
}

// Elements of a panel of A with so many inputs.
template <class Element>
SPMD_INLINE int64_t shrink_panel_size(int64_t num_inputs) {
  return (num_inputs + kPairOf<Element> - 1) / kPairOf<Element> * kPairOf<Element> * kPanel;
}

// A x of the only part, in leaves. The sum of leaf i goes to level popcount(i) of `sums` [rows][levels][kMaxRank], and to
// the level below as often as subtrees end with it; the tree's is in level 0.
template <class Element, int kRows>
void shrink_leaves(const AdapterLayer& layer, const AdapterMatrices& matrices, const Element* const* x, float* sums) {
  ShrinkPanel<Element> panels[kMaxRank / kPanel];
  const Element* inputs[kRows];
  int64_t size = 0, begin = 0, before = 0, rank = 0;
  for (int64_t leaf = 0, start = 0; leaf < layer.num_leaves; start = layer.leaf_ends[leaf++])
    size += shrink_panel_size<Element>(layer.leaf_ends[leaf] - start);
  for (int64_t leaf = 0; leaf < layer.num_leaves; begin = layer.leaf_ends[leaf++]) {
    int64_t level = __builtin_popcountll(leaf), count = 0;
    for (rank = 0; rank < matrices.rank; rank += kPanel)
      panels[count++] = {
          static_cast<const Element*>(matrices.a) + rank / kPanel * size + before, sums + level * kMaxRank + rank};
    for (int row = 0; row < kRows; ++row) inputs[row] = x[row] + begin;
    shrink_rows<Element, kRows>(inputs, layer.leaf_ends[leaf] - begin, panels, count, kSumsStride);
    before += shrink_panel_size<Element>(layer.leaf_ends[leaf] - begin);
    for (int64_t end = leaf; end & 1; end >>= 1, --level)
      for (int row = 0; row < kRows; ++row) {
        float *const above = sums + row * kSumsStride + level * kMaxRank, *const to = above - kMaxRank;
        for (int64_t at = 0; at < rank; at += kLanes) store(to + at, load<Floats>(to + at) + load<Floats>(above + at));
      }
  }
}

// A x of all parts -> `sums` [rows][parts][kMaxRank].
template <class Element, int kRows>
void shrink_parts(
    const AdapterLayer& layer, const AdapterMatrices* of_slot, const Element* const* x, float* sums) {
  if (layer.num_leaves > 1) {
    if (of_slot->a != nullptr) shrink_leaves<Element, kRows>(layer, *of_slot, x, sums);
    return;
  }
  ShrinkPanel<Element> panels[kMaxParts * kMaxRank / kPanel];
  int64_t count = 0;
  for (int64_t part = 0; part < layer.num_parts; ++part) {
    const Element* const a = static_cast<const Element*>(of_slot[part].a);
    if (a == nullptr) continue;
    const int64_t size = shrink_panel_size<Element>(layer.num_inputs);
    for (int64_t panel = 0; panel * kPanel < of_slot[part].rank; ++panel)
      panels[count++] = {a + panel * size, sums + part * kMaxRank + panel * kPanel};
  }
  shrink_rows<Element, kRows>(x, layer.num_inputs, panels, count, kSumsStride);
}

// Outputs += B of `sums`.
template <class Element, int kRows>
void expand_parts(
    const AdapterLayer& layer, const AdapterMatrices* of_slot, const float* sums, int64_t half, Element* const* y) {
  for (int64_t part = 0; part < layer.num_parts; ++part) {
    const AdapterMatrices& matrices = of_slot[part];
    if (matrices.a == nullptr) continue;
    expand_rows<Element, kRows>(
        sums + part * kMaxRank, kSumsStride, static_cast<const Element*>(matrices.b), matrices.rank, layer.parts[part],
        half, y);
  }
}

template <int kNumber>
struct RowCount {
  static constexpr int kRows = kNumber;
};

// Calls `run` with the numbers of the rows of a block, as many at once as the kernels take, and their count.
template <class Run>
void for_rows(const AdapterRows& step, const AdapterBlock& block, Run run) {
  for (int64_t done = 0; done < block.count; done += kAdapterRows) {
    const int64_t* const rows = step.rows + block.first + done;
    const int64_t count = block.count - done < kAdapterRows ? block.count - done : kAdapterRows;
    switch (count) {
      case 1: run(rows, RowCount<1>{}); break;
      case 2: run(rows, RowCount<2>{}); break;
      case 3: run(rows, RowCount<3>{}); break;
      case 4: run(rows, RowCount<4>{}); break;
#if defined(SPMD_AVX512)
      case 5: run(rows, RowCount<5>{}); break;
      case 6: run(rows, RowCount<6>{}); break;
      case 7: run(rows, RowCount<7>{}); break;
      default: run(rows, RowCount<8>{}); break;
#else
      default: break;
#endif
    }
  }
}

// All rows of one block. `half`: see `column_of`.
template <class Element>
void add_adapter(
    const AdapterLayer& layer, const AdapterRows& step, const AdapterBlock& block, const Element* x, int64_t x_stride,
    Element* y, int64_t y_stride, int64_t half) {
  const AdapterMatrices* const of_slot = layer.matrices + block.slot * layer.num_parts;
  for_rows(step, block, [&](const int64_t* rows, auto count) {
    constexpr int kRows = decltype(count)::kRows;
    alignas(64) float sums[kRows * kSumsStride];
    const Element* inputs[kRows];
    Element* outputs[kRows];
    for (int row = 0; row < kRows; ++row) {
      inputs[row] = x + rows[row] * x_stride;
      outputs[row] = y + rows[row] * y_stride;
    }
    shrink_parts<Element, kRows>(layer, of_slot, inputs, sums);
    expand_parts<Element, kRows>(layer, of_slot, sums, half, outputs);
  });
}

// A x of all rows of one block, of a layer of one part -> `to` [rows][to_stride], by the rows' numbers.
template <class Element>
void sum_inputs(
    const AdapterLayer& layer, const AdapterRows& step, const AdapterBlock& block, const Element* x, int64_t x_stride,
    float* to, int64_t to_stride) {
  const AdapterMatrices* const of_slot = layer.matrices + block.slot;
  if (of_slot->a == nullptr) return;
  for_rows(step, block, [&](const int64_t* rows, auto count) {
    constexpr int kRows = decltype(count)::kRows;
    alignas(64) float sums[kRows * kSumsStride];
    const Element* inputs[kRows];
    for (int row = 0; row < kRows; ++row) inputs[row] = x + rows[row] * x_stride;
    shrink_parts<Element, kRows>(layer, of_slot, inputs, sums);
    for (int row = 0; row < kRows; ++row)
      std::memcpy(to + rows[row] * to_stride, sums + row * kSumsStride, of_slot->rank * sizeof(float));
  });
}

// Outputs of all rows of one block += B of complete `sums`, as `sum_inputs` leaves them.
template <class Element>
void add_sums(
    const AdapterLayer& layer, const AdapterRows& step, const AdapterBlock& block, const float* sums,
    int64_t sums_stride, Element* y, int64_t y_stride) {
  const AdapterMatrices* const of_slot = layer.matrices + block.slot;
  if (of_slot->a == nullptr) return;
  for_rows(step, block, [&](const int64_t* rows, auto count) {
    constexpr int kRows = decltype(count)::kRows;
    alignas(64) float own[kRows * kSumsStride];
    Element* outputs[kRows];
    for (int row = 0; row < kRows; ++row) {
      outputs[row] = y + rows[row] * y_stride;
      std::memcpy(own + row * kSumsStride, sums + rows[row] * sums_stride, of_slot->rank * sizeof(float));
    }
    expand_parts<Element, kRows>(layer, of_slot, own, 0, outputs);
  });
}

}  // namespace
