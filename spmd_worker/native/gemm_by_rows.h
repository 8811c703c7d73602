// Micro-kernels whose block of sums is in vector registers, with one function for each number of rows.
#pragma once

#include <array>
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

template <class Micro, class Epilogue>
class ByRows {
 public:
  explicit ByRows(Epilogue& epilogue) : epilogue_(epilogue) {}

  void multiply(const Block<typename Micro::Element>& block) {
    if constexpr (Micro::kHasRegisters && Epilogue::kTakesRegisters) {
      run(block, epilogue_);
    } else {
      alignas(64) typename Micro::Sum sums[Micro::kRows * 32];
      run(block, InMemory<typename Micro::Sum>{block.row, sums});
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

// The same in leaves: the sums of each go from registers to their level of the tree.
template <class Micro, class Epilogue>
class LeavesByRows {
 public:
  explicit LeavesByRows(Epilogue& epilogue) : epilogue_(epilogue) {}

  void multiply(const Block<typename Micro::Element>& block) {
    constexpr int64_t kLevelSize = Micro::kRows * 32;
    alignas(64) float levels[kMaxLevels * kLevelSize];
    const Leaves& leaves = epilogue_.gemm.leaves;
    Block<typename Micro::Element> part = block;
    for (int64_t leaf = 0; leaf < leaves.count; ++leaf) {
      float* const sums = levels + Epilogue::level(leaf) * kLevelSize;
      part.num_inputs = leaves.ends[leaf] - leaves.first_input(leaf);
      ByRows<Micro, Epilogue>::run(part, InMemory<float>{block.row, sums});
      part.x += part.num_inputs, part.panels += part.num_inputs * kPanel, part.ahead += part.num_inputs * kPanel;
      if (epilogue_.is_complete(leaf)) continue;
      epilogue_.begin(leaf, block.row, levels, kLevelSize);
      for (int row = 0; row < block.num_rows; ++row)
        take_row(epilogue_, block.row + row, block.pair, block.num_panels, sums + row * 32);
    }
  }
  void finish() const {}

 private:
  Epilogue& epilogue_;
};

// Common properties of these micro-kernels.
template <class Micro, class ElementOf, class SumOf, int kRowsOf>
struct OfVectors {
  using Element = ElementOf;
  using Sum = SumOf;
  static constexpr bool kIsInt8 = sizeof(Element) == 1;
  static constexpr int kRows = kRowsOf, kStep = 32;
  static constexpr bool kIsEven = true, kPacks = false;
  static constexpr int64_t kRowsBytes = 512 << 10, kFewProducts = kIsInt8 ? 1 << 19 : 1 << 18;
  static constexpr int64_t kMaxProducts = kIsInt8 ? 1 << 27 : 1 << 26;
  static constexpr int64_t num_parts(int64_t, int64_t) { return 1; }
  static constexpr bool kLeavesAreParts = false;
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
