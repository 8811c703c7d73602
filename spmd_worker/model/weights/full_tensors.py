"""Full checkpoint tensors from the slices of all ranks: which rank sends which, and their assembly on the first rank.

Each rank describes its slices (`held_ranges`), and all compute the same plan of it. Rounds bound the memory:
the first rank holds the tensors of one round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_worker.base.errors import SaveError
from spmd_worker.model.layers.weight_slice import HeldSlice
from spmd_worker.model.weights.held_weights import HeldWeight
from spmd_worker.model.weights.safetensors_writer import TensorToWrite

ROUND_BYTES: Final = 64 * 2**20

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""Ranges (start, stop) of each dimension of a tensor, ascending; a slice is their product."""


@dataclass(frozen=True, slots=True)
class FullTensor:
    """A tensor and its senders in order: rank and slice. Where slices overlap they are equal."""

    to_write: TensorToWrite
    senders: tuple[tuple[int, Ranges], ...]


def held_ranges(held: Mapping[str, HeldWeight]) -> dict[str, Ranges]:
    """Slices of this rank that are not empty, by checkpoint name."""
    return {name: weight.held_slice.ranges for name, weight in held.items() if 0 not in weight.shape}


def ranges_of(value: Sequence[Sequence[Sequence[int]]]) -> Ranges:
    """Ranges that came as JSON."""
    return tuple(tuple((start, stop) for start, stop in dimension) for dimension in value)


def plan_gather(tensors: Sequence[TensorToWrite], ranges: Sequence[Mapping[str, Ranges]]) -> list[FullTensor]:
    """Senders of each tensor; `ranges` are of each rank. The first ranks that have an element send it. Raises SaveError
    for a tensor of which no rank has some elements.
    """
    return [FullTensor(tensor, _senders(tensor, ranges)) for tensor in tensors]


def in_rounds(plan: Sequence[FullTensor]) -> Iterator[list[FullTensor]]:
    """Consecutive tensors of at most `ROUND_BYTES`, one at least."""
    waiting: list[FullTensor] = []
    for tensor in plan:
        if waiting and sum(each.to_write.num_bytes for each in (*waiting, tensor)) > ROUND_BYTES:
            yield waiting
            waiting = []
        waiting.append(tensor)
    if waiting:
        yield waiting


def num_bytes_from(rank: int, tensors: Sequence[FullTensor]) -> int:
    """Bytes that a rank sends in a round."""
    return sum(
        prod(_shape(ranges)) * each.to_write.dtype.itemsize
        for each in tensors
        for sender, ranges in each.senders
        if sender == rank
    )


def content_from(rank: int, tensors: Sequence[FullTensor], held: Mapping[str, HeldWeight]) -> Tensor:
    """The bytes that this rank sends in a round, uint8 [n] in host memory."""
    parts = [
        _read(held[each.to_write.name]).reshape(-1).view(torch.uint8)
        for each in tensors
        for sender, _ in each.senders
        if sender == rank
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def assembled(
    tensors: Sequence[FullTensor], held: Mapping[str, HeldWeight], received: Mapping[int, Tensor]
) -> Iterator[Tensor]:
    """The tensors of a round, on the first rank. `received` has the bytes of the other senders, by rank."""
    positions = dict.fromkeys(received, 0)
    for each in tensors:
        full, dtype = None, each.to_write.dtype
        for sender, ranges in each.senders:
            shape = _shape(ranges)
            if sender == 0:
                part = _read(held[each.to_write.name])
            else:
                start = positions[sender]
                positions[sender] = start + prod(shape) * dtype.itemsize
                # A copy: the bytes of a tensor before may have put it off its alignment.
                part = received[sender][start : positions[sender]].clone().view(dtype).view(shape)
            if shape == each.to_write.shape:
                full = part
                continue
            full = torch.empty(each.to_write.shape, dtype=dtype) if full is None else full
            _place(full, ranges, part)
        assert full is not None, each
        yield full


def _read(held: HeldWeight) -> Tensor:
    return held.read().detach().cpu().contiguous()


def _shape(ranges: Ranges) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in dimension) for dimension in ranges)


def _place(full: Tensor, ranges: Ranges, part: Tensor) -> None:
    """Copy a slice into the full tensor."""
    axes = []
    for dimension in ranges:
        at = 0
        axis = []
        for start, stop in dimension:
            axis.append((slice(start, stop), slice(at, at + stop - start)))
            at += stop - start
        axes.append(axis)
    for piece in product(*axes):
        full[tuple(to for to, _ in piece)] = part[tuple(of for _, of in piece)]


def _senders(tensor: TensorToWrite, ranges: Sequence[Mapping[str, Ranges]]) -> tuple[tuple[int, Ranges], ...]:
    of_ranks = [(rank, found[tensor.name]) for rank, found in enumerate(ranges) if tensor.name in found]
    complete = next((each for each in of_ranks if HeldSlice(tensor.shape, each[1]).is_complete), None)
    if complete is not None:
        return (complete,)
    # Cells between the bounds of all slices: each is sent completely or not at all.
    cuts = [
        sorted({0, size, *(bound for _, found in of_ranks for pair in found[axis] for bound in pair)})
        for axis, size in enumerate(tensor.shape)
    ]
    is_sent = np.zeros([len(axis) - 1 for axis in cuts], dtype=bool)
    senders = []
    for rank, found in of_ranks:
        cells = np.ix_(*(_cells(axis, dimension) for axis, dimension in zip(cuts, found, strict=True)))
        if not is_sent[cells].all():
            is_sent[cells] = True
            senders.append((rank, found))
    if not is_sent.all():
        raise SaveError(
            f"{tensor.name}: this run holds only a part of it (model.classifier_from_token, model.runner=pooling): "
            f"save from a run that has all of it"
        )
    return tuple(senders)


def _cells(cuts: Sequence[int], ranges: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Indices of the cells of an axis inside the ranges."""
    index = {cut: number for number, cut in enumerate(cuts)}
    return np.concatenate([np.arange(index[start], index[stop]) for start, stop in ranges])
