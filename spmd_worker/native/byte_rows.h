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

constexpr float kMaxByte = 127.0f;
constexpr float kMinMagnitude = 1e-30f;

SPMD_INLINE float scale_of(float maximum) { return maximum < kMinMagnitude ? 0.0f : maximum / kMaxByte; }

// Magnitudes as whole numbers are in the same order, with what is not a number above all.
template <class Element>
float row_maximum(const Element* row, int64_t size) {
  Ints most = Ints{};
  for (int64_t index = 0; index < size; index += kLanes) {
    const Ints bits = (Ints)load_some(row + index, size - index) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t maximum = 0;
  for (int lane = 0; lane < kLanes; ++lane) maximum = std::max(maximum, most[lane]);
  float value;
  std::memcpy(&value, &maximum, sizeof value);
  return value;
}

// Up to `to_stride` bytes, of which those beyond `size` are zero; `offset` is added to each.
template <class Element>
void quantise_row(const Element* row, int64_t size, float maximum, int8_t offset, int8_t* to, int64_t to_stride) {
  int64_t index = 0;
  if (maximum >= kMinMagnitude && maximum < kInfinity) {
    const Floats factor = broadcast(kMaxByte / maximum), magic = broadcast(12582912.0f);
    for (; index < size; index += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, size - index);
      // Adding this many rounds to a whole number, the even one of two.
      const Floats whole = (load_some(row + index, count) * factor + magic) - magic;
      const Bytes numbers = __builtin_convertvector(__builtin_convertvector(whole, Ints) + int32_t(offset), Bytes);
      if (count == kLanes)
        store(to + index, numbers);
      else
        std::memcpy(to + index, &numbers, count);
    }
    index = size;
  }
  std::fill(to + index, to + to_stride, offset);
}

// The sums of kLanes outputs as numbers.
SPMD_INLINE Floats scaled(const int32_t* sums, float row_scale, const float* scales) {
  return (__builtin_convertvector(load<Ints>(sums), Floats) * broadcast(row_scale)) * load<Floats>(scales);
}

}  // namespace
