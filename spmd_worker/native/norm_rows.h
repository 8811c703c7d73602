// The norm of one row, alone or of a sum: computed by itself, in an order that depends on its length alone. Low-precision
// results are rounded where ops/kernels/reference.py rounds them.
#pragma once

#include <cmath>

#include "elements.h"

SPMD_INLINE float inverse_root_mean_square(Floats squares, int64_t size, float epsilon) {
  return 1.0f / std::sqrt(sum_of_lanes(squares) / float(size) + epsilon);
}

// `squares`: of the row's elements, summed by lane.
template <class Element>
SPMD_INLINE void scale_row(
    const Element* row, int64_t size, Floats squares, const Element* weight, float epsilon, Element* to) {
  const Floats factor = broadcast(inverse_root_mean_square(squares, size, epsilon));
  for (int64_t index = 0; index < size; index += kLanes) {
    const int64_t count = size - index;
    const Floats normal = as_kept<Element>(load_some(row + index, count) * factor);
    store_some(to + index, normal * load_some(weight + index, count), count);
  }
}

template <class Element>
SPMD_INLINE void norm_row(const Element* row, int64_t size, const Element* weight, float epsilon, Element* to) {
  Floats squares = Floats{};
  for (int64_t index = 0; index < size; index += kLanes) {
    const Floats x = load_some(row + index, size - index);
    squares = fused(x, x, squares);
  }
  scale_row(row, size, squares, weight, epsilon, to);
}

// residual += x, and `to` is the norm of the sum. `x_at(index, count)`: elements of x from an index on, as floats.
template <class Element, class Elements>
SPMD_INLINE void add_and_norm_row(
    Elements x_at, Element* residual, int64_t size, const Element* weight, float epsilon, Element* to) {
  Floats squares = Floats{};
  for (int64_t index = 0; index < size; index += kLanes) {
    const int64_t count = size - index;
    const Floats total = as_kept<Element>(x_at(index, count) + load_some(residual + index, count));
    store_some(residual + index, total, count);
    squares = fused(total, total, squares);
  }
  scale_row(residual, size, squares, weight, epsilon, to);
}

// The row's deviation from its mean (or itself) over its root mean square, times weight + offset, plus bias (or null): in
// float until the end.
template <class Element>
SPMD_INLINE void full_norm_row(
    const Element* row, int64_t size, const Element* weight, const Element* bias, float epsilon, float offset,
    bool is_centred, Element* to) {
  float mean = 0.0f;
  if (is_centred) {
    Floats total = Floats{};
    for (int64_t index = 0; index < size; index += kLanes) total += load_some(row + index, size - index);
    mean = sum_of_lanes(total) / float(size);
  }
  const Floats centre = broadcast(mean);
  Floats squares = Floats{};
  for (int64_t index = 0; index < size; index += kLanes) {
    const Floats deviation = load_some(row + index, size - index) - centre;
    // Lanes beyond the row hold zeros, which deviate from the mean.
    const Floats kept = lane_numbers() < int32_t(size - index < kLanes ? size - index : kLanes) ? deviation : Floats{};
    squares = fused(kept, kept, squares);
  }
  const Floats factor = broadcast(inverse_root_mean_square(squares, size, epsilon));
  for (int64_t index = 0; index < size; index += kLanes) {
    const int64_t count = size - index;
    const Floats normal = (load_some(row + index, count) - centre) * factor;
    Floats scaled = normal * (load_some(weight + index, count) + broadcast(offset));
    if (bias != nullptr) scaled += load_some(bias + index, count);
    store_some(to + index, scaled, count);
  }
}
