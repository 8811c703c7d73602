// The small operations between the products: norms, rotary embedding, SiLU. Each row is computed by itself, in an order
// that depends on its length alone. Low-precision results are rounded where kernels/reference.py rounds them.

#include <cmath>
#include <cstddef>

#include "exports.h"
#include "vector.h"

namespace {

// Below this many numbers a second thread costs more than it brings.
constexpr int64_t kSmall = 8192;

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

// The first `count` numbers of a row as a vector; the rest of it is zero.
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

// ---- norms --------------------------------------------------------------------------------------------------------

// 1 / root mean square, summed by lane and then over lanes.
template <class Element>
SPMD_INLINE float inverse_root_mean_square(const Element* row, int64_t size, float epsilon) {
  Floats sum = Floats{};
  for (int64_t place = 0; place < size; place += kLanes) {
    const Floats x = load_some(row + place, size - place);
    sum = fused(x, x, sum);
  }
  return 1.0f / std::sqrt(sum_of_lanes(sum) / float(size) + epsilon);
}

template <class Element>
SPMD_INLINE void norm_row(const Element* row, int64_t size, const Element* weight, float epsilon, Element* to) {
  const Floats factor = broadcast(inverse_root_mean_square(row, size, epsilon));
  for (int64_t place = 0; place < size; place += kLanes) {
    const int64_t count = size - place;
    const Floats normal = as_kept<Element>(load_some(row + place, count) * factor);
    store_some(to + place, normal * load_some(weight + place, count), count);
  }
}

template <class Element>
void rms_norm(
    const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads, int64_t size,
    const Element* weight, float epsilon, Element* to, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens * num_heads * size >= kSmall)
  for (int64_t token = 0; token < num_tokens; ++token)
    for (int64_t head = 0; head < num_heads; ++head)
      norm_row(
          x + token * token_stride + head * head_stride, size, weight, epsilon, to + (token * num_heads + head) * size);
}

template <class Element>
void add_rms_norm(
    const Element* x, int64_t x_stride, const Element* residual, int64_t residual_stride, int64_t num_tokens,
    int64_t size, const Element* weight, float epsilon, Element* to, Element* total, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens * size >= kSmall)
  for (int64_t token = 0; token < num_tokens; ++token) {
    const Element* left = x + token * x_stride;
    const Element* right = residual + token * residual_stride;
    Element* sum = total + token * size;
    for (int64_t place = 0; place < size; place += kLanes) {
      const int64_t count = size - place;
      store_some(sum + place, load_some(left + place, count) + load_some(right + place, count), count);
    }
    norm_row(sum, size, weight, epsilon, to + token * size);
  }
}

// ---- rotary embedding ---------------------------------------------------------------------------------------------

template <class Element>
SPMD_INLINE void rotate_row(const Element* row, int64_t half, const Element* cos, const Element* sin, Element* to) {
  for (int64_t place = 0; place < half; place += kLanes) {
    const int64_t count = half - place;
    const Floats first = load_some(row + place, count), second = load_some(row + half + place, count);
    const Floats c = load_some(cos + place, count), s = load_some(sin + place, count);
    store_some(to + place, as_kept<Element>(first * c) - as_kept<Element>(second * s), count);
    store_some(to + half + place, as_kept<Element>(second * c) + as_kept<Element>(first * s), count);
  }
}

// The result may take the place of what is rotated.
template <class Element>
void rotate(
    const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads, int64_t size,
    const Element* cos, const Element* sin, Element* to, int64_t to_token_stride, int64_t num_threads) {
  const int64_t half = size / 2;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens * num_heads * size >= kSmall)
  for (int64_t token = 0; token < num_tokens; ++token)
    for (int64_t head = 0; head < num_heads; ++head)
      rotate_row(
          x + token * token_stride + head * head_stride, half, cos + token * half, sin + token * half,
          to + token * to_token_stride + head * size);
}

// ---- SiLU ---------------------------------------------------------------------------------------------------------

template <class Element>
void silu_and_mul(
    const Element* gate_up, int64_t stride, int64_t num_tokens, int64_t size, Element* to, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens * size >= kSmall)
  for (int64_t token = 0; token < num_tokens; ++token) {
    const Element* gates = gate_up + token * stride;
    for (int64_t place = 0; place < size; place += kLanes) {
      const int64_t count = size - place;
      const Floats gate = load_some(gates + place, count), up = load_some(gates + size + place, count);
      store_some(to + token * size + place, as_kept<Element>(silu(gate)) * up, count);
    }
  }
}

// ---- the largest of a row -----------------------------------------------------------------------------------------

// The largest and its first place; the first NaN, where there is one.
template <class Element>
SPMD_INLINE void largest_of_row(const Element* row, int64_t count, float* value, int64_t* index) {
  Floats most = broadcast(-kInfinity);
  Ints is_nan = Ints{};
  int64_t place = 0;
  for (; place + kLanes <= count; place += kLanes) {
    const Floats x = load_floats(row + place);
    is_nan |= (Ints)(x != x);
    most = larger(x, most);
  }
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) has_nan = has_nan || is_nan[lane] != 0;
  float largest = largest_lane(most);
  for (; place < count; ++place) {
    const float x = to_float(row[place]);
    has_nan = has_nan || x != x;
    largest = x > largest ? x : largest;
  }
  int64_t found = 0;
  if (!has_nan) {
    const Floats wanted = broadcast(largest);
    // Vector by vector as far as none is equal; then one by one.
    for (; found + kLanes <= count; found += kLanes) {
      const Ints is_equal = (Ints)(load_floats(row + found) == wanted);
      int32_t any = 0;
      for (int lane = 0; lane < kLanes; ++lane) any |= is_equal[lane];
      if (any != 0) break;
    }
  }
  for (; found < count; ++found) {
    const float x = to_float(row[found]);
    if (has_nan ? x != x : x == largest) break;
  }
  *value = has_nan ? to_float(row[found]) : largest;
  *index = found;
}

template <class Element>
void largest(
    const Element* rows, int64_t stride, int64_t num_rows, int64_t count, float* values, int64_t* indices,
    int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows * count >= kSmall)
  for (int64_t row = 0; row < num_rows; ++row)
    largest_of_row(rows + row * stride, count, values + row, indices + row);
}

}  // namespace

// ---- what Python calls --------------------------------------------------------------------------------------------

#define SPMD_ROWS(name, Element)                                                                                       \
  extern "C" void spmd_rms_norm_##name(                                                                                \
      const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads,              \
      int64_t size, const Element* weight, float epsilon, Element* to, int64_t num_threads) {                          \
    rms_norm(x, token_stride, head_stride, num_tokens, num_heads, size, weight, epsilon, to, num_threads);             \
  }                                                                                                                    \
  extern "C" void spmd_add_rms_norm_##name(                                                                            \
      const Element* x, int64_t x_stride, const Element* residual, int64_t residual_stride, int64_t num_tokens,        \
      int64_t size, const Element* weight, float epsilon, Element* to, Element* total, int64_t num_threads) {          \
    add_rms_norm(                                                                                                      \
        x, x_stride, residual, residual_stride, num_tokens, size, weight, epsilon, to, total, num_threads);            \
  }                                                                                                                    \
  extern "C" void spmd_rotate_##name(                                                                                  \
      const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads,              \
      int64_t size, const Element* cos, const Element* sin, Element* to, int64_t to_token_stride,                      \
      int64_t num_threads) {                                                                                           \
    rotate(x, token_stride, head_stride, num_tokens, num_heads, size, cos, sin, to, to_token_stride, num_threads);     \
  }                                                                                                                    \
  extern "C" void spmd_silu_and_mul_##name(                                                                            \
      const Element* gate_up, int64_t stride, int64_t num_tokens, int64_t size, Element* to, int64_t num_threads) {    \
    silu_and_mul(gate_up, stride, num_tokens, size, to, num_threads);                                                  \
  }                                                                                                                    \
  extern "C" void spmd_largest_##name(                                                                                 \
      const Element* rows, int64_t stride, int64_t num_rows, int64_t count, float* values, int64_t* indices,           \
      int64_t num_threads) {                                                                                           \
    largest(rows, stride, num_rows, count, values, indices, num_threads);                                              \
  }

SPMD_ROWS(float32, float)
SPMD_ROWS(bfloat16, uint16_t)
