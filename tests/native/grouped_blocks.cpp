// The groups of native/shared_blocks.h, for tests that look at them.

#include "shared_blocks.h"

// `members` [num_sequences] are the sequences, group by group; `sizes` and `num_tiles` have one number a group. Returns
// the number of groups.
extern "C" int64_t grouped_blocks(
    const int64_t* tables, int64_t stride, int64_t block_size, int64_t tile_size, const int64_t* num_whole_tiles,
    int64_t num_sequences, int64_t most, int64_t* members, int64_t* sizes, int64_t* num_tiles) {
  const std::vector<int64_t> whole(num_whole_tiles, num_whole_tiles + num_sequences);
  const SharedBlocks shared({tables, stride, block_size, tile_size}, whole, most);
  int64_t count = 0;
  for (const SharedBlocks::Group& group : shared.groups()) {
    members = std::copy(group.sequences, group.sequences + group.size, members);
    sizes[count] = group.size;
    num_tiles[count++] = group.num_tiles;
  }
  return count;
}
