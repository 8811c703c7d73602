"""Shared-memory collectives between the ranks of one node, several times as fast as gloo's (`shared_memory.cpp`).

The memory is anonymous: the first rank makes it, the others open it through that rank's process, and it is freed when
the last of them ends. Ranks on several nodes, or without support by the system, keep gloo. A waiting rank notices at
once that another one is gone.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import struct
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor

from spmd_worker.base.errors import PeerLostError
from spmd_worker.base.process import node_name
from spmd_worker.native.library import NativeLibrary, native_library
from spmd_worker.ranks.communicator import GroupHandle

logger = logging.getLogger(__name__)

WAITS_FOR_RANKS: Final = True
"""Marker for the watchdog, which finds it in the module of a frame."""

SLOT_BYTES: Final = 32 << 20
"""A rank's slot in one round: bigger tensors take several rounds. Pages never written use no memory."""

_SPIN_NS: Final = 200_000
"""Spinning time before a rank with its own core sleeps: about as long as ranks are apart in a layer."""

_MOST_RANKS: Final = 64

_INTRODUCTION: Final = struct.Struct("<16sqq")
_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Dtypes of sums, as names of functions end."""
_FEW_ELEMENTS: Final = 32768
"""Minimum elements of a sum with its norm: below this, splitting its rows among ranks costs more than it saves."""
_TIMED_OUT: Final = -1


class SharedMemoryGroup:
    """Implements `communicator.Collectives` for tensors in host memory. Use `share_memory`.

    Every rank of the group makes the same calls in the same order, with equal shapes. Raises PeerLostError when a rank
    has gone, or was silent for `timeout_s`.
    """

    def __init__(
        self,
        library: NativeLibrary,
        group: GroupHandle,
        memory: mmap.mmap,
        pids: list[int],
        timeout_s: float,
        has_own_core: bool,
    ) -> None:
        self._owner = os.getpid()
        self._functions, self._ranks, self._rank = library.functions, group.ranks, group.rank
        self._memory: mmap.mmap | None = memory
        self._anchor: Any = ctypes.c_char.from_buffer(memory)
        numbers = (group.rank, group.size + group.rank, 2 * group.size)
        # By address: this rank's two slots for its parts, and the common one.
        self._slots = {
            slot[torch.float32].data_ptr(): slot for slot in (_slot(memory, number, group.size) for number in numbers)
        }
        self._watched = [_watch(pid) if pid != os.getpid() else -1 for pid in pids]
        self._processes = (ctypes.c_int32 * len(pids))(*self._watched)
        self._group = (
            *(ctypes.addressof(self._anchor), group.rank, group.size, SLOT_BYTES),
            *(_SPIN_NS if has_own_core else 0, int(timeout_s * 1e9), ctypes.addressof(self._processes)),
            _FEW_ELEMENTS,
        )

    def takes(self, tensor: Tensor) -> bool:
        return tensor.dtype in _NAMES

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the group, in place, in the order of the ranks; returns its argument, or a new tensor if it is in a
        slot.
        """
        if self._holds(tensor):
            tensor = tensor.clone()
        values = tensor.contiguous()
        function = self._functions[f"shared_sum_{_NAMES[tensor.dtype]}"]
        self.check(function(*self._group, values.data_ptr(), values.numel()))
        return tensor if values is tensor else tensor.copy_(values)

    def sum_parts(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """A new tensor: the part may be in a slot, which other ranks read."""
        assert part.dtype == torch.float32, part.dtype
        own = part.contiguous()
        total = torch.empty(own.shape, dtype=dtype if dtype in _NAMES else torch.float32)
        function = self._functions[f"shared_sum_parts_{_NAMES[total.dtype]}"]
        self.check(function(*self._group, own.data_ptr(), own.numel(), total.data_ptr()))
        return total.to(dtype)

    def part_buffer(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """Buffer [T, H], valid until the next exchange."""
        if dtype not in _NAMES:
            return None
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        return self._at(self._functions["shared_next_part"](*self._group, num_bytes), shape, dtype)

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.dtype == torch.float32, x.dtype
        assert residual.dtype == weight.dtype, (residual.dtype, weight.dtype)
        assert x.shape == residual.shape, (x.shape, residual.shape)
        assert weight.shape == x.shape[1:], (weight.shape, x.shape)
        assert all(each.is_contiguous() for each in (x, residual, weight)), "contiguous"
        num_rows, size = x.shape
        assert size * x.element_size() <= SLOT_BYTES, x.shape
        common = self._common_norms(residual)
        normed = torch.empty_like(residual) if common is None else common
        self.check(
            self._functions[f"shared_sum_add_rms_norm_{_NAMES[residual.dtype]}"](
                *(*self._group, x.data_ptr(), residual.data_ptr(), num_rows, size),
                *(weight.data_ptr(), eps, normed.data_ptr()),
            )
        )
        return normed

    def addresses(self) -> tuple[int, ...]:
        """The group's arguments of `layers.cpp`."""
        assert self._anchor is not None, "the group is open"
        return self._group

    def gather_rows(self, residual: Tensor) -> Tensor:
        if self._common_norms(residual) is None:
            return residual
        num_rows, size, rank = len(residual), len(self._ranks), self._rank
        bounds = [num_rows * each // size for each in range(size + 1)]
        longest = max(bounds[each + 1] - bounds[each] for each in range(size))
        own = torch.zeros((longest, residual.shape[1]), dtype=residual.dtype)
        own[: bounds[rank + 1] - bounds[rank]] = residual[bounds[rank] : bounds[rank + 1]]
        for each, rows in enumerate(self.all_gather(own)):
            residual[bounds[each] : bounds[each + 1]] = rows[: bounds[each + 1] - bounds[each]]
        return residual

    def _holds(self, tensor: Tensor) -> bool:
        assert self._memory is not None, "the group is open"
        return 0 <= tensor.data_ptr() - ctypes.addressof(self._anchor) < len(self._memory)

    def _common_norms(self, residual: Tensor) -> Tensor | None:
        """Slot that collects the norms of such a residual stream; None if each rank computes all of them."""
        address = self._functions["shared_common_norms"](*self._group, residual.numel())
        return self._at(address, (residual.shape[0], residual.shape[1]), residual.dtype)

    def _at(self, address: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        return None if address == 0 else self._slots[address][dtype][: shape[0] * shape[1]].view(shape)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Equal shapes [...] -> [size, ...], in group order."""
        own = tensor.contiguous()
        gathered = torch.empty((len(self._ranks), *own.shape), dtype=own.dtype)
        num_bytes = own.numel() * own.element_size()
        self.check(self._functions["shared_gather"](*self._group, own.data_ptr(), num_bytes, gathered.data_ptr()))
        return gathered

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Copy the tensor of the rank at index `source` of the group to all, in place; returns its argument."""
        data = tensor.contiguous()
        num_bytes = data.numel() * data.element_size()
        self.check(self._functions["shared_broadcast"](*self._group, source, data.data_ptr(), num_bytes))
        return tensor if data is tensor else tensor.copy_(data)

    def carries(self, tensor: Tensor) -> bool:
        return tensor.numel() * tensor.element_size() <= SLOT_BYTES

    def send_next(self, tensor: Tensor) -> None:
        """Returns when the tensor is copied, which is at once unless the next rank is two messages behind: the wait is
        here, because no later call may come to send a deferred message.
        """
        tensor = tensor.contiguous()
        num_bytes = tensor.numel() * tensor.element_size()
        self.check(self._functions["shared_send"](*self._group, tensor.data_ptr(), num_bytes))

    def receive_previous(self, tensor: Tensor) -> None:
        """Waits until the tensor, which must be contiguous, is received."""
        assert tensor.is_contiguous(), tensor.stride()
        num_bytes = tensor.numel() * tensor.element_size()
        self.check(self._functions["shared_receive"](*self._group, tensor.data_ptr(), num_bytes))

    def close(self) -> None:
        """Release the memory and notify ranks that wait for this one. Idempotent; does nothing in a forked process."""
        if self._anchor is None or os.getpid() != self._owner:
            return
        self._functions["shared_leave"](*self._group)
        # Unmapped when no tensor in a slot is left.
        self._anchor = self._memory = None
        self._slots.clear()
        for descriptor in self._watched:
            if descriptor >= 0:
                os.close(descriptor)

    def check(self, result: int) -> None:
        """Raise PeerLostError unless the result of a compiled function is 0."""
        if result == _TIMED_OUT:
            raise PeerLostError("shared memory: timed out waiting for another rank")
        if result:
            raise PeerLostError(f"shared memory: rank {self._ranks[result - 1]} has left")


def share_memory(group: GroupHandle, timeout_s: float) -> GroupHandle:
    """The group with faster collectives, if available on all of its ranks, each of which calls this."""
    if group.size == 1:
        return group
    library = native_library()
    functions = {} if isinstance(library, str) or group.size > _MOST_RANKS else library.functions
    header_bytes = functions["shared_header_bytes"](group.size) if "shared_header_bytes" in functions else 0
    num_bytes = header_bytes + _num_slots(group.size) * SLOT_BYTES if header_bytes else 0
    descriptor = _make_memory(num_bytes) if group.rank == 0 and num_bytes else -1
    try:
        memory, pids = _map_together(group, descriptor, num_bytes)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if memory is None or isinstance(library, str):
        logger.info("ranks %s do not share memory: they exchange tensors over gloo", list(group.ranks))
        return group
    has_own_core = _num_cores() >= len(pids)
    return replace(group, fast=SharedMemoryGroup(library, group, memory, pids, timeout_s, has_own_core))


def _map_together(group: GroupHandle, descriptor: int, num_bytes: int) -> tuple[mmap.mmap | None, list[int]]:
    """The memory of the first rank's `descriptor`, mapped on every rank or on none; and all process ids."""
    node = blake2b(node_name().encode(), digest_size=16).digest() if node_name() and num_bytes else os.urandom(16)
    introductions = _exchange(group, _INTRODUCTION.pack(node, os.getpid(), descriptor))
    nodes, pids, descriptors = zip(*map(_INTRODUCTION.unpack, introductions), strict=True)
    memory = None
    if len(dict.fromkeys(nodes)) == 1 and descriptors[0] >= 0:
        memory = _map_memory(f"/proc/{pids[0]}/fd/{descriptors[0]}", num_bytes)
    # The first rank closes it only after all have opened it.
    if all(part == b"1" for part in _exchange(group, b"0" if memory is None else b"1")):
        return memory, list(pids)
    if memory is not None:
        memory.close()
    return None, list(pids)


def _num_slots(group_size: int) -> int:
    """Slots of even rounds, of odd rounds, a common one, and of messages with even and odd numbers."""
    return 4 * group_size + 1


def _slot(memory: mmap.mmap, number: int, group_size: int) -> dict[torch.dtype, Tensor]:
    """A slot as a flat tensor of each dtype."""
    start = len(memory) - (_num_slots(group_size) - number) * SLOT_BYTES
    return {
        dtype: torch.frombuffer(memory, dtype=dtype, count=SLOT_BYTES // dtype.itemsize, offset=start)
        for dtype in _NAMES
    }


def _make_memory(num_bytes: int) -> int:
    """Descriptor of zeroed memory without a name; -1 if the system does not support it."""
    try:
        descriptor = os.memfd_create("spmd-worker", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
    except (OSError, AttributeError):
        return -1
    return descriptor


def _map_memory(path: str, num_bytes: int) -> mmap.mmap | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return mmap.mmap(descriptor, num_bytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _watch(pid: int) -> int:
    """Descriptor that is readable when the process has gone; -1 if the system does not support it."""
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return -1


def _num_cores() -> int:
    """Cores of this node's ranks: all cores if each rank is bound to one, else those this process may use."""
    bound = len(os.sched_getaffinity(0))
    return os.cpu_count() or 1 if bound == 1 else bound


def _exchange(group: GroupHandle, part: bytes) -> list[bytes]:
    """Gather parts of equal lengths over the group."""
    own = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    return [bytes(row) for row in group.all_gather(own).numpy()]
