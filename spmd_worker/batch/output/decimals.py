"""Float32 numbers as the shortest decimal ones that tell them from their neighbours."""

from collections.abc import Sequence
from typing import Final

import numpy as np

_POWERS: Final = np.array([float(f"1e{power}") for power in range(23)])
"""Of ten, as far as a float64 is one exactly: a whole number by one of them is rounded once, as a decimal is read."""

_LEAST: Final = 1e-13
_MOST: Final = 1e5
"""Between these a number of 5 to 9 digits is a whole number by one of the powers, and none is halfway between two
float32.
"""

_MOST_DIGITS: Final = 9
"""So many tell any float32 from its neighbours."""

_LEAST_DIGITS: Final = 5
"""A number that so few tell, or fewer, is one in a hundred and spelled by itself."""

_UNSURE: Final = 1e-5
"""So near to the middle of two decimals, a product that was rounded does not say which is nearer."""


def shortest_decimals(vector: Sequence[float]) -> list[float]:
    """`float(str(each))` of float32 numbers, all at once."""
    given = np.array(vector, dtype=np.float32)
    size = np.abs(given.astype(np.float64))
    # A power of two has neighbours at two distances.
    is_plain = (size >= _LEAST) & (size < _MOST) & (np.frexp(size)[0] != 0.5)
    size = np.where(is_plain, size, 1.0)
    narrow, exponents = size.astype(np.float32), np.floor(np.log10(size)).astype(np.int64)
    best, is_alive = size, is_plain
    for num_digits in range(_MOST_DIGITS, _LEAST_DIGITS - 1, -1):
        scale = _POWERS[num_digits - 1 - exponents]
        scaled = size * scale
        whole = np.rint(scaled)
        is_plain = is_plain & (np.abs(np.abs(scaled - whole) - 0.5) > _UNSURE)
        decimal = whole / scale
        is_alive = is_alive & (decimal.astype(np.float32) == narrow)
        best = np.where(is_alive, decimal, best)
    found: list[float] = np.copysign(best, given).tolist()
    for place in np.flatnonzero(is_alive | ~is_plain):
        found[place] = float(str(given[place]))
    return found
