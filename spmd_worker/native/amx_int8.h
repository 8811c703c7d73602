// The AMX unit's products of int8, beside those of bfloat16 in amx.h: sums are int32, and exact.
#pragma once

#include "amx.h"

#if defined(SPMD_HAS_AMX) && (defined(__AMX_INT8__) || defined(SPMD_EMULATED_AMX))
#define SPMD_HAS_AMX_INT8 1

namespace amx {

// sum += left [rows][quads of inputs] * right [quads][columns], bytes with a sign.
#if defined(SPMD_EMULATED_AMX)
template <int kSum, int kLeft, int kRight>
inline void multiply_bytes() {
  for (int row = 0; row < unit.shapes.rows[kSum]; ++row) {
    const int8_t* left = reinterpret_cast<const int8_t*>(unit.tiles[kLeft][row]);
    int32_t sums[kColumns];
    std::memcpy(sums, unit.tiles[kSum][row], sizeof sums);
    for (int quad = 0; quad < unit.shapes.row_bytes[kLeft] / 4; ++quad) {
      const int8_t* right = reinterpret_cast<const int8_t*>(unit.tiles[kRight][quad]);
      for (int column = 0; column < kColumns; ++column)
        for (int byte = 0; byte < 4; ++byte) sums[column] += left[quad * 4 + byte] * right[column * 4 + byte];
    }
    std::memcpy(unit.tiles[kSum][row], sums, sizeof sums);
  }
}
#else
template <int kSum, int kLeft, int kRight>
SPMD_INLINE void multiply_bytes() {
  asm volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kRight), "i"(kLeft), "i"(kSum));
}
#endif

}  // namespace amx

#endif
