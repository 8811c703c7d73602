"""Collectives over symmetric memory of the GPUs of one node, which every rank of a tensor-parallel group can read.

A small all-reduce has one round: each rank writes its part, a barrier, and each rank sums all parts. A large one has
two: each rank sums its share of the numbers, a second barrier, and each copies the others' shares, rounded. Both use
the same kernel with the same order of sums, so a number's bits depend neither on the size nor on the rank that sums it.
The order is that of the ranks, or for float32 parts of a group that adds by a tree (`leaves.py`) that tree's. The two
halves of the memory alternate, so that one barrier suffices: a rank that writes to a half has passed a barrier since
the others read it.

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
"""Maximum bytes of a part for which reading all parts is cheaper than a second barrier."""

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNED: Final = 128


class PeerMemory(Protocol):
    """A buffer of equal size on each rank, readable by all ranks. `addresses`: int64 [N], on the device."""

    views: list[Tensor]
    """uint8 [bytes] of each rank, in group order."""
    addresses: Tensor

    def barrier(self) -> None:
        """Writes queued on any rank before its call are visible to work queued on any rank after its own."""


class SymmetricMemory:
    """torch's symmetric memory, exchanged once, before any graph is recorded. Every rank of the group must create one,
    or the others wait for it. Raises RuntimeError if the GPUs cannot read each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, own: Tensor) -> None:
        from torch.distributed import _symmetric_memory

        self._handle: Any = _symmetric_memory.rendezvous(own, group)
        shape = (len(own),)
        self.views = [self._handle.get_buffer(rank, shape, torch.uint8) for rank in range(group.size())]
        self.addresses = torch.tensor([view.data_ptr() for view in self.views], dtype=torch.int64).to(own.device)

    @staticmethod
    def allocate(num_bytes: int, device: torch.device) -> Tensor:
        """This rank's buffer, uint8 [num_bytes], without the other ranks. Raises RuntimeError if not supported."""
        from torch.distributed import _symmetric_memory

        return _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)

    def barrier(self) -> None:
        """A barrier in stream order: the host does not wait."""
        self._handle.barrier(channel=0)


class PeerSums:
    """Implements `communicator.Collectives`. `part_bytes`: maximum size of a part; larger tensors are split, by rows if
    they have any. `adds_by_tree`: as that of the group, whose size is a power of two then.
    """

    def __init__(self, memory: PeerMemory, rank: int, part_bytes: int, *, adds_by_tree: bool = False) -> None:
        self._memory, self._rank, self._size = memory, rank, len(memory.views)
        self._adds_by_tree = adds_by_tree
        is_full = self._size & (self._size - 1) == 0 and self._size <= sum_kernels.MAX_TREE
        assert is_full or not adds_by_tree, self._size
        # Sums of a share follow the parts.
        self._part_bytes = part_bytes // _ALIGNED * _ALIGNED
        self._half_bytes = half_bytes(part_bytes, self._size)
        assert all(len(view) >= 2 * self._half_bytes for view in memory.views), self._half_bytes
        self._turn = 0

    def reset_sums(self) -> None:
        """Start with half 0 again, whatever was exchanged before: around work that is recorded once and replayed."""
        # After the barrier no rank reads either half.
        self._memory.barrier()
        self._turn = 0

    def takes(self, tensor: Tensor) -> bool:
        return tensor.dtype in _DTYPES and tensor.device == self._memory.addresses.device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum, in place."""
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        for piece in _pieces(flat.view(-1), self._part_bytes // tensor.element_size()):
            self._sum_into(piece, self._write(piece), piece.element_size(), by_tree=False)
        return tensor if flat is tensor else tensor.copy_(flat)

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The residual stream is complete on every rank."""
        assert residual.is_contiguous(), residual.stride()
        x, width = x.contiguous(), x.shape[-1]
        out = torch.empty_like(residual)
        num_rows = max(self._part_bytes // (width * x.element_size()), 1)
        for part, rows, normed in zip(
            _pieces(x, num_rows), _pieces(residual, num_rows), _pieces(out, num_rows), strict=True
        ):
            if part.numel() * part.element_size() <= ONE_ROUND_BYTES:
                offset = self._write(part)
                sum_kernels.add_parts_and_norm[(len(part),)](
                    *(self._memory.addresses, rows, weight, normed, offset // part.element_size(), width, eps),
                    RANKS=self._size,
                    BH=power_of_two(width),
                    BY_TREE=self._adds_by_tree,
                    **sum_kernels.LAUNCH | row_options(width),
                )
            else:
                total = part if part.dtype == rows.dtype else torch.empty_like(rows)
                self._sum_into(total, self._write(part), part.element_size(), by_tree=self._adds_by_tree)
                normed.copy_(add_rms_norm(total, rows, weight, eps))
        return out

    def gather_rows(self, residual: Tensor) -> Tensor:
        """Every rank has all rows."""
        return residual

    def sum_parts(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        assert self._adds_by_tree, "parts are added as all others are"
        flat = part.contiguous().view(-1)
        total = flat if dtype == flat.dtype else torch.empty_like(flat, dtype=dtype)
        count = self._part_bytes // flat.element_size()
        for piece, of_piece in zip(_pieces(flat, count), _pieces(total, count), strict=True):
            self._sum_into(of_piece, self._write(piece), piece.element_size(), by_tree=True)
        return total.view(part.shape)

    def part_buffer(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """None: kernels write parts to their own memory."""
        del shape, dtype
        return None

    def all_gather(self, tensor: Tensor) -> Tensor:
        own = tensor.contiguous().view(-1).view(torch.uint8)
        gathered = own.new_empty((self._size, len(own)))
        for start in range(0, len(own), self._part_bytes):
            piece = own[start : start + self._part_bytes]
            offset = self._write(piece)
            for rank, view in enumerate(self._memory.views):
                gathered[rank, start : start + len(piece)] = view[offset : offset + len(piece)]
        return gathered.view(-1).view(tensor.dtype).view(self._size, *tensor.shape)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        whole = tensor.contiguous()
        own = whole.view(-1).view(torch.uint8)
        for start in range(0, len(own), self._part_bytes):
            piece = own[start : start + self._part_bytes]
            offset = self._write(piece)
            piece.copy_(self._memory.views[source][offset : offset + len(piece)])
        return tensor if whole is tensor else tensor.copy_(whole)

    def carries(self, tensor: Tensor) -> bool:
        """Never: pipeline stages do not exchange tensors this way."""
        del tensor
        return False

    def send_next(self, tensor: Tensor) -> None:
        raise NotImplementedError

    def receive_previous(self, tensor: Tensor) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """The memory is freed with its last reference."""

    def _write(self, piece: Tensor) -> int:
        """Write this rank's part, then a barrier. Returns its offset in bytes, the same on every rank."""
        offset = self._turn * self._half_bytes
        self._turn = 1 - self._turn
        own = piece.view(-1).view(torch.uint8)
        self._memory.views[self._rank][offset : offset + len(own)] = own
        self._memory.barrier()
        return offset

    def _sum_into(self, total: Tensor, offset: int, itemsize: int, *, by_tree: bool) -> None:
        """Sum all ranks' parts at that offset, whose numbers have `itemsize` bytes."""
        flat = total.view(-1)
        if flat.numel() * itemsize <= ONE_ROUND_BYTES:
            self._add(flat, offset // itemsize, by_tree=by_tree)
            return
        share = -(-flat.numel() // self._size)
        sums = [
            view[offset + self._part_bytes : offset + self._half_bytes].view(flat.dtype) for view in self._memory.views
        ]
        start, stop = _share_of(self._rank, share, flat.numel())
        self._add(sums[self._rank][: stop - start], offset // itemsize + start, by_tree=by_tree)
        self._memory.barrier()
        for rank in range(self._size):
            start, stop = _share_of(rank, share, flat.numel())
            flat[start:stop] = sums[rank][: stop - start]

    def _add(self, out: Tensor, first: int, *, by_tree: bool) -> None:
        count = out.numel()
        if count:
            sum_kernels.add_parts[(-(-count // sum_kernels.BLOCK),)](
                *(self._memory.addresses, out, first, count),
                RANKS=self._size,
                BLOCK=sum_kernels.BLOCK,
                BY_TREE=by_tree,
                **sum_kernels.LAUNCH,
            )


def half_bytes(part_bytes: int, size: int) -> int:
    """Bytes of one of the two halves of each rank's memory: a part of `part_bytes`, and the sums of a share of it."""
    part = part_bytes // _ALIGNED * _ALIGNED
    share = -(-part // size)
    return part + -(-share // _ALIGNED) * _ALIGNED + _ALIGNED


def _share_of(rank: int, share: int, count: int) -> tuple[int, int]:
    return min(rank * share, count), min((rank + 1) * share, count)


def _pieces(values: Tensor, most: int) -> Iterator[Tensor]:
    """Pieces of at most `most` along the first dimension."""
    return iter(torch.split(values, max(most, 1)))
