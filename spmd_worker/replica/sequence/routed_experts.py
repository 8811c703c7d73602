"""Experts that tokens met, of rows that ask for them: in step results, kept per request, and as arrays.

L: sparse layers, in order, on this stage or of the model; k: experts of a token, the one of the largest weight first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_worker.replica.sequence.request import RequestId

_MAX_OF_BYTE: Final = 256


class RoutedTokens(NamedTuple):
    """Experts of `num_tokens` successive tokens of a sample, from position `first` on: `data` is [tokens, L, k], of
    little-endian numbers of `num_bytes` each. `num_chosen` is k.
    """

    request_id: RequestId
    sample_index: int
    first: int
    num_tokens: int
    num_chosen: int
    num_bytes: int
    data: bytes


def bytes_per_expert(num_experts: int) -> int:
    """Bytes of an index among so many experts."""
    return 1 if num_experts <= _MAX_OF_BYTE else 2


def joined_stages(last: Sequence[RoutedTokens], stages: Sequence[bytes]) -> tuple[RoutedTokens, ...]:
    """Experts of all layers: `last` are those of the last stage, `stages` the data of each stage before, of the same
    tokens, one sample's after another's.
    """
    num_tokens = sum(each.num_tokens for each in last)
    layers = [_rows(each, num_tokens) for each in stages]
    joined, start = [], 0
    for each in last:
        stop = start + each.num_tokens
        parts = [*(layer[start:stop] for layer in layers), _rows(each.data, each.num_tokens)]
        joined.append(each._replace(data=np.concatenate(parts, axis=1).tobytes()))
        start = stop
    return tuple(joined)


def _rows(data: bytes, num_tokens: int) -> NDArray[np.uint8]:
    """Bytes of each token."""
    return np.frombuffer(data, np.uint8).reshape(num_tokens, len(data) // max(num_tokens, 1))


@dataclass(slots=True)
class RoutedExperts:
    """Experts of tokens from the first on; tokens computed again replace theirs."""

    data: bytearray = field(default_factory=bytearray)
    num_chosen: int = 0
    num_bytes: int = 1
    token_bytes: int = 0

    def put(self, first: int, tokens: RoutedTokens, start: int, stop: int) -> None:
        """Keep those of `tokens` from the one of index `start` to `stop`, the first of them as token `first`."""
        if start >= stop:
            return
        self.num_chosen, self.num_bytes = tokens.num_chosen, tokens.num_bytes
        size = self.token_bytes = len(tokens.data) // tokens.num_tokens
        # Positions whose keys and values were given have none.
        self.data.extend(bytes(max(first * size - len(self.data), 0)))
        self.data[first * size : (first + stop - start) * size] = tokens.data[start * size : stop * size]

    def array(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Those of tokens `start` to `stop`, [tokens, L, k]."""
        size = self.token_bytes
        part = bytes(self.data[start * size : None if stop is None else stop * size])
        num_chosen = max(self.num_chosen, 1)
        shape = (len(part) // max(size, 1), size // (num_chosen * self.num_bytes), num_chosen)
        return np.frombuffer(part, f"<u{self.num_bytes}").reshape(shape)
