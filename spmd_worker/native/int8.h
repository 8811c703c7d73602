// GEMMs of int8 rows with an int8 weight, summed in int32, and how both are laid out.
//
// Integer sums are exact: they do not depend on the order, the instructions or the sharding. A weight [outputs, inputs] has
// one scale per output, activations one per row; a result is (float(sum) * scale of the row) * scale of the output, then
// the bias, then one rounding.
//
// Packed, a weight is a run of panels of 16 outputs: [inputs / 4][16][4] bytes, then 16 scales, then 16 times -128 times
// the sum of an output's weights, the initial sums for rows of unsigned bytes (see `rows_are_offset`). Zeros follow up to the
// panel's end.
#pragma once

#include <cstdint>

constexpr int kByteStep = 64;  // inputs that AMX takes at a time; rows are padded to it with zeros

// The last step of AMX may reach beyond the inputs: there it multiplies zeros with bytes of the panel.
inline int64_t panel_bytes(int64_t num_inputs) { return num_inputs * 16 + (num_inputs % kByteStep == 0 ? 128 : 512); }

inline int64_t padded_to_steps(int64_t num_inputs) { return (num_inputs + kByteStep - 1) / kByteStep * kByteStep; }

// Whether rows are unsigned bytes, offset by 128: AVX-512 VNNI multiplies unsigned by signed bytes. Other instructions, AMX
// too, take signed rows.
bool rows_are_offset();
