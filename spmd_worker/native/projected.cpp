// Attention of one layer from its projections on, in one call: rotary embedding, cache write and attention.
//
// Each part is a function that Python can also call, so the results are the same; the saved calls and tensors cost more
// than the work in a step of few tokens.

#include "exports.h"

#define SPMD_PROJECTED(name, Element)                                                                                  \
  /* `projected` holds each token's queries, keys and values. */                                                       \
  extern "C" void spmd_attend_projected_##name(                                                                        \
      void* cache, int64_t block_stride, int64_t num_kv_heads, int64_t head_size, int64_t block_size, int64_t in_bytes, \
      const int64_t* tables, int64_t table_stride, const Element* projected, int64_t token_stride, int64_t num_heads,  \
      const Element* cos, const Element* sin, const int64_t* blocks, const int64_t* offsets, int64_t num_tokens,       \
      const int64_t* query_starts, const int64_t* context_lengths, int64_t num_sequences, float scale, float cap,      \
      int64_t window, Element* output, int64_t may_use_amx, int64_t num_threads) {                                    \
    const Element* const keys = projected + num_heads * head_size;                                                     \
    const Element* const values = keys + num_kv_heads * head_size;                                                     \
    spmd_write_##name(                                                                                                 \
        cache, block_stride, num_kv_heads, head_size, block_size, in_bytes, keys, token_stride, head_size, values,               \
        token_stride, head_size, cos, sin, blocks, offsets, num_tokens, num_threads);                                  \
    spmd_attend_##name(                                                                                                \
        cache, block_stride, num_kv_heads, head_size, block_size, in_bytes, tables, table_stride, projected, token_stride,       \
        head_size, num_heads, cos, sin, query_starts, context_lengths, num_sequences, scale, cap, window, 0,       \
        nullptr, nullptr, nullptr, 0, nullptr, nullptr, 0, 0, nullptr, 0, output, may_use_amx, num_threads);                                                            \
  }

SPMD_PROJECTED(float32, float)
SPMD_PROJECTED(bfloat16, uint16_t)
