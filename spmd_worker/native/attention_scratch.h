// What one thread computes the attention of some query rows with: their softmax as it stands, and memory to work in.
#pragma once

#include "steps.h"

namespace {

constexpr int kItemRows = 64;  // query rows of one bundle of work items
constexpr int kAmxTileRows = 16;  // query rows that the AMX unit takes together

// First and last position that a row sees, or any of some rows.
struct Keys {
  int64_t first, last;

  Range within(int64_t tile_number) const {
    const int64_t start = tile_number * kTile;
    return {int(std::clamp<int64_t>(first - start, 0, kTile)), int(std::clamp<int64_t>(last + 1 - start, 0, kTile))};
  }
};

// One row's softmax as it stands after the tiles so far; the sum is kept by lane until the end.
struct Softmax {
  float argmax;
  Floats sum;
};

// Scores of one row -> probabilities against the argmax score so far; returns what older sums shrink by.
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
  // Where every score is -inf the difference from the argmax would be NaN; against 0 they count for nothing.
  const float reference = so_far == -kInfinity ? 0.0f : so_far;
  // 2^0 is 1 exactly, so the short cut changes no bit.
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
