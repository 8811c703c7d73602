// The GEMM driver: the macro-kernel around all micro-kernels (as in BLIS, https://dl.acm.org/doi/10.1145/2764454).
//
// Tiling. Rows are divided into blocks of as many rows as a micro-kernel has registers or tiles for, outputs into pairs of
// panels. A block by a pair is a tile. Neighbouring blocks form a group that fits into the second-level cache while panels
// stream through; tiles are numbered group by group, within a group pair by pair, and within a pair block by block. If a
// pair of panels is too long for a cache and the micro-kernel asks for it, the K loop is split into parts: in vector
// registers, a pair and the next one, which is prefetched, take a quarter of the second-level cache beside the rows.
//
// Items. An item is a range of tiles that one thread computes. Items get shorter towards the end (`ShrinkingItems`), and
// long ones consist of complete pairs. If sums are kept between two parts, or operands are repacked, an item is a group by
// some pairs (`kKeptPairs` at most), and all are about equal. A thread claims its next item before the last pair of the
// current one, so that it prefetches exactly what it computes next.
//
// Scratch. Each thread has its own: sums between parts and repacked operands are in memory of the thread, and once for all
// pairs of a group rows that are widened to float (`kWidens`), or put further apart (`kSpreads`): all their inputs, which is
// 4 MB for 14,336. Rows of 2,048 bfloat16 begin in the same set of a first-level cache, which has 8 or 12 places: 14 rows
// then throw one another out at every step.
//
// Epilogues (gemm_epilogues.h) consume sums. Each thread has a copy. `take(row, pair, num_panels, sums)` gets the sums of
// a row by a pair, [panel][16] as vectors; for one row, pairs come in ascending order. Epilogues that read the registers of
// a micro-kernel (`kTakesRegisters`) save three per cent of a block, and are compiled once for each number of rows.
// `expect(row, pair)` may come before it, and fetches what it will write. `finish()` is called once by each thread that had
// an item, one thread after another.
//
// A micro-kernel is a type with
//   Element, kRows (of a block), kStep (inputs that are never split), kIsEven (blocks of equal size, not full ones),
//   kCutInputs (where parts begin), kTransposes (a block's rows are in the order of tiles, as a product's second factor),
//   Expansion (of stored weights), kExpandingRows (most rows during whose blocks the next part is expanded), kRowsBytes (of
//   a group), kFewProducts (below it a second thread costs more than it gains), kMaxProducts (of an item that keeps no sums:
//   half a millisecond, which bounds how long a thread that lost its core delays the others), kPacks, kWidens (rows of a
//   block are floats, `x` and `x_stride` count halves of them), kSpreads (rows that share sets of the first-level cache are
//   copied), num_parts(rows, steps), Kernel<Epilogue>,
//   which has `multiply(Block)`, and `finish()` after the last; for leaves, LeafKernel<Epilogue> and kLeavesAreParts;
//   kSplits (chains go from part to part by `Block::kept`), kKeptBlocks and kKeptPairs (most of an item that keeps sums
//   between two parts).
//
// Stored weights. A weight as files store it (stored.h) is expanded a part of a pair at a time, in memory of the thread:
// where tiles multiply, which other instructions run beside, or few rows wait for their chains, the next part during the
// blocks by this one, else before its own. Meanwhile the numbers and scales that will be expanded next are fetched. Parts
// are short, so that two stay in the first-level cache, if sums can be kept between them, and follow one another for each
// pair: an item is a pair, and the next one is claimed early.
//
// Leaves. With an epilogue that has leaves (`kHasLeaves`) there is a chain for each leaf of the inputs. In vector registers,
// a block has the leaves of a part one after another, their sums in the first-level cache or, between two parts, in memory
// of the thread (`LeavesByRows`). In tiles, a leaf is one part of the inputs or several; at its end the epilogue is told
// by `begin(leaf, row, levels, level_size)`.
//
// Bits. A chain is a sequence of steps over inputs in ascending order, fixed by the micro-kernel; a chain that continues
// in another part is the same chain. A result is one chain over all inputs. In leaves it is a chain for each of them, from
// zero, the bias added to the first, and their sum by a binary tree: left subtree plus right subtree. Then the epilogue.
// Neither tiling, the number of threads, other rows nor the leaves that a call has change a leaf's chain.
#pragma once

#include <algorithm>
#include <mutex>
#include <type_traits>
#include <vector>

#include "gemm.h"
#include "stored.h"
#include "thread_pool.h"

namespace {

template <class Epilogue>
constexpr bool kHasLeaves = false;

// Of a pair of stored panels at a time: 16 KB. Twice as many if more blocks than two share them, so that sums are kept
// less often.
constexpr int64_t kExpandedInputs = 256;

// `kCutsLeaves`: no part has inputs of two leaves.
template <class Micro, bool kCutsLeaves = false>
class Tiling {
 public:
  struct Tile {
    int64_t group, pair, block;
  };

  Tiling(const Gemm<typename Micro::Element>& gemm, int64_t num_threads)
      : num_pairs_(gemm.num_pairs()) {
    if constexpr (kCutsLeaves) {
      cut_leaves(gemm);
    } else if (gemm.leaves.count > 0 && Micro::kSplits) {
      join_leaves(gemm);
    } else {
      const int64_t num_cuts = (gemm.num_inputs + Micro::kCutInputs - 1) / Micro::kCutInputs;
      first_inputs_ = shares(num_cuts, num_parts_of(gemm, num_cuts));
      for (int64_t& each : first_inputs_) each = std::min(gemm.num_inputs, each * Micro::kCutInputs);
    }
    const int64_t num_blocks = (gemm.num_rows + Micro::kRows - 1) / Micro::kRows;
    first_rows_ = shares(Micro::kIsEven ? gemm.num_rows : num_blocks * Micro::kRows, num_blocks);
    first_rows_.back() = gemm.num_rows;
    const bool keeps_sums = num_parts() > 1 || Micro::kPacks;
    int64_t blocks_each = Micro::kKeptBlocks;
    if (Micro::kSplits || !keeps_sums) {
      const int64_t block_bytes = most_inputs() * int64_t(sizeof(typename Micro::Element)) * Micro::kRows;
      const int64_t that_fit = std::max<int64_t>(Micro::kRowsBytes / block_bytes, 1);
      blocks_each = keeps_sums ? std::min(that_fit, blocks_each) : that_fit;
    }
    const int64_t num_groups = (num_blocks + blocks_each - 1) / blocks_each;
    first_blocks_ = shares(num_blocks, num_groups);
    if (!keeps_sums) {
      const int64_t most = Micro::kMaxProducts / (Micro::kRows * 2 * kPanel * gemm.num_inputs);
      // A pair shared by two threads would move between their caches.
      const int64_t together = num_groups == 1 ? num_blocks : 1;
      starts_ = ShrinkingItems(num_pairs_ * num_blocks, num_threads, most, together).starts();
      return;
    }
    const int64_t most_pairs = gemm.stored == nullptr ? Micro::kKeptPairs : 1;
    const int64_t pairs_each = std::clamp<int64_t>((num_pairs_ + num_threads - 1) / num_threads, 1, most_pairs);
    int64_t num_ranges = (num_pairs_ + pairs_each - 1) / pairs_each;
    // As many for each thread: they are few, and of equal size.
    if (Micro::kSplits) num_ranges = std::min((num_ranges + num_threads - 1) / num_threads * num_threads, num_pairs_);
    const std::vector<int64_t> first_pairs = shares(num_pairs_, num_ranges);
    for (int64_t group = 0; group < num_groups; ++group)
      for (int64_t range = 0; range < num_ranges; ++range)
        starts_.push_back(
            first_block(group) * num_pairs_ +
            first_pairs[size_t(range)] * (first_block(group + 1) - first_block(group)));
    starts_.push_back(num_pairs_ * num_blocks);
  }

  int64_t num_items() const { return int64_t(starts_.size()) - 1; }
  int64_t start(int64_t item) const { return starts_[size_t(item)]; }
  int64_t num_parts() const { return int64_t(first_inputs_.size()) - 1; }
  int64_t num_pairs() const { return num_pairs_; }
  // The first of a part, group or block, or the end of the previous one.
  int64_t first_input(int64_t part) const { return first_inputs_[size_t(part)]; }
  int64_t first_block(int64_t group) const { return first_blocks_[size_t(group)]; }
  int64_t first_row(int64_t block) const { return first_rows_[size_t(block)]; }
  int64_t leaf(int64_t part) const { return leaves_.empty() ? 0 : leaves_[size_t(part)]; }

  Tile tile(int64_t number) const {
    int64_t group = 0;
    while (first_block(group + 1) * num_pairs_ <= number) ++group;
    const int64_t first = first_block(group), size = first_block(group + 1) - first;
    const int64_t offset = number - first * num_pairs_;
    return {group, offset / size, first + offset % size};
  }

 private:
  static int64_t num_parts_of(const Gemm<typename Micro::Element>& gemm, int64_t num_cuts) {
    const int64_t num_parts = Micro::num_parts(gemm.num_rows, num_cuts);
    const int64_t most = (gemm.num_rows > 2 * Micro::kRows ? 2 : 1) * kExpandedInputs / Micro::kCutInputs;
    const bool is_cut = gemm.stored != nullptr && Micro::kSplits;
    return is_cut ? std::max(num_parts, (num_cuts + most - 1) / most) : num_parts;
  }

  // Starts of `count` shares of equal size, and the end of the last.
  static std::vector<int64_t> shares(int64_t total, int64_t count) {
    std::vector<int64_t> starts(size_t(count) + 1);
    for (int64_t share = 1; share <= count; ++share) starts[size_t(share)] = total * share / count;
    return starts;
  }

  void cut_leaves(const Gemm<typename Micro::Element>& gemm) {
    first_inputs_ = {0};
    for (int64_t leaf = 0; leaf < gemm.leaves.count; ++leaf) {
      const int64_t first = gemm.leaves.first_input(leaf), num_steps = (gemm.leaves.ends[leaf] - first) / Micro::kStep;
      const int64_t num_cuts = (num_steps * Micro::kStep + Micro::kCutInputs - 1) / Micro::kCutInputs;
      const std::vector<int64_t> steps = shares(num_steps, num_parts_of(gemm, num_cuts));
      for (size_t part = 1; part < steps.size(); ++part)
        first_inputs_.push_back(first + steps[part] * Micro::kStep), leaves_.push_back(leaf);
    }
  }

  // A part has as many complete leaves as the micro-kernel takes at once, or one that is longer.
  void join_leaves(const Gemm<typename Micro::Element>& gemm) {
    const int64_t most = gemm.num_inputs / num_parts_of(gemm, gemm.num_inputs / Micro::kStep);
    first_inputs_ = {0}, leaves_ = {0};
    for (int64_t leaf = 1; leaf < gemm.leaves.count; ++leaf)
      if (gemm.leaves.ends[leaf] - first_inputs_.back() > most)
        first_inputs_.push_back(gemm.leaves.first_input(leaf)), leaves_.push_back(leaf);
    first_inputs_.push_back(gemm.num_inputs);
  }

  int64_t most_inputs() const {
    int64_t most = 0;
    for (int64_t part = 0; part < num_parts(); ++part) most = std::max(most, first_input(part + 1) - first_input(part));
    return most;
  }

  int64_t num_pairs_;
  std::vector<int64_t> leaves_;  // the parts' first
  std::vector<int64_t> first_inputs_, first_blocks_, first_rows_;  // tables: a division takes the time of ten steps
  std::vector<int64_t> starts_;                                    // of the items, in tiles, and the end of the last
};

template <class Number>
struct alignas(64) AlignedLine {
  Number numbers[64 / sizeof(Number)];
};

// The rows of one group in memory of the thread, [block][kRows][stride], each block's from when it is asked for the first
// time: as floats if `Micro` widens them, else as they are.
template <class Micro>
class OwnRows {
 public:
  using Element = typename Micro::Element;
  using Number = std::conditional_t<Micro::kWidens, float, Element>;

  // Rows that are a multiple of this apart share so few sets of the first-level cache that a block's do not fit in them.
  static constexpr int64_t kSharedSets = 4096;

  static bool is_used(const Gemm<Element>& gemm, int64_t num_threads) {
    // They fit; of a thread, for which the copy takes longer than it saves.
    constexpr int64_t kFewRows = 6, kFewPairs = 4;
    if (Micro::kWidens || Micro::kTransposes) return true;
    return Micro::kSpreads && gemm.num_rows > kFewRows && gemm.num_pairs() >= kFewPairs * num_threads &&
           gemm.x_stride * int64_t(sizeof(Element)) % kSharedSets == 0;
  }

  // One cache line more where the rows would share sets.
  static int64_t stride(int64_t num_inputs) {
    const bool shares = num_inputs * int64_t(sizeof(Number)) % kSharedSets == 0;
    return num_inputs + (shares ? 64 / int64_t(sizeof(Number)) : 0);
  }

  const Number* of_block(
      const Gemm<Element>& gemm, int64_t group, int64_t num_blocks, int64_t number, int64_t row, int num_rows) {
    const int64_t distance = stride(gemm.num_inputs), block_size = Micro::kRows * distance;
    if (group_ != group) {
      group_ = group, is_here_.assign(size_t(num_blocks), false);
      rows_ = memory(num_blocks * block_size);
    }
    Number* const block = rows_ + number * block_size;
    if (is_here_[size_t(number)]) return block;
    is_here_[size_t(number)] = true;
    if constexpr (Micro::kTransposes) {
      Micro::transpose_rows(
          gemm.x + row * gemm.x_stride, gemm.x_stride, gemm.num_inputs, num_rows, Micro::columns_of(gemm.num_rows),
          block);
      return block;
    }
    for (int each = 0; each < num_rows; ++each) {
      const Element* const from = gemm.x + (row + each) * gemm.x_stride;
      Number* const to = block + each * distance;
      if constexpr (Micro::kWidens) {
        for (int64_t input = 0; input < gemm.num_inputs; input += kLanes) store(to + input, load_floats(from + input));
      } else {
        std::copy_n(from, gemm.num_inputs, to);
      }
    }
    return block;
  }

 private:
  static Number* memory(int64_t count) {
    static thread_local std::vector<AlignedLine<Number>> kept;
    const size_t num_lines = size_t(count * int64_t(sizeof(Number)) + 63) / 64;
    if (kept.size() < num_lines) kept.resize(num_lines);
    return kept[0].numbers;
  }

  int64_t group_ = -1;
  std::vector<bool> is_here_;
  Number* rows_ = nullptr;
};

// One thread's part of a GEMM: all tiles of the items that it claims.
template <class Micro, class Epilogue>
class GemmThread {
 public:
  using Element = typename Micro::Element;
  static constexpr bool kCutsLeaves = kHasLeaves<Epilogue> && Micro::kLeavesAreParts;
  using TilingOf = Tiling<Micro, kCutsLeaves>;
  using Tile = typename TilingOf::Tile;
  using Kernel = typename std::conditional_t<
      kHasLeaves<Epilogue>, typename Micro::template LeafKernel<Epilogue>, typename Micro::template Kernel<Epilogue>>;

  // Elements of an input's place in rows: widened rows count as twice as many, transposed ones are side by side.
  static int64_t elements_each(const Gemm<Element>& gemm) {
    if constexpr (Micro::kTransposes) return Micro::columns_of(gemm.num_rows);
    return sizeof(typename OwnRows<Micro>::Number) / sizeof(Element);
  }

  GemmThread(
      const Gemm<Element>& gemm, const TilingOf& tiling, Epilogue& epilogue, Items& items, int64_t num_threads)
      : gemm_(gemm), tiling_(tiling), items_(items), num_threads_(num_threads), kernel_(epilogue),
        has_own_rows_(OwnRows<Micro>::is_used(gemm, num_threads)), elements_each_(elements_each(gemm)) {
    block_.x_stride = has_own_rows_ ? OwnRows<Micro>::stride(gemm.num_inputs) * elements_each_ : gemm.x_stride;
    if (Micro::kTransposes) block_.x_stride = elements_each_;
    block_.panel_size = gemm.panel_size(), block_.num_all_inputs = gemm.num_inputs;
  }

  void run() {
    claim();
    while (next_item_ >= 0) {
      const int64_t item = next_item_;
      const Tile first = next_first_;
      has_next_ = false;
      // So that it is fetched in time; not of the last ones, which other threads may be waiting for.
      if (gemm_.stored != nullptr && item + 2 * num_threads_ < tiling_.num_items()) claim();
      for (int64_t part = 0; part < tiling_.num_parts(); ++part)
        run_part(part, first, tiling_.start(item), tiling_.start(item + 1));
    }
    kernel_.finish();
  }

 private:
  // A part of a pair of panels.
  struct Place {
    int64_t pair, part;
  };

  // Tiles `start` to `end` over one part of the inputs; `first` is tile `start`.
  SPMD_INLINE_MEMBER void run_part(int64_t part, const Tile& first, int64_t start, int64_t end) {
    const int64_t input = tiling_.first_input(part);
    block_.num_inputs = tiling_.first_input(part + 1) - input;
    block_.is_first_part = part == 0, block_.is_last_part = part + 1 == tiling_.num_parts();
    const int64_t leaf = block_.leaf = tiling_.leaf(part);
    if constexpr (kCutsLeaves) {
      block_.is_first_part = block_.is_first_part || tiling_.leaf(part - 1) != leaf;
      block_.is_last_part = block_.is_last_part || tiling_.leaf(part + 1) != leaf;
    }
    block_.is_alone = end - start == 1;
    Tile tile = first;
    for (int64_t number = start; number < end;) {
      // The blocks of the group by one pair that belong to the item.
      const int64_t end_block = tiling_.first_block(tile.group + 1);
      block_.pair = tile.pair, block_.num_panels = gemm_.num_panels_of(tile.pair);
      block_.num_blocks = std::min(end_block - tile.block, end - number);
      const int64_t last = number + block_.num_blocks;
      const Place next = place_ahead(part, first, tile, last == end);
      if (sizeof(Element) != 2 || gemm_.stored == nullptr) {
        block_.panels = panels_of({tile.pair, part});
        const bool has_as_many = next.pair >= 0 && gemm_.num_panels_of(next.pair) >= block_.num_panels;
        block_.ahead = has_as_many ? panels_of(next) : block_.panels;
      } else {
        expand({tile.pair, part}, next);
      }
      int64_t row = tiling_.first_row(tile.block);
      for (block_.number = 0; number < last; ++number, ++block_.number) {
        block_.row = row, row = tiling_.first_row(tile.block + 1);
        block_.num_rows = int(row - block_.row);
        block_.x = has_own_rows_ ? own_rows(tile, end_block) : gemm_.x + block_.row * gemm_.x_stride;
        block_.x += input * elements_each_;
        ++tile.block;
        block_.index = number - start;
        kernel_.multiply(block_);
      }
      if (tile.block < end_block) continue;
      if (++tile.pair == tiling_.num_pairs()) ++tile.group, tile.pair = 0;
      tile.block = tiling_.first_block(tile.group);
    }
  }

  void claim() {
    if (has_next_) return;
    has_next_ = true, next_item_ = items_.next();
    if (next_item_ >= 0) next_first_ = tiling_.tile(tiling_.start(next_item_));
  }
  Place next_place() const { return has_next_ && next_item_ >= 0 ? Place{next_first_.pair, 0} : Place{-1, 0}; }

  // What follows the blocks by the pair of `tile`: the next pair, the next part's first pair, or the next item's, which is
  // claimed here; a pair below 0 if there is none.
  SPMD_INLINE_MEMBER Place place_ahead(int64_t part, const Tile& first, const Tile& tile, bool is_last_pair) {
    if (!is_last_pair) return {tile.pair + 1 < tiling_.num_pairs() ? tile.pair + 1 : 0, part};
    if (part + 1 < tiling_.num_parts()) return {first.pair, part + 1};
    claim();
    return next_place();
  }

  const Element* own_rows(const Tile& tile, int64_t end_block) {
    const int64_t first = tiling_.first_block(tile.group);
    return reinterpret_cast<const Element*>(own_rows_.of_block(
        gemm_, tile.group, end_block - first, tile.block - first, block_.row, block_.num_rows));
  }

  SPMD_INLINE_MEMBER const Element* panels_of(const Place& place) const {
    return gemm_.panel(place.pair * 2) + tiling_.first_input(place.part) * kPanel;
  }

  // A part of a pair of stored panels as elements, and the next one, if it is expanded ahead.
  struct Expanded {
    Place places[2] = {{-1, 0}, {-1, 0}};
    int current = 0;
    std::vector<AlignedLine<Element>>& lines() const {
      static thread_local std::vector<AlignedLine<Element>> kept[2];
      return kept[current];
    }
    bool has(const Place& place) const {
      return places[current].pair == place.pair && places[current].part == place.part;
    }
    void complete() { expansion.take(expansion.num_left()); }
    typename Micro::Expansion expansion;
  };

  // Puts the part of a stored pair into the block, and lets the kernel expand the next one.
  __attribute__((noinline)) void expand(const Place& place, const Place& next) {
    expanded_.complete();
    if (!expanded_.has(place)) begin_expansion(place, next), expanded_.complete();
    block_.panels = block_.ahead = expanded_.lines()[0].numbers, block_.panel_size = stride_of(place);
    if (gemm_.num_rows > Micro::kExpandingRows) return;
    expanded_.current = 1 - expanded_.current, block_.expansion = nullptr;
    if (next.pair >= 0) begin_expansion(next, place_behind(place, next)), block_.expansion = &expanded_.expansion;
  }

  // What follows `next`, of a stored weight: an item of more parts than one is a pair.
  Place place_behind(const Place& place, const Place& next) const {
    if (next.part + 1 < tiling_.num_parts()) return {next.pair, next.part + 1};
    if (tiling_.num_parts() > 1 && next.pair == place.pair) return next_place();
    return {next.pair + 1 < tiling_.num_pairs() ? next.pair + 1 : -1, 0};
  }

  int64_t stride_of(const Place& place) const {
    // One line between the panels: else their lines would share the sets of the first-level cache.
    constexpr int64_t kLineElements = 64 / sizeof(Element);
    return (tiling_.first_input(place.part + 1) - tiling_.first_input(place.part)) * kPanel + kLineElements;
  }

  const uint8_t* stored_of(const Place& place) const { return gemm_.stored + place.pair * 2 * gemm_.stored_size; }

  // Into the current buffer; what `behind` needs is fetched meanwhile.
  void begin_expansion(const Place& place, const Place& behind) {
    if constexpr (sizeof(Element) == 2) {
      auto& lines = expanded_.lines();
      const int64_t stride = stride_of(place), num_lines = 2 * stride * int64_t(sizeof(Element)) / 64;
      if (int64_t(lines.size()) < num_lines) lines.resize(size_t(num_lines));
      expanded_.places[expanded_.current] = place;
      expanded_.expansion.begin(
          stored_of(place), gemm_.stored_size, gemm_.num_panels_of(place.pair), gemm_.num_inputs,
          tiling_.first_input(place.part), tiling_.first_input(place.part + 1), lines[0].numbers, stride);
      if (behind.pair >= 0) expanded_.expansion.fetch(stored_of(behind), tiling_.first_input(behind.part));
    }
  }

  const Gemm<Element>& gemm_;
  const TilingOf& tiling_;
  Items& items_;
  const int64_t num_threads_;
  Kernel kernel_;
  OwnRows<Micro> own_rows_;
  const bool has_own_rows_;
  const int64_t elements_each_;
  Block<Element> block_;
  Expanded expanded_;
  bool has_next_ = false;  // it is claimed, if there is one
  int64_t next_item_ = -1;
  Tile next_first_ = {};
};

template <class Micro, class Epilogue>
void run_gemm(const Gemm<typename Micro::Element>& gemm, const Epilogue& epilogue, int64_t num_threads) {
  if (gemm.num_rows * gemm.num_inputs * gemm.num_outputs < Micro::kFewProducts) num_threads = 1;
  const typename GemmThread<Micro, Epilogue>::TilingOf tiling(gemm, num_threads);
  std::mutex finishing;
  run_items(tiling.num_items(), num_threads, [&](Items& items) {
    Epilogue own = epilogue;
    GemmThread<Micro, Epilogue>(gemm, tiling, own, items, num_threads).run();
    const std::lock_guard<std::mutex> alone(finishing);
    own.finish();
  });
}

}  // namespace
