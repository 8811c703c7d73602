// One step of a matmul, by the type of the cache, and the two matmuls of attention made of such steps.
//
// A step multiplies one number (or pair of numbers) of a row with a vector of numbers (or pairs) of the cache and adds to
// a vector of sums. Rows that are computed together share the load of the vector and nothing else.
#pragma once

#include <type_traits>

#include "paged_cache.h"

namespace {

constexpr int kVectors = kLanes == 8 ? 2 : 4;  // vectors side by side: with 4 rows as many sums as registers allow

struct Float32 {
  using Element = float;
  using Left = float;  // the part of a query or of the probabilities that one step multiplies
  using Right = Floats;  // the part of the cache, a vector
  static constexpr int kPair = 1;
  SPMD_INLINE Right load_right(const Element* from) { return load<Floats>(from); }
  SPMD_INLINE Floats step(Floats sum, Right right, Left left) { return fused(broadcast(left), right, sum); }
  SPMD_INLINE void stage(const Element* row, int size, Left* to) { std::memcpy(to, row, size * sizeof(float)); }
  SPMD_INLINE void keep(Floats probabilities, Left* to) { store(to, probabilities); }
};

#if defined(SPMD_BF16_DOTS_IN_ATTENTION)
struct Bfloat16 {
  using Element = uint16_t;
  using Left = uint32_t;
  using Right = __m512bh;
  static constexpr int kPair = 2;
  SPMD_INLINE Right load_right(const Element* from) { return (__m512bh)_mm512_loadu_si512(from); }
  SPMD_INLINE Floats step(Floats sum, Right right, Left left) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, right, (__m512bh)_mm512_set1_epi32(int(left)));
  }
  SPMD_INLINE void stage(const Element* row, int size, Left* to) { std::memcpy(to, row, size * sizeof(uint16_t)); }
  SPMD_INLINE void keep(Floats probabilities, Left* to) {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)probabilities);
    std::memcpy(to, &narrow, sizeof narrow);
  }
};
#else
struct Bfloat16 {
  struct Pair {
    float first, second;
  };
  struct Pairs {
    Floats first, second;
  };
  using Element = uint16_t;
  using Left = Pair;
  using Right = Pairs;
  static constexpr int kPair = 2;
  SPMD_INLINE Right load_right(const Element* from) {
    const Words pairs = load<Words>(from);
    return {first_of_pairs(pairs), second_of_pairs(pairs)};
  }
  // The product of two bfloat16 is exact in float.
  SPMD_INLINE Floats step(Floats sum, Right right, Left left) {
    return fused(broadcast(left.second), right.second, fused(broadcast(left.first), right.first, sum));
  }
  SPMD_INLINE void stage(const Element* row, int size, Left* to) {
    for (int pair = 0; pair < size / 2; ++pair) to[pair] = {widened(row[2 * pair]), widened(row[2 * pair + 1])};
  }
  SPMD_INLINE void keep(Floats probabilities, Left* to) { store(to, rounded(probabilities)); }
};
#endif

// To the second-level cache, which can hold one more tile and more outstanding requests than the first.
SPMD_INLINE void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// ---- the two matmuls -------------------------------------------------------------------------------------------

// Scores of kRows queries with the 64 keys of a tile.
template <class Type, int kRows, bool kFetches>
void score_rows(
    const typename Type::Left* queries, int query_stride, const Tile<typename Type::Element>& tile,
    const Tile<typename Type::Element>& next, int num_steps, float* scores) {
  using Element = typename Type::Element;
  constexpr int kColumns = kVectors * kLanes;
  for (int column = 0; column < kTile; column += kColumns) {
    Floats sums[kRows][kVectors] = {};
    const Element* keys[kVectors];
    const Element* ahead[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int key = column + v * kLanes;
      keys[v] = tile.keys[key / kGroup] + key % kGroup * Type::kPair;
      ahead[v] = next.keys[key / kGroup] + key % kGroup * Type::kPair;
    }
    for (int step = 0; step < num_steps; ++step) {
      typename Type::Right right[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        right[v] = Type::load_right(keys[v] + step * tile.key_stride);
        if (kFetches && v * kLanes % kGroup == 0) fetch(ahead[v] + step * next.key_stride);
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const typename Type::Left left = queries[row * query_stride + step];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[row][v] = Type::step(sums[row][v], right[v], left);
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(scores + row * kTile + column + v * kLanes, sums[row][v]);
  }
}

// Start and end of a sum over values: from zero or from `sums`; to `sums` or to the output.
struct Ends {
  bool is_fresh, is_last;
};

// kVectors vectors of head dimensions of kRows rows, over the spans' keys.
template <class Type, int kRows, int kWidth, bool kFetches>
void add_values(
    const typename Type::Left* probabilities, const Span<typename Type::Element>* spans, int num_spans, int head_size,
    int column, Ends ends, const float* decays, float* sums, float* output) {
  using Element = typename Type::Element;
  const int64_t stride = int64_t(head_size) * Type::kPair;
  Floats totals[kRows][kWidth];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v)
      totals[row][v] = ends.is_fresh ? Floats{} : load<Floats>(sums + row * head_size + column + v * kLanes);
  for (int span = 0; span < num_spans; ++span) {
    const Element* rows = spans[span].rows + column * Type::kPair;
    const Element* ahead = spans[span].ahead + column * Type::kPair;
    for (int step = 0; step < spans[span].count; ++step) {
      typename Type::Right right[kWidth];
#pragma GCC unroll 4
      for (int v = 0; v < kWidth; ++v) {
        right[v] = Type::load_right(rows + step * stride + v * kLanes * Type::kPair);
        if (kFetches && v * kLanes % kGroup == 0) fetch(ahead + step * stride + v * kLanes * Type::kPair);
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const typename Type::Left left = probabilities[row * (kTile / Type::kPair) + step];
#pragma GCC unroll 4
        for (int v = 0; v < kWidth; ++v) totals[row][v] = Type::step(totals[row][v], right[v], left);
      }
    }
    probabilities += spans[span].count;
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) {
      const int index = row * head_size + column + v * kLanes;
      if (ends.is_last)
        store(output + index, fused(load<Floats>(output + index), broadcast(decays[row]), totals[row][v]));
      else
        store(sums + index, totals[row][v]);
    }
}

template <class Type, int kRows, bool kFetches>
void add_values_of_head(
    const typename Type::Left* probabilities, const Span<typename Type::Element>* spans, int num_spans, int head_size,
    Ends ends, const float* decays, float* sums, float* output) {
  int column = 0;
  for (; column + kVectors * kLanes <= head_size; column += kVectors * kLanes)
    add_values<Type, kRows, kVectors, kFetches>(
        probabilities, spans, num_spans, head_size, column, ends, decays, sums, output);
  // Head sizes are multiples of 16, so only vectors of 16 leave a remainder.
  if constexpr (kVectors * kLanes > 16) {
    const auto add_rest = [&](auto width) {
      add_values<Type, kRows, decltype(width)::value, kFetches>(
          probabilities, spans, num_spans, head_size, column, ends, decays, sums, output);
    };
    const int num_left = (head_size - column) / kLanes;
    if (num_left == 3) add_rest(std::integral_constant<int, 3>{});
    if (num_left == 2) add_rest(std::integral_constant<int, 2>{});
    if (num_left == 1) add_rest(std::integral_constant<int, 1>{});
  }
}

}  // namespace
