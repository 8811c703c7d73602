// What is drawn from: masses of token ids as whole numbers, whose sums are the same in any order.
//
// The mass of a logit x in a row whose largest is m is floor(2^40 * 2^((x - m) * factor)), computed in float (the factor is
// log2(e) / temperature), so that the largest has 2^40. Sums are exact as long as a row has less than 2^22 ids; whoever adds
// up which part of a vocabulary, and in which order, changes nothing. A row with a logit that is NaN is not to be given.

#include <algorithm>
#include <cstdint>

#include "elements.h"
#include "team.h"

namespace {

typedef int64_t Longs __attribute__((vector_size(kLanes * 8)));

constexpr int64_t kPiece = 1024;   // ids whose masses are summed up by themselves, so that an id is found among few
constexpr int64_t kSmall = 16384;  // ids: below this a second thread costs more than it brings
constexpr float kMost = 1099511627776.0f;

struct Tempered {
  float largest, factor;

  // What is before `count` of a vector's logits; the rest has no mass.
  template <class Element>
  SPMD_INLINE_MEMBER Longs masses(const Element* logits, int64_t count) const {
    const Floats x = load_some(logits, count);
    const Floats power = exp2_of_falling((x - broadcast(largest)) * broadcast(factor));
    const Floats kept = count >= kLanes ? power : (lane_numbers() < int(count) ? power : Floats{});
    return __builtin_convertvector(kept * broadcast(kMost), Longs);
  }

  template <class Element>
  int64_t sum(const Element* logits, int64_t count) const {
    Longs sums{};
    for (int64_t place = 0; place < count; place += kLanes) sums += masses(logits + place, count - place);
    int64_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
    return sum;
  }

  // The first place at which the running mass is above `target`, or `count`.
  template <class Element>
  int64_t find(const Element* logits, int64_t count, int64_t target) const {
    for (int64_t place = 0; place < count; place += kLanes) {
      const Longs each = masses(logits + place, count - place);
      for (int lane = 0; lane < kLanes; ++lane)
        if ((target -= each[lane]) < 0) return place + lane;
    }
    return count;
  }
};

template <class Element>
void sum_pieces(
    const Element* logits, int64_t stride, int64_t num_rows, int64_t count, const float* largest, const float* factors,
    int64_t* sums, int64_t num_threads) {
  const int64_t num_pieces = (count + kPiece - 1) / kPiece;
  each_by_team(num_rows, num_rows * count < kSmall ? 1 : num_threads, [&](int64_t row) {
    const Tempered tempered = {largest[row], factors[row]};
    for (int64_t piece = 0; piece < num_pieces; ++piece)
      sums[row * num_pieces + piece] =
          tempered.sum(logits + row * stride + piece * kPiece, std::min(kPiece, count - piece * kPiece));
  });
}

template <class Element>
void find_ids(
    const Element* logits, int64_t stride, int64_t num_rows, int64_t count, const float* largest, const float* factors,
    const int64_t* sums, const int64_t* targets, int64_t* ids) {
  const int64_t num_pieces = (count + kPiece - 1) / kPiece;
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t piece = 0, target = targets[row];
    const int64_t* own = sums + row * num_pieces;
    ids[row] = -1;
    if (target < 0) continue;
    while (piece < num_pieces && target >= own[piece]) target -= own[piece++];
    if (piece == num_pieces) continue;
    const int64_t first = piece * kPiece;
    ids[row] = first + Tempered{largest[row], factors[row]}.find(
                           logits + row * stride + first, std::min(kPiece, count - first), target);
  }
}

}  // namespace

#define SPMD_DRAWS(name, Element)                                                                                      \
  /* Of each row's pieces of `kPiece` ids the sum of their masses: [num_rows][pieces]. */                              \
  extern "C" void spmd_masses_##name(                                                                                  \
      const Element* logits, int64_t stride, int64_t num_rows, int64_t count, const float* largest,                    \
      const float* factors, int64_t* sums, int64_t num_threads) {                                                      \
    sum_pieces(logits, stride, num_rows, count, largest, factors, sums, num_threads);                                  \
  }                                                                                                                    \
  /* Of each row the first place at which its running mass is above its target; -1 where there is none, or the target  \
     is below 0. `sums` are of `spmd_masses`. */                                                                       \
  extern "C" void spmd_find_mass_##name(                                                                               \
      const Element* logits, int64_t stride, int64_t num_rows, int64_t count, const float* largest,                    \
      const float* factors, const int64_t* sums, const int64_t* targets, int64_t* ids) {                               \
    find_ids(logits, stride, num_rows, count, largest, factors, sums, targets, ids);                                   \
  }

SPMD_DRAWS(float32, float)
SPMD_DRAWS(bfloat16, uint16_t)
