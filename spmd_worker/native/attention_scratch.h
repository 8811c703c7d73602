// State of one thread's attention of some query rows: their online softmax, and scratch memory.
#pragma once

#include <type_traits>

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

// Scores of a vector of keys from `key` on as a softmax takes them: scaled, bounded, and with what is added to them.
template <bool kHasBiases>
SPMD_INLINE Floats finished(
    const float* scores, int key, float scale, float cap, [[maybe_unused]] const float* biases,
    [[maybe_unused]] float bias_factor) {
  Floats found = load<Floats>(scores + key) * broadcast(scale);
  if (cap > 0.0f) found = bounded(found, cap);
  if constexpr (kHasBiases) found = fused(load<Floats>(biases + key), broadcast(bias_factor), found);
  return found;
}

// Scores of one row -> probabilities relative to the maximum score so far; returns the factor of earlier sums. `biases` of
// the 64 keys, times `bias_factor`, if the row has any.
template <class Type, bool kHasBiases>
float probabilities_of(
    const float* scores, float scale, float cap, Range visible, Softmax& softmax, typename Type::Left* to,
    const float* biases, float bias_factor) {
  constexpr int kCount = kTile / kLanes;
  Floats scaled[kCount];
  for (int v = 0; v < kCount; ++v)
    scaled[v] = finished<kHasBiases>(scores, v * kLanes, scale, cap, biases, bias_factor);
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

#if defined(SPMD_BF16_DOTS_IN_ATTENTION)

// `probabilities_of` in fewer instructions, where results are rounded to bfloat16: 2^x is to 3e-6 of it.
struct Bfloat16Softmax {
  // The largest of a row's scores times the scale. Scores of keys that it does not see become -inf.
  static SPMD_INLINE_MEMBER float begin(float* scores, float scale, Range visible) {
    if (visible.first > 0 || visible.end < kTile)
      for (int key = 0; key < kTile; key += kLanes) {
        const Ints keys = lane_numbers() + key;
        const auto is_visible = (keys >= visible.first) & (keys < visible.end);
        store(scores + key, is_visible ? load<Floats>(scores + key) : broadcast(-kInfinity));
      }
    Floats most = load<Floats>(scores);
    for (int key = kLanes; key < kTile; key += kLanes) most = larger(most, load<Floats>(scores + key));
    return argmax_lane(most) * scale;
  }

  // The maxima of rows after a tile, from those so far and the tile's; the factors of earlier sums.
  static SPMD_INLINE_MEMBER Floats next(Floats so_far, Floats most, Floats& decays) {
    const Floats found = larger(most, so_far);
    decays = exp2_of_falling(so_far - (found == broadcast(-kInfinity) ? Floats{} : found));
    return found;
  }

  // Probabilities relative to a maximum, and the row's sum.
  static SPMD_INLINE_MEMBER void write(
      const float* scores, float scale, float most, float decay, Softmax& softmax, uint32_t* to) {
    const __m512 factor = _mm512_set1_ps(scale), reference = _mm512_set1_ps(most == -kInfinity ? 0.0f : most);
    Floats sum = Floats{};
    for (int key = 0; key < kTile; key += 2 * kLanes) {
      // Not fused: the largest score has exactly 1, as the maximum was rounded too.
      const __m512 first = power(_mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(scores + key), factor), reference));
      const __m512 second =
          power(_mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(scores + key + kLanes), factor), reference));
      sum += (Floats)first, sum += (Floats)second;
      _mm512_storeu_si512(to + key / 2, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
    softmax = {most, fused(softmax.sum, broadcast(decay), sum)};
  }

 private:
  // 2 to the power x, which is not above 0; 0 below -126. NaN stays NaN.
  static SPMD_INLINE_MEMBER __m512 power(__m512 x) {
    // Added to it a number is whole, in the lowest bits.
    const __m512 magic = _mm512_set1_ps(12582912.0f), whole = _mm512_add_ps(x, magic);
    const __m512 rest = _mm512_sub_ps(x, _mm512_sub_ps(whole, magic));
    __m512 power = _mm512_set1_ps(9.5828529e-3f);
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(5.5906426e-2f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(2.4024099e-1f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(6.9312418e-1f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(1.0f));
    const __mmask16 is_kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return _mm512_castsi512_ps(_mm512_maskz_add_epi32(
        is_kept, _mm512_castps_si512(power), _mm512_slli_epi32(_mm512_castps_si512(whole), 23)));
  }
};

#endif

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

#if defined(SPMD_BF16_DOTS_IN_ATTENTION)

// Scores of a row that has a cap or biases (null: none), in place.
template <class Element>
__attribute__((noinline)) void finish_scores(
    float* scores, float scale, float cap, const RowBias<Element>* bias, int64_t tile_number) {
  alignas(64) float copy[kTile];
  const float* const biases = bias == nullptr ? nullptr : bias->of_tile(tile_number, copy);
  for (int key = 0; key < kTile; key += kLanes)
    store(
        scores + key, bias == nullptr ? finished<false>(scores, key, scale, cap, nullptr, 0.0f)
                                      : finished<true>(scores, key, scale, cap, biases, bias->factor));
}

#endif

// `probabilities_of` row `r` of those whose scores are in the scratch memory, row `index` of its bundle.
template <class Type>
SPMD_INLINE float probabilities_of_row(
    int r, int64_t index, int64_t tile_number, float scale, float cap, bool has_biases, Range visible,
    Scratch<Type>& scratch) {
  float* const scores = scratch.scores + r * kTile;
  typename Type::Left* const to = scratch.probabilities + r * kTile / Type::kPair;
  Softmax& softmax = scratch.softmax[index];
#if defined(SPMD_BF16_DOTS_IN_ATTENTION)
  if constexpr (std::is_same_v<Type, Bfloat16>) {
    if (has_biases || cap > 0.0f) {
      finish_scores(scores, scale, cap, has_biases ? &scratch.biases[index] : nullptr, tile_number);
      scale = 1.0f;
    }
    Floats decays;
    const float most = Bfloat16Softmax::begin(scores, scale, visible);
    const float so_far = Bfloat16Softmax::next(broadcast(softmax.argmax), broadcast(most), decays)[0];
    Bfloat16Softmax::write(scores, scale, so_far, decays[0], softmax, to);
    return decays[0];
  }
#endif
  if (!has_biases) return probabilities_of<Type, false>(scores, scale, cap, visible, softmax, to, nullptr, 0.0f);
  return biased_probabilities_of<Type>(
      scores, scale, cap, visible, softmax, to, scratch.biases[index], tile_number);
}

}  // namespace
