"""Reads and validates the header of a GGUF file before anything of it is used: metadata, and where tensors are.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: magic, version, counts of tensors and
of metadata, the metadata, one entry for each tensor, and after padding the data. A count in a file bounds nothing until
it is compared with the bytes that are left.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.base.files import describe_os_error, open_regular_file
from spmd_worker.model_config.gguf.tensor_types import TENSOR_TYPES, TensorType
from spmd_worker.model_config.unreadable_files import LFS_POINTER

SUFFIX: Final = ".gguf"
"""Suffix of links and messages; `is_gguf` tells files."""
_MAGIC: Final = b"GGUF"
_VERSION: Final = 3
_MAX_HEADER_BYTES: Final = 1 << 28
"""Vocabularies of a million tokens with their merges take 64 MiB."""
_MAX_KEYS: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 18
_MAX_ITEMS: Final = 1 << 22
"""Items of all arrays together."""
_MAX_NAME: Final = 256
_MAX_DIMENSIONS: Final = 4
_MAX_ELEMENTS: Final = 2**63 - 1
_MAX_ALIGNMENT: Final = 1 << 20
_ALIGNMENT: Final = "general.alignment"
_WAY_OUT: Final = "copy or download it again"
_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Numbers of the format's types of values -> those of `struct`."""
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


def is_gguf(path: Path) -> bool:
    """Whether the file is GGUF by its name, in letters of any size."""
    return path.suffix.lower() == SUFFIX


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One validated tensor. `shape` has the dimensions in torch's order, `begin` and `end` are offsets in the file."""

    type: TensorType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A validated header. `data_start` is the offset of the first tensor's data; `digest` is of the bytes before it."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data_start: int
    file_bytes: int
    digest: str


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and validate the header of one file. Raises ModelConfigError with the file, the key and the way out."""
    try:
        with open_regular_file(path) as file:
            return _read(path, file)
    except _FaultError as error:
        raise ModelConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ModelConfigError(f"{path} cannot be read: {describe_os_error(error)}") from None


def decimal(value: float) -> float:
    """The shortest number that is this float32: 1e-05, as config.json had it, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class _FaultError(ValueError):
    """A fault of a file, and the way out."""


class _Cursor:
    """Reads a file from its beginning, never beyond its end or the limit of a header, and digests what it read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.file_bytes = os.fstat(file.fileno()).st_size
        self.position = 0
        self.num_items = 0
        self.digest = blake2b(digest_size=32)

    def take(self, num_bytes: int, words: str) -> bytes:
        """The next bytes. Raises _FaultError if the file has not as many."""
        if num_bytes > self.file_bytes - self.position:
            left = self.file_bytes - self.position
            raise _FaultError(f"truncated: {words} takes {num_bytes:,} bytes, and {left:,} are left: {_WAY_OUT}")
        if self.position + num_bytes > _MAX_HEADER_BYTES:
            raise _FaultError(
                f"{words} lies beyond the first {_MAX_HEADER_BYTES:,} bytes, a header's limit: {_WAY_OUT}"
            )
        found = self._file.read(num_bytes)
        if len(found) != num_bytes:
            raise _FaultError(f"truncated while its header was read, in {words}: {_WAY_OUT}")
        self.digest.update(found)
        self.position += num_bytes
        return found

    def integer(self, format_: str, words: str) -> int:
        found: int = struct.unpack(f"<{format_}", self.take(struct.calcsize(f"<{format_}"), words))[0]
        return found

    def text(self, words: str, most: int = _MAX_HEADER_BYTES) -> str:
        length = self.integer("Q", f"the length of {words}")
        if length > most:
            raise _FaultError(f"{words} has {length:,} bytes, more than {most:,}: {_WAY_OUT}")
        found = self.take(length, words)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            raise _FaultError(f"{words} is not UTF-8: {_WAY_OUT}") from None

    def value(self, kind: int, words: str) -> Any:
        """A value of one of the format's types. Arrays are lists."""
        if kind == _STRING:
            return self.text(words)
        if kind == _ARRAY:
            return self._array(words)
        if kind not in _FORMATS:
            raise _FaultError(f"{words} has the unknown type {kind}: {_WAY_OUT}")
        format_ = _FORMATS[kind]
        found = struct.unpack(f"<{format_}", self.take(struct.calcsize(f"<{format_}"), words))[0]
        return decimal(found) if kind == _FLOAT32 else found

    def _array(self, words: str) -> list[Any]:
        kind, count = self.integer("I", words), self.integer("Q", words)
        self.num_items += count
        if self.num_items > _MAX_ITEMS:
            raise _FaultError(f"{words} lists {count:,} items, and a file may have {_MAX_ITEMS:,}: {_WAY_OUT}")
        if kind == _STRING:
            return [self.text(words) for _ in range(count)]
        if kind not in _FORMATS:
            raise _FaultError(f"{words} is an array of the type {kind}, which is not supported: {_WAY_OUT}")
        format_ = f"<{count}{_FORMATS[kind]}"
        return list(struct.unpack(format_, self.take(struct.calcsize(format_), words)))


def _read(path: Path, file: BinaryIO) -> GgufHeader:
    cursor = _Cursor(file)
    _check_beginning(cursor)
    num_tensors = _count(cursor, "tensors", _MAX_TENSORS)
    num_keys = _count(cursor, "keys", _MAX_KEYS)
    metadata: dict[str, Any] = {}
    for number in range(num_keys):
        key = _name(cursor, f"key {number} of the metadata")
        if key in metadata:
            raise _FaultError(f"the metadata has {key} twice: {_WAY_OUT}")
        metadata[key] = cursor.value(cursor.integer("I", f"the type of {key}"), key)
    alignment = metadata.get(_ALIGNMENT, 32)
    is_size = isinstance(alignment, int) and not isinstance(alignment, bool) and 1 <= alignment <= _MAX_ALIGNMENT
    if not is_size or alignment & (alignment - 1):
        raise _FaultError(f"{_ALIGNMENT}={shown(alignment)} must be a power of two, at most {_MAX_ALIGNMENT:,}")
    entries: dict[str, tuple[TensorType, tuple[int, ...], int]] = {}
    for number in range(num_tensors):
        name = _name(cursor, f"the name of tensor {number}")
        if name in entries:
            raise _FaultError(f"two tensors have the name {name!r}: {_WAY_OUT}")
        entries[name] = _entry(cursor, f"tensor {name!r}", alignment)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {name: _tensor(*entry, data_start) for name, entry in entries.items()}
    _check_layout(tensors, cursor.file_bytes)
    return GgufHeader(path, metadata, tensors, data_start, cursor.file_bytes, cursor.digest.hexdigest())


def _check_beginning(cursor: _Cursor) -> None:
    if (magic := cursor.take(4, "the magic")) != _MAGIC:
        if LFS_POINTER.startswith(magic):
            raise _FaultError("is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder")
        raise _FaultError(f"begins with {magic!r}, and a GGUF file with {_MAGIC!r}: give another file")
    version = cursor.integer("I", "the version")
    if version == 0:
        raise _FaultError(f"is damaged, its version is 0: {_WAY_OUT}")
    if version & 0xFFFF == 0:
        raise _FaultError("is a big-endian GGUF, which is not supported: take the little-endian one")
    if version != _VERSION:
        raise _FaultError(
            f"is GGUF of version {version}, only {_VERSION} is read: convert the model with a newer writer"
        )


def _count(cursor: _Cursor, words: str, most: int) -> int:
    found = cursor.integer("Q", f"the number of {words}")
    if found > most:
        raise _FaultError(f"has {found:,} {words}, more than {most:,}: {_WAY_OUT}")
    return found


def _name(cursor: _Cursor, words: str) -> str:
    found = cursor.text(words, _MAX_NAME)
    # Messages print it.
    if not found or not found.isprintable():
        raise _FaultError(f"{words}, {found!a}, must be printable text: {_WAY_OUT}")
    return found


def _entry(cursor: _Cursor, where: str, alignment: int) -> tuple[TensorType, tuple[int, ...], int]:
    """Type, shape, and offset in the data."""
    num_dimensions = cursor.integer("I", where)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise _FaultError(
            f"{where}: has {num_dimensions} dimensions, and the format 1 to {_MAX_DIMENSIONS}: {_WAY_OUT}"
        )
    # The format has the innermost dimension first.
    shape = tuple(cursor.integer("Q", where) for _ in range(num_dimensions))[::-1]
    number, offset = cursor.integer("I", where), cursor.integer("Q", where)
    if number not in TENSOR_TYPES:
        raise _FaultError(
            f"{where}: has the type {number}, which is not supported, only "
            f"{', '.join(each.name for each in TENSOR_TYPES.values())}: take another quantisation of the model"
        )
    found = TENSOR_TYPES[number]
    if min(shape) < 1 or prod(shape) > _MAX_ELEMENTS:
        raise _FaultError(f"{where}: the shape {list(shape)} has an empty dimension, or too many elements: {_WAY_OUT}")
    if shape[-1] % found.block:
        raise _FaultError(
            f"{where}: its rows have {shape[-1]} elements, and {found.name} stores {found.block} together: {_WAY_OUT}"
        )
    if offset % alignment:
        raise _FaultError(f"{where}: the offset {offset} is no multiple of {_ALIGNMENT}={alignment}: {_WAY_OUT}")
    return found, shape, offset


def _tensor(type_: TensorType, shape: tuple[int, ...], offset: int, data_start: int) -> GgufTensor:
    begin = data_start + offset
    return GgufTensor(type_, shape, begin, begin + prod(shape) // type_.block * type_.block_bytes)


def _check_layout(tensors: Mapping[str, GgufTensor], file_bytes: int) -> None:
    """Raise _FaultError for data that overlap or lie outside of the file."""
    position, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < position:
            raise _FaultError(f"tensor {name!r} overlaps {before!r}, which ends at {position:,}: {_WAY_OUT}")
        if tensor.end > file_bytes:
            raise _FaultError(
                f"truncated: tensor {name!r} ends at {tensor.end:,}, and the file has {file_bytes:,} bytes: {_WAY_OUT}"
            )
        position, before = tensor.end, name
