"""Typed records as bytes and back, derived from their annotations: what the wire carries and the digest covers.

A record's codec follows from its fields in the order of declaration, so a new event, record or field needs nothing
here. Values of one type are written together, column by column; one value is a column of one.

    int, NewType of int         a column of `packing.py`
    Integer65                   a byte, the width w from 1 to 9, then w bytes each, signed
    bool                        a column of 0 and 1
    float                       a byte: 0, one double for all; 1, a double each
    bytes                       a column of lengths, then all bytes
    str                         as bytes, in UTF-8
    X | None                    a column of 0 (None) and 1, then the others
    tuple[X, ...], dict[K, V]   a column of lengths, then all entries together (of a dict keys, then values)
    tuple[X, Y], NamedTuple     a column of each position
    A | B                       a column of kinds, numbered as in the union, then the values of each kind
    dataclass                   an unsigned integer, whose bits are the fields with a default in which some record has
                                another value (absent where no field has a default); then a column of each of these
                                fields and of each field without a default

Zero values take zero bytes. Equal values have equal bytes and different values different ones, bit for bit in floats. A
reader checks numbers of values against the bytes: where `is_dense`, each value takes one at least.
"""

import struct
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, is_dataclass
from functools import cache
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from spmd_worker.replica.lockstep.wire.message import MessageError
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.replica.sequence.record_checks import INT65, sent_fields

_MAX_WIDTH: Final = 9
_MANY_FIELDS: Final = 16
_SAME_FLOAT: Final = 0
_FLOAT_EACH: Final = 1


class Codec(ABC):
    """Encoding of values of one type. `layout` describes it as text: equal layouts, equal bytes."""

    layout: str
    can_be_dense = True

    @abstractmethod
    def write(self, writer: ByteWriter, values: Sequence[Any], *, is_dense: bool = False) -> None:
        """Append them. Raises MessageError for a value outside the layout."""

    @abstractmethod
    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        """The inverse of `write`. The caller has checked `num_values` against the bytes that are left, one each."""


@cache
def codec_of(hint: Any) -> Codec:
    """The codec of a type. Raises TypeError for an unsupported one, naming the supported ones."""
    hint = getattr(hint, "__supertype__", hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated and options[1:] == (INT65,):
        return _WideCodec()
    if origin in (types.UnionType, Union):
        others = [option for option in options if option is not types.NoneType]
        if len(others) == len(options):
            return _UnionCodec(options)
        if len(others) == 1:
            return _OptionalCodec(codec_of(others[0]))
    if origin is tuple and len(options) == 2 and options[1] is Ellipsis:
        return _ListCodec("tuple", codec_of(options[0]), tuple)
    if origin is tuple and options and Ellipsis not in options:
        return _RowCodec("row", [codec_of(option) for option in options], None)
    if origin is dict:
        return _ListCodec("dict", _RowCodec("row", [codec_of(option) for option in options], None), dict)
    if hasattr(hint, "_fields"):
        hints = get_type_hints(hint, include_extras=True)
        return _RowCodec(hint.__name__, [codec_of(hints[name]) for name in hint._fields], hint._make)
    if is_dataclass(hint):
        return RecordCodec(hint)
    raise TypeError(
        f"{hint} has no bytes: a field is an int, Integer65, bool, float, str or bytes, a dataclass or NamedTuple, or "
        f"an optional, a tuple, a dict or a union of these"
    )


class RecordCodec(Codec):
    """A dataclass, without the fields `without`, which the caller writes, and local ones (`NOT_SENT`). The bytes of the
    last record of many fields are kept, by its number in a column, and the last one that was read: rows mostly share
    their sampling parameters.
    """

    def __init__(self, record: Any, without: tuple[str, ...] = ()) -> None:
        hints = get_type_hints(record, include_extras=True)
        specs = [spec for spec in sent_fields(record) if spec.name not in without]
        self._record, self._names = record, tuple([spec.name for spec in specs])
        self._getters = [(name, attrgetter(name)) for name in self._names]
        self._codecs = {name: codec_of(hints[name]) for name in self._names}
        self._defaults = {spec.name: spec.default for spec in specs if spec.default is not MISSING}
        self._takes_positions = not without and not any(spec.kw_only for spec in specs)
        required = [name for name in self._names if name not in self._defaults]
        self._dense_name = required[0] if required and self._codecs[required[0]].can_be_dense else None
        self.can_be_dense = self._dense_name is not None
        self.layout = f"{record.__name__}({', '.join(map(self._field_layout, self._names))})"
        # Assigned at once: several threads may write and read.
        self._kept: tuple[Any, dict[tuple[int, bool], bytes]] = (None, {})
        self._last_read: tuple[tuple[str, ...], tuple[Any, ...], str, Any] = ((), (), "", None)
        self._is_freezable = hasattr(record, "frozen")

    def write(self, writer: ByteWriter, values: Sequence[Any], *, is_dense: bool = False) -> None:
        if not values:
            return
        first = values[0]
        if len(self._names) < _MANY_FIELDS or any(value is not first for value in values):
            self._write(writer, values, is_dense)
            return
        kept, written = self._kept
        if kept is not first:
            written = {}
            self._kept = (first, written)
        key = (len(values), is_dense)
        if key not in written:
            own = ByteWriter()
            self._write(own, values, is_dense)
            written[key] = bytes(own.data)
        writer.data += written[key]

    def _write(self, writer: ByteWriter, values: Sequence[Any], is_dense: bool) -> None:
        bits, bit, columns = 0, 1, []
        for name, getter in self._getters:
            column = list(map(getter, values))
            if name in self._defaults:
                is_given = not _are_all(column, self._defaults[name])
                bits, bit = bits | bit * is_given, bit << 1
                if not is_given:
                    continue
            columns.append((name, column))
        if self._defaults:
            writer.unsigned(bits)
        for name, column in columns:
            self._codecs[name].write(writer, column, is_dense=is_dense and name == self._dense_name)

    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        """Read records (`Codec.read`). Raises MessageError also for values that the record rejects."""
        if not num_values:
            return []
        columns = self._read_columns(reader, num_values, is_dense)
        try:
            if not columns:
                # Records are values: one instance serves for all.
                return [self._record()] * num_values
            if self._takes_positions and len(columns) == len(self._names):
                return list(map(self._record, *columns.values()))
            names = tuple(columns)
            if len(self._names) < _MANY_FIELDS:
                return [self._record(**dict(zip(names, row))) for row in zip(*columns.values())]
            return [self._shared(names, row) for row in zip(*columns.values())]
        except ValueError as error:
            raise MessageError(f"{self._record.__name__} is invalid: {error}") from error

    def _shared(self, names: tuple[str, ...], row: tuple[Any, ...]) -> Any:
        """The record of these values; the last one where it has the same, which is immutable then."""
        kept_names, kept_row, text, record = self._last_read
        # The text distinguishes -0.0 from 0.0.
        if names == kept_names and row == kept_row and repr(row) == text:
            return record
        record = self._record(**dict(zip(names, row)))
        if self._is_freezable:
            record = record.frozen()
        self._last_read = (names, row, repr(row), record)
        return record

    def read_fields(self, reader: ByteReader) -> dict[str, Any]:
        """The fields of one record that are not at their defaults, by name: for callers that have those `without`."""
        return {name: column[0] for name, column in self._read_columns(reader, 1, False).items()}

    def _read_columns(self, reader: ByteReader, num_values: int, is_dense: bool) -> dict[str, list[Any]]:
        bits = reader.unsigned() if self._defaults else 0
        if bits >> len(self._defaults):
            raise MessageError(f"{self._record.__name__} has no field number {bits.bit_length() - 1} with a default")
        left_out = [name for bit, name in enumerate(self._defaults) if not bits >> bit & 1]
        return {
            name: self._codecs[name].read(reader, num_values, is_dense=is_dense and name == self._dense_name)
            for name in self._names
            if name not in left_out
        }

    def _field_layout(self, name: str) -> str:
        default = f" = {self._defaults[name]!r}" if name in self._defaults else ""
        return f"{name}: {self._codecs[name].layout}{default}"


class _UnionCodec(Codec):
    """Records of several classes, each numbered by its position in the union."""

    def __init__(self, options: tuple[type, ...]) -> None:
        assert all(is_dataclass(option) for option in options), options
        self._kinds = {option: kind for kind, option in enumerate(options)}
        self._codecs = [codec_of(option) for option in options]
        self.layout = " | ".join([codec.layout for codec in self._codecs])

    def write(self, writer: ByteWriter, values: Sequence[Any], *, is_dense: bool = False) -> None:
        unknown = [type(value).__name__ for value in values if type(value) not in self._kinds]
        if unknown:
            names = ", ".join([option.__name__ for option in self._kinds])
            raise MessageError(f"{unknown[0]} has no encoding: supported are {names}")
        _INTEGER.write(writer, [self._kinds[type(value)] for value in values], is_dense=is_dense)
        for option, codec in zip(self._kinds, self._codecs):
            codec.write(writer, [value for value in values if type(value) is option])

    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        kinds = _INTEGER.read(reader, num_values, is_dense=is_dense)
        if kinds and not 0 <= min(kinds) <= max(kinds) < len(self._codecs):
            raise MessageError(f"kinds from {min(kinds)} to {max(kinds)}, there are {len(self._codecs)}")
        found = [iter(codec.read(reader, kinds.count(kind))) for kind, codec in enumerate(self._codecs)]
        return [next(found[kind]) for kind in kinds]


class _ListCodec(Codec):
    """Any number of entries of one type. The bytes of the last long tuple of records are kept: digest and message have
    the same groups and events, and successive plans often the same continuing sequences.
    """

    def __init__(self, name: str, entry: Codec, make: Callable[[Iterator[Any]], Any]) -> None:
        assert entry.can_be_dense, f"a list of {entry.layout} could be any number of entries in no bytes"
        self._entry, self._make = entry, make
        self.layout = f"{name}[{entry.layout}]"
        self._keeps = make is tuple and not isinstance(entry, _IntegerCodec)
        # Assigned at once: several threads may write.
        self._kept: tuple[tuple[Any, ...], bool, bytes] = ((), False, b"")

    def write(self, writer: ByteWriter, values: Sequence[Any], *, is_dense: bool = False) -> None:
        if not (self._keeps and len(values) == 1 and values[0]):
            self._write(writer, values, is_dense)
            return
        kept, was_dense, data = self._kept
        if kept is not values[0] or was_dense != is_dense:
            own = ByteWriter()
            self._write(own, values, is_dense)
            data = bytes(own.data)
            self._kept = (values[0], is_dense, data)
        writer.data += data

    def _write(self, writer: ByteWriter, values: Sequence[Any], is_dense: bool) -> None:
        _INTEGER.write(writer, list(map(len, values)), is_dense=is_dense)
        rows = values if self._make is tuple else [value.items() for value in values]
        entries = rows[0] if len(rows) == 1 and self._make is tuple else list(chain.from_iterable(rows))
        self._entry.write(writer, entries, is_dense=True)

    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        lengths = _read_lengths(reader, num_values, is_dense)
        entries = self._entry.read(reader, sum(lengths), is_dense=True)
        if num_values == 1:
            return [self._make(iter(entries))]
        rest = iter(entries)
        return [self._make(islice(rest, length)) for length in lengths]


class _RowCodec(Codec):
    """A fixed number of positions, each of its own type. Plain tuples if `make` is None."""

    def __init__(self, name: str, columns: list[Codec], make: Callable[[Any], Any] | None) -> None:
        self._columns, self._make = columns, make
        self._getters = [itemgetter(index) for index in range(len(columns))]
        self.can_be_dense = columns[0].can_be_dense
        self.layout = f"{name}({', '.join([codec.layout for codec in columns])})"

    def write(self, writer: ByteWriter, values: Sequence[Any], *, is_dense: bool = False) -> None:
        if not values:
            return
        # A named tuple has all its positions; `zip` of thousands of rows takes several times as long.
        columns: Iterable[Sequence[Any]] = (
            zip(*values, strict=True) if self._make is None else [list(map(get, values)) for get in self._getters]
        )
        for index, (codec, column) in enumerate(zip(self._columns, columns, strict=True)):
            codec.write(writer, column, is_dense=is_dense and index == 0)

    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        first, *others = self._columns
        columns = [
            first.read(reader, num_values, is_dense=is_dense),
            *[each.read(reader, num_values) for each in others],
        ]
        rows = zip(*columns)
        return list(rows) if self._make is None else list(map(self._make, rows))


class _OptionalCodec(Codec):
    """None, or a value."""

    def __init__(self, value: Codec) -> None:
        self._value = value
        self.layout = f"{value.layout} | None"

    def write(self, writer: ByteWriter, values: Sequence[Any], *, is_dense: bool = False) -> None:
        _FLAG.write(writer, [value is not None for value in values], is_dense=is_dense)
        self._value.write(writer, [value for value in values if value is not None])

    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        are_there = _FLAG.read(reader, num_values, is_dense=is_dense)
        found = iter(self._value.read(reader, sum(are_there)))
        return [next(found) if is_there else None for is_there in are_there]


class _IntegerCodec(Codec):
    layout = "int"

    def write(self, writer: ByteWriter, values: Sequence[Any], *, is_dense: bool = False) -> None:
        if is_dense:
            writer.dense(values)
        else:
            writer.column(values)

    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        return reader.dense(num_values) if is_dense else reader.column(num_values)


class _WideCodec(Codec):
    layout = "Integer65"

    def write(self, writer: ByteWriter, values: Sequence[Any], *, is_dense: bool = False) -> None:
        if not values:
            return
        _check_wide(values)
        width = max([value.bit_length() for value in values]) // 8 + 1
        writer.byte(width)
        writer.data += b"".join([value.to_bytes(width, "little", signed=True) for value in values])

    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        if not num_values:
            return []
        width = reader.byte()
        if not 1 <= width <= _MAX_WIDTH:
            raise MessageError(f"integers of {width} bytes each")
        raw = reader.take(width * num_values)
        pieces = [raw[start : start + width] for start in range(0, len(raw), width)]
        values = [int.from_bytes(piece, "little", signed=True) for piece in pieces]
        _check_wide(values)
        return values


class _FlagCodec(_IntegerCodec):
    layout = "bool"

    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        values = super().read(reader, num_values, is_dense=is_dense)
        if values and not 0 <= min(values) <= max(values) <= 1:
            raise MessageError(f"flags from {min(values)} to {max(values)}")
        return list(map(bool, values))


class _FloatCodec(Codec):
    layout = "float"

    def write(self, writer: ByteWriter, values: Sequence[Any], *, is_dense: bool = False) -> None:
        if not values:
            return
        raw = struct.pack(f"<{len(values)}d", *values)
        are_same = not is_dense and raw == raw[:8] * len(values)
        writer.byte(_SAME_FLOAT if are_same else _FLOAT_EACH)
        writer.data += raw[:8] if are_same else raw

    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        if not num_values:
            return []
        mode = reader.byte()
        if mode == _SAME_FLOAT and not is_dense:
            return list(struct.unpack("<d", reader.take(8))) * num_values
        if mode != _FLOAT_EACH:
            raise MessageError(f"invalid mode {mode} of a column of floats")
        return list(struct.unpack(f"<{num_values}d", reader.take(8 * num_values)))


class _BytesCodec(Codec):
    layout = "bytes"

    def write(self, writer: ByteWriter, values: Sequence[Any], *, is_dense: bool = False) -> None:
        _INTEGER.write(writer, list(map(len, values)), is_dense=is_dense)
        writer.data += b"".join(values)

    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        return [bytes(reader.take(length)) for length in _read_lengths(reader, num_values, is_dense)]


class _TextCodec(_BytesCodec):
    layout = "str"

    def write(self, writer: ByteWriter, values: Sequence[Any], *, is_dense: bool = False) -> None:
        try:
            encoded = [value.encode("utf-8") for value in values]
        except UnicodeEncodeError as error:
            raise MessageError(f"text is not UTF-8: {error}") from error
        super().write(writer, encoded, is_dense=is_dense)

    def read(self, reader: ByteReader, num_values: int, *, is_dense: bool = False) -> list[Any]:
        try:
            return [value.decode("utf-8") for value in super().read(reader, num_values, is_dense=is_dense)]
        except UnicodeDecodeError as error:
            raise MessageError(f"text is not UTF-8: {error}") from error


def _check_wide(values: Sequence[int]) -> None:
    outside = [value for value in values if value not in INT65]
    if outside:
        raise MessageError(f"{outside[0]} does not fit 65 bits")


def _read_lengths(reader: ByteReader, num_values: int, is_dense: bool) -> list[int]:
    """Numbers of entries, each of which takes at least a byte."""
    lengths: list[int] = _INTEGER.read(reader, num_values, is_dense=is_dense)
    total = sum(lengths)
    if min(lengths, default=0) < 0 or total > reader.num_left:
        raise MessageError(f"{total} entries announced with {reader.num_left} bytes left")
    return lengths


def _are_all(values: list[Any], default: Any) -> bool:
    """Equality that distinguishes -0.0 from 0.0. A default that is a tuple is empty, so it contains no float."""
    if isinstance(default, float):
        return struct.pack(f"<{len(values)}d", *values) == struct.pack("<d", default) * len(values)
    return values.count(default) == len(values)


_INTEGER: Final = _IntegerCodec()
_FLAG: Final = _FlagCodec()
_PLAIN: Final[dict[Any, Codec]] = {
    int: _INTEGER,
    bool: _FLAG,
    float: _FloatCodec(),
    str: _TextCodec(),
    bytes: _BytesCodec(),
}
