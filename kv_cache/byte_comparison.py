"""Comparison of pairs of blocks, or of slots of states, byte by byte: a NaN equals one of the same bits, 0.0 not -0.0.

Shapes: tensors of the device [layers, number, *shape], a layer's part of one [number, *shape].
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kv_cache.cache_engine import CacheEngine

Pair = tuple[int, int]
"""Numbers of two blocks, or slots, of the device."""

_TEMPORARY_BYTES: Final = 2**28


class ByteDifference(NamedTuple):
    """The first difference of pair number `pair`: in `part` ("block", "state" or "tail") of a layer of the stage, at
    `element` of its shape.
    """

    pair: int
    layer: int
    part: str
    element: tuple[int, ...]
    first: float
    second: float


def differing_blocks(engine: CacheEngine, pairs: Sequence[Pair], group: int = 0) -> ByteDifference | None:
    """The first pair of blocks of a group of layers that differ in any of these; None if all are equal."""
    layers: list[tuple[int, Tensor | None]] = list(enumerate(engine.layer_caches))
    tensors = list(engine.model_tensors)
    if engine.spec.group_of:
        # A block may be larger than its group's layers: nothing is in the rest.
        layers = [each for each in layers if engine.spec.group_of[each[0]] == group]
        tensors = [each.unsqueeze(0) for _, each in layers if each is not None]
    if all(_are_equal(tensor, pairs) for tensor in tensors):
        return None
    return _first_difference(pairs, [("block", engine.spec.layer_of(index), each) for index, each in layers])


def differing_states(engine: CacheEngine, pairs: Sequence[Pair]) -> ByteDifference | None:
    """The first pair of slots that differ in the state or tail of any layer, whatever is saved of drafts; None if all
    are equal.
    """
    assert engine.states is not None, "the model has no states"
    if all(_are_equal(tensor, pairs) for tensor in engine.states.lasting_tensors):
        return None
    layers = [(layer, each) for layer, each in enumerate(engine.states.layers) if each is not None]
    states = [("state", layer, each.state) for layer, each in layers]
    tails = [("tail", layer, tail) for layer, each in layers for tail in (each.tail, each.second_tail)]
    return _first_difference(pairs, [*states, *tails])


def _are_equal(tensor: Tensor, pairs: Sequence[Pair]) -> bool:
    """Whether the pairs are equal in all layers of a tensor; needs a temporary of both, of bounded size."""
    num_bytes = 2 * tensor.nbytes // tensor.shape[1]
    for some in _sliced(pairs, max(1, _TEMPORARY_BYTES // num_bytes)):
        first, second = torch.tensor(some, device=tensor.device).unbind(1)
        if not torch.equal(_bytes(tensor.index_select(1, first)), _bytes(tensor.index_select(1, second))):
            return False
    return True


def _first_difference(pairs: Sequence[Pair], parts: Sequence[tuple[str, int, Tensor | None]]) -> ByteDifference | None:
    for index, (first, second) in enumerate(pairs):
        for part, layer, tensor in parts:
            if tensor is None or torch.equal(_bytes(tensor[first]), _bytes(tensor[second])):
                continue
            one, other = tensor[first].cpu().contiguous(), tensor[second].cpu().contiguous()
            differs = (_bytes(one) != _bytes(other)).view(-1, one.element_size()).any(1).view(one.shape)
            element = tuple(differs.nonzero()[0].tolist())
            return ByteDifference(index, layer, part, element, one[element].item(), other[element].item())
    return None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _sliced(pairs: Sequence[Pair], size: int) -> Iterator[Sequence[Pair]]:
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]
