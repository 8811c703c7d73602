"""What the host needs of a step's results, read in one copy: a read-back waits for what the device has queued before
it, and once it is launched, not for what is queued after that.

On the CPU looking at a value costs nothing, so there it is looked at as soon as it is known.
"""

from collections.abc import Callable
from math import prod
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from spmd_worker.ops.kernels.host_copies import from_device

Value = TypeVar("Value")

_Taker = tuple[Callable[[tuple[Tensor, ...]], None], tuple[Tensor, ...]]
"""Who is given the values of some tensors."""

_FREE_ON = ("cpu",)
_MOST_BYTES: Final = 1 << 26
_WORD: Final = 8


def reads_are_free(tensor: Tensor) -> bool:
    """Whether the host can look at its values without waiting for a device."""
    return tensor.device.type in _FREE_ON


class Awaited(Generic[Value]):
    """A value that the host has once `ReadBack.read` was called."""

    def __init__(self, collect: Callable[..., Value]) -> None:
        self._collect = collect
        self._values: list[Value] = []

    @property
    def value(self) -> Value:
        """Only after the read-back."""
        assert self._values, "nothing was read back yet"
        return self._values[0]

    def take(self, tensors: tuple[Tensor, ...]) -> None:
        """Make the value of tensors on the host."""
        self._values.append(self._collect(*tensors))


class ReadBack:
    """One copy for all that is asked for before `read`, and one more for each 64 MiB: what is reported of the whole
    vocabulary is as large as all logits.
    """

    def __init__(self) -> None:
        self._takers: list[_Taker] = []
        self._num_bytes = 0
        self._copies: list[tuple[list[_Taker], Callable[[], Tensor]]] = []

    def later(self, collect: Callable[..., Value], *tensors: Tensor) -> Awaited[Value]:
        """What `collect` makes of the tensors, float64 or int64 on one device, when they are on the host."""
        awaited = Awaited(collect)
        if all(reads_are_free(each) for each in tensors):
            awaited.take(tensors)
            return awaited
        num_bytes = sum(_WORD * each.numel() for each in tensors)
        if self._num_bytes + num_bytes > _MOST_BYTES:
            self.launch()
        self._takers.append((awaited.take, tensors))
        self._num_bytes += num_bytes
        return awaited

    def launch(self) -> None:
        """Queue the copy of what was asked for so far behind what the device has to do for it."""
        takers, self._takers, self._num_bytes = self._takers, [], 0
        if takers:
            words = torch.cat([_as_words(tensor) for _, tensors in takers for tensor in tensors])
            self._copies.append((takers, from_device(words)))

    def read(self) -> None:
        """The values asked for so far. The host waits once; where none is outstanding it does not."""
        self.launch()
        copies, self._copies = self._copies, []
        for takers, wait in copies:
            _share_out(wait(), takers)


def _share_out(words: Tensor, takers: list[_Taker]) -> None:
    start = 0
    for take, tensors in takers:
        own = []
        for tensor in tensors:
            stop = start + prod(tensor.shape)
            own.append(words[start:stop].view(tensor.dtype).view(tensor.shape))
            start = stop
        take(tuple(own))


def _as_words(tensor: Tensor) -> Tensor:
    assert tensor.dtype in (torch.float64, torch.int64), tensor.dtype
    return tensor.contiguous().view(-1).view(torch.int64)
