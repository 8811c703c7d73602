"""Copies checkpoint tensors from files into the parameters of this rank, before they are packed.

Nothing is touched before names, shapes and coverage have been checked, and doing it twice gives the same parameters.
Knows nothing of architectures or ranks: the slices say it all.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from spmd_worker.layers.weight_slice import PaddingSlice, Rectangle, WeightSlice, full_rectangle, whole
from spmd_worker.weights.checkpoint import Checkpoint
from spmd_worker.weights.coverage import check_coverage, checkpoint_problems, raise_problems
from spmd_worker.weights.region import move_block, split_region

# Well under the promised 64 MB: glibc keeps blocks below 32 MB for reuse instead of faulting in fresh pages each time.
_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did on this rank: checkpoint tensors it took something of, bytes fetched from files, seconds."""

    num_tensors: int
    num_bytes_read: int
    seconds: float


def nothing_ignorable(name: str) -> bool:
    """For checkpoints that must hold exactly the model's tensors."""
    return False


@torch.no_grad()
def load_weights(
    model: nn.Module,
    slices: Sequence[WeightSlice],
    paddings: Sequence[PaddingSlice],
    checkpoint: Checkpoint,
    *,
    ignorable: Callable[[str], bool] = nothing_ignorable,
) -> LoadReport:
    """Fill every parameter of `model` from the checkpoint, converting to the parameters' dtypes.

    Holds at most 16 MB of file data at a time. Raises CheckpointError before anything is touched when names,
    shapes, dtypes or coverage are wrong; and, halfway, when a file cannot be read.
    """
    start_s, num_bytes_before = time.perf_counter(), checkpoint.num_bytes_read
    parameters = parameters_by_name(model)
    check_coverage(slices, paddings, shapes_of(parameters), checkpoint.shapes(), ignorable=ignorable)
    wanted = [piece for piece in slices if not piece.is_empty]
    for piece in slices:
        checkpoint.dtype(piece.checkpoint_name)
    for piece in sorted(wanted, key=lambda piece: (checkpoint.position(piece.checkpoint_name), piece.source)):
        _load_slice(parameters[piece.parameter_name], piece, checkpoint)
    fill_paddings(parameters, paddings)
    num_tensors = len({piece.checkpoint_name for piece in wanted})
    return LoadReport(num_tensors, checkpoint.num_bytes_read - num_bytes_before, time.perf_counter() - start_s)


def load_whole(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    *,
    ignorable: Callable[[str], bool] = nothing_ignorable,
) -> None:
    """Give `load` all tensors of the checkpoint, one after the other; `shapes` has those that it takes, by name.

    Raises CheckpointError, before the first, when names, shapes or dtypes are wrong; and, halfway, when a file cannot
    be read.
    """
    expected = [whole(name, shape, name) for name, shape in shapes.items()]
    raise_problems(checkpoint_problems(expected, checkpoint.shapes(), ignorable=ignorable))
    for name in shapes:
        checkpoint.dtype(name)
    in_order = sorted(shapes, key=checkpoint.position)
    load((name, checkpoint.read(name, full_rectangle(shapes[name]))) for name in in_order)


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters to fill, which must have storage: copying into a meta tensor would silently do nothing."""
    parameters = dict(model.named_parameters())
    on_meta = [name for name, parameter in parameters.items() if parameter.is_meta]
    assert not on_meta, ("parameters without storage", on_meta[:3])
    return parameters


def shapes_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, by name."""
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def copy_region(parameter: nn.Parameter, destination: Rectangle, values: torch.Tensor) -> None:
    """Copy `values` into a rectangle of a parameter, converting dtype and device; extents may differ by leading 1s."""
    target = parameter.data[tuple(slice(*bounds) for bounds in destination)]
    target.copy_(values.reshape(target.shape))


def fill_paddings(parameters: Mapping[str, nn.Parameter], paddings: Sequence[PaddingSlice]) -> None:
    """Set to zero what no checkpoint holds."""
    for padding in paddings:
        if padding.parameter_name in parameters:
            parameters[padding.parameter_name].data[tuple(slice(*bounds) for bounds in padding.destination)].zero_()


def _load_slice(parameter: nn.Parameter, piece: WeightSlice, checkpoint: Checkpoint) -> None:
    name = piece.checkpoint_name
    max_elements = _BLOCK_BYTES // checkpoint.dtype(name).itemsize
    for block in split_region(piece.checkpoint_shape, piece.source, max_elements):
        destination = move_block(block, piece.source, piece.destination)
        copy_region(parameter, destination, checkpoint.read(name, block))
