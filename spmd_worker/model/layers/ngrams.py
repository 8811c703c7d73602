"""Embedded n-grams that a layer adds to its streams (Qwen4's per-layer embeddings).

Heads of each n-gram have rows of one table, by a hash of its ids. Their projections are a key of each stream, whose
product with the normed stream gates the value, and the gated values pass a convolution over the tokens before.

Ids of earlier tokens are cached with the last inputs of that convolution, as further channels of it, in digits that
every dtype has exactly. So a token's n-grams depend on its sequence alone, however that is cut, and its states have all
that they need.

T: tokens of the step; L: tokens that its rows lag by (`DraftReplay`); Q: sequences; S: streams; H: hidden size; N:
tokens of the longest n-gram; G: heads of all n-grams; C: channels, S * H and those of the id.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache.layer_states import LayerStates
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.gated_streams import StreamNorm
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model.layers.recurrence import own_outputs
from spmd_worker.model.layers.short_conv import ConvWeights
from spmd_worker.model.layers.weight_slice import PaddingSlice, WeightSlice, empty_slice
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.stream_config import ID_DIGITS, NgramConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.recurrent import StateSegments
from spmd_worker.ops.kernels.reference_recurrent import sigmoid

_DIGIT = 256


class NgramTable(CheckpointLayer):
    """Rows of all heads, int64 [n] -> [n, numbers of a row], the same on every rank, which has a range of the rows."""

    def __init__(self, context: LayerContext, ngrams: NgramConfig) -> None:
        super().__init__()
        self._ngrams, self._group = ngrams, context.tensor_group
        count = ngrams.rank_rows(context.tensor_group.size)
        self._start = min(context.tensor_group.rank * count, ngrams.num_rows)
        self._stop = min(self._start + count, ngrams.num_rows)
        self.weight = context.parameter(count, ngrams.row_size)

    def forward(self, rows: Tensor) -> Tensor:
        """One rank has a row and the others add zero, so the sum is exact."""
        if self._group.size == 1:
            return F.embedding(rows, self.weight)
        is_mine = (rows >= self._start) & (rows < self._stop)
        found = F.embedding((rows - self._start) * is_mine, self.weight)
        return self._group.all_reduce(found.masked_fill_(~is_mine.unsqueeze(1), 0.0), is_exact=True)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        columns, first = (0, self._ngrams.row_size), 0
        for index, count in enumerate(self._ngrams.rows_of_parts):
            name, shape = f"{prefix}.shard_{index}.weight", (count, self._ngrams.row_size)
            start, stop = max(first, self._start), min(first + count, self._stop)
            if start < stop:
                source, destination = (start - first, stop - first), (start - self._start, stop - self._start)
                yield WeightSlice(name, shape, (source, columns), f"{prefix}.weight", (destination, columns))
            else:
                yield empty_slice(name, shape)
            first += count

    def padding_slices(self, prefix: str) -> Iterator[PaddingSlice]:
        count, num_rows = self._stop - self._start, len(self.weight)
        if count < num_rows:
            yield PaddingSlice(f"{prefix}.weight", ((count, num_rows), (0, self._ngrams.row_size)))


class NgramEmbedding(nn.Module):
    """Rows of the heads of a token's n-grams."""

    def __init__(self, context: LayerContext, ngrams: NgramConfig) -> None:
        super().__init__()
        self._ngrams = ngrams
        self.ngram_embedding = NgramTable(context, ngrams)
        sizes = torch.tensor(ngrams.head_rows).to(context.device)
        self._sizes = sizes.view(ngrams.size - 1, -1)
        self._firsts = (sizes.cumsum(0) - sizes).view_as(self._sizes)

    def forward(self, ids: Tensor, earlier: Tensor) -> Tensor:
        """Ids int64 [T], and those before each, latest first, [T, N - 1], -1 for none -> [T, numbers of all heads]."""
        ngrams = self._ngrams
        mixed, rows = ids * ngrams.multipliers[0], []
        is_same = torch.ones_like(ids, dtype=torch.bool)
        for distance in range(1, ngrams.size):
            before = earlier[:, distance - 1]
            # From an end on, all before it count as ends.
            is_same = is_same & (before >= 0) & (before != ngrams.end_token)
            mixed = mixed ^ (torch.where(is_same, before, ngrams.end_token) * ngrams.multipliers[distance])
            rows.append(mixed.unsqueeze(1) % self._sizes[distance - 1] + self._firsts[distance - 1])
        found: Tensor = self.ngram_embedding(torch.cat(rows, dim=1).flatten())
        return found.view(len(ids), -1)


class Ngrams(nn.Module):
    """Values of n-grams for the streams of a layer, and their convolution. Every rank computes all of it."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        ngrams, streams = layer.ngrams, layer.streams
        assert ngrams is not None, layer
        assert streams is not None, layer
        self._ngrams, self._hidden_size, self._num_streams = ngrams, hidden_size, streams.num_streams
        self._kernels, self._dtype = context.kernels.recurrent_kernels(), context.dtype
        size = streams.num_streams * hidden_size
        self.ple_embedding = NgramEmbedding(context, ngrams)
        self.key_proj = replicated_linear(context, "key_proj", ngrams.embed_size, size)
        self.value_proj = replicated_linear(context, "value_proj", ngrams.embed_size, hidden_size)
        self.norm_key, self.norm_query, self.norm_conv = (
            StreamNorm(context, streams.num_streams, hidden_size, layer.norm) for _ in range(3)
        )
        self.conv1d = ConvWeights(context, size, (0, size), ngrams.num_taps, has_bias=False)

    def forward(
        self,
        streams: Tensor,
        token_ids: Tensor,
        states: LayerStates,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Streams [T, S * H] and ids int64 [T] -> what is added to the streams, [T, S * H]. Reads and writes the second
        tail of the step's sequences.
        """
        tail, saved, replay, size = states.second_tail, states.second_saved, metadata.replay, streams.shape[1]
        assert tail is not None, "n-grams have a state"
        digits = _digits(token_ids, self._dtype)
        if replay is None:
            segments, all_ids = metadata.segments, token_ids
        else:
            assert saved is not None, "a layer with states saves the inputs of drafts"
            segments = replay.segments
            all_ids = token_ids.new_empty(len(token_ids) + len(replay.lagging_rows))
            all_ids[replay.own_rows] = token_ids
            all_ids[replay.lagging_rows] = _ids(saved.view(-1, saved.shape[2])[replay.replayed_rows, size:])
        assert segments is not None, "the step has states"
        earlier = own_outputs(metadata, _earlier_ids(all_ids, tail[..., size:], segments, self._ngrams.size - 1))
        gated = self._gated(streams, self.ple_embedding(token_ids, earlier))
        inputs = torch.cat((self.norm_conv(gated), digits), dim=1)
        if replay is not None and saved is not None:
            inputs = replay.extend(inputs, saved)
        mixed = self._kernels.short_conv(inputs, self._taps(size), None, tail, segments, has_silu=True)
        return gated + own_outputs(metadata, mixed)[:, :size]

    def _gated(self, streams: Tensor, embedded: Tensor) -> Tensor:
        """Values times the gates of each stream, [T, S * H]."""
        keys: Tensor = self.norm_key(self.key_proj(embedded))
        value: Tensor = self.value_proj(embedded)
        products = (keys * self.norm_query(streams)).view(len(streams), self._num_streams, -1)
        scores = _sums(products.float()).to(value.dtype) / math.sqrt(self._hidden_size)
        gates = sigmoid((scores.abs().clamp_min(1e-6).sqrt() * scores.sign()).float()).to(value.dtype)
        return (gates.unsqueeze(2) * value.unsqueeze(1)).flatten(1)

    def _taps(self, size: int) -> Tensor:
        """[C, taps], the convolution's own with zeros between, and zeros for the id."""
        ngrams = self._ngrams
        taps = self.conv1d.weight.new_zeros(ngrams.num_channels(size), ngrams.num_inputs_kept + 1)
        taps[:size, :: ngrams.size] = self.conv1d.weight[:, 0]
        return taps


def _sums(numbers: Tensor) -> Tensor:
    """[..., n] -> [...], added by halves: on a GPU torch's own order depends on the number of rows."""
    while (size := numbers.shape[-1]) > 1:
        half = -(-size // 2)
        first, second = numbers[..., :half], numbers[..., half:]
        numbers = torch.cat((first[..., : size - half] + second, first[..., size - half :]), dim=-1)
    return numbers[..., 0]


def _earlier_ids(ids: Tensor, kept: Tensor, segments: StateSegments, count: int) -> Tensor:
    """The `count` ids before each of a step's tokens, latest first: int64 [T, count], -1 for none. `kept` [slots, n, 3]
    are the digits of the last n ids of each slot.
    """
    starts, slots = segments.starts.long(), segments.slots.long()
    counts = starts.diff()
    # [Q, count], latest last; tokens behind the last sequence are of none.
    before = _ids(kept[slots, -count:])
    sequence = torch.arange(len(slots), device=ids.device).repeat_interleave(counts, output_size=len(ids))
    own = torch.arange(len(ids), device=ids.device)
    inside = own - starts[sequence]
    found = []
    for distance in range(1, count + 1):
        at = inside - distance
        in_step = ids[(own - distance).clamp(min=0)]
        in_slot = before[sequence, (at + count).clamp(0, count - 1)]
        is_there = segments.firsts.long()[sequence] + at >= 0
        found.append(torch.where(is_there, torch.where(at >= 0, in_step, in_slot), -1))
    return torch.stack(found, dim=1)


def _digits(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Ids [T] -> [T, 3], in digits below 256."""
    return torch.stack([ids // _DIGIT**place % _DIGIT for place in range(ID_DIGITS)], dim=1).to(dtype)


def _ids(digits: Tensor) -> Tensor:
    """[..., 3] -> int64 [...]. Those that are not finite are of no sequence."""
    numbers = torch.nan_to_num(digits.float()).long()
    return sum((numbers[..., place] * _DIGIT**place for place in range(1, ID_DIGITS)), numbers[..., 0])
