// Attention of query rows by AMX: up to 16 rows at a time.
//
// Tiles 0 to 3 hold sums, 4 and 5 a step of rows (16 pairs and 8), 6 and 7 a step of the cache (16 pairs and 8). Values are
// multiplied in steps of 8 pairs, the 16 keys that are adjacent in any block.
#pragma once

#include <algorithm>

#include "attention_scratch.h"
#include "amx.h"

#if defined(SPMD_HAS_AMX)

namespace {

template <class Type>
struct AttentionByUnit {
  using Element = typename Type::Element;
  using Left = typename Type::Left;
  static_assert(sizeof(Left) == 4, "tiles are loaded from rows of pairs");

  int head_size, value_size;
  float scale;  // of scores, to base 2
  float cap;    // of scores, to base 2; 0: none
  bool has_biases;
  Scratch<Type>& scratch;

  static void set_up(int num_rows) {
    amx::Shapes shapes;
    for (int sum = 0; sum < 4; ++sum) shapes.set(sum, num_rows, 16);
    shapes.set(4, num_rows, 16);
    shapes.set(5, num_rows, 8);
    shapes.set(6, 16, 16);
    shapes.set(7, 8, 16);
    amx::use(shapes);
  }

  // Rows from `index` on; `next`: the tile to prefetch, or null.
  void run_rows(
      int64_t index, int num_rows, int64_t tile_number, const Range* visible, const Tile<Element>& tile,
      const Tile<Element>* next) const {
    Range some = {kTile, 0}, all = {0, kTile};  // keys that any row sees; keys that every row sees which sees any
    for (int r = 0; r < num_rows; ++r) {
      if (visible[r].is_empty()) continue;
      some = {std::min(some.first, visible[r].first), std::max(some.end, visible[r].end)};
      all = {std::max(all.first, visible[r].first), std::min(all.end, visible[r].end)};
    }
    if (some.is_empty()) return;
    score_rows(scratch.queries + index * head_size / Type::kPair, tile, next, scratch.scores);
    alignas(64) float decays[kAmxTileRows];
    run_softmaxes(index, num_rows, tile_number, visible, decays);
    float* outputs = scratch.outputs + index * value_size;
    if (is_finite_outside(all, some, tile)) {
      add_values(some, tile, next);
      for (int r = 0; r < num_rows; ++r)
        if (!visible[r].is_empty()) take_sums(r, decays[r], outputs);
      return;
    }
    for (int r = 0; r < num_rows; ++r) {
      if (visible[r].is_empty()) continue;
      add_values(some, only_visible(visible[r], tile), nullptr);
      take_sums(r, decays[r], outputs);
    }
  }

  // `probabilities_of_row` of rows whose maxima are compared at once.
  void run_softmaxes(int64_t index, int num_rows, int64_t tile_number, const Range* visible, float* decays) const {
    alignas(64) float most[kAmxTileRows] = {}, so_far[kAmxTileRows] = {};
    Softmax* const softmax = scratch.softmax + index;
    const bool is_finished = has_biases || cap > 0.0f;
    const float left = is_finished ? 1.0f : scale;
    for (int r = 0; r < num_rows; ++r) {
      if (visible[r].is_empty()) continue;
      float* const scores = scratch.scores + r * kTile;
      if (is_finished)
        finish_scores(scores, scale, cap, has_biases ? &scratch.biases[index + r] : nullptr, tile_number);
      most[r] = Bfloat16Softmax::begin(scores, left, visible[r]);
      so_far[r] = softmax[r].argmax;
    }
    Floats factors;
    store(most, Bfloat16Softmax::next(load<Floats>(so_far), load<Floats>(most), factors));
    store(decays, factors);
    for (int r = 0; r < num_rows; ++r)
      if (!visible[r].is_empty())
        Bfloat16Softmax::write(
            scratch.scores + r * kTile, left, most[r], decays[r], softmax[r],
            scratch.probabilities + r * kTile / Type::kPair);
  }

  void score_rows(const Left* rows, const Tile<Element>& tile, const Tile<Element>* next, float* scores) const {
    const int num_steps = head_size / Type::kPair;
    const int64_t row_bytes = int64_t(num_steps) * 4, key_bytes = tile.key_stride * sizeof(Element);
    amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
    int step = 0;
    for (; step + 16 <= num_steps; step += 16) {
      const int64_t here = step * tile.key_stride;
      amx::load<4>(rows + step, row_bytes);
      amx::load<6>(tile.keys[0] + here, key_bytes), amx::multiply<0, 4, 6>();
      if (next != nullptr) fetch(next->keys[0] + step * next->key_stride, next->key_stride, 16);
      amx::load<6>(tile.keys[1] + here, key_bytes), amx::multiply<1, 4, 6>();
      if (next != nullptr) fetch(next->keys[1] + step * next->key_stride, next->key_stride, 16);
      amx::load<6>(tile.keys[2] + here, key_bytes), amx::multiply<2, 4, 6>();
      if (next != nullptr) fetch(next->keys[2] + step * next->key_stride, next->key_stride, 16);
      amx::load<6>(tile.keys[3] + here, key_bytes), amx::multiply<3, 4, 6>();
      if (next != nullptr) fetch(next->keys[3] + step * next->key_stride, next->key_stride, 16);
    }
    if (step < num_steps) {
      const int64_t here = step * tile.key_stride;
      amx::load<5>(rows + step, row_bytes);
      amx::load<7>(tile.keys[0] + here, key_bytes), amx::multiply<0, 5, 7>();
      amx::load<7>(tile.keys[1] + here, key_bytes), amx::multiply<1, 5, 7>();
      amx::load<7>(tile.keys[2] + here, key_bytes), amx::multiply<2, 5, 7>();
      amx::load<7>(tile.keys[3] + here, key_bytes), amx::multiply<3, 5, 7>();
    }
    amx::store<0>(scores, kTile * 4);
    amx::store<1>(scores + 16, kTile * 4);
    amx::store<2>(scores + 32, kTile * 4);
    amx::store<3>(scores + 48, kTile * 4);
  }

  SPMD_INLINE void fetch(const Element* rows, int64_t stride, int num_rows) {
    for (int row = 0; row < num_rows; ++row) __builtin_prefetch(rows + row * stride);
  }

  // Probabilities times values -> `sums`. Keys that a row does not see have probability 0, so their values must be finite.
  void add_values(Range keys, const Tile<Element>& tile, const Tile<Element>* next) const {
    const int first = keys.first / kGroup, end = (keys.end + kGroup - 1) / kGroup;
    int column = 0;
    for (; column + 64 <= value_size; column += 64) add_columns<4>(column, first, end, tile, next);
    const int num_left = (value_size - column) / 16;
    if (num_left == 3) add_columns<3>(column, first, end, tile, next);
    if (num_left == 2) add_columns<2>(column, first, end, tile, next);
    if (num_left == 1) add_columns<1>(column, first, end, tile, next);
  }

  template <int kWidth>
  void add_columns(
      int column, int first_group, int end_group, const Tile<Element>& tile, const Tile<Element>* next) const {
    const int64_t size = value_size, stride = size * Type::kPair, bytes = stride * sizeof(Element);
    amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
    for (int group = first_group; group < end_group; ++group) {
      const Element* values = tile.values[group] + column * Type::kPair;
      const Element* ahead = next == nullptr ? nullptr : next->values[group] + column * Type::kPair;
      amx::load<5>(scratch.probabilities + group * kGroup / Type::kPair, kTile / Type::kPair * 4);
      amx::load<7>(values, bytes), amx::multiply<0, 5, 7>();
      if (ahead != nullptr) fetch(ahead, stride, 8);
      if constexpr (kWidth > 1) {
        amx::load<7>(values + 32, bytes), amx::multiply<1, 5, 7>();
        if (ahead != nullptr) fetch(ahead + 32, stride, 8);
      }
      if constexpr (kWidth > 2) {
        amx::load<7>(values + 64, bytes), amx::multiply<2, 5, 7>();
        if (ahead != nullptr) fetch(ahead + 64, stride, 8);
      }
      if constexpr (kWidth > 3) {
        amx::load<7>(values + 96, bytes), amx::multiply<3, 5, 7>();
        if (ahead != nullptr) fetch(ahead + 96, stride, 8);
      }
    }
    float* sums = scratch.sums + column;
    amx::store<0>(sums, size * 4);
    if constexpr (kWidth > 1) amx::store<1>(sums + 16, size * 4);
    if constexpr (kWidth > 2) amx::store<2>(sums + 32, size * 4);
    if constexpr (kWidth > 3) amx::store<3>(sums + 48, size * 4);
  }

  // Adding 0 turns -0 into 0, so that keys of probability 0 change nothing, not even a sign.
  void take_sums(int r, float decay, float* outputs) const {
    const int64_t size = value_size;
    for (int64_t index = r * size; index < (r + 1) * size; index += kLanes) {
      const Floats sum = load<Floats>(scratch.sums + index) + Floats{};
      store(outputs + index, fused(load<Floats>(outputs + index), broadcast(decay), sum));
    }
  }

  // Whether the values of keys that only some rows see are finite, so that multiplying them by 0 gives 0.
  bool is_finite_outside(Range all, Range some, const Tile<Element>& tile) const {
    bool is_finite = true;
    for (int group = some.first / kGroup; group * kGroup < some.end; ++group) {
      if (group * kGroup >= all.first && (group + 1) * kGroup <= all.end) continue;
      Words argmax = Words{};
      for (int64_t index = 0; index < kGroup * value_size; index += 2 * kLanes) {
        const Words pairs = load<Words>(tile.values[group] + index) & 0x7fff7fffu;
        const Words first = pairs << 16, second = pairs & 0xffff0000u;
        argmax = argmax > first ? argmax : first;
        argmax = argmax > second ? argmax : second;
      }
      for (int lane = 0; lane < kLanes; ++lane) is_finite &= argmax[lane] < 0x7f800000u;
    }
    return is_finite;
  }

  // A copy of the tile's values, zero for keys outside the range.
  Tile<Element> only_visible(Range visible, const Tile<Element>& tile) const {
    const int size = value_size;
    Tile<Element> copy = tile;
    for (int key = 0; key < kTile; ++key)
      for (int dimension = 0; dimension < size; ++dimension) {
        const int in_group = (key % kGroup / 2 * size + dimension) * 2 + key % 2;
        scratch.visible_values[key / kGroup * kGroup * size + in_group] =
            key >= visible.first && key < visible.end ? tile.values[key / kGroup][in_group] : Element(0);
      }
    for (int group = 0; group < kGroups; ++group) copy.values[group] = scratch.visible_values + group * kGroup * size;
    return copy;
  }
};

}  // namespace

#endif
