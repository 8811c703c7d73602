"""Protocol of weight sources: `Checkpoint`, `DequantisedCheckpoint` and, without files, `DummyWeights`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from spmd_worker.model.layers.weight_slice import Rectangle
from spmd_worker.model.weights.staging import HostStaging


class WeightSource(Protocol):
    """Checkpoint tensors by name, read by rectangle; see `Checkpoint` for each call."""

    @property
    def folder(self) -> Path:
        """The folder of the files."""

    @property
    def staging(self) -> HostStaging:
        """Memory that `read` uses, and the device of what it returns."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensor data read from files so far."""

    def names(self) -> list[str]:
        """All tensors, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which `read` returns it."""

    def position(self, name: str) -> tuple[str, int]:
        """File name and offset. Tensors are read in this order."""

    def blocks(self, name: str, region: Rectangle, max_bytes: int) -> Iterator[Rectangle]:
        """Cut a region into blocks, of each of which `read` returns at most `max_bytes`."""

    def read(self, name: str, region: Rectangle) -> torch.Tensor:
        """The elements of a region, on the device of `staging`. Any thread may call this."""

    def is_unused(self, name: str) -> bool:
        """Whether a tensor that the model does not have may be ignored."""
