// The small operations between the GEMMs: norms, rotary embedding, activations. Each row is computed by itself, in an order
// that depends on its length alone. Low-precision results are rounded where ops/kernels/reference.py rounds them.

#include <cstddef>

#include "exports.h"
#include "norm_rows.h"
#include "rotate_row.h"
#include "thread_pool.h"

namespace {

// Below this many numbers a second thread costs more than it gains.
constexpr int64_t kSmall = 8192;

// ---- norms --------------------------------------------------------------------------------------------------------

template <class Element>
void rms_norm(
    const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads, int64_t size,
    const Element* weight, float epsilon, Element* to, int64_t num_threads) {
  parallel_for(num_tokens, num_tokens * num_heads * size < kSmall ? 1 : num_threads, [&](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head)
      norm_row(
          x + token * token_stride + head * head_stride, size, weight, epsilon, to + (token * num_heads + head) * size);
  });
}

template <class Element>
void add_rms_norm(
    Element* x, int64_t x_stride, Element* residual, int64_t residual_stride, int64_t num_tokens, int64_t size,
    const Element* weight, float epsilon, int64_t num_threads) {
  parallel_for(num_tokens, num_tokens * size < kSmall ? 1 : num_threads, [&](int64_t token) {
    Element* row = x + token * x_stride;
    const auto x_at = [&](int64_t index, int64_t count) { return load_some(row + index, count); };
    add_and_norm_row(x_at, residual + token * residual_stride, size, weight, epsilon, row);
  });
}

// x += y, rounded.
template <class Element>
void add(
    Element* x, int64_t x_stride, const Element* y, int64_t y_stride, int64_t num_tokens, int64_t size,
    int64_t num_threads) {
  parallel_for(num_tokens, num_tokens * size < kSmall ? 1 : num_threads, [&](int64_t token) {
    Element* const row = x + token * x_stride;
    const Element* const other = y + token * y_stride;
    for (int64_t index = 0; index < size; index += kLanes) {
      const int64_t count = size - index;
      store_some(row + index, load_some(row + index, count) + load_some(other + index, count), count);
    }
  });
}

template <class Element>
void full_norm(
    const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads, int64_t size,
    const Element* weight, const Element* bias, float epsilon, float offset, bool is_centred, Element* to,
    int64_t num_threads) {
  parallel_for(num_tokens, num_tokens * num_heads * size < kSmall ? 1 : num_threads, [&](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head)
      full_norm_row(
          x + token * token_stride + head * head_stride, size, weight, bias, epsilon, offset, is_centred,
          to + (token * num_heads + head) * size);
  });
}

// ---- rotary embedding ---------------------------------------------------------------------------------------------

// In place if `to` is the row.
template <class Element>
void rotate(
    const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads, int64_t size,
    const Element* cos, const Element* sin, Element* to, int64_t to_token_stride, int64_t num_threads) {
  const int64_t half = size / 2;
  parallel_for(num_tokens, num_tokens * num_heads * size < kSmall ? 1 : num_threads, [&](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head)
      rotate_row(
          x + token * token_stride + head * head_stride, half, cos + token * half, sin + token * half,
          to + token * to_token_stride + head * size);
  });
}

template <class Element>
void rotate_once(
    const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads, int64_t size,
    const float* cos, const float* sin, Element* to, int64_t num_threads) {
  const int64_t half = size / 2;
  parallel_for(num_tokens, num_tokens * num_heads * size < kSmall ? 1 : num_threads, [&](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head)
      rotate_row_once(
          x + token * token_stride + head * head_stride, half, cos + token * half, sin + token * half,
          to + (token * num_heads + head) * size);
  });
}

// ---- SiLU ---------------------------------------------------------------------------------------------------------

template <class Element>
void silu_and_mul(
    const Element* gate_up, int64_t stride, int64_t num_tokens, int64_t size, Element* to, int64_t num_threads) {
  parallel_for(num_tokens, num_tokens * size < kSmall ? 1 : num_threads, [&](int64_t token) {
    const Element* gates = gate_up + token * stride;
    for (int64_t index = 0; index < size; index += kLanes) {
      const int64_t count = size - index;
      const Floats gate = load_some(gates + index, count), up = load_some(gates + size + index, count);
      store_some(to + token * size + index, as_kept<Element>(silu(gate)) * up, count);
    }
  });
}

// ---- other activations --------------------------------------------------------------------------------------------

// The activation of each row's first `size` numbers, times the next `size` of them if it `is_gate`.
template <class Element, class Activation>
void activate_rows(
    const Element* x, int64_t stride, int64_t num_tokens, int64_t size, bool is_gate, Activation activation, Element* to,
    int64_t num_threads) {
  parallel_for(num_tokens, num_tokens * size < kSmall ? 1 : num_threads, [&](int64_t token) {
    const Element* row = x + token * stride;
    for (int64_t index = 0; index < size; index += kLanes) {
      const int64_t count = size - index;
      Floats result = as_kept<Element>(activation(load_some(row + index, count)));
      if (is_gate) result = result * load_some(row + size + index, count);
      store_some(to + token * size + index, result, count);
    }
  });
}

// `kind`: 0 SiLU, 1 GELU with tanh, 2 GELU, 3 ReLU, 4 its square, 5 x times a logistic function of 1.702 x.
template <class Element>
void activate(
    const Element* x, int64_t stride, int64_t num_tokens, int64_t size, bool is_gate, int64_t kind, Element* to,
    int64_t num_threads) {
  const auto all = [&](auto activation) {
    activate_rows(x, stride, num_tokens, size, is_gate, activation, to, num_threads);
  };
  // NaN stays NaN: it is not below 0.
  const auto relu = [](Floats each) { return larger(Floats{}, each); };
  switch (kind) {
    case 0: return all([](Floats each) { return silu(each); });
    case 1: return all([](Floats each) { return gelu_tanh(each); });
    case 2: return all([](Floats each) { return gelu(each); });
    case 3: return all(relu);
    case 4: return all([&](Floats each) { return relu(each) * relu(each); });
    default: return all([](Floats each) { return quick_gelu(each); });
  }
}

// ---- the argmax of a row -----------------------------------------------------------------------------------------

// The maximum and its first index; the first NaN if there is one.
template <class Element>
SPMD_INLINE void row_argmax(const Element* row, int64_t count, float* value, int64_t* index) {
  Floats most = broadcast(-kInfinity);
  Ints is_nan = Ints{};
  int64_t column = 0;
  for (; column + kLanes <= count; column += kLanes) {
    const Floats x = load_floats(row + column);
    is_nan |= (Ints)(x != x);
    most = larger(x, most);
  }
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) has_nan = has_nan || is_nan[lane] != 0;
  float argmax = argmax_lane(most);
  for (; column < count; ++column) {
    const float x = to_float(row[column]);
    has_nan = has_nan || x != x;
    argmax = x > argmax ? x : argmax;
  }
  int64_t found = 0;
  if (!has_nan) {
    const Floats wanted = broadcast(argmax);
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
    if (has_nan ? x != x : x == argmax) break;
  }
  *value = has_nan ? to_float(row[found]) : argmax;
  *index = found;
}

template <class Element>
void argmax(
    const Element* rows, int64_t stride, int64_t num_rows, int64_t count, float* values, int64_t* indices,
    int64_t num_threads) {
  parallel_for(num_rows, num_rows * count < kSmall ? 1 : num_threads, [&](int64_t row) {
    row_argmax(rows + row * stride, count, values + row, indices + row);
  });
}

}  // namespace

// ---- what Python calls --------------------------------------------------------------------------------------------

#define SPMD_ROWS(name, Element)                                                                                       \
  extern "C" void spmd_rms_norm_##name(                                                                                \
      const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads,              \
      int64_t size, const Element* weight, float epsilon, Element* to, int64_t num_threads) {                          \
    rms_norm(x, token_stride, head_stride, num_tokens, num_heads, size, weight, epsilon, to, num_threads);             \
  }                                                                                                                    \
  /* Overwrites `residual` by the sum and `x` by its norm. */                                                          \
  extern "C" void spmd_add_rms_norm_##name(                                                                            \
      Element* x, int64_t x_stride, Element* residual, int64_t residual_stride, int64_t num_tokens, int64_t size,      \
      const Element* weight, float epsilon, int64_t num_threads) {                                                     \
    add_rms_norm(x, x_stride, residual, residual_stride, num_tokens, size, weight, epsilon, num_threads);              \
  }                                                                                                                    \
  extern "C" void spmd_add_##name(                                                                                     \
      Element* x, int64_t x_stride, const Element* y, int64_t y_stride, int64_t num_tokens, int64_t size,              \
      int64_t num_threads) {                                                                                           \
    add(x, x_stride, y, y_stride, num_tokens, size, num_threads);                                                      \
  }                                                                                                                    \
  extern "C" void spmd_full_norm_##name(                                                                               \
      const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads,              \
      int64_t size, const Element* weight, const Element* bias, float epsilon, float offset, int64_t is_centred,       \
      Element* to, int64_t num_threads) {                                                                              \
    full_norm(                                                                                                         \
        x, token_stride, head_stride, num_tokens, num_heads, size, weight, bias, epsilon, offset, is_centred != 0, to, \
        num_threads);                                                                                                  \
  }                                                                                                                    \
  /* `kind` as above. */                                                                                               \
  extern "C" void spmd_activate_##name(                                                                                \
      const Element* x, int64_t stride, int64_t num_tokens, int64_t size, int64_t is_gate, int64_t kind, Element* to,  \
      int64_t num_threads) {                                                                                           \
    activate(x, stride, num_tokens, size, is_gate != 0, kind, to, num_threads);                                        \
  }                                                                                                                    \
  extern "C" void spmd_bound_##name(                                                                                   \
      const Element* x, int64_t stride, int64_t num_tokens, int64_t size, float cap, Element* to,                      \
      int64_t num_threads) {                                                                                           \
    activate_rows(                                                                                                     \
        x, stride, num_tokens, size, false, [cap](Floats each) { return bounded(each, cap); }, to, num_threads);       \
  }                                                                                                                    \
  extern "C" void spmd_rotate_##name(                                                                                  \
      const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads,              \
      int64_t size, const Element* cos, const Element* sin, Element* to, int64_t to_token_stride,                      \
      int64_t num_threads) {                                                                                           \
    rotate(x, token_stride, head_stride, num_tokens, num_heads, size, cos, sin, to, to_token_stride, num_threads);     \
  }                                                                                                                    \
  extern "C" void spmd_rotate_once_##name(                                                                             \
      const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads,              \
      int64_t size, const float* cos, const float* sin, Element* to, int64_t num_threads) {                            \
    rotate_once(x, token_stride, head_stride, num_tokens, num_heads, size, cos, sin, to, num_threads);                 \
  }                                                                                                                    \
  extern "C" void spmd_silu_and_mul_##name(                                                                            \
      const Element* gate_up, int64_t stride, int64_t num_tokens, int64_t size, Element* to, int64_t num_threads) {    \
    silu_and_mul(gate_up, stride, num_tokens, size, to, num_threads);                                                  \
  }                                                                                                                    \
  extern "C" void spmd_argmax_##name(                                                                                 \
      const Element* rows, int64_t stride, int64_t num_rows, int64_t count, float* values, int64_t* indices,           \
      int64_t num_threads) {                                                                                           \
    argmax(rows, stride, num_rows, count, values, indices, num_threads);                                              \
  }

SPMD_ROWS(float32, float)
SPMD_ROWS(bfloat16, uint16_t)
