// Quantises one row to int8 with one scale, see int8.h.
//
// The scale is the maximum magnitude / 127; a number is quantised to round(number * (127 / maximum magnitude)), ties to
// even. A row with all magnitudes below `kMinMagnitude` is zero. A row with a number that is not finite has a scale that is
// not finite, and so are its results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elements.h"

namespace {

constexpr float kMaxByte = 127.0f;
constexpr float kMinMagnitude = 1e-30f;

SPMD_INLINE float scale_of(float maximum) { return maximum < kMinMagnitude ? 0.0f : maximum / kMaxByte; }

// Magnitudes as integers are in the same order, NaN above all.
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
      // Adding this rounds to an integer, ties to even.
      const Floats whole = (load_some(row + index, count) * factor + magic) - magic;
      const Bytes numbers = low_bytes((Words)(__builtin_convertvector(whole, Ints) + int32_t(offset)));
      if (count == kLanes)
        store(to + index, numbers);
      else
        std::memcpy(to + index, &numbers, count);
    }
    index = size;
  }
  std::fill(to + index, to + to_stride, offset);
}

// The sums of kLanes outputs as floats.
SPMD_INLINE Floats scaled(const int32_t* sums, float row_scale, const float* scales) {
  return (__builtin_convertvector(load<Ints>(sums), Floats) * broadcast(row_scale)) * load<Floats>(scales);
}

}  // namespace
