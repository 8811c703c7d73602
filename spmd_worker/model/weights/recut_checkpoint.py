"""A checkpoint some of whose tensors are cut by rows elsewhere than the model's: a `WeightSource`, like `Checkpoint`.

transformers joins tensors in memory and saves them in equal parts, whatever the parts were (`Names.joined_rows`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from spmd_worker.model.layers.weight_slice import Rectangle, RecutRows
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.region import split_region
from spmd_worker.model.weights.staging import HostStaging


@dataclass(frozen=True, slots=True)
class RecutCheckpoint:
    """`cuts` are the tensors that are cut elsewhere, by name."""

    files: Checkpoint
    cuts: Mapping[str, RecutRows]

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def staging(self) -> HostStaging:
        return self.files.staging

    @property
    def num_bytes_read(self) -> int:
        return self.files.num_bytes_read

    def names(self) -> list[str]:
        return self.files.names()

    def shape(self, name: str) -> tuple[int, ...]:
        stored, cut = self.files.shape(name), self.cuts.get(name)
        return stored if cut is None else (cut.num_rows, *stored[1:])

    def dtype(self, name: str) -> torch.dtype:
        return self.files.dtype(name)

    def position(self, name: str) -> tuple[str, int]:
        return self.files.position(name)

    def blocks(self, name: str, region: Rectangle, max_bytes: int) -> Iterator[Rectangle]:
        return split_region(self.shape(name), region, max_bytes // self.dtype(name).itemsize)

    def read(self, name: str, region: Rectangle) -> torch.Tensor:
        cut = self.cuts.get(name)
        if cut is None:
            return self.files.read(name, region)
        (start, stop), *others = region
        parts, begin = [], -cut.first
        for stored in cut.stored:
            end = begin + self.files.shape(stored)[0]
            rows = (max(start, begin) - begin, min(stop, end) - begin)
            if rows[0] < rows[1]:
                parts.append(self.files.read(stored, (rows, *others)))
            begin = end
        return torch.cat(parts)

    def is_unused(self, name: str) -> bool:
        return self.files.is_unused(name)


def recut(files: Checkpoint, cuts: Mapping[str, RecutRows]) -> Checkpoint | RecutCheckpoint:
    """`files`, with tensors that are cut elsewhere."""
    return RecutCheckpoint(files, cuts) if cuts else files
