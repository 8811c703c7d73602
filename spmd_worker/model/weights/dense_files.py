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

DenseWeights = list[dict[str, Tensor]]
"""Weight [out, in] and bias [out] of each layer, and the matrix [out, in] of a residual, by the names in its file:
float32 on the CPU.
"""


def read_denses(model_folder: Path, denses: Iterable[DenseConfig], *, allows_nonfinite: bool = False) -> DenseWeights:
    """Raises CheckpointError for missing or misshapen tensors and, unless `allows_nonfinite`, non-finite ones."""
    return [_read(model_folder / dense.folder, dense, allows_nonfinite) for dense in denses]


def dummy_denses(denses: Iterable[DenseConfig]) -> DenseWeights:
    """Random weights that depend on the names alone, for `load_format=dummy`."""
    weights: DenseWeights = []
    for dense in denses:
        shapes = {f"{dense.folder}.{name}": shape for name, shape in _shapes(dense).items()}
        source = DummyWeights({name: ModelTensor(shape) for name, shape in shapes.items()}, ())
        read = (source.read(name, full_rectangle(shape)) for name, shape in shapes.items())
        weights.append(dict(zip(_shapes(dense), read, strict=True)))
    return weights


def _read(folder: Path, dense: DenseConfig, allows_nonfinite: bool) -> dict[str, Tensor]:
    shapes = _shapes(dense)
    with Checkpoint.open(folder) as checkpoint:
        if checkpoint.shapes() != dict(sorted(shapes.items())):
            raise CheckpointError(f"{folder}: has the tensors {checkpoint.shapes()}, its config.json says {shapes}")
        read = {name: checkpoint.read(name, full_rectangle(shape)).float() for name, shape in shapes.items()}
        if not allows_nonfinite:
            for name, values in read.items():
                check_finite(f"{folder / checkpoint.position(name)[0]}: tensor {name!r}", values, torch.float32)
    return read


def _shapes(dense: DenseConfig) -> dict[str, tuple[int, ...]]:
    matrix = (dense.num_outputs, dense.num_inputs)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": matrix}
    if dense.has_bias:
        shapes["linear.bias"] = (dense.num_outputs,)
    if dense.has_residual_matrix:
        shapes["residual.weight"] = matrix
    return shapes
