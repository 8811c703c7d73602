// The maximum of each row and its first index, found by threads that each see a part of it. NaN is larger than all numbers.
#pragma once

#include <vector>

#include "vector.h"

namespace {

// Whether `x` replaces `most`, which stays if it is NaN.
SPMD_INLINE auto is_larger(Floats x, Floats most) { return ~(x <= most) & (most == most); }
SPMD_INLINE bool is_larger(float x, float most) { return !(x <= most) && most == most; }

// What one thread has seen of some rows: each lane's maximum so far, and the number of its vector.
class LaneArgmax {
 public:
  explicit LaneArgmax(int64_t num_rows) : lanes_(num_rows, {broadcast(-kInfinity), Ints{}}) {}

  // Vector `number` of a row, which starts at index `number` * kLanes. Numbers rise from call to call.
  SPMD_INLINE_MEMBER void take(int64_t row, int number, Floats x) {
    Lanes& lanes = lanes_[row];
    const auto is_taken = is_larger(x, lanes.values);
    lanes.values = is_taken ? x : lanes.values;
    lanes.numbers = is_taken ? Ints{} + number : lanes.numbers;
  }

  // Merges the row's result into what other threads found.
  void merge(int64_t row, float& value, int64_t& index) const {
    const Lanes& lanes = lanes_[row];
    for (int lane = 0; lane < kLanes; ++lane) {
      const float x = lanes.values[lane];
      const int64_t at = int64_t(lanes.numbers[lane]) * kLanes + lane;
      const bool is_equal = x == value || (x != x && value != value);
      if (is_larger(x, value) || (is_equal && at < index)) value = x, index = at;
    }
  }

 private:
  struct Lanes {
    Floats values;
    Ints numbers;
  };
  std::vector<Lanes> lanes_;
};

}  // namespace
