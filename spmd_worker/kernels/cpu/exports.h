// What more than one source file calls of what Python calls. Whoever defines one of these includes this too, so that the
// compiler sees a declaration that no longer fits.
#pragma once

#include <cstdint>

#define SPMD_EXPORTS(name, Element)                                                                                    \
  extern "C" void spmd_rotate_##name(                                                                                  \
      const Element* x, int64_t token_stride, int64_t head_stride, int64_t num_tokens, int64_t num_heads,              \
      int64_t size, const Element* cos, const Element* sin, Element* to, int64_t to_token_stride,                      \
      int64_t num_threads);                                                                                            \
  extern "C" void spmd_write_##name(                                                                                   \
      Element* cache, int64_t block_stride, int64_t num_kv_heads, int64_t head_size, int64_t block_size,               \
      const Element* key, int64_t key_token_stride, int64_t key_head_stride, const Element* value,                     \
      int64_t value_token_stride, int64_t value_head_stride, const int64_t* blocks, const int64_t* offsets,            \
      int64_t num_tokens, int64_t num_threads);                                                                        \
  extern "C" void spmd_attend_##name(                                                                                  \
      Element* cache, int64_t block_stride, int64_t num_kv_heads, int64_t head_size, int64_t block_size,               \
      const int64_t* tables, int64_t table_stride, const Element* queries, int64_t query_token_stride,                 \
      int64_t query_head_stride, int64_t num_heads, const int64_t* query_starts, const int64_t* context_lengths,       \
      int64_t num_sequences, float scale, int64_t window, Element* output, int64_t may_use_unit, int64_t num_threads);

SPMD_EXPORTS(float32, float)
SPMD_EXPORTS(bfloat16, uint16_t)
