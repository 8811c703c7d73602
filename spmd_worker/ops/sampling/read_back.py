"""One copy to the host of all results of a step that it needs. The copy waits for what the device has queued before it
is launched, not for later work.

On the CPU a value is read as soon as it is known.
"""

from collections.abc import Callable
from math import prod
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from spmd_worker.ops.kernels.host_copies import from_device

Value = TypeVar("Value")

_Request = tuple[Callable[[tuple[Tensor, ...]], None], tuple[Tensor, ...]]
"""A callback, and the tensors that it is called with, on the host."""

_FREE_ON = ("cpu",)
_MAX_BYTES: Final = 1 << 26
_WORD: Final = 8


def reads_are_free(tensor: Tensor) -> bool:
    """Whether the host can read its values without waiting for a device."""
    return tensor.device.type in _FREE_ON


class Awaited(Generic[Value]):
    """A value that is available after `ReadBack.read`."""

    def __init__(self, collect: Callable[..., Value]) -> None:
        self._collect = collect
        self._values: list[Value] = []

    @property
    def value(self) -> Value:
        """Raises AssertionError before the read-back."""
        assert self._values, "ReadBack.read was not called yet"
        return self._values[0]

    def resolve(self, tensors: tuple[Tensor, ...]) -> None:
        """Compute the value from tensors on the host."""
        self._values.append(self._collect(*tensors))


class ReadBack:
    """One copy for all requests before `read`, and one more for each 64 MiB: log-probabilities of the complete
    vocabulary are as large as the logits.
    """

    def __init__(self) -> None:
        self._requests: list[_Request] = []
        self._num_bytes = 0
        self._copies: list[tuple[list[_Request], Callable[[], Tensor]]] = []

    def later(self, collect: Callable[..., Value], *tensors: Tensor) -> Awaited[Value]:
        """The result of `collect`, called with tensors once they are on the host; float64 or int64, on one device."""
        awaited = Awaited(collect)
        if all(reads_are_free(each) for each in tensors):
            awaited.resolve(tensors)
            return awaited
        num_bytes = sum(_WORD * each.numel() for each in tensors)
        if self._num_bytes + num_bytes > _MAX_BYTES:
            self.launch()
        self._requests.append((awaited.resolve, tensors))
        self._num_bytes += num_bytes
        return awaited

    def launch(self) -> None:
        """Queue the copy of the requests so far on the device."""
        requests, self._requests, self._num_bytes = self._requests, [], 0
        if requests:
            words = torch.cat([_as_words(tensor) for _, tensors in requests for tensor in tensors])
            self._copies.append((requests, from_device(words)))

    def read(self) -> None:
        """Resolve all requests. The host waits once, or not at all if there are none."""
        self.launch()
        copies, self._copies = self._copies, []
        for requests, wait in copies:
            _resolve_all(wait(), requests)


def _resolve_all(words: Tensor, requests: list[_Request]) -> None:
    start = 0
    for resolve, tensors in requests:
        own = []
        for tensor in tensors:
            stop = start + prod(tensor.shape)
            own.append(words[start:stop].view(tensor.dtype).view(tensor.shape))
            start = stop
        resolve(tuple(own))


def _as_words(tensor: Tensor) -> Tensor:
    assert tensor.dtype in (torch.float64, torch.int64), tensor.dtype
    return tensor.contiguous().view(-1).view(torch.int64)
