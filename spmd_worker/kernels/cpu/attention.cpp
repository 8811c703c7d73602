// Attention over a paged cache, straight from the block tables.
//
// The contract: what is computed for one query row, and in which order, depends on that row's query and on the keys and
// values it may see, and on nothing else: not on the rows computed with it, the chunk, the batch, the block size, where
// blocks lie, the number of threads or of heads.
//
// Keys are taken in tiles of 64 at absolute positions. Within a tile, for one row:
//   scores         one key a lane; products are added over the head's dimensions in ascending order
//   probabilities  2^(score - largest so far), the largest and the sum carried from tile to tile (online softmax,
//                  https://arxiv.org/abs/1805.02867), rounded to bfloat16 if the cache is
//   values         one dimension a lane; products are added over the keys the row sees in ascending order, from zero;
//                  the tile's sum is then added to what came before
// How many rows share a load of keys or values (the templates' kRows) changes no row's order of operations.
//
// A key that a row may not see is left out by selection: its score is replaced, its value never multiplied, because what
// lies there may be NaN.
//
// A block of the cache holds, for each key-value head, its keys and then its values:
//   bfloat16  keys [head size / 2][position][2], values [position / 2][head size][2]
//   float32   keys [head size][position],        values [position][head size]
// which is in both cases `kPair` numbers side by side that one step of a product takes together.

#include <algorithm>
#include <vector>

#include "vector.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

constexpr int kTile = 64;           // keys
constexpr int kGroup = 16;          // keys whose place in the cache is found together; blocks of 16 and up hold them whole
constexpr int kGroups = kTile / kGroup;
constexpr int kItemRows = 64;       // query rows of one work item
constexpr int kMaxRows = 4;         // query rows that share a load
constexpr int kMaxHeadSize = 256;
constexpr int kVectors = kLanes == 8 ? 2 : 4;  // vectors side by side: with 4 rows as many sums as registers allow
constexpr int kMaxSpans = kGroups + 2;

// ---- how one step of a product is taken, by the cache's type ------------------------------------------------------

struct Float32 {
  using Element = float;
  using Left = float;  // what one step takes of a query or of the probabilities
  using Right = Floats;  // what one step takes of the cache, a vector of it
  static constexpr int kPair = 1;
  SPMD_INLINE Right load_right(const Element* from) { return load<Floats>(from); }
  SPMD_INLINE Floats step(Floats sum, Right right, Left left) { return fused(broadcast(left), right, sum); }
  SPMD_INLINE void stage(const Element* row, int size, Left* to) { std::memcpy(to, row, size * sizeof(float)); }
  SPMD_INLINE void keep(Floats probabilities, Left* to) { store(to, probabilities); }
};

#if defined(SPMD_AVX512) && defined(__AVX512BF16__)
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

SPMD_INLINE float to_float(float value) { return value; }
SPMD_INLINE float to_float(uint16_t value) { return widened(value); }

// ---- where keys and values are ------------------------------------------------------------------------------------

template <class Element>
struct Cache {
  Element* elements;
  int64_t block_stride;  // elements
  const int64_t* tables;
  int64_t table_stride;
  int num_kv_heads, head_size, block_size;

  int64_t head_elements() const { return int64_t(block_size) * head_size; }
  Element* keys(int64_t block, int head) const {
    return elements + block * block_stride + 2 * head * head_elements();
  }
  Element* values(int64_t block, int head) const { return keys(block, head) + head_elements(); }
};

// The keys a row sees within one tile.
struct Range {
  int first, end;
  bool is_empty() const { return first >= end; }
  bool operator==(const Range& other) const { return first == other.first && end == other.end; }
};

// One tile of one head: where its four groups of 16 keys begin.
template <class Element>
struct Tile {
  const Element* keys[kGroups];
  const Element* values[kGroups];
  int64_t key_stride;  // elements from one step over the head's dimensions to the next
};

// Rows of values that follow each other in memory, and what to fetch meanwhile.
template <class Element>
struct Span {
  const Element* rows;
  const Element* ahead;
  int count;
};

// A tile of blocks smaller than a group, copied together.
template <class Element>
struct TileCopy {
  alignas(64) Element keys[kTile * kMaxHeadSize];
  alignas(64) Element values[kTile * kMaxHeadSize];
};

template <class Type>
Tile<typename Type::Element> small_block_tile(
    const Cache<typename Type::Element>& cache, const int64_t* table, int head, int64_t start, int64_t first_key,
    int64_t last_key, TileCopy<typename Type::Element>& copy) {
  using Element = typename Type::Element;
  constexpr int kPair = Type::kPair;
  const int size = cache.block_size, head_size = cache.head_size;
  for (int place = 0; place < kTile; place += size) {
    if (start + place + size <= first_key || start + place > last_key) continue;
    const int64_t block = table[(start + place) / size];
    const Element* keys = cache.keys(block, head);
    for (int step = 0; step < head_size / kPair; ++step)
      std::memcpy(copy.keys + (step * kTile + place) * kPair, keys + step * size * kPair, size * kPair * sizeof(Element));
    std::memcpy(copy.values + place * head_size, cache.values(block, head), cache.head_elements() * sizeof(Element));
  }
  Tile<Element> tile;
  tile.key_stride = kTile * kPair;
  for (int group = 0; group < kGroups; ++group) {
    tile.keys[group] = copy.keys + group * kGroup * kPair;
    tile.values[group] = copy.values + group * kGroup * head_size;
  }
  return tile;
}

// `first_key` and `last_key` bound what any row of the item sees. A group outside them may have no block: the nearest
// one inside stands in for it, its scores are masked and its values not read.
template <class Type>
Tile<typename Type::Element> tile_of_blocks(
    const Cache<typename Type::Element>& cache, const int64_t* table, int head, int64_t start, int64_t first_key,
    int64_t last_key) {
  Tile<typename Type::Element> tile;
  const int size = cache.block_size;
  tile.key_stride = int64_t(size) * Type::kPair;
  for (int group = 0; group < kGroups; ++group) {
    const int64_t wanted = (start + group * kGroup) / kGroup;
    const int64_t key = std::clamp(wanted, first_key / kGroup, last_key / kGroup) * kGroup;
    const int64_t block = table[key / size];
    const int offset = int(key % size);
    tile.keys[group] = cache.keys(block, head) + offset * Type::kPair;
    tile.values[group] = cache.values(block, head) + int64_t(offset) * cache.head_size;
  }
  return tile;
}

// ---- the two products ---------------------------------------------------------------------------------------------

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
        if (kFetches && v * kLanes % kGroup == 0) __builtin_prefetch(ahead[v] + step * next.key_stride);
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

// What becomes of a sum over values: it starts from zero or from `sums`; it ends in `sums`, or in the output.
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
        if (kFetches && v * kLanes % kGroup == 0) __builtin_prefetch(ahead + step * stride + v * kLanes * Type::kPair);
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
      const int place = row * head_size + column + v * kLanes;
      if (ends.is_last)
        store(output + place, fused(load<Floats>(output + place), broadcast(decays[row]), totals[row][v]));
      else
        store(sums + place, totals[row][v]);
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
  const int num_left = (head_size - column) / kLanes;
  if (num_left == 3)
    add_values<Type, kRows, 3, kFetches>(probabilities, spans, num_spans, head_size, column, ends, decays, sums, output);
  if (num_left == 2)
    add_values<Type, kRows, 2, kFetches>(probabilities, spans, num_spans, head_size, column, ends, decays, sums, output);
  if (num_left == 1)
    add_values<Type, kRows, 1, kFetches>(probabilities, spans, num_spans, head_size, column, ends, decays, sums, output);
}

// ---- softmax ------------------------------------------------------------------------------------------------------

// One row's softmax as it stands after the tiles so far; the sum is kept by lane until the end.
struct Softmax {
  float largest;
  Floats sum;
};

// Scores of one row -> probabilities against the largest score so far; returns what older sums shrink by.
template <class Type>
float probabilities_of(const float* scores, float scale, Range visible, Softmax& softmax, typename Type::Left* to) {
  constexpr int kCount = kTile / kLanes;
  Floats scaled[kCount];
  const Floats factor = broadcast(scale);
  for (int v = 0; v < kCount; ++v) scaled[v] = load<Floats>(scores + v * kLanes) * factor;
  if (visible.first > 0 || visible.end < kTile) {
    const Ints numbers = lane_numbers();
    for (int v = 0; v < kCount; ++v) {
      const Ints key = numbers + v * kLanes;
      scaled[v] = (key >= visible.first) & (key < visible.end) ? scaled[v] : broadcast(-kInfinity);
    }
  }
  Floats largest = scaled[0];
  for (int v = 1; v < kCount; ++v) largest = larger(largest, scaled[v]);
  const float tile_largest = largest_lane(largest);
  const float so_far = tile_largest > softmax.largest ? tile_largest : softmax.largest;
  // Where every score is -inf the difference from the largest would be NaN; against 0 they count for nothing.
  const float reference = so_far == -kInfinity ? 0.0f : so_far;
  const float decay = exp2(broadcast(softmax.largest - reference))[0];
  Floats sum = Floats{};
  for (int v = 0; v < kCount; ++v) {
    const Floats probability = exp2(scaled[v] - broadcast(reference));
    sum += probability;
    Type::keep(probability, to + v * kLanes / Type::kPair);
  }
  softmax.largest = so_far;
  softmax.sum = fused(softmax.sum, broadcast(decay), sum);
  return decay;
}

// ---- one work item: some query rows of one key-value head of one sequence -----------------------------------------

struct Item {
  int sequence, kv_head;
  int64_t first_row, end_row;  // row = token of the sequence * query heads per key-value head + query head
};

template <class Type>
class Attention {
  using Element = typename Type::Element;
  using Left = typename Type::Left;

 public:
  Cache<Element> cache;
  const Element* queries;
  int64_t query_token_stride, query_head_stride;  // elements
  Element* output;                                // [tokens, heads, head size]
  const int64_t* query_starts;
  const int64_t* context_lengths;
  int num_heads;
  float scale;  // of scores, to base 2
  int64_t window;

  void run(const Item& item, const Item* next_item) const {
    Scratch scratch;
    stage_queries(item, scratch);
    const int64_t first_key = first_visible(position(item, item.first_row)), last_key = position(item, item.end_row - 1);
    const int64_t first_tile = first_key / kTile, last_tile = last_key / kTile;
    Tile<Element> next = tile_at(item, first_tile, first_key, last_key, scratch);
    for (int64_t number = first_tile; number <= last_tile; ++number) {
      const Tile<Element> tile = next;
      if (number < last_tile)
        next = tile_at(item, number + 1, first_key, last_key, scratch);
      else if (next_item != nullptr)
        next = first_tile_of(*next_item, scratch);
      run_tile(item, number, tile, next, scratch);
      // Blocks too small to be used in place share one copy, which this tile has just let go of.
      if (cache.block_size < kGroup && number < last_tile) copy_tile(item, number + 1, first_key, last_key, scratch);
    }
    write_output(item, scratch);
  }

 private:
  struct Scratch {
    alignas(64) Left queries[kItemRows * kMaxHeadSize / Type::kPair];
    alignas(64) float outputs[kItemRows * kMaxHeadSize];
    alignas(64) float scores[kMaxRows * kTile];
    alignas(64) Left probabilities[kMaxRows * kTile / Type::kPair];
    alignas(64) float sums[kMaxRows * kMaxHeadSize];
    alignas(64) Element edges[2][kMaxHeadSize * Type::kPair];
    Softmax softmax[kItemRows];
    TileCopy<Element> copy;
  };

  int group_size() const { return num_heads / cache.num_kv_heads; }
  const int64_t* table(const Item& item) const { return cache.tables + item.sequence * cache.table_stride; }

  int64_t position(const Item& item, int64_t row) const {
    const int64_t num_tokens = query_starts[item.sequence + 1] - query_starts[item.sequence];
    return context_lengths[item.sequence] - num_tokens + row / group_size();
  }

  int64_t first_visible(int64_t position) const {
    return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
  }

  int64_t query_offset(const Item& item, int64_t row, int64_t token_stride, int64_t head_stride) const {
    const int64_t token = query_starts[item.sequence] + row / group_size();
    return token * token_stride + (int64_t(item.kv_head) * group_size() + row % group_size()) * head_stride;
  }

  Range visible_to(const Item& item, int64_t row, int64_t tile) const {
    const int64_t at = position(item, row), start = tile * kTile;
    return {
        int(std::clamp<int64_t>(first_visible(at) - start, 0, kTile)), int(std::clamp<int64_t>(at + 1 - start, 0, kTile))};
  }

  void stage_queries(const Item& item, Scratch& scratch) const {
    const int size = cache.head_size;
    for (int64_t row = item.first_row; row < item.end_row; ++row) {
      const int64_t place = row - item.first_row;
      Type::stage(
          queries + query_offset(item, row, query_token_stride, query_head_stride), size,
          scratch.queries + place * size / Type::kPair);
      std::memset(scratch.outputs + place * size, 0, size * sizeof(float));
      scratch.softmax[place] = {-kInfinity, Floats{}};
    }
  }

  Tile<Element> tile_at(
      const Item& item, int64_t number, int64_t first_key, int64_t last_key, Scratch& scratch) const {
    if (cache.block_size >= kGroup)
      return tile_of_blocks<Type>(cache, table(item), item.kv_head, number * kTile, first_key, last_key);
    const bool is_first = number == first_key / kTile;
    if (is_first) copy_tile(item, number, first_key, last_key, scratch);
    return tile_of_copy(scratch);
  }
};

}  // namespace
