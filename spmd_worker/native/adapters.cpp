// Adapters (adapters.h) of one layer, as Python calls them.

#include "adapters.h"

#include "exports.h"
#include "thread_pool.h"

namespace {

// Below this many products a second thread costs more than it gains.
constexpr int64_t kFewProducts = 1 << 17;

template <class Element>
void add_adapters(
    const AdapterLayer& layer, const AdapterRows& step, const Element* x, int64_t x_stride, Element* y,
    int64_t y_stride, int64_t half, int64_t num_threads) {
  int64_t num_rows = 0, num_outputs = 0;
  for (int64_t block = 0; block < step.num_blocks; ++block) num_rows += step.blocks[block].count;
  for (int64_t part = 0; part < layer.num_parts; ++part)
    num_outputs += layer.num_inputs + layer.parts[part].stop - layer.parts[part].start;
  if (num_rows * num_outputs * kPanel < kFewProducts) num_threads = 1;
  parallel_for(step.num_blocks, num_threads, [&](int64_t block) {
    add_adapter(layer, step, step.blocks[block], x, x_stride, y, y_stride, half);
  });
}

}  // namespace

#define SPMD_ADAPTERS(name, Element)                                                                                   \
  extern "C" void spmd_add_adapters_##name(                                                                            \
      const void* layer, const void* step, const Element* x, int64_t x_stride, Element* y, int64_t y_stride,           \
      int64_t half, int64_t num_threads) {                                                                             \
    add_adapters(                                                                                                      \
        *static_cast<const AdapterLayer*>(layer), *static_cast<const AdapterRows*>(step), x, x_stride, y, y_stride,    \
        half, num_threads);                                                                                            \
  }

SPMD_ADAPTERS(float32, float)
SPMD_ADAPTERS(bfloat16, uint16_t)
