// Numbers of a cache in bytes: e4m3 without infinities (https://arxiv.org/abs/2209.05433), as torch.float8_e4m3fn.
#pragma once

#include <algorithm>

#include "vector.h"

namespace e4m3 {

constexpr float kMost = 448.0f;

// Rounded to the nearest, ties to even; numbers beyond the largest become it, infinities and NaN become NaN.
SPMD_INLINE Bytes reduced(Floats x) {
  const Words bits = (Words)x, sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  const Floats size = (Floats)magnitude;
  const Words capped = size > broadcast(kMost) ? (Words)broadcast(kMost) : magnitude;
  const Words normal = ((capped + 0x7ffffu + (capped >> 20 & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 a number is a multiple of 2^-9, the last place of 2^14.
  const Words small = (Words)(size + broadcast(16384.0f)) & 0xfu;
  const Words number = size < broadcast(0.015625f) ? small : normal;
  const Words kept = magnitude < 0x7f800000u ? number : Words{} + 0x7fu;
  return low_bytes(kept | sign);
}

SPMD_INLINE Floats expanded(Bytes bytes) {
  const Words words = zero_extended(bytes), number = words & 0x7fu;
  const Words normal = (number << 20) + (120u << 23);
  const Floats small = __builtin_convertvector((Ints)number, Floats) * broadcast(0.001953125f);
  const Words value = number < 8u ? (Words)small : normal;
  const Words kept = number == 0x7fu ? Words{} + 0x7fc00000u : value;
  return (Floats)(kept | (words & 0x80u) << 24);
}

#if defined(SPMD_AVX512)
// 32 numbers as bfloat16.
SPMD_INLINE __m512i expanded_pairs(const uint8_t* from) {
  const __m512i words = _mm512_cvtepu8_epi16(load<__m256i>(from)), magnitude = _mm512_set1_epi16(0x7f);
  const __m512i number = _mm512_and_si512(words, magnitude);
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(number, 4), _mm512_set1_epi16(120 << 7));
  // Multiples of 2^-9 below 2^-6.
  const __m512i small = _mm512_permutexvar_epi16(
      number, _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60)));
  __m512i value = _mm512_mask_mov_epi16(normal, _mm512_cmplt_epu16_mask(number, _mm512_set1_epi16(8)), small);
  value = _mm512_mask_mov_epi16(value, _mm512_cmpeq_epi16_mask(number, magnitude), _mm512_set1_epi16(0x7fc0));
  return _mm512_or_si512(value, _mm512_slli_epi16(_mm512_andnot_si512(magnitude, words), 8));
}
#endif

template <class Element>
void reduce(const Element* from, int count, uint8_t* to) {
  int index = 0;
  for (; index + kLanes <= count; index += kLanes) store(to + index, reduced(load_floats(from + index)));
  if (index == count) return;
  Element last[kLanes] = {};
  uint8_t bytes[kLanes];
  std::copy(from + index, from + count, last);
  store(bytes, reduced(load_floats(last)));
  std::copy(bytes, bytes + count - index, to + index);
}

// Fewer than a vector.
template <class Element>
__attribute__((noinline)) void expand_some(const uint8_t* from, int count, Element* to) {
  uint8_t bytes[kLanes] = {};
  Element numbers[kLanes];
  std::copy(from, from + count, bytes);
  store_floats(numbers, expanded(load<Bytes>(bytes)));
  std::copy(numbers, numbers + count, to);
}

template <class Element>
SPMD_INLINE void expand(const uint8_t* from, int count, Element* to) {
  int index = 0;
#if defined(SPMD_AVX512)
  if constexpr (sizeof(Element) == 2)
    for (; index + 32 <= count; index += 32) store(to + index, expanded_pairs(from + index));
#endif
  for (; index + kLanes <= count; index += kLanes) store_floats(to + index, expanded(load<Bytes>(from + index)));
  if (index < count) expand_some(from + index, count - index, to + index);
}

}  // namespace e4m3
