"""Copies checkpoint tensors from files into the parameters of this rank, before they are packed.

Nothing is touched before names, shapes and coverage have been checked, and doing it twice gives the same parameters.
Knows nothing of architectures or ranks: the slices say it all.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import PaddingSlice, Rectangle, WeightSlice, full_rectangle, whole
from spmd_worker.model.weights.coverage import check_coverage, checkpoint_problems, raise_problems
from spmd_worker.model.weights.region import move_block

# Well under the promised 64 MB: glibc keeps blocks below 32 MB for reuse instead of faulting in fresh pages each time.
_BLOCK_BYTES = 16 * 2**20


class WeightSource(Protocol):
    """What weights are read from: see `Checkpoint`, whose own tensors they are, and `DequantisedCheckpoint`."""

    @property
    def folder(self) -> Path:
        """Where the files are."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensor data fetched from files so far."""

    def names(self) -> list[str]:
        """See `Checkpoint.names`."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Checkpoint.shapes`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint.shape`."""

    def dtype(self, name: str) -> torch.dtype:
        """See `Checkpoint.dtype`."""

    def position(self, name: str) -> tuple[str, int]:
        """See `Checkpoint.position`."""

    def blocks(self, name: str, region: Rectangle, max_bytes: int) -> Iterator[Rectangle]:
        """See `Checkpoint.blocks`."""

    def read(self, name: str, region: Rectangle) -> torch.Tensor:
        """See `Checkpoint.read`."""


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
    checkpoint: WeightSource,
    *,
    ignorable: Callable[[str], bool] = nothing_ignorable,
    tied: Mapping[str, str] | None = None,
    allows_nonfinite: bool = False,
) -> LoadReport:
    """Fill every parameter of `model` from the checkpoint, converting to the parameters' dtypes.

    `tied`: by the name of a tensor that of another which the model takes to be the same. Holds at most 16 MB of file
    data at a time, of tied tensors twice that, and about 20 MB more while a quantised weight is dequantised. Raises
    CheckpointError before anything is touched when names, shapes, dtypes or coverage are wrong; and, halfway, when a
    file cannot be read, where the files have a tied tensor as well and it differs, or, unless `allows_nonfinite`, for
    an element that is NaN or infinite in the parameter's dtype.
    """
    start_s, num_bytes_before = time.perf_counter(), checkpoint.num_bytes_read
    parameters = parameters_by_name(model)
    check_coverage(slices, paddings, shapes_of(parameters), checkpoint.shapes(), ignorable=ignorable)
    wanted = [piece for piece in slices if not piece.is_empty]
    for piece in slices:
        checkpoint.dtype(piece.checkpoint_name)
    for piece in sorted(wanted, key=lambda piece: (checkpoint.position(piece.checkpoint_name), piece.source)):
        _check_tied(piece, tied or {}, checkpoint)
        _load_slice(parameters[piece.parameter_name], piece, checkpoint, allows_nonfinite)
    fill_paddings(parameters, paddings)
    num_tensors = len({piece.checkpoint_name for piece in wanted})
    return LoadReport(num_tensors, checkpoint.num_bytes_read - num_bytes_before, time.perf_counter() - start_s)


def load_whole(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: WeightSource,
    *,
    ignorable: Callable[[str], bool] = nothing_ignorable,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Give `load` all tensors of the checkpoint, one after the other; `shapes` has those that it takes, by name.

    Raises CheckpointError, before the first, when names, shapes, dtypes or `tied` tensors (see `load_weights`) are
    wrong; and, halfway, when a file cannot be read.
    """
    expected = [whole(name, shape, name) for name, shape in shapes.items()]
    raise_problems(checkpoint_problems(expected, checkpoint.shapes(), ignorable=ignorable))
    for name in shapes:
        checkpoint.dtype(name)
    for piece in expected:
        _check_tied(piece, tied or {}, checkpoint)
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


def copy_block(parameter: nn.Parameter, piece: WeightSlice, block: Rectangle, values: torch.Tensor) -> None:
    """Copy `values`, a block of a slice's source, to where it belongs, converting dtype and device."""
    destination = move_block(piece.turned(block), piece.turned(piece.source), piece.destination)
    target = parameter.data[tuple(slice(*bounds) for bounds in destination)]
    target.copy_((values.transpose(-1, -2) if piece.is_transposed else values).reshape(target.shape))


def fill_paddings(parameters: Mapping[str, nn.Parameter], paddings: Sequence[PaddingSlice]) -> None:
    """Set to zero what no checkpoint holds."""
    for padding in paddings:
        if padding.parameter_name in parameters:
            parameters[padding.parameter_name].data[tuple(slice(*bounds) for bounds in padding.destination)].zero_()


def _load_slice(parameter: nn.Parameter, piece: WeightSlice, checkpoint: WeightSource, allows_nonfinite: bool) -> None:
    name = piece.checkpoint_name
    for block in checkpoint.blocks(name, piece.source, _BLOCK_BYTES):
        values = checkpoint.read(name, block)
        if not allows_nonfinite and not is_finite(values, parameter.dtype):
            raise CheckpointError(_describe_nonfinite(checkpoint, name, block, values, parameter.dtype))
        copy_block(parameter, piece, block, values)


def _check_tied(piece: WeightSlice, tied: Mapping[str, str], checkpoint: WeightSource) -> None:
    """Some files have both of them, which says nothing as long as they are equal."""
    name, other = piece.checkpoint_name, tied.get(piece.checkpoint_name)
    if other is None or other not in checkpoint.names():
        return
    kinds = [(checkpoint.dtype(each), checkpoint.shape(each)) for each in (name, other)]
    is_same_kind = kinds[0] == kinds[1]
    blocks = checkpoint.blocks(name, piece.source, _BLOCK_BYTES) if is_same_kind else iter(())
    differing = next((block for block in blocks if not _is_same(checkpoint, name, other, block)), None)
    if is_same_kind and differing is None:
        return
    place = "in dtype or shape" if differing is None else f"between rows {differing[0][0]} and {differing[0][1] - 1}"
    raise CheckpointError(
        f"{checkpoint.folder}: tensor {other!r} differs from {name!r} {place}, but tie_word_embeddings in config.json "
        f"says that they are one: set it to false to use both, or remove {other!r} from the files if it is a leftover"
    )


def _is_same(checkpoint: WeightSource, name: str, other: str, block: Rectangle) -> bool:
    """To the bit: what is no number is equal to itself here."""
    first, second = checkpoint.read(name, block), checkpoint.read(other, block)
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def is_finite(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether every element, rounded to `dtype`, is a finite number."""
    # Bounds are NaN where an element is, and are rounded as the elements will be.
    return values.numel() == 0 or bool(torch.stack(values.aminmax()).to(dtype).isfinite().all())


def _describe_nonfinite(
    checkpoint: WeightSource, name: str, block: Rectangle, values: torch.Tensor, dtype: torch.dtype
) -> str:
    troubles = values.to(dtype).isfinite().logical_not().nonzero()
    index = [start + offset for (start, _), offset in zip(block, troubles[0].tolist(), strict=True)]
    value = float(values[tuple(troubles[0].tolist())])
    file_name, _ = checkpoint.position(name)
    return (
        f"{checkpoint.folder / file_name}: tensor {name!r} has {value:g} at {index}, which is not finite in {dtype}: "
        f"the file is damaged or its training diverged; set model.allow_nonfinite=true to load it all the same (rows "
        f"whose logits are not finite are error rows), or another model.dtype where the value is only too large"
    )
