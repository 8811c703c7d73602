"""The dense layers behind a pooled vector: sentence-transformers keeps each in a folder of its own."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.dummy import NormalStream, mean_and_std
from spmd_worker.model.weights.tensor_checks import check_finite
from spmd_worker.model_config.pooling import DenseConfig

DenseWeights = list[tuple[Tensor, Tensor | None]]
"""Of each layer weight [out, in] and bias [out], float32 on the CPU."""


def read_denses(model_folder: Path, denses: Iterable[DenseConfig], *, allows_nonfinite: bool = False) -> DenseWeights:
    """Raises CheckpointError for what is missing, has another shape or, unless `allows_nonfinite`, is not finite."""
    return [_read(model_folder / dense.folder, dense, allows_nonfinite) for dense in denses]


def dummy_denses(denses: Iterable[DenseConfig]) -> DenseWeights:
    """Random weights that follow from the names, for `load_format=dummy`."""
    weights: DenseWeights = []
    for dense in denses:
        made = [_dummy(f"{dense.folder}.{name}", shape) for name, shape in _shapes(dense).items()]
        weights.append((made[0], made[1] if dense.has_bias else None))
    return weights


def _read(folder: Path, dense: DenseConfig, allows_nonfinite: bool) -> tuple[Tensor, Tensor | None]:
    shapes = _shapes(dense)
    with Checkpoint.open(folder) as checkpoint:
        if checkpoint.shapes() != dict(sorted(shapes.items())):
            raise CheckpointError(f"{folder}: has {checkpoint.shapes()}, its config.json says {shapes}")
        read = [checkpoint.read(name, full_rectangle(shape)).float() for name, shape in shapes.items()]
        if not allows_nonfinite:
            for name, values in zip(shapes, read, strict=True):
                check_finite(f"{folder / checkpoint.position(name)[0]}: tensor {name!r}", values, torch.float32)
    return read[0], read[1] if dense.has_bias else None


def _shapes(dense: DenseConfig) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {"linear.weight": (dense.num_outputs, dense.num_inputs)}
    return {**weight, "linear.bias": (dense.num_outputs,)} if dense.has_bias else weight


def _dummy(name: str, shape: tuple[int, ...]) -> Tensor:
    mean, std = mean_and_std(name, shape)
    return torch.from_numpy(NormalStream(name, 0, shape).region(full_rectangle(shape))).mul(std).add(mean)
