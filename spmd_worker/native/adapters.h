// Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): rows of a linear layer's outputs += B (A x), each row with
// the matrices of its own adapter.
//
// A is packed as [rank / 16][inputs / 2][16][2] bfloat16 or [rank / 16][inputs][16] float32, B as [outputs / 16][rank][16]:
// both are read from beginning to end, and missing elements are zero. A x is kept in float32: one chain over the inputs in
// ascending order; so is B (A x), over the ranks, which is added to the rounded output and rounded once more. Rows that are
// computed together share the loads of a matrix and nothing else.
#pragma once

#include "elements.h"
#include "gemm.h"

namespace {

constexpr int kAdapterRows = kLanes == 16 ? 8 : 4;  // with two vectors of sums each, half of the registers
constexpr int kMaxRank = 512;

// One adapter's matrices for one part of a layer; `a` is null if it has none. Filled by Python (cpu/adapters.py).
struct AdapterMatrices {
  const void *a, *b;
  int64_t rank;  // columns of B: A has as many rows, rounded up to a multiple of 16
};

// Outputs of a part of a layer.
struct AdapterPart {
  int64_t start, stop;
};

// Up to any number of rows with one adapter: entries `first` to `first + count` of the step's rows.
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

// A x of kRows rows -> `to` [kRows][kMaxRank].
template <class Element, int kRows>
void shrink_rows(const Element* const* x, int64_t num_inputs, const Element* a, int64_t rank, float* to) {
  using Shrink = typename ShrinkOf<Element>::Type;
  constexpr int kInputs = Shrink::kInputs;
  for (int64_t first = 0; first < rank; first += kPanel) {
    Floats sums[kRows][kPanelVectors] = {};
    int64_t input = 0;
    for (; input + kInputs <= num_inputs; input += kInputs, a += kInputs * kPanel) {
      const typename Shrink::Right right = Shrink::load_right(a);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const typename Shrink::Left left = Shrink::left(x[row] + input);
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) sums[row][v] = Shrink::step(sums[row][v], right, v, left);
      }
    }
    if (input < num_inputs) {
      const typename Shrink::Right right = Shrink::load_right(a);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const typename Shrink::Left left = Shrink::last(x[row] + input);
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) sums[row][v] = Shrink::step(sums[row][v], right, v, left);
      }
      a += kInputs * kPanel;
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) store(to + row * kMaxRank + first + v * kLanes, sums[row][v]);
  }
}

// Outputs `part` of kRows rows += B of `shrunk` [kRows][kMaxRank].
template <class Element, int kRows>
void expand_rows(
    const float* shrunk, const Element* b, int64_t rank, AdapterPart part, int64_t half, Element* const* y) {
  for (int64_t output = part.start; output < part.stop; output += kPanel, b += rank * kPanel) {
    Floats sums[kRows][kPanelVectors] = {};
    for (int64_t k = 0; k < rank; ++k) {
      Floats right[kPanelVectors];
      for (int v = 0; v < kPanelVectors; ++v) right[v] = load_floats(b + k * kPanel + v * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const Floats left = broadcast(shrunk[row * kMaxRank + k]);
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) sums[row][v] = fused(left, right[v], sums[row][v]);
      }
    }
    if (output + kPanel <= part.stop && (half == 0 || output % kPanel == 0)) {
      const int64_t column = column_of(output, half);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
          Element* const to = y[row] + column + v * kLanes;
          store_floats(to, load_floats(to) + sums[row][v]);
        }
      continue;
    }
    for (int row = 0; row < kRows; ++row) {
      float lanes[kPanel];
      for (int v = 0; v < kPanelVectors; ++v) store(lanes + v * kLanes, sums[row][v]);
      for (int64_t lane = 0; lane < kPanel && output + lane < part.stop; ++lane) {
        Element* const to = y[row] + column_of(output + lane, half);
        from_float(to_float(*to) + lanes[lane], to);
      }
    }
  }
}

template <class Element, int kRows>
void add_to_rows(
    const AdapterLayer& layer, const AdapterMatrices* of_slot, const Element* const* x, int64_t half,
    Element* const* y) {
  alignas(64) float shrunk[kRows * kMaxRank];
  for (int64_t part = 0; part < layer.num_parts; ++part) {
    const AdapterMatrices& matrices = of_slot[part];
    if (matrices.a == nullptr) continue;
    const Element *a = static_cast<const Element*>(matrices.a), *b = static_cast<const Element*>(matrices.b);
    shrink_rows<Element, kRows>(x, layer.num_inputs, a, matrices.rank, shrunk);
    expand_rows<Element, kRows>(shrunk, b, matrices.rank, layer.parts[part], half, y);
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
