"""A rank's side of a transfer of shards: what it has, what its weights need, and its writes. Nothing is exchanged here.

The shards of one round are checked on every rank, and the checks exchanged, before a byte of the round is written.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import HeldSlice, Rectangle, TensorView, extents
from spmd_worker.model.weights.block_targets import BlockTarget, block_targets
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model.weights.tensor_checks import check_finite
from spmd_worker.model.weights.tensor_shards import TensorShard
from spmd_worker.model.weights.transfer_plan import GivenTensor, Layout, Move, num_buffer_bytes
from spmd_worker.model.weights.weight_update import OF_SHARDS, content_digest

_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Round:
    """Tensors of which shards are given together: this rank's layout, the blocks that it needs of each, and the model's
    tensors in each.
    """

    layout: Layout
    targets: tuple[tuple[BlockTarget, ...], ...]
    parts: tuple[tuple[tuple[str, TensorView | None], ...], ...]


def given_tensor(shard: TensorShard) -> GivenTensor:
    """The description of a shard for the other ranks."""
    dtype = str(shard.values.dtype).removeprefix("torch.")
    return GivenTensor(shard.name, shard.shape, dtype, shard.placement, tuple(shard.rectangles))


def make_round(store: WeightStore, shards: Sequence[TensorShard], bucket_bytes: int) -> Round:
    """Raises CheckpointError for a tensor that the model does not have in this shape, and for one that is twice."""
    parts = tuple(tuple(store.parts_of(shard.name, shard.shape)) for shard in shards)
    names = [name for of_tensor in parts for name, _ in of_tensor]
    twice = [name for name, count in _counts(names).items() if count > 1]
    if twice:
        raise CheckpointError(f"{twice[0]}: is given twice in one update of shards: give it once")
    targets = []
    for shard, of_tensor in zip(shards, parts, strict=True):
        try:
            for name, view in of_tensor:
                store.check_shape(name, shard.shape if view is None else view.shape(shard.shape))
        except CheckpointError as error:
            raise CheckpointError(f"{error} (given in shards: {shard.placement})") from None
        elements = max(1, bucket_bytes // shard.values.dtype.itemsize)
        # A tied head is compared alone.
        written = [each for each in of_tensor if not store.is_tied_head(each[0])]
        targets.append(tuple(each for name, view in written for each in block_targets(store, name, view, elements)))
    needs = tuple(tuple(target.region for target in of_tensor) for of_tensor in targets)
    return Round(Layout(tuple(map(given_tensor, shards)), needs), tuple(targets), parts)


def _counts(names: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def check_values(store: WeightStore, shards: Sequence[TensorShard], own: Round) -> None:
    """Raise CheckpointError for an element of this rank's shards that is not finite, as a whole tensor's would be."""
    if store.allows_nonfinite:
        return
    for shard, of_tensor in zip(shards, own.parts, strict=True):
        names = [name for name, _ in of_tensor if not store.is_tied_head(name)]
        start = [start for (start, _) in shard.rectangles[0]] if len(shard.rectangles) == 1 else ()
        if names:
            check_finite(f"{shard.name}:", store.to_check(names[0], shard.values), store.dtype_of(names[0]), start)


def content_digests(shards: Sequence[TensorShard]) -> list[str]:
    """Digest of this rank's part of each tensor; "" without one."""
    return [content_digest(shard.values) if shard.rectangles else "" for shard in shards]


def shards_digests(layouts: Sequence[Layout], contents: Sequence[Sequence[str]]) -> list[str]:
    """Digest of each tensor, equal on every rank, from all ranks' layouts and `content_digests`. Raises CheckpointError
    if ranks that have the same part of a tensor have different elements.
    """
    return [_digest_of(number, layouts, contents) for number in range(len(layouts[0].shards))]


def _digest_of(number: int, layouts: Sequence[Layout], contents: Sequence[Sequence[str]]) -> str:
    found: dict[tuple[Rectangle, ...], tuple[int, str]] = {}
    for rank, (layout, digests) in enumerate(zip(layouts, contents, strict=True)):
        given = layout.shards[number]
        first, digest = found.setdefault(given.rectangles, (rank, digests[number]))
        if digest != digests[number]:
            part = HeldSlice(given.shape, tuple((bounds,) for bounds in given.rectangles[0]))
            raise CheckpointError(
                f"{given.name} ({part}) is not the same on ranks {first} and {rank}, which both have it ("
                f"{given.placement}): nothing of this update was written"
            )
    kind = layouts[0].shards[number].kind[1:]
    content = json.dumps([kind, sorted((rectangles, digest) for rectangles, (_, digest) in found.items())])
    return blake2b(content.encode(), digest_size=_DIGEST_BYTES).hexdigest()


@contextmanager
def recorded(store: WeightStore, own: Round, digests: Sequence[str]) -> Iterator[None]:
    """Block that writes all blocks of the round, whose tensors are loaded at its end, or dropped after an exception."""
    written = [(name, view, digest) for of, digest in zip(own.parts, digests, strict=True) for name, view in of]
    heads = [name for name, _, _ in written if store.is_tied_head(name)]
    with store.writing([name for name, _, _ in written if name not in heads]):
        yield
        for name, view, digest in written:
            content = OF_SHARDS + (digest if view is None else f"{digest} {view}")
            if name in heads:
                store.update.add_tied_head(content)
            else:
                store.record(name, content)


@torch.no_grad()
def write_block(target: BlockTarget, parts: Sequence[tuple[Move, Tensor]]) -> None:
    """Write a block from its parts, which the ranks of its moves have."""
    region = target.region
    (_, first), *others = parts
    if not others:
        target.write(first)
        return
    values = torch.empty(extents(region), dtype=first.dtype, device=first.device)
    for move, part in parts:
        place = tuple(slice(a - b, c - b) for (a, c), (b, _) in zip(move.region, region, strict=True))
        values[place] = part
    target.write(values)


def blocks_of(moves: Sequence[Move], rank: int) -> Mapping[tuple[int, int], list[Move]]:
    """A step's moves to a rank, by tensor and block."""
    found: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        if move.destination == rank:
            found.setdefault((move.tensor, move.block), []).append(move)
    return found


def places(moves: Sequence[Move], buffer: Tensor, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[Move, Tensor]]:
    """The place of each part in the buffer, uint8 [`num_moved_bytes`], of one sender and one receiver."""
    start = 0
    for move in moves:
        dtype = dtypes[move.tensor]
        shape = extents(move.region)
        yield move, buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        start += num_buffer_bytes(move.region, dtype.itemsize)
