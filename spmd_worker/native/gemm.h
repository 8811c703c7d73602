// A gemm with a packed weight, as the AMX unit's kinds of gemms and those by vectors have it.
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

// Where the argmax of each row goes; only the first `count` outputs are there.
struct RowArgmax {
  int64_t count;
  float* values;
  int64_t* places;
};

// gemms_vector.cpp, for processors without the unit. `argmax` is null where the gemm is wanted itself.
void multiply_by_vectors(const ProductOf<float>& gemm, const RowArgmax* argmax, int num_threads);
void multiply_by_vectors(const ProductOf<uint16_t>& gemm, const RowArgmax* argmax, int num_threads);
