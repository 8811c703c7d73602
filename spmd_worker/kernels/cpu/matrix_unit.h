// The matrix unit of recent x86 processors (AMX): tiles of 16 rows of 64 bytes, multiplied in bfloat16, summed in float.
//
// A row of a product is computed as if the others were not there, in an order that the processor fixes, so the unit keeps
// the kernels' contract as long as the same steps are taken for every row.
#pragma once

#include "vector.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(SPMD_AVX512) && defined(__linux__)
#define SPMD_MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>

namespace matrix_unit {

constexpr int kRows = 16;      // of a tile
constexpr int kColumns = 16;   // floats, or pairs of bfloat16

// How many rows and columns each of the eight tiles has; the layout is the processor's.
struct alignas(64) Shapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_columns) {
    rows[tile] = uint8_t(num_rows);
    row_bytes[tile] = uint16_t(num_columns * 4);
  }
};

// The compiler must not move reads and writes of memory past these, hence the clobbers.
SPMD_INLINE void use(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
SPMD_INLINE void release() { asm volatile("tilerelease" ::: "memory"); }

template <int kTo>
SPMD_INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTo));
}

template <int kTo>
SPMD_INLINE void load(const void* rows, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride_bytes), "i"(kTo) : "memory");
}

// As `load`, for rows that will not be needed again soon.
template <int kTo>
SPMD_INLINE void load_passing(const void* rows, int64_t stride_bytes) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride_bytes), "i"(kTo) : "memory");
}

template <int kFrom>
SPMD_INLINE void store(void* rows, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride_bytes), "i"(kFrom) : "memory");
}

// sum += left [rows][pairs] * right [pairs][columns]
template <int kSum, int kLeft, int kRight>
SPMD_INLINE void multiply() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kRight), "i"(kLeft), "i"(kSum));
}

// Linux lets a process use the unit once it has asked.
inline bool is_granted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

}  // namespace matrix_unit

#else

namespace matrix_unit {
inline bool is_granted() { return false; }
}  // namespace matrix_unit

#endif
