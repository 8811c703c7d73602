// The paged KV cache: layout of a block, location of a tile, writing of tokens.
//
// A block holds, for each key-value head, its keys and then its values:
//   bfloat16  keys [head size / 2][position][2], values [position / 2][head size][2]
//   float32   keys [head size][position],        values [position][head size]
// in both cases `kPair` adjacent numbers, which one step multiplies together. `Type` is one of those in steps.h.
//
// A cache in bytes has the same layout of numbers in e4m3 (e4m3.h), rounded as they are written and expanded, exactly, a tile
// at a time (`expanded_tile`).
//
// A cache of latents (https://arxiv.org/abs/2405.04434) has keys alone: the first numbers of a key are its value, which
// `copy_values` puts into the order of values, a tile at a time.
#pragma once

#include <algorithm>

#include "e4m3.h"
#include "rotate_row.h"
#include "thread_pool.h"

namespace {

constexpr int kTile = 64;           // keys
constexpr int kGroup = 16;          // keys whose location is found together; blocks of 16 or more hold complete groups
constexpr int kGroups = kTile / kGroup;
constexpr int kMaxHeadSize = 576;

template <class Element>
struct Cache {
  void* memory;
  int64_t block_stride;  // elements
  const int64_t* tables;
  int64_t table_stride;
  int num_kv_heads, head_size, block_size;
  bool in_bytes;
  int latent_size = 0;  // above 0: values are this many first numbers of the keys

  int value_size() const { return latent_size > 0 ? latent_size : head_size; }
  int64_t head_elements() const { return int64_t(block_size) * head_size; }
  int64_t key_offset(int64_t block, int head) const {
    return block * block_stride + (latent_size > 0 ? 1 : 2) * head * head_elements();
  }
  Element* keys(int64_t block, int head) const { return static_cast<Element*>(memory) + key_offset(block, head); }
  Element* values(int64_t block, int head) const { return keys(block, head) + head_elements(); }
  uint8_t* key_bytes(int64_t block, int head) const { return static_cast<uint8_t*>(memory) + key_offset(block, head); }
};

// The keys a row sees within one tile.
struct Range {
  int first, end;
  bool is_empty() const { return first >= end; }
  bool operator==(const Range& other) const { return first == other.first && end == other.end; }
};

// One tile of one head: where its four groups of 16 keys begin.
template <class Element>
struct Tile {
  const Element* keys[kGroups];
  const Element* values[kGroups];
  int64_t key_stride;  // elements from one step over the head's dimensions to the next
};

// Consecutive rows of values, and what to prefetch meanwhile.
template <class Element>
struct Span {
  const Element* rows;
  const Element* ahead;
  int count;
};

// A tile of blocks smaller than a group, copied together.
template <class Element>
struct TileCopy {
  alignas(64) Element keys[kTile * kMaxHeadSize];
  alignas(64) Element values[kTile * kMaxHeadSize];
};

template <class Type>
Tile<typename Type::Element> tile_of_copy(int head_size, const TileCopy<typename Type::Element>& copy) {
  Tile<typename Type::Element> tile;
  tile.key_stride = kTile * Type::kPair;
  for (int group = 0; group < kGroups; ++group) {
    tile.keys[group] = copy.keys + group * kGroup * Type::kPair;
    tile.values[group] = copy.values + group * kGroup * head_size;
  }
  return tile;
}

template <class Type>
Tile<typename Type::Element> small_block_tile(
    const Cache<typename Type::Element>& cache, const int64_t* table, int head, int64_t start, int64_t first_key,
    int64_t last_key, TileCopy<typename Type::Element>& copy) {
  using Element = typename Type::Element;
  constexpr int kPair = Type::kPair;
  const int size = cache.block_size, head_size = cache.head_size;
  for (int index = 0; index < kTile; index += size) {
    if (start + index + size <= first_key || start + index > last_key) continue;
    const int64_t block = table[(start + index) / size];
    const Element* keys = cache.keys(block, head);
    for (int step = 0; step < head_size / kPair; ++step)
      std::memcpy(copy.keys + (step * kTile + index) * kPair, keys + step * size * kPair, size * kPair * sizeof(Element));
    if (cache.latent_size == 0)
      std::memcpy(copy.values + index * head_size, cache.values(block, head), cache.head_elements() * sizeof(Element));
  }
  return tile_of_copy<Type>(head_size, copy);
}

// `first_key` and `last_key` bound what any row of the item sees. A group outside them may have no block: the nearest
// one inside is used instead, its scores are masked and its values not read.
template <class Type>
Tile<typename Type::Element> tile_of_blocks(
    const Cache<typename Type::Element>& cache, const int64_t* table, int head, int64_t start, int64_t first_key,
    int64_t last_key) {
  Tile<typename Type::Element> tile;
  const int size = cache.block_size;
  tile.key_stride = int64_t(size) * Type::kPair;
  const int64_t first = first_key / kGroup * kGroup, last = last_key / kGroup * kGroup;
  int64_t key = std::clamp(start, first, last), index = key / size;
  int offset = int(key - index * size);
  for (int group = 0; group < kGroups; ++group) {
    if (const int64_t wanted = start + group * kGroup; wanted > key && wanted <= last) {
      key = wanted, offset += kGroup;
      if (offset == size) ++index, offset = 0;
    }
    tile.keys[group] = cache.keys(table[index], head) + offset * Type::kPair;
    tile.values[group] = cache.values(table[index], head) + int64_t(offset) * cache.head_size;
  }
  return tile;
}

// A tile of a cache in bytes, expanded. Keys that no row of the item sees are left out, as in `small_block_tile`.
template <class Type>
Tile<typename Type::Element> expanded_tile(
    const Cache<typename Type::Element>& cache, const int64_t* table, int head, int64_t start, int64_t first_key,
    int64_t last_key, TileCopy<typename Type::Element>& copy) {
  constexpr int kPair = Type::kPair;
  const int size = cache.block_size, head_size = cache.head_size, each = std::min(size, kGroup);
  for (int index = 0; index < kTile; index += each) {
    if (start + index + each <= first_key || start + index > last_key) continue;
    const int64_t block = table[(start + index) / size], offset = (start + index) % size;
    const uint8_t* const bytes = cache.key_bytes(block, head);
    for (int step = 0; step < head_size / kPair; ++step)
      e4m3::expand(
          bytes + (int64_t(step) * size + offset) * kPair, each * kPair, copy.keys + (step * kTile + index) * kPair);
    if (cache.latent_size == 0)
      e4m3::expand(
          bytes + cache.head_elements() + offset * head_size, each * head_size, copy.values + index * head_size);
  }
  return tile_of_copy<Type>(head_size, copy);
}

// Places such that what fetches the next tile (steps.h, attention_amx.h) fetches the bytes that `expanded_tile` will read: a
// line for each step, of blocks of 16 to 64 tokens exactly, of others about.
template <class Type>
Tile<typename Type::Element> bytes_ahead(
    const Cache<typename Type::Element>& cache, const int64_t* table, int head, int64_t start, int64_t first_key,
    int64_t last_key) {
  using Element = typename Type::Element;
  const int64_t step_bytes = (cache.latent_size > 0 ? 1 : 2) * kGroup * Type::kPair;
  const int64_t group_bytes = step_bytes * (cache.head_size / Type::kPair);
  Tile<Element> tile;
  tile.key_stride = step_bytes / int64_t(sizeof(Element));
  for (int group = 0; group < kGroups; ++group) {
    const int64_t key = std::clamp(start + group * kGroup, first_key, last_key), block = key / cache.block_size;
    const int64_t number = (key - block * cache.block_size) / kGroup;
    const uint8_t* const bytes = cache.key_bytes(table[block], head) + number * group_bytes;
    tile.keys[group] = tile.values[group] = reinterpret_cast<const Element*>(bytes);
  }
  return tile;
}

// The values of a tile of latents, from its keys: all 64 of them, also those that no row sees, which may be anything.
template <class Type>
void copy_values(Tile<typename Type::Element>& tile, int size, typename Type::Element* values) {
  using Element = typename Type::Element;
  constexpr int kPair = Type::kPair;
  for (int group = 0; group < kGroups; ++group) {
    const Element* const keys = tile.keys[group];
    Element* const to = values + int64_t(group) * kGroup * size;
    for (int key = 0; key < kGroup; key += kPair)
      for (int step = 0; step < size / kPair; ++step) {
        const Element* const from = keys + step * tile.key_stride + key * kPair;
        Element* const pair = to + int64_t(key) * size + step * kPair * kPair;
        if constexpr (kPair == 2) {
          // Two keys of two numbers each -> two numbers of two keys each.
          uint64_t numbers;
          std::memcpy(&numbers, from, sizeof numbers);
          numbers = (numbers & 0xffff00000000ffffu) | (numbers >> 16 & 0xffff0000u) | (numbers & 0xffff0000u) << 16;
          std::memcpy(pair, &numbers, sizeof numbers);
        } else {
          *pair = *from;
        }
      }
    tile.values[group] = to;
  }
}

// Writes one token's key and value of one head to its slot.
template <class Type>
SPMD_INLINE void write_one(
    const Cache<typename Type::Element>& cache, const typename Type::Element* key, const typename Type::Element* value,
    int64_t block, int head, int offset) {
  constexpr int kPair = Type::kPair;
  typename Type::Element* keys = cache.keys(block, head) + offset * kPair;
  typename Type::Element* values = cache.values(block, head) + int64_t(offset - offset % kPair) * cache.head_size;
  const int64_t stride = int64_t(cache.block_size) * kPair;
  for (int step = 0; step < cache.head_size / kPair; ++step)
    std::memcpy(keys + step * stride, key + step * kPair, kPair * sizeof *keys);
  if (cache.latent_size > 0) return;
  for (int dimension = 0; dimension < cache.head_size; ++dimension)
    values[dimension * kPair + offset % kPair] = value[dimension];
}

// Writes two tokens with adjacent slots together.
template <class Type>
SPMD_INLINE void write_two(
    const Cache<typename Type::Element>& cache, const uint16_t* const* keys, const uint16_t* const* values, int64_t block,
    int head, int offset) {
  uint16_t* to = cache.keys(block, head) + offset * 2;
  const int64_t stride = int64_t(cache.block_size) * 2;
  for (int step = 0; step < cache.head_size / 2; ++step, to += stride) {
    std::memcpy(to, keys[0] + step * 2, 4);
    std::memcpy(to + 2, keys[1] + step * 2, 4);
  }
  if (cache.latent_size > 0) return;
  to = cache.values(block, head) + int64_t(offset) * cache.head_size;
  for (int dimension = 0; dimension < cache.head_size; dimension += kLanes) {
    const Words first = zero_extended(load<Halves>(values[0] + dimension));
    const Words second = zero_extended(load<Halves>(values[1] + dimension));
    store(to + dimension * 2, first | second << 16);
  }
}

// Prefetches the lines of a token's slot; its keys are in as many lines as a head has steps.
template <class Type>
SPMD_INLINE void fetch_place(const Cache<typename Type::Element>& cache, int64_t block, int offset) {
  constexpr int kPair = Type::kPair, kLine = 64 / int(sizeof(typename Type::Element));
  for (int head = 0; head < cache.num_kv_heads; ++head) {
    const auto* const keys = cache.keys(block, head) + offset * kPair;
    for (int step = 0; step < cache.head_size / kPair; ++step)
      __builtin_prefetch(keys + int64_t(step) * cache.block_size * kPair, 0, 2);
    if (cache.latent_size > 0) continue;
    const auto* const values = cache.values(block, head) + int64_t(offset - offset % kPair) * cache.head_size;
    for (int index = 0; index < cache.head_size * kPair; index += kLine) __builtin_prefetch(values + index, 0, 2);
  }
}

// Keys and values of a step's tokens: [tokens, heads, head size], strided; no values in a cache of latents.
template <class Element>
struct TokenRows {
  const Element *keys, *values;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;

  const Element* key(int64_t token, int64_t head) const {
    return keys + token * key_token_stride + head * key_head_stride;
  }
  const Element* value(int64_t token, int64_t head) const {
    return values + token * value_token_stride + head * value_head_stride;
  }
  // Other threads may have computed them. Inlined: compilers drop a call that only prefetches.
  SPMD_INLINE_MEMBER void fetch(int64_t token, int num_heads, int head_size) const {
    for (int64_t head = 0; head < num_heads; ++head)
      for (int index = 0; index < head_size; index += 64 / int(sizeof(Element))) {
        __builtin_prefetch(key(token, head) + index);
        if (values != nullptr) __builtin_prefetch(value(token, head) + index);
      }
  }
};

// `write_one` to a cache in bytes.
template <class Type>
void write_reduced(
    const Cache<typename Type::Element>& cache, const typename Type::Element* key, const typename Type::Element* value,
    int64_t block, int head, int offset) {
  constexpr int kPair = Type::kPair;
  const int size = cache.head_size;
  alignas(64) uint8_t bytes[kMaxHeadSize];
  e4m3::reduce(key, size, bytes);
  uint8_t* const keys = cache.key_bytes(block, head);
  const int64_t stride = int64_t(cache.block_size) * kPair;
  for (int step = 0; step < size / kPair; ++step)
    std::memcpy(keys + step * stride + offset * kPair, bytes + step * kPair, kPair);
  if (cache.latent_size > 0) return;
  e4m3::reduce(value, size, bytes);
  uint8_t* const values = keys + cache.head_elements() + int64_t(offset - offset % kPair) * size + offset % kPair;
  for (int dimension = 0; dimension < size; ++dimension) values[dimension * kPair] = bytes[dimension];
}

// Writes all tokens of a step. Keys are rotated by `angles`.
template <class Type>
void write_all(
    const Cache<typename Type::Element>& cache, const TokenRows<typename Type::Element>& rows,
    const Angles<typename Type::Element>& angles, const int64_t* blocks, const int64_t* offsets, int64_t num_tokens,
    int num_threads) {
  using Element = typename Type::Element;
  constexpr int64_t kAhead = 4;  // tokens
  const int num_heads = cache.num_kv_heads, head_size = cache.head_size;
  // Below this many numbers a second thread costs more than it gains.
  const bool is_small = num_tokens * num_heads * head_size < 4096;
  parallel_ranges(num_tokens, is_small ? 1 : num_threads, [&](int64_t first, int64_t end) {
    for (int64_t token = first, num_written = 1; token < end; token += num_written) {
      const int64_t block = blocks[token], offset = offsets[token];
      if (token == first || blocks[token - 1] != block) {
        int64_t following = token + 1;
        while (following < end && blocks[following] == block) ++following;
        if (following < end && !cache.in_bytes) fetch_place<Type>(cache, blocks[following], int(offsets[following]));
      }
      const bool is_pair =
          Type::kPair == 2 && !cache.in_bytes && offset % 2 == 0 && token + 1 < end && blocks[token + 1] == block && offsets[token + 1] == offset + 1;
      num_written = is_pair ? 2 : 1;
      for (int64_t ahead = token + kAhead; ahead < std::min(token + kAhead + num_written, end); ++ahead)
        rows.fetch(ahead, num_heads, head_size);
      Element scratches[2][kMaxHeadSize];
      for (int head = 0; head < num_heads; ++head) {
        const Element *keys[2], *values[2];
        for (int64_t which = 0; which < num_written; ++which) {
          keys[which] = rotated(rows.key(token + which, head), head_size, angles, token + which, scratches[which]);
          values[which] = rows.values == nullptr ? nullptr : rows.value(token + which, head);
        }
        if constexpr (Type::kPair == 2)
          if (is_pair) {
            write_two<Type>(cache, keys, values, block, head, int(offset));
            continue;
          }
        if (cache.in_bytes)
          write_reduced<Type>(cache, keys[0], values[0], block, head, int(offset));
        else
          write_one<Type>(cache, keys[0], values[0], block, head, int(offset));
      }
    }
  });
}

}  // namespace
