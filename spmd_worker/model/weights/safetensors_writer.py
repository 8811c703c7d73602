"""Writes safetensors files whose tensors are known before the first is written: names, dtypes, shapes, then the data.

The header is padded so that the data begins at a multiple of `alignment`. Tensors follow each other without gaps, as
the format demands; so those of a size that is no multiple of the alignment come last, and the others are aligned too.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from spmd_worker.base.staged_folder import new_file, write_all
from spmd_worker.model.weights.checkpoint import STORED_DTYPES
from spmd_worker.model.weights.weight_update import content_digest

CHUNK_BYTES: Final = 8 * 2**20
"""Bytes that are written, or read, and digested at once."""
PAGE_BYTES: Final = 4096
WORD_BYTES: Final = 8
_SYNC_BYTES: Final = 256 * 2**20
"""Bytes after which they are synced, so that the last sync is short."""
_LENGTH_BYTES: Final = 8
_NAMES: Final = {dtype: name for name, dtype in STORED_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """Name in the file, one of `STORED_DTYPES`, shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def in_file_order(tensors: Iterable[TensorToWrite], alignment: int = WORD_BYTES) -> list[TensorToWrite]:
    """The given order, but tensors of a size that is no multiple of `alignment` last, those of larger elements first
    among them if they are not even of whole words.
    """

    def rank(tensor: TensorToWrite) -> tuple[bool, bool, int]:
        is_odd = tensor.num_bytes % WORD_BYTES != 0
        return tensor.num_bytes % alignment != 0, is_odd, -tensor.dtype.itemsize if is_odd else 0

    return sorted(tensors, key=rank)


def divided(tensors: Sequence[TensorToWrite], max_bytes: int | None) -> list[list[TensorToWrite]]:
    """Tensors of each file: as many as fit into `max_bytes` of data, one at least; one list at least."""
    files: list[list[TensorToWrite]] = [[]]
    for tensor in tensors:
        size = sum(each.num_bytes for each in files[-1]) + tensor.num_bytes
        if files[-1] and max_bytes is not None and size > max_bytes:
            files.append([])
        files[-1].append(tensor)
    return files


class SafetensorsWriter:
    """A new file of `tensors`, which `write` takes in this order; a context manager, which syncs it at its end.

    Raises OSError. `digest` is of the header and the data, once all tensors are written: it detects accidental
    differences, at memory speed (`content_digest`).
    """

    def __init__(
        self, path: Path, tensors: Sequence[TensorToWrite], metadata: Mapping[str, str], alignment: int = WORD_BYTES
    ) -> None:
        self._path, self._waiting = path, list(tensors)
        self._header = _header(tensors, metadata, alignment)
        self._digest, self._num_unsynced = file_digest(self._header), 0
        self._stack = ExitStack()
        self._descriptor = -1

    @property
    def digest(self) -> str:
        assert not self._waiting, self._waiting[:3]
        return self._digest.hexdigest()

    def write(self, tensor: Tensor) -> None:
        """The next tensor, on any device."""
        expected = self._waiting.pop(0)
        assert (tensor.dtype, tuple(tensor.shape)) == (expected.dtype, expected.shape), (tensor.shape, expected)
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(content), CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            write_all(self._descriptor, chunk.numpy().data)
            self._digest.update(content_digest(chunk).encode())
            self._num_unsynced += len(chunk)
        if self._num_unsynced > _SYNC_BYTES:
            os.fdatasync(self._descriptor)
            self._num_unsynced = 0

    def __enter__(self) -> Self:
        self._descriptor = self._stack.enter_context(new_file(self._path))
        try:
            write_all(self._descriptor, memoryview(self._header))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def file_digest(header: bytes) -> "blake2b":
    """A digest that begins with a file's header, length included."""
    return blake2b(header, digest_size=16)


def _header(tensors: Sequence[TensorToWrite], metadata: Mapping[str, str], alignment: int) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for tensor in tensors:
        end = position + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padding = -(_LENGTH_BYTES + len(text)) % alignment
    text += b" " * padding
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
