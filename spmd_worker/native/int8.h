// GEMMs of int8 rows with an int8 weight, summed in int32, and how both are laid out.
//
// Sums of integers are exact: what they come to does not depend on the order, on the instructions, or on who adds which
// part. A weight [outputs, inputs] has one scale an output, a row of inputs one of its own; a result is
// (float(sum) * scale of the row) * scale of the output, then the bias, then one rounding.
//
// Packed, a weight is a run of panels of 16 outputs: [inputs / 4][16][4] bytes, then 16 scales, then 16 times -128 times
// the sum of an output's weights, which is what rows of bytes without a sign start from (see `rows_are_offset`). What
// follows up to the panel's end is zero.
#pragma once

#include <cstdint>

constexpr int kByteStep = 64;  // inputs that AMX takes at a time; rows are padded to it with zeros

// AMX's last step may reach beyond the inputs: there it multiplies zeros with what is there, which is the panel's.
inline int64_t panel_bytes(int64_t num_inputs) { return num_inputs * 16 + (num_inputs % kByteStep == 0 ? 128 : 512); }

inline int64_t padded_to_steps(int64_t num_inputs) { return (num_inputs + kByteStep - 1) / kByteStep * kByteStep; }

// Whether rows are kept as bytes without a sign, 128 larger than they are: AVX-512 VNNI multiplies those with bytes that
// have one. Others, AMX too, take them as they are.
bool rows_are_offset();
