// C ABI declarations shared by several files. The defining file includes this too, so that the compiler checks the
// declaration.
#pragma once

#include <cstdint>

#define SPMD_EXPORTS(name, Element)                                                                                    \
  extern "C" void spmd_rms_norm_##name(                                                                                \
      const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads,              \
      int64_t size, const Element* weight, float epsilon, Element* to, int64_t num_threads);                           \
  extern "C" void spmd_add_rms_norm_##name(                                                                            \
      Element* x, int64_t x_stride, Element* residual, int64_t residual_stride, int64_t num_tokens, int64_t size,      \
      const Element* weight, float epsilon, int64_t num_threads);                                                      \
  extern "C" void spmd_activate_##name(                                                                                \
      const Element* x, int64_t stride, int64_t num_tokens, int64_t size, int64_t is_gate, int64_t kind, Element* to,  \
      int64_t num_threads);                                                                                            \
  extern "C" void spmd_gemm_##name(                                                                                 \
      const Element* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const Element* packed,                 \
      int64_t num_outputs, const Element* bias, Element* to, int64_t is_gated, int64_t num_threads);                   \
  extern "C" void spmd_gemm_leaves_##name(                                                                             \
      const Element* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const Element* packed,                 \
      int64_t num_outputs, const Element* bias, void* to, const int64_t* leaf_ends, int64_t num_leaves,                \
      int64_t is_part, int64_t num_threads);                                                                           \
  extern "C" void spmd_gemm_heads_##name(                                                                              \
      const Element* x, int64_t x_token_stride, int64_t x_head_stride, int64_t num_rows, int64_t num_inputs,           \
      const Element* packed, int64_t packed_head_stride, int64_t num_heads, int64_t num_outputs, Element* to,          \
      int64_t to_token_stride, int64_t to_head_stride, int64_t num_threads);                                           \
  extern "C" void spmd_write_##name(                                                                                   \
      void* cache, int64_t block_stride, int64_t num_kv_heads, int64_t head_size, int64_t block_size, int64_t in_bytes, \
      const Element* key, int64_t key_token_stride, int64_t key_head_stride, const Element* value,                     \
      int64_t value_token_stride, int64_t value_head_stride, const Element* cos, const Element* sin,                   \
      const int64_t* blocks, const int64_t* offsets, int64_t num_tokens, int64_t num_threads);                         \
  extern "C" void spmd_attend_##name(                                                                                  \
      void* cache, int64_t block_stride, int64_t num_kv_heads, int64_t head_size, int64_t block_size, int64_t in_bytes, \
      const int64_t* tables, int64_t table_stride, const Element* queries, int64_t query_token_stride,                 \
      int64_t query_head_stride, int64_t num_heads, const Element* cos, const Element* sin,                            \
      const int64_t* query_starts, const int64_t* context_lengths, int64_t num_sequences, float scale, float cap,      \
      int64_t window, int64_t ahead, const int32_t* last_visible, const float* sinks,                                  \
      const float* distance_bias, int64_t max_distance, const Element* query_scores, const Element* key_scores,        \
      int64_t score_token_stride, int64_t score_head_stride, const int32_t* columns, int64_t latent_size,              \
      Element* output, int64_t may_use_amx, int64_t num_threads);                                                                                            \
  extern "C" void spmd_attend_projected_##name(                                                                        \
      void* cache, int64_t block_stride, int64_t num_kv_heads, int64_t head_size, int64_t block_size, int64_t in_bytes, \
      const int64_t* tables, int64_t table_stride, const Element* projected, int64_t token_stride, int64_t num_heads,  \
      const Element* cos, const Element* sin, const int64_t* blocks, const int64_t* offsets, int64_t num_tokens,       \
      const int64_t* query_starts, const int64_t* context_lengths, int64_t num_sequences, float scale, float cap,      \
      int64_t window, Element* output, int64_t may_use_amx, int64_t num_threads);                                    \
  extern "C" void spmd_add_adapters_##name(                                                                            \
      const void* layer, const void* step, const Element* x, int64_t x_stride, Element* y, int64_t y_stride,           \
      int64_t half, int64_t num_threads);                                                                              \
  extern "C" void spmd_int8_gemm_##name(                                                                            \
      const Element* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const int8_t* packed,                  \
      int64_t num_outputs, const Element* bias, Element* to, int64_t is_gated, float* maxima, int8_t* rows,            \
      int64_t num_threads);

SPMD_EXPORTS(float32, float)
SPMD_EXPORTS(bfloat16, uint16_t)

extern "C" void spmd_gemm_argmax_bfloat16(
    const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const uint16_t* packed,
    int64_t num_outputs, int64_t count, float* values, int64_t* indices, int64_t num_threads);

extern "C" void spmd_stored_gemm_bfloat16(
    const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const uint8_t* packed,
    int64_t num_outputs, const uint16_t* bias, uint16_t* to, int64_t is_gated, int64_t num_threads);
extern "C" void spmd_stored_gemm_leaves_bfloat16(
    const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const uint8_t* packed,
    int64_t num_outputs, const uint16_t* bias, void* to, const int64_t* leaf_ends, int64_t num_leaves, int64_t is_part,
    int64_t num_threads);

#if defined(__linux__)

#define SPMD_GROUP                                                                                                     \
  char *memory, int64_t rank, int64_t size, int64_t slot_bytes, int64_t spin_ns, int64_t timeout_ns,                   \
      const int32_t *processes, int64_t few_elements

extern "C" char* spmd_shared_next_part(SPMD_GROUP, int64_t num_bytes);
extern "C" char* spmd_shared_common_norms(SPMD_GROUP, int64_t num_elements);

#define SPMD_SHARED_EXPORTS(name, Element)                                                                             \
  extern "C" int64_t spmd_shared_sum_add_rms_norm_##name(                                                              \
      SPMD_GROUP, const float* x, Element* residual, int64_t num_rows, int64_t row_size, const Element* weight,        \
      float epsilon, Element* to);

SPMD_SHARED_EXPORTS(float32, float)
SPMD_SHARED_EXPORTS(bfloat16, uint16_t)

#endif
