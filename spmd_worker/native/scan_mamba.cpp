// The recurrence of Mamba2 (https://arxiv.org/abs/2405.21060), token after token: S = exp(dt A) S + (dt x) B^T; y = S C + D x;
// and that of Mamba (https://arxiv.org/abs/2312.00752), whose channels are rows, each number of which decays by itself.
//
// A task is a sequence, a head of Mamba2 and 16 rows of its state, which stay in the cache from the sequence's first token to its last.
// Rows of a state know nothing of each other. The sum over a row has 16 chains, each over every 16th element upwards, which
// a tree adds: neither the number of tokens of a step, nor threads, nor the width of vectors changes a bit.

#include <algorithm>
#include <cmath>
#include <vector>

#include "elements.h"
#include "exports.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kRows = 16, kRowsAtOnce = 4;
constexpr int64_t kChains = 16;
constexpr int kVectors = int(kChains) / kLanes;
// Below this many elements of states, times tokens, a second thread costs more than it gains.
constexpr int64_t kFewElements = 1 << 15;

// Sizes of a rank's share, and the sequences of a step: int32, as `StateSegments`.
struct MambaStep {
  int64_t num_heads, head_size, num_groups, state_size;
  const int32_t *slots, *starts, *firsts;
  const int32_t* kept;  // tokens whose effect on the state is kept, or null for all
};

// dt and exp(dt A) of a token and a head.
struct Gate {
  float dt, decay;
};

SPMD_INLINE float exponential(float x) { return exp2(broadcast(x * 1.44269504088896340736f))[0]; }

// log1p(exp), as the reference has it. NaN stays NaN.
SPMD_INLINE Gate gate_of(float dt, float a_log, float least, float most) {
  const float open = dt > 20.0f ? dt : std::log1p(exponential(dt));
  const float bounded = std::min(std::max(open, least), most);
  return {bounded, exponential(bounded * -exponential(a_log))};
}

SPMD_INLINE float sum_of_chains(const Floats* chains) {
  if constexpr (kVectors == 4) return sum_of_lanes((chains[0] + chains[2]) + (chains[1] + chains[3]));
  if constexpr (kVectors == 2) return sum_of_lanes(chains[0] + chains[kVectors - 1]);
  return sum_of_lanes(chains[0]);
}

// One token of `kCount` rows of a state: `state` [kCount][size], b and c filled up with zeros to a multiple of 16.
template <class Element, int kCount>
SPMD_INLINE void advance_rows(
    float* state, int64_t size, const float* b, const float* c, const Element* x, Gate gate, float skip, Element* to) {
  Floats sums[kCount][kVectors] = {}, added[kCount];
  for (int row = 0; row < kCount; ++row) added[row] = broadcast(gate.dt * to_float(x[row]));
  const Floats decay = broadcast(gate.decay);
  for (int64_t first = 0; first < size; first += kChains)
    for (int v = 0; v < kVectors; ++v) {
      const int64_t index = first + v * kLanes, count = size - index;
      if (count <= 0) break;
      const Floats input = load_floats(b + index), output = load_floats(c + index);
      for (int row = 0; row < kCount; ++row) {
        float* at = state + row * size + index;
        const Floats next = fused(added[row], input, load_some(at, count) * decay);
        store_some(at, next, count);
        sums[row][v] = fused(next, output, sums[row][v]);
      }
    }
  for (int row = 0; row < kCount; ++row)
    from_float(sum_of_chains(sums[row]) + skip * to_float(x[row]), to + row);
}

template <class Element>
void widen(const Element* from, int64_t count, float* to) {
  for (int64_t index = 0; index < count; index += kLanes)
    store_some(to + index, load_some(from + index, count - index), count - index);
}

// All tokens of one sequence for `num_rows` rows of a head, from `row` on. Behind the kept ones the state goes on in
// the scratch.
template <class Element>
void scan_rows(
    const MambaStep& step, int64_t sequence, int64_t head, int64_t row, int64_t num_rows, const Element* mixed,
    int64_t stride, const Gate* gates, float skip, float* states, Element* to) {
  const int64_t size = step.state_size, inner = step.num_heads * step.head_size;
  const int64_t group = head / (step.num_heads / step.num_groups);
  const int64_t padded = (size + kChains - 1) / kChains * kChains, column = head * step.head_size + row;
  float* state = states + ((step.slots[sequence] * step.num_heads + head) * step.head_size + row) * size;
  if (step.firsts[sequence] == 0) std::fill(state, state + num_rows * size, 0.0f);
  const int64_t start = step.starts[sequence], stop = step.starts[sequence + 1];
  const int64_t kept_stop = step.kept == nullptr ? stop : start + step.kept[sequence];
  thread_local std::vector<float> scratch;
  scratch.assign(size_t(2 * padded + (kept_stop < stop ? num_rows * size : 0)), 0.0f);
  float *b = scratch.data(), *c = b + padded;
  for (int64_t token = start; token < stop; ++token) {
    if (token == kept_stop) {
      std::copy_n(state, num_rows * size, c + padded);
      state = c + padded;
    }
    const Element* inputs = mixed + token * stride;
    widen(inputs + inner + group * size, size, b);
    widen(inputs + inner + (step.num_groups + group) * size, size, c);
    const Gate gate = gates[token * step.num_heads + head];
    const Element* x = inputs + column;
    Element* y = to + token * inner + column;
    int64_t done = 0;
    for (; done + kRowsAtOnce <= num_rows; done += kRowsAtOnce)
      advance_rows<Element, kRowsAtOnce>(state + done * size, size, b, c, x + done, gate, skip, y + done);
    for (; done < num_rows; ++done)
      advance_rows<Element, 1>(state + done * size, size, b, c, x + done, gate, skip, y + done);
  }
}

template <class Element>
void scan_mamba(
    const MambaStep& step, int64_t num_sequences, const Element* mixed, int64_t stride, const Element* dt,
    int64_t dt_stride, const float* a_log, const float* dt_bias, const float* skip, float least, float most,
    float* states, Element* to, int64_t num_threads) {
  const int64_t num_tokens = step.starts[num_sequences], num_heads = step.num_heads;
  if (num_tokens * num_heads * step.head_size * step.state_size < kFewElements) num_threads = 1;
  std::vector<Gate> gates(size_t(num_tokens * num_heads));
  parallel_for(num_tokens, num_threads, [&](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head)
      gates[size_t(token * num_heads + head)] =
          gate_of(to_float(dt[token * dt_stride + head]) + dt_bias[head], a_log[head], least, most);
  });
  const int64_t num_tiles = (step.head_size + kRows - 1) / kRows;
  parallel_for(num_sequences * num_heads * num_tiles, num_threads, [&](int64_t task) {
    const int64_t row = task % num_tiles * kRows, head = task / num_tiles % num_heads;
    const int64_t sequence = task / num_tiles / num_heads;
    if (step.slots[sequence] < 0 || step.starts[sequence] == step.starts[sequence + 1]) return;
    scan_rows(
        step, sequence, head, row, std::min(kRows, step.head_size - row), mixed, stride, gates.data(), skip[head],
        states, to);
  });
}

// The channels of one sequence from `channel` on, all tokens: `dts` [T, C] are positive, `rates` [C, n] are A.
template <class Element>
void scan_channels(
    const MambaStep& step, int64_t sequence, int64_t channel, int64_t num_rows, const Element* x, int64_t x_stride,
    const Element* shared, int64_t shared_stride, const float* dts, const float* rates, const float* skip,
    float* states, Element* to) {
  const int64_t size = step.state_size, num_channels = step.num_heads;
  const int64_t padded = (size + kChains - 1) / kChains * kChains;
  float* state = states + (step.slots[sequence] * num_channels + channel) * size;
  if (step.firsts[sequence] == 0) std::fill(state, state + num_rows * size, 0.0f);
  const int64_t start = step.starts[sequence], stop = step.starts[sequence + 1];
  const int64_t kept_stop = step.kept == nullptr ? stop : start + step.kept[sequence];
  thread_local std::vector<float> scratch;
  scratch.assign(size_t(2 * padded + (kept_stop < stop ? num_rows * size : 0)), 0.0f);
  float *b = scratch.data(), *c = b + padded;
  for (int64_t token = start; token < stop; ++token) {
    if (token == kept_stop) {
      std::copy_n(state, num_rows * size, c + padded);
      state = c + padded;
    }
    widen(shared + token * shared_stride, size, b);
    widen(shared + token * shared_stride + size, size, c);
    for (int64_t row = 0; row < num_rows; ++row) {
      const float dt = dts[token * num_channels + channel + row], input = to_float(x[token * x_stride + channel + row]);
      const Floats added = broadcast(dt * input), wide = broadcast(dt);
      Floats sums[kVectors] = {};
      for (int64_t first = 0; first < size; first += kChains)
        for (int v = 0; v < kVectors; ++v) {
          const int64_t index = first + v * kLanes, count = size - index;
          if (count <= 0) break;
          const Floats rate = load_some(rates + (channel + row) * size + index, count);
          const Floats decay = exp2(wide * rate * broadcast(1.44269504088896340736f));
          float* at = state + row * size + index;
          const Floats next = fused(added, load_floats(b + index), load_some(at, count) * decay);
          store_some(at, next, count);
          sums[v] = fused(next, load_floats(c + index), sums[v]);
        }
      from_float(sum_of_chains(sums) + skip[channel + row] * input, to + token * num_channels + channel + row);
    }
  }
}

template <class Element>
void scan_mamba1(
    const MambaStep& step, int64_t num_sequences, const Element* x, int64_t x_stride, const Element* dt,
    int64_t dt_stride, const Element* shared, int64_t shared_stride, const float* a_log, const float* dt_bias,
    const float* skip, float* states, Element* to, int64_t num_threads) {
  const int64_t num_tokens = step.starts[num_sequences], num_channels = step.num_heads, size = step.state_size;
  if (num_tokens * num_channels * size < kFewElements) num_threads = 1;
  std::vector<float> rates(size_t(num_channels * size)), dts(size_t(num_tokens * num_channels));
  parallel_for(num_channels, num_threads, [&](int64_t channel) {
    for (int64_t index = channel * size; index < (channel + 1) * size; index += kLanes) {
      const int64_t count = (channel + 1) * size - index;
      const Floats rate = exp2(load_some(a_log + index, count) * broadcast(1.44269504088896340736f));
      store_some(rates.data() + index, -rate, count);
    }
  });
  parallel_for(num_tokens, num_threads, [&](int64_t token) {
    for (int64_t channel = 0; channel < num_channels; ++channel) {
      const float open = to_float(dt[token * dt_stride + channel]) + dt_bias[channel];
      dts[size_t(token * num_channels + channel)] = open > 20.0f ? open : std::log1p(exponential(open));
    }
  });
  const int64_t num_tiles = (num_channels + kRows - 1) / kRows;
  parallel_for(num_sequences * num_tiles, num_threads, [&](int64_t task) {
    const int64_t channel = task % num_tiles * kRows, sequence = task / num_tiles;
    if (step.slots[sequence] < 0 || step.starts[sequence] == step.starts[sequence + 1]) return;
    scan_channels(
        step, sequence, channel, std::min(kRows, num_channels - channel), x, x_stride, shared, shared_stride,
        dts.data(), rates.data(), skip, states, to);
  });
}

}  // namespace

// `mixed` [T, H P + 2 G n] and `dt` [T, H] with these strides of rows, `states` [slots, H, P, n], `to` [T, H P].
#define SPMD_SCAN_MAMBA(name, Element)                                                                                 \
  extern "C" void spmd_scan_mamba_##name(                                                                              \
      const int32_t* slots, const int32_t* starts, const int32_t* firsts, const int32_t* kept, int64_t num_sequences,  \
      int64_t num_heads, int64_t head_size, int64_t num_groups, int64_t state_size, const Element* mixed,              \
      int64_t stride, const Element* dt, int64_t dt_stride, const float* a_log, const float* dt_bias,                  \
      const float* skip, float least, float most, float* states, Element* to, int64_t num_threads) {                   \
    const MambaStep step{num_heads, head_size, num_groups, state_size, slots, starts, firsts, kept};                   \
    scan_mamba(                                                                                                        \
        step, num_sequences, mixed, stride, dt, dt_stride, a_log, dt_bias, skip, least, most, states, to,              \
        num_threads);                                                                                                  \
  }

SPMD_SCAN_MAMBA(float32, float)
SPMD_SCAN_MAMBA(bfloat16, uint16_t)

// `x` and `dt` [T, C], `shared` [T, 2 n] with these strides of rows, `states` [slots, C, n], `to` [T, C].
#define SPMD_SCAN_MAMBA1(name, Element)                                                                                \
  extern "C" void spmd_scan_mamba1_##name(                                                                             \
      const int32_t* slots, const int32_t* starts, const int32_t* firsts, const int32_t* kept, int64_t num_sequences,  \
      int64_t num_channels, int64_t state_size, const Element* x, int64_t x_stride, const Element* dt,                 \
      int64_t dt_stride, const Element* shared, int64_t shared_stride, const float* a_log, const float* dt_bias,       \
      const float* skip, float* states, Element* to, int64_t num_threads) {                                            \
    const MambaStep step{num_channels, 1, 1, state_size, slots, starts, firsts, kept};                                 \
    scan_mamba1(                                                                                                       \
        step, num_sequences, x, x_stride, dt, dt_stride, shared, shared_stride, a_log, dt_bias, skip, states, to,      \
        num_threads);                                                                                                  \
  }

SPMD_SCAN_MAMBA1(float32, float)
SPMD_SCAN_MAMBA1(bfloat16, uint16_t)
