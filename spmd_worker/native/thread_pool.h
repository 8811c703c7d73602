// Threads of our own that compute a job together, for as long as the process lives: what a parallel region is elsewhere.
//
// A job is a number of items, which whoever is free takes in ascending order. It is done when all items are, not when
// all threads have come: a thread whose core another process has keeps nobody waiting unless it has taken an item (or
// two, where it looks ahead), and the next job begins without it. A thread that waits spins for a short time and then
// sleeps, so that it takes no core from whom it waits for. Who computes an item changes no bit of it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "vector.h"

// The items of one job as one of its threads takes them.
class Items {
 public:
  // All of a job that one thread computes by itself.
  explicit Items(int64_t count) : ticket_(nullptr), job_(0), count_(count), claimed_(-1) {}
  // A thread's of a job that several compute; it has claimed one already.
  Items(std::atomic<uint64_t>* ticket, uint32_t job, int64_t count, int64_t claimed)
      : ticket_(ticket), job_(job), count_(count), claimed_(claimed) {}

  // The next item, or -1: none is left.
  int64_t next() {
    if (ticket_ == nullptr) return num_taken_ < count_ ? num_taken_++ : -1;
    const int64_t item = claimed_ >= 0 ? claimed_ : claim(*ticket_, job_, count_);
    claimed_ = -1;
    if (item >= 0) ++num_taken_;
    return item;
  }

  int64_t num_taken() const { return num_taken_; }

  // An item of `job` as long as `ticket` is its ticket, whose upper half is the job's number, whose lower is the next item.
  static int64_t claim(std::atomic<uint64_t>& ticket, uint32_t job, int64_t count);

 private:
  std::atomic<uint64_t>* ticket_;
  uint32_t job_;
  int64_t count_, claimed_;
  int64_t num_taken_ = 0;
};

// What each thread does that takes an item or more: all that `items.next()` gives it.
using Task = void (*)(const void* body, Items& items);

// Returns when all items are done. At most `num_threads` threads take part, the caller among them.
void run_task(int64_t num_items, int64_t num_threads, Task task, const void* body);

template <class Body>
void run_items(int64_t num_items, int64_t num_threads, const Body& body) {
  run_task(
      num_items, num_threads, [](const void* it, Items& items) { (*static_cast<const Body*>(it))(items); }, &body);
}

// Units of work one after another, cut into items that grow shorter towards the end: long ones, of which neighbouring
// units share what they read, while there is much to do, and single units at last, so that no thread waits for long. None
// is of more than `most` units; those of more than `together` are of a multiple of it.
class ShrinkingItems {
 public:
  ShrinkingItems(int64_t num_units, int64_t num_threads, int64_t most, int64_t together = 1) {
    constexpr int64_t kItemsEach = 4;  // of the length of the next, for each thread
    const int64_t num_items = std::max<int64_t>(num_threads, 1) * kItemsEach;
    for (int64_t unit = 0; unit < num_units;) {
      starts_.push_back(unit);
      const int64_t length = std::clamp<int64_t>((num_units - unit) / num_items, 1, std::max<int64_t>(most, 1));
      unit += length > together ? length - length % together : length;
    }
    starts_.push_back(num_units);
  }

  int64_t size() const { return int64_t(starts_.size()) - 1; }
  int64_t start(int64_t item) const { return starts_[size_t(item)]; }
  int64_t end(int64_t item) const { return starts_[size_t(item) + 1]; }
  // Of all items, and the end of the last.
  const std::vector<int64_t>& starts() const { return starts_; }

 private:
  std::vector<int64_t> starts_;
};

// Rows a few at a time: those of an item, from the first to the end.
template <class Each>
void parallel_ranges(int64_t num_rows, int64_t num_threads, const Each& each) {
  constexpr int64_t kItemsEach = 4;  // for each thread to be done when the others are
  const int64_t rows_each = std::max<int64_t>(1, num_rows / (std::max<int64_t>(num_threads, 1) * kItemsEach));
  run_items((num_rows + rows_each - 1) / rows_each, num_threads, [&](Items& items) {
    for (int64_t item = items.next(); item >= 0; item = items.next())
      each(item * rows_each, std::min(num_rows, (item + 1) * rows_each));
  });
}

// Rows that are computed one by one, a few of them an item.
template <class Each>
void parallel_for(int64_t num_rows, int64_t num_threads, const Each& each) {
  parallel_ranges(num_rows, num_threads, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) each(row);
  });
}
