// The micro-kernel of AMX for weights as files store them (stored.h): tiles of outputs by tiles of rows, so that outputs
// need no interleaving. Sums are transposed at the end of their chain; a chain is that of `AmxBf16`, in which a product's two
// factors have changed places.
#pragma once

#include <limits>

#include "gemm_amx.h"
#include "stored.h"

#if defined(SPMD_HAS_AMX)

namespace {

// Of `_mm512_multishift_epi64_epi8`: both bytes of a half are eight bits of it from `first` on.
struct FieldShifts {
  alignas(64) uint8_t bits[64] = {};
  constexpr explicit FieldShifts(int first) {
    for (int byte = 0; byte < 64; ++byte) bits[byte] = uint8_t((byte % 8 / 2 * 16 + first) & 63);
  }
};

// To [panel][inputs / 32][16][32]: tiles of 16 outputs.
class RowExpansion : public Expansion {
 public:
  // `count` lines more, or all that are left.
  void take(int64_t count) {
    count -= num_ahead_;
    while (count > 0 && num_panels_ > 0) {
      const int64_t line = input_ / kLineInputs, end = std::min(end_, (line + 1) * kLineInputs);
      if (output_ == 0) begin_line(end);
      const uint8_t* const from = panel_ + kLine + line * kLineInputs * head_.input_bytes();
      uint16_t* const to = to_ + (input_ - first_) * kPanel;
      // Lines of several tables one after another: to begin again takes longer, and AMX does not run beside them.
      const bool is_whole = !has_one_group_ && head_.kind != kAffine8;
      const int64_t last = is_whole ? kPanel : std::min(int64_t(kPanel), output_ + count);
      count -= last - output_;
      if (head_.kind == kFp8)
        expand_fp8(from, (end - input_) / kBlockInputs, last, to);
      else if (head_.kind == kAffine8)
        expand_bytes(from, (end - input_) / kBlockInputs, last, to);
      else if (!has_all_)
        expand_blocks(from, (end - input_) / kBlockInputs, last, to);
      else if (has_one_group_)
        expand_group(from, last, to);
      else if (head_.kind >= kAffine4)
        expand_groups<false>(from, last, to);
      else
        expand_groups<true>(from, last, to);
      if (output_ < kPanel) break;
      output_ = 0;
      advance(end);
    }
    num_ahead_ = std::max<int64_t>(-count, 0);
  }
  // Lines.
  int64_t num_left() const {
    if (num_panels_ == 0) return 0;
    const int64_t end = (end_ + kLineInputs - 1) / kLineInputs;
    return (end - input_ / kLineInputs + (num_panels_ - 1) * (end - first_ / kLineInputs)) * kPanel - output_;
  }

 private:
  // Scales and zero points of the outputs, of one group or of each 32 inputs.
  __attribute__((noinline)) void begin_line(int64_t end) {
    has_all_ = end - input_ == kLineInputs;
    has_one_group_ = head_.group_inputs % kLineInputs == 0 || head_.group_inputs == num_inputs_;
    const int64_t num_groups = has_one_group_ ? 1 : (end - input_) / kBlockInputs;
    fetch_scales(group_at(input_), has_one_group_ ? 1 : kLineInputs / kBlockInputs);
    for (int64_t block = 0; block < num_groups; ++block) {
      const GroupScales found = load_scales(group_at(input_ + block * kBlockInputs), head_.kind, 0);
      store(scales_[block], found.scales), store(offsets_[block], found.offsets);
      if (head_.kind < kAffine4) store(zeros_[block], found.zeros);
      if (head_.kind == kAffine8) store(later_[block], found.later);
    }
    levels_ = load<Floats>(kLevels[head_.kind]);
    if (head_.kind != kFp8) return;
    is_plain_ = has_all_ && has_one_group_ && !has_small_scales(scales_[0]);
    const Floats scales = load<Floats>(scales_[0]);
    has_one_scale_ = _mm512_cmpneq_ps_mask((__m512)scales, (__m512)broadcast(scales[0])) == 0;
  }

  // Lines of one group, of the outputs up to `last`.
  SPMD_INLINE_MEMBER void expand_group(const uint8_t* lines, int64_t last, uint16_t* to) {
    const Floats levels = levels_;
    const int64_t ahead = ahead_;
    for (int64_t output = output_; output < last; ++output) {
      const uint8_t* const from = lines + output * kLine;
      uint16_t* of_output = to + output * kBlockInputs;
      __builtin_prefetch(from + ahead, 0, 2);
      __m512i numbers = _mm512_loadu_si512(from);
      const __m512i values = twice(values_of<true>(levels, 0, output));
#pragma GCC unroll 4
      for (int block = 0; block < 4; ++block, of_output += kBlockInputs * kPanel) {
        // Its lowest five bits are taken: the table is there twice.
        _mm512_store_si512(of_output, _mm512_permutexvar_epi16(numbers, values));
        numbers = _mm512_srli_epi16(numbers, 4);
      }
    }
    output_ = last;
  }

  // Lines of four groups. Rounding takes most: two tables are rounded at once, and numbers are looked up in both.
  template <bool kHasZeros>
  SPMD_INLINE_MEMBER void expand_groups(const uint8_t* lines, int64_t last, uint16_t* to) {
    constexpr int64_t kSize = kBlockInputs * kPanel;
    const Floats levels = levels_;
    const int64_t ahead = ahead_;
    for (int64_t output = output_; output < last; ++output) {
      const uint8_t* const from = lines + output * kLine;
      uint16_t* const of_output = to + output * kBlockInputs;
      __builtin_prefetch(from + ahead, 0, 2);
      const __m512i numbers = _mm512_loadu_si512(from);
      const auto values = [&](int64_t block) { return values_of<kHasZeros>(levels, block, output); };
      const __m512i first = halves_of(values(0), values(1)), second = halves_of(values(2), values(3));
      _mm512_store_si512(of_output, looked_up<0>(numbers, first));
      _mm512_store_si512(of_output + kSize, looked_up<1>(numbers, first));
      _mm512_store_si512(of_output + 2 * kSize, looked_up<2>(numbers, second));
      _mm512_store_si512(of_output + 3 * kSize, looked_up<3>(numbers, second));
    }
    output_ = last;
  }

  // Numbers of a block in two tables: in the first if the block is even, else in the second.
  template <int kBlock>
  static SPMD_INLINE_MEMBER __m512i looked_up(__m512i numbers, __m512i tables) {
    constexpr bool kIsSecond = kBlock % 2 == 1;
    // Both bytes of a value have indices: twice its number, and one more. Looking up words takes the unit of shifts too.
    static constexpr FieldShifts kShifts(4 * kBlock - 1);
    const __m512i fields = _mm512_multishift_epi64_epi8(load<__m512i>(kShifts.bits), numbers);
    const __m512i indices = _mm512_ternarylogic_epi32(
        fields, _mm512_set1_epi8(0x1e), _mm512_set1_epi16(kIsSecond ? 0x2120 : 0x0100), 0xea);
    return _mm512_permutexvar_epi8(indices, tables);
  }

  // Any blocks of lines, of the outputs up to `last`.
  SPMD_INLINE_MEMBER void expand_blocks(const uint8_t* lines, int64_t num_blocks, int64_t last, uint16_t* to) {
    const __m128i skipped = _mm_cvtsi64_si128(input_ % kLineInputs / kBlockInputs * 4);
    const Floats levels = levels_;
    const int64_t ahead = ahead_;
    for (int64_t output = output_; output < last; ++output) {
      const uint8_t* const from = lines + output * kLine;
      uint16_t* of_output = to + output * kBlockInputs;
      __builtin_prefetch(from + ahead, 0, 2);
      __m512i numbers = _mm512_srl_epi16(_mm512_loadu_si512(from), skipped);
      __m512i values = twice(values_of<true>(levels, 0, output));
      for (int64_t block = 0;;) {
        _mm512_store_si512(of_output, _mm512_permutexvar_epi16(numbers, values));
        if (++block == num_blocks) break;
        if (!has_one_group_) values = twice(values_of<true>(levels, block, output));
        numbers = _mm512_srli_epi16(numbers, 4), of_output += kBlockInputs * kPanel;
      }
    }
    output_ = last;
  }

  // Of the outputs up to `last`.
  SPMD_INLINE_MEMBER void expand_fp8(const uint8_t* line, int64_t num_blocks, int64_t last, uint16_t* to) {
    const __m512i exponent = _mm512_set1_epi8(char(0xe8));
    __m512i values = signed_table(levels_, scales_[0][output_]);
    for (; output_ < last; ++output_) {
      const uint8_t* const from = line + output_ * kLineInputs;
      uint16_t* const of_output = to + output_ * kBlockInputs;
      __builtin_prefetch(from + ahead_, 0, 2), __builtin_prefetch(from + ahead_ + kLine, 0, 2);
      const __m512i first = _mm512_loadu_si512(from), second = _mm512_loadu_si512(from + kLine);
      const __mmask64 are_small = _mm512_testn_epi8_mask(first, exponent) | _mm512_testn_epi8_mask(second, exponent);
      if (__builtin_expect(!is_plain_ || are_small != 0, false)) {
        expand_fp8_blocks(from, num_blocks, of_output);
        continue;
      }
      if (!has_one_scale_) values = signed_table(levels_, scales_[0][output_]);
      store_two(first, values, of_output), store_two(second, values, of_output + 2 * kBlockInputs * kPanel);
    }
  }

  // Two blocks, of which no number is without an exponent.
  static SPMD_INLINE_MEMBER void store_two(__m512i both, __m512i values, uint16_t* to) {
    const __m512i mask = _mm512_set1_epi16(0x700), second = _mm512_srli_epi16(both, 8);
    const __m512i exponents = _mm512_and_si512(_mm512_slli_epi16(both, 3), mask);
    const __m512i second_exponents = _mm512_and_si512(_mm512_srli_epi16(both, 5), mask);
    _mm512_store_si512(to, _mm512_add_epi16(_mm512_permutexvar_epi16(both, values), exponents));
    _mm512_store_si512(
        to + kBlockInputs * kPanel, _mm512_add_epi16(_mm512_permutexvar_epi16(second, values), second_exponents));
  }

  // Any blocks of a line.
  __attribute__((noinline)) void expand_fp8_blocks(const uint8_t* from, int64_t num_blocks, uint16_t* to) const {
    const int64_t first = input_ % kLineInputs / kBlockInputs;
    for (int64_t block = 0; block < num_blocks; ++block, to += kBlockInputs * kPanel) {
      const int64_t place = first + block;
      const float scale = scales_[has_one_group_ ? 0 : block][output_];
      const uint8_t* const bytes = from + place / 2 * kLine;
      const __m512i both = _mm512_loadu_si512(bytes), numbers = place % 2 == 0 ? both : _mm512_srli_epi16(both, 8);
      const __m512i exponents = _mm512_and_si512(_mm512_slli_epi16(numbers, 3), _mm512_set1_epi16(0x700));
      const __m512i usual = _mm512_permutexvar_epi16(numbers, signed_table(levels_, scale));
      const __mmask32 is_small = _mm512_testn_epi16_mask(numbers, _mm512_set1_epi16(0xe8));
      const __m512i small = signed_table(load<Floats>(kLevels[kSmallFp8]), scale);
      _mm512_store_si512(
          to, _mm512_mask_permutexvar_epi16(_mm512_add_epi16(usual, exponents), is_small, numbers, small));
      if (!is_small_scale(scale)) continue;
      for (int64_t input = 0; input < kBlockInputs; ++input)
        to[input] = scaled_fp8(fp8_of_row(bytes[2 * input + place % 2]), scale);
    }
  }

  // Of the outputs up to `last`: blocks are groups.
  SPMD_INLINE_MEMBER void expand_bytes(const uint8_t* line, int64_t num_blocks, int64_t last, uint16_t* to) {
    const int64_t skipped = input_ % kLineInputs;
    for (; output_ < last; ++output_) {
      const uint8_t* from = line + output_ * kLineInputs + skipped;
      uint16_t* of_output = to + output_ * kBlockInputs;
      __builtin_prefetch(from + ahead_, 0, 2), __builtin_prefetch(from + ahead_ + kLine, 0, 2);
      for (int64_t block = 0; block < num_blocks; ++block, from += kBlockInputs, of_output += kBlockInputs * kPanel) {
        const Floats offset = broadcast(offsets_[block][output_]);
        const Floats first = fused(floats_of_bytes(from), broadcast(scales_[block][output_]), offset);
        const Floats second = fused(floats_of_bytes(from + kLanes), broadcast(later_[block][output_]), offset);
        _mm512_store_si512(of_output, halves_of(first, second));
      }
    }
  }

  // Of positive and of negative numbers.
  static SPMD_INLINE_MEMBER __m512i signed_table(Floats levels, float scale) {
    const __m256i values = (__m256i)narrowed_vector(levels * broadcast(scale));
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(values), _mm256_xor_si256(values, _mm256_set1_epi16(int16_t(0x8000))), 1);
  }

  // The 16 values of a group of an output.
  template <bool kHasZeros>
  SPMD_INLINE_MEMBER Floats values_of(Floats levels, int64_t block, int64_t output) const {
    if (kHasZeros) levels = levels - broadcast(zeros_[block][output]);
    return fused(levels, broadcast(scales_[block][output]), broadcast(offsets_[block][output]));
  }
  static SPMD_INLINE_MEMBER __m512i twice(Floats values) {
    return _mm512_broadcast_i64x4((__m256i)narrowed_vector(values));
  }

  int64_t output_ = 0, num_ahead_ = 0;  // lines more than were asked for
  bool has_all_ = false, has_one_group_ = false, has_one_scale_ = false, is_plain_ = false;
  Floats levels_;
  alignas(64) float scales_[4][kPanel], zeros_[4][kPanel] = {}, offsets_[4][kPanel], later_[4][kPanel];
};

// Transposes a matrix of 32-bit numbers.
SPMD_INLINE void transpose_tile(__m512i (&rows)[16]) {
  for (int first = 0; first < 16; first += 4) {
    ByteVector four[4] = {rows[first], rows[first + 1], rows[first + 2], rows[first + 3]};
    transpose(four);
#pragma GCC unroll 4
    for (int row = 0; row < 4; ++row) rows[first + row] = four[row];
  }
  // Now lane l of row 4 i + j has columns 4 l + j of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int row = 0; row < 4; ++row) {
    const __m512i first = rows[row], second = rows[4 + row], third = rows[8 + row], fourth = rows[12 + row];
    const __m512i even = _mm512_shuffle_i32x4(first, second, 0x88), odd = _mm512_shuffle_i32x4(first, second, 0xdd);
    const __m512i later_even = _mm512_shuffle_i32x4(third, fourth, 0x88),
                  later_odd = _mm512_shuffle_i32x4(third, fourth, 0xdd);
    rows[row] = _mm512_shuffle_i32x4(even, later_even, 0x88);
    rows[8 + row] = _mm512_shuffle_i32x4(even, later_even, 0xdd);
    rows[4 + row] = _mm512_shuffle_i32x4(odd, later_odd, 0x88);
    rows[12 + row] = _mm512_shuffle_i32x4(odd, later_odd, 0xdd);
  }
}

struct AmxStored : OfTiles<AmxStored, uint16_t, float> {
  using Expansion = RowExpansion;
  static constexpr int kStep = 32, kCutInputs = kLineInputs;
  static constexpr bool kPacks = false, kTransposes = true;
  static constexpr int64_t kExpandingRows = std::numeric_limits<int64_t>::max();
  static constexpr int64_t kKeptBlocks = 4, kKeptPairs = 8;
  static constexpr int64_t kRowsBytes = 1 << 20, kFewProducts = 1 << 20;
  // With few rows a part and the next one stay in the first-level cache; with many, sums are kept less often.
  static constexpr int64_t num_parts(int64_t num_rows, int64_t num_cuts) {
    const int64_t most = num_rows <= 2 * kAmxRows ? 2 : 4;
    return (num_cuts + most - 1) / most;
  }

  static void set_up(int num_rows) { amx::set_up_transposed(num_rows); }

  // Columns of the tiles of all blocks: few rows take the first-level cache no more than they need.
  static constexpr int64_t columns_of(int64_t num_rows) { return num_rows <= 16 ? num_rows : kAmxRows; }

  // Rows as [inputs / 32][16 pairs][columns][2], of more columns than 16 in two such tiles.
  static void transpose_rows(
      const uint16_t* x, int64_t stride, int64_t num_inputs, int num_rows, int64_t num_columns, uint16_t* to) {
    const int64_t width = std::min<int64_t>(num_columns, 16);
    const __mmask16 columns = __mmask16((1u << width) - 1);
    for (int64_t input = 0; input < num_inputs; input += kStep)
      for (int first = 0; first < num_columns; first += 16) {
        __m512i rows[16];
        for (int row = 0; row < 16; ++row)
          rows[row] = first + row < num_rows ? _mm512_loadu_si512(x + (first + row) * stride + input) : __m512i{};
        transpose_tile(rows);
        uint16_t* const tile = to + input * num_columns + first * kStep;
        for (int row = 0; row < 16; ++row) _mm512_mask_storeu_epi32(tile + row * width * 2, columns, rows[row]);
      }
  }

  // Sums [32 outputs][32 rows] of tiles -> [32 rows][32 outputs], a tile at a time.
  template <bool kTwoTiles, bool kTwoPanels>
  SPMD_INLINE void transpose_sums(float* sums) {
    for (int tile = 0; tile < (kTwoTiles ? 4 : 2); tile += kTwoPanels ? 1 : 2) {
      float* const from = sums + tile / 2 * 16 * 32 + tile % 2 * 16;
      __m512i rows[16];
      for (int row = 0; row < 16; ++row) rows[row] = _mm512_load_si512(from + row * 32);
      transpose_tile(rows);
      for (int row = 0; row < 16; ++row) _mm512_store_si512(from + row * 32, rows[row]);
    }
  }

  template <bool kTwoTiles, bool kTwoPanels, class Meanwhile>
  SPMD_INLINE void multiply(const Block<uint16_t>& block, int64_t num_steps, const Meanwhile& meanwhile) {
    const uint16_t *x = block.x, *panel = block.panels, *second_panel = panel + block.panel_size;
    const int64_t x_size = kStep * block.x_stride, x_bytes = 4 * std::min<int64_t>(block.x_stride, 16);
    for (int64_t step = 0; step < num_steps; ++step, x += x_size, panel += 512, second_panel += 512) {
      amx::load<4>(panel, 64);
      amx::load<6>(x, x_bytes);
      amx::multiply<0, 4, 6>();
      if (kTwoPanels) {
        amx::load<5>(second_panel, 64);
        amx::multiply<1, 5, 6>();
      }
      if (kTwoTiles) {
        amx::load<7>(x + 512, 64);
        amx::multiply<2, 4, 7>();
      }
      if (kTwoTiles && kTwoPanels) amx::multiply<3, 5, 7>();
      meanwhile();
    }
  }
};

}  // namespace

#endif
