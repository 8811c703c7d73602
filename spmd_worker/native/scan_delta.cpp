// The gated delta rule over a step's sequences, and the gated norm behind it (ops/kernels/recurrent.py).
//
// Every column of a head's state is computed by itself: sums over the channels of a key run upwards in one chain. So
// neither the tile, nor the width of a vector, nor the number of threads, nor the division of a prompt into steps
// changes a bit. Decoding is a segment of one token.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "elements.h"
#include "thread_pool.h"

namespace {

// Below this many multiplications a second thread costs more than it gains.
constexpr int64_t kSmall = 1 << 16;
// Vectors of columns that are computed together, which hide the latency of additions.
constexpr int64_t kVectors = 4, kColumns = kVectors * kLanes;
// Partial sums of a squared length.
constexpr int64_t kPartials = 16;
constexpr float kLengthEpsilon = 1e-6f, kLog2E = 1.44269504088896340736f;

template <class Element>
struct Scan {
  const Element* mixed;  // [tokens, queries | keys | values]
  int64_t mixed_stride;
  const Element* a;
  int64_t a_stride;
  const Element* b;
  int64_t b_stride;
  const float *a_log, *dt_bias;
  float* states;  // [slots, value heads, key size, value size]
  const int32_t *slots, *starts, *firsts;
  const int32_t* kept;  // tokens whose effect on the state is kept, or null for all
  int64_t num_segments, num_key_heads, num_value_heads, key_size, value_size;
  float beta_scale, decay_bound;  // The second is 0 without a least logarithm of a decay.
  Element* to;  // [tokens, value heads, value size]
};

SPMD_INLINE Floats exp_of(Floats x) { return exp2(x * broadcast(kLog2E)); }
SPMD_INLINE float exp_of(float x) { return exp_of(broadcast(x))[0]; }
SPMD_INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

// log(1 + e^x) = max(x, 0) + log(1 + y) with y = e^-|x|, and log(1 + y) = 2 artanh(y / (2 + y)), whose series is cut at
// 2e-8 of it.
SPMD_INLINE Floats softplus_of(Floats x) {
  const Floats y = exp_of(-larger(x, -x)), ratio = y / (broadcast(2.0f) + y), square = ratio * ratio;
  Floats series = broadcast(1.0f / 13.0f);
  for (float divisor : {11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) series = fused(series, square, broadcast(1.0f / divisor));
  return larger(x, Floats{}) + broadcast(2.0f) * ratio * series;
}

// A tree over halves, whatever the width of a vector.
SPMD_INLINE float sum_of_partials(float* sums) {
  for (int64_t width = kPartials / 2; width > 0; width /= 2)
    for (int64_t index = 0; index < width; ++index) sums[index] += sums[index + width];
  return sums[0];
}

// The vector with length `scale`, as floats.
template <class Element>
SPMD_INLINE void load_unit(const Element* from, int64_t size, float scale, float* to) {
  Floats sums[kPartials / kLanes] = {};
  for (int64_t index = 0; index < size; index += kPartials)
    for (int64_t part = 0; part < kPartials / kLanes; ++part) {
      const int64_t at = index + part * kLanes;
      if (at >= size) break;
      const Floats x = load_some(from + at, size - at);
      store_some(to + at, x, size - at);
      sums[part] = fused(x, x, sums[part]);
    }
  float partials[kPartials];
  std::memcpy(partials, sums, sizeof partials);
  const float factor = scale / std::sqrt(sum_of_partials(partials) + kLengthEpsilon);
  for (int64_t index = 0; index < size; ++index) to[index] *= factor;
}

// What a head's tiles of columns need of one token.
struct Token {
  const float *query, *key, *decay;  // [key size]; `decay` has one number if the channels of a key decay together
  float beta;
};

// S = decay S; S += k (beta (v - S^T k))^T; the result is S^T q. The old and the new state may be the same.
template <bool kIsPerChannel>
SPMD_INLINE void advance(
    const Token& token, int64_t key_size, const float* old_state, int64_t old_stride, float* state, int64_t stride,
    const Floats* value, Floats* result) {
  Floats read[kVectors] = {}, change[kVectors];
  for (int64_t channel = 0; channel < key_size; ++channel)
    for (int64_t part = 0; part < kVectors; ++part) {
      const Floats decay = broadcast(token.decay[kIsPerChannel ? channel : 0]);
      const Floats kept = load<Floats>(old_state + channel * old_stride + part * kLanes) * decay;
      read[part] = fused(kept, broadcast(token.key[channel]), read[part]);
    }
  for (int64_t part = 0; part < kVectors; ++part) {
    change[part] = (value[part] - read[part]) * broadcast(token.beta);
    result[part] = Floats{};
  }
  for (int64_t channel = 0; channel < key_size; ++channel)
    for (int64_t part = 0; part < kVectors; ++part) {
      const Floats decay = broadcast(token.decay[kIsPerChannel ? channel : 0]);
      const Floats kept = load<Floats>(old_state + channel * old_stride + part * kLanes) * decay;
      const Floats next = fused(broadcast(token.key[channel]), change[part], kept);
      store(state + channel * stride + part * kLanes, next);
      result[part] = fused(next, broadcast(token.query[channel]), result[part]);
    }
}

// Scratch of a thread.
struct Scratch {
  explicit Scratch(int64_t key_size) : query(key_size), key(key_size), decay(key_size), state(key_size * kColumns) {}
  std::vector<float> query, key, decay, state;
};

template <class Element, bool kIsPerChannel>
SPMD_INLINE Token load_token(const Scan<Element>& scan, int64_t row, int64_t head, float rate, Scratch& scratch) {
  const int64_t size = scan.key_size, key_head = head * scan.num_key_heads / scan.num_value_heads;
  const Element* queries = scan.mixed + row * scan.mixed_stride;
  load_unit(queries + key_head * size, size, 1.0f / std::sqrt(float(size)), scratch.query.data());
  load_unit(queries + (scan.num_key_heads + key_head) * size, size, 1.0f, scratch.key.data());
  const int64_t num_steps = kIsPerChannel ? size : 1;
  const Element* a = scan.a + row * scan.a_stride + head * num_steps;
  for (int64_t step = 0; step < num_steps; step += kLanes) {
    const int64_t count = num_steps - step;
    const Floats x = load_some(a + step, count) + load_some(scan.dt_bias + head * num_steps + step, count);
    const Floats change = scan.decay_bound < 0.0f
                              ? broadcast(scan.decay_bound) / (broadcast(1.0f) + exp_of(x * broadcast(-rate)))
                              : softplus_of(x) * broadcast(-rate);
    store_some(scratch.decay.data() + step, exp_of(change), count);
  }
  const Floats beta = as_kept<Element>(broadcast(sigmoid_of(to_float(scan.b[row * scan.b_stride + head]))));
  return {scratch.query.data(), scratch.key.data(), scratch.decay.data(), beta[0] * scan.beta_scale};
}

// One tile of a head's columns, from `first` on, over all tokens of a segment. The state is read from its slot with the
// first token and written there with the last that is kept; those behind go on in the scratch.
template <class Element, bool kIsPerChannel>
void scan_tile(const Scan<Element>& scan, int64_t segment, int64_t head, int64_t first, Scratch& scratch) {
  const int64_t start = scan.starts[segment], stop = scan.starts[segment + 1], num_heads = scan.num_value_heads;
  if (scan.slots[segment] < 0 || start >= stop) return;
  const int64_t kept_stop = scan.kept == nullptr ? stop : start + scan.kept[segment];
  const int64_t count = std::min(kColumns, scan.value_size - first);
  float* slot = scan.states + (scan.slots[segment] * num_heads + head) * scan.key_size * scan.value_size + first;
  float* tile = scratch.state.data();
  const float rate = exp_of(scan.a_log[head]);
  static const float zeros[kColumns] = {};
  const float* old_state = slot;
  int64_t old_stride = scan.value_size;
  if (scan.firsts[segment] == 0) {
    old_state = zeros, old_stride = 0;
  } else if (count < kColumns) {
    for (int64_t channel = 0; channel < scan.key_size; ++channel) {
      std::copy_n(slot + channel * scan.value_size, count, tile + channel * kColumns);
      std::fill_n(tile + channel * kColumns + count, kColumns - count, 0.0f);
    }
    old_state = tile, old_stride = kColumns;
  }
  for (int64_t row = start; row < stop; ++row) {
    const Token token = load_token<Element, kIsPerChannel>(scan, row, head, rate, scratch);
    const Element* values = scan.mixed + row * scan.mixed_stride + 2 * scan.num_key_heads * scan.key_size;
    Floats value[kVectors], result[kVectors];
    for (int64_t part = 0; part < kVectors; ++part) {
      const int64_t left = count - part * kLanes;
      const Element* from = values + head * scan.value_size + first + part * kLanes;
      value[part] = left > 0 ? load_some(from, left) : Floats{};
    }
    const bool is_kept = row + 1 == kept_stop, goes_to_slot = is_kept && count == kColumns;
    float* state = goes_to_slot ? slot : tile;
    const int64_t stride = goes_to_slot ? scan.value_size : kColumns;
    advance<kIsPerChannel>(token, scan.key_size, old_state, old_stride, state, stride, value, result);
    Element* to = scan.to + (row * num_heads + head) * scan.value_size + first;
    for (int64_t part = 0; part * kLanes < count; ++part)
      store_some(to + part * kLanes, result[part], count - part * kLanes);
    old_state = state, old_stride = stride;
    if (!is_kept || goes_to_slot) continue;
    for (int64_t channel = 0; channel < scan.key_size; ++channel)
      std::copy_n(tile + channel * kColumns, count, slot + channel * scan.value_size);
  }
}

template <class Element, bool kIsPerChannel>
void scan_delta(const Scan<Element>& scan, int64_t num_threads) {
  if (scan.num_segments == 0) return;
  const int64_t num_tiles = (scan.value_size + kColumns - 1) / kColumns;
  const int64_t num_tokens = scan.starts[scan.num_segments] - scan.starts[0];
  const int64_t num_numbers = num_tokens * scan.num_value_heads * scan.key_size * scan.value_size;
  const int64_t num_tasks = scan.num_segments * scan.num_value_heads * num_tiles;
  // Items get shorter towards the end: segments may differ much in length.
  const ShrinkingItems tasks(num_tasks, num_threads, num_tasks);
  run_items(tasks.size(), num_numbers < kSmall ? 1 : num_threads, [&](Items& items) {
    Scratch scratch(scan.key_size);
    for (int64_t item = items.next(); item >= 0; item = items.next())
      for (int64_t task = tasks.start(item); task < tasks.end(item); ++task) {
        const int64_t tile = task % num_tiles, head = task / num_tiles % scan.num_value_heads;
        const int64_t segment = task / num_tiles / scan.num_value_heads;
        scan_tile<Element, kIsPerChannel>(scan, segment, head, tile * kColumns, scratch);
      }
  });
}

// ---- gated norm ---------------------------------------------------------------------------------------------------

template <class Element>
struct GatedNorm {
  const Element* x;
  int64_t x_stride;
  const Element* gate;
  int64_t gate_stride, num_tokens, num_groups, size;
  const Element* weight;
  int64_t weight_stride;  // between groups, 0 if they share a weight
  float epsilon;
  bool is_sigmoid, gates_first, rounds_once;
  Element* to;
};

template <class Element>
SPMD_INLINE Floats activated(const GatedNorm<Element>& norm, const Element* gate, int64_t count) {
  const Floats x = load_some(gate, count);
  return norm.is_sigmoid ? broadcast(1.0f) / (broadcast(1.0f) + exp_of(-x)) : silu(x);
}

// One group of one row.
template <class Element>
SPMD_INLINE void norm_group(const GatedNorm<Element>& norm, int64_t row, int64_t group) {
  const Element* x = norm.x + row * norm.x_stride + group * norm.size;
  const Element* gate = norm.gate + row * norm.gate_stride + group * norm.size;
  const Element* weight = norm.weight + group * norm.weight_stride;
  Element* to = norm.to + (row * norm.num_groups + group) * norm.size;
  const auto input = [&](int64_t index) {
    const Floats numbers = load_some(x + index, norm.size - index);
    return norm.gates_first ? numbers * activated(norm, gate + index, norm.size - index) : numbers;
  };
  Floats squares = Floats{};
  for (int64_t index = 0; index < norm.size; index += kLanes) {
    const Floats numbers = input(index);
    squares = fused(numbers, numbers, squares);
  }
  const Floats factor = broadcast(1.0f / std::sqrt(sum_of_lanes(squares) / float(norm.size) + norm.epsilon));
  for (int64_t index = 0; index < norm.size; index += kLanes) {
    const int64_t count = norm.size - index;
    const auto kept = [&](Floats numbers) { return norm.rounds_once ? numbers : as_kept<Element>(numbers); };
    Floats result = kept(input(index) * factor) * load_some(weight + index, count);
    if (!norm.gates_first) result = kept(result) * activated(norm, gate + index, count);
    store_some(to + index, result, count);
  }
}

template <class Element>
void gated_norm(const GatedNorm<Element>& norm, int64_t num_threads) {
  const bool is_small = norm.num_tokens * norm.num_groups * norm.size < kSmall;
  parallel_for(norm.num_tokens, is_small ? 1 : num_threads, [&](int64_t row) {
    for (int64_t group = 0; group < norm.num_groups; ++group) norm_group(norm, row, group);
  });
}

}  // namespace

#define SPMD_DELTA(name, Element)                                                                                      \
  extern "C" void spmd_scan_delta_##name(                                                                              \
      const Element* mixed, int64_t mixed_stride, const Element* a, int64_t a_stride, const Element* b,                \
      int64_t b_stride, const float* a_log, const float* dt_bias, float* states, const int32_t* slots,                 \
      const int32_t* starts, const int32_t* firsts, const int32_t* kept, int64_t num_segments, int64_t num_key_heads,  \
      int64_t num_value_heads, int64_t key_size, int64_t value_size, float beta_scale, float decay_bound,              \
      int64_t is_per_channel, Element* to, int64_t num_threads) {                                                      \
    const Scan<Element> scan{mixed, mixed_stride, a, a_stride, b, b_stride, a_log, dt_bias, states, slots, starts,     \
                             firsts, kept, num_segments, num_key_heads, num_value_heads, key_size, value_size,         \
                             beta_scale, decay_bound, to};                                                             \
    is_per_channel ? scan_delta<Element, true>(scan, num_threads) : scan_delta<Element, false>(scan, num_threads);     \
  }                                                                                                                    \
  extern "C" void spmd_gated_norm_##name(                                                                              \
      const Element* x, int64_t x_stride, const Element* gate, int64_t gate_stride, int64_t num_tokens,                \
      int64_t num_groups, int64_t size, const Element* weight, int64_t weight_stride, float epsilon,                   \
      int64_t is_sigmoid, int64_t gates_first, int64_t rounds_once, Element* to, int64_t num_threads) {                \
    gated_norm<Element>(                                                                                               \
        {x, x_stride, gate, gate_stride, num_tokens, num_groups, size, weight, weight_stride, epsilon,                 \
         is_sigmoid != 0, gates_first != 0, rounds_once != 0, to},                                                     \
        num_threads);                                                                                                  \
  }

SPMD_DELTA(float32, float)
SPMD_DELTA(bfloat16, uint16_t)
