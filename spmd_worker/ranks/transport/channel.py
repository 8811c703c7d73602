"""Control channel of one replica: bytes from one rank to all, and from each to all, over the gloo control group.

The group's timeout limits every wait. Only lengths and bytes are sent, so nothing is unpickled.
"""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from spmd_worker.ranks.communicator import GroupHandle

WAITS_FOR_RANKS: Final = True
"""Marker for the watchdog, which finds it in the module of a frame."""

_FIRST_BYTES: Final = 4096
"""Size of the first broadcast; the rest of a longer message is sent in a second one."""

_LENGTH_BYTES: Final = 8
_PART_BYTES: Final = 64 * 2**20
"""Size of one message from rank to rank: the timeout limits each."""


class ControlChannel:
    """`group` is the replica's control group; a group of one returns its own payloads."""

    def __init__(self, group: GroupHandle) -> None:
        self._group = group

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def rank(self) -> int:
        return self._group.rank

    def broadcast(self, payload: bytes | None, source: int = 0) -> bytes:
        """Rank `source` passes the payload, the others None; all return it."""
        assert (payload is not None) == (self.rank == source), f"rank {source} passes the payload, the others None"
        if self.size == 1:
            assert payload is not None, "asserted above"
            return payload
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        if payload is not None:
            head = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[: _FIRST_BYTES - _LENGTH_BYTES]
            first[: len(head)] = _as_tensor(head)
        received = _as_bytes(self._group.broadcast(first, source))
        length = int.from_bytes(received[:_LENGTH_BYTES], "little")
        head = received[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length == len(head):
            return head
        rest = torch.zeros(length - len(head), dtype=torch.uint8)
        if payload is not None:
            rest.copy_(_as_tensor(payload[len(head) :]))
        return head + _as_bytes(self._group.broadcast(rest, source))

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        """Rank `source` passes a contiguous tensor in host memory, the others one of the same shape and dtype, which is
        overwritten.
        """
        if tensor.numel():
            self._group.broadcast(tensor.view(-1).view(torch.uint8), source)

    def send_bytes(self, content: Tensor, to: int) -> None:
        """Send uint8 [n] in host memory to rank `to`, which calls `receive_bytes(n, ...)`."""
        for start in range(0, len(content), _PART_BYTES):
            self._group.send(content[start : start + _PART_BYTES], to)

    def receive_bytes(self, num_bytes: int, source: int) -> Tensor:
        """The bytes that rank `source` sends, uint8 [num_bytes]."""
        content = torch.empty(num_bytes, dtype=torch.uint8)
        for start in range(0, num_bytes, _PART_BYTES):
            self._group.receive(content[start : start + _PART_BYTES], source)
        return content

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order; lengths may differ."""
        if self.size == 1:
            return [payload]
        lengths = self._group.all_gather(torch.tensor(len(payload))).tolist()
        longest = max(lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(payload)] = _as_tensor(payload)
        rows = self._group.all_gather(padded) if longest else padded.expand(self.size, 0)
        return [_as_bytes(row)[:length] for row, length in zip(rows, lengths, strict=True)]

    def collect(self, payload: bytes) -> list[bytes]:
        """`gather` without padding, for payloads that are long on some ranks and empty on others."""
        if self.size == 1:
            return [payload]
        lengths = self._group.all_gather(torch.tensor(len(payload))).tolist()
        collected = []
        for rank, length in enumerate(lengths):
            part = _as_tensor(payload) if rank == self.rank else torch.empty(length, dtype=torch.uint8)
            collected.append(_as_bytes(self._group.broadcast(part, source=rank)) if length else b"")
        return collected

    def minimum(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Elementwise minimum over the ranks."""
        return tuple(self._group.all_reduce_min(torch.tensor(numbers, dtype=torch.int64)).tolist())

    def close(self) -> None:
        """Release the group: its threads and sockets end only when it is destroyed and no reference is left."""
        self._group = replace(self._group, group=None)


def _as_tensor(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
