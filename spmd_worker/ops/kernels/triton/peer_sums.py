"""Collectives over memory that every rank of a tensor-parallel group reads: symmetric memory of GPUs of one node.

A sum is one round where it is small: each rank writes its part, all meet, and each adds up all parts. A large one is
two: each rank adds up its share of the numbers, all meet again, and each copies the others' shares. A number is added
up by the same kernel in the same order either way, so its bits follow neither from the size of the sum nor from who
made it. Two halves of the memory take turns, so that one meeting suffices: who writes to a half has met the others
since they read what was there.

    half 0:  parts (or what is gathered) | sums of this rank's share
    half 1:  the same

N: ranks; T: rows; H: width.
"""

from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_worker.ops.kernels.triton import sum_kernels
from spmd_worker.ops.kernels.triton.launching import power_of_two
from spmd_worker.ops.kernels.triton.rows import add_rms_norm, row_options

ONE_ROUND_BYTES: Final = 1 << 19
"""Up to so many bytes a part the second meeting costs more than reading all parts does."""

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNED: Final = 128


class PeerMemory(Protocol):
    """As many bytes on each rank, which all ranks of the group can read. `addresses`: int64 [N], on the device."""

    views: list[Tensor]
    """uint8 [bytes] of each rank, in group order."""
    addresses: Tensor

    def meet(self) -> None:
        """What any rank has queued before its call is seen by what any other queues after it."""


class SymmetricMemory:
    """torch's, exchanged once, before any graph is recorded. Every rank of the group makes one, of what each has
    allocated: in the exchange a rank that has none would be waited for. Raises RuntimeError where the GPUs cannot see
    each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, own: Tensor) -> None:
        from torch.distributed import _symmetric_memory

        self._handle: Any = _symmetric_memory.rendezvous(own, group)
        shape = (len(own),)
        self.views = [self._handle.get_buffer(rank, shape, torch.uint8) for rank in range(group.size())]
        self.addresses = torch.tensor([view.data_ptr() for view in self.views], dtype=torch.int64).to(own.device)

    @staticmethod
    def allocate(num_bytes: int, device: torch.device) -> Tensor:
        """This rank's own: uint8 [num_bytes]. No other rank takes part. Raises RuntimeError where there is none."""
        from torch.distributed import _symmetric_memory

        return _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)

    def meet(self) -> None:
        """See `PeerMemory.meet`: in the order of the stream, the host waits for nothing."""
        self._handle.barrier(channel=0)


class PeerSums:
    """Implements `communicator.Collectives`. `part_bytes`: the largest part that is summed in one piece; larger ones
    are cut, by rows where they have any.
    """

    def __init__(self, memory: PeerMemory, rank: int, part_bytes: int) -> None:
        self._memory, self._rank, self._size = memory, rank, len(memory.views)
        # The sums of a share lie behind the parts.
        self._room = part_bytes // _ALIGNED * _ALIGNED
        self._half_bytes = half_bytes(part_bytes, self._size)
        assert all(len(view) >= 2 * self._half_bytes for view in memory.views), self._half_bytes
        self._turn = 0

    def reset_sums(self) -> None:
        """What follows is the same whatever was exchanged before: around what is recorded once and launched again."""
        # Nobody reads either half any more once all have come here.
        self._memory.meet()
        self._turn = 0

    def takes(self, tensor: Tensor) -> bool:
        return tensor.dtype in _DTYPES and tensor.device == self._memory.addresses.device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `GroupHandle.all_reduce`. In place."""
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        for piece in _pieces(whole.view(-1), self._room // tensor.element_size()):
            self._sum_into(piece, self._write(piece))
        return tensor if whole is tensor else tensor.copy_(whole)

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Collectives.all_reduce_add_rms_norm`. The residual stream stays whole on every rank."""
        assert residual.is_contiguous(), residual.stride()
        x, width = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        num_rows = max(self._room // (width * x.element_size()), 1)
        for part, rows, normed in zip(
            _pieces(x, num_rows), _pieces(residual, num_rows), _pieces(out, num_rows), strict=True
        ):
            if part.numel() * part.element_size() <= ONE_ROUND_BYTES:
                offset = self._write(part)
                sum_kernels.add_parts_and_norm[(len(part),)](
                    *(self._memory.addresses, rows, weight, normed, offset // part.element_size(), width, eps),
                    RANKS=self._size,
                    BH=power_of_two(width),
                    **sum_kernels.LAUNCH | row_options(width),
                )
            else:
                self._sum_into(part, self._write(part))
                normed.copy_(add_rms_norm(part, rows, weight, eps))
        return out

    def gather_rows(self, residual: Tensor) -> Tensor:
        """See `Collectives.gather_rows`: every rank has them all."""
        return residual

    def part_buffer(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """See `Collectives.part_buffer`: what makes parts writes them elsewhere."""
        del shape, dtype
        return None

    def all_gather(self, tensor: Tensor) -> Tensor:
        own = tensor.contiguous().view(-1).view(torch.uint8)
        gathered = own.new_empty((self._size, len(own)))
        for start in range(0, len(own), self._room):
            piece = own[start : start + self._room]
            offset = self._write(piece)
            for rank, view in enumerate(self._memory.views):
                gathered[rank, start : start + len(piece)] = view[offset : offset + len(piece)]
        return gathered.view(-1).view(tensor.dtype).view(self._size, *tensor.shape)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        whole = tensor.contiguous()
        own = whole.view(-1).view(torch.uint8)
        for start in range(0, len(own), self._room):
            piece = own[start : start + self._room]
            offset = self._write(piece)
            piece.copy_(self._memory.views[source][offset : offset + len(piece)])
        return tensor if whole is tensor else tensor.copy_(whole)

    def carries(self, tensor: Tensor) -> bool:
        """See `Collectives.carries`: nothing is sent from stage to stage this way."""
        del tensor
        return False

    def send_next(self, tensor: Tensor) -> None:
        """Never called: see `carries`."""
        raise NotImplementedError

    def receive_previous(self, tensor: Tensor) -> None:
        """Never called: see `carries`."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Collectives.close`. The memory is free when nobody holds it."""

    def _write(self, piece: Tensor) -> int:
        """This rank's part, where all find it once they have met: at that offset in bytes, on every rank."""
        offset = self._turn * self._half_bytes
        self._turn = 1 - self._turn
        own = piece.view(-1).view(torch.uint8)
        self._memory.views[self._rank][offset : offset + len(own)] = own
        self._memory.meet()
        return offset

    def _sum_into(self, piece: Tensor, offset: int) -> None:
        """All ranks' parts, which lie at that offset."""
        flat, itemsize = piece.view(-1), piece.element_size()
        if flat.numel() * itemsize <= ONE_ROUND_BYTES:
            self._add(flat, offset // itemsize)
            return
        share = -(-flat.numel() // self._size)
        room = [view[offset + self._room : offset + self._half_bytes].view(flat.dtype) for view in self._memory.views]
        start, stop = _share_of(self._rank, share, flat.numel())
        self._add(room[self._rank][: stop - start], offset // itemsize + start)
        self._memory.meet()
        for rank in range(self._size):
            start, stop = _share_of(rank, share, flat.numel())
            flat[start:stop] = room[rank][: stop - start]

    def _add(self, out: Tensor, first: int) -> None:
        count = out.numel()
        if count:
            sum_kernels.add_parts[(-(-count // sum_kernels.BLOCK),)](
                *(self._memory.addresses, out, first, count),
                RANKS=self._size,
                BLOCK=sum_kernels.BLOCK,
                **sum_kernels.LAUNCH,
            )


def half_bytes(part_bytes: int, size: int) -> int:
    """Of the memory of each rank of `size`: two such halves hold parts of `part_bytes`, and sums of a share of them."""
    room = part_bytes // _ALIGNED * _ALIGNED
    share = -(-room // size)
    return room + -(-share // _ALIGNED) * _ALIGNED + _ALIGNED


def _share_of(rank: int, share: int, count: int) -> tuple[int, int]:
    return min(rank * share, count), min((rank + 1) * share, count)


def _pieces(values: Tensor, most: int) -> Iterator[Tensor]:
    """At most so many along the first dimension."""
    return iter(torch.split(values, max(most, 1)))
