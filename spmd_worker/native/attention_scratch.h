// State of one thread's attention of some query rows: their online softmax, and scratch memory.
#pragma once

#include "elements.h"
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

// Scores of each token of a step with embedded distances: a number a column for each token and head, or null. The column
// of a key depends on its distance from the query, up to `max_distance` on both sides.
template <class Element>
struct DistanceScores {
  const Element *of_queries, *of_keys;
  int64_t token_stride, head_stride;  // elements
  const int32_t* columns;  // [2 * max_distance + 1]; null: there are no such scores
};

// What is added to one row's scores by the distance of a key from the row's own position, up to `most` on both sides: a
// number of the distance, or with `columns` scores of the query and of the key in the column of the distance.
template <class Element>
struct RowBias {
  const float* table;  // [2 * most + 1]
  int64_t most, position;
  float factor;  // of what is added, to base 2
  const int32_t* columns = nullptr;  // [2 * most + 1]
  const Element* of_query = nullptr;
  const Element* of_keys = nullptr;  // of the key at position 0
  int64_t key_stride = 0, num_keys = 0;

  // Of the 64 keys of a tile: in the table itself, or in `copy`. No key, seen or not, is outside the table.
  const float* of_tile(int64_t tile_number, float* copy) const {
    if (columns != nullptr) return scores_of_tile(tile_number * kTile, copy);
    const int64_t first = tile_number * kTile - position, last = first + kTile - 1;
    if (first >= -most && last <= most) return table + most + first;
    if (last <= -most || first >= most) {
      std::fill(copy, copy + kTile, table[first < 0 ? 0 : 2 * most]);
    } else {
      for (int key = 0; key < kTile; ++key) copy[key] = table[most + std::clamp(first + key, -most, most)];
    }
    return copy;
  }

  // Keys that are not there, which no row sees, have zeros.
  const float* scores_of_tile(int64_t first, float* copy) const {
    const int count = int(std::clamp<int64_t>(num_keys - first, 0, kTile));
    const int32_t* const at = columns + most + first - position;
    for (int key = 0; key < count; ++key) copy[key] = of_query == nullptr ? 0.0f : to_float(of_query[at[key]]);
    if (of_keys != nullptr) {
      const Element* const keys = of_keys + first * key_stride;
      for (int key = 0; key < count; ++key) copy[key] += to_float(keys[key * key_stride + at[key]]);
    }
    std::fill(copy + count, copy + kTile, 0.0f);
    return copy;
  }
};

// Scores of one row -> probabilities relative to the maximum score so far; returns the factor of earlier sums. `biases` of
// the 64 keys, times `bias_factor`, if the row has any.
template <class Type, bool kHasBiases>
float probabilities_of(
    const float* scores, float scale, float cap, Range visible, Softmax& softmax, typename Type::Left* to,
    [[maybe_unused]] const float* biases, [[maybe_unused]] float bias_factor) {
  constexpr int kCount = kTile / kLanes;
  Floats scaled[kCount];
  const Floats factor = broadcast(scale);
  for (int v = 0; v < kCount; ++v) scaled[v] = load<Floats>(scores + v * kLanes) * factor;
  if (cap > 0.0f)
    for (int v = 0; v < kCount; ++v) scaled[v] = bounded(scaled[v], cap);
  if constexpr (kHasBiases)
    for (int v = 0; v < kCount; ++v)
      scaled[v] = fused(load<Floats>(biases + v * kLanes), broadcast(bias_factor), scaled[v]);
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
  RowBias<Element> biases[kItemRows];
  TileCopy<Element> copy;
  alignas(64) Element visible_values[kTile * kMaxHeadSize];
};

// `probabilities_of` a row with biases: out of the way of rows that have none.
template <class Type>
__attribute__((noinline)) float biased_probabilities_of(
    const float* scores, float scale, float cap, Range visible, Softmax& softmax, typename Type::Left* to,
    const RowBias<typename Type::Element>& bias, int64_t tile_number) {
  alignas(64) float copy[kTile];
  const float* const biases = bias.of_tile(tile_number, copy);
  return probabilities_of<Type, true>(scores, scale, cap, visible, softmax, to, biases, bias.factor);
}

// `probabilities_of` row `r` of those whose scores are in the scratch memory, row `index` of its bundle.
template <class Type>
SPMD_INLINE float probabilities_of_row(
    int r, int64_t index, int64_t tile_number, float scale, float cap, bool has_biases, Range visible,
    Scratch<Type>& scratch) {
  const float* const scores = scratch.scores + r * kTile;
  typename Type::Left* const to = scratch.probabilities + r * kTile / Type::kPair;
  Softmax& softmax = scratch.softmax[index];
  if (!has_biases) return probabilities_of<Type, false>(scores, scale, cap, visible, softmax, to, nullptr, 0.0f);
  return biased_probabilities_of<Type>(
      scores, scale, cap, visible, softmax, to, scratch.biases[index], tile_number);
}

}  // namespace
