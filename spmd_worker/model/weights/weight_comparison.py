"""Weights of one rank compared with those that a fresh load would hold, and sums of them that no layout changes.

One slice of one tensor is read at a time. Quantised weights are compared with what the fresh ones are quantised to.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from math import prod
from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.weight_slice import HeldSlice, Rectangle, volume
from spmd_worker.model.weights.held_weights import HeldPiece
from spmd_worker.model.weights.region import split_region
from spmd_worker.model.weights.store import WeightStore, read_stored, stored_scales
from spmd_worker.model.weights.weight_source import WeightSource

_BLOCK_BYTES: Final = 16 * 2**20
_BLOCK_ELEMENTS: Final = 1 << 21
_DIGEST_BYTES: Final = 16
_MIXERS: Final = (-7046029254386353131, -4658895280553007687, -7723592293110705685, 2685821657736338717)
"""Odd numbers of 64 bits, of SplitMix64 and PCG."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Sums = dict[str, list[tuple[Rectangle, str, tuple[int, int]]]]
"""A rank's slices by checkpoint name: rectangle, dtype and two sums of 64 bits."""


@torch.no_grad()
def first_difference(weights: WeightStore, source: WeightSource) -> str:
    """The first of this rank's weights, in the order of the files, that `source` would fill otherwise, in words; "" if
    there is none. Raises CheckpointError if the source has other names or shapes.
    """
    weights.check_covered(source)
    for name in sorted(weights.held, key=source.position):
        held = weights.held[name]
        for piece in (*held.pieces, *held.copies):
            if volume(piece.piece.source) == 0:
                continue
            own = piece.read()
            for block, fresh in _fresh_blocks(source, piece):
                difference = _difference(own[_within(block, piece.piece.source)], fresh, block)
                if difference:
                    region = HeldSlice(piece.piece.checkpoint_shape, tuple([(each,) for each in piece.piece.source]))
                    return f"{name} ({region}, in {piece.piece.parameter_name}) {difference}"
    return ""


def _fresh_blocks(source: WeightSource, held: HeldPiece) -> Iterator[tuple[Rectangle, Tensor]]:
    """Blocks of a slice as a fresh load would hold them, with the checkpoint's dimensions."""
    piece, layer = held.piece, held.layer
    if held.stored is not None:
        for block in held.stored_blocks(_BLOCK_BYTES):
            yield block, held.stored_values(block, *read_stored(source, held, block))
    elif isinstance(layer, PackedLayer) and layer.needs_full_rows(held.parameter):
        yield piece.source, _quantised(source, held, layer)
    else:
        for block in source.blocks(piece.checkpoint_name, piece.source, _BLOCK_BYTES):
            yield block, source.read(piece.checkpoint_name, block)


def _quantised(source: WeightSource, held: HeldPiece, layer: PackedLayer) -> Tensor:
    """Dequantised values of a fresh slice: its scales are the file's, or follow from full rows."""
    piece, found = held.piece, stored_scales(source, held)
    rows = held.as_rows(source.read(piece.checkpoint_name, held.full_source))
    return held.from_rows(layer.requantised(rows, held.own_inputs, None if found is None else found[1]))


def _within(block: Rectangle, source: Rectangle) -> tuple[slice, ...]:
    return tuple([slice(start - first, stop - first) for (start, stop), (first, _) in zip(block, source, strict=True)])


def _difference(own: Tensor, fresh: Tensor, block: Rectangle) -> str:
    """Words about the first element with other bits, by its indices in the checkpoint's tensor."""
    fresh = fresh.to(own.device, own.dtype).reshape(own.shape)
    kind = _BITS[own.element_size()]
    differs = own.contiguous().view(kind) != fresh.contiguous().view(kind)
    if not bool(differs.any()):
        return ""
    index = [int(each) for each in differs.nonzero()[0]]
    at = [start + each for (start, _), each in zip(block, index, strict=True)]
    values = own[tuple(index)].item(), fresh[tuple(index)].item()
    return f"differs at {at}: {values[0]!r} is held, and a fresh load would hold {values[1]!r}"


@torch.no_grad()
def tensor_sums(weights: WeightStore) -> Sums:
    """Sums of this rank's slices, in the dtype in which they are held; quantised ones dequantised."""
    return {
        name: [(each.piece.source, *_sums_of(each)) for each in held.pieces if volume(each.piece.source)]
        for name, held in weights.held.items()
    }


def _sums_of(held: HeldPiece) -> tuple[str, tuple[int, int]]:
    values = held.read()
    return str(values.dtype).removeprefix("torch."), element_sums(
        values, held.piece.source, held.piece.checkpoint_shape
    )


def element_sums(values: Tensor, region: Rectangle, shape: Sequence[int]) -> tuple[int, int]:
    """Two sums of 64 bits over elements, each mixed with its index in a tensor of this shape: slices that divide a
    tensor have sums that add up to its own. They tell accidents apart; they do not withstand forgery.
    """
    first = second = 0
    for block in split_region(tuple(shape), region, _BLOCK_ELEMENTS):
        part = values[_within(block, region)].contiguous()
        bits = part.view(_BITS[part.element_size()]).to(torch.int64)
        mixed = _mixed((_indices(block, shape, part.device) + 1) * _MIXERS[0] ^ _mixed(bits, _MIXERS[1]), _MIXERS[2])
        first += int(mixed.sum())
        second += int(_mixed(mixed, _MIXERS[3]).sum())
    return first % 2**64, second % 2**64


def _indices(block: Rectangle, shape: Sequence[int], device: torch.device) -> Tensor:
    """Index of each element of a block in a tensor of this shape, in row-major order."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(block):
        index = index.unsqueeze(-1) + torch.arange(start, stop, device=device) * prod(shape[dim + 1 :])
    return index


def _mixed(numbers: Tensor, factor: int) -> Tensor:
    """Products wrap around."""
    numbers = (numbers ^ (numbers >> 31 & 0x1FFFFFFFF)) * factor
    return numbers ^ (numbers >> 29 & 0x7FFFFFFFF)


def combined_digests(shapes: Mapping[str, tuple[int, ...]], by_rank: Sequence[Sums]) -> dict[str, str]:
    """Hexadecimal digest of each tensor, from the sums of all ranks. Raises CheckpointError if two ranks hold different
    elements of a slice, or no rank holds some of a tensor.
    """
    return {name: _combined(name, shape, by_rank) for name, shape in sorted(shapes.items())}


def _combined(name: str, shape: tuple[int, ...], by_rank: Sequence[Sums]) -> str:
    found: dict[Rectangle, tuple[int, str, tuple[int, int]]] = {}
    for rank, sums in enumerate(by_rank):
        for source, dtype, both in sums.get(name, ()):
            first, *known = found.setdefault(source, (rank, dtype, both))
            if known != [dtype, both]:
                region = HeldSlice(shape, tuple([(each,) for each in source]))
                raise CheckpointError(f"{name} ({region}) is not the same on ranks {first} and {rank}")
    num_elements = sum(map(volume, found))
    if num_elements != prod(shape):
        raise CheckpointError(
            f"{name}: the ranks hold {num_elements} of its {prod(shape)} elements, or hold some twice"
        )
    (dtype,) = dict.fromkeys(dtype for _, dtype, _ in found.values())
    sums_of = [str(sum(both[index] for _, _, both in found.values()) % 2**64) for index in range(2)]
    content = f"{dtype} {list(shape)} {' '.join(sums_of)}"
    return blake2b(content.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def digest_of_all(digests: Mapping[str, str]) -> str:
    """Hexadecimal digest of the digests of all tensors."""
    content = "\n".join([f"{name} {digest}" for name, digest in sorted(digests.items())])
    return blake2b(content.encode(), digest_size=_DIGEST_BYTES).hexdigest()
