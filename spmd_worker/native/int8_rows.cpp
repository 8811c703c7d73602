// Rows of numbers -> rows of bytes with one scale each, and sums of products of these -> numbers. See int8.h and byte_rows.h.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "argmax.h"
#include "byte_rows.h"
#include "exports.h"
#include "int8.h"
#include "team.h"

namespace {

constexpr int64_t kSmall = 8192;          // numbers: below this a second thread costs more than it brings
constexpr int64_t kFewProducts = 1 << 19;  // likewise

template <class Element>
void row_maxima(const Element* x, int64_t x_stride, int64_t num_rows, int64_t size, float* maxima, int64_t num_threads) {
  each_by_team(num_rows, num_rows * size < kSmall ? 1 : num_threads, [&](int64_t row) {
    maxima[row] = row_maximum(x + row * x_stride, size);
  });
}

template <class Element>
void quantise(
    const Element* x, int64_t x_stride, int64_t num_rows, int64_t size, const float* maxima, int8_t* to,
    int64_t to_stride, int64_t num_threads) {
  const int8_t offset = rows_are_offset() ? -128 : 0;
  each_by_team(num_rows, num_rows * size < kSmall ? 1 : num_threads, [&](int64_t row) {
    quantise_row(x + row * x_stride, size, maxima[row], offset, to + row * to_stride, to_stride);
  });
}

// Rows of bytes, [num_rows][padded_to_steps(size)], and their largest magnitudes, of which a row's are still near.
template <class Element>
void make_rows(
    const Element* x, int64_t x_stride, int64_t num_rows, int64_t size, float* maxima, int8_t* to, int64_t num_threads) {
  const int8_t offset = rows_are_offset() ? -128 : 0;
  const int64_t stride = padded_to_steps(size);
  each_by_team(num_rows, num_rows * size < kSmall ? 1 : num_threads, [&](int64_t row) {
    maxima[row] = row_maximum(x + row * x_stride, size);
    quantise_row(x + row * x_stride, size, maxima[row], offset, to + row * stride, stride);
  });
}

// Results of a gemm, or of a gated one, whose `bias` (or null) has those of all gates first.
template <class Element>
struct Results final : ByteSink {
  const ByteGemm& gemm;
  const float* maxima;
  const Element* bias;
  Element* to;
  bool is_gated;

  Results(const ByteGemm& product, const float* largest, const Element* added, Element* results, bool gates)
      : gemm(product), maxima(largest), bias(added), to(results), is_gated(gates) {}

  void take(int64_t row, int64_t end, int64_t pair, bool has_two, const int32_t* sums) const override {
    const int64_t half = gemm.num_outputs / 2, column = pair * kBytePanel * (is_gated ? 1 : 2);
    for (; row < end; ++row, sums += 32) {
      const float scale = scale_of(maxima[row]);
      if (is_gated) {
        open_gates(row, pair, column, half, scale, sums);
      } else {
        for (int panel = 0; panel <= has_two; ++panel)
          for (int lane = 0; lane < kBytePanel; lane += kLanes) {
            const int64_t at = column + panel * kBytePanel + lane;
            store_floats(
                to + row * gemm.num_outputs + at,
                biased(scaled(sums + panel * kBytePanel + lane, scale, gemm.scales(pair * 2 + panel) + lane), at));
          }
      }
    }
  }

  SPMD_INLINE_MEMBER void open_gates(
      int64_t row, int64_t pair, int64_t column, int64_t half, float scale, const int32_t* sums) const {
    for (int lane = 0; lane < kBytePanel; lane += kLanes) {
      const Floats gate = biased(scaled(sums + lane, scale, gemm.scales(pair * 2) + lane), column + lane);
      const Floats up =
          biased(scaled(sums + kBytePanel + lane, scale, gemm.scales(pair * 2 + 1) + lane), half + column + lane);
      store_floats(
          to + row * half + column + lane,
          as_kept<Element>(silu(as_kept<Element>(gate))) * as_kept<Element>(up));
    }
  }

  SPMD_INLINE_MEMBER Floats biased(Floats value, int64_t at) const {
    return bias == nullptr ? value : value + load_floats(bias + at);
  }
};

// Of each row the largest result among the first `count`, as it would be written, seen by one thread.
template <class Element>
struct Largest final : ByteSink {
  const ByteGemm& gemm;
  const float* maxima;
  int64_t count;
  mutable LaneArgmax by_lane;

  Largest(const ByteGemm& product, const float* largest, int64_t how_many)
      : gemm(product), maxima(largest), count(how_many), by_lane(product.num_rows) {}

  void take(int64_t row, int64_t end, int64_t pair, bool has_two, const int32_t* sums) const override {
    for (; row < end; ++row, sums += 32)
      for (int64_t panel = pair * 2; panel <= pair * 2 + has_two; ++panel)
        for (int64_t lane = 0; lane < kBytePanel; lane += kLanes) {
          const int64_t first = panel * kBytePanel + lane;
          Floats values = as_kept<Element>(
              scaled(sums + panel % 2 * kBytePanel + lane, scale_of(maxima[row]), gemm.scales(panel) + lane));
          if (first + kLanes > count)
            values = lane_numbers() + int(first) < int(count) ? values : broadcast(-kInfinity);
          by_lane.take(row, int(first / kLanes), values);
        }
  }
};

// The sums themselves.
struct Sums final : ByteSink {
  int64_t num_outputs;
  int32_t* to;

  Sums(int64_t outputs, int32_t* sums) : num_outputs(outputs), to(sums) {}

  void take(int64_t row, int64_t end, int64_t pair, bool has_two, const int32_t* sums) const override {
    for (; row < end; ++row, sums += 32)
      std::memcpy(to + row * num_outputs + pair * 2 * kBytePanel, sums, (has_two ? 2 : 1) * kBytePanel * sizeof *sums);
  }
};

void multiply_all(const ByteGemm& gemm, const ByteSink& sink, int64_t num_threads) {
  if (gemm.num_rows * gemm.num_inputs * gemm.num_outputs < kFewProducts) num_threads = 1;
  const ByteCut cut(gemm);
  const ShrinkingItems all(cut.num_units(), num_threads, cut.most_units(gemm));
  run_by_team(all.size(), num_threads, [&](Items& items) {
    for (int64_t item = items.next(); item >= 0; item = items.next())
      run_byte_units(gemm, cut, sink, all.start(item), all.end(item));
  });
}

template <class Element>
void find_largest(
    const ByteGemm& gemm, const float* maxima, int64_t count, float* values, int64_t* places, int64_t num_threads) {
  if (gemm.num_rows * gemm.num_inputs * gemm.num_outputs < kFewProducts) num_threads = 1;
  const ByteCut cut(gemm);
  const ShrinkingItems all(cut.num_units(), num_threads, cut.most_units(gemm));
  std::fill_n(values, gemm.num_rows, -kInfinity), std::fill_n(places, gemm.num_rows, 0);
  std::mutex merging;
  run_by_team(all.size(), num_threads, [&](Items& items) {
    const Largest<Element> largest(gemm, maxima, count);
    // In ascending order, which `LaneArgmax` relies on.
    for (int64_t item = items.next(); item >= 0; item = items.next())
      run_byte_units(gemm, cut, largest, all.start(item), all.end(item));
    const std::lock_guard<std::mutex> alone(merging);
    for (int64_t row = 0; row < gemm.num_rows; ++row) largest.by_lane.merge(row, values[row], places[row]);
  });
}

// `parts` [num_parts][num_rows][num_outputs] are sums over some of the inputs each.
template <class Element>
void scale_sums(
    const int32_t* parts, int64_t num_parts, const ByteGemm& gemm, const float* maxima, const Element* bias, Element* to,
    int64_t num_threads) {
  const int64_t width = gemm.num_outputs, num_rows = gemm.num_rows;
  const Results<Element> results(gemm, maxima, bias, to, false);
  each_by_team(num_rows, num_rows * width < kSmall ? 1 : num_threads, [&](int64_t row) {
    for (int64_t pair = 0; pair < gemm.num_pairs(); ++pair) {
      const bool has_two = pair * 2 + 1 < gemm.num_panels();
      alignas(64) int32_t sums[32] = {};
      for (int64_t part = 0; part < num_parts; ++part) {
        const int32_t* from = parts + (part * num_rows + row) * width + pair * 2 * kBytePanel;
        for (int output = 0; output < (has_two ? 32 : 16); ++output) sums[output] += from[output];
      }
      results.take(row, row + 1, pair, has_two, sums);
    }
  });
}

}  // namespace

#define SPMD_INT8(name, Element)                                                                                       \
  /* The largest magnitude of each row; not a number where the row has one that is none. */                            \
  extern "C" void spmd_int8_maxima_##name(                                                                             \
      const Element* x, int64_t x_stride, int64_t num_rows, int64_t size, float* maxima, int64_t num_threads) {        \
    row_maxima(x, x_stride, num_rows, size, maxima, num_threads);                                                      \
  }                                                                                                                    \
  /* `to` [num_rows][to_stride] is for this library's products alone; `to_stride` is a multiple of 64. */              \
  extern "C" void spmd_int8_quantise_##name(                                                                           \
      const Element* x, int64_t x_stride, int64_t num_rows, int64_t size, const float* maxima, int8_t* to,             \
      int64_t to_stride, int64_t num_threads) {                                                                        \
    quantise(x, x_stride, num_rows, size, maxima, to, to_stride, num_threads);                                         \
  }                                                                                                                    \
  /* Numbers by a weight. Where the gemm `is_gated`, `num_outputs` counts gates and what they open, and `to` has half as\
     many columns. `maxima` [num_rows] and `rows` [num_rows][num_inputs rounded up to 64] are memory to work in. */    \
  extern "C" void spmd_int8_product_##name(                                                                            \
      const Element* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const int8_t* packed,                  \
      int64_t num_outputs, const Element* bias, Element* to, int64_t is_gated, float* maxima, int8_t* rows,            \
      int64_t num_threads) {                                                                                           \
    make_rows(x, x_stride, num_rows, num_inputs, maxima, rows, num_threads);                                           \
    const ByteGemm gemm = {rows, padded_to_steps(num_inputs), num_rows, packed, num_inputs, num_outputs};              \
    multiply_all(gemm, Results<Element>(gemm, maxima, bias, to, is_gated != 0), num_threads);                          \
  }                                                                                                                    \
  /* The argmax of each row of such a product and its first place, among the first `count` outputs. */                 \
  extern "C" void spmd_int8_argmax_##name(                                                                             \
      const Element* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const int8_t* packed,                  \
      int64_t num_outputs, int64_t count, float* values, int64_t* places, float* maxima, int8_t* rows,                 \
      int64_t num_threads) {                                                                                           \
    make_rows(x, x_stride, num_rows, num_inputs, maxima, rows, num_threads);                                           \
    const ByteGemm gemm = {rows, padded_to_steps(num_inputs), num_rows, packed, num_inputs, num_outputs};              \
    find_largest<Element>(gemm, maxima, count, values, places, num_threads);                                           \
  }                                                                                                                    \
  /* Sums of `spmd_int8_sums` over several parts of the inputs -> what one gemm over all of them gives. */             \
  extern "C" void spmd_int8_scaled_##name(                                                                             \
      const int32_t* parts, int64_t num_parts, int64_t num_rows, int64_t num_inputs, const int8_t* packed,             \
      int64_t num_outputs, const float* maxima, const Element* bias, Element* to, int64_t num_threads) {               \
    const ByteGemm gemm = {nullptr, 0, num_rows, packed, num_inputs, num_outputs};                                     \
    scale_sums(parts, num_parts, gemm, maxima, bias, to, num_threads);                                                 \
  }

SPMD_INT8(float32, float)
SPMD_INT8(bfloat16, uint16_t)

extern "C" void spmd_int8_sums(
    const int8_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const int8_t* packed, int64_t num_outputs,
    int32_t* to, int64_t num_threads) {
  const ByteGemm gemm = {x, x_stride, num_rows, packed, num_inputs, num_outputs};
  multiply_all(gemm, Sums(num_outputs, to), num_threads);
}

// Which instructions multiply, for tests and logs.
extern "C" const char* spmd_int8_instructions() {
#if defined(SPMD_AVX512) && defined(__AVX512VNNI__)
  return rows_are_offset() ? "AVX-512 VNNI" : "AMX";
#elif defined(SPMD_AVX2) || defined(SPMD_AVX512)
  return "AVX2";
#else
  return "plain C++";
#endif
}
