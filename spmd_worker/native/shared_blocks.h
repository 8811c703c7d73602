// Groups sequences of a step that share their first blocks: a system prompt, samples of one prompt, common examples.
//
// Sequences that decode, one token each, are put into groups whose block tables begin alike, so that a tile of keys and
// values which they share is read once for all of them. Only tiles count that every sequence of the group sees completely,
// and never a sequence's last one. Sequences that share most of what they see come first, e.g. samples of one prompt, so
// that a system prompt does not split them; then those of the rest that share a good part, because groups are larger work
// items than single sequences, and harder to distribute over threads. The search compares each sequence with a few
// candidates.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// Block tables of a step, and the number of keys of a block and of a tile.
struct BlockTables {
  const int64_t* tables;
  int64_t stride;
  int64_t block_size, tile_size;

  const int64_t* of(int sequence) const { return tables + sequence * stride; }

  // Number of leading tiles, at most `most`, whose blocks are the same for both.
  int64_t num_common_tiles(int one, int other, int64_t most) const {
    const int64_t* const here = of(one);
    const int64_t* const there = of(other);
    const int64_t num_blocks = (most * tile_size + block_size - 1) / block_size;
    const int64_t num_common = std::mismatch(here, here + num_blocks, there).first - here;
    return std::min(most, num_common * block_size / tile_size);
  }
};

class SharedBlocks {
 public:
  // The sequences of a group, and the number of tiles that they share.
  struct Group {
    const int* sequences;
    int size;
    int64_t num_tiles;
  };

  // `num_whole_tiles` of a sequence: leading tiles that may be shared. No group has more than `most` sequences.
  SharedBlocks(const BlockTables& tables, const std::vector<int64_t>& num_whole_tiles, int64_t most)
      : tables_(tables), whole_(num_whole_tiles), most_(most), leaders_(whole_.size()), sizes_(whole_.size(), 1),
        num_tiles_(whole_) {
    for (size_t sequence = 0; sequence < whole_.size(); ++sequence) leaders_[sequence] = int(sequence);
    if (most < 2) return;
    gather(2);
    gather(4);
  }

  // The largest group first, those of one size in order of their first sequences; each sequence is in one group, in order.
  // Groups point into `sequences`.
  std::vector<Group> groups(std::vector<int>& sequences) const {
    const int num_sequences = int(whole_.size());
    std::vector<int> first_indices(num_sequences);
    std::vector<Group> all;
    sequences.resize(num_sequences);
    int index = 0;
    for (int leader = 0; leader < num_sequences; ++leader) {
      if (sizes_[leader] == 0) continue;
      first_indices[leader] = index;
      all.push_back({sequences.data() + index, sizes_[leader], sizes_[leader] > 1 ? num_tiles_[leader] : 0});
      index += sizes_[leader];
    }
    for (int sequence = 0; sequence < num_sequences; ++sequence)
      sequences[first_indices[leaders_[sequence]]++] = sequence;
    std::stable_sort(all.begin(), all.end(), [](const Group& one, const Group& other) { return one.size > other.size; });
    return all;
  }

 private:
  static constexpr int kLooks = 4;  // latest groups with a sequence's first block that are compared

  // Groups single sequences that share a `part`-th of the shorter one's tiles with the first of the group.
  void gather(int64_t part) {
    const int num_sequences = int(whole_.size());
    size_t num_places = 4;
    while (num_places < whole_.size() * 4) num_places *= 2;
    // The latest group by the hash of its first block, and the previous one. Blocks with one hash share a list.
    std::vector<int> latest(num_places, -1), before(num_sequences, -1);
    for (int sequence = 0; sequence < num_sequences; ++sequence) {
      if (whole_[sequence] == 0 || sizes_[sequence] != 1 || leaders_[sequence] != sequence) continue;
      int& newest = latest[size_t(*tables_.of(sequence)) & (num_places - 1)];
      int looks = 0, leader = newest;
      while (leader >= 0 && !join(sequence, leader, part)) leader = ++looks < kLooks ? before[leader] : -1;
      if (leader >= 0) continue;
      before[sequence] = newest;
      newest = sequence;
    }
  }

  // Joins the group if that saves reads: the group then shares only the tiles that all have.
  bool join(int sequence, int leader, int64_t part) {
    if (sizes_[leader] >= most_) return false;
    const int64_t common =
        tables_.num_common_tiles(leader, sequence, std::min(whole_[sequence], num_tiles_[leader]));
    if (common == 0 || common * part < std::min(whole_[sequence], whole_[leader])) return false;
    if (common * sizes_[leader] <= num_tiles_[leader] * (sizes_[leader] - 1)) return false;
    num_tiles_[leader] = common;
    leaders_[sequence] = leader;
    ++sizes_[leader];
    sizes_[sequence] = 0;
    return true;
  }

  BlockTables tables_;
  const std::vector<int64_t>& whole_;
  int64_t most_;
  // For each sequence: the first of its group; for the first one the group's size and shared tiles, for others 0.
  std::vector<int> leaders_, sizes_;
  std::vector<int64_t> num_tiles_;
};

}  // namespace
