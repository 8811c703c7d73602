"""Counter-based random numbers: a function of (stream, sample, position), with no state anywhere.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) on numpy's unsigned integers, with
the same result on every rank, machine and device, in any batch. The host's generators are never read or written.
"""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_LOW: Final = np.uint64(0xFFFFFFFF)
_SHIFT: Final = np.uint64(32)

Words = NDArray[np.uint64]


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds. Every word is an array of 32-bit values held in uint64; all arrays have one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return c0, c1, c2, c3


def random_bits(streams: ArrayLike, samples: ArrayLike, positions: ArrayLike) -> NDArray[np.int64]:
    """53 random bits a row: `streams` unsigned 64-bit, `samples` and `positions` below 2**32."""
    stream = np.array(streams, dtype=np.uint64)
    position, sample = np.array(positions, dtype=np.uint64), np.array(samples, dtype=np.uint64)
    zero = np.zeros_like(stream)
    first, second, _, _ = philox((position, sample, zero, zero), (stream & _LOW, stream >> _SHIFT))
    return ((first << _SHIFT | second) >> np.uint64(11)).astype(np.int64)


def random_shares(bits: Tensor, totals: Tensor) -> Tensor:
    """Int64 [K] of 53 bits, int64 [K] below 2^62 -> floor(bits x totals / 2^53), exactly, in numbers of 64 bits."""
    high, low = bits >> 26, bits & (1 << 26) - 1
    upper, lower = totals >> 30, totals & (1 << 30) - 1
    # high upper 2^56 + (low upper 2^4 + high lower) 2^26 + low lower, over 2^26 and then over 2^27.
    rest = (low * upper << 4) + high * lower + (low * lower >> 26)
    return (high * upper << 3) + (rest >> 27)
