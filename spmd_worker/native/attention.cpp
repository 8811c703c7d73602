// Attention over a paged cache, straight from the block tables.
//
// The contract: the operations of one query row and their order depend on that row's query and on the keys and values it
// may see alone: not on the other rows, the chunk, the batch, the block size, the placement of blocks, the number of
// threads or of heads.
//
// Keys are processed in tiles of 64 at absolute positions. Within a tile, for one row:
//   scores         one key per lane; products are added over the head's dimensions in ascending order; then scaled, bounded,
//                  and the bias of the key's distance added
//   probabilities  2^(score - maximum so far), the maximum and the sum carried from tile to tile (online softmax,
//                  https://arxiv.org/abs/1805.02867), rounded to bfloat16 if the cache is
//   values         one dimension per lane; products are added over the keys the row sees in ascending order, from zero;
//                  the tile's sum is then added to that of the previous tiles
// How many rows share a load of keys or values (the templates' kRows), and whether they are one sequence's or several
// that have the same blocks, changes no row's order of operations. If the processor has AMX, all bfloat16 rows use it,
// alone or together: see attention_amx.h.
//
// A key that a row may not see is masked by selection: its score is replaced, its value never multiplied, because it may be
// NaN. The layout of a block is in paged_cache.h.

#include <algorithm>
#include <vector>

#include "attention_amx.h"
#include "exports.h"
#include "shared_blocks.h"
#include "thread_pool.h"

namespace {

constexpr int kMaxRows = 4;  // query rows that share a load
constexpr int kMaxSpans = kGroups + 2;

// ---- one work item: some query rows of one key-value head of one sequence -----------------------------------------

struct Item {
  int sequence, kv_head;
  int64_t first_row, end_row;  // row = token of the sequence * query heads per key-value head + query head
  int64_t index;               // of its first row in its bundle
  Keys keys;                   // seen by any of its rows

  int64_t num_rows() const { return end_row - first_row; }
};

// Items that one thread computes together because their first tiles are in the same blocks (shared_blocks.h), or one item.
struct Bundle {
  const Item* items;
  int num_items;
  int64_t num_shared_tiles;
};

// One tile of keys for the rows of all items of a bundle, or of one.
struct Visit {
  int item;  // of the bundle
  int64_t tile_number;
  bool is_shared;
};

template <class Type>
struct Attention {
  using Element = typename Type::Element;
  using Left = typename Type::Left;
  using Scratch = ::Scratch<Type>;

  Cache<Element> cache;
  const Element* queries;
  int64_t query_token_stride, query_head_stride;  // elements
  Angles<Element> angles;                         // of the rotation of queries
  Element* output;                                // [tokens, heads, value size]
  const int64_t* query_starts;
  const int64_t* context_lengths;
  int num_heads;
  float scale;  // of scores, to base 2
  float cap;    // of scores, to base 2; 0: none
  int64_t window;  // below 0: its magnitude is the size of chunks
  int64_t ahead;  // number of later keys that a row sees; 0: attention is causal
  const int32_t* last_keys;  // last position that each token of the step sees, in order; null: by `ahead`, which also bounds it
  bool has_amx;
  const float* sinks = nullptr;  // one logit per query head, of a key without a value; null: no sinks
  const float* distance_bias = nullptr;  // [heads, 2 * max_distance + 1], see RowBias; null: no biases
  int64_t max_distance = 0;
  DistanceScores<Element> distance_scores = {};

  bool has_biases() const { return distance_bias != nullptr || distance_scores.columns != nullptr; }
  int group_size() const { return num_heads / cache.num_kv_heads; }
  int64_t num_tokens(int sequence) const { return query_starts[sequence + 1] - query_starts[sequence]; }

  int64_t position(const Item& item, int64_t row) const {
    return context_lengths[item.sequence] - num_tokens(item.sequence) + row / group_size();
  }

  int64_t first_visible(int64_t position) const {
    if (window < 0) return position / -window * -window;
    return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
  }

  int64_t last_visible(int sequence, int64_t position) const {
    const int64_t by_ahead = ahead > 0 ? std::min(position + ahead, context_lengths[sequence] - 1) : position;
    if (last_keys == nullptr) return by_ahead;
    const int64_t given = last_keys[query_starts[sequence + 1] - context_lengths[sequence] + position];
    return ahead > 0 ? std::min(given, by_ahead) : given;
  }

  int64_t query_head(const Item& item, int64_t row) const {
    return int64_t(item.kv_head) * group_size() + row % group_size();
  }

  Item item_of(int sequence, int kv_head, int64_t first_row, int64_t end_row, int64_t index) const {
    Item item = {sequence, kv_head, first_row, end_row, index, {}};
    const int64_t last = last_visible(sequence, position(item, end_row - 1));
    // Rows of which none sees a key visit a tile too.
    item.keys = {std::min(first_visible(position(item, first_row)), last), last};
    return item;
  }

  // Size of one row, in elements.
  int64_t offset(const Item& item, int64_t row, int64_t token_stride, int64_t head_stride) const {
    const int64_t token = query_starts[item.sequence] + row / group_size();
    return token * token_stride + query_head(item, row) * head_stride;
  }

  Visit first_visit(const Bundle& bundle) const {
    if (bundle.num_shared_tiles > 0) return {0, 0, true};
    return {0, bundle.items[0].keys.first / kTile, false};
  }

  // The visit after this one; its item is the number of items if there is none.
  Visit visit_after(const Visit& visit, const Bundle& bundle) const {
    const int64_t number = visit.tile_number + 1, num_shared = bundle.num_shared_tiles;
    if (visit.is_shared) return {visit.item, number, number < num_shared};
    if (number <= bundle.items[visit.item].keys.last / kTile) return {visit.item, number, false};
    return {visit.item + 1, num_shared, false};  // items of a bundle of several see from the first key on
  }

  Tile<Element> locate(const Bundle& bundle, const Visit& visit, Scratch& scratch) const {
    const Item& item = bundle.items[visit.item];
    const int64_t* const table = cache.tables + item.sequence * cache.table_stride;
    const int64_t start = visit.tile_number * kTile;
    Tile<Element> tile =
        cache.in_bytes
            ? expanded_tile<Type>(cache, table, item.kv_head, start, item.keys.first, item.keys.last, scratch.copy)
        : cache.block_size < kGroup
            ? small_block_tile<Type>(cache, table, item.kv_head, start, item.keys.first, item.keys.last, scratch.copy)
            : tile_of_blocks<Type>(cache, table, item.kv_head, start, item.keys.first, item.keys.last);
    if (cache.latent_size > 0) copy_values<Type>(tile, cache.latent_size, scratch.copy.values);
    return tile;
  }

  // What is fetched ahead of a visit.
  Tile<Element> ahead_of(const Bundle& bundle, const Visit& visit, Scratch& scratch) const {
    if (!cache.in_bytes) return locate(bundle, visit, scratch);
    const Item& item = bundle.items[visit.item];
    const int64_t* const table = cache.tables + item.sequence * cache.table_stride;
    return bytes_ahead<Type>(
        cache, table, item.kv_head, visit.tile_number * kTile, item.keys.first, item.keys.last);
  }

  // `amx_rows`: rows of this thread's tile configuration of AMX.
  void run(const Bundle& bundle, const Bundle* next_bundle, int& amx_rows) const {
    Scratch scratch;
    for (int item = 0; item < bundle.num_items; ++item) stage(bundle.items[item], scratch);
    const Item& last_item = bundle.items[bundle.num_items - 1];
    const bool is_copied = cache.in_bytes || cache.block_size < kGroup || cache.latent_size > 0;
    Visit visit = first_visit(bundle);
    Tile<Element> next = locate(bundle, visit, scratch);
    while (visit.item < bundle.num_items) {
      const Visit following = visit_after(visit, bundle);
      const Tile<Element> tile = next;
      const bool is_last = following.item == bundle.num_items;
      if (!is_copied || cache.in_bytes) {
        if (!is_last)
          next = ahead_of(bundle, following, scratch);
        else if (next_bundle != nullptr)
          next = ahead_of(*next_bundle, first_visit(*next_bundle), scratch);
      }
      const Item& item = bundle.items[visit.item];
      if (visit.is_shared)
        run_tile(0, last_item.index + last_item.num_rows(), visit.tile_number, tile, next, amx_rows, scratch);
      else
        run_tile(item.index, item.index + item.num_rows(), visit.tile_number, tile, next, amx_rows, scratch);
      if (is_copied && !is_last) next = locate(bundle, following, scratch);
      visit = following;
    }
    for (int item = 0; item < bundle.num_items; ++item) write(bundle.items[item], scratch);
  }

  void stage(const Item& item, Scratch& scratch) const {
    const int size = cache.head_size, value_size = cache.value_size();
    Element room[kMaxHeadSize];
    for (int64_t row = item.first_row; row < item.end_row; ++row) {
      const int64_t index = item.index + row - item.first_row;
      const int64_t at = position(item, row);
      scratch.seen[index] = {first_visible(at), last_visible(item.sequence, at)};
      const Element* query = queries + offset(item, row, query_token_stride, query_head_stride);
      query = rotated(query, size, angles, query_starts[item.sequence] + row / group_size(), room);
      Type::stage(query, size, scratch.queries + index * size / Type::kPair);
      std::memset(scratch.outputs + index * value_size, 0, value_size * sizeof(float));
      scratch.softmax[index] = start_of(item, row);
      if (has_biases()) scratch.biases[index] = bias_of(item, row, at);
    }
  }

  RowBias<Element> bias_of(const Item& item, int64_t row, int64_t position) const {
    const int64_t head = query_head(item, row);
    if (distance_bias != nullptr)
      return {distance_bias + head * (2 * max_distance + 1), max_distance, position, kLog2OfE};
    // The sequence is complete: its first token has its first key.
    const DistanceScores<Element>& scores = distance_scores;
    const int64_t num_keys = context_lengths[item.sequence];
    const int64_t first = query_starts[item.sequence] * scores.token_stride + head * scores.head_stride;
    const Element* const query =
        scores.of_queries == nullptr ? nullptr : scores.of_queries + first + position * scores.token_stride;
    const Element* const keys = scores.of_keys == nullptr ? nullptr : scores.of_keys + first;
    return {nullptr, max_distance, position, scale, scores.columns, query, keys, scores.token_stride, num_keys};
  }

  // A sink is counted in the sum and has no value: the softmax starts with it.
  Softmax start_of(const Item& item, int64_t row) const {
    if (sinks == nullptr) return {-kInfinity, Floats{}};
    Floats sum = Floats{};
    sum[0] = 1.0f;
    return {sinks[query_head(item, row)] * kLog2OfE, sum};
  }

  // Rows from `first` to `end` of the bundle.
  void run_tile(
      int64_t first, int64_t end, int64_t number, const Tile<Element>& tile, const Tile<Element>& next, int& amx_rows,
      Scratch& scratch) const {
#if defined(SPMD_HAS_AMX)
    if constexpr (Type::kPair == 2)
      if (has_amx) {
        for (int64_t index = first; index < end; index += kAmxTileRows)
          run_rows_amx(
              index, int(std::min<int64_t>(kAmxTileRows, end - index)), number, tile, index == first ? &next : nullptr,
              amx_rows, scratch);
        return;
      }
#endif
    (void)amx_rows;
    for (int64_t index = first, num_rows; index < end; index += num_rows) {
      num_rows = num_alike(index, end, number, scratch);
      const bool is_first = index == first;
      switch (num_rows) {
        case 1: run_rows<1>(index, number, tile, next, is_first, scratch); break;
        case 2: run_rows<2>(index, number, tile, next, is_first, scratch); break;
        case 3: run_rows<3>(index, number, tile, next, is_first, scratch); break;
        default: run_rows<4>(index, number, tile, next, is_first, scratch);
      }
    }
  }

  // Number of rows from `index` on that are computed together: rows that see the same keys of a tile, e.g. of one token. Rows
  // of different tokens share the keys that all of them see (`add_uneven`).
  int64_t num_alike(int64_t index, int64_t end, int64_t number, const Scratch& scratch) const {
    const int64_t most = std::min<int64_t>(kMaxRows, end - index);
    if (group_size() == 1) return most;
    const Range visible = scratch.seen[index].within(number);
    int64_t count = 1;
    while (count < most && scratch.seen[index + count].within(number) == visible) ++count;
    return count;
  }

#if defined(SPMD_HAS_AMX)
  void run_rows_amx(
      int64_t index, int num_rows, int64_t number, const Tile<Element>& tile, const Tile<Element>* next, int& amx_rows,
      Scratch& scratch) const {
    Range visible[kAmxTileRows];
    for (int r = 0; r < num_rows; ++r) visible[r] = scratch.seen[index + r].within(number);
    const AttentionByUnit<Type> by_amx = {
        cache.head_size, cache.value_size(), scale, cap, has_biases(), scratch};
    if (amx_rows != num_rows) by_amx.set_up(amx_rows = num_rows);
    by_amx.run_rows(index, num_rows, number, visible, tile, next);
  }
#endif

  template <int kRows>
  void run_rows(
      int64_t index, int64_t number, const Tile<Element>& tile, const Tile<Element>& next, bool fetches_next,
      Scratch& scratch) const {
    Range visible[kRows];
    bool is_even = true, is_seen = false;
    for (int r = 0; r < kRows; ++r) {
      visible[r] = scratch.seen[index + r].within(number);
      is_even &= visible[r] == visible[0];
      is_seen |= !visible[r].is_empty();
    }
    if (!is_seen) return;
    const int num_steps = cache.head_size / Type::kPair;
    const Left* left = scratch.queries + index * num_steps;
    if (fetches_next)
      score_rows<Type, kRows, true>(left, num_steps, tile, next, num_steps, scratch.scores);
    else
      score_rows<Type, kRows, false>(left, num_steps, tile, next, num_steps, scratch.scores);
    float decays[kRows];
    for (int r = 0; r < kRows; ++r)
      if (!visible[r].is_empty())
        decays[r] = probabilities_of_row<Type>(
            r, index + r, number, scale, cap, has_biases(), visible[r], scratch);
    if (!is_even)
      add_uneven<kRows>(visible, index, tile, next, decays, scratch);
    else if (fetches_next)
      add_range<kRows, true>(visible[0], 0, index, tile, next, {true, true}, decays, scratch);
    else
      add_range<kRows, false>(visible[0], 0, index, tile, next, {true, true}, decays, scratch);
  }

  // Rows that see different parts of a tile: together for the keys that all see, each alone for those before and after.
  template <int kRows>
  void add_uneven(
      const Range* visible, int64_t index, const Tile<Element>& tile, const Tile<Element>& next, const float* decays,
      Scratch& scratch) const {
    Range common = {0, kTile};
    for (int r = 0; r < kRows; ++r) {
      common.first = std::max(common.first, (visible[r].first + 1) & ~1);
      common.end = std::min(common.end, visible[r].end & ~1);
    }
    const bool is_shared = !common.is_empty();
    for (int r = 0; r < kRows; ++r) {
      if (visible[r].is_empty()) continue;
      const Range before = {visible[r].first, is_shared ? common.first : visible[r].end};
      add_range<1, false>(before, r, index, tile, next, {true, !is_shared}, decays, scratch);
    }
    if (!is_shared) return;
    add_range<kRows, false>(common, 0, index, tile, next, {false, false}, decays, scratch);
    for (int r = 0; r < kRows; ++r)
      add_range<1, false>({common.end, visible[r].end}, r, index, tile, next, {false, true}, decays, scratch);
  }

  // The keys of `range` for kRows rows from `first` on.
  template <int kRows, bool kFetches>
  void add_range(
      Range range, int first, int64_t index, const Tile<Element>& tile, const Tile<Element>& next, Ends ends,
      const float* decays, Scratch& scratch) const {
    Span<Element> spans[kMaxSpans];
    const int num_spans = spans_of(range, tile, next, spans, scratch);
    const Left* left = scratch.probabilities + (first * kTile + (range.first & ~(Type::kPair - 1))) / Type::kPair;
    const int64_t size = cache.value_size();
    add_values_of_head<Type, kRows, kFetches>(
        left, spans, num_spans, int(size), ends, decays + first, scratch.sums + first * size,
        scratch.outputs + (index + first) * size);
  }

  int spans_of(
      Range range, const Tile<Element>& tile, const Tile<Element>& next, Span<Element>* spans, Scratch& scratch) const {
    constexpr int kPair = Type::kPair;
    int num_spans = 0;
    if (range.is_empty()) return 0;
    if (range.first % kPair != 0)
      spans[num_spans++] = edge(range.first, tile, scratch.edges[0]);
    const int end = range.end & ~(kPair - 1);
    for (int key = (range.first + kPair - 1) & ~(kPair - 1); key < end;) {
      const int stop = std::min(end, (key / kGroup + 1) * kGroup);
      const int64_t inside = int64_t(key % kGroup) * cache.value_size();
      spans[num_spans++] = {tile.values[key / kGroup] + inside, next.values[key / kGroup] + inside, (stop - key) / kPair};
      key = stop;
    }
    if (range.end % kPair != 0 && range.end - 1 >= range.first)
      spans[num_spans++] = edge(range.end - 1, tile, scratch.edges[1]);
    return num_spans;
  }

  // One key of a pair is seen and the other is not: the other's values become zero.
  Span<Element> edge(int key, const Tile<Element>& tile, Element* copy) const {
    constexpr int kPair = Type::kPair;
    const int kept = key % kPair, size = cache.value_size();
    const Element* pairs = tile.values[key / kGroup] + int64_t(key % kGroup - kept) * size;
    for (int dimension = 0; dimension < size; ++dimension)
      for (int side = 0; side < kPair; ++side)
        copy[dimension * kPair + side] = side == kept ? pairs[dimension * kPair + side] : Element(0);
    return {copy, copy, 1};
  }

  void write(const Item& item, const Scratch& scratch) const {
    const int64_t size = cache.value_size();
    for (int64_t row = item.first_row; row < item.end_row; ++row) {
      const int64_t index = item.index + row - item.first_row;
      const float sum = sum_of_lanes(scratch.softmax[index].sum);
      const Floats factor = broadcast(sum == 0.0f ? 0.0f : 1.0f / sum);  // a row that sees no key is zero
      Element* to = output + offset(item, row, num_heads * size, size);
      for (int64_t column = 0; column < size; column += kLanes)
        store_floats(to + column, load<Floats>(scratch.outputs + index * size + column) * factor);
    }
  }

  // Number of tiles of a sequence that others may share: those that its only token sees completely, except the last.
  int64_t num_whole_tiles(int sequence) const {
    const int64_t last = context_lengths[sequence] - 1;
    const bool decodes = num_tokens(sequence) == 1 && ahead == 0 && first_visible(last) == 0;
    return decodes ? last / kTile : 0;
  }

  struct Plan {
    std::vector<Item> items;
    std::vector<Bundle> bundles;
    std::vector<int64_t> chunks;  // starts, and the end of the last: consecutive bundles of one thread
  };

  // Maximum of sequences that are computed together: limited by the scratch memory, and so that each thread gets several
  // bundles, although larger ones would read less; groups of about equal size if all sequences share.
  int64_t most_together(int64_t num_decoding, int num_threads) const {
    constexpr int64_t kPiecesEach = 4;
    const int64_t most = std::min<int64_t>(
        kItemRows / group_size(), num_decoding * cache.num_kv_heads / (std::max(num_threads, 1) * kPiecesEach));
    if (most < 2) return most;
    const int64_t num_groups = (num_decoding + most - 1) / most;
    return (num_decoding + num_groups - 1) / num_groups;
  }

  // Sequence by sequence, so that neighbours read neighbouring blocks; within a sequence, the rows with most keys first.
  Plan plan(int num_sequences, int num_threads) const {
    std::vector<int64_t> whole(num_sequences);
    int64_t num_decoding = 0, num_items = 0;
    for (int sequence = 0; sequence < num_sequences; ++sequence) {
      whole[sequence] = num_whole_tiles(sequence);
      num_decoding += whole[sequence] > 0;
      num_items += (num_tokens(sequence) * group_size() + kItemRows - 1) / kItemRows * cache.num_kv_heads;
    }
    const SharedBlocks shared(
        {cache.tables, cache.table_stride, cache.block_size, kTile}, whole, most_together(num_decoding, num_threads));
    Plan all;
    all.items.reserve(num_items);  // bundles point to them
    all.bundles.reserve(num_items);
    std::vector<int> sequences;
    for (const SharedBlocks::Group& group : shared.groups(sequences)) {
      const int64_t num_rows = num_tokens(group.sequences[0]) * group_size();
      for (int64_t part = (num_rows + kItemRows - 1) / kItemRows - 1; part >= 0; --part)
        for (int head = 0; head < cache.num_kv_heads; ++head) {
          all.bundles.push_back({all.items.data() + all.items.size(), group.size, group.num_tiles});
          for (int member = 0; member < group.size; ++member)
            all.items.push_back(item_of(
                group.sequences[member], head, part * kItemRows, std::min(num_rows, (part + 1) * kItemRows),
                member * num_rows));
        }
    }
    // A bundle prefetches the start of the next one, so a thread takes a few consecutive ones, and fewer towards the end.
    int64_t room = 0, num_left = num_items;
    for (int64_t bundle = 0; bundle < int64_t(all.bundles.size()); ++bundle) {
      if (all.bundles[bundle].num_items > room) {
        all.chunks.push_back(bundle);
        room = std::clamp<int64_t>(num_left / (std::max(num_threads, 1) * 8), 1, 8);
      }
      room -= all.bundles[bundle].num_items;
      num_left -= all.bundles[bundle].num_items;
    }
    all.chunks.push_back(all.bundles.size());
    return all;
  }

  void run_all(int num_sequences, int num_threads) const {
    const Plan planned = plan(num_sequences, num_threads);
    const std::vector<Bundle>& all = planned.bundles;
    const int64_t count = int64_t(all.size()), num_chunks = int64_t(planned.chunks.size()) - 1;
    run_items(num_chunks, int(std::min<int64_t>(num_threads, count)), [&](Items& chunks) {
      int amx_rows = 0;
      for (int64_t chunk = chunks.next(), following = -1; chunk >= 0; chunk = following)
        for (int64_t index = planned.chunks[chunk], end = planned.chunks[chunk + 1]; index < end; ++index) {
          // The next chunk is claimed before the last bundle of the current one, so that its start can be prefetched.
          int64_t next = index + 1;
          if (next == end) {
            following = chunks.next();
            next = following < 0 ? count : planned.chunks[following];
          }
          run(all[index], next < count ? &all[next] : nullptr, amx_rows);
        }
#if defined(SPMD_HAS_AMX)
      if (amx_rows > 0) amx::release();
#endif
    });
  }
};

}  // namespace

// ---- what Python calls --------------------------------------------------------------------------------------------

#define SPMD_ATTENTION(name, Type)                                                                                     \
  extern "C" void spmd_write_##name(                                                                                   \
      void* cache, int64_t block_stride, int64_t num_kv_heads, int64_t head_size, int64_t block_size, int64_t in_bytes, \
      const Type::Element* key, int64_t key_token_stride, int64_t key_head_stride, const Type::Element* value,         \
      int64_t value_token_stride, int64_t value_head_stride, const Type::Element* cos, const Type::Element* sin,       \
      const int64_t* blocks, const int64_t* offsets, int64_t num_tokens, int64_t num_threads) {                        \
    write_all<Type>(                                                                                                   \
        {cache, block_stride, nullptr, 0, int(num_kv_heads), int(head_size), int(block_size), in_bytes != 0,           \
         value == nullptr},                                                                                            \
        {key, value, key_token_stride, key_head_stride, value_token_stride, value_head_stride}, {cos, sin}, blocks,    \
        offsets, num_tokens, int(num_threads));                                                                        \
  }                                                                                                                    \
  extern "C" void spmd_attend_##name(                                                                                  \
      void* cache, int64_t block_stride, int64_t num_kv_heads, int64_t head_size, int64_t block_size, int64_t in_bytes, \
      const int64_t* tables, int64_t table_stride, const Type::Element* queries, int64_t query_token_stride,           \
      int64_t query_head_stride, int64_t num_heads, const Type::Element* cos, const Type::Element* sin,                \
      const int64_t* query_starts, const int64_t* context_lengths, int64_t num_sequences, float scale, float cap,      \
      int64_t window, int64_t ahead, const int32_t* last_visible, const float* sinks,                                  \
      const float* distance_bias, int64_t max_distance, const Type::Element* query_scores,                             \
      const Type::Element* key_scores, int64_t score_token_stride, int64_t score_head_stride,                          \
      const int32_t* columns, int64_t latent_size,                                                                     \
      Type::Element* output, int64_t may_use_amx, int64_t num_threads) {                                               \
    const Attention<Type> attention = {                                                                                \
        {cache, block_stride, tables, table_stride, int(num_kv_heads), int(head_size), int(block_size), in_bytes != 0, \
         int(latent_size)},                                                                                            \
        queries, query_token_stride, query_head_stride, {cos, sin}, output, query_starts, context_lengths,             \
        int(num_heads), scale * kLog2OfE, cap * kLog2OfE, window, ahead, last_visible,                                 \
        may_use_amx != 0 && amx::is_granted(), sinks, distance_bias, max_distance,                                     \
        {query_scores, key_scores, score_token_stride, score_head_stride, columns}};                                   \
    attention.run_all(int(num_sequences), int(num_threads));                                                           \
  }

SPMD_ATTENTION(float32, Float32)
SPMD_ATTENTION(bfloat16, Bfloat16)

// Whether bfloat16 matmuls use AMX.
extern "C" int64_t spmd_has_amx() { return amx::is_granted(); }

// The instruction set that the library was compiled for.
extern "C" const char* spmd_instruction_set() {
#if defined(SPMD_BF16_DOTS)
  return "avx512 with bf16 dot products";
#elif defined(SPMD_BF16_DOTS_IN_ATTENTION)
  // The unit's products are what they were.
  return amx::is_granted() ? "avx512 with bf16 dot products" : "avx512 with bf16 dot products in attention";
#elif defined(SPMD_AVX512) && defined(__AVX512BF16__)
  return "avx512 with bf16 conversions";
#elif defined(SPMD_AVX512)
  return "avx512";
#elif defined(SPMD_AVX2)
  return "avx2 with fma";
#elif defined(__aarch64__)
  return "neon";
#else
  return "portable";
#endif
}
