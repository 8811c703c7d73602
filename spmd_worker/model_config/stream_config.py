"""Config of layers with several residual streams (https://arxiv.org/abs/2409.19606), and of embedded n-grams that a
layer adds to them. Needs no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from math import isqrt
from typing import Final

ID_DIGITS: Final = 3
"""Numbers below 256 that an id is cached as, which every dtype has exactly."""
MAX_IDS: Final = 256**ID_DIGITS
MAX_TABLE_ROWS: Final = 2**27
"""Rows of the table of one head of n-grams, at most: primes are searched from this number on."""
_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_LAYER_STEP: Final = 10_007


@dataclass(frozen=True, slots=True)
class GatedStreamsConfig:
    """`num_streams` residual streams of the hidden size. The input of each part of a layer is the mean of the normed
    streams, each number times a gate, which comes from all streams by way of `rank` numbers; the part's output is added
    to each stream, times a gate of that stream. Another such mean is the model's last norm.
    """

    num_streams: int
    rank: int

    def elements(self, hidden_size: int, *, injects: bool = True) -> int:
        """Elements of norm and gates around one part, or before the head, where none `injects`."""
        return self.num_streams * hidden_size * (1 + 2 * self.rank + injects * self.num_streams)


@dataclass(frozen=True, slots=True)
class PredictedStreamsConfig:
    """`num_streams` residual streams of the hidden size (AltUp, https://arxiv.org/abs/2301.13310): a layer predicts all
    of them, computes with the one of index `active`, and corrects all by what came of it. A projection by way of
    `rank` numbers adds to what attention reads (LAuReL, https://arxiv.org/abs/2411.07501). With `scales_output` inputs
    of the layer's own are gated by the active stream times a weight.

    The first stream of a token is its embedding, the others are projections of it, as long as it; the last norm is of
    the mean of the first and of projections of the others, as long as the first.
    """

    num_streams: int
    active: int
    rank: int
    scales_output: bool

    def elements(self, hidden_size: int) -> int:
        """Elements of what predicts and corrects streams in a layer, and of the projection by way of `rank` numbers."""
        count = self.num_streams
        return hidden_size * (count + 2 * self.rank + 3) + count * count * (count + 1)

    def outer_elements(self, hidden_size: int) -> int:
        """Elements of the projections before the layers and behind them."""
        return 2 * (self.num_streams - 1) * hidden_size * hidden_size


@dataclass(frozen=True, slots=True)
class BalancedStreamsConfig:
    """`num_streams` residual streams of the hidden size. The input of each part of a layer, and of the last norm, is a
    weighted sum of them. The part's output is added to each by a weight, and the streams are mixed by a matrix that is
    balanced `num_iterations` times. `eps` is added to weights and sums, and `norm_eps` is that of the norm of all
    streams as one row, from which weights come.
    """

    num_streams: int
    num_iterations: int
    eps: float
    norm_eps: float

    def elements(self, hidden_size: int) -> int:
        """Elements of the weights around one part; float32 in every dtype."""
        num_outputs = (2 + self.num_streams) * self.num_streams
        return num_outputs * (self.num_streams * hidden_size + 1) + 3

    def head_elements(self, hidden_size: int) -> int:
        """Elements of the weights before the last norm; float32 in every dtype."""
        return self.num_streams * (self.num_streams * hidden_size + 1) + 1


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """Embeddings of a token with those before it, which a layer adds to its streams. Of each of 2 to `size` tokens
    several heads have a row, of a table of `head_rows` of their own: the products of ids and `multipliers`, joined by
    exclusive or, modulo the number of rows. Tokens up to the last `end_token` before a token count as that.

    Rows of all heads, `embed_size` numbers, are projected to a value and to a key for each stream. Gated values pass a
    convolution of `num_taps` taps, `size` tokens apart. Files have the table of `num_rows` in `num_parts` tensors.
    """

    multipliers: tuple[int, ...]
    head_rows: tuple[int, ...]
    num_rows: int
    embed_size: int
    num_taps: int
    end_token: int
    num_parts: int

    @property
    def size(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def row_size(self) -> int:
        """Numbers of a row of the table."""
        return self.embed_size // len(self.head_rows)

    @property
    def num_inputs_kept(self) -> int:
        """Last inputs of the convolution that are kept of a sequence."""
        return (self.num_taps - 1) * self.size

    @property
    def rows_of_parts(self) -> tuple[int, ...]:
        """Rows of each tensor of the table: all have as many as the first but for the last."""
        each = -(-self.num_rows // self.num_parts)
        return tuple([min(each, self.num_rows - first) for first in range(0, self.num_rows, each)])

    def rank_rows(self, num_ranks: int) -> int:
        """Rows of the table on each of these ranks."""
        return -(-self.num_rows // num_ranks)

    def num_channels(self, streams_size: int) -> int:
        """Numbers that the convolution has of a token: those of all streams, and its id."""
        return streams_size + ID_DIGITS

    def elements(self, hidden_size: int, num_streams: int) -> int:
        """Elements of two projections, three norms and taps."""
        return hidden_size * ((num_streams + 1) * self.embed_size + num_streams * (3 + self.num_taps))


def multipliers(vocab_size: int, size: int, number: int, seed: int) -> tuple[int, ...]:
    """Odd multipliers of ids, of the layer with n-grams of this number, up to `size`: products fit int64."""
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    first = seed + _LAYER_STEP * number
    return tuple([2 * (_split_mix(first + _GAMMA * (index + 1)) % half) + 1 for index in range(size)])


def _split_mix(value: int) -> int:
    """64 mixed bits (https://doi.org/10.1145/2714064.2660195)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def primes_from(start: int, first: int, number: int) -> tuple[int, ...]:
    """`number` primes that are at least `start`, from the `first`th of them on, counted from 0."""
    return tuple(islice(_primes(start), first, first + number))


def _primes(start: int) -> Iterator[int]:
    return (value for value in count(max(start, 2)) if _is_prime(value))


def _is_prime(value: int) -> bool:
    if value % 2 == 0:
        return value == 2
    # No function is called for a divisor: files may have many tables.
    divisors = range(3, isqrt(value) + 1, 2)
    return 0 not in [value % divisor for divisor in divisors]
