"""Reads and validates the header of a safetensors file before anything of it is used.

Format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data buffer,
which the tensors must cover without overlaps or gaps.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from spmd_worker.base.errors import CheckpointError
from spmd_worker.base.files import JsonError, parse_json_object

MAX_HEADER_BYTES = 100_000_000
"""The format's limit, which bounds the memory and time that a hostile length can cost."""

_DTYPES_OF_BITS: Mapping[int, str] = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}
DTYPE_BITS: Mapping[str, int] = {name: bits for bits, names in _DTYPES_OF_BITS.items() for name in names.split()}

_LENGTH_BYTES = 8
_MAX_NAME = 256
_MAX_DIMENSIONS = 16
_MAX_ELEMENTS = 2**63 - 1
_ENTRY_KEYS = ("data_offsets", "dtype", "shape")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One validated tensor of a file: `begin` and `end` are byte offsets in the data buffer."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A validated header. `data_start` is the file offset of the data buffer; `digest` is of the header's bytes."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    file_bytes: int
    digest: str


def read_header(path: Path) -> SafetensorsHeader:
    """Read and validate the header of one file. Raises CheckpointError, also for anything but a regular file."""
    # Checked before open(), which would block forever on a FIFO.
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a regular file")
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is not a regular file")
        num_header_bytes = _header_length(file.read(_LENGTH_BYTES), status.st_size, str(path))
        text = file.read(num_header_bytes)
    if len(text) != num_header_bytes:
        raise CheckpointError(f"{path}: truncated while its header was read")
    return parse_header(text, status.st_size, str(path))


def parse_header(text: bytes, file_bytes: int, file_name: str) -> SafetensorsHeader:
    """Validate the JSON text of a header for a file of `file_bytes`. Raises CheckpointError."""
    if not text.startswith(b"{"):
        raise CheckpointError(f"{file_name}: the header must begin with '{{': this is not a safetensors file")
    try:
        document = parse_json_object(text)
    except JsonError as error:
        raise CheckpointError(f"{file_name}: the header {error}") from None
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file_name}: __metadata__ must map strings to strings")
    tensors = {name: _check_entry(name, entry, file_name) for name, entry in document.items()}
    data_start = _LENGTH_BYTES + len(text)
    _check_layout(tensors, file_bytes - data_start, file_name)
    return SafetensorsHeader(tensors, metadata, data_start, file_bytes, blake2b(text, digest_size=32).hexdigest())


def _header_length(prefix: bytes, file_bytes: int, file_name: str) -> int:
    if len(prefix) < _LENGTH_BYTES:
        raise CheckpointError(f"{file_name}: truncated: {file_bytes} bytes cannot hold the 8-byte header length")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{file_name}: header length {length} exceeds the limit of {MAX_HEADER_BYTES} bytes")
    if length > file_bytes - _LENGTH_BYTES:
        raise CheckpointError(f"{file_name}: truncated: header length {length} exceeds the file of {file_bytes} bytes")
    return length


def _check_entry(name: str, entry: object, file_name: str) -> TensorEntry:
    where = f"{file_name}: tensor {name[:_MAX_NAME]!r}"
    # JSON can contain lone surrogates, which cannot be encoded, and terminal escapes, which messages would print.
    if not name.isprintable():
        raise CheckpointError(f"{where}: the name is not printable Unicode")
    # No module has a longer name, and names are matched with patterns and printed.
    if len(name) > _MAX_NAME:
        raise CheckpointError(f"{file_name}: tensor {name[:64]!r}...: the name has more than {_MAX_NAME} characters")
    if not isinstance(entry, dict) or tuple(sorted(entry)) != _ENTRY_KEYS:
        raise CheckpointError(f"{where}: must be an object with exactly the keys {', '.join(_ENTRY_KEYS)}")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}")
    shape = _check_integers(entry["shape"], "shape", where)
    if len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(f"{where}: the shape has more than {_MAX_DIMENSIONS} dimensions")
    offsets = _check_integers(entry["data_offsets"], "data_offsets", where)
    if len(offsets) != 2:
        raise CheckpointError(f"{where}: data_offsets must be two integers, not {len(offsets)}")
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{where}: data_offsets begin at {begin}, after their end at {end}")
    _check_size(shape, dtype, end - begin, where)
    return TensorEntry(dtype, shape, begin, end)


def _check_integers(values: object, key: str, where: str) -> tuple[int, ...]:
    # type() rather than isinstance(), because bool is a subclass of int.
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise CheckpointError(f"{where}: {key} must be a list of integers")
    if any(value < 0 for value in values):
        raise CheckpointError(f"{where}: {key} {values} has a negative number")
    return tuple(values)


def _check_size(shape: tuple[int, ...], dtype: str, num_bytes: int, where: str) -> None:
    num_elements, bound = 1, 1
    for size in shape:
        num_elements *= size
        # Zeros count as ones: [0, 2**62, 2**62] is empty, but its strides overflow in every library.
        bound *= max(size, 1)
        if bound > _MAX_ELEMENTS:
            raise CheckpointError(f"{where}: the shape overflows: more than {_MAX_ELEMENTS} elements")
    if num_elements * DTYPE_BITS[dtype] != num_bytes * 8:
        raise CheckpointError(
            f"{where}: size mismatch: shape {list(shape)} of {dtype} takes {num_elements * DTYPE_BITS[dtype] / 8:g} "
            f"bytes, data_offsets span {num_bytes}"
        )


def _check_layout(tensors: Mapping[str, TensorEntry], data_bytes: int, file_name: str) -> None:
    """Tensors in the order of their offsets must follow each other from 0 to the end of the buffer."""
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        where = f"{file_name}: tensor {name!r}: data_offsets [{entry.begin}, {entry.end}]"
        if entry.begin < position:
            raise CheckpointError(f"{where} overlap the previous tensor, which ends at {position}")
        if entry.begin > position and entry.end > data_bytes:
            raise CheckpointError(f"{where} reach beyond the end of the data at {data_bytes}")
        if entry.begin > position:
            raise CheckpointError(f"{where} leave a gap after the previous tensor, which ends at {position}")
        position = entry.end
    if position > data_bytes:
        raise CheckpointError(
            f"{file_name}: truncated: the header describes {position} bytes of data, the file holds {data_bytes}: "
            "copy or download it again"
        )
    if position < data_bytes:
        raise CheckpointError(f"{file_name}: {data_bytes - position} bytes after the last tensor belong to no tensor")
