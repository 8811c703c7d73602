// Sampling: fixed-point probability weights of token ids, whose sums are the same in any order, and top-k and top-p.
//
// The weight of a logit x in a row with maximum m is floor(2^40 * 2^((x - m) * factor)), computed in float (the factor is
// log2(e) / temperature), so that the maximum has 2^40. Sums are exact for rows of less than 2^22 ids, so neither their
// order nor the sharding of a vocabulary changes them. A row must not have NaN.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "elements.h"
#include "thread_pool.h"

namespace {

typedef int64_t Longs __attribute__((vector_size(kLanes * 8)));

constexpr int64_t kPiece = 1024;   // ids of one sum, so that an id is searched among few
constexpr int64_t kSmall = 16384;  // ids: below this a second thread costs more than it gains
constexpr float kMaxWeight = 1099511627776.0f;

// Minus infinity twice or four times: two floats, four bfloat16.
SPMD_INLINE uint64_t forbidden_word(const float*) { return 0xff800000ff800000u; }
SPMD_INLINE uint64_t forbidden_word(const uint16_t*) { return 0xff80ff80ff80ff80u; }

// Whether all logits of a vector are minus infinity, which have weight 0: most are, in a row with a grammar.
template <class Element>
SPMD_INLINE bool all_forbidden(const Element* logits) {
  constexpr int kWords = kLanes * int(sizeof(Element)) / 8;
  const uint64_t forbidden = forbidden_word(logits);
  uint64_t words[kWords], others = 0;
  std::memcpy(words, logits, sizeof words);
  for (int word = 0; word < kWords; ++word) others |= words[word] ^ forbidden;
  return others == 0;
}

struct Tempered {
  float maxima, factor;

  // Weights of the first `count` logits of a vector; 0 for the rest.
  template <class Element>
  SPMD_INLINE_MEMBER Longs weights_of(const Element* logits, int64_t count) const {
    const Floats x = load_some(logits, count);
    const Floats power = exp2_of_falling((x - broadcast(maxima)) * broadcast(factor));
    const Floats kept = count >= kLanes ? power : (lane_numbers() < int(count) ? power : Floats{});
    return __builtin_convertvector(kept * broadcast(kMaxWeight), Longs);
  }

  template <class Element>
  int64_t sum(const Element* logits, int64_t count) const {
    Longs sums{};
    for (int64_t index = 0; index < count; index += kLanes) {
      if (index + kLanes <= count && all_forbidden(logits + index)) continue;
      sums += weights_of(logits + index, count - index);
    }
    int64_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
    return sum;
  }

  // The first index at which the running sum of weights is above `target`, or `count`.
  template <class Element>
  int64_t find(const Element* logits, int64_t count, int64_t target) const {
    for (int64_t index = 0; index < count; index += kLanes) {
      const Longs each = weights_of(logits + index, count - index);
      for (int lane = 0; lane < kLanes; ++lane)
        if ((target -= each[lane]) < 0) return index + lane;
    }
    return count;
  }
};

template <class Element>
void sum_pieces(
    const Element* logits, int64_t stride, int64_t num_rows, int64_t count, const float* maxima, const float* factors,
    int64_t* sums, int64_t num_threads) {
  const int64_t num_pieces = (count + kPiece - 1) / kPiece;
  parallel_for(num_rows, num_rows * count < kSmall ? 1 : num_threads, [&](int64_t row) {
    const Tempered tempered = {maxima[row], factors[row]};
    for (int64_t piece = 0; piece < num_pieces; ++piece)
      sums[row * num_pieces + piece] =
          tempered.sum(logits + row * stride + piece * kPiece, std::min(kPiece, count - piece * kPiece));
  });
}

template <class Element>
void find_ids(
    const Element* logits, int64_t stride, int64_t num_rows, int64_t count, const float* maxima, const float* factors,
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
    ids[row] = first + Tempered{maxima[row], factors[row]}.find(
                           logits + row * stride + first, std::min(kPiece, count - first), target);
  }
}

// Number of logits larger than `limit`. NaN is not.
template <class Element>
int64_t count_above(const Element* logits, int64_t count, float limit) {
  const Floats limits = broadcast(limit);
  Ints above{};
  int64_t index = 0;
  for (; index + kLanes <= count; index += kLanes) above -= load_floats(logits + index) > limits;
  int64_t found = 0;
  for (int lane = 0; lane < kLanes; ++lane) found += above[lane];
  for (; index < count; ++index) found += to_float(logits[index]) > limit;
  return found;
}

// ---- filters -----------------------------------------------------------------------------------------------------

// Integers in the order of the floats.
SPMD_INLINE uint32_t key_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}

SPMD_INLINE float of_key(uint32_t key) {
  const uint32_t bits = key ^ (key >> 31 != 0 ? 0x80000000u : 0xffffffffu);
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The largest number of a row such that those not smaller weigh `target` or more together; minus infinity if all weigh
// less. Found by one digit of the key at a time, from the highest on.
template <class Weight>
float select(const float* row, int64_t count, int64_t target, const Weight& weight) {
  constexpr int kDigits[][2] = {{21, 11}, {10, 11}, {0, 10}};  // shift and bits
  uint32_t above = 0;
  for (const auto& [shift, bits] : kDigits) {
    int64_t weights[1 << 11] = {};
    const uint32_t mask = (1u << bits) - 1;
    for (int64_t index = 0; index < count; ++index) {
      const uint32_t key = key_of(row[index]);
      if (shift + bits == 32 || key >> (shift + bits) == above) weights[key >> shift & mask] += weight(index);
    }
    int digit = int(mask);
    while (digit >= 0 && weights[digit] < target) target -= weights[digit--];
    if (digit < 0) return -kInfinity;
    above = above << bits | uint32_t(digit);
  }
  return of_key(above);
}

// The smallest logit that is kept: not below `min_logits`, of the `top_k` largest (0: all), and of the most probable of
// those that hold `top_p` of their weight.
struct Filter {
  Tempered tempered;
  float min_logits;
  int64_t top_k;
  double top_p;

  float least(const float* row, int64_t count) const {
    float least = min_logits;
    if (top_k > 0 && top_k < count)
      least = std::max(least, select(row, count, top_k, [](int64_t) { return int64_t(1); }));
    if (top_p >= 1.0) return least;
    thread_local std::vector<int64_t> weights_of;
    weights_of.resize(count + kLanes);
    Longs sums{};
    for (int64_t index = 0; index < count; index += kLanes) {
      Longs each = tempered.weights_of(row + index, count - index);
      for (int lane = 0; lane < kLanes && index + lane < count; ++lane)
        if (row[index + lane] < least) each[lane] = 0;
      store(weights_of.data() + index, each);
      sums += each;
    }
    int64_t total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
    const int64_t target = std::clamp<int64_t>(int64_t(std::ceil(top_p * double(total))), 1, std::max<int64_t>(total, 1));
    return std::max(least, select(row, count, target, [](int64_t index) { return weights_of[index]; }));
  }
};

void filter_row(float* row, int64_t count, const Filter& filter) {
  const float least = filter.least(row, count);
  const Floats limit = broadcast(least), none = broadcast(-kInfinity);
  int64_t index = 0;
  for (; index + kLanes <= count; index += kLanes) {
    const Floats x = load_floats(row + index);
    store_floats(row + index, x < limit ? none : x);
  }
  for (; index < count; ++index)
    if (row[index] < least) row[index] = -kInfinity;
}

// ---- what a form forbids -----------------------------------------------------------------------------------------

// The bits of 16 tokens from `first` on, of which those without a word are not set.
SPMD_INLINE uint32_t bits_of(const uint32_t* words, int64_t num_words, int64_t first) {
  const int64_t word = first / 32;
  const uint64_t low = word < num_words ? words[word] : 0, high = word + 1 < num_words ? words[word + 1] : 0;
  return uint32_t((high << 32 | low) >> first % 32) & 0xffff;
}

SPMD_INLINE void forbid_one(float* logit) { *logit = -kInfinity; }
SPMD_INLINE void forbid_one(uint16_t* logit) { *logit = 0xff80; }

#if defined(SPMD_AVX512)
SPMD_INLINE void forbid_all(float* logits, uint32_t bits) {
  _mm512_mask_storeu_ps(logits, __mmask16(bits), _mm512_set1_ps(-kInfinity));
}
SPMD_INLINE void forbid_all(uint16_t* logits, uint32_t bits) {
  _mm256_mask_storeu_epi16(logits, __mmask16(bits), _mm256_set1_epi16(int16_t(0xff80)));
}
#else
template <class Element>
SPMD_INLINE void forbid_all(Element* logits, uint32_t bits) {
  for (int lane = 0; lane < 16; ++lane)
    if (bits >> lane & 1) forbid_one(logits + lane);
}
#endif

template <class Element>
void forbid_row(Element* logits, int64_t count, int64_t first_id, const uint32_t* words, int64_t num_words) {
  int64_t index = 0;
  for (; index + 16 <= count; index += 16) {
    const uint32_t bits = ~bits_of(words, num_words, first_id + index) & 0xffff;
    if (bits != 0) forbid_all(logits + index, bits);
  }
  const uint32_t bits = ~bits_of(words, num_words, first_id + index);
  for (int64_t lane = 0; index + lane < count; ++lane)
    if (bits >> lane & 1) forbid_one(logits + index + lane);
}

}  // namespace

// Minus infinity in place of what the filters of each row drop.
extern "C" void spmd_filter_float32(
    float* logits, int64_t stride, int64_t num_rows, int64_t count, const float* maxima, const float* factors,
    const float* min_logits, const int64_t* top_k, const double* top_p, int64_t num_threads) {
  parallel_for(num_rows, num_rows * count < kSmall ? 1 : num_threads, [&](int64_t row) {
    filter_row(logits + row * stride, count, {{maxima[row], factors[row]}, min_logits[row], top_k[row], top_p[row]});
  });
}

#define SPMD_DRAWS(name, Element)                                                                                      \
  /* Minus infinity, in rows `rows` of columns from token `first_id` on, for tokens whose bit is not set in the row of    \
     `allowed` [..][num_words] that `mask_rows` names. */                                                                 \
  extern "C" void spmd_forbid_##name(                                                                                  \
      Element* logits, int64_t stride, int64_t count, int64_t first_id, const uint32_t* allowed, int64_t num_words,    \
      const int64_t* rows, const int64_t* mask_rows, int64_t num_rows, int64_t num_threads) {                             \
    parallel_for(num_rows, num_rows * count < 4 * kSmall ? 1 : num_threads, [&](int64_t which) {                       \
      forbid_row(logits + rows[which] * stride, count, first_id, allowed + mask_rows[which] * num_words, num_words);      \
    });                                                                                                                \
  }                                                                                                                    \
  /* Of each row how many logits are larger than its number in `values`. */                                           \
  extern "C" void spmd_count_above_##name(                                                                             \
      const Element* logits, int64_t stride, int64_t num_rows, int64_t count, const float* values, int64_t* counts,    \
      int64_t num_threads) {                                                                                           \
    parallel_for(num_rows, num_rows * count < 4 * kSmall ? 1 : num_threads, [&](int64_t row) {                         \
      counts[row] = count_above(logits + row * stride, count, values[row]);                                            \
    });                                                                                                                \
  }                                                                                                                    \
  /* Of each row's pieces of `kPiece` ids the sum of their weights: [num_rows][pieces]. */                                 \
  extern "C" void spmd_prob_sums_##name(                                                                                  \
      const Element* logits, int64_t stride, int64_t num_rows, int64_t count, const float* maxima,                    \
      const float* factors, int64_t* sums, int64_t num_threads) {                                                      \
    sum_pieces(logits, stride, num_rows, count, maxima, factors, sums, num_threads);                                  \
  }                                                                                                                    \
  /* Of each row the first index at which its running sum is above its target; -1  where there is none, or the target  \
     is below 0. `sums` are of `spmd_prob_sums`. */                                                                    \
  extern "C" void spmd_invert_cdf_##name(                                                                               \
      const Element* logits, int64_t stride, int64_t num_rows, int64_t count, const float* maxima,                    \
      const float* factors, const int64_t* sums, const int64_t* targets, int64_t* ids) {                               \
    find_ids(logits, stride, num_rows, count, maxima, factors, sums, targets, ids);                                   \
  }

SPMD_DRAWS(float32, float)
SPMD_DRAWS(bfloat16, uint16_t)
