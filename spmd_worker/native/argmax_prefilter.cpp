// Argmax of a bfloat16 GEMM by an int8 pre-filter: an int8 copy of the weight, whose GEMM costs half as much and bounds the
// true logits. Only logits that may be the argmax are computed in bfloat16, with the chain of steps of gemm_avx512.h, so the
// result has the same bits.
//
// A weight is w = s q + e with integers q and a rest e, a row x = t p + f likewise, so
//   w x = s t (q p) + e x + s q f, and |w x - s t (q p)| <= |e| |x| + |s q| |f|
// in Euclidean norms (Cauchy and Schwarz). The pre-filter has, for each panel, the maxima of |e| and |s q| of its outputs.
// Norms are rounded up by the error of rounding in them, in the products and in the chain itself.
// A logit is not the argmax if its upper bound is below another's lower bound, and below what rounds to the same bfloat16.
// NaN is above all; if a bound is not finite, the logit is computed.
#include <cmath>

#include "exports.h"
#include "gemm_kernels.h"

#if defined(SPMD_AVX512) && defined(__AVX512VNNI__)
#define SPMD_ARGMAX_PREFILTER 1
#endif

#if defined(SPMD_ARGMAX_PREFILTER)

namespace {

constexpr float kSmallest = 1e-16f;  // of norms: for squares that underflow
constexpr float kTooLarge = 1e30f;   // of logits: the sums of a chain may overflow then
constexpr int64_t kMaxShare = 48;   // one of 48 outputs of a row: with more candidates all are computed

static_assert(kLanes == kPanel, "a vector is a panel");

// Relative rounding error of a sum of `num_inputs` products of floats, in terms of the norms of the factors.
float rounding_of(int64_t num_inputs) { return float(num_inputs + 16) * 0x1p-23f; }

// Maxima over the outputs of a panel: factors of a row's norm and of the norm of its rest.
struct PanelBounds {
  float rest, numbers;
};

int64_t bounds_at(int64_t num_inputs, int64_t num_panels) { return num_panels * panel_bytes(num_inputs); }

void make_panel(const uint16_t* weight, int64_t num_inputs, int8_t* to, PanelBounds& bounds) {
  Ints most = Ints{};
  for (int64_t input = 0; input < num_inputs; input += 2) {
    const Words pairs = load<Words>(weight + input * kPanel);
    const Ints first = (Ints)first_of_pairs(pairs) & 0x7fffffff, second = (Ints)second_of_pairs(pairs) & 0x7fffffff;
    most = first > most ? first : most;
    most = second > most ? second : most;
  }
  const Floats maximum = (Floats)most;
  const auto is_usable = (maximum >= broadcast(kMinMagnitude)) & (maximum < broadcast(kInfinity));
  const Floats scale = is_usable ? maximum / broadcast(kMaxByte) : Floats{};
  const Floats factor = is_usable ? broadcast(kMaxByte) / maximum : Floats{};
  const Floats magic = broadcast(12582912.0f);
  Floats rest_squares{}, number_squares{}, weight_squares{};
  Ints sums = Ints{};
  for (int64_t input = 0; input < num_inputs; input += 4) {
    Ints quad = Ints{};
    for (int pair = 0; pair < 2; ++pair) {
      const Words pairs = load<Words>(weight + (input + 2 * pair) * kPanel);
      for (int second = 0; second < 2; ++second) {
        const Floats w = second ? second_of_pairs(pairs) : first_of_pairs(pairs);
        // Adding this rounds to an integer; NaN is excluded.
        const Floats whole = is_usable ? (w * factor + magic) - magic : Floats{};
        const Floats near = whole * scale, rest = w - near;
        rest_squares += rest * rest, number_squares += near * near, weight_squares += w * w;
        const Ints number = __builtin_convertvector(whole, Ints);
        sums += number;
        quad |= (number & 255) << (8 * (2 * pair + second));
      }
    }
    store(to + input * kPanel, quad);
  }
  int8_t* const end = to + num_inputs * kPanel;
  store(end, scale), store(end + 64, sums * -128);
  std::fill(end + 128, to + panel_bytes(num_inputs), int8_t(0));
  bounds = {0.0f, 0.0f};
  const float rounding = rounding_of(num_inputs);
  for (int output = 0; output < kPanel; ++output) {
    const float larger = 1.0f + rounding;
    const float numbers = std::sqrt(number_squares[output]) * larger + kSmallest;
    float rest = std::sqrt(rest_squares[output]) * larger + std::sqrt(weight_squares[output]) * 0x1p-22f + kSmallest;
    rest += rounding * (numbers + rest);
    // There is no bound for an output with a weight that is not finite.
    if (!(rest < kInfinity)) rest = kInfinity;
    bounds.rest = std::max(bounds.rest, rest), bounds.numbers = std::max(bounds.numbers, numbers);
  }
}

// A quantised row: its norm and that of its rest.
struct Row {
  float scale, norm, rest;
  bool is_bypassed;  // by the full GEMM
};

Row make_row(const uint16_t* x, int64_t size, int8_t* to) {
  const float maximum = row_maximum(x, size);
  const bool is_usable = maximum >= kMinMagnitude && maximum < kInfinity;
  quantise_row(x, size, maximum, rows_are_offset() ? -128 : 0, to, padded_to_steps(size));
  if (!is_usable) return {0.0f, 0.0f, 0.0f, true};
  const float scale = scale_of(maximum);
  const Floats factor = broadcast(kMaxByte / maximum), magic = broadcast(12582912.0f);
  Floats squares{}, rest_squares{};
  for (int64_t index = 0; index < size; index += kLanes) {
    const Floats values = load_floats(x + index), whole = (values * factor + magic) - magic;
    const Floats rest = values - whole * broadcast(scale);
    squares += values * values, rest_squares += rest * rest;
  }
  const float larger = 1.0f + rounding_of(size);
  const float norm = std::sqrt(sum_of_lanes(squares)) * larger + kSmallest;
  // If squares overflow, scaled integer sums may, too.
  if (!(norm < kInfinity)) return {0.0f, 0.0f, 0.0f, true};
  return {scale, norm, std::sqrt(sum_of_lanes(rest_squares)) * larger + norm * 0x1p-22f + kSmallest, false};
}

// Maximum of a row's outputs that are computed one by one.
int64_t most_candidates(int64_t count) { return std::max<int64_t>(count / kMaxShare, kPanel); }

// An output that may be a row's argmax.
struct Candidate {
  int32_t row, output;
  float upper;
};

// Numbers below it do not round to the bfloat16 of `lower`, or above.
float lowered(float lower) { return lower - std::fabs(lower) * (0x1p-7f + 0x1p-20f) - 1e-35f; }

// State of all rows: a lower bound of each maximum, and the outputs that reach it.
struct Seen {
  std::vector<float> least;
  std::vector<int64_t> num_kept;
  std::vector<Candidate> candidates;

  explicit Seen(int64_t num_rows) : least(num_rows, -kInfinity), num_kept(num_rows, 0) {}
};

// The epilogue. Each thread has its own state, and merges it into `all` at the end.
struct Prefilter {
  static constexpr bool kTakesRegisters = false;
  const Gemm<int8_t>& gemm;
  const std::vector<Row>& rows;
  const PanelBounds* bounds;
  int64_t count;
  // A row with more candidates in one thread is computed by the full GEMM: more are kept before the maximum is seen than are
  // left at the end.
  int64_t most;
  Seen* all;
  Seen own;

  SPMD_INLINE_MEMBER void take(int64_t row, int64_t pair, int num_panels, const Ints* sums) {
    if (rows[row].is_bypassed || own.num_kept[row] > most) return;
    for (int which = 0; which < num_panels; ++which) {
      const int64_t panel = pair * 2 + which;
      const float bound = rows[row].norm * bounds[panel].rest + rows[row].rest * bounds[panel].numbers;
      const Floats near = Dequantised{gemm, nullptr}.number(sums[which], rows[row].scale, panel, 0);
      // Outputs not below it, NaN included.
      __mmask16 reach = _mm512_cmp_ps_mask((__m512)near, _mm512_set1_ps(own.least[row] - bound), _CMP_NLT_UQ);
      const bool is_known = rows[row].norm * bounds[panel].numbers < kTooLarge && bound < kTooLarge;
      if (!is_known) reach = 0xffff;
      if (reach != 0) keep(row, panel, reach, near, is_known ? bound : kInfinity);
    }
  }

  __attribute__((noinline)) void keep(int64_t row, int64_t panel, uint32_t reach, Floats near, float bound) {
    for (int lane = 0; lane < kPanel; ++lane) {
      const int64_t output = panel * kPanel + lane;
      if ((reach >> lane & 1) == 0 || output >= count) continue;
      own.candidates.push_back({int32_t(row), int32_t(output), bound < kTooLarge ? near[lane] + bound : kInfinity});
      if (bound < kTooLarge) own.least[row] = std::max(own.least[row], lowered(near[lane] - bound));
      ++own.num_kept[row];
    }
  }

  void finish() const {
    for (size_t row = 0; row < rows.size(); ++row) {
      all->least[row] = std::max(all->least[row], own.least[row]);
      all->num_kept[row] = std::max(all->num_kept[row], own.num_kept[row]);
    }
    all->candidates.insert(all->candidates.end(), own.candidates.begin(), own.candidates.end());
  }
};

// The bfloat16 weight for single outputs: its panels, or plain rows, which take fewer cache lines.
struct Outputs {
  const uint16_t* weight;
  bool is_plain;
  int64_t num_inputs;

  // Index of an output's first pair, in pairs, and the step to the next.
  int32_t index(int64_t output) const {
    return int32_t(is_plain ? output * num_inputs / 2 : output / kPanel * num_inputs / 2 * kPanel + output % kPanel);
  }
  int64_t step() const { return is_plain ? 1 : kPanel; }

  // The chains of gemm_avx512.h for 16 outputs.
  Floats chains(const uint16_t* x, const int32_t* indices) const {
    const __m512i at = _mm512_loadu_si512(indices);
    const int32_t* from = reinterpret_cast<const int32_t*>(weight);
    __m512 sums = _mm512_setzero_ps();
    for (int64_t input = 0; input < num_inputs; input += 2, from += step()) {
      int32_t pair;
      std::memcpy(&pair, x + input, sizeof pair);
      const __m512i right = _mm512_i32gather_epi32(at, from, 4);
      const __m512i left = _mm512_set1_epi32(pair);
#if defined(SPMD_BF16_DOTS)
      sums = _mm512_dpbf16_ps(sums, (__m512bh)right, (__m512bh)left);
#else
      sums = (__m512)fused(first_of_pairs((Words)left), first_of_pairs((Words)right), (Floats)sums);
      sums = (__m512)fused(second_of_pairs((Words)left), second_of_pairs((Words)right), (Floats)sums);
#endif
    }
    return rounded((Floats)sums);
  }
};

// Up to 16 candidates of one row, in `candidates` from `start` on, and their maximum.
struct Group {
  int64_t row, start, end;
  float value;
  int64_t index;

  void compute(const uint16_t* x, const Outputs& outputs, const Candidate* candidates) {
    int32_t indices[kPanel];
    for (int lane = 0; lane < kPanel; ++lane)
      indices[lane] = outputs.index(candidates[std::min(start + lane, end - 1)].output);
    const Floats products = outputs.chains(x, indices);
    value = -kInfinity, index = 0;
    for (int64_t each = start; each < end; ++each)
      take_larger(products[each - start], candidates[each].output, value, index);
  }

  static void take_larger(float value, int64_t at, float& maximum, int64_t& index) {
    const bool is_equal = value == maximum || (value != value && maximum != maximum);
    if (is_larger(value, maximum) || (is_equal && at < index)) maximum = value, index = at;
  }
};

}  // namespace

#endif

// Whether the pre-filter is faster on this processor: it must have no AMX.
extern "C" int64_t spmd_has_argmax_prefilter() {
#if defined(SPMD_ARGMAX_PREFILTER)
  return rows_are_offset();
#else
  return 0;
#endif
}

// Fills the pre-filter of a packed weight: its int8 panels, then two bounds of each. Requires `spmd_has_argmax_prefilter`, as
// does the next function.
extern "C" void spmd_fill_prefilter_bfloat16(
    const uint16_t* packed, int64_t num_inputs, int64_t num_outputs, int8_t* prefilter, int64_t num_threads) {
#if defined(SPMD_ARGMAX_PREFILTER)
  const int64_t num_panels = num_outputs / kPanel;
  PanelBounds* const bounds = reinterpret_cast<PanelBounds*>(prefilter + bounds_at(num_inputs, num_panels));
  parallel_for(num_panels, num_threads, [&](int64_t panel) {
    make_panel(
        packed + panel * num_inputs * kPanel, num_inputs, prefilter + panel * panel_bytes(num_inputs), bounds[panel]);
  });
#else
  (void)packed, (void)num_inputs, (void)num_outputs, (void)prefilter, (void)num_threads;
#endif
}

// The result of `spmd_gemm_argmax_bfloat16`. `plain`: the weight [num_outputs][num_inputs], or null; `rows`:
// scratch [num_rows][num_inputs rounded up to 64]. Returns the number of logits that were computed in bfloat16.
extern "C" int64_t spmd_filtered_argmax_bfloat16(
    const uint16_t* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs, const uint16_t* packed,
    int64_t num_outputs, int64_t count, const uint16_t* plain, const int8_t* prefilter, float* values, int64_t* indices,
    int8_t* rows, int64_t num_threads) {
#if defined(SPMD_ARGMAX_PREFILTER)
  const Gemm<int8_t> gemm = {rows, padded_to_steps(num_inputs), num_rows, num_inputs, prefilter, num_outputs};
  const PanelBounds* const bounds =
      reinterpret_cast<const PanelBounds*>(prefilter + bounds_at(num_inputs, num_outputs / kPanel));
  std::vector<Row> of_rows(num_rows);
  parallel_for(num_rows, num_threads, [&](int64_t row) {
    of_rows[row] = make_row(x + row * x_stride, num_inputs, rows + row * gemm.x_stride);
  });
  Seen seen(num_rows);
  const int64_t most = most_candidates(count) * 4;
  run_gemm<Vnni>(gemm, Prefilter{gemm, of_rows, bounds, count, most, &seen, Seen(num_rows)}, num_threads);

  // Remaining candidates, row by row.
  std::vector<int64_t> starts(num_rows + 1, 0);
  const auto is_left = [&](const Candidate& each) { return !(each.upper < seen.least[each.row]); };
  for (const Candidate& each : seen.candidates)
    if (is_left(each)) ++starts[each.row + 1];
  int64_t num_computed = 0;
  std::vector<Group> groups;
  std::vector<int64_t> bypassed;
  for (int64_t row = 0; row < num_rows; ++row) {
    of_rows[row].is_bypassed |= seen.num_kept[row] > most || starts[row + 1] > most_candidates(count);
    if (of_rows[row].is_bypassed) bypassed.push_back(row), starts[row + 1] = 0, num_computed += count;
    num_computed += starts[row + 1];
    starts[row + 1] += starts[row];
    for (int64_t start = starts[row]; start < starts[row + 1]; start += kPanel)
      groups.push_back({row, start, std::min(start + kPanel, starts[row + 1]), -kInfinity, 0});
  }
  std::vector<Candidate> candidates(starts[num_rows]);
  for (const Candidate& each : seen.candidates)
    if (is_left(each) && !of_rows[each.row].is_bypassed) candidates[starts[each.row]++] = each;

  const Outputs outputs = {plain == nullptr ? packed : plain, plain != nullptr, num_inputs};
  parallel_for(int64_t(groups.size()), num_threads, [&](int64_t number) {
    groups[number].compute(x + groups[number].row * x_stride, outputs, candidates.data());
  });
  std::fill_n(values, num_rows, -kInfinity), std::fill_n(indices, num_rows, 0);
  for (const Group& each : groups) Group::take_larger(each.value, each.index, values[each.row], indices[each.row]);

  if (bypassed.empty()) return num_computed;
  std::vector<uint16_t> gathered(bypassed.size() * num_inputs);
  std::vector<float> their_values(bypassed.size());
  std::vector<int64_t> their_indices(bypassed.size());
  for (size_t each = 0; each < bypassed.size(); ++each)
    std::copy_n(x + bypassed[each] * x_stride, num_inputs, gathered.data() + each * num_inputs);
  spmd_gemm_argmax_bfloat16(
      gathered.data(), num_inputs, int64_t(bypassed.size()), num_inputs, packed, num_outputs, count, their_values.data(),
      their_indices.data(), num_threads);
  for (size_t each = 0; each < bypassed.size(); ++each)
    values[bypassed[each]] = their_values[each], indices[bypassed[each]] = their_indices[each];
  return num_computed;
#else
  (void)x, (void)x_stride, (void)num_rows, (void)num_inputs, (void)packed, (void)num_outputs, (void)count, (void)plain;
  (void)prefilter, (void)values, (void)indices, (void)rows, (void)num_threads;
  return 0;
#endif
}
