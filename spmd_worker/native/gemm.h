// A gemm with a packed weight, as both of the AMX unit's kinds of gemms have it.
#pragma once

#include <cstdint>

constexpr int kPanel = 16;      // outputs
constexpr int kStep = 32;       // inputs
constexpr int kBlockRows = 32;  // two tiles of rows by two panels: as many sums as there are tiles for

template <class Element>
struct ProductOf {
  const Element* x;
  int64_t x_stride, num_rows, num_inputs;
  const Element* packed;
  int64_t num_outputs;
  const Element* bias;  // or null; of a gated gemm, those of all gates first
  Element* to;
  bool is_gated;

  int64_t num_panels() const { return num_outputs / kPanel; }
  int64_t num_pairs() const { return (num_panels() + 1) / 2; }
  const Element* panel(int64_t which) const { return packed + which * num_inputs * kPanel; }
};
