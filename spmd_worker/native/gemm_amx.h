// The micro-kernels of AMX: `AmxBf16` for bfloat16, `AmxInt8` for int8, and `AmxFloat32`, for float32 in pieces of bfloat16.
//
// A block is two tiles of rows by two panels: as many sums as tiles can hold. The epilogue of a block runs row by row while
// the next block is multiplied: AMX and vector instructions execute in parallel. The lines that it will write are asked for
// before: stores become visible in order, and each would wait for its own.
#pragma once

#include <memory>

#include "amx.h"
#include "gemm_epilogues.h"

#if defined(SPMD_HAS_AMX)

namespace {

constexpr int kAmxRows = 32;  // of a block

// Prefetch of the next panels, spread over the steps of all blocks by a pair.
class Prefetch {
 public:
  template <class Element>
  Prefetch(const Block<Element>& block, int64_t num_steps, int64_t lines_a_step)
      : to_second_((block.num_panels - 1) * block.panel_size * int64_t(sizeof(Element))),
        lines_((lines_a_step + block.num_blocks - 1) / block.num_blocks) {
    const char* const first = reinterpret_cast<const char*>(block.ahead);
    end_ = first + num_steps * lines_a_step * 64;
    next_ = first + block.number * num_steps * lines_ * 64;
  }

  SPMD_INLINE_MEMBER void step() {
    for (int64_t line = 0; line < lines_ && next_ < end_; ++line, next_ += 64) {
      __builtin_prefetch(next_, 0, 2);
      __builtin_prefetch(next_ + to_second_, 0, 2);
    }
  }

 private:
  int64_t to_second_, lines_;
  const char *next_, *end_;
};

// The sums [rows][32] of the previous block, for the epilogue.
template <class Epilogue, class Sum>
struct Pending {
  Epilogue* epilogue;
  const Sum* sums;
  int64_t row, pair;
  int num_panels, num_rows, next;

  SPMD_INLINE_MEMBER void take(int count) {
    for (const int end = std::min(num_rows, next + count); next < end; ++next)
      take_row(*epilogue, row + next, pair, num_panels, sums + next * 32);
  }
};

template <class Micro, class Epilogue>
class ByTiles {
 public:
  using Element = typename Micro::Element;
  using Sum = typename Micro::Sum;

  explicit ByTiles(Epilogue& epilogue) : pending_{&epilogue, nullptr, 0, 0, 0, 0, 0} {}

  void multiply(const Block<Element>& block) {
    const int num_rows = Micro::kTransposes ? int(block.x_stride) : block.num_rows;
    if (num_rows_ != num_rows) Micro::set_up(num_rows_ = num_rows);
    if (block.num_rows > 16)
      block.num_panels == 2 ? multiply_tiles<true, true>(block) : multiply_tiles<true, false>(block);
    else
      block.num_panels == 2 ? multiply_tiles<false, true>(block) : multiply_tiles<false, false>(block);
  }

  void finish() {
    pending_.take(kAmxRows);
    _mm_sfence();  // after non-temporal stores
    if (num_rows_ > 0) amx::release();
  }

 private:
  // Sums between two parts of the inputs; allocated by the first GEMM of several parts.
  static Sum* kept_sums(int64_t index) {
    struct alignas(64) Kept {
      Sum sums[Micro::kKeptPairs * Micro::kKeptBlocks][kAmxRows * 32];
    };
    static thread_local const std::unique_ptr<Kept> kept(new Kept);
    return kept->sums[index];
  }

  // The levels of a block's tree over leaves. What is not written takes no memory.
  static Sum* kept_levels(int64_t index) {
    struct alignas(64) Kept {
      Sum sums[Micro::kKeptPairs * Micro::kKeptBlocks][kMaxLevels * kAmxRows * 32];
    };
    static thread_local const std::unique_ptr<Kept> kept(new Kept);
    return kept->sums[index];
  }

  // Whether results are stored behind this part: where there are leaves, behind the last.
  bool has_results(const Block<Element>& block) const {
    if constexpr (kHasLeaves<Epilogue>) return block.is_last_part && pending_.epilogue->is_last(block.leaf);
    return block.is_last_part;
  }

  static typename Micro::Expansion& expansion_of(const Block<Element>& block) {
    return *static_cast<typename Micro::Expansion*>(block.expansion);
  }

  // Pieces of a stored weight to expand in each step, so that the last is expanded during the last block by the pair; 0: none.
  static int64_t steps_each(const Block<Element>& block, int64_t num_steps) {
    if (block.expansion == nullptr) return 0;
    const int64_t num_blocks_left = block.num_blocks - block.number;
    return (expansion_of(block).num_left() + num_blocks_left * num_steps - 1) / (num_blocks_left * num_steps);
  }

  template <bool kTwoTiles, bool kTwoPanels>
  void multiply_tiles(const Block<Element>& block) {
    if (block.is_first_part)
      amx::zero_sums<kTwoTiles, kTwoPanels>();
    else if (!block.is_alone)  // else they are still in the tiles
      amx::load_sums<kTwoTiles, kTwoPanels>(kept_sums(block.index));
    const int64_t num_steps = (block.num_inputs + Micro::kStep - 1) / Micro::kStep;
    // With leaves there may be fewer steps than rows to take.
    const int num_taken = kHasLeaves<Epilogue> ? int((kAmxRows + num_steps - 1) / num_steps) : 2;
    // Copies, which stay in registers.
    Pending<Epilogue, Sum> pending = pending_;
    Prefetch prefetch(block, num_steps, Micro::kStep * kPanel * int64_t(sizeof(Element)) / 64);
    int64_t expected = block.row;
    const int64_t end_row = has_results(block) ? block.row + block.num_rows : block.row;
    int64_t num_each = 0;
    if constexpr (Micro::kExpandingRows > 0) num_each = steps_each(block, num_steps);
    Micro::template multiply<kTwoTiles, kTwoPanels>(block, num_steps, [&] {
      if constexpr (Micro::kExpandingRows > 0) {
        if (num_each > 0) expansion_of(block).take(num_each);
      } else {
        prefetch.step();
      }
      for (const int64_t end = std::min(expected + num_taken, end_row); expected < end; ++expected)
        pending.epilogue->expect(expected, block.pair);
      pending.take(num_taken);
    });
    pending_.next = pending.next;
    if (block.is_alone && !block.is_last_part) return;
    Sum* const to = block.is_last_part ? sums_[current_] : kept_sums(block.index);
    amx::store_sums<kTwoTiles, kTwoPanels>(to);
    if (!block.is_last_part) return;
    pending_.take(kAmxRows);
    if constexpr (Micro::kTransposes) Micro::template transpose_sums<kTwoTiles, kTwoPanels>(to);
    if constexpr (kHasLeaves<Epilogue>) {
      const bool has_tree = pending_.epilogue->gemm.leaves.count > 1;
      pending_.epilogue->begin(block.leaf, block.row, has_tree ? kept_levels(block.index) : to, kAmxRows * 32);
    }
    pending_ = {pending_.epilogue, to, block.row, block.pair, block.num_panels, block.num_rows, 0};
    current_ = 1 - current_;
  }

  int num_rows_ = 0;  // of the tile configuration
  int current_ = 0;
  Pending<Epilogue, Sum> pending_;
  alignas(64) Sum sums_[2][kAmxRows * 32];
};

template <class Micro, class ElementOf, class SumOf>
struct OfTiles {
  using Element = ElementOf;
  using Sum = SumOf;
  static constexpr int kRows = kAmxRows;
  static constexpr bool kIsEven = false;  // another number of rows needs another tile configuration
  static constexpr bool kWidens = false, kSpreads = false, kSplits = false;
  static constexpr int64_t kKeptBlocks = 8, kKeptPairs = 16;
  static void set_up(int num_rows) { amx::set_up_for(num_rows); }
  static constexpr int64_t kMaxProducts = 1 << 29;
  static constexpr bool kLeavesAreParts = true, kTransposes = false;
  static constexpr int64_t kExpandingRows = 0;
  static constexpr int64_t kCutInputs = Micro::kStep;
  using Expansion = PairExpansion;
  template <class Epilogue>
  using Kernel = ByTiles<Micro, Epilogue>;
  template <class Epilogue>
  using LeafKernel = ByTiles<Micro, Epilogue>;
};

// Steps of 64 bytes of each row by 1024 of each panel, in place; `Micro::dot` multiplies tiles.
template <class Micro, bool kTwoTiles, bool kTwoPanels, class Element, class Meanwhile>
SPMD_INLINE void multiply_in_place(const Block<Element>& block, int64_t num_steps, const Meanwhile& meanwhile) {
  constexpr int64_t kStep = 64 / sizeof(Element);
  const int64_t stride = block.x_stride * int64_t(sizeof(Element));
  const Element *x = block.x, *second_x = x + 16 * block.x_stride;
  const Element *panel = block.panels, *second_panel = panel + block.panel_size;
  for (int64_t input = 0; input < num_steps * kStep; input += kStep) {
    // Rows are streamed, panels stay in the cache.
    amx::load_passing<4>(x + input, stride);
    amx::load<6>(panel + input * kPanel, 64);
    Micro::template dot<0, 4, 6>();
    if (kTwoPanels) {
      amx::load<7>(second_panel + input * kPanel, 64);
      Micro::template dot<1, 4, 7>();
    }
    if (kTwoTiles) {
      amx::load_passing<5>(second_x + input, stride);
      Micro::template dot<2, 5, 6>();
    }
    if (kTwoTiles && kTwoPanels) Micro::template dot<3, 5, 7>();
    meanwhile();
  }
}

// A chain takes 32 inputs per step. With many rows the K loop is split, so that a part of a pair of panels stays in the
// first-level cache; with few rows memory bandwidth is the limit.
struct AmxBf16 : OfTiles<AmxBf16, uint16_t, float> {
  static constexpr int kStep = 32;
  static constexpr bool kPacks = false;
  static constexpr int64_t kKeptBlocks = 8, kKeptPairs = 8;  // the levels of leaves fit into the second-level cache
  static constexpr int64_t kRowsBytes = 1 << 20, kFewProducts = 1 << 20;
  static constexpr int64_t num_parts(int64_t num_rows, int64_t num_steps) {
    constexpr int64_t kFewRows = 4 * kAmxRows, kMaxSteps = 20;
    return num_rows <= kFewRows ? 1 : (num_steps + kMaxSteps - 1) / kMaxSteps;
  }
  template <int kSum, int kLeft, int kRight>
  SPMD_INLINE void dot() {
    amx::multiply<kSum, kLeft, kRight>();
  }
  template <bool kTwoTiles, bool kTwoPanels, class Meanwhile>
  SPMD_INLINE void multiply(const Block<uint16_t>& block, int64_t num_steps, const Meanwhile& meanwhile) {
    multiply_in_place<AmxBf16, kTwoTiles, kTwoPanels>(block, num_steps, meanwhile);
  }
};

#if defined(SPMD_HAS_AMX_INT8)
struct AmxInt8 : OfTiles<AmxInt8, int8_t, int32_t> {
  static constexpr int kStep = kByteStep;
  static constexpr bool kPacks = false;
  static constexpr int64_t kRowsBytes = 512 << 10, kFewProducts = 1 << 19;
  static constexpr int64_t num_parts(int64_t, int64_t) { return 1; }
  template <int kSum, int kLeft, int kRight>
  SPMD_INLINE void dot() {
    amx::multiply_bytes<kSum, kLeft, kRight>();
  }
  template <bool kTwoTiles, bool kTwoPanels, class Meanwhile>
  SPMD_INLINE void multiply(const Block<int8_t>& block, int64_t num_steps, const Meanwhile& meanwhile) {
    multiply_in_place<AmxInt8, kTwoTiles, kTwoPanels>(block, num_steps, meanwhile);
  }
};
#endif

// A float is the sum of three bfloat16: its first 8 bits, the next 8, and the rest. Of the nine products of the pieces of
// two floats, the six largest are summed; the others are below the precision of float32. So results are as exact as those
// of float32 instructions, in half their time. Operands are split just before use, a part of the inputs at a time: a
// weight takes no extra memory.
struct AmxFloat32 : OfTiles<AmxFloat32, float, float> {
  static constexpr int kStep = 32, kPieces = 3;
  static constexpr int kMaxSteps = 4;  // of a split pair of panels that fits into the first-level cache
  static constexpr bool kPacks = true;
  static constexpr int64_t kRowsBytes = 0, kFewProducts = 1 << 18;
  static constexpr int64_t num_parts(int64_t, int64_t num_steps) { return (num_steps + kMaxSteps - 1) / kMaxSteps; }

  // Split operands of one thread: a part of the rows of a group and of a pair of panels.
  struct alignas(64) Pieces {
    uint16_t rows[kMaxSteps][kPieces][kKeptBlocks][kAmxRows][kStep];
    uint16_t weight[kMaxSteps][kPieces][2][kPanel][kStep];
  };

  // The upper halves of 32 consecutive floats.
  SPMD_INLINE void store_upper_halves(uint16_t* to, Words first, Words second) {
    alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i upper = _mm512_load_si512(kUpper);
    _mm512_store_si512(to, _mm512_permutex2var_epi16((__m512i)first, upper, (__m512i)second));
  }

  SPMD_INLINE Words nearest_half(Floats x) { return ((Words)x + 0x8000u) & 0xffff0000u; }

  // 32 floats -> three pieces, `distance` elements apart; the third has 8 bits.
  SPMD_INLINE void split(const float* from, uint16_t* to, int64_t distance) {
    Floats first = load<Floats>(from), second = load<Floats>(from + 16);
    for (int piece = 0; piece < kPieces - 1; ++piece, to += distance) {
      const Words first_part = nearest_half(first), second_part = nearest_half(second);
      store_upper_halves(to, first_part, second_part);
      first = first - (Floats)first_part, second = second - (Floats)second_part;
    }
    store_upper_halves(to, (Words)first, (Words)second);
  }

  static Pieces& split_operands(const Block<float>& block, int64_t num_steps) {
    static thread_local const std::unique_ptr<Pieces> kept(new Pieces);
    Pieces& pieces = *kept;
    // The item's first pair splits the rows for all of them, and a pair's first block the panels.
    if (block.index == block.number)
      for (int row = 0; row < block.num_rows; ++row)
        for (int64_t step = 0; step < num_steps; ++step)
          split(
              block.x + row * block.x_stride + step * kStep, pieces.rows[step][0][block.number][row],
              kKeptBlocks * kAmxRows * kStep);
    if (block.number == 0)
      for (int panel = 0; panel < block.num_panels; ++panel)
        for (int64_t row = 0; row < num_steps * kPanel; ++row)
          split(
              block.panels + panel * block.panel_size + row * kStep,
              pieces.weight[row / kPanel][0][panel][row % kPanel], 2 * kPanel * kStep);
    return pieces;
  }

  template <bool kTwoTiles, bool kTwoPanels, class Meanwhile>
  SPMD_INLINE void multiply(const Block<float>& block, int64_t num_steps, const Meanwhile& meanwhile) {
    const Pieces& pieces = split_operands(block, num_steps);
    for (int64_t step = 0; step < num_steps; ++step) {
      const auto take_rows = [&](int piece) {
        amx::load_passing<4>(pieces.rows[step][piece][block.number][0], 64);
        if (kTwoTiles) amx::load_passing<5>(pieces.rows[step][piece][block.number][16], 64);
      };
      const auto take_weight = [&](int piece) {
        amx::load<6>(pieces.weight[step][piece][0], 64);
        if (kTwoPanels) amx::load<7>(pieces.weight[step][piece][1], 64);
      };
      const auto multiply_pieces = [] {
        amx::multiply<0, 4, 6>();
        if (kTwoPanels) amx::multiply<1, 4, 7>();
        if (kTwoTiles) amx::multiply<2, 5, 6>();
        if (kTwoTiles && kTwoPanels) amx::multiply<3, 5, 7>();
      };
      // All pairs of pieces but the three smallest; rows, which come from a slower cache, are loaded once.
      take_rows(2), take_weight(0);
      multiply_pieces();
      take_rows(1);
      multiply_pieces();
      take_weight(1);
      multiply_pieces();
      take_rows(0);
      multiply_pieces();
      take_weight(2);
      multiply_pieces();
      take_weight(0);
      multiply_pieces();
      meanwhile();
    }
  }
};

}  // namespace

#endif
