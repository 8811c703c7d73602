"""Dense layers after a pooled vector, which sentence-transformers stores in one folder each."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import ModelTensor, full_rectangle
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.dummy import DummyWeights
from spmd_worker.model.weights.tensor_checks import check_finite
from spmd_worker.model_config.pooling import DenseConfig

DenseWeights = list[tuple[Tensor, Tensor | None]]
"""Weight [out, in] and bias [out] of each layer, float32 on the CPU."""


def read_denses(model_folder: Path, denses: Iterable[DenseConfig], *, allows_nonfinite: bool = False) -> DenseWeights:
    """Raises CheckpointError for missing or misshapen tensors and, unless `allows_nonfinite`, non-finite ones."""
    return [_read(model_folder / dense.folder, dense, allows_nonfinite) for dense in denses]


def dummy_denses(denses: Iterable[DenseConfig]) -> DenseWeights:
    """Random weights that depend on the names alone, for `load_format=dummy`."""
    weights: DenseWeights = []
    for dense in denses:
        shapes = {f"{dense.folder}.{name}": shape for name, shape in _shapes(dense).items()}
        source = DummyWeights({name: ModelTensor(shape) for name, shape in shapes.items()}, ())
        weight, *biases = (source.read(name, full_rectangle(shape)) for name, shape in shapes.items())
        weights.append((weight, biases[0] if biases else None))
    return weights


def _read(folder: Path, dense: DenseConfig, allows_nonfinite: bool) -> tuple[Tensor, Tensor | None]:
    shapes = _shapes(dense)
    with Checkpoint.open(folder) as checkpoint:
        if checkpoint.shapes() != dict(sorted(shapes.items())):
            raise CheckpointError(f"{folder}: has the tensors {checkpoint.shapes()}, its config.json says {shapes}")
        read = [checkpoint.read(name, full_rectangle(shape)).float() for name, shape in shapes.items()]
        if not allows_nonfinite:
            for name, values in zip(shapes, read, strict=True):
                check_finite(f"{folder / checkpoint.position(name)[0]}: tensor {name!r}", values, torch.float32)
    return read[0], read[1] if dense.has_bias else None


def _shapes(dense: DenseConfig) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {"linear.weight": (dense.num_outputs, dense.num_inputs)}
    return {**weight, "linear.bias": (dense.num_outputs,)} if dense.has_bias else weight
