// Rotary embedding of one row. Low-precision results are rounded where ops/kernels/reference.py rounds them.
#pragma once

#include "elements.h"

// Cosines and sines, [tokens, head size / 2]; null: rows are not rotated.
template <class Element>
struct Angles {
  const Element* cos;
  const Element* sin;
};

// In place if `to` is the row.
template <class Element>
SPMD_INLINE void rotate_row(const Element* row, int64_t half, const Element* cos, const Element* sin, Element* to) {
  for (int64_t index = 0; index < half; index += kLanes) {
    const int64_t count = half - index;
    const Floats first = load_some(row + index, count), second = load_some(row + half + index, count);
    const Floats c = load_some(cos + index, count), s = load_some(sin + index, count);
    store_some(to + index, as_kept<Element>(first * c) - as_kept<Element>(second * s), count);
    store_some(to + half + index, as_kept<Element>(second * c) + as_kept<Element>(first * s), count);
  }
}

// The same with float32 angles: rounded once.
template <class Element>
SPMD_INLINE void rotate_row_once(const Element* row, int64_t half, const float* cos, const float* sin, Element* to) {
  for (int64_t index = 0; index < half; index += kLanes) {
    const int64_t count = half - index;
    const Floats first = load_some(row + index, count), second = load_some(row + half + index, count);
    const Floats c = load_some(cos + index, count), s = load_some(sin + index, count);
    store_some(to + index, as_kept<float>(first * c) - as_kept<float>(second * s), count);
    store_some(to + half + index, as_kept<float>(second * c) + as_kept<float>(first * s), count);
  }
}

// The row of token `token`: itself, or rotated into `scratch`.
template <class Element>
SPMD_INLINE const Element* rotated(
    const Element* row, int64_t size, const Angles<Element>& angles, int64_t token, Element* scratch) {
  if (angles.cos == nullptr) return row;
  const int64_t half = size / 2;
  rotate_row(row, half, angles.cos + token * half, angles.sin + token * half, scratch);
  return scratch;
}
