// W8A8 GEMMs as Python calls them: quantises rows (byte_rows.h), multiplies them by a packed weight (int8.h), and
// dequantises the sums.

#include "exports.h"
#include "gemm_kernels.h"

namespace {

constexpr int64_t kSmall = 8192;  // numbers: below this a second thread costs more than it gains

template <class Element>
void row_maxima(const Element* x, int64_t x_stride, int64_t num_rows, int64_t size, float* maxima, int64_t num_threads) {
  parallel_for(num_rows, num_rows * size < kSmall ? 1 : num_threads, [&](int64_t row) {
    maxima[row] = row_maximum(x + row * x_stride, size);
  });
}

template <class Element>
void quantise(
    const Element* x, int64_t x_stride, int64_t num_rows, int64_t size, const float* maxima, int8_t* to,
    int64_t to_stride, int64_t num_threads) {
  const int8_t offset = rows_are_offset() ? -128 : 0;
  parallel_for(num_rows, num_rows * size < kSmall ? 1 : num_threads, [&](int64_t row) {
    quantise_row(x + row * x_stride, size, maxima[row], offset, to + row * to_stride, to_stride);
  });
}

// Quantised rows, [num_rows][padded_to_steps(size)], and their maximum magnitudes.
template <class Element>
void make_rows(
    const Element* x, int64_t x_stride, int64_t num_rows, int64_t size, float* maxima, int8_t* to, int64_t num_threads) {
  const int8_t offset = rows_are_offset() ? -128 : 0;
  const int64_t stride = padded_to_steps(size);
  parallel_for(num_rows, num_rows * size < kSmall ? 1 : num_threads, [&](int64_t row) {
    maxima[row] = row_maximum(x + row * x_stride, size);
    quantise_row(x + row * x_stride, size, maxima[row], offset, to + row * stride, stride);
  });
}

// `parts` [num_parts][num_rows][num_outputs]: each has sums over some of the inputs.
template <class Element>
void scale_sums(
    const int32_t* parts, int64_t num_parts, const Gemm<int8_t>& gemm, const Store<Element, Dequantised>& results,
    int64_t num_threads) {
  const int64_t width = gemm.num_outputs, num_rows = gemm.num_rows;
  parallel_for(num_rows, num_rows * width < kSmall ? 1 : num_threads, [&](int64_t row) {
    for (int64_t pair = 0; pair < gemm.num_pairs(); ++pair) {
      const int num_panels = gemm.num_panels_of(pair);
      alignas(64) int32_t sums[32] = {};
      for (int64_t part = 0; part < num_parts; ++part) {
        const int32_t* from = parts + (part * num_rows + row) * width + pair * 2 * kPanel;
        for (int output = 0; output < num_panels * kPanel; ++output) sums[output] += from[output];
      }
      take_row(results, row, pair, num_panels, sums);
    }
  });
}

}  // namespace

#define SPMD_INT8(name, Element)                                                                                       \
  /* The maximum magnitude of each row; NaN if the row has a NaN.                        */                            \
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
  extern "C" void spmd_int8_gemm_##name(                                                                            \
      const Element* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const int8_t* packed,                  \
      int64_t num_outputs, const Element* bias, Element* to, int64_t is_gated, float* maxima, int8_t* rows,            \
      int64_t num_threads) {                                                                                           \
    make_rows(x, x_stride, num_rows, num_inputs, maxima, rows, num_threads);                                           \
    const Gemm<int8_t> gemm = {rows, padded_to_steps(num_inputs), num_rows, num_inputs, packed, num_outputs};          \
    multiply(                                                                                                          \
        gemm, Store<Element, Dequantised>{{gemm, maxima}, num_outputs, bias, to, is_gated != 0}, num_threads);         \
  }                                                                                                                    \
  /* The maximum of each row of such a GEMM and its first index, among the first `count` outputs. */                   \
  extern "C" void spmd_int8_argmax_##name(                                                                             \
      const Element* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const int8_t* packed,                  \
      int64_t num_outputs, int64_t count, float* values, int64_t* indices, float* maxima, int8_t* rows,                 \
      int64_t num_threads) {                                                                                           \
    make_rows(x, x_stride, num_rows, num_inputs, maxima, rows, num_threads);                                           \
    const Gemm<int8_t> gemm = {rows, padded_to_steps(num_inputs), num_rows, num_inputs, packed, num_outputs};          \
    multiply(                                                                                                          \
        gemm, Argmax<Element, Dequantised>({gemm, maxima}, num_rows, count, values, indices), num_threads);             \
  }                                                                                                                    \
  /* Sums of `spmd_int8_sums` over several parts of the inputs -> what one gemm over all of them gives. */             \
  extern "C" void spmd_int8_scaled_##name(                                                                             \
      const int32_t* parts, int64_t num_parts, int64_t num_rows, int64_t num_inputs, const int8_t* packed,             \
      int64_t num_outputs, const float* maxima, const Element* bias, Element* to, int64_t num_threads) {               \
    const Gemm<int8_t> gemm = {nullptr, 0, num_rows, num_inputs, packed, num_outputs};                                 \
    scale_sums(                                                                                                        \
        parts, num_parts, gemm, Store<Element, Dequantised>{{gemm, maxima}, num_outputs, bias, to, false},             \
        num_threads);                                                                                                  \
  }

SPMD_INT8(float32, float)
SPMD_INT8(bfloat16, uint16_t)

extern "C" void spmd_int8_sums(
    const int8_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const int8_t* packed, int64_t num_outputs,
    int32_t* to, int64_t num_threads) {
  multiply(
      Gemm<int8_t>{x, x_stride, num_rows, num_inputs, packed, num_outputs}, StoreSums{num_outputs, to}, num_threads);
}

bool rows_are_offset() {
#if defined(SPMD_HAS_AMX_INT8)
  if (amx::is_granted()) return false;
#endif
#if defined(SPMD_AVX512) && defined(__AVX512VNNI__)
  return true;
#else
  return false;
#endif
}

// The instructions that multiply, for tests and logs.
extern "C" const char* spmd_int8_instructions() {
#if defined(SPMD_AVX512) && defined(__AVX512VNNI__)
  return rows_are_offset() ? "AVX-512 VNNI" : "AMX";
#elif defined(SPMD_AVX2) || defined(SPMD_AVX512)
  return "AVX2";
#else
  return "plain C++";
#endif
}
