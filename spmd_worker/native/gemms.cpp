// GEMMs of float32 and bfloat16 rows with a packed weight (gemm.h), as Python calls them.

#include "exports.h"
#include "gemm_kernels.h"

namespace {

// Whether results go past the caches: complete lines, too many for a second-level cache to keep until they are read.
template <class Element>
bool passes_caches(const Element* to, int64_t num_rows, int64_t num_outputs, bool is_gated = false) {
  constexpr int64_t kPassingBytes = 2 << 20;
  const bool has_lines = reinterpret_cast<uintptr_t>(to) % 64 == 0 && num_outputs % 32 == 0 && !is_gated;
  return amx::is_granted() && has_lines && num_rows * num_outputs * int64_t(sizeof(Element)) > kPassingBytes;
}

template <class Element>
void multiply_leaves(const Gemm<Element>& gemm, const Element* bias, void* to, bool is_part, int64_t num_threads) {
  const int64_t num_rows = gemm.num_rows, num_outputs = gemm.num_outputs;
  Element* const rounded = is_part ? nullptr : static_cast<Element*>(to);
  float* const part = is_part ? static_cast<float*>(to) : nullptr;
  const AddLeaves<Element> epilogue{
      gemm, bias,
      {{}, num_outputs, nullptr, rounded, false, passes_caches(rounded, num_rows, num_outputs)},
      {{}, num_outputs, nullptr, part, false, passes_caches(part, num_rows, num_outputs)}};
  if constexpr (sizeof(Element) == 2)
    if (gemm.stored != nullptr) return multiply_stored(gemm, epilogue, num_threads);
  multiply(gemm, epilogue, num_threads);
}

}  // namespace

// Requires `spmd_packs_<dtype>`. `bias` may be null; of a gated weight, `to` has half as many columns as it has outputs.
extern "C" void spmd_gemm_float32(
    const float* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const float* packed, int64_t num_outputs,
    const float* bias, float* to, int64_t is_gated, int64_t num_threads) {
  multiply(
      Gemm<float>{x, x_stride, num_rows, num_inputs, packed, num_outputs},
      Store<float, Unscaled>{
          {}, num_outputs, bias, to, is_gated != 0, passes_caches(to, num_rows, num_outputs, is_gated != 0)},
      num_threads);
}

extern "C" void spmd_gemm_bfloat16(
    const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const uint16_t* packed,
    int64_t num_outputs, const uint16_t* bias, uint16_t* to, int64_t is_gated, int64_t num_threads) {
  multiply(
      Gemm<uint16_t>{x, x_stride, num_rows, num_inputs, packed, num_outputs},
      Store<uint16_t, Unscaled>{
          {}, num_outputs, bias, to, is_gated != 0, passes_caches(to, num_rows, num_outputs, is_gated != 0)},
      num_threads);
}

// The same in leaves (gemm_driver.h): a row-parallel GEMM. `to` is float if `is_part`, otherwise rounded sums.
#define SPMD_GEMM_LEAVES(name, Element)                                                                                \
  extern "C" void spmd_gemm_leaves_##name(                                                                             \
      const Element* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const Element* packed,                 \
      int64_t num_outputs, const Element* bias, void* to, const int64_t* leaf_ends, int64_t num_leaves,                \
      int64_t is_part, int64_t num_threads) {                                                                          \
    multiply_leaves(                                                                                                   \
        Gemm<Element>{x, x_stride, num_rows, num_inputs, packed, num_outputs, {leaf_ends, num_leaves}}, bias, to,      \
        is_part != 0, num_threads);                                                                                    \
  }

SPMD_GEMM_LEAVES(float32, float)
SPMD_GEMM_LEAVES(bfloat16, uint16_t)

// `spmd_gemm_bfloat16` and `spmd_gemm_leaves_bfloat16` with a weight as files store it (stored.h).
extern "C" void spmd_stored_gemm_bfloat16(
    const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const uint8_t* packed,
    int64_t num_outputs, const uint16_t* bias, uint16_t* to, int64_t is_gated, int64_t num_threads) {
  multiply_stored(
      Gemm<uint16_t>{
          x, x_stride, num_rows, num_inputs, nullptr, num_outputs, {}, packed, stored_panel_bytes(packed, num_inputs)},
      Store<uint16_t, Unscaled>{
          {}, num_outputs, bias, to, is_gated != 0, passes_caches(to, num_rows, num_outputs, is_gated != 0)},
      num_threads);
}

extern "C" void spmd_stored_gemm_leaves_bfloat16(
    const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const uint8_t* packed,
    int64_t num_outputs, const uint16_t* bias, void* to, const int64_t* leaf_ends, int64_t num_leaves, int64_t is_part,
    int64_t num_threads) {
  multiply_leaves(
      Gemm<uint16_t>{
          x, x_stride, num_rows, num_inputs, nullptr, num_outputs, {leaf_ends, num_leaves}, packed,
          stored_panel_bytes(packed, num_inputs)},
      bias, to, is_part != 0, num_threads);
}

// A GEMM for each head: x [rows][heads][inputs] by a packed weight of the head -> [rows][heads][outputs], both strided.
// Threads share the heads if there are enough of them.
#define SPMD_GEMM_HEADS(name, Element)                                                                                 \
  extern "C" void spmd_gemm_heads_##name(                                                                              \
      const Element* x, int64_t x_token_stride, int64_t x_head_stride, int64_t num_rows, int64_t num_inputs,           \
      const Element* packed, int64_t packed_head_stride, int64_t num_heads, int64_t num_outputs, Element* to,          \
      int64_t to_token_stride, int64_t to_head_stride, int64_t num_threads) {                                          \
    const auto multiply_head = [&](int64_t head, int64_t threads) {                                                    \
      const Element* const weight = packed + head * packed_head_stride;                                                \
      Element* const head_to = to + head * to_head_stride;                                                             \
      multiply(                                                                                                        \
          Gemm<Element>{x + head * x_head_stride, x_token_stride, num_rows, num_inputs, weight, num_outputs},          \
          Store<Element, Unscaled>{{}, num_outputs, nullptr, head_to, false, false, to_token_stride}, threads);        \
    };                                                                                                                 \
    if (num_heads < 2 * num_threads) {                                                                                 \
      for (int64_t head = 0; head < num_heads; ++head) multiply_head(head, num_threads);                               \
      return;                                                                                                          \
    }                                                                                                                  \
    run_items(num_heads, num_threads, [&](Items& heads) {                                                              \
      for (int64_t head = heads.next(); head >= 0; head = heads.next()) multiply_head(head, 1);                        \
    });                                                                                                                \
  }

SPMD_GEMM_HEADS(float32, float)
SPMD_GEMM_HEADS(bfloat16, uint16_t)

// The maximum of each row of a GEMM and its first index, among the first `count` outputs, without storing the result: the
// bits of `spmd_gemm_bfloat16` and `spmd_argmax_bfloat16`.
extern "C" void spmd_gemm_argmax_bfloat16(
    const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const uint16_t* packed,
    int64_t num_outputs, int64_t count, float* values, int64_t* indices, int64_t num_threads) {
  multiply(
      Gemm<uint16_t>{x, x_stride, num_rows, num_inputs, packed, num_outputs},
      Argmax<uint16_t, Unscaled>({}, num_rows, count, values, indices), num_threads);
}

// Whether weights of this dtype are packed for the GEMMs of this library.
extern "C" int64_t spmd_packs_float32() {
#if defined(SPMD_AVX512) || defined(SPMD_AVX2)
  return 1;
#else
  return amx::is_granted();
#endif
}

extern "C" int64_t spmd_packs_bfloat16() {
#if defined(SPMD_AVX512) || defined(SPMD_AVX2)
  return 1;
#else
  return amx::is_granted();
#endif
}

// Whether weights as files store them are packed in rows, or else in pairs (stored.h).
extern "C" int64_t spmd_stored_are_rows() { return amx::is_granted(); }
