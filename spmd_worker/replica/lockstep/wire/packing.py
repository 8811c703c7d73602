"""Compact integers: variable-length integers and columns of them, and their bounds-checked reading.

Everything is little-endian. A reader never trusts a count: its allocations are bounded by the bytes that are left or by
a bound its caller knows.

A column of n integers (n is known to both sides) is empty when n is 0, else a mode byte and then:

* `_CONSTANT`: one signed integer, n times;
* 1, 2, 3, 4 bytes each: a signed integer (0 or the least value), then each value's excess over it;
* 8 bytes each: the values themselves.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from spmd_worker.replica.lockstep.wire.message import MessageError

_MAX_VARINT_BITS: Final = 65
"""Zig-zag of a number from -2**64 to 2**64 - 1: random seeds are signed or unsigned 64-bit numbers."""

_CONSTANT: Final = 16
_MAX_SHORT: Final = 16
"""Most integers written one by one: an array costs more."""

_MAX_BASE: Final = 2**62
"""Maximum base of a narrow column: beyond it values have 8 bytes, so that the base plus an offset fits 64 bits."""

_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<i8"),
}


class ByteWriter:
    """Appends to `data`. Every method raises MessageError for a value outside the layout."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = bytearray()

    def byte(self, value: int) -> None:
        self.data.append(value)

    def unsigned(self, value: int) -> None:
        """Seven bits a byte, least first, the top bit set on all but the last."""
        if value < 0 or value >> _MAX_VARINT_BITS:
            raise MessageError(f"{value} does not fit an unsigned integer of {_MAX_VARINT_BITS} bits")
        while value >= 0x80:
            self.data.append(value & 0x7F | 0x80)
            value >>= 7
        self.data.append(value)

    def signed(self, value: int) -> None:
        """Zig-zag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
        self.unsigned(2 * value if value >= 0 else -2 * value - 1)

    def blob(self, value: bytes) -> None:
        """A length and that many bytes."""
        self.unsigned(len(value))
        self.data += value

    def column(self, values: Sequence[int]) -> None:
        """Integers whose number the reader knows already, and has checked against the bytes: constant or dense."""
        if values and values[0] == values[-1] and values.count(values[0]) == len(values):
            self.byte(_CONSTANT)
            self.signed(_checked(values[0]))
        else:
            self.dense(values)

    def dense(self, values: Sequence[int]) -> None:
        """Integers at the width of the widest, at least a byte each: the reader can check their number."""
        if not values:
            return
        array = _as_array(values) if len(values) > _MAX_SHORT else None
        if array is None:
            base, top = _checked(min(values)), _checked(max(values))
        else:
            base, top = int(array.min()), int(array.max())
        width = 8 if abs(base) > _MAX_BASE else _width(top - base)
        if base > 0 and width == _width(top):
            base = 0
        self.byte(width)
        if width == 8:
            self.data += struct.pack(f"<{len(values)}q", *values)
            return
        self.signed(base)
        if array is None:
            self.data += b"".join([(value - base).to_bytes(width, "little") for value in values])
        elif width == 3:
            self.data += (array - base).astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
        else:
            self.data += (array - base).astype(_DTYPES[width]).tobytes()

    def counted(self, values: tuple[int, ...]) -> None:
        """A count and a dense column."""
        self.unsigned(len(values))
        self.dense(values)


class ByteReader:
    """Reads the output of a ByteWriter. Every method raises MessageError for bytes without the requested value."""

    __slots__ = ("_data", "_end", "_position")

    def __init__(self, data: bytes, end: int) -> None:
        assert 0 <= end <= len(data), (end, len(data))
        self._data = data
        self._position = 0
        self._end = end

    @property
    def num_left(self) -> int:
        """Bytes not yet read."""
        return self._end - self._position

    def take(self, num_bytes: int) -> bytes:
        """The next `num_bytes` bytes."""
        if num_bytes > self._end - self._position:
            raise MessageError(f"truncated: {num_bytes} bytes wanted at byte {self._position} of {self._end}")
        start = self._position
        self._position = start + num_bytes
        return self._data[start : self._position]

    def byte(self) -> int:
        return self.take(1)[0]

    def unsigned(self) -> int:
        """A variable-length integer of at most 65 bits."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > _MAX_VARINT_BITS:
                break
        if value >> _MAX_VARINT_BITS or byte >= 0x80:
            raise MessageError(f"integer of more than {_MAX_VARINT_BITS} bits before byte {self._position}")
        return value

    def signed(self) -> int:
        """A zig-zag variable-length integer."""
        value = self.unsigned()
        return value >> 1 if value & 1 == 0 else -(value >> 1) - 1

    def integer_64(self) -> int:
        """A zig-zag integer that must fit 64 bits, as everything but a seed does."""
        value = self.signed()
        if not -(2**63) <= value < 2**63:
            raise MessageError(f"{value} before byte {self._position} does not fit 64 bits")
        return value

    def blob(self) -> bytes:
        """A length and that many bytes."""
        return self.take(self.unsigned())

    def count(self) -> int:
        """A number of entries that take at least one byte each."""
        value = self.unsigned()
        if value > self.num_left:
            raise MessageError(f"{value} entries announced with {self.num_left} bytes left")
        return value

    def column(self, num_values: int) -> list[int]:
        """A column in any mode. The caller has bounded `num_values`."""
        if num_values == 0:
            return []
        mode = self.byte()
        if mode == _CONSTANT:
            return [self.integer_64()] * num_values
        return self._dense(mode, num_values)

    def dense(self, num_values: int) -> list[int]:
        """A column with separate bytes for each value."""
        return self._dense(self.byte(), num_values) if num_values else []

    def counted(self) -> tuple[int, ...]:
        """A count and a dense column."""
        return tuple(self.dense(self.count()))

    def _dense(self, width: int, num_values: int) -> list[int]:
        if width == 8:
            return list(struct.unpack(f"<{num_values}q", self.take(8 * num_values)))
        if width not in (1, 2, 3, 4):
            raise MessageError(f"invalid mode {width} of a column")
        base = self.signed()
        if abs(base) > _MAX_BASE:
            raise MessageError(f"column of {width} bytes a value with a least value of {base}")
        raw = np.frombuffer(self.take(width * num_values), dtype=np.uint8)
        values: list[int] = (_widened(raw, width) + base).tolist()
        return values


def _as_array(values: Sequence[int]) -> npt.NDArray[np.int64]:
    """`struct` takes half of the time of `np.array`."""
    try:
        return np.frombuffer(struct.pack(f"<{len(values)}q", *values), dtype="<i8")
    except struct.error:
        raise MessageError(f"{min(values)} or {max(values)} is not an integer of 64 bits") from None


def _checked(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise MessageError(f"{value} does not fit 64 bits")
    return value


def _width(span: int) -> int:
    """Bytes for numbers from 0 to `span`."""
    width = max(span.bit_length() + 7, 8) // 8
    return width if width <= 4 else 8


def _widened(raw: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.int64]:
    if width == 3:
        wide = np.zeros((raw.size // 3, 4), dtype=np.uint8)
        wide[:, :3] = raw.reshape(-1, 3)
        return wide.view("<u4").ravel().astype(np.int64)
    return raw.view(_DTYPES[width]).astype(np.int64)
