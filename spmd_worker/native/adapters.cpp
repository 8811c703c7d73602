// Adapters (adapters.h) of one layer, as Python calls them.

#include "adapters.h"

#include "exports.h"
#include "thread_pool.h"

namespace {

// Below this many products a second thread costs more than it gains.
constexpr int64_t kFewProducts = 1 << 17;

// Calls `run` with each block of the step.
template <class Run>
void for_blocks(const AdapterLayer& layer, const AdapterRows& step, int64_t num_threads, Run run) {
  int64_t num_rows = 0, num_outputs = 0;
  for (int64_t block = 0; block < step.num_blocks; ++block) num_rows += step.blocks[block].count;
  for (int64_t part = 0; part < layer.num_parts; ++part)
    num_outputs += layer.num_inputs + layer.parts[part].stop - layer.parts[part].start;
  if (num_rows * num_outputs * kPanel < kFewProducts) num_threads = 1;
  parallel_for(step.num_blocks, num_threads, [&](int64_t block) { run(step.blocks[block]); });
}

}  // namespace

#define SPMD_ADAPTERS(name, Element)                                                                                   \
  extern "C" void spmd_add_adapters_##name(                                                                            \
      const void* layer, const void* rows, const Element* x, int64_t x_stride, Element* y, int64_t y_stride,           \
      int64_t half, int64_t num_threads) {                                                                             \
    const AdapterLayer& of = *static_cast<const AdapterLayer*>(layer);                                                 \
    const AdapterRows& step = *static_cast<const AdapterRows*>(rows);                                                  \
    for_blocks(of, step, num_threads, [&](const AdapterBlock& block) {                                                 \
      add_adapter(of, step, block, x, x_stride, y, y_stride, half);                                                    \
    });                                                                                                                \
  }                                                                                                                    \
  extern "C" void spmd_adapter_input_sums_##name(                                                                      \
      const void* layer, const void* rows, const Element* x, int64_t x_stride, float* to, int64_t to_stride,           \
      int64_t num_threads) {                                                                                           \
    const AdapterLayer& of = *static_cast<const AdapterLayer*>(layer);                                                 \
    const AdapterRows& step = *static_cast<const AdapterRows*>(rows);                                                  \
    for_blocks(of, step, num_threads, [&](const AdapterBlock& block) {                                                 \
      sum_inputs(of, step, block, x, x_stride, to, to_stride);                                                         \
    });                                                                                                                \
  }                                                                                                                    \
  extern "C" void spmd_add_adapter_sums_##name(                                                                        \
      const void* layer, const void* rows, const float* sums, int64_t sums_stride, Element* y, int64_t y_stride,       \
      int64_t num_threads) {                                                                                           \
    const AdapterLayer& of = *static_cast<const AdapterLayer*>(layer);                                                 \
    const AdapterRows& step = *static_cast<const AdapterRows*>(rows);                                                  \
    for_blocks(of, step, num_threads, [&](const AdapterBlock& block) {                                                 \
      add_sums(of, step, block, sums, sums_stride, y, y_stride);                                                       \
    });                                                                                                                \
  }

SPMD_ADAPTERS(float32, float)
SPMD_ADAPTERS(bfloat16, uint16_t)
