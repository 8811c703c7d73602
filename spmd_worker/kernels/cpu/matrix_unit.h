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

// For products of up to 32 rows: tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 the weight.
SPMD_INLINE void set_up_for(int num_rows) {
  const int first = num_rows < 16 ? num_rows : 16, second = num_rows - first;
  Shapes shapes;
  for (int tile : {0, 1, 4}) shapes.set(tile, first, 16);
  for (int tile : {2, 3, 5}) shapes.set(tile, second > 0 ? second : 1, 16);
  for (int tile : {6, 7}) shapes.set(tile, 16, 16);
  use(shapes);
}

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

// The sums [32][32] of up to two tiles of rows by two panels, as `set_up_for` has them.
template <bool kTwoTiles, bool kTwoPanels>
SPMD_INLINE void zero_sums() {
  zero<0>();
  if (kTwoPanels) zero<1>();
  if (kTwoTiles) zero<2>();
  if (kTwoTiles && kTwoPanels) zero<3>();
}

template <bool kTwoTiles, bool kTwoPanels>
SPMD_INLINE void load_sums(const float* from) {
  load<0>(from, 128);
  if (kTwoPanels) load<1>(from + 16, 128);
  if (kTwoTiles) load<2>(from + 16 * 32, 128);
  if (kTwoTiles && kTwoPanels) load<3>(from + 16 * 32 + 16, 128);
}

template <bool kTwoTiles, bool kTwoPanels>
SPMD_INLINE void store_sums(float* to) {
  store<0>(to, 128);
  if (kTwoPanels) store<1>(to + 16, 128);
  if (kTwoTiles) store<2>(to + 16 * 32, 128);
  if (kTwoTiles && kTwoPanels) store<3>(to + 16 * 32 + 16, 128);
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
