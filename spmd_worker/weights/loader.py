"""Copies checkpoint tensors into the parameters of this rank: from files at the start, from a trainer's tensors later.

Nothing is touched before names, shapes and coverage have been checked, and doing it twice gives the same parameters.
Knows nothing of architectures or ranks: the slices say it all.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from spmd_worker.errors import CheckpointError
from spmd_worker.layers.weight_slice import PaddingSlice, Rectangle, WeightSlice
from spmd_worker.weights.checkpoint import WEIGHT_DTYPES, Checkpoint
from spmd_worker.weights.coverage import check_coverage, check_parameters, listed, raise_problems
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


@torch.no_grad()
def load_named_tensors(
    model: nn.Module,
    slices: Sequence[WeightSlice],
    paddings: Sequence[PaddingSlice],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    ignorable: Callable[[str], bool] = nothing_ignorable,
) -> int:
    """Update every parameter in place from full checkpoint tensors, given once each, in any order, on any device.

    Takes one tensor at a time from the iterable and keeps none. Returns the number of tensors taken. Tensors of which
    this rank owns nothing must be given too: every rank then comes to the same diagnosis. A tensor that is unknown, of
    a wrong shape or dtype, or given before is not copied. Raises CheckpointError at the end when anything
    was wrong or missing: **the model is then part old, part new, and must not generate** until an update succeeds.
    """
    parameters = parameters_by_name(model)
    check_parameters(slices, paddings, shapes_of(parameters))
    update = _Update(_by_checkpoint_name(slices), parameters)
    for name, tensor in tensors:
        if name in update.slices_of or not ignorable(name):
            update.take(name, tensor)
    raise_problems(update.problems())
    fill_paddings(parameters, paddings)
    return len(update.taken)


@dataclass(slots=True)
class _Update:
    """An update in progress: what was taken, and what was refused and why."""

    slices_of: Mapping[str, Sequence[WeightSlice]]
    parameters: Mapping[str, nn.Parameter]
    taken: dict[str, None] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        fault = self._fault(name, tensor)
        if fault is not None:
            self.refused[name] = fault
            return
        self.taken[name] = None
        for piece in self.slices_of[name]:
            if not piece.is_empty:
                copy_region(
                    self.parameters[piece.parameter_name],
                    piece.destination,
                    tensor.detach()[tuple(slice(*bounds) for bounds in piece.source)],
                )

    def problems(self) -> list[str]:
        missing = [name for name in self.slices_of if name not in self.taken and name not in self.refused]
        refused = [f"{name}: {fault}" for name, fault in self.refused.items()]
        return [*listed("missing from the update", missing), *listed("refused", refused)]

    def _fault(self, name: str, tensor: torch.Tensor) -> str | None:
        if name not in self.slices_of:
            return "not in the model"
        if name in self.taken:
            return "given twice"
        expected = self.slices_of[name][0].checkpoint_shape
        if tuple(tensor.shape) != expected:
            return f"update {list(tensor.shape)}, model {list(expected)}"
        # A DTensor, known by its method. Gathering it is a collective, which is the caller's to order.
        if hasattr(tensor, "full_tensor"):
            return "is sharded: pass its full_tensor()"
        if tensor.is_meta:
            return "is on the meta device and has no data"
        if tensor.dtype not in WEIGHT_DTYPES.values():
            return f"{tensor.dtype} is not a weight dtype: must be one of {', '.join(WEIGHT_DTYPES)}"
        return None


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


def _by_checkpoint_name(slices: Sequence[WeightSlice]) -> dict[str, list[WeightSlice]]:
    grouped: dict[str, list[WeightSlice]] = {}
    for piece in slices:
        grouped.setdefault(piece.checkpoint_name, []).append(piece)
    for name, pieces in grouped.items():
        shapes = {piece.checkpoint_shape for piece in pieces}
        if len(shapes) > 1:
            raise CheckpointError(f"{name}: the model's slices disagree on its shape: {sorted(shapes)}")
    return grouped
