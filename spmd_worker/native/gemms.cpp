// Products of bfloat16 rows with a packed weight by the AMX unit.
//
// Every element of the result is one chain of steps over the inputs, 32 at a time in ascending order, summed in float,
// then the bias, then one rounding. The chain is the same however many rows there are and whoever computes them.
//
// A weight [outputs, inputs] is packed as [outputs / 16][inputs / 2][16][2]: panels of 16 outputs, each read from
// beginning to end.
//
// A gated gemm has a panel of gates beside each panel of what they open: silu(gate) * up leaves the sums, rounded where
// kernels/reference.py rounds, and the gemm itself is never written down. Nor is it where only the argmax of each row
// is wanted.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>

#include "exports.h"
#include "argmax.h"
#include "amx.h"
#include "gemm.h"
#include "team.h"

#if defined(SPMD_HAS_AMX)

namespace {

constexpr int kMostSteps = 20;                // of a pair of panels that stay in the first-level cache while rows pass
constexpr int64_t kRowsBytes = 1 << 20;       // rows that stay in the second-level cache while all panels pass
constexpr int64_t kPassingBytes = 8 << 20;    // of results
constexpr int64_t kFewRows = 4 * kBlockRows;
constexpr int64_t kFewProducts = 1 << 20;     // below this a second thread costs more than it brings
constexpr int64_t kKeptBlocks = 8, kKeptPairs = 16;  // of sums that are kept in the second-level cache between two parts

using Product = ProductOf<uint16_t>;

// Two vectors -> 32 bfloat16 in a row.
SPMD_INLINE __m512i narrowed(Floats first, Floats second) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

SPMD_INLINE __m256i narrowed(Floats floats) { return (__m256i)_mm512_cvtneps_pbh((__m512)floats); }

SPMD_INLINE Floats rounded_by_amx(Floats floats) {
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrowed(floats)), 16);
}

// The sums [rows][32] of a block, which become results row by row while the next block is multiplied: the unit and the
// vector instructions work side by side.
struct Finished {
  const float* sums = nullptr;
  uint16_t* to = nullptr;
  int64_t stride = 0;
  LaneArgmax* argmax = nullptr;  // or where results go instead
  int64_t first_row = 0, first_panel = 0, count = 0;
  Floats first_bias{}, second_bias{};
  int num_rows = 0, next = 0;
  bool is_pair = false, is_gated = false, passes_caches = false;

  SPMD_INLINE_MEMBER void write_some(int count) {
    for (const int end = std::min(num_rows, next + count); next < end; ++next) write_row(next);
  }

  SPMD_INLINE_MEMBER void write_row(int row) const {
    const Floats first = load<Floats>(sums + row * 32) + first_bias;
    if (argmax != nullptr) return take_row(row, first);
    if (!is_pair) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + row * stride), narrowed(first));
    const Floats second = load<Floats>(sums + row * 32 + 16) + second_bias;
    if (passes_caches) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to + row * stride), narrowed(first, second));
    if (!is_gated) return _mm512_storeu_si512(to + row * stride, narrowed(first, second));
    const Floats opened = rounded_by_amx(silu(rounded_by_amx(first))) * rounded_by_amx(second);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + row * stride), narrowed(opened));
  }

  SPMD_INLINE_MEMBER void take_row(int row, Floats first) const {
    take_panel(row, first_panel, first);
    if (is_pair) take_panel(row, first_panel + 1, load<Floats>(sums + row * 32 + 16) + second_bias);
  }

  SPMD_INLINE_MEMBER void take_panel(int row, int64_t panel, Floats values) const {
    values = rounded_by_amx(values);
    if ((panel + 1) * kPanel > count)
      values = lane_numbers() + int(panel * kPanel) < int(count) ? values : broadcast(-kInfinity);
    argmax->take(first_row + row, int(panel), values);
  }
};

Finished finished(const Product& gemm, int64_t row, int64_t panel, bool is_pair, int num_rows, const float* sums) {
  const int64_t half = gemm.num_outputs / 2, column = gemm.is_gated ? panel / 2 * kPanel : panel * kPanel;
  Finished block;
  block.sums = sums, block.num_rows = num_rows, block.is_pair = is_pair, block.is_gated = gemm.is_gated;
  block.stride = gemm.is_gated ? half : gemm.num_outputs;
  block.to = gemm.to + row * block.stride + column;
  // Whole lines of a result that no cache would hold until somebody reads it.
  block.passes_caches = is_pair && !gemm.is_gated && gemm.num_rows * gemm.num_outputs * 2 > kPassingBytes &&
                        reinterpret_cast<uintptr_t>(block.to) % 64 == 0 && block.stride % 32 == 0;
  if (gemm.bias == nullptr) return block;
  block.first_bias = load_floats(gemm.bias + column);
  if (is_pair) block.second_bias = load_floats(gemm.bias + (gemm.is_gated ? half + column : column + kPanel));
  return block;
}

// What of the weight to fetch meanwhile, a little each step: parts of two panels.
struct Ahead {
  const char* first = nullptr;
  const char* second = nullptr;
  const char* end_of_first = nullptr;
  int lines_a_step = 0;

  SPMD_INLINE_MEMBER void fetch() {
    for (int line = 0; line < lines_a_step && first < end_of_first; ++line, first += 64, second += 64) {
      __builtin_prefetch(first, 0, 2);
      __builtin_prefetch(second, 0, 2);
    }
  }
};

// A part of the inputs, and of the chains of steps.
struct Part {
  int64_t first_input, end_input;
};

// A part of the steps of up to 32 rows by one panel or two. Sums come from `from`, or from zero, and go to `to`, both
// [32][32].
template <bool kTwoTiles, bool kTwoPanels>
void multiply_block(
    const Product& gemm, int64_t row, int64_t panel, Part part, const float* from, float* to, Finished& last,
    Ahead& next) {
  const uint16_t* x = gemm.x + row * gemm.x_stride;
  const uint16_t* second_x = x + 16 * gemm.x_stride;
  const uint16_t* weight = gemm.panel(panel);
  const uint16_t* second_weight = gemm.panel(panel + 1);
  const int64_t stride = gemm.x_stride * 2;
  if (from == nullptr)
    amx::zero_sums<kTwoTiles, kTwoPanels>();
  else
    amx::load_sums<kTwoTiles, kTwoPanels>(from);
  // Copies that stay in registers.
  Finished block = last;
  Ahead ahead = next;
  for (int64_t input = part.first_input; input < part.end_input; input += kStep) {
    // Rows pass while the panels stay.
    amx::load_passing<4>(x + input, stride);
    amx::load<6>(weight + input * kPanel, 64);
    amx::multiply<0, 4, 6>();
    if (kTwoPanels) {
      amx::load<7>(second_weight + input * kPanel, 64);
      amx::multiply<1, 4, 7>();
    }
    if (kTwoTiles) {
      amx::load_passing<5>(second_x + input, stride);
      amx::multiply<2, 5, 6>();
    }
    if (kTwoTiles && kTwoPanels) amx::multiply<3, 5, 7>();
    ahead.fetch();
    block.write_some(2);
  }
  last.next = block.next, next = ahead;
  amx::store_sums<kTwoTiles, kTwoPanels>(to);
}

// How a gemm is cut into items of work: some rows by some pairs of panels.
struct Cut {
  int64_t num_parts, rows_each, pairs_each, num_pairs, num_row_groups;

  Cut(const Product& gemm, int num_threads) {
    const int64_t num_steps = gemm.num_inputs / kStep;
    // Few rows pass quickly, and the memory's speed is what counts: panels whole, and each thread's in one run.
    const bool has_few_rows = gemm.num_rows <= kFewRows;
    num_parts = has_few_rows ? 1 : (num_steps + kMostSteps - 1) / kMostSteps;
    num_pairs = gemm.num_pairs();
    const int64_t blocks_each = kRowsBytes / (gemm.num_inputs * 2) / kBlockRows;
    rows_each = (num_parts == 1 ? std::max<int64_t>(blocks_each, 1) : kKeptBlocks) * kBlockRows;
    num_row_groups = (gemm.num_rows + rows_each - 1) / rows_each;
    // Else a few pairs, for each thread to be done when the others are; more where the rows pass once for all of them.
    const int64_t share = (num_pairs + num_threads - 1) / num_threads;
    if (has_few_rows)
      pairs_each = share;
    else
      pairs_each = num_parts == 1 ? std::clamp<int64_t>(share / 4, 1, 8) : std::min(share, kKeptPairs);
  }

  int64_t num_items() const { return num_row_groups * ((num_pairs + pairs_each - 1) / pairs_each); }
};

// What one thread carries from block to block.
struct Worker {
  int unit_rows = 0;  // how many rows its unit is set up for
  int current = 0;
  Finished last;
  alignas(64) float sums[2][32 * 32];
  float* const kept = kept_sums();  // [pairs][blocks][32][32]: sums between two parts
  LaneArgmax by_lane;            // of as many rows as are looked through
  const RowArgmax* argmax;     // or null

  Worker(const Product& gemm, const RowArgmax* wanted)
      : by_lane(wanted == nullptr ? 0 : gemm.num_rows), argmax(wanted) {}

  void run(const Product& gemm, const Cut& cut, int64_t item) {
    const int64_t items_a_group = cut.num_items() / cut.num_row_groups;
    const int64_t row = item / items_a_group * cut.rows_each, end = std::min(gemm.num_rows, row + cut.rows_each);
    const int64_t pair = item % items_a_group * cut.pairs_each, end_pair = std::min(cut.num_pairs, pair + cut.pairs_each);
    for (int64_t part = 0; part < cut.num_parts; ++part)
      for (int64_t each = pair; each < end_pair; ++each) {
        Ahead ahead;
        if (each + 1 < end_pair)
          ahead = fetching(gemm, part_of(gemm, cut, part), each + 1);
        else if (part + 1 < cut.num_parts)
          ahead = fetching(gemm, part_of(gemm, cut, part + 1), pair);
        run_pair(gemm, cut, part, row, end, each, kept + (each - pair) * kKeptBlocks * 32 * 32, ahead);
      }
  }

  void run_pair(
      const Product& gemm, const Cut& cut, int64_t number, int64_t row, int64_t end, int64_t pair, float* between,
      Ahead& ahead) {
    const Part part = part_of(gemm, cut, number);
    const int64_t panel = pair * 2, num_steps = (part.end_input - part.first_input) / kStep;
    const bool is_pair = panel + 1 < gemm.num_panels(), is_last = number + 1 == cut.num_parts;
    const int64_t num_blocks = (end - row + kBlockRows - 1) / kBlockRows;
    ahead.lines_a_step = int((num_steps * 16 + num_blocks * num_steps - 1) / (num_blocks * num_steps));
    for (; row < end; row += kBlockRows, between += 32 * 32) {
      const int num_rows = int(std::min<int64_t>(kBlockRows, end - row));
      if (unit_rows != num_rows) amx::set_up_for(unit_rows = num_rows);
      const float* from = number == 0 ? nullptr : between;
      float* to = is_last ? sums[current] : between;
      if (num_rows > 16)
        is_pair ? multiply_block<true, true>(gemm, row, panel, part, from, to, last, ahead)
                : multiply_block<true, false>(gemm, row, panel, part, from, to, last, ahead);
      else
        is_pair ? multiply_block<false, true>(gemm, row, panel, part, from, to, last, ahead)
                : multiply_block<false, false>(gemm, row, panel, part, from, to, last, ahead);
      if (!is_last) continue;
      last.write_some(kBlockRows);
      if (argmax == nullptr) {
        last = finished(gemm, row, panel, is_pair, num_rows, to);
      } else {
        last = {to};
        last.num_rows = num_rows, last.is_pair = is_pair;
        last.argmax = &by_lane, last.first_row = row, last.first_panel = panel, last.count = argmax->count;
      }
      current = 1 - current;
    }
  }

  void finish() {
    last.write_some(kBlockRows);
    _mm_sfence();
    if (unit_rows > 0) amx::release();
  }

  void merge_argmax(int64_t num_rows) const {
    for (int64_t row = 0; row < num_rows; ++row) by_lane.merge(row, argmax->values[row], argmax->places[row]);
  }

  static Part part_of(const Product& gemm, const Cut& cut, int64_t number) {
    const int64_t num_steps = gemm.num_inputs / kStep;
    return {num_steps * number / cut.num_parts * kStep, num_steps * (number + 1) / cut.num_parts * kStep};
  }

  static Ahead fetching(const Product& gemm, Part part, int64_t pair) {
    const int64_t panel = std::min(pair * 2, gemm.num_panels() - 1);
    const int64_t second = std::min(pair * 2 + 1, gemm.num_panels() - 1);
    const auto begin = [&](int64_t which, int64_t input) {
      return reinterpret_cast<const char*>(gemm.panel(which) + input * kPanel);
    };
    return {begin(panel, part.first_input), begin(second, part.first_input), begin(panel, part.end_input), 0};
  }

  // One for each thread, kept from gemm to gemm; memory that no gemm of several parts wrote is not there.
  static float* kept_sums() {
    struct alignas(64) Kept {
      float sums[kKeptPairs * kKeptBlocks * 32 * 32];
    };
    static thread_local const std::unique_ptr<Kept> kept(new Kept);
    return kept->sums;
  }
};

void multiply_all(const Product& gemm, const RowArgmax* argmax, int num_threads) {
  const Cut cut(gemm, num_threads);
  const bool is_small = gemm.num_rows * gemm.num_inputs * gemm.num_outputs < kFewProducts;
  std::mutex merging;
  run_by_team(cut.num_items(), is_small ? 1 : num_threads, [&](Items& items) {
    Worker worker(gemm, argmax);
    // In ascending order, which `LaneArgmax` relies on.
    for (int64_t item = items.next(); item >= 0; item = items.next()) worker.run(gemm, cut, item);
    worker.finish();
    if (argmax == nullptr) return;
    const std::lock_guard<std::mutex> alone(merging);
    worker.merge_argmax(gemm.num_rows);
  });
}

}  // namespace

#endif

// To be called only where `spmd_packs_bfloat16` says so. `num_inputs` is a multiple of 32, `num_outputs` of 16, or of 32
// where the gemm `is_gated`: then `num_outputs` counts gates and what they open, and `to` has half as many columns.
extern "C" void spmd_gemm_bfloat16(
    const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const uint16_t* packed,
    int64_t num_outputs, const uint16_t* bias, uint16_t* to, int64_t is_gated, int64_t num_threads) {
  const ProductOf<uint16_t> gemm = {x, x_stride, num_rows, num_inputs, packed, num_outputs, bias, to, is_gated != 0};
#if defined(SPMD_HAS_AMX)
  if (amx::is_granted()) return multiply_all(gemm, nullptr, int(num_threads));
#endif
  multiply_by_vectors(gemm, nullptr, int(num_threads));
}

// The argmax of each row of a gemm and its first place, among the first `count` outputs, without writing the gemm
// down: as `spmd_gemm_bfloat16` and then `spmd_argmax_bfloat16` find them.
extern "C" void spmd_gemm_argmax_bfloat16(
    const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const uint16_t* packed,
    int64_t num_outputs, int64_t count, float* values, int64_t* places, int64_t num_threads) {
  std::fill_n(values, num_rows, -kInfinity), std::fill_n(places, num_rows, 0);
  const RowArgmax argmax = {count, values, places};
  const ProductOf<uint16_t> gemm = {x, x_stride, num_rows, num_inputs, packed, num_outputs, nullptr, nullptr, false};
#if defined(SPMD_HAS_AMX)
  if (amx::is_granted()) return multiply_all(gemm, &argmax, int(num_threads));
#endif
  multiply_by_vectors(gemm, &argmax, int(num_threads));
}

// Whether weights of this dtype are packed for the gemms of this library.
extern "C" int64_t spmd_packs_bfloat16() {
#if defined(SPMD_AVX2) || (defined(SPMD_AVX512) && defined(__AVX512BF16__))
  return 1;
#else
  return amx::is_granted();
#endif
}
