// Where the rows are that a block of sums is of, as few addresses as processors have registers for.
#pragma once

#include <cstdint>

#include "vector.h"

// A pointer to every third row, from which the others are one and two strides away. With one for each of 14 rows compilers
// keep some in vector registers, and moving those takes a step of the units that multiply.
template <class Element, int kRows>
class RowAddresses {
 public:
  SPMD_INLINE_MEMBER RowAddresses(const Element* first, int64_t stride) : stride_(stride) {
#pragma GCC unroll 5
    for (int third = 0; third < kThirds; ++third) thirds_[third] = first + third * 3 * stride;
  }
  SPMD_INLINE_MEMBER const Element* row(int number) const { return thirds_[number / 3] + number % 3 * stride_; }
  SPMD_INLINE_MEMBER void advance(int count) {
#pragma GCC unroll 5
    for (int third = 0; third < kThirds; ++third) {
      thirds_[third] += count;
      asm volatile("" : "+r"(thirds_[third]));  // else they become one pointer a row again
    }
  }

 private:
  static constexpr int kThirds = (kRows + 2) / 3;
  const Element* thirds_[kThirds];
  int64_t stride_;
};
