// State of one thread's attention of some query rows: their online softmax, and scratch memory.
#pragma once

#include "steps.h"

namespace {

constexpr int kItemRows = 64;  // query rows of one bundle of work items
constexpr int kAmxTileRows = 16;  // query rows of one AMX tile
constexpr float kLog2OfE = 1.44269504088896340736f;  // scores are exponents of two

// First and last position that a row sees, or any of some rows.
struct Keys {
  int64_t first, last;

  Range within(int64_t tile_number) const {
    const int64_t start = tile_number * kTile;
    return {int(std::clamp<int64_t>(first - start, 0, kTile)), int(std::clamp<int64_t>(last + 1 - start, 0, kTile))};
  }
};

// One row's online softmax after the tiles so far; the sum is kept by lane until the end.
struct Softmax {
  float argmax;
  Floats sum;
};

// What is added to one row's scores by the distance of a key from the row's own position, up to `most` on both sides.
struct RowBias {
  const float* table;  // [2 * most + 1]
  int64_t most, position;

  // Of the 64 keys of a tile: in the table itself, or in `copy`. No key, seen or not, is outside the table.
  const float* of_tile(int64_t tile_number, float* copy) const {
    const int64_t first = tile_number * kTile - position, last = first + kTile - 1;
    if (first >= -most && last <= most) return table + most + first;
    if (last <= -most || first >= most) {
      std::fill(copy, copy + kTile, table[first < 0 ? 0 : 2 * most]);
    } else {
      for (int key = 0; key < kTile; ++key) copy[key] = table[most + std::clamp(first + key, -most, most)];
    }
    return copy;
  }
};

// Scores of one row -> probabilities relative to the maximum score so far; returns the factor of earlier sums. `biases` of
// the 64 keys, if the row has any.
template <class Type, bool kHasBiases>
float probabilities_of(
    const float* scores, float scale, float cap, Range visible, Softmax& softmax, typename Type::Left* to,
    [[maybe_unused]] const float* biases) {
  constexpr int kCount = kTile / kLanes;
  Floats scaled[kCount];
  const Floats factor = broadcast(scale);
  for (int v = 0; v < kCount; ++v) scaled[v] = load<Floats>(scores + v * kLanes) * factor;
  if (cap > 0.0f)
    for (int v = 0; v < kCount; ++v) scaled[v] = bounded(scaled[v], cap);
  if constexpr (kHasBiases)
    for (int v = 0; v < kCount; ++v)
      scaled[v] = fused(load<Floats>(biases + v * kLanes), broadcast(kLog2OfE), scaled[v]);
  if (visible.first > 0 || visible.end < kTile) {
    const Ints numbers = lane_numbers();
    for (int v = 0; v < kCount; ++v) {
      const Ints key = numbers + v * kLanes;
      const auto is_visible = (key >= visible.first) & (key < visible.end);
      scaled[v] = is_visible ? scaled[v] : broadcast(-kInfinity);
    }
  }
  Floats argmax = scaled[0];
  for (int v = 1; v < kCount; ++v) argmax = larger(argmax, scaled[v]);
  const float tile_argmax = argmax_lane(argmax);
  const float so_far = tile_argmax > softmax.argmax ? tile_argmax : softmax.argmax;
  // If every score is -inf the difference from the maximum would be NaN; relative to 0 the probabilities are 0.
  const float reference = so_far == -kInfinity ? 0.0f : so_far;
  // 2^0 is exactly 1, so the shortcut changes no bit.
  const float decay = softmax.argmax == so_far ? 1.0f : exp2_of_falling(broadcast(softmax.argmax - reference))[0];
  Floats sum = Floats{};
  for (int v = 0; v < kCount; ++v) {
    const Floats probability = exp2_of_falling(scaled[v] - broadcast(reference));
    sum += probability;
    Type::keep(probability, to + v * kLanes / Type::kPair);
  }
  softmax.argmax = so_far;
  softmax.sum = fused(softmax.sum, broadcast(decay), sum);
  return decay;
}

template <class Type>
struct Scratch {
  using Element = typename Type::Element;
  using Left = typename Type::Left;

  alignas(64) Left queries[kItemRows * kMaxHeadSize / Type::kPair];
  alignas(64) float outputs[kItemRows * kMaxHeadSize];
  alignas(64) float scores[kAmxTileRows * kTile];
  alignas(64) Left probabilities[kAmxTileRows * kTile / Type::kPair];
  alignas(64) float sums[kAmxTileRows * kMaxHeadSize];
  alignas(64) Element edges[2][kMaxHeadSize * Type::kPair];
  Softmax softmax[kItemRows];
  Keys seen[kItemRows];
  RowBias biases[kItemRows];
  TileCopy<Element> copy;
  alignas(64) Element visible_values[kTile * kMaxHeadSize];
};

// `probabilities_of` a row with biases: out of the way of rows that have none.
template <class Type>
__attribute__((noinline)) float biased_probabilities_of(
    const float* scores, float scale, float cap, Range visible, Softmax& softmax, typename Type::Left* to,
    const RowBias& bias, int64_t tile_number) {
  alignas(64) float copy[kTile];
  return probabilities_of<Type, true>(scores, scale, cap, visible, softmax, to, bias.of_tile(tile_number, copy));
}

// `probabilities_of` row `r` of those whose scores are in the scratch memory, row `index` of its bundle.
template <class Type>
SPMD_INLINE float probabilities_of_row(
    int r, int64_t index, int64_t tile_number, float scale, float cap, bool has_biases, Range visible,
    Scratch<Type>& scratch) {
  const float* const scores = scratch.scores + r * kTile;
  typename Type::Left* const to = scratch.probabilities + r * kTile / Type::kPair;
  Softmax& softmax = scratch.softmax[index];
  if (!has_biases) return probabilities_of<Type, false>(scores, scale, cap, visible, softmax, to, nullptr);
  return biased_probabilities_of<Type>(
      scores, scale, cap, visible, softmax, to, scratch.biases[index], tile_number);
}

}  // namespace
