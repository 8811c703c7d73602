// Which sequences of a step see the same blocks first: a system prompt, samples of one prompt, common examples.
//
// Sequences that decode, one token each, are put into groups whose block tables begin alike, so that a tile of keys and
// values which they share is read once for all of them. Only whole tiles count that every sequence of the group sees to
// the end, and never a sequence's last one. Finding the groups takes one look at each sequence and the compared parts of
// its table: a sequence joins the latest group that begins with the same block if more reads are saved with it than
// without. Knows nothing of arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// The tables of a step, and how many keys lie in a block and in a tile.
struct BlockTables {
  const int64_t* tables;
  int64_t stride;
  int64_t block_size, tile_size;

  const int64_t* of(int sequence) const { return tables + sequence * stride; }

  // Tiles from the first on, at most `most`, whose blocks are the same for both.
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
  // The sequences of a group, and how many tiles they have in common.
  struct Group {
    const int* sequences;
    int size;
    int64_t num_tiles;
  };

  // `num_whole_tiles` of a sequence: how many of its first tiles may be shared. No group has more than `most` sequences.
  SharedBlocks(const BlockTables& tables, const std::vector<int64_t>& num_whole_tiles, int64_t most) {
    const int num_sequences = int(num_whole_tiles.size());
    std::vector<int> group_of(num_sequences);
    Latest latest(num_sequences);
    for (int sequence = 0; sequence < num_sequences; ++sequence) {
      const int64_t whole = num_whole_tiles[sequence];
      int& group = whole > 0 ? latest.with(*tables.of(sequence)) : group_of[sequence];
      if (whole == 0 || group < 0 || !may_join(begun_[group], sequence, whole, tables, most)) {
        group = int(begun_.size());
        begun_.push_back({sequence, 0, whole});
      }
      group_of[sequence] = group;
      ++begun_[group].size;
    }
    std::vector<int> places;
    int place = 0;
    for (const Begun& group : begun_) places.push_back(place), place += group.size;
    ordered_.resize(num_sequences);
    for (int sequence = 0; sequence < num_sequences; ++sequence) ordered_[places[group_of[sequence]]++] = sequence;
  }

  // In order of their first sequences; each sequence is in one, in order too.
  std::vector<Group> groups() const {
    std::vector<Group> all;
    const int* sequences = ordered_.data();
    for (const Begun& group : begun_) {
      all.push_back({sequences, group.size, group.size > 1 ? group.num_tiles : 0});
      sequences += group.size;
    }
    return all;
  }

 private:
  struct Begun {
    int first, size;
    int64_t num_tiles;
  };

  // The latest group by its first block. Blocks that fall on one place push each other out: then less is shared.
  class Latest {
   public:
    explicit Latest(int num_sequences) {
      size_t size = 4;
      while (size < size_t(num_sequences) * 4) size *= 2;
      groups_.assign(size, -1);
    }
    // -1: none yet.
    int& with(int64_t block) { return groups_[size_t(block) & (groups_.size() - 1)]; }

   private:
    std::vector<int> groups_;
  };

  // If so, the group has no more tiles than the sequence shares.
  static bool may_join(Begun& group, int sequence, int64_t whole, const BlockTables& tables, int64_t most) {
    if (group.size >= most) return false;
    const int64_t common = tables.num_common_tiles(group.first, sequence, std::min(whole, group.num_tiles));
    if (common * group.size <= group.num_tiles * (group.size - 1)) return false;
    group.num_tiles = common;
    return true;
  }

  std::vector<Begun> begun_;
  std::vector<int> ordered_;
};

}  // namespace
