// State of one thread's attention of some query rows: their online softmax, and scratch memory.
#pragma once

#include "steps.h"

namespace {

constexpr int kItemRows = 64;  // query rows of one bundle of work items
constexpr int kAmxTileRows = 16;  // query rows of one AMX tile

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

// Scores of one row -> probabilities relative to the maximum score so far; returns the factor of earlier sums.
template <class Type>
float probabilities_of(
    const float* scores, float scale, float cap, Range visible, Softmax& softmax, typename Type::Left* to) {
  constexpr int kCount = kTile / kLanes;
  Floats scaled[kCount];
  const Floats factor = broadcast(scale);
  for (int v = 0; v < kCount; ++v) scaled[v] = load<Floats>(scores + v * kLanes) * factor;
  if (cap > 0.0f)
    for (int v = 0; v < kCount; ++v) scaled[v] = bounded(scaled[v], cap);
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
  TileCopy<Element> copy;
  alignas(64) Element visible_values[kTile * kMaxHeadSize];
};

}  // namespace
