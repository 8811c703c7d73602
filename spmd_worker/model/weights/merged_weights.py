"""A LoRA adapter that is merged into weights as they are read: a `WeightSource` over the files' own.

A merged weight is W + B A, as PEFT's `merge_and_unload` makes it: in float32, rounded once, to the dtype in which the
model holds it, and quantised after that. Each product and each sum of an element is rounded by itself, in the order of
the adapter's ranks, so an element has the same bits in any block, on any rank and device.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from spmd_worker.model.layers.weight_slice import Rectangle
from spmd_worker.model.weights.staging import HostStaging
from spmd_worker.model.weights.weight_source import WeightSource

_TILE_ELEMENTS: Final = 1 << 14
"""Elements, which stay in a core's cache while all ranks of the adapter are added; torch computes as few in one thread.
"""


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """B A for one weight [outputs, inputs]: `a` [r, inputs] and `b` [outputs, r], scaled, float32 on the CPU. `base`,
    with the weight's dimensions, replaces the weight that B A is added to.
    """

    a: Tensor
    b: Tensor
    base: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[1]

    def transposed(self) -> "LowRankUpdate":
        """The update of the transposed weight."""
        return LowRankUpdate(self.b.t(), self.a.t(), self.base)

    def added(self, values: Tensor, region: Rectangle) -> Tensor:
        """A new float32 tensor of `values`, the elements of `region` of the weight, with those of B A added."""
        rows, columns = (slice(*bounds) for bounds in region)
        if self.base is not None:
            values = self.base[rows, columns].to(values.device)
        a, b = self.a[:, columns].to(values.device), self.b[rows].to(values.device)
        merged = values.to(torch.float32, copy=True)
        for first in range(0, a.shape[1], _TILE_ELEMENTS):
            part = slice(first, first + _TILE_ELEMENTS)
            _add_tiles(merged[:, part], a[:, part], b)
        return merged


@dataclass(frozen=True, slots=True)
class StackUpdate:
    """B A of single experts of a stack [experts, ...]."""

    experts: Mapping[int, LowRankUpdate]

    def added(self, values: Tensor, region: Rectangle) -> Tensor:
        """`LowRankUpdate.added` of a region of the stack."""
        (first, _), *inside = region
        merged = values.to(torch.float32, copy=True)
        for place, of_expert in enumerate(merged):
            if first + place in self.experts:
                of_expert.copy_(self.experts[first + place].added(of_expert, tuple(inside)))
        return merged


def _add_tiles(merged: Tensor, a: Tensor, b: Tensor) -> None:
    """Add B A to a part of a weight, by rows."""
    num_rows = max(1, _TILE_ELEMENTS // a.shape[1])
    for factors, tile in zip(torch.split(b, num_rows), torch.split(merged, num_rows), strict=True):
        total, product = torch.zeros_like(tile), torch.empty_like(tile)
        for inputs, outputs in zip(a, factors.t(), strict=True):
            total += torch.mul(outputs[:, None], inputs, out=product)
        tile += total


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """`source` with `updates`, by checkpoint name, added. Other tensors are read as they are. `digest` is that of the
    adapter's content.
    """

    source: WeightSource
    updates: Mapping[str, LowRankUpdate | StackUpdate]
    digest: int

    @property
    def folder(self) -> Path:
        return self.source.folder

    @property
    def staging(self) -> HostStaging:
        return self.source.staging

    @property
    def num_bytes_read(self) -> int:
        """Bytes of the files, without the adapter's."""
        return self.source.num_bytes_read

    def names(self) -> list[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        dtype = self.source.dtype(name)
        return torch.float32 if name in self.updates else dtype

    def position(self, name: str) -> tuple[str, int]:
        return self.source.position(name)

    def blocks(self, name: str, region: Rectangle, max_bytes: int) -> Iterator[Rectangle]:
        share = self.source.dtype(name).itemsize / self.dtype(name).itemsize
        return self.source.blocks(name, region, int(max_bytes * share))

    def read(self, name: str, region: Rectangle) -> Tensor:
        values = self.source.read(name, region)
        return self.updates[name].added(values, region) if name in self.updates else values

    def is_unused(self, name: str) -> bool:
        return self.source.is_unused(name)


def source_of(source: WeightSource, name: str) -> WeightSource:
    """The files of a tensor that is read as it is stored; `source` itself for one that an adapter is merged into."""
    return source.source if isinstance(source, MergedWeights) and name not in source.updates else source
