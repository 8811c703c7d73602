// Decoder layers in one call, with the results of `DecoderLayer`, all-reduces of a tensor-parallel group included.
//
// Each part is a function that Python can also call, so the results are the same; the saved calls and tensors cost a fifth
// of the time of a step of few tokens. The structures are those of `layers.py`, field by field.

#include "adapters.h"
#include "exports.h"
#include "norm_rows.h"
#include "thread_pool.h"

namespace {

// Below this many numbers a second thread costs more than it gains.
constexpr int64_t kSmall = 8192;

template <class Element>
struct Calls;

#define SPMD_CALLS(name, Element)                                                                                      \
  template <>                                                                                                          \
  struct Calls<Element> {                                                                                              \
    static constexpr auto add_rms_norm = spmd_add_rms_norm_##name;                                                     \
    static constexpr auto activate = spmd_activate_##name;                                                             \
    static constexpr auto gemm = spmd_gemm_##name;                                                                     \
    static constexpr auto gemm_leaves = spmd_gemm_leaves_##name;                                                       \
    static constexpr auto int8_gemm = spmd_int8_gemm_##name;                                                     \
    static constexpr auto attend_projected = spmd_attend_projected_##name;                                             \
    static constexpr auto add_adapters = spmd_add_adapters_##name;                                                     \
    SPMD_CALLS_OF_A_GROUP(name)                                                                                        \
  };

#if defined(__linux__)
#define SPMD_CALLS_OF_A_GROUP(name) static constexpr auto sum_add_rms_norm = spmd_shared_sum_add_rms_norm_##name;
#else
#define SPMD_CALLS_OF_A_GROUP(name)
#endif

SPMD_CALLS(float32, float)
SPMD_CALLS(bfloat16, uint16_t)

// Weights are in panels of elements or, if the stack `has_bytes`, of bytes (int8.h); with bfloat16 elements those of which
// `stored` has the bits 1 << `Linear` as files store them (stored.h). Biases and norms may be null; heads are normed, both
// kinds or neither, and rotated by the angles of number `rope` or, below 0, not. Without `gates` the layer has experts: it
// ends with the norm before them, and the caller leaves their output where the next layer finds a part.
template <class Element>
struct Layer {
  const Element* input_norm;
  const void* qkv;
  const Element *qkv_bias, *query_norm, *key_norm;
  const void* output;
  const Element *output_bias, *attention_output_norm, *feed_forward_norm;
  const void* gates;
  const Element* gates_bias;
  const void* down;
  const Element *down_bias, *feed_forward_output_norm;
  int64_t window, rope, stored;
};

// The plain norm, fused with sums; one that is rounded once, and one of deviations from the mean.
enum NormKind : int64_t { kPlainNorm, kNormOnce, kCentredNorm };
constexpr int64_t kSilu = 0;  // of the activations in rows.cpp

// With SiLU gates and up projection are in gated panels. In layers that defer, an output is added with the next norm.
// Sizes on this rank, and the ends of the leaves (ranks/leaves.py) in which the inputs of both row-parallel layers are
// summed: a single leaf is all inputs.
template <class Element>
struct Stack {
  const Layer<Element>* layers;
  int64_t hidden_size, num_heads, num_kv_heads, head_size, intermediate_size, block_size;
  int64_t cache_in_bytes, has_bytes, norm_kind, activation, defers;
  const int64_t *output_leaf_ends, *down_leaf_ends;
  int64_t num_output_leaves, num_down_leaves;
  float epsilon, norm_offset, scale, score_cap, multiplier;
};

// A group, as in shared_memory.cpp.
struct Ranks {
  char* memory;
  int64_t rank, size, slot_bytes, spin_ns, timeout_ns;
  const int32_t* processes;
  int64_t few_elements;
};

#define SPMD_THE_RANKS                                                                                                 \
  ranks->memory, ranks->rank, ranks->size, ranks->slot_bytes, ranks->spin_ns, ranks->timeout_ns, ranks->processes,     \
      ranks->few_elements

// Linear layers, which may have adapters.
enum Linear { kQkv, kOutput, kGates, kDown, kNumLinear };

// One layer's blocks, and the block tables and the blocks of the step's tokens of its group of layers.
template <class Element>
struct LayerBlocks {
  void* cache;
  int64_t block_stride;
  const int64_t* tables;
  int64_t table_stride;
  const int64_t* blocks;
};

// `x`, `projected`, `attended` and `opened` are scratch memory; so are `bytes` and `maxima` if the stack `has_bytes`: one
// row per token, wide enough for the widest. `wide` is scratch memory too, for a part [tokens][hidden] that fits no slot. If
// rows of the step have adapters, `adapters` are those rows (adapters.h), `layer_adapters` the matrices of each layer's
// kNumLinear linear layers, perhaps null, and `columns` scratch memory of one row more than there are tokens, for gates and
// up projections, which other activations than SiLU have too; otherwise all three are null. They are with several ranks:
// adapters add to complete sums. `angles`: cosines and sines of each rope in turn.
template <class Element>
struct Step {
  Element *residual, *x, *projected, *attended, *opened;
  int8_t* bytes;
  float *maxima, *wide;
  const Element* const* angles;
  const LayerBlocks<Element>* layers;
  const int64_t *offsets, *query_starts, *context_lengths;
  int64_t num_sequences, num_tokens, num_threads;
  const void* adapters;
  const void* const* layer_adapters;
  Element* columns;
};

template <class Element>
struct Run {
  const Stack<Element>& stack;
  const Step<Element>& step;
  const Ranks* ranks;  // null: a single rank

  int64_t num_elements() const { return step.num_tokens * stack.hidden_size; }

  static const void* weight_of(const Layer<Element>& layer, Linear which) {
    return which == kQkv ? layer.qkv : which == kOutput ? layer.output : which == kGates ? layer.gates : layer.down;
  }

  void multiply(
      const Layer<Element>& layer, Linear which, const Element* x, int64_t num_inputs, int64_t num_outputs,
      const Element* bias, Element* to, bool is_gated = false) const {
    const void* const weight = weight_of(layer, which);
    if (stack.has_bytes)
      return Calls<Element>::int8_gemm(
          x, num_inputs, step.num_tokens, num_inputs, static_cast<const int8_t*>(weight), num_outputs, bias, to,
          is_gated, step.maxima, step.bytes, step.num_threads);
    if constexpr (sizeof(Element) == 2)
      if (layer.stored >> which & 1)
        return spmd_stored_gemm_bfloat16(
            x, num_inputs, step.num_tokens, num_inputs, static_cast<const uint8_t*>(weight), num_outputs, bias, to,
            is_gated, step.num_threads);
    Calls<Element>::gemm(
        x, num_inputs, step.num_tokens, num_inputs, static_cast<const Element*>(weight), num_outputs, bias, to, is_gated,
        step.num_threads);
  }

  // The matrices of the step's adapters for a linear layer; null if there are none.
  const void* adapters_of(int64_t number, Linear which) const {
    return step.adapters == nullptr ? nullptr : step.layer_adapters[number * kNumLinear + which];
  }

  void add_adapters(
      const void* matrices, const Element* x, int64_t num_inputs, Element* y, int64_t num_outputs,
      int64_t half = 0) const {
    if (matrices != nullptr)
      Calls<Element>::add_adapters(
          matrices, step.adapters, x, num_inputs, y, num_outputs, half, step.num_threads);
  }

  // The gates applied, with the bits of the gated GEMM for rows without an adapter.
  void open(int64_t number, const Element* normal) const {
    const Layer<Element>& layer = stack.layers[number];
    const int64_t size = stack.intermediate_size, num_columns = 2 * size;
    const void* const matrices = adapters_of(number, kGates);
    if (stack.activation != kSilu) {
      multiply(layer, kGates, normal, stack.hidden_size, num_columns, layer.gates_bias, step.columns);
      add_adapters(matrices, normal, stack.hidden_size, step.columns, num_columns);
      return Calls<Element>::activate(
          step.columns, num_columns, step.num_tokens, size, true, stack.activation, step.opened, step.num_threads);
    }
    if (matrices == nullptr)
      return multiply(layer, kGates, normal, stack.hidden_size, num_columns, layer.gates_bias, step.opened, true);
    // Columns, and so the bias, are in the order of gated panels.
    Element* bias = nullptr;
    if (layer.gates_bias != nullptr) {
      bias = step.columns + step.num_tokens * num_columns;
      for (int64_t output = 0; output < num_columns; ++output)
        bias[column_of(output, size)] = layer.gates_bias[output];
    }
    multiply(layer, kGates, normal, stack.hidden_size, num_columns, bias, step.columns);
    add_adapters(matrices, normal, stack.hidden_size, step.columns, num_columns, size);
    parallel_for(step.num_tokens, step.num_tokens * size < kSmall ? 1 : step.num_threads, [&](int64_t token) {
      const Element* const columns = step.columns + token * num_columns;
      for (int64_t index = 0; index < size; index += kLanes) {
        const Element* const gates = columns + column_of(index, size);
        const Floats gate = load_floats(gates), up = load_floats(gates + kPanel);
        store_floats(step.opened + token * size + index, as_kept<Element>(silu(gate)) * up);
      }
    });
  }

  void norm(const Element* row, int64_t size, const Element* weight, Element* to) const {
    if (stack.norm_kind == kPlainNorm) return norm_row(row, size, weight, stack.epsilon, to);
    full_norm_row<Element>(
        row, size, weight, nullptr, stack.epsilon, stack.norm_offset, stack.norm_kind == kCentredNorm, to);
  }

  // Each query and key head, in place.
  void norm_heads(const Layer<Element>& layer, int64_t projected_size) const {
    if (layer.query_norm == nullptr) return;
    const int64_t size = stack.head_size, num_heads = stack.num_heads, num_normed = num_heads + stack.num_kv_heads;
    const int64_t num_threads = step.num_tokens * num_normed * size < kSmall ? 1 : step.num_threads;
    parallel_for(step.num_tokens, num_threads, [&](int64_t token) {
      for (int64_t head = 0; head < num_normed; ++head) {
        Element* const row = step.projected + token * projected_size + head * size;
        norm(row, size, head < num_heads ? layer.query_norm : layer.key_norm, row);
      }
    });
  }

  template <class Work>
  void for_rows(Work work) const {
    parallel_for(step.num_tokens, num_elements() < kSmall ? 1 : step.num_threads, [&](int64_t token) {
      work(step.residual + token * stack.hidden_size, step.x + token * stack.hidden_size);
    });
  }

  // The norm of the residual stream; the stream itself without a weight.
  const Element* normed(const Element* weight) const {
    if (weight == nullptr) return step.residual;
    for_rows([&](const Element* residual, Element* x) { norm(residual, stack.hidden_size, weight, x); });
    return step.x;
  }

  // An output in `x`, complete: scaled if it is still to be added, else normed if there is a weight, scaled and added.
  void end_output(const Element* weight) const {
    const int64_t size = stack.hidden_size;
    if (stack.defers && stack.multiplier == 1.0f) return;
    for_rows([&](Element* residual, Element* x) {
      if (weight != nullptr) norm(x, size, weight, x);
      for (int64_t index = 0; index < size; index += kLanes) {
        const int64_t count = size - index;
        Floats output = load_some(x + index, count);
        if (stack.multiplier != 1.0f) output = as_kept<Element>(output * broadcast(stack.multiplier));
        if (stack.defers)
          store_some(x + index, output, count);
        else
          store_some(residual + index, output + load_some(residual + index, count), count);
      }
    });
  }

  // A row-parallel product: the next addend, `x`, or with several ranks this rank's `part` of it.
  void multiply_leaves(
      const Layer<Element>& layer, Linear which, const Element* x, int64_t num_inputs, const Element* bias,
      const int64_t* leaf_ends, int64_t num_leaves) const {
    if (ranks == nullptr && num_leaves == 1)
      return multiply(layer, which, x, num_inputs, stack.hidden_size, bias, step.x);
    const void* const weight = weight_of(layer, which);
    void* const to = ranks == nullptr ? static_cast<void*>(step.x) : part();
    if constexpr (sizeof(Element) == 2)
      if (layer.stored >> which & 1)
        return spmd_stored_gemm_leaves_bfloat16(
            x, num_inputs, step.num_tokens, num_inputs, static_cast<const uint8_t*>(weight), stack.hidden_size, bias, to,
            leaf_ends, num_leaves, ranks != nullptr, step.num_threads);
    Calls<Element>::gemm_leaves(
        x, num_inputs, step.num_tokens, num_inputs, static_cast<const Element*>(weight), stack.hidden_size, bias, to,
        leaf_ends, num_leaves, ranks != nullptr, step.num_threads);
  }

  // The buffer of this rank's part of the next sum.
  float* part() const {
#if defined(__linux__)
    if (char* const slot = spmd_shared_next_part(SPMD_THE_RANKS, num_elements() * int64_t(sizeof(float))))
      return reinterpret_cast<float*>(slot);
#endif
    return step.wide;
  }

  // The residual stream += the sum of all parts of a deferred output; `normal` points to its norm then. Returns 0, or an
  // error.
  int64_t add_and_norm(const Element* weight, const Element*& normal) const {
    if (!stack.defers) {
      normal = normed(weight);
      return 0;
    }
    normal = step.x;
    if (ranks == nullptr) {
      Calls<Element>::add_rms_norm(
          step.x, stack.hidden_size, step.residual, stack.hidden_size, step.num_tokens, stack.hidden_size, weight,
          stack.epsilon, step.num_threads);
      return 0;
    }
#if defined(__linux__)
    if (char* const common = spmd_shared_common_norms(SPMD_THE_RANKS, num_elements()))
      normal = reinterpret_cast<const Element*>(common);
    return Calls<Element>::sum_add_rms_norm(
        SPMD_THE_RANKS, part(), step.residual, step.num_tokens, stack.hidden_size, weight, stack.epsilon, step.x);
#else
    return -1;
#endif
  }

  int64_t layer(int64_t number) const {
    const Layer<Element>& layer = stack.layers[number];
    const LayerBlocks<Element>& of = step.layers[number];
    const int64_t hidden = stack.hidden_size, heads_size = stack.num_heads * stack.head_size;
    const int64_t projected_size = heads_size + 2 * stack.num_kv_heads * stack.head_size;
    const Element* normal = step.x;
    if (number == 0)
      normal = normed(layer.input_norm);
    else if (const int64_t result = add_and_norm(layer.input_norm, normal); result != 0)
      return result;
    multiply(layer, kQkv, normal, hidden, projected_size, layer.qkv_bias, step.projected);
    add_adapters(adapters_of(number, kQkv), normal, hidden, step.projected, projected_size);
    norm_heads(layer, projected_size);
    const Element *const cos = layer.rope < 0 ? nullptr : step.angles[2 * layer.rope],
                  *const sin = layer.rope < 0 ? nullptr : step.angles[2 * layer.rope + 1];
    Calls<Element>::attend_projected(
        of.cache, of.block_stride, stack.num_kv_heads, stack.head_size, stack.block_size, stack.cache_in_bytes,
        of.tables, of.table_stride, step.projected, projected_size, stack.num_heads, cos, sin, of.blocks, step.offsets, step.num_tokens,
        step.query_starts, step.context_lengths, step.num_sequences, stack.scale, stack.score_cap, layer.window,
        step.attended, true, step.num_threads);
    multiply_leaves(
        layer, kOutput, step.attended, heads_size, layer.output_bias, stack.output_leaf_ends, stack.num_output_leaves);
    add_adapters(adapters_of(number, kOutput), step.attended, heads_size, step.x, hidden);
    end_output(layer.attention_output_norm);
    if (const int64_t result = add_and_norm(layer.feed_forward_norm, normal); result != 0) return result;
    if (layer.gates == nullptr) return 0;
    open(number, normal);
    multiply_leaves(
        layer, kDown, step.opened, stack.intermediate_size, layer.down_bias, stack.down_leaf_ends, stack.num_down_leaves);
    add_adapters(adapters_of(number, kDown), step.opened, stack.intermediate_size, step.x, hidden);
    end_output(layer.feed_forward_output_norm);
    return 0;
  }
};

template <class Element>
int64_t run_layers(
    const Stack<Element>& stack, const Step<Element>& step, const Ranks* ranks, int64_t first, int64_t end) {
  for (int64_t number = first; number < end; ++number)
    if (const int64_t result = Run<Element>{stack, step, ranks}.layer(number); result != 0) return result;
  return 0;
}

}  // namespace

// Layers `first` to `end` of `stack`; calls must be in order. Returns 0, or the error of a call of shared_memory.cpp.
extern "C" int64_t spmd_run_layers_float32(
    const void* stack, const void* step, const void* ranks, int64_t first, int64_t end) {
  return run_layers(
      *static_cast<const Stack<float>*>(stack), *static_cast<const Step<float>*>(step),
      static_cast<const Ranks*>(ranks), first, end);
}

extern "C" int64_t spmd_run_layers_bfloat16(
    const void* stack, const void* step, const void* ranks, int64_t first, int64_t end) {
  return run_layers(
      *static_cast<const Stack<uint16_t>*>(stack), *static_cast<const Step<uint16_t>*>(step),
      static_cast<const Ranks*>(ranks), first, end);
}
