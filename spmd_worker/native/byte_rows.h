// One row of numbers -> bytes with one scale, as int8.h has rows.
//
// A row's scale is its largest magnitude over 127; a number becomes the nearest whole number, ties to even, of itself times
// 127 over that magnitude. A row of nothing but magnitudes below `kLeast` is zero. A row with a number that is not finite
// gets no number as its scale, and so do its results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"

namespace {

typedef int8_t Bytes __attribute__((vector_size(kLanes)));

constexpr float kMost = 127.0f;
constexpr float kLeast = 1e-30f;

SPMD_INLINE float scale_of(float largest) { return largest < kLeast ? 0.0f : largest / kMost; }

// Magnitudes as whole numbers are in the same order, with what is not a number above all.
template <class Element>
float row_maximum(const Element* row, int64_t size) {
  Ints most = Ints{};
  for (int64_t place = 0; place < size; place += kLanes) {
    const Ints bits = (Ints)load_some(row + place, size - place) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, most[lane]);
  float value;
  std::memcpy(&value, &largest, sizeof value);
  return value;
}

// Up to `to_stride` bytes, of which those beyond `size` are zero; `offset` is added to each.
template <class Element>
void quantise_row(const Element* row, int64_t size, float largest, int8_t offset, int8_t* to, int64_t to_stride) {
  int64_t place = 0;
  if (largest >= kLeast && largest < kInfinity) {
    const Floats factor = broadcast(kMost / largest), magic = broadcast(12582912.0f);
    for (; place < size; place += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, size - place);
      // Adding this many rounds to a whole number, the even one of two.
      const Floats whole = (load_some(row + place, count) * factor + magic) - magic;
      const Bytes numbers = __builtin_convertvector(__builtin_convertvector(whole, Ints) + int32_t(offset), Bytes);
      if (count == kLanes)
        store(to + place, numbers);
      else
        std::memcpy(to + place, &numbers, count);
    }
    place = size;
  }
  std::fill(to + place, to + to_stride, offset);
}

// The sums of kLanes outputs as numbers.
SPMD_INLINE Floats scaled(const int32_t* sums, float row_scale, const float* scales) {
  return (__builtin_convertvector(load<Ints>(sums), Floats) * broadcast(row_scale)) * load<Floats>(scales);
}

}  // namespace
