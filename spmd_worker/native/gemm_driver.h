// The one GEMM driver: the macro-kernel around all micro-kernels (as in BLIS, https://dl.acm.org/doi/10.1145/2764454).
//
// Cut. Rows are cut into blocks, of as many rows as a micro-kernel has registers or tiles for, and outputs into pairs of
// panels. A block by a pair is a unit of work. As many neighbouring blocks make a group as stay in the second-level cache
// while panels pass; units are numbered group by group, in a group pair by pair, and by a pair block by block. Where a
// pair of panels is too long for the first-level cache and the micro-kernel says so, the K loop is cut into parts.
//
// Items. An item is a range of units that one thread computes. Items grow shorter towards the end (`ShrinkingItems`), and
// are whole pairs as long as they are long. Where sums are kept between two parts, or operands are packed anew, an item is
// a group by up to 16 pairs. A thread takes its next item before the last pair of the one in hand, so that it prefetches
// what it comes to next and nothing else.
//
// Scratch. Each thread has its own: a micro-kernel keeps sums between parts and operands in other forms in memory of the
// thread that lives as long as it does.
//
// Epilogues (gemm_epilogues.h) say what becomes of sums. Each thread has a copy. `take(row, pair, num_panels, sums)` gets
// the sums of a row by a pair, [panel][16] as vectors; of a row, pairs come in ascending order. Those that take them from
// a micro-kernel's registers (`kTakesRegisters`) save three per cent of a block, and are compiled once for each number of
// rows. `finish()` is called once by each thread that had an item, one after another.
//
// A micro-kernel is a type with
//   Element, kRows (of a block), kStep (inputs that are never parted), kIsEven (blocks of like size, not full ones),
//   kRowsBytes (of a group), kFewProducts (below which a second thread costs more than it brings), kMostProducts (of an
//   item: half a millisecond, which a lost core holds the others up for), kPacks, num_parts(rows, steps),
//   Kernel<Epilogue>, which has `multiply(Block)`, and `finish()` after the last.
//
// Bits. A result is one chain of steps over the inputs in ascending order, a micro-kernel's own; then the epilogue. No cut
// and no number of threads changes it.
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include "gemm.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kKeptBlocks = 8, kKeptPairs = 16;  // of an item whose sums are kept between two parts

template <class Micro>
class Cut {
 public:
  struct Unit {
    int64_t group, pair, block;
  };

  Cut(const Gemm<typename Micro::Element>& gemm, int64_t num_threads)
      : num_pairs_(gemm.num_pairs()) {
    const int64_t num_steps = (gemm.num_inputs + Micro::kStep - 1) / Micro::kStep;
    first_inputs_ = shares(num_steps, Micro::num_parts(gemm.num_rows, num_steps));
    for (int64_t& each : first_inputs_) each = std::min(gemm.num_inputs, each * Micro::kStep);
    const int64_t num_blocks = (gemm.num_rows + Micro::kRows - 1) / Micro::kRows;
    first_rows_ = shares(Micro::kIsEven ? gemm.num_rows : num_blocks * Micro::kRows, num_blocks);
    first_rows_.back() = gemm.num_rows;
    const bool keeps_sums = num_parts() > 1 || Micro::kPacks;
    const int64_t block_bytes = gemm.num_inputs * int64_t(sizeof(typename Micro::Element)) * Micro::kRows;
    const int64_t blocks_each = keeps_sums ? kKeptBlocks : std::max<int64_t>(Micro::kRowsBytes / block_bytes, 1);
    const int64_t num_groups = (num_blocks + blocks_each - 1) / blocks_each;
    first_blocks_ = shares(num_blocks, num_groups);
    if (!keeps_sums) {
      const int64_t most = Micro::kMostProducts / (Micro::kRows * 2 * kPanel * gemm.num_inputs);
      // A pair that two threads share moves from cache to cache.
      const int64_t together = num_groups == 1 ? num_blocks : 1;
      starts_ = ShrinkingItems(num_pairs_ * num_blocks, num_threads, most, together).starts();
      return;
    }
    const int64_t pairs_each = std::min((num_pairs_ + num_threads - 1) / num_threads, kKeptPairs);
    for (int64_t group = 0; group < num_groups; ++group)
      for (int64_t pair = 0; pair < num_pairs_; pair += pairs_each)
        starts_.push_back(first_block(group) * num_pairs_ + pair * (first_block(group + 1) - first_block(group)));
    starts_.push_back(num_pairs_ * num_blocks);
  }

  int64_t num_items() const { return int64_t(starts_.size()) - 1; }
  int64_t start(int64_t item) const { return starts_[size_t(item)]; }
  int64_t num_parts() const { return int64_t(first_inputs_.size()) - 1; }
  int64_t num_pairs() const { return num_pairs_; }
  // Of a part, group or block, or the end of the one before.
  int64_t first_input(int64_t part) const { return first_inputs_[size_t(part)]; }
  int64_t first_block(int64_t group) const { return first_blocks_[size_t(group)]; }
  int64_t first_row(int64_t block) const { return first_rows_[size_t(block)]; }

  Unit unit(int64_t number) const {
    int64_t group = 0;
    while (first_block(group + 1) * num_pairs_ <= number) ++group;
    const int64_t first = first_block(group), size = first_block(group + 1) - first;
    const int64_t offset = number - first * num_pairs_;
    return {group, offset / size, first + offset % size};
  }

 private:
  // Where `count` shares of like size start, and the end of the last.
  static std::vector<int64_t> shares(int64_t total, int64_t count) {
    std::vector<int64_t> starts(size_t(count) + 1);
    for (int64_t share = 1; share <= count; ++share) starts[size_t(share)] = total * share / count;
    return starts;
  }

  int64_t num_pairs_;
  std::vector<int64_t> first_inputs_, first_blocks_, first_rows_;  // tables: a division takes as long as ten steps
  std::vector<int64_t> starts_;                                    // of the items, in units, and the end of the last
};

template <class Micro, class Epilogue>
void run_gemm(const Gemm<typename Micro::Element>& gemm, const Epilogue& epilogue, int64_t num_threads) {
  if (gemm.num_rows * gemm.num_inputs * gemm.num_outputs < Micro::kFewProducts) num_threads = 1;
  const Cut<Micro> cut(gemm, num_threads);
  const auto panels_of = [&](int64_t pair, int64_t part) {
    return gemm.panel(pair * 2) + cut.first_input(part) * kPanel;
  };
  std::mutex finishing;
  run_items(cut.num_items(), num_threads, [&](Items& items) {
    Epilogue own = epilogue;
    typename Micro::template Kernel<Epilogue> kernel(own);
    Block<typename Micro::Element> block;
    block.x_stride = gemm.x_stride, block.panel_size = gemm.panel_size();
    int64_t item = items.next(), following = -1;
    auto first = item < 0 ? typename Cut<Micro>::Unit{} : cut.unit(cut.start(item)), following_first = first;
    for (; item >= 0; item = following, first = following_first) {
      const int64_t start = cut.start(item), end = cut.start(item + 1);
      for (int64_t part = 0; part < cut.num_parts(); ++part) {
        const bool is_last_part = part + 1 == cut.num_parts();
        const int64_t input = cut.first_input(part);
        block.num_inputs = cut.first_input(part + 1) - input;
        block.is_first_part = part == 0, block.is_last_part = is_last_part;
        auto unit = first;
        for (int64_t number = start; number < end;) {
          // All blocks of the group by one pair, as far as they are the item's.
          const int64_t end_block = cut.first_block(unit.group + 1), num_left = end_block - unit.block;
          block.pair = unit.pair, block.num_panels = gemm.num_panels_of(unit.pair);
          block.panels = block.ahead = panels_of(unit.pair, part);
          block.num_blocks = std::min(num_left, end - number);
          const int64_t last = number + block.num_blocks;
          int64_t next_pair = last == end ? first.pair : unit.pair + 1 < cut.num_pairs() ? unit.pair + 1 : 0;
          int64_t next_part = part;
          if (last == end && !is_last_part) {
            ++next_part;
          } else if (last == end) {
            following = items.next(), next_part = 0;
            if (following >= 0) following_first = cut.unit(cut.start(following)), next_pair = following_first.pair;
          }
          const bool has_next = last < end || !is_last_part || following >= 0;
          if (has_next && gemm.num_panels_of(next_pair) >= block.num_panels) block.ahead = panels_of(next_pair, next_part);
          int64_t row = cut.first_row(unit.block);
          for (block.number = 0; number < last; ++number, ++block.number) {
            block.row = row, row = cut.first_row(++unit.block);
            block.num_rows = int(row - block.row);
            block.x = gemm.x + block.row * gemm.x_stride + input;
            block.index = number - start;
            kernel.multiply(block);
          }
          if (unit.block < end_block) continue;
          if (++unit.pair == cut.num_pairs()) ++unit.group, unit.pair = 0;
          unit.block = cut.first_block(unit.group);
        }
      }
    }
    kernel.finish();
    const std::lock_guard<std::mutex> alone(finishing);
    own.finish();
  });
}

}  // namespace
