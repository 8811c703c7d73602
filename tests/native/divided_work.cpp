// How work is divided, for tests that look at it: the groups of native/shared_blocks.h and what attention makes of them,
// and the items of native/thread_pool.h that grow shorter.

#include "attention.cpp"

// `members` [num_sequences] are the sequences, group by group; `sizes` and `num_tiles` have one number a group. Returns
// the number of groups.
extern "C" int64_t grouped_blocks(
    const int64_t* tables, int64_t stride, int64_t block_size, const int64_t* num_whole_tiles, int64_t num_sequences,
    int64_t most, int64_t* members, int64_t* sizes, int64_t* num_tiles) {
  const std::vector<int64_t> whole(num_whole_tiles, num_whole_tiles + num_sequences);
  std::vector<int> sequences;
  int64_t count = 0;
  for (const SharedBlocks::Group& group :
       SharedBlocks({tables, stride, block_size, kTile}, whole, most).groups(sequences)) {
    members = std::copy(group.sequences, group.sequences + group.size, members);
    sizes[count] = group.size;
    num_tiles[count++] = group.num_tiles;
  }
  return count;
}

// What a step's attention computes together: for each bundle how many items and shared tiles it has, and in which chunk
// it is. Returns the number of bundles.
extern "C" int64_t planned_bundles(
    const int64_t* tables, int64_t stride, int64_t block_size, const int64_t* query_starts,
    const int64_t* context_lengths, int64_t num_sequences, int64_t num_kv_heads, int64_t group_size, int64_t window,
    int64_t ahead, int64_t num_threads, int64_t* num_items, int64_t* num_tiles, int64_t* chunks) {
  const int num_heads = int(num_kv_heads * group_size);
  const Attention<Float32> attention = {
      {nullptr, 0, tables, stride, int(num_kv_heads), 64, int(block_size), false}, nullptr, 0, 0, {nullptr, nullptr},
      nullptr, query_starts, context_lengths, num_heads, 1.0f, 0.0f, window, ahead, nullptr, false};
  const auto plan = attention.plan(int(num_sequences), int(num_threads));
  for (size_t chunk = 0; chunk + 1 < plan.chunks.size(); ++chunk)
    for (int64_t bundle = plan.chunks[chunk]; bundle < plan.chunks[chunk + 1]; ++bundle) {
      num_items[bundle] = plan.bundles[bundle].num_items;
      num_tiles[bundle] = plan.bundles[bundle].num_shared_tiles;
      chunks[bundle] = int64_t(chunk);
    }
  return int64_t(plan.bundles.size());
}

// `starts` are those of the items, and where the last one ends. Returns the number of items.
extern "C" int64_t shrinking_items(
    int64_t num_units, int64_t num_threads, int64_t most, int64_t together, int64_t* starts) {
  const ShrinkingItems items(num_units, num_threads, most, together);
  for (int64_t item = 0; item < items.size(); ++item) starts[item] = items.start(item), starts[item + 1] = items.end(item);
  return items.size();
}
