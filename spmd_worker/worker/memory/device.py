"""What a device has and what is taken of it, measured: the figures that size the cache.

Only this process's own memory and what is free at one moment are trusted, because a co-tenant may take or free memory
meanwhile: nothing here compares two readings of the whole device but to see what else this process took, and no
difference is ever less than nothing. On the CPU the largest step, which would take seconds of every start, runs only
where its memory decides about the number of blocks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from kv_cache import host_reserve
from kv_cache.cache_sizing import MemoryMeasurement
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.worker.memory import host

PreparedStep = AbstractContextManager[Callable[[], None]]
"""Entered, it has taken the memory that is not the step's own, and gives a function that runs the step once."""


def measure_host(weights: int, activations: int, local_world_size: int) -> MemoryMeasurement:
    """This rank's share of the host: what is available now plus what it holds already, split among the node's ranks.

    `activations` are an estimate, in bytes as `weights` are.
    """
    reserve = host_reserve.offered()
    # What is committed for the cache already is the cache's.
    committed = 0 if reserve is None else reserve.committed_bytes
    resident = max(host.resident_bytes() - committed, 0)
    share = host.available_bytes() // local_world_size + resident + committed
    outside = max(resident - weights, 0)
    return MemoryMeasurement(min(share, host.total_bytes()), weights, activations, outside, "estimated")


def profile_host(measurement: MemoryMeasurement, max_step: PreparedStep) -> MemoryMeasurement:
    """`measurement` with the activations of the largest step as they were seen: by how much this process grew.

    The step contains collectives, so it runs even where the kernel does not let this rank see anything.
    """
    with max_step as run:
        can_see = host.restart_peak()
        before = host.resident_bytes()
        run()
        peak = host.peak_since_restart_bytes()
    if not can_see or peak is None:
        return replace(measurement, activation_note="estimated: /proc does not let this process see its peak")
    return replace(measurement, activation_bytes=max(peak - before, 0), activation_note="measured")


def measure_cuda(
    device: torch.device, weights: int, free_at_start: int, reserved_at_start: int, max_step: PreparedStep
) -> MemoryMeasurement:
    """Run the largest step once and see what our allocator held beyond the weights.

    `free_at_start` bytes were free on the device before this rank took any, so co-tenants are not counted as ours;
    `reserved_at_start` our allocator held already, a trainer's in this process.
    """
    with max_step as run:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        activations = max(torch.cuda.max_memory_allocated(device) - before, 0)
        reserved = torch.cuda.memory_reserved(device)
        free_now, _ = torch.cuda.mem_get_info(device)
    outside = max(free_at_start - free_now - (reserved - reserved_at_start), 0)
    torch.cuda.empty_cache()
    return MemoryMeasurement(free_at_start, weights, activations, outside, "measured")


def give_back_freed(device: torch.device) -> None:
    """Give the system what torch and libc keep of memory that was freed: of the device and, where that is CUDA, what
    was pinned of the host's, of which copies that are not done yet would keep theirs.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        # Has no public name; builds without CUDA lack it.
        if empty_pinned := getattr(torch._C, "_host_emptyCache", None):
            empty_pinned()
    host.give_back_freed()


def is_on_any_rank(group: GroupHandle, flag: bool) -> bool:
    """Whether `flag` is set on any rank of a group on the CPU; the same answer on all of them, who all must call."""
    return bool(group.all_reduce(torch.tensor([int(flag)])).item())
