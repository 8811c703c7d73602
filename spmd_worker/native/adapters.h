// Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): rows of a linear layer's outputs += B (A x), each row with
// the matrices of its own adapter.
//
// A is packed as [rank / 16][inputs / 2][16][2] bfloat16 or [rank / 16][inputs][16] float32, B as [outputs / 16][rank][16]:
// both are read from beginning to end, and missing elements are zero. A x is kept in float32: one chain over the inputs in
// ascending order, or two with AVX-512; so is B (A x), one chain over the ranks, which is added to the rounded output and
// rounded once more. Rows that are computed together share the loads of a matrix and nothing else.
#pragma once

#include "elements.h"
#include "gemm.h"

namespace {

constexpr int kAdapterRows = kLanes == 16 ? 8 : 4;
constexpr int kChains = kLanes == 16 ? 2 : 1;
constexpr int kMaxRank = 512, kMaxParts = 6;

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

// One layer: matrices [slots][parts]; null if it takes no adapters.
struct AdapterLayer {
  const AdapterMatrices* matrices;
  const AdapterPart* parts;
  int64_t num_parts, num_inputs;
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

// A x of kRows rows for kPanels panels. Chains of even and of odd steps are added at the end.
template <class Element, int kRows, int kPanels>
void shrink_panels(
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
void expand_panels(
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

template <class Element, int kRows>
void add_to_rows(
    const AdapterLayer& layer, const AdapterMatrices* of_slot, const Element* const* x, int64_t half,
    Element* const* y) {
  constexpr int64_t kStride = kMaxParts * kMaxRank;
  alignas(64) float shrunk[kRows * kStride];
  ShrinkPanel<Element> panels[kStride / kPanel];
  int64_t count = 0;
  for (int64_t part = 0; part < layer.num_parts; ++part) {
    const Element* const a = static_cast<const Element*>(of_slot[part].a);
    if (a == nullptr) continue;
    const int64_t size = (layer.num_inputs + kPairOf<Element> - 1) / kPairOf<Element> * kPairOf<Element> * kPanel;
    for (int64_t panel = 0; panel * kPanel < of_slot[part].rank; ++panel)
      panels[count++] = {a + panel * size, shrunk + part * kMaxRank + panel * kPanel};
  }
  shrink_rows<Element, kRows>(x, layer.num_inputs, panels, count, kStride);
  for (int64_t part = 0; part < layer.num_parts; ++part) {
    const AdapterMatrices& matrices = of_slot[part];
    if (matrices.a == nullptr) continue;
    expand_rows<Element, kRows>(
        shrunk + part * kMaxRank, kStride, static_cast<const Element*>(matrices.b), matrices.rank, layer.parts[part],
        half, y);
  }
}

// All rows of one block. `half`: see `column_of`.
template <class Element>
void add_adapter(
    const AdapterLayer& layer, const AdapterRows& step, const AdapterBlock& block, const Element* x, int64_t x_stride,
    Element* y, int64_t y_stride, int64_t half) {
  const AdapterMatrices* const of_slot = layer.matrices + block.slot * layer.num_parts;
  const Element* inputs[kAdapterRows];
  Element* outputs[kAdapterRows];
  for (int64_t done = 0; done < block.count;) {
    const int64_t count = block.count - done < kAdapterRows ? block.count - done : kAdapterRows;
    for (int64_t row = 0; row < count; ++row) {
      const int64_t number = step.rows[block.first + done + row];
      inputs[row] = x + number * x_stride, outputs[row] = y + number * y_stride;
    }
    done += count;
    switch (count) {
      case 1: add_to_rows<Element, 1>(layer, of_slot, inputs, half, outputs); break;
      case 2: add_to_rows<Element, 2>(layer, of_slot, inputs, half, outputs); break;
      case 3: add_to_rows<Element, 3>(layer, of_slot, inputs, half, outputs); break;
      case 4: add_to_rows<Element, 4>(layer, of_slot, inputs, half, outputs); break;
#if defined(SPMD_AVX512)
      case 5: add_to_rows<Element, 5>(layer, of_slot, inputs, half, outputs); break;
      case 6: add_to_rows<Element, 6>(layer, of_slot, inputs, half, outputs); break;
      case 7: add_to_rows<Element, 7>(layer, of_slot, inputs, half, outputs); break;
      default: add_to_rows<Element, 8>(layer, of_slot, inputs, half, outputs); break;
#else
      default: break;
#endif
    }
  }
}

}  // namespace
