// A pool of threads that live as long as the process, instead of OpenMP's parallel regions.
//
// A job is a number of items, which free threads claim in ascending order. It is done when all items are, not when all
// threads have arrived: a thread that lost its core delays the others only if it has claimed an item (or two, if it claims
// ahead), and the next job starts without it. A waiting thread spins for a short time and then sleeps, so that it takes no
// core from the thread that it waits for. The thread that computes an item changes no bit of it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "vector.h"

// The items of one job, claimed by one thread.
class Items {
 public:
  // All items of a job of a single thread.
  explicit Items(int64_t count) : ticket_(nullptr), job_(0), count_(count), claimed_(-1) {}
  // Items of a thread of a shared job, which has claimed one already.
  Items(std::atomic<uint64_t>* ticket, uint32_t job, int64_t count, int64_t claimed)
      : ticket_(ticket), job_(job), count_(count), claimed_(claimed) {}

  // The next item, or -1 if there is none.
  int64_t next() {
    if (ticket_ == nullptr) return num_taken_ < count_ ? num_taken_++ : -1;
    const int64_t item = claimed_ >= 0 ? claimed_ : claim(*ticket_, job_, count_);
    claimed_ = -1;
    if (item >= 0) ++num_taken_;
    return item;
  }

  int64_t num_taken() const { return num_taken_; }

  // Claims an item of `job` while `ticket` is its ticket: the upper half is the job's number, the lower the next item.
  static int64_t claim(std::atomic<uint64_t>& ticket, uint32_t job, int64_t count);

 private:
  std::atomic<uint64_t>* ticket_;
  uint32_t job_;
  int64_t count_, claimed_;
  int64_t num_taken_ = 0;
};

// Called once by each thread that claims an item: computes all that `items.next()` returns.
using Task = void (*)(const void* body, Items& items);

// Returns when all items are done. At most `num_threads` threads take part, the caller among them.
void run_task(int64_t num_items, int64_t num_threads, Task task, const void* body);

template <class Body>
void run_items(int64_t num_items, int64_t num_threads, const Body& body) {
  run_task(
      num_items, num_threads, [](const void* it, Items& items) { (*static_cast<const Body*>(it))(items); }, &body);
}

// Consecutive tiles of work, divided into items that get shorter towards the end: long ones first, whose neighbouring tiles
// share what they read, single tiles last, so that no thread waits for long. No item has more than `most` tiles; items of
// more than `together` have a multiple of it.
class ShrinkingItems {
 public:
  ShrinkingItems(int64_t num_tiles, int64_t num_threads, int64_t most, int64_t together = 1) {
    constexpr int64_t kItemsEach = 4;  // of equal length, for each thread
    const int64_t num_items = std::max<int64_t>(num_threads, 1) * kItemsEach;
    for (int64_t tile = 0; tile < num_tiles;) {
      starts_.push_back(tile);
      const int64_t length = std::clamp<int64_t>((num_tiles - tile) / num_items, 1, std::max<int64_t>(most, 1));
      tile += length > together ? length - length % together : length;
    }
    starts_.push_back(num_tiles);
  }

  int64_t size() const { return int64_t(starts_.size()) - 1; }
  int64_t start(int64_t item) const { return starts_[size_t(item)]; }
  int64_t end(int64_t item) const { return starts_[size_t(item) + 1]; }
  // Starts of all items, and the end of the last.
  const std::vector<int64_t>& starts() const { return starts_; }

 private:
  std::vector<int64_t> starts_;
};

// Calls `each` with ranges of rows, one per item.
template <class Each>
void parallel_ranges(int64_t num_rows, int64_t num_threads, const Each& each) {
  constexpr int64_t kItemsEach = 4;  // to balance the threads
  const int64_t rows_each = std::max<int64_t>(1, num_rows / (std::max<int64_t>(num_threads, 1) * kItemsEach));
  run_items((num_rows + rows_each - 1) / rows_each, num_threads, [&](Items& items) {
    for (int64_t item = items.next(); item >= 0; item = items.next())
      each(item * rows_each, std::min(num_rows, (item + 1) * rows_each));
  });
}

// Calls `each` for every row, a few rows per item.
template <class Each>
void parallel_for(int64_t num_rows, int64_t num_threads, const Each& each) {
  parallel_ranges(num_rows, num_threads, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) each(row);
  });
}
