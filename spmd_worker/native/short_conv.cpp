// The causal depthwise convolution of a step's sequences (ops/kernels/recurrent.py). Every channel of every sequence is
// computed by itself: taps from the oldest to the newest in float, the bias, the activation, one rounding. So neither the
// division of a prompt into steps nor that of the work into tiles changes a bit.

#include <algorithm>
#include <cstddef>

#include "elements.h"
#include "thread_pool.h"

namespace {

// Below this many numbers a second thread costs more than it gains.
constexpr int64_t kSmall = 8192;
// Channels and tokens that are computed together; taps at most.
constexpr int64_t kTile = 64, kTokens = 32, kMostTaps = 16;

template <class Element>
struct Convolution {
  const Element* x;
  int64_t x_stride, num_channels;
  const Element* weight;  // [channels, taps]
  int64_t num_taps;
  const Element* bias;  // or null
  Element* tails;       // [slots, taps - 1, channels]
  const int32_t *slots, *starts, *firsts;
  const int32_t* kept;  // tokens whose effect on the tail is kept, or null for all
  int64_t num_segments;
  bool has_silu;
  Element* to;
};

// Weights and inputs of one tile of channels. The first taps - 1 rows are the inputs before the others.
struct Tile {
  int64_t first, count;
  float taps[kMostTaps][kTile], bias[kTile], rows[kMostTaps - 1 + kTokens][kTile];
};

template <class Element>
void fill_weights(const Convolution<Element>& conv, int64_t first, Tile& tile) {
  tile.first = first, tile.count = std::min(kTile, conv.num_channels - first);
  for (int64_t tap = 0; tap < conv.num_taps; ++tap)
    for (int64_t channel = 0; channel < tile.count; ++channel)
      tile.taps[tap][channel] = to_float(conv.weight[(first + channel) * conv.num_taps + tap]);
  if (conv.bias == nullptr) return;
  for (int64_t channel = 0; channel < tile.count; ++channel) tile.bias[channel] = to_float(conv.bias[first + channel]);
}

template <class Element>
void load_row(const Element* from, int64_t count, float* to) {
  for (int64_t channel = 0; channel < count; channel += kLanes)
    store(to + channel, load_some(from + channel, count - channel));
}

// One output row from the `num_taps` rows that begin at `rows`.
template <class Element>
void convolve_row(const Convolution<Element>& conv, const Tile& tile, const float (*rows)[kTile], Element* to) {
  for (int64_t channel = 0; channel < tile.count; channel += kLanes) {
    Floats sum = load<Floats>(rows[0] + channel) * load<Floats>(tile.taps[0] + channel);
    for (int64_t tap = 1; tap < conv.num_taps; ++tap)
      sum += load<Floats>(rows[tap] + channel) * load<Floats>(tile.taps[tap] + channel);
    if (conv.bias != nullptr) sum += load<Floats>(tile.bias + channel);
    store_some(to + channel, conv.has_silu ? silu(sum) : sum, tile.count - channel);
  }
}

// Replaces a tail [taps - 1, channels] by the last inputs before `stop`, a row of the step; few tokens have some of them
// before theirs. Copies elements: conversion could flush the smallest.
template <class Element>
void write_tail(
    const Convolution<Element>& conv, const Tile& tile, Element* tail, int64_t start, int64_t stop, bool begins) {
  const int64_t num_past = conv.num_taps - 1;
  for (int64_t row = 0; row < num_past; ++row, tail += conv.num_channels) {
    const int64_t source = stop - num_past + row;
    if (source >= start) {
      const Element* from = conv.x + source * conv.x_stride + tile.first;
      std::copy(from, from + tile.count, tail);
    } else if (begins) {
      std::fill(tail, tail + tile.count, Element{});
    } else {
      const Element* from = tail + (stop - start) * conv.num_channels;
      std::copy(from, from + tile.count, tail);
    }
  }
}

template <class Element>
void convolve_segment(const Convolution<Element>& conv, int64_t segment, Tile& tile) {
  const int64_t start = conv.starts[segment], stop = conv.starts[segment + 1], num_past = conv.num_taps - 1;
  if (conv.slots[segment] < 0 || start >= stop) return;
  const bool begins = conv.firsts[segment] == 0;
  Element* tail = conv.tails + conv.slots[segment] * num_past * conv.num_channels + tile.first;
  for (int64_t row = 0; row < num_past; ++row) {
    if (begins) {
      std::fill(tile.rows[row], tile.rows[row] + kTile, 0.0f);
    } else {
      load_row(tail + row * conv.num_channels, tile.count, tile.rows[row]);
    }
  }
  for (int64_t token = start; token < stop; token += kTokens) {
    const int64_t count = std::min(kTokens, stop - token);
    for (int64_t row = 0; row < count; ++row)
      load_row(conv.x + (token + row) * conv.x_stride + tile.first, tile.count, tile.rows[num_past + row]);
    for (int64_t row = 0; row < count; ++row)
      convolve_row(conv, tile, tile.rows + row, conv.to + (token + row) * conv.num_channels + tile.first);
    std::copy(tile.rows[count], tile.rows[count + num_past], tile.rows[0]);
  }
  // Last: what is behind the kept tokens needs the old tail too.
  write_tail(conv, tile, tail, start, conv.kept == nullptr ? stop : start + conv.kept[segment], begins);
}

// Sequences are inside tiles: the weights of a tile are loaded once for neighbouring sequences.
template <class Element>
void short_conv(const Convolution<Element>& conv, int64_t num_threads) {
  if (conv.num_segments == 0) return;
  const int64_t num_tiles = (conv.num_channels + kTile - 1) / kTile;
  const int64_t num_numbers = (conv.starts[conv.num_segments] - conv.starts[0]) * conv.num_channels;
  parallel_ranges(num_tiles * conv.num_segments, num_numbers < kSmall ? 1 : num_threads, [&](int64_t item, int64_t end) {
    Tile tile;
    for (int64_t loaded = -1; item < end; ++item) {
      const int64_t number = item / conv.num_segments;
      if (number != loaded) fill_weights(conv, number * kTile, tile);
      loaded = number;
      convolve_segment(conv, item % conv.num_segments, tile);
    }
  });
}

}  // namespace

#define SPMD_SHORT_CONV(name, Element)                                                                                 \
  extern "C" void spmd_short_conv_##name(                                                                              \
      const Element* x, int64_t x_stride, int64_t num_channels, const Element* weight, int64_t num_taps,               \
      const Element* bias, Element* tails, const int32_t* slots, const int32_t* starts, const int32_t* firsts,         \
      const int32_t* kept, int64_t num_segments, int64_t has_silu, Element* to, int64_t num_threads) {                 \
    short_conv<Element>(                                                                                               \
        {x, x_stride, num_channels, weight, num_taps, bias, tails, slots, starts, firsts, kept, num_segments,          \
         has_silu != 0, to},                                                                                           \
        num_threads);                                                                                                  \
  }

SPMD_SHORT_CONV(float32, float)
SPMD_SHORT_CONV(bfloat16, uint16_t)
