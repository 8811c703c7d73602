// AMX of recent x86 processors: tiles of 16 rows of 64 bytes, multiplied in bfloat16 and summed in float, or in int8 and
// summed in int32.
//
// A row is computed independently of the others, in an order that the processor fixes, so AMX keeps the kernels' contract
// if every row takes the same steps.
//
// With SPMD_EMULATED_AMX defined the instructions are emulated in plain C++, with the arithmetic of Intel's manual, so that
// the kernels are tested on processors without AMX; with SPMD_WITHOUT_AMX it is not used.
#pragma once

#include "vector.h"

// All processors with AMX have the other two.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(SPMD_AVX512) && defined(__linux__) && \
    !defined(SPMD_WITHOUT_AMX) && ((defined(__AMX_TILE__) && defined(__AMX_BF16__)) || defined(SPMD_EMULATED_AMX))
#define SPMD_HAS_AMX 1
#if defined(__AMX_INT8__) || defined(SPMD_EMULATED_AMX)
#define SPMD_HAS_AMX_INT8 1
#endif
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <initializer_list>

namespace amx {

constexpr int kRows = 16;      // of a tile
constexpr int kColumns = 16;   // floats, or pairs of bfloat16

// Rows and columns of each of the eight tiles, in the processor's layout.
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

#if defined(SPMD_EMULATED_AMX)

struct Unit {
  Shapes shapes;
  alignas(64) uint8_t tiles[8][kRows][64];
};

inline thread_local Unit unit;

inline void use(const Shapes& shapes) {
  unit.shapes = shapes;
  std::memset(unit.tiles, 0, sizeof unit.tiles);
}

inline void release() { use(Shapes()); }

template <int kTo>
inline void zero() {
  std::memset(unit.tiles[kTo], 0, sizeof unit.tiles[kTo]);
}

template <int kTo>
inline void load(const void* rows, int64_t stride_bytes) {
  zero<kTo>();
  for (int row = 0; row < unit.shapes.rows[kTo]; ++row)
    std::memcpy(
        unit.tiles[kTo][row], static_cast<const char*>(rows) + row * stride_bytes, unit.shapes.row_bytes[kTo]);
}

template <int kTo>
inline void load_passing(const void* rows, int64_t stride_bytes) {
  load<kTo>(rows, stride_bytes);
}

template <int kFrom>
inline void store(void* rows, int64_t stride_bytes) {
  for (int row = 0; row < unit.shapes.rows[kFrom]; ++row)
    std::memcpy(
        static_cast<char*>(rows) + row * stride_bytes, unit.tiles[kFrom][row], unit.shapes.row_bytes[kFrom]);
}

// Row `row` of left by right, pair after pair: first and second inputs are summed separately, each product is fused into
// its sum, then the two sums are added, then the previous value. Not inlined: the caller sets the rounding mode.
__attribute__((noinline)) inline void multiply_row(
    const uint32_t* left, const uint8_t (*right)[64], int num_pairs, float* to) {
  const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
  __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
  for (int pair = 0; pair < num_pairs; ++pair) {
    const __m512i lefts = _mm512_set1_epi32(int(left[pair])), rights = _mm512_loadu_si512(right[pair]);
    first = _mm512_fmadd_ps(
        _mm512_castsi512_ps(_mm512_slli_epi32(lefts, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(rights, 16)), first);
    second = _mm512_fmadd_ps(
        _mm512_castsi512_ps(_mm512_and_si512(lefts, high)), _mm512_castsi512_ps(_mm512_and_si512(rights, high)),
        second);
  }
  _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_add_ps(first, second)));
}

// sum += left [rows][pairs] * right [pairs][columns]. Subnormal numbers are zero, as in AMX.
template <int kSum, int kLeft, int kRight>
inline void multiply() {
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kFlushToZero | kDenormalsAreZero);
  for (int row = 0; row < unit.shapes.rows[kSum]; ++row)
    multiply_row(
        reinterpret_cast<const uint32_t*>(unit.tiles[kLeft][row]), unit.tiles[kRight],
        unit.shapes.row_bytes[kLeft] / 4, reinterpret_cast<float*>(unit.tiles[kSum][row]));
  _mm_setcsr(before);
}

// sum += left [rows][quads of inputs] * right [quads][columns], bytes with a sign; int32, and exact.
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

// The clobbers keep the compiler from moving memory accesses past these.
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

// `load` for rows that are not needed again soon.
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

template <int kSum, int kLeft, int kRight>
SPMD_INLINE void multiply_bytes() {
  asm volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kRight), "i"(kLeft), "i"(kSum));
}

#endif

// For GEMMs of up to 32 rows: tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 the weight.
SPMD_INLINE void set_up_for(int num_rows) {
  const int first = num_rows < 16 ? num_rows : 16, second = num_rows - first;
  Shapes shapes;
  for (int tile : {0, 1, 4}) shapes.set(tile, first, 16);
  for (int tile : {2, 3, 5}) shapes.set(tile, second > 0 ? second : 1, 16);
  for (int tile : {6, 7}) shapes.set(tile, 16, 16);
  use(shapes);
}

// The same where outputs are rows of tiles: 4 and 5 hold the weight, 6 and 7 up to 32 rows as columns.
SPMD_INLINE void set_up_transposed(int num_rows) {
  const int first = num_rows < 16 ? num_rows : 16, second = num_rows - first;
  Shapes shapes;
  for (int tile : {0, 1, 6}) shapes.set(tile, 16, first);
  for (int tile : {2, 3, 7}) shapes.set(tile, 16, second > 0 ? second : 1);
  for (int tile : {4, 5}) shapes.set(tile, 16, 16);
  use(shapes);
}

// The sums [32][32], float or int32, of up to two tiles of rows by two panels, as by `set_up_for`.
template <bool kTwoTiles, bool kTwoPanels>
SPMD_INLINE void zero_sums() {
  zero<0>();
  if (kTwoPanels) zero<1>();
  if (kTwoTiles) zero<2>();
  if (kTwoTiles && kTwoPanels) zero<3>();
}

template <bool kTwoTiles, bool kTwoPanels, class Sum>
SPMD_INLINE void load_sums(const Sum* from) {
  load<0>(from, 128);
  if (kTwoPanels) load<1>(from + 16, 128);
  if (kTwoTiles) load<2>(from + 16 * 32, 128);
  if (kTwoTiles && kTwoPanels) load<3>(from + 16 * 32 + 16, 128);
}

template <bool kTwoTiles, bool kTwoPanels, class Sum>
SPMD_INLINE void store_sums(Sum* to) {
  store<0>(to, 128);
  if (kTwoPanels) store<1>(to + 16, 128);
  if (kTwoTiles) store<2>(to + 16 * 32, 128);
  if (kTwoTiles && kTwoPanels) store<3>(to + 16 * 32 + 16, 128);
}

// Linux lets a process use AMX after a request.
inline bool is_granted() {
#if defined(SPMD_EMULATED_AMX)
  return true;
#else
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#endif
}

}  // namespace amx

#else

namespace amx {
inline bool is_granted() { return false; }
}  // namespace amx

#endif
