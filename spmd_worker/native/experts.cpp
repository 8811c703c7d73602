// The experts of a sparse layer in one call, with the results of `Expert`, one after another.
//
// A call from Python costs 10 to 20 microseconds with its tensors, and an expert took seven, however few its tokens are. The
// tokens are sorted by expert; an item is an expert with some of its tokens, at most kMostRows. If there are enough of them,
// a thread computes an item alone, which waits for no other, the longest first; otherwise all threads compute each.
//
// The structures are those of `experts.py`, field by field.

#include <algorithm>
#include <cstring>
#include <vector>

#include "elements.h"
#include "exports.h"
#include "int8.h"
#include "thread_pool.h"
#include "vector.h"

namespace {

constexpr int64_t kMostRows = 256;  // bounds the scratch memory of a thread, and for how long it delays the others
// Below this many numbers a second thread costs more than it gains.
constexpr int64_t kSmall = 8192;
constexpr float kGateSlope = 1.702f;

template <class Element>
struct Calls;

#define SPMD_CALLS(name, Element)                                                                                      \
  template <>                                                                                                          \
  struct Calls<Element> {                                                                                              \
    static constexpr auto activate = spmd_activate_##name;                                                             \
    static constexpr auto gemm = spmd_gemm_##name;                                                                     \
    static constexpr auto gemm_leaves = spmd_gemm_leaves_##name;                                                       \
    static constexpr auto int8_gemm = spmd_int8_gemm_##name;                                                           \
  };

SPMD_CALLS(float32, float)
SPMD_CALLS(bfloat16, uint16_t)

// Weights in panels of elements, of bytes (int8.h) or, with bfloat16 elements, of numbers as files have them (stored.h).
enum WeightKind : int64_t { kElements, kBytes, kStored };

// Weights of the layer's kind; biases may be null.
template <class Element>
struct Expert {
  const void* gates;
  const Element* gates_bias;
  const void* down;
  const Element* down_bias;
};

// How outputs of the first product become inputs of the second: by SiLU, in gated panels; by an activation of the first half
// of the columns, times the second; by an activation of all; by bounded gates that alternate with ups.
enum Gating : int64_t { kInPanels, kFirstHalf, kUngated, kAlternating };

// `numbers`: of each of the layer's experts among the rank's own, `experts`; below 0 if it is on another rank. With leaves
// (ranks/leaves.py) `leaf_ends` are those of the second product's inputs, and results are float if they are a `part` of a
// sum; without, and with bytes, `num_leaves` is 0.
template <class Element>
struct Layer {
  const Expert<Element>* experts;
  const int64_t* numbers;
  int64_t num_experts, hidden_size, intermediate_size, gating, activation;
  const int64_t* leaf_ends;
  int64_t num_leaves, is_part, kind;
  float limit;
};

// What a call computes: all; or the first product, columns by slot, [tokens * chosen][columns]; or the second one, of opened
// rows by slot. Between these adapters add to columns. A slot is a place in `ids`.
enum Phase { kAll, kColumns, kDown };

// `ids` [tokens][chosen]. The tokens of each expert are added to `totals`, unless it is null.
template <class Element>
struct Tokens {
  const Element* x;
  int64_t stride, num_tokens, num_chosen;
  const int64_t* ids;
  int64_t* totals;
};

// Room for `count` elements in memory of the thread.
template <class Element, int kWhich>
Element* room(int64_t count) {
  static thread_local std::vector<Element> kept;
  if (int64_t(kept.size()) < count) kept.resize(size_t(count));
  return kept.data();
}

// Rounds subnormal numbers too, as torch does: `store_floats` may flush them to zero.
SPMD_INLINE void store_rounded(float* to, Floats vector) { store(to, vector); }
SPMD_INLINE void store_rounded(uint16_t* to, Floats vector) {
  store(to, low_halves(rounded_bits(vector)));
}

template <class Element>
class Run {
 public:
  Run(const Layer<Element>& layer, const Tokens<Element>& tokens, void* results, Phase phase)
      : layer_(layer), tokens_(tokens), results_(static_cast<char*>(results)), phase_(phase),
        num_columns_((layer.gating == kUngated ? 1 : 2) * layer.intermediate_size),
        result_bytes_(
            phase == kColumns ? num_columns_ * int64_t(sizeof(Element))
                              : layer.hidden_size * int64_t(layer.is_part ? sizeof(float) : sizeof(Element))) {}

  void run(int64_t num_threads) {
    sort();
    const int64_t num_items = int64_t(items_.size());
    if (num_items < 2 * num_threads) {
      for (const Item& item : items_) compute(item, num_threads);
      return;
    }
    std::stable_sort(
        items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.num_rows > b.num_rows; });
    run_items(num_items, num_threads, [&](Items& claimed) {
      for (int64_t item = claimed.next(); item >= 0; item = claimed.next()) compute(items_[size_t(item)], 1);
    });
  }

 private:
  struct Item {
    const Expert<Element>* expert;
    const int64_t* slots;  // places of the tokens in `ids`, ascending
    int64_t num_rows;
  };

  // Makes the items. Results of other ranks' experts are zero.
  void sort() {
    const int64_t num_slots = tokens_.num_tokens * tokens_.num_chosen;
    std::vector<int64_t> ends(size_t(layer_.num_experts) + 1);
    for (int64_t slot = 0; slot < num_slots; ++slot) ++ends[size_t(tokens_.ids[slot]) + 1];
    for (int64_t expert = 0; expert < layer_.num_experts; ++expert) {
      if (tokens_.totals != nullptr) tokens_.totals[expert] += ends[size_t(expert) + 1];
      ends[size_t(expert) + 1] += ends[size_t(expert)];
    }
    std::vector<int64_t> next(ends);
    slots_.resize(size_t(num_slots));
    for (int64_t slot = 0; slot < num_slots; ++slot) slots_[size_t(next[size_t(tokens_.ids[slot])]++)] = slot;
    for (int64_t expert = 0; expert < layer_.num_experts; ++expert) {
      const int64_t end = ends[size_t(expert) + 1], number = layer_.numbers[expert];
      for (int64_t first = ends[size_t(expert)]; first < end; first += kMostRows) {
        const int64_t num_rows = std::min(kMostRows, end - first);
        if (number >= 0) {
          items_.push_back({layer_.experts + number, slots_.data() + first, num_rows});
        } else {
          for (int64_t row = first; row < first + num_rows; ++row)
            std::memset(result(slots_[size_t(row)]), 0, size_t(result_bytes_));
        }
      }
    }
  }

  char* result(int64_t slot) const { return results_ + slot * result_bytes_; }
  const Element* input(int64_t slot) const {
    return tokens_.x + (phase_ == kDown ? slot : slot / tokens_.num_chosen) * tokens_.stride;
  }

  void compute(const Item& item, int64_t num_threads) const {
    const int64_t hidden = layer_.hidden_size, size = layer_.intermediate_size, num_rows = item.num_rows;
    const int64_t num_inputs = phase_ == kDown ? size : hidden;
    const Element* x = input(item.slots[0]);
    char* to = result(item.slots[0]);
    const bool is_single = num_rows == 1;
    if (!is_single) {
      Element* const rows = room<Element, 0>(num_rows * num_inputs);
      for (int64_t row = 0; row < num_rows; ++row)
        std::copy_n(input(item.slots[row]), num_inputs, rows + row * num_inputs);
      x = rows, to = room<char, 1>(num_rows * result_bytes_);
    }
    const Element* opened = x;
    if (phase_ == kAll) {
      Element* const rows = room<Element, 2>(num_rows * size);
      open(*item.expert, x, num_rows, rows, num_threads);
      opened = rows;
    }
    if (phase_ == kColumns)
      multiply(
          x, num_rows, hidden, item.expert->gates, num_columns_, item.expert->gates_bias, reinterpret_cast<Element*>(to),
          false, num_threads);
    else if (layer_.num_leaves == 0)
      multiply(
          opened, num_rows, size, item.expert->down, hidden, item.expert->down_bias, reinterpret_cast<Element*>(to), false,
          num_threads);
    else
      multiply_leaves(opened, num_rows, *item.expert, to, num_threads);
    if (is_single) return;
    for (int64_t row = 0; row < num_rows; ++row)
      std::memcpy(result(item.slots[row]), to + row * result_bytes_, size_t(result_bytes_));
  }

  // Rows without gaps by a packed weight, as `Kernels.linear` and `gated_linear` multiply them.
  void multiply(
      const Element* x, int64_t num_rows, int64_t num_inputs, const void* weight, int64_t num_outputs, const Element* bias,
      Element* to, bool is_gated, int64_t num_threads) const {
    if (layer_.kind == kBytes)
      return Calls<Element>::int8_gemm(
          x, num_inputs, num_rows, num_inputs, static_cast<const int8_t*>(weight), num_outputs, bias, to, is_gated,
          room<float, 4>(num_rows), room<int8_t, 5>(num_rows * padded_to_steps(num_inputs)), num_threads);
    if constexpr (sizeof(Element) == 2)
      if (layer_.kind == kStored)
        return spmd_stored_gemm_bfloat16(
            x, num_inputs, num_rows, num_inputs, static_cast<const uint8_t*>(weight), num_outputs, bias, to, is_gated,
            num_threads);
    Calls<Element>::gemm(
        x, num_inputs, num_rows, num_inputs, static_cast<const Element*>(weight), num_outputs, bias, to, is_gated,
        num_threads);
  }

  void multiply_leaves(
      const Element* opened, int64_t num_rows, const Expert<Element>& expert, void* to, int64_t num_threads) const {
    const int64_t hidden = layer_.hidden_size, size = layer_.intermediate_size;
    if constexpr (sizeof(Element) == 2)
      if (layer_.kind == kStored)
        return spmd_stored_gemm_leaves_bfloat16(
            opened, size, num_rows, size, static_cast<const uint8_t*>(expert.down), hidden, expert.down_bias, to,
            layer_.leaf_ends, layer_.num_leaves, layer_.is_part, num_threads);
    Calls<Element>::gemm_leaves(
        opened, size, num_rows, size, static_cast<const Element*>(expert.down), hidden, expert.down_bias, to,
        layer_.leaf_ends, layer_.num_leaves, layer_.is_part, num_threads);
  }

  void open(
      const Expert<Element>& expert, const Element* x, int64_t num_rows, Element* opened, int64_t num_threads) const {
    const int64_t hidden = layer_.hidden_size, size = layer_.intermediate_size;
    const bool is_in_panels = layer_.gating == kInPanels;
    Element* const columns = is_in_panels ? opened : room<Element, 3>(num_rows * num_columns_);
    multiply(x, num_rows, hidden, expert.gates, num_columns_, expert.gates_bias, columns, is_in_panels, num_threads);
    if (is_in_panels) return;
    if (layer_.gating != kAlternating)
      return Calls<Element>::activate(
          columns, num_columns_, num_rows, size, layer_.gating == kFirstHalf, layer_.activation, opened, num_threads);
    parallel_for(num_rows, num_rows * size < kSmall ? 1 : num_threads, [&](int64_t row) {
      bound_gates(columns + row * 2 * size, opened + row * size);
    });
  }

  // gate * sigmoid(1.702 * gate) * (up + 1) in float, as `_ClampedGates` computes it. NaN stays NaN.
  void bound_gates(const Element* columns, Element* to) const {
    const Floats limit = broadcast(layer_.limit);
    for (int64_t index = 0; index < layer_.intermediate_size; index += kLanes) {
      float gates[kLanes], ups[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        gates[lane] = to_float(columns[2 * (index + lane)]);
        ups[lane] = to_float(columns[2 * (index + lane) + 1]);
      }
      Floats gate = load<Floats>(gates), up = load<Floats>(ups);
      gate = gate > limit ? limit : gate;
      up = up > limit ? limit : up;
      up = up < -limit ? -limit : up;
      store_rounded(to + index, silu(gate * broadcast(kGateSlope)) / broadcast(kGateSlope) * (up + broadcast(1.0f)));
    }
  }

  const Layer<Element>& layer_;
  const Tokens<Element>& tokens_;
  char* const results_;
  const Phase phase_;
  const int64_t num_columns_, result_bytes_;
  std::vector<int64_t> slots_;
  std::vector<Item> items_;
};

// Products of results [tokens][chosen][size] and weights, added in float from a token's first to its last, then rounded.
template <class Element>
void weighted_sum(
    const Element* results, const float* weights, int64_t num_tokens, int64_t num_chosen, int64_t size, Element* to,
    int64_t num_threads) {
  parallel_for(num_tokens, num_tokens * num_chosen * size < kSmall ? 1 : num_threads, [&](int64_t token) {
    const Element* const rows = results + token * num_chosen * size;
    const float* const of_token = weights + token * num_chosen;
    for (int64_t index = 0; index < size; index += kLanes) {
      const int64_t count = size - index;
      Floats sum = {};
      for (int64_t chosen = 0; chosen < num_chosen; ++chosen)
        sum = sum + load_some(rows + chosen * size + index, count) * broadcast(of_token[chosen]);
      if (count >= kLanes)
        store_rounded(to + token * size + index, sum);
      else
        store_some(to + token * size + index, sum, count);
    }
  });
}

}  // namespace

#define SPMD_EXPERTS(name, Element)                                                                                    \
  /* Results [tokens][chosen][hidden], or columns. */                                                                              \
  extern "C" void spmd_experts_##name(                                                                                 \
      const void* layer, const void* tokens, void* results, int64_t phase, int64_t num_threads) {                      \
    Run<Element>(                                                                                                      \
        *static_cast<const Layer<Element>*>(layer), *static_cast<const Tokens<Element>*>(tokens), results,             \
        Phase(phase))                                                                                                  \
        .run(num_threads);                                                                                             \
  }                                                                                                                    \
  extern "C" void spmd_weighted_sum_##name(                                                                            \
      const Element* results, const float* weights, int64_t num_tokens, int64_t num_chosen, int64_t size, Element* to, \
      int64_t num_threads) {                                                                                           \
    weighted_sum(results, weights, num_tokens, num_chosen, size, to, num_threads);                                     \
  }

SPMD_EXPERTS(float32, float)
SPMD_EXPERTS(bfloat16, uint16_t)
