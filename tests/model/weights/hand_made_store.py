"""A store of hand-made parameters, filled like a model's. Checkpoint names are those of the slices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.weight_slice import ModelTensor, PaddingSlice, TensorView, WeightSlice
from spmd_worker.model.weights.store import LoadReport, WeightStore
from spmd_worker.model.weights.weight_source import WeightSource
from spmd_worker.ranks.topology import Stage


class _Layer(CheckpointLayer):
    def __init__(self, model: nn.Module, slices: Sequence[WeightSlice], paddings: Sequence[PaddingSlice]) -> None:
        super().__init__()
        self._parameters = model._parameters
        self._slices, self._paddings = slices, paddings

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        del prefix
        return iter(self._slices)

    def padding_slices(self, prefix: str) -> Iterator[PaddingSlice]:
        del prefix
        return iter(self._paddings)


class _Names:
    """`CheckpointNames` without a table."""

    is_last_stage = True

    def __init__(self, is_derived: Callable[[str], bool], tied: tuple[str, str] | None) -> None:
        self.is_derived, self.tied = is_derived, tied

    def slices(self, layers: Mapping[str, CheckpointLayer]) -> list[WeightSlice]:
        return [piece for layer in layers.values() for piece in layer.weight_slices("")]

    def tensors(self, stage_slices: Callable[[Stage | None], Sequence[WeightSlice]]) -> dict[str, ModelTensor]:
        return {piece.checkpoint_name: piece.tensor for piece in stage_slices(None)}

    def parts(self, given_name: str, shape: Sequence[int]) -> dict[str, TensorView | None]:
        del shape
        return {given_name: None}

    def separate_rows(self, tensors: Mapping[str, ModelTensor]) -> dict[str, tuple[str, tuple[int, int]]]:
        return {}


def plain_store(
    model: nn.Module,
    slices: Sequence[WeightSlice],
    paddings: Sequence[PaddingSlice],
    *,
    ignorable: Callable[[str], bool] = lambda name: False,
    tied: tuple[str, str] | None = None,
    allows_nonfinite: bool = False,
) -> WeightStore:
    names: Any = _Names(ignorable, tied)
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    layers = {"": _Layer(model, slices, paddings)}
    return WeightStore(names, layers, dtype, lambda stage: names.slices(layers), allows_nonfinite=allows_nonfinite)


def fill(
    model: nn.Module,
    slices: Sequence[WeightSlice],
    paddings: Sequence[PaddingSlice],
    source: WeightSource,
    **options: Any,
) -> LoadReport:
    return plain_store(model, slices, paddings, **options).fill(source)


def fill_dummy(
    model: nn.Module,
    slices: Sequence[WeightSlice],
    paddings: Sequence[PaddingSlice],
    seed: int = 0,
    num_threads: int = 1,
) -> None:
    store = plain_store(model, slices, paddings)
    store.fill(store.dummy(seed), num_threads)
