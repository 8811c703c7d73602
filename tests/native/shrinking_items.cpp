// The items of native/thread_pool.h that grow shorter, for tests that look at them.

#include "thread_pool.h"

// `starts` are those of the items, and where the last one ends. Returns the number of items.
extern "C" int64_t shrinking_items(
    int64_t num_units, int64_t num_threads, int64_t most, int64_t together, int64_t* starts) {
  const ShrinkingItems items(num_units, num_threads, most, together);
  for (int64_t item = 0; item < items.size(); ++item) starts[item] = items.start(item), starts[item + 1] = items.end(item);
  return items.size();
}
