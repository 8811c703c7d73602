// Products of int8 rows with an int8 weight, summed in int32, and how both are laid out.
//
// Sums of integers are exact: what they come to does not depend on the order, on the instructions, or on who adds which
// part. A weight [outputs, inputs] has one scale an output, a row of inputs one of its own; a result is
// (float(sum) * scale of the row) * scale of the output, then the bias, then one rounding.
//
// Packed, a weight is a run of panels of 16 outputs: [inputs / 4][16][4] bytes, then 16 scales, then 16 times -128 times
// the sum of an output's weights, which is what rows of bytes without a sign start from (see `kIsOffset`). What follows
// up to the panel's end is zero. A gated weight has a panel of gates before each panel of what they open.
#pragma once

#include <algorithm>
#include <cstdint>

constexpr int kBytePanel = 16;  // outputs
constexpr int kByteStep = 64;   // inputs that the AMX unit takes at a time; rows are padded to it with zeros

// The unit's last step may reach beyond the inputs: there it multiplies zeros with what is there, which is the panel's.
inline int64_t panel_bytes(int64_t num_inputs) {
  return num_inputs * kBytePanel + (num_inputs % kByteStep == 0 ? 128 : 512);
}

inline int64_t padded_to_steps(int64_t num_inputs) { return (num_inputs + kByteStep - 1) / kByteStep * kByteStep; }

// Rows [num_rows][x_stride] as `spmd_int8_quantise_*` makes them; `num_inputs` is a multiple of 32, `num_outputs` of 16.
struct ByteGemm {
  const int8_t* x;
  int64_t x_stride, num_rows;
  const int8_t* packed;
  int64_t num_inputs, num_outputs;

  int64_t num_panels() const { return num_outputs / kBytePanel; }
  int64_t num_pairs() const { return (num_panels() + 1) / 2; }
  const int8_t* panel(int64_t which) const { return packed + which * panel_bytes(num_inputs); }
  const float* scales(int64_t which) const {
    return reinterpret_cast<const float*>(panel(which) + num_inputs * kBytePanel);
  }
};

// Whether rows are kept as bytes without a sign, 128 larger than they are: AVX-512 VNNI multiplies those with bytes that
// have one. Others, the AMX unit too, take them as they are.
bool rows_are_offset();

// The units of work of a gemm: some rows by a pair of panels. They may be computed in any order, by anybody.
struct ByteCut {
  int64_t num_pairs, rows_each, num_row_groups;
  explicit ByteCut(const ByteGemm& gemm);
  int64_t num_units() const { return num_row_groups * num_pairs; }
  // How many are an item of half a millisecond at most, which a lost core holds the others up for.
  int64_t most_units(const ByteGemm& gemm) const {
    constexpr int64_t kMostProducts = 1 << 27;
    return kMostProducts / (std::min(rows_each, gemm.num_rows) * 2 * kBytePanel * gemm.num_inputs + 1);
  }
};

// Where sums go: `sums` [end - row][32] are of rows `row` to `end` and of the panels of a pair, or of its first alone.
struct ByteSink {
  virtual void take(int64_t row, int64_t end, int64_t pair, bool has_two, const int32_t* sums) const = 0;
};

// Units `first` to `end`.
void run_byte_units(const ByteGemm& gemm, const ByteCut& cut, const ByteSink& sink, int64_t first, int64_t end);
