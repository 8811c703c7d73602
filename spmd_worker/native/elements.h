// Rows of elements of either type as vectors of float, partial vectors at the end of a row included.
#pragma once

#include "vector.h"

SPMD_INLINE float to_float(float value) { return value; }
SPMD_INLINE float to_float(uint16_t value) { return widened(value); }
SPMD_INLINE void from_float(float value, float* to) { *to = value; }
SPMD_INLINE void from_float(float value, uint16_t* to) { *to = narrowed(value); }

// To the precision of the element and back.
template <class Element>
SPMD_INLINE Floats as_kept(Floats vector) {
  if constexpr (sizeof(Element) == 2) return rounded(vector);
  return vector;
}

// The first `count` numbers of a row as a vector, filled up with zeros.
template <class Element>
SPMD_INLINE Floats load_some(const Element* from, int64_t count) {
  if (count >= kLanes) return load_floats(from);
  float lanes[kLanes] = {};
  for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = to_float(from[lane]);
  return load<Floats>(lanes);
}

template <class Element>
SPMD_INLINE void store_some(Element* to, Floats vector, int64_t count) {
  if (count >= kLanes) return store_floats(to, vector);
  float lanes[kLanes];
  store(lanes, vector);
  for (int64_t lane = 0; lane < count; ++lane) from_float(lanes[lane], to + lane);
}
