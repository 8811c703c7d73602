// Products of float32 rows with a packed weight by the AMX unit, which multiplies bfloat16.
//
// A float is the sum of three bfloat16: its first 8 bits, the next 8, and what is left. Of the nine gemms of the pieces
// of two floats, the six argmax are summed; the others are below what a float32 can hold of the result. So results are
// as exact as those of float32 instructions, in half their time.
//
// Every element of the result is one chain of steps over the inputs, 32 at a time in ascending order, summed in float,
// then the bias. The chain is the same however many rows there are and whoever computes them.
//
// A weight [outputs, inputs] is packed as [outputs / 16][inputs / 2][16][2] floats and split where it is used: it takes no
// more memory than it did. A gated gemm has a panel of gates beside each panel of what they open.

#include <algorithm>
#include <cstdint>
#include <memory>

#include "exports.h"
#include "amx.h"
#include "gemm.h"
#include "team.h"

#if defined(SPMD_HAS_AMX)

namespace {

constexpr int kPieces = 3;
constexpr int kTile = 16 * 32;                // elements
constexpr int kMostSteps = 4;                 // of a split pair of panels that stay in the first-level cache
constexpr int64_t kBlocks = 8, kPairs = 16;   // of sums that are kept in the second-level cache between two parts
constexpr int64_t kFewProducts = 1 << 18;     // below this a second thread costs more than it brings

using Product = ProductOf<float>;

// The upper halves of 32 floats in a row.
SPMD_INLINE void store_upper_halves(uint16_t* to, Words first, Words second) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i upper = _mm512_load_si512(kUpper);
  _mm512_store_si512(to, _mm512_permutex2var_epi16((__m512i)first, upper, (__m512i)second));
}

SPMD_INLINE Words nearest_half(Floats x) { return ((Words)x + 0x8000u) & 0xffff0000u; }

// 32 floats -> three pieces, `distance` elements apart; what is left after two has 8 bits.
SPMD_INLINE void split(const float* from, uint16_t* to, int64_t distance) {
  Floats first = load<Floats>(from), second = load<Floats>(from + 16);
  for (int piece = 0; piece < kPieces - 1; ++piece, to += distance) {
    const Words first_part = nearest_half(first), second_part = nearest_half(second);
    store_upper_halves(to, first_part, second_part);
    first = first - (Floats)first_part, second = second - (Floats)second_part;
  }
  store_upper_halves(to, (Words)first, (Words)second);
}

// What one thread computes with; kept from gemm to gemm.
struct alignas(64) Workspace {
  uint16_t rows[kMostSteps][kPieces][kBlocks * 2][kTile];
  uint16_t weight[kMostSteps][kPieces][2][kTile];
  float sums[kPairs][kBlocks][kBlockRows * 32];  // [32][32]

  static Workspace& of_this_thread() {
    static thread_local const std::unique_ptr<Workspace> kept(new Workspace);
    return *kept;
  }
};

// A part of the inputs, and of the chains of steps.
struct Part {
  int64_t first_step, num_steps;
  bool is_first, is_last;
};

// What of the weight to fetch meanwhile, a little each step.
struct Ahead {
  const char* panels[2];
  int64_t next, end;
  int lines_a_step;

  SPMD_INLINE_MEMBER void fetch() {
    for (int line = 0; line < lines_a_step && next < end; ++line, next += 64) {
      __builtin_prefetch(panels[0] + next, 0, 2);
      __builtin_prefetch(panels[1] + next, 0, 2);
    }
  }
};

template <bool kTwoTiles, bool kTwoPanels>
SPMD_INLINE void multiply_pieces() {
  amx::multiply<0, 4, 6>();
  if (kTwoPanels) amx::multiply<1, 4, 7>();
  if (kTwoTiles) amx::multiply<2, 5, 6>();
  if (kTwoTiles && kTwoPanels) amx::multiply<3, 5, 7>();
}

// One part of the steps of a block of up to 32 rows by one panel or two; sums [32][32] are taken from and put to `sums`.
template <bool kTwoTiles, bool kTwoPanels>
void multiply_block(const Workspace& workspace, int64_t block, const Part& part, float* sums, Ahead& next) {
  if (part.is_first)
    amx::zero_sums<kTwoTiles, kTwoPanels>();
  else
    amx::load_sums<kTwoTiles, kTwoPanels>(sums);
  Ahead ahead = next;  // a copy that stays in registers
  for (int64_t step = 0; step < part.num_steps; ++step) {
    const auto take_rows = [&](int piece) {
      amx::load_passing<4>(workspace.rows[step][piece][block * 2], 64);
      if (kTwoTiles) amx::load_passing<5>(workspace.rows[step][piece][block * 2 + 1], 64);
    };
    const auto take_weight = [&](int piece) {
      amx::load<6>(workspace.weight[step][piece][0], 64);
      if (kTwoPanels) amx::load<7>(workspace.weight[step][piece][1], 64);
    };
    // All pairs of pieces but the three smallest; rows, which come from farther away, are taken once.
    take_rows(2), take_weight(0);
    multiply_pieces<kTwoTiles, kTwoPanels>();
    take_rows(1);
    multiply_pieces<kTwoTiles, kTwoPanels>();
    take_weight(1);
    multiply_pieces<kTwoTiles, kTwoPanels>();
    take_rows(0);
    multiply_pieces<kTwoTiles, kTwoPanels>();
    take_weight(2);
    multiply_pieces<kTwoTiles, kTwoPanels>();
    take_weight(0);
    multiply_pieces<kTwoTiles, kTwoPanels>();
    ahead.fetch();
  }
  next = ahead;
  amx::store_sums<kTwoTiles, kTwoPanels>(sums);
}

// The sums of a block become results.
void write_block(const Product& gemm, int64_t row, int64_t end_row, int64_t pair, bool has_two, const float* sums) {
  const int64_t half = gemm.num_outputs / 2, column = gemm.is_gated ? pair * kPanel : pair * 2 * kPanel;
  const int64_t stride = gemm.is_gated ? half : gemm.num_outputs;
  Floats first_bias{}, second_bias{};
  if (gemm.bias != nullptr) {
    first_bias = load<Floats>(gemm.bias + column);
    if (has_two) second_bias = load<Floats>(gemm.bias + (gemm.is_gated ? half + column : column + kPanel));
  }
  for (; row < end_row; ++row, sums += 32) {
    float* to = gemm.to + row * stride + column;
    const Floats first = load<Floats>(sums) + first_bias;
    if (!gemm.is_gated) store(to, first);
    if (!has_two) continue;
    const Floats second = load<Floats>(sums + 16) + second_bias;
    gemm.is_gated ? store(to, silu(first) * second) : store(to + kPanel, second);
  }
}

// Some rows by some pairs of panels, part by part of the inputs.
struct Item {
  int64_t row, end_row, pair, end_pair;
};

void split_rows(const Product& gemm, const Item& item, const Part& part, Workspace& workspace) {
  for (int64_t row = item.row; row < item.end_row; ++row) {
    const float* from = gemm.x + row * gemm.x_stride + part.first_step * kStep;
    uint16_t* to = workspace.rows[0][0][0] + (row - item.row) * kStep;
    for (int64_t step = 0; step < part.num_steps; ++step)
      split(from + step * kStep, to + step * kPieces * kBlocks * 2 * kTile, kBlocks * 2 * kTile);
  }
}

void split_panel(const Product& gemm, int64_t panel, const Part& part, uint16_t* to) {
  const float* from = gemm.panel(panel) + part.first_step * kStep * kPanel;
  for (int64_t step = 0; step < part.num_steps; ++step, to += kPieces * 2 * kTile)
    for (int64_t row = 0; row < 16; ++row, from += 32) split(from, to + row * 32, 2 * kTile);
}

struct Worker {
  Workspace& workspace = Workspace::of_this_thread();
  int unit_rows = 0;  // how many rows its unit is set up for

  void run(const Product& gemm, const Item& item) {
    const int64_t num_steps = gemm.num_inputs / kStep, num_parts = (num_steps + kMostSteps - 1) / kMostSteps;
    for (int64_t number = 0; number < num_parts; ++number) {
      const int64_t first = num_steps * number / num_parts, end = num_steps * (number + 1) / num_parts;
      const Part part{first, end - first, number == 0, number + 1 == num_parts};
      split_rows(gemm, item, part, workspace);
      for (int64_t pair = item.pair; pair < item.end_pair; ++pair) run_pair(gemm, item, part, pair);
    }
  }

  void run_pair(const Product& gemm, const Item& item, const Part& part, int64_t pair) {
    const bool has_two = pair * 2 + 1 < gemm.num_panels();
    split_panel(gemm, pair * 2, part, workspace.weight[0][0][0]);
    if (has_two) split_panel(gemm, pair * 2 + 1, part, workspace.weight[0][0][1]);
    const int64_t num_blocks = (item.end_row - item.row + kBlockRows - 1) / kBlockRows;
    Ahead ahead = fetching(gemm, item, part, pair);
    ahead.lines_a_step = int((part.num_steps * 32 + num_blocks * part.num_steps - 1) / (num_blocks * part.num_steps));
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t row = item.row + block * kBlockRows, end_row = std::min(item.end_row, row + kBlockRows);
      float* sums = workspace.sums[pair - item.pair][block];
      if (unit_rows != end_row - row) amx::set_up_for(unit_rows = int(end_row - row));
      if (unit_rows > 16)
        has_two ? multiply_block<true, true>(workspace, block, part, sums, ahead)
                : multiply_block<true, false>(workspace, block, part, sums, ahead);
      else
        has_two ? multiply_block<false, true>(workspace, block, part, sums, ahead)
                : multiply_block<false, false>(workspace, block, part, sums, ahead);
      if (part.is_last) write_block(gemm, row, end_row, pair, has_two, sums);
    }
  }

  // The part that will be split next.
  static Ahead fetching(const Product& gemm, const Item& item, const Part& part, int64_t pair) {
    const bool is_same_part = pair + 1 < item.end_pair;
    const int64_t next = is_same_part ? pair + 1 : item.pair, last = gemm.num_panels() - 1;
    const int64_t first = (part.first_step + (is_same_part ? 0 : part.num_steps)) * kStep * kPanel;
    const int64_t count = is_same_part || !part.is_last ? part.num_steps * kStep * kPanel : 0;
    const auto begin = [&](int64_t panel) { return reinterpret_cast<const char*>(gemm.panel(std::min(panel, last)) + first); };
    return {{begin(next * 2), begin(next * 2 + 1)}, 0, count * int64_t(sizeof(float)), 0};
  }
};

void multiply_all(const Product& gemm, int num_threads) {
  const int64_t num_pairs = gemm.num_pairs(), rows_each = kBlocks * kBlockRows;
  const int64_t num_row_groups = (gemm.num_rows + rows_each - 1) / rows_each;
  const int64_t pairs_each = std::min((num_pairs + num_threads - 1) / num_threads, kPairs);
  const int64_t items_a_group = (num_pairs + pairs_each - 1) / pairs_each;
  const bool is_small = gemm.num_rows * gemm.num_inputs * gemm.num_outputs < kFewProducts;
  run_by_team(num_row_groups * items_a_group, is_small ? 1 : num_threads, [&](Items& items) {
    Worker worker;
    for (int64_t number = items.next(); number >= 0; number = items.next()) {
      const int64_t row = number / items_a_group * rows_each, pair = number % items_a_group * pairs_each;
      worker.run(
          gemm, {row, std::min(gemm.num_rows, row + rows_each), pair, std::min(num_pairs, pair + pairs_each)});
    }
    if (worker.unit_rows > 0) amx::release();
  });
}

}  // namespace

#endif

// To be called only where `spmd_packs_float32` says so. `num_inputs` is a multiple of 32, `num_outputs` of 16, or of 32
// where the gemm `is_gated`: then `num_outputs` counts gates and what they open, and `to` has half as many columns.
extern "C" void spmd_gemm_float32(
    const float* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const float* packed, int64_t num_outputs,
    const float* bias, float* to, int64_t is_gated, int64_t num_threads) {
  const ProductOf<float> gemm = {x, x_stride, num_rows, num_inputs, packed, num_outputs, bias, to, is_gated != 0};
#if defined(SPMD_HAS_AMX)
  if (amx::is_granted()) return multiply_all(gemm, int(num_threads));
#endif
  multiply_by_vectors(gemm, nullptr, int(num_threads));
}

// Whether weights of this dtype are packed for the gemms of this library.
extern "C" int64_t spmd_packs_float32() {
#if defined(SPMD_AVX512) || defined(SPMD_AVX2)
  return 1;
#else
  return amx::is_granted();
#endif
}
