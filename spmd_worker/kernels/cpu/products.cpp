// Products of bfloat16 rows with a packed weight by the matrix unit.
//
// Every element of the result is one chain of steps over the inputs, 32 at a time in ascending order, summed in float,
// then the bias, then one rounding. The chain is the same however many rows there are and whoever computes them.
//
// A weight [outputs, inputs] is packed as [outputs / 16][inputs / 2][16][2]: panels of 16 outputs, each read from
// beginning to end.
//
// A gated product has a panel of gates beside each panel of what they open: silu(gate) * up leaves the sums, rounded where
// kernels/reference.py rounds, and the product itself is never written down.

#include <algorithm>

#include "matrix_unit.h"

#if defined(SPMD_MATRIX_UNIT)

namespace {

constexpr int kPanel = 16;                    // outputs
constexpr int kStep = 32;                     // inputs
constexpr int kBlockRows = 32;                // two tiles of rows by two panels: as many sums as there are tiles for
constexpr int64_t kRowsBytes = 1 << 20;       // rows that stay in the second-level cache while all panels pass
constexpr int64_t kFewProducts = 1 << 20;     // below this a second thread costs more than it brings
constexpr int64_t kFetchAheadBytes = 4096;

struct Product {
  const uint16_t* x;
  int64_t x_stride, num_rows, num_inputs;
  const uint16_t* packed;
  int64_t num_outputs;
  const uint16_t* bias;  // or null; of a gated product, those of all gates first
  uint16_t* to;
  bool is_gated;

  int64_t panel_elements() const { return num_inputs * kPanel; }
};

// Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 the weight.
void set_up_unit(int num_rows) {
  const int first = std::min(num_rows, 16), second = num_rows - first;
  matrix_unit::Shapes shapes;
  for (int tile : {0, 1, 4}) shapes.set(tile, first, 16);
  for (int tile : {2, 3, 5}) shapes.set(tile, second > 0 ? second : 1, 16);
  for (int tile : {6, 7}) shapes.set(tile, 16, 16);
  matrix_unit::use(shapes);
}

SPMD_INLINE void fetch(const uint16_t* from) {
  const char* ahead = reinterpret_cast<const char*>(from) + kFetchAheadBytes;
  for (int line = 0; line < 16; ++line) __builtin_prefetch(ahead + line * 64);
}

// Up to 32 rows by one panel or two -> sums [32][32].
template <bool kTwoTiles, bool kTwoPanels>
void multiply_block(const Product& product, int64_t row, int64_t panel, float* sums) {
  const uint16_t* x = product.x + row * product.x_stride;
  const uint16_t* second_x = x + 16 * product.x_stride;
  const uint16_t* weight = product.packed + panel * product.panel_elements();
  const uint16_t* second_weight = weight + product.panel_elements();
  const int64_t stride = product.x_stride * 2;
  matrix_unit::zero<0>();
  if (kTwoPanels) matrix_unit::zero<1>();
  if (kTwoTiles) matrix_unit::zero<2>();
  if (kTwoTiles && kTwoPanels) matrix_unit::zero<3>();
  for (int64_t input = 0; input < product.num_inputs; input += kStep) {
    // Many rows pass while the panels stay; few rows stay while the panels pass.
    if (kTwoTiles)
      matrix_unit::load_passing<4>(x + input, stride);
    else
      matrix_unit::load<4>(x + input, stride);
    matrix_unit::load<6>(weight + input * kPanel, 64);
    if (!kTwoTiles) fetch(weight + input * kPanel);
    matrix_unit::multiply<0, 4, 6>();
    if (kTwoPanels) {
      matrix_unit::load<7>(second_weight + input * kPanel, 64);
      if (!kTwoTiles) fetch(second_weight + input * kPanel);
      matrix_unit::multiply<1, 4, 7>();
    }
    if (kTwoTiles) {
      matrix_unit::load_passing<5>(second_x + input, stride);
      matrix_unit::multiply<2, 5, 6>();
    }
    if (kTwoTiles && kTwoPanels) matrix_unit::multiply<3, 5, 7>();
  }
  matrix_unit::store<0>(sums, 128);
  if (kTwoPanels) matrix_unit::store<1>(sums + 16, 128);
  if (kTwoTiles) matrix_unit::store<2>(sums + 16 * 32, 128);
  if (kTwoTiles && kTwoPanels) matrix_unit::store<3>(sums + 16 * 32 + 16, 128);
}

SPMD_INLINE void write_panel(const Product& product, int64_t row, int64_t panel, int num_rows, const float* sums) {
  const int64_t column = panel * kPanel;
  const Floats bias = product.bias == nullptr ? Floats{} : load_floats(product.bias + column);
  for (int r = 0; r < num_rows; ++r)
    store_floats(product.to + (row + r) * product.num_outputs + column, load<Floats>(sums + r * 32) + bias);
}

// Gates in the first half of each row of sums, what they open in the second.
SPMD_INLINE void write_gated(const Product& product, int64_t row, int64_t pair, int num_rows, const float* sums) {
  const int64_t column = pair * kPanel, size = product.num_outputs / 2;
  const Floats gate_bias = product.bias == nullptr ? Floats{} : load_floats(product.bias + column);
  const Floats up_bias = product.bias == nullptr ? Floats{} : load_floats(product.bias + size + column);
  for (int r = 0; r < num_rows; ++r) {
    const Floats gate = rounded(load<Floats>(sums + r * 32) + gate_bias);
    const Floats up = rounded(load<Floats>(sums + r * 32 + 16) + up_bias);
    store_floats(product.to + (row + r) * size + column, rounded(silu(gate)) * up);
  }
}

// Rows `row` to `end` by one panel or two. `unit_rows` is how many rows this thread's unit is set up for.
void multiply_rows(const Product& product, int64_t row, int64_t end, int64_t panel, bool is_pair, int& unit_rows) {
  alignas(64) float sums[32 * 32];
  for (; row < end; row += kBlockRows) {
    const int num_rows = int(std::min<int64_t>(kBlockRows, end - row));
    if (unit_rows != num_rows) set_up_unit(num_rows);
    unit_rows = num_rows;
    if (num_rows > 16)
      is_pair ? multiply_block<true, true>(product, row, panel, sums)
              : multiply_block<true, false>(product, row, panel, sums);
    else
      is_pair ? multiply_block<false, true>(product, row, panel, sums)
              : multiply_block<false, false>(product, row, panel, sums);
    if (product.is_gated) {
      write_gated(product, row, panel / 2, num_rows, sums);
      continue;
    }
    write_panel(product, row, panel, num_rows, sums);
    if (is_pair) write_panel(product, row, panel + 1, num_rows, sums + 16);
  }
}

void multiply_all(const Product& product, int num_threads) {
  const int64_t rows_each =
      std::clamp<int64_t>(kRowsBytes / (product.num_inputs * 2) / kBlockRows, 1, 16) * kBlockRows;
  const int64_t num_panels = product.num_outputs / kPanel, num_pairs = (num_panels + 1) / 2;
  const int64_t num_blocks = (product.num_rows + rows_each - 1) / rows_each;
  const bool is_small = product.num_rows * product.num_inputs * product.num_outputs < kFewProducts;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && !is_small)
  {
    int unit_rows = 0;
    // Two pairs of a gated product share a line of the result.
    const int chunk = product.is_gated ? 2 : 1;
#pragma omp for schedule(dynamic, chunk)
    for (int64_t item = 0; item < num_blocks * num_pairs; ++item) {
      const int64_t row = item / num_pairs * rows_each, panel = item % num_pairs * 2;
      const int64_t end = std::min(product.num_rows, row + rows_each);
      multiply_rows(product, row, end, panel, panel + 1 < num_panels, unit_rows);
    }
    if (unit_rows > 0) matrix_unit::release();
  }
}

}  // namespace

#endif

// To be called only where there is a matrix unit. `num_inputs` is a multiple of 32, `num_outputs` of 16, or of 32 where the
// product `is_gated`: then `num_outputs` counts gates and what they open, and `to` has half as many columns.
extern "C" void spmd_product_bfloat16(
    const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const uint16_t* packed,
    int64_t num_outputs, const uint16_t* bias, uint16_t* to, int64_t is_gated, int64_t num_threads) {
#if defined(SPMD_MATRIX_UNIT)
  multiply_all(
      {x, x_stride, num_rows, num_inputs, packed, num_outputs, bias, to, is_gated != 0}, int(num_threads));
#else
  (void)x, (void)x_stride, (void)num_rows, (void)num_inputs, (void)packed, (void)num_outputs, (void)bias, (void)to;
  (void)is_gated, (void)num_threads;
#endif
}
