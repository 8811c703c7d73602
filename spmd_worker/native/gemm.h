// The operands of a GEMM: rows of inputs by a packed weight, both float32, bfloat16 or int8.
//
// A weight [outputs, inputs] is packed into panels of 16 outputs, each read from beginning to end: [inputs / 2][16][2]
// elements of float32 or bfloat16, and of int8 as in int8.h. A gated weight has a panel of gates before each panel of the up
// projection: the result is silu(gate) * up, rounded where ops/kernels/reference.py rounds.
#pragma once

#include <cstdint>

#include "int8.h"
#include "vector.h"

constexpr int kPanel = 16;                     // outputs
constexpr int kPanelVectors = kPanel / kLanes;

// The leaves of a row-parallel GEMM (ranks/leaves.py): where each ends, counted from the first input. A power of two of
// them, up to 2^(kMaxLevels - 1); none: a result is one chain.
struct Leaves {
  const int64_t* ends = nullptr;
  int64_t count = 0;

  int64_t first_input(int64_t leaf) const { return leaf == 0 ? 0 : ends[leaf - 1]; }
};

constexpr int kMaxLevels = 7;  // of the tree over the leaves

// `num_inputs` and ends of leaves are multiples of 32, `num_outputs` of 16, or of 32 if the weight is gated, gates included.
template <class Element>
struct Gemm {
  const Element* x;
  int64_t x_stride, num_rows, num_inputs;
  const Element* packed;
  int64_t num_outputs;
  Leaves leaves = {};
  const uint8_t* stored = nullptr;  // the weight as files store it (stored.h), instead of `packed`
  int64_t stored_size = 0;          // bytes of a panel of it

  int64_t panel_size() const {
    if constexpr (sizeof(Element) == 1) return panel_bytes(num_inputs);
    return num_inputs * kPanel;
  }
  const Element* panel(int64_t number) const { return packed + number * panel_size(); }
  int64_t num_panels() const { return num_outputs / kPanel; }
  int64_t num_pairs() const { return (num_panels() + 1) / 2; }
  int num_panels_of(int64_t pair) const { return pair * 2 + 1 < num_panels() ? 2 : 1; }
};


// One call of a micro-kernel: some rows by a pair of panels, or by the last panel alone, over a part of the inputs.
template <class Element>
struct Block {
  const Element *x, *panels, *ahead;  // from the part's first input on; `ahead`: panels to prefetch
  // `x_stride`: of transposed rows how many columns their tiles have. Inputs: of the part, and of all.
  int64_t x_stride, panel_size, num_inputs, num_all_inputs;
  int64_t row, pair;
  int num_rows, num_panels;
  bool is_first_part, is_last_part;  // of the chain
  int64_t leaf;                      // the part's first
  float* kept = nullptr;             // sums of the chains between two parts, for micro-kernels that take them there
  int64_t number, num_blocks;  // among those by this pair
  int64_t index;               // among those of the item
  bool is_alone;               // of its item: from part to part no other block follows
  void* expansion = nullptr;   // a `Micro::Expansion` to continue meanwhile, for micro-kernels that do

  // Micro-kernels in vector registers prefetch the panels during the first blocks, a share in each: memory takes longer than
  // one block. Their pointer starts here and advances by `share_of(elements of a step)` in each step.
  static constexpr int64_t kMostShares = 8;
  int64_t num_shares() const { return num_blocks < kMostShares ? num_blocks : kMostShares; }
  int64_t share_of(int64_t count) const { return count * int64_t(sizeof(Element)) / num_shares(); }  // bytes
  const char* to_prefetch() const {
    const bool has_share = number < num_shares();
    return reinterpret_cast<const char*>(has_share ? ahead : panels) + has_share * number * share_of(num_inputs * kPanel);
  }
};
