"""Float32 numbers as their shortest unique decimals, and as text in lines of JSON.

A row has hundreds of them: numpy formats them together, and the rare rest one by one.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Numbers = Sequence[float] | NDArray[np.float32]
"""A vector, or rows of equal length."""

_POWERS: Final = np.array([float(f"1e{power}") for power in range(23)])
"""Powers of ten that a float64 represents exactly: an integer divided by one is rounded once, as when a decimal is
read.
"""

_MIN: Final = 1e-13
_MAX: Final = 1e5
"""Range in which a number of 5 to 9 digits is an integer divided by one of the powers, and none is halfway between two
float32.
"""

_MAX_DIGITS: Final = 9
"""Digits that identify any float32."""

_MIN_DIGITS: Final = 5
"""A number of this many digits or fewer is one in a hundred and formatted by itself."""

_UNSURE: Final = 1e-5
"""This near to the middle of two decimals, a rounded product does not decide which is nearer."""

_WIDTH: Final = 22
_SIGN, _POINT, _ZEROS, _DIGITS, _END = 0, slice(1, 3), slice(3, 6), slice(6, 15), slice(20, _WIDTH)
"""Characters of a number in [0.0001, 1): sign, "0.", zeros, digits; for any number, the separator."""

_DIGIT_VALUES: Final = 10 ** np.arange(_MAX_DIGITS - 1, -1, -1)

_PLACEHOLDER: Final = "\0numbers\0"
_PLACEHOLDER_IN_LINES: Final = b'"\\u0000numbers\\u0000"'


def shortest_decimals(vector: Numbers) -> list[Any]:
    """`float(str(each))` of float32 numbers; lists of them for rows."""
    given = np.array(vector, dtype=np.float32)
    if given.ndim > 1:
        numbers, size = shortest_decimals(given.reshape(-1)), given.shape[1]
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]
    sizes, is_found, _ = _found(given)
    values: list[Any] = np.copysign(sizes, given).tolist()
    for index in np.flatnonzero(~is_found):
        values[index] = float(str(given[index]))
    return values


def shortest_text(vector: Numbers) -> str:
    """`json.dumps(shortest_decimals(vector))`."""
    given = np.array(vector, dtype=np.float32)
    if given.ndim > 1:
        texts, size = shortest_text(given.reshape(-1))[1:-1].split(", "), given.shape[1]
        rows = [", ".join(texts[start : start + size]) for start in range(0, len(texts), size)]
        return f"[{', '.join([f'[{row}]' for row in rows])}]"
    sizes, is_found, exponents = _found(given)
    is_short = is_found & (exponents >= -4) & (exponents < 0)
    mantissas = np.rint(sizes * _POWERS[_MAX_DIGITS - 1 - exponents]).astype(np.int64)
    # A number rounded up to the next power of ten has another exponent.
    is_short &= mantissas < 10**_MAX_DIGITS
    characters = np.full((len(given), _WIDTH), ord("0"), dtype=np.uint8)
    characters[:, _SIGN], characters[:, _POINT], characters[:, _END] = ord("-"), (48, 46), (44, 32)
    digits = mantissas[:, None] // _DIGIT_VALUES % 10
    characters[:, _DIGITS] += digits.astype(np.uint8)
    is_kept = np.zeros(characters.shape, dtype=np.bool_)
    is_kept[:, _SIGN], is_kept[:, _POINT], is_kept[:, _END] = np.signbit(given), True, True
    is_kept[:, _ZEROS] = np.arange(3) < -1 - exponents[:, None]
    # Without trailing zeros.
    is_kept[:, _DIGITS] = np.logical_or.accumulate(digits[:, ::-1] != 0, axis=1)[:, ::-1]
    for index in np.flatnonzero(~is_short):
        text = repr(float(str(given[index]))).encode("ascii")
        characters[index, : len(text)] = np.frombuffer(text, dtype=np.uint8)
        is_kept[index, : _END.start] = np.arange(_END.start) < len(text)
    is_kept[-1:, _END] = False
    return f"[{characters[is_kept].tobytes().decode('ascii')}]"


def read_decimals(text: bytes, size: int) -> NDArray[np.float32] | None:
    """The float32 numbers nearest to `size` decimals between commas; None for another number of them."""
    numbers = np.fromstring(text.decode("ascii"), dtype=np.float64, sep=",").astype(np.float32)
    return numbers if len(numbers) == size else None


def _found(given: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
    """Decimal magnitude of each number, whether it is known, and the decimal exponent of the number."""
    size = np.abs(given.astype(np.float64))
    # A power of two has neighbours at two distances.
    is_plain = (size >= _MIN) & (size < _MAX) & (np.frexp(size)[0] != 0.5)
    size = np.where(is_plain, size, 1.0)
    narrow, exponents = size.astype(np.float32), np.floor(np.log10(size)).astype(np.int64)
    best, is_alive = size, is_plain
    for num_digits in range(_MAX_DIGITS, _MIN_DIGITS - 1, -1):
        scale = _POWERS[num_digits - 1 - exponents]
        scaled = size * scale
        rounded = np.rint(scaled)
        is_plain = is_plain & (np.abs(np.abs(scaled - rounded) - 0.5) > _UNSURE)
        decimal = rounded / scale
        is_alive = is_alive & (decimal.astype(np.float32) == narrow)
        best = np.where(is_alive, decimal, best)
    return best, is_plain & ~is_alive, exponents


class FormattedVectors:
    """Vectors of one line of JSON, which is made with a placeholder for each and filled afterwards."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, vector: Numbers) -> str:
        """Placeholder of the next vector in the record of the line."""
        self._texts.append(shortest_text(vector))
        return _PLACEHOLDER

    def fill(self, line: bytes) -> bytes | None:
        """The line; None if it contains the placeholder itself, so that they are ambiguous."""
        pieces = line.split(_PLACEHOLDER_IN_LINES)
        if len(pieces) != len(self._texts) + 1:
            return None
        texts = [text.encode("ascii") for text in self._texts]
        return b"".join([each for pair in zip(pieces, [*texts, b""], strict=True) for each in pair])
