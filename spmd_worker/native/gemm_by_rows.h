// Micro-kernels whose block of sums is in vector registers, with one function for each number of rows.
#pragma once

#include <array>
#include <memory>
#include <utility>

#include "gemm_epilogues.h"

namespace {

// Stores the sums [rows][32] of a block, so that all epilogues that read memory share one function.
template <class Sum>
struct InMemory {
  int64_t first_row;
  Sum* sums;

  template <class Vector>
  SPMD_INLINE_MEMBER void take(int64_t row, int64_t, int num_panels, const Vector* of_row) const {
    for (int v = 0; v < num_panels * kPanelVectors; ++v) store(sums + (row - first_row) * 32 + v * kLanes, of_row[v]);
  }
};

// Stores the sums of a block, each row added to what is on its left: rows are `left_stride` apart.
struct AddInMemory {
  float* sums;
  const float* left;
  int64_t left_stride;

  template <int kPanels>
  SPMD_INLINE_MEMBER void take(int row, const Floats* of_row) {
    for (int v = 0; v < kPanels * kPanelVectors; ++v)
      store(sums + row * 32 + v * kLanes, load<Floats>(left + v * kLanes) + of_row[v]);
    left += left_stride;
  }
};

template <class Micro, class Epilogue>
class ByRows {
 public:
  explicit ByRows(Epilogue& epilogue) : epilogue_(epilogue) {}

  void multiply(Block<typename Micro::Element>& block) {
    if constexpr (Micro::kSplits) block.kept = block.is_first_part && block.is_last_part ? nullptr : kept_sums(block.index);
    if constexpr (Micro::kHasRegisters && Epilogue::kTakesRegisters) {
      run(block, epilogue_);
    } else {
      alignas(64) typename Micro::Sum sums[Micro::kRows * 32];
      run(block, InMemory<typename Micro::Sum>{block.row, sums});
      if (!block.is_last_part) return;
      for (int row = 0; row < block.num_rows; ++row)
        take_row(epilogue_, block.row + row, block.pair, block.num_panels, sums + row * 32);
    }
  }
  void finish() const {}

  template <class Direct>
  static void run(const Block<typename Micro::Element>& block, const Direct& direct) {
    (block.num_panels == 2 ? kFunctions<Direct, 2> : kFunctions<Direct, 1>)[size_t(block.num_rows) - 1](block, direct);
  }

 private:
  // Of the block of this number in the thread's item: room for two vectors of each panel of 16 floats.
  static float* kept_sums(int64_t index) {
    struct Kept {
      alignas(64) float sums[Micro::kKeptPairs * Micro::kKeptBlocks][Micro::kRows * 64];
    };
    static thread_local const std::unique_ptr<Kept> kept(new Kept);
    return kept->sums[index];
  }

  template <class Direct>
  using Function = void (*)(const Block<typename Micro::Element>&, const Direct&);

  template <class Direct, int kPanels, int... kRows>
  static constexpr std::array<Function<Direct>, sizeof...(kRows)> functions_of(std::integer_sequence<int, kRows...>) {
    return {Micro::template multiply<kRows + 1, kPanels, Direct>...};
  }
  template <class Direct, int kPanels>
  static constexpr auto kFunctions = functions_of<Direct, kPanels>(std::make_integer_sequence<int, Micro::kRows>());

  Epilogue& epilogue_;
};

// The same in leaves. The sums of each go from registers to their level of the tree, in the first-level cache if one part; where
// there are registers, they are added to the left subtree on their way.
template <class Micro, class Epilogue>
class LeavesByRows {
 public:
  using BlockOf = Block<typename Micro::Element>;

  explicit LeavesByRows(Epilogue& epilogue) : epilogue_(epilogue) {}

  // `block` is changed and restored: a copy would cost one per cent.
  void multiply(BlockOf& block) {
    alignas(64) float own[kMaxLevels * kLevelSize], starts[2][32];
    set_starts(block, starts);
    const Leaves& leaves = epilogue_.gemm.leaves;
    const int64_t num_inputs = block.num_inputs;
    float* levels = own;
    if constexpr (Micro::kSplits) levels = block.is_first_part && block.is_last_part ? own : kept_levels(block.index);
    for (int64_t leaf = block.leaf, left = num_inputs; left > 0; ++leaf, left -= block.num_inputs) {
      float* sums = levels + Epilogue::level(leaf) * kLevelSize;
      int num_additions = Epilogue::num_additions(leaf);
      block.num_inputs = leaves.ends[leaf] - leaves.first_input(leaf);
      if constexpr (Micro::kHasRegisters) {
        AddInMemory to = {sums, starts[leaf == 0], 0};
        if (num_additions > 0) --num_additions, sums -= kLevelSize, to = {sums, sums, 32};
        ByRows<Micro, Epilogue>::run(block, to);
      } else {
        ByRows<Micro, Epilogue>::run(block, InMemory<float>{block.row, sums});
        if (epilogue_.has_bias(leaf)) add_bias(block, starts[1], sums);
      }
      advance(block, block.num_inputs);
      if (epilogue_.is_last(leaf))
        store_results(block, sums, num_additions);
      else if (num_additions > 0)
        add_levels(block.num_rows, 2, sums, num_additions, sums - num_additions * kLevelSize, 32);
    }
    advance(block, -num_inputs);
    block.num_inputs = num_inputs;
  }
  void finish() const {}

 private:
  static constexpr int64_t kLevelSize = Micro::kRows * 32;

  // Of the block of this number in the thread's item, from part to part.
  static float* kept_levels(int64_t index) {
    struct Kept {
      alignas(64) float levels[Micro::kKeptPairs * Micro::kKeptBlocks][kMaxLevels * kLevelSize];
    };
    static thread_local const std::unique_ptr<Kept> kept(new Kept);
    return kept->levels[index];
  }

  // One pointer after another: compilers would read two as a vector, and it waits for all earlier stores if they were
  // stored one by one.
  SPMD_INLINE void advance(BlockOf& block, int64_t num_inputs) {
    block.x += num_inputs * (Micro::kWidens ? 2 : 1);
    asm volatile("" ::: "memory");
    block.panels += num_inputs * kPanel;
    asm volatile("" ::: "memory");
    block.ahead += num_inputs * kPanel;
  }

  // What leaves are added to: nothing, which is minus zero; and the bias, or nothing, for the first.
  SPMD_INLINE_MEMBER void set_starts(const BlockOf& block, float (&starts)[2][32]) const {
    for (int v = 0; v < 2 * kPanelVectors; ++v) {
      const bool has_bias = epilogue_.has_bias(0) && v < block.num_panels * kPanelVectors;
      store(starts[0] + v * kLanes, -Floats{});
      store(
          starts[1] + v * kLanes, has_bias ? load_floats(epilogue_.bias + block.pair * 32 + v * kLanes) : -Floats{});
    }
  }

  static void add_bias(const BlockOf& block, const float* bias, float* sums) {
    for (int64_t at = 0; at < block.num_rows * 32; at += kLanes)
      store(sums + at, load<Floats>(sums + at) + load<Floats>(bias + at % 32));
  }

  void store_results(const BlockOf& block, const float* sums, int num_levels) const {
    const int64_t stride = epilogue_.part.num_outputs, first = block.row * stride + block.pair * 32;
    if (epilogue_.part.to != nullptr)
      add_levels(block.num_rows, block.num_panels, sums, num_levels, epilogue_.part.to + first, stride);
    else
      add_levels(block.num_rows, block.num_panels, sums, num_levels, epilogue_.rounded.to + first, stride);
  }

  // Sums [rows][32] and those of the levels below, one after another; as many as eight leaves have in a loop without
  // branches.
  template <class To>
  static void add_levels(
      int num_rows, int num_panels, const float* sums, int num_levels, To* to, int64_t to_stride) {
    if (num_levels == 0) return add_levels_of<0>(num_rows, num_panels, sums, 0, to, to_stride);
    if (num_levels == 1) return add_levels_of<1>(num_rows, num_panels, sums, 1, to, to_stride);
    if (num_levels == 2) return add_levels_of<2>(num_rows, num_panels, sums, 2, to, to_stride);
    add_levels_of<-1>(num_rows, num_panels, sums, num_levels, to, to_stride);
  }
  template <int kNumLevels, class To>
  static void add_levels_of(
      int num_rows, int num_panels, const float* sums, int num_levels, To* to, int64_t to_stride) {
    const int count = kNumLevels < 0 ? num_levels : kNumLevels;
    for (int row = 0; row < num_rows; ++row, sums += 32, to += to_stride)
      for (int lane = 0; lane < num_panels * kPanel; lane += kLanes) {
        Floats total = load<Floats>(sums + lane);
        for (int level = 1; level <= count; ++level) total = load<Floats>(sums + lane - level * kLevelSize) + total;
        store_floats(to + lane, total);
      }
  }

  Epilogue& epilogue_;
};

// Expands the next part of a stored weight, if there is one, before as many of this one: the number of inputs left behind them.
SPMD_INLINE int64_t expand_some(const Block<uint16_t>& block, int num_panels, int64_t num_left) {
  if (block.expansion == nullptr) return 0;
  static_cast<PairExpansion*>(block.expansion)->take(num_panels);
  return num_left - kBlockInputs;
}

// Common properties of these micro-kernels.
template <class Micro, class ElementOf, class SumOf, int kRowsOf>
struct OfVectors {
  using Element = ElementOf;
  using Sum = SumOf;
  static constexpr bool kIsInt8 = sizeof(Element) == 1;
  static constexpr int kRows = kRowsOf, kStep = 32;
  static constexpr bool kIsEven = true, kPacks = false, kWidens = false;
  static constexpr bool kSpreads = kRows > 8;  // places of a set of the first-level cache
  static constexpr int64_t kRowsBytes = 512 << 10, kFewProducts = kIsInt8 ? 1 << 19 : 1 << 18;
  static constexpr int64_t kMaxProducts = kIsInt8 ? 1 << 27 : 1 << 26;
  static constexpr bool kSplits = false;
  static constexpr int64_t kKeptBlocks = 16, kKeptPairs = 4;
  static constexpr int64_t num_parts(int64_t num_rows, int64_t num_steps) {
    if (!Micro::kSplits || num_rows <= kRows) return 1;
    constexpr int64_t kMaxSteps = Micro::kPanelsBytes / int64_t(2 * kPanel * kStep * sizeof(Element));
    return (num_steps + kMaxSteps - 1) / kMaxSteps;
  }
  static constexpr int64_t kPanelsBytes = 128 << 10;
  static constexpr bool kLeavesAreParts = false, kTransposes = false;
  static constexpr int64_t kExpandingRows = 0;
  static constexpr int64_t kCutInputs = kStep;
  using Expansion = PairExpansion;
  template <class Epilogue>
  using Kernel = ByRows<Micro, Epilogue>;
  template <class Epilogue>
  using LeafKernel = LeavesByRows<Micro, Epilogue>;
};

template <class Whole, class From>
SPMD_INLINE Whole bits_at(const From* from) {
  Whole bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

}  // namespace
