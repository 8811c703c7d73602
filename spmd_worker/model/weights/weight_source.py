"""Sources of weights: files (`Checkpoint`), quantised ones (`DequantisedCheckpoint`), no files
(`DummyWeights`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from spmd_worker.model.layers.weight_slice import Rectangle


class WeightSource(Protocol):
    """Checkpoint tensors by name, read by the rectangle; see `Checkpoint` for each call."""

    @property
    def folder(self) -> Path:
        """The folder of the files."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensor data fetched from files so far."""

    def names(self) -> list[str]:
        """All tensors, sorted."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which `read` gives it."""

    def position(self, name: str) -> tuple[str, int]:
        """File name, and where in it: in this order it is read."""

    def blocks(self, name: str, region: Rectangle, max_bytes: int) -> Iterator[Rectangle]:
        """Cut a region into blocks that `read` gives as at most `max_bytes` each."""

    def read(self, name: str, region: Rectangle) -> torch.Tensor:
        """The elements of a region, on the CPU."""

    def is_unused(self, name: str) -> bool:
        """Whether a tensor that the model does not have says nothing."""
