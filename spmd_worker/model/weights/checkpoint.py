"""A folder of safetensors files as one mapping from names to tensors, read by rectangle.

Reads with `preadv` into the returned tensor rather than through a memory map: a file that shrinks meanwhile is an error
instead of a SIGBUS, bytes read can be counted, and network file systems see a few large reads instead of page faults.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import Rectangle, TensorView, is_inside
from spmd_worker.model.weights.region import plan_read, split_region
from spmd_worker.model.weights.safetensors_header import (
    SafetensorsHeader,
    TensorEntry,
    read_header,
)
from spmd_worker.model.weights.staging import HOST, HostStaging
from spmd_worker.model.weights.tensor_checks import INTEGER_DTYPES, WEIGHT_DTYPES, WHOLE_NUMBERS
from spmd_worker.model.weights.weight_files import read_weight_map, weight_files
from spmd_worker.model_config.tensor_names import INDEX_FILE

STORED_DTYPES = {
    **WEIGHT_DTYPES,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    **INTEGER_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Dtypes that `read_stored` reads: of weights and of parts of quantised ones."""
# The page cache reads shorter gaps anyway, and a call costs as much as copying a page.
_MAX_GAP_BYTES = 4096


@dataclass(slots=True)
class Checkpoint:
    """The tensors of one checkpoint folder. `open` reads and validates headers, `read` reads data, in any thread.

    `num_bytes_read` counts the bytes of tensor data read from files so far, including gaps that were read through.
    """

    folder: Path
    headers: Mapping[str, SafetensorsHeader]
    num_bytes_read: int = 0
    staging: HostStaging = HOST
    _file_of: dict[str, str] = field(default_factory=dict)
    _stored_names: dict[str, str] = field(default_factory=dict)
    _descriptors: dict[str, int] = field(default_factory=dict)
    _views: dict[str, TensorView] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, folder: Path, staging: HostStaging = HOST) -> "Checkpoint":
        """Find the files of a folder, validate all headers, and check the index. Raises CheckpointError.

        Of a folder with both, `model.safetensors` is read and not the index, as in transformers.
        """
        assert sys.byteorder == "little", "safetensors data is little-endian and is not swapped here"
        weight_map = read_weight_map(folder)
        headers = {path.name: read_header(path) for path in weight_files(folder, weight_map)}
        _check_index(folder, weight_map, headers)
        file_of = {name: file for file, header in headers.items() for name in header.tensors}
        return cls(folder, headers, 0, staging, file_of)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. A later `read` opens them again."""
        while self._descriptors:
            _, descriptor = self._descriptors.popitem()
            os.close(descriptor)

    def rename(self, parts: Callable[[str, tuple[int, ...]], Mapping[str, TensorView | None]]) -> None:
        """Replace each tensor of the files by its `parts(name, shape)`: the tensor itself under another name (None), or
        views of it. Raises CheckpointError if two would have the same name.
        """
        stored_names: dict[str, str] = {}
        views: dict[str, TensorView] = {}
        for stored in self.names():
            try:
                found = parts(stored, self.shape(stored))
            except CheckpointError as error:
                raise CheckpointError(f"{self.folder}: {error}") from None
            for name, view in found.items():
                if stored_names.setdefault(name, stored) != stored:
                    raise same_weight_error(self.folder, stored_names[name], stored)
                if view is not None:
                    views[name] = view
        self._file_of = {name: self._file_of[stored] for name, stored in stored_names.items()}
        self._stored_names, self._views = stored_names, views

    def add_copy(self, name: str, of: str) -> None:
        """Read a tensor by another name too."""
        self._file_of[name], self._stored_names[name] = self._file_of[of], self.stored_name(of)
        if of in self._views:
            self._views[name] = self._views[of]

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shape(name) for name in self.names()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor. Raises CheckpointError for an unknown name."""
        shape, view = self._entry(name).shape, self._views.get(name)
        return shape if view is None else view.shape(shape)

    def kind(self, name: str) -> str:
        """Dtype of a tensor by its name in safetensors, such as BF16."""
        return self._entry(name).dtype

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor. Raises CheckpointError for anything but a plain floating-point weight."""
        kind = self.kind(name)
        if kind in INTEGER_DTYPES and name.endswith(WHOLE_NUMBERS):
            return INTEGER_DTYPES[kind]
        if kind not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{self._path(name)}: tensor {name!r} has dtype {kind}: weights must be one of "
                f"{', '.join(WEIGHT_DTYPES)}, unless quantization_config in config.json says that they are quantised"
            )
        return WEIGHT_DTYPES[kind]

    def stored_dtype(self, name: str) -> torch.dtype:
        """Dtype of a weight or of a part of a quantised one. Raises CheckpointError for other data."""
        kind = self.kind(name)
        if kind not in STORED_DTYPES:
            raise CheckpointError(f"{self._path(name)}: tensor {name!r} has the unsupported dtype {kind}")
        return STORED_DTYPES[kind]

    def blocks(self, name: str, region: Rectangle, max_bytes: int) -> Iterator[Rectangle]:
        """Cut a region into blocks of at most `max_bytes`, in the order of the file."""
        return split_region(self.shape(name), region, max_bytes // self.dtype(name).itemsize)

    def position(self, name: str) -> tuple[str, int]:
        """File name and offset of a tensor's data: in this order files are read sequentially."""
        return self._file_of[name], self._entry(name).begin

    def read(self, name: str, region: Rectangle) -> torch.Tensor:
        """The elements of `region` as a new tensor of the checkpoint's dtype (perhaps a view of a wider buffer), on the
        device of `staging`.

        Reads the region, and gaps between its rows that are shorter than a page. Raises CheckpointError if the size of
        the file has changed since its header was read.
        """
        self.dtype(name)
        return self.read_stored(name, region)

    def read_stored(self, name: str, region: Rectangle) -> torch.Tensor:
        """`read` for parts of quantised weights too."""
        entry, dtype, view = self._entry(name), self.stored_dtype(name), self._views.get(name)
        region = region if view is None else view.stored_region(region)
        read = self._read(name, entry.shape, dtype, region)
        return read if view is None else view.of_region(read)

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor that `read_bytes` reads. Raises CheckpointError for a view."""
        if name in self._views:
            raise CheckpointError(f"{self._path(name)}: {name!r} is a part of the tensor {self.stored_name(name)!r}")
        entry = self._entry(name)
        return entry.end - entry.begin

    def read_bytes(self, name: str, shape: tuple[int, ...], region: Rectangle) -> torch.Tensor:
        """A region of the bytes of a tensor, whatever its dtype, as if they had this shape."""
        assert prod(shape) == self.num_bytes(name), (name, shape)
        return self._read(name, shape, torch.uint8, region)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, region: Rectangle) -> torch.Tensor:
        """A region of a tensor of the file, taken to have this shape and dtype."""
        assert is_inside(region, shape), (name, shape, region)
        plan = plan_read(shape, region, _MAX_GAP_BYTES // dtype.itemsize)
        buffer = self.staging.buffer(plan.buffer_shape, dtype)
        target = buffer.reshape(-1).view(torch.uint8).numpy().data
        start = self.headers[self._file_of[name]].data_start + self._entry(name).begin
        filled = 0
        for run_begin, run_end in plan.runs:
            num_bytes = (run_end - run_begin) * dtype.itemsize
            self._fill(name, target[filled : filled + num_bytes], start + run_begin * dtype.itemsize)
            filled += num_bytes
        return self.staging.sent(buffer)[plan.wanted]

    def stored_name(self, name: str) -> str:
        return self._stored_names.get(name, name)

    def is_unused(self, name: str) -> bool:
        del name
        return False

    def _path(self, name: str) -> Path:
        """File of a tensor."""
        return self.folder / self._file_of[name]

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: has no tensor {name!r}")
        return self.headers[self._file_of[name]].tensors[self.stored_name(name)]

    def _fill(self, name: str, target: memoryview, offset: int) -> None:
        descriptor = self._descriptor(self._file_of[name])
        while target:
            # One call reads at most 2 GiB, and may read less.
            num_bytes = os.preadv(descriptor, [target], offset)
            if num_bytes == 0:
                raise CheckpointError(
                    f"{self._path(name)}: tensor {name!r}: the file ends at {offset}, before the tensor does"
                )
            with self._lock:
                self.num_bytes_read += num_bytes
            target, offset = target[num_bytes:], offset + num_bytes

    def _descriptor(self, file_name: str) -> int:
        with self._lock:
            if file_name not in self._descriptors:
                path = self.folder / file_name
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._descriptors[file_name] = descriptor
                size, expected = os.fstat(descriptor).st_size, self.headers[file_name].file_bytes
                if size != expected:
                    raise CheckpointError(f"{path}: has {size} bytes now, but had {expected} when its header was read")
            return self._descriptors[file_name]


def same_weight_error(folder: Path, one: str, other: str) -> CheckpointError:
    """Error about two tensors, by their names in the files, of the same weight."""
    one, other = sorted((one, other))
    return CheckpointError(
        f"{folder}: tensors {one!r} and {other!r} are the same weight of the model: remove one of them from the files"
    )


def _check_index(folder: Path, weight_map: Mapping[str, str] | None, headers: Mapping[str, SafetensorsHeader]) -> None:
    if weight_map is None:
        return
    for name, file_name in weight_map.items():
        if name not in headers[file_name].tensors:
            raise CheckpointError(
                f"{folder / INDEX_FILE}: tensor {name!r} is not in {file_name}, where the index says it is"
            )
    for file_name, header in headers.items():
        for name in header.tensors:
            if weight_map.get(name) != file_name:
                listed = weight_map.get(name, "nothing")
                raise CheckpointError(
                    f"{folder / file_name}: tensor {name!r} is in this file, but the index says {listed}"
                )
