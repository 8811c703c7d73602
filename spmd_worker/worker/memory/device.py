"""Measures a device's memory and its use, to size the cache.

A co-tenant may allocate or free memory at any time, so only this process's own memory and one reading of the free
memory are trusted. Readings of the device are compared only to find what is allocated outside torch's allocator, by
this process (NCCL, loaded kernels, symmetric memory) or by others since the start, which cannot be told apart: the
cache gets less for either, and memory that others free meanwhile hides none of it and is not taken. On the CPU the
maximum step, which takes seconds, runs only if its memory affects the number of blocks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch

from kv_cache import host_reserve
from kv_cache.cache_sizing import MemoryMeasurement
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.worker.memory import host

PreparedStep = AbstractContextManager[Callable[[], None]]
"""Context that has allocated everything but the step's own memory, with a function that runs the step once."""


def measure_host(weights: int, activations: int, local_world_size: int) -> MemoryMeasurement:
    """This rank's share of the host: the available memory, divided among the node's ranks, plus what it holds already.
    `weights` and `activations`, an estimate, are in bytes.
    """
    reserve = host_reserve.offered()
    # Prefaulted memory belongs to the cache.
    committed = 0 if reserve is None else reserve.committed_bytes
    resident = max(host.resident_bytes() - committed, 0)
    share = host.available_bytes() // local_world_size + resident + committed
    outside = max(resident - weights, 0)
    return MemoryMeasurement(min(share, host.total_bytes()), weights, activations, outside, "estimated")


def profile_host(measurement: MemoryMeasurement, max_step: PreparedStep) -> MemoryMeasurement:
    """`measurement` with the measured activations of the maximum step: the growth of this process. The step contains
    collectives, so it runs even if this rank cannot measure.
    """
    with max_step as run:
        can_see = host.restart_peak()
        before = host.resident_bytes()
        run()
        peak = host.peak_since_restart_bytes()
    if not can_see or peak is None:
        return replace(measurement, activation_note="estimated: /proc does not let this process see its peak")
    return replace(measurement, activation_bytes=max(peak - before, 0), activation_note="measured")


class DeviceReading(NamedTuple):
    """Bytes free on a GPU, and those that torch's allocator holds in this process, perhaps for a trainer."""

    free: int
    reserved: int


def read_cuda(device: torch.device) -> DeviceReading:
    """The present reading; the device's context exists after it."""
    return DeviceReading(torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device))


def outside_bytes(readings: Sequence[DeviceReading]) -> int:
    """The largest rise, from any reading to any later one, of memory that is neither free nor torch's: on a quiet
    device the rise from the first to the last.
    """
    rise = 0
    lowest = -(readings[0].free + readings[0].reserved)
    for reading in readings:
        outside = -(reading.free + reading.reserved)
        rise, lowest = max(rise, outside - lowest), min(lowest, outside)
    return rise


def measure_cuda(
    device: torch.device, weights: int, at_start: Sequence[DeviceReading], max_step: PreparedStep
) -> MemoryMeasurement:
    """Run the maximum step once and measure what the allocator held beyond the weights. `at_start` are readings of this
    start so far, the first from before this rank allocated any: the cache may use a share of what was free then.
    """
    readings = [*at_start, read_cuda(device)]
    with max_step as run:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        activations = max(torch.cuda.max_memory_allocated(device) - before, 0)
        readings.append(read_cuda(device))
    torch.cuda.empty_cache()
    return MemoryMeasurement(at_start[0].free, weights, activations, outside_bytes(readings), "measured")


def give_back_freed(device: torch.device) -> None:
    """Return freed memory that torch and libc keep to the system; with CUDA also pinned host memory, after pending
    copies.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        # Not public; builds without CUDA lack it.
        if empty_pinned := getattr(torch._C, "_host_emptyCache", None):
            empty_pinned()
    host.give_back_freed()


def is_on_any_rank(group: GroupHandle, flag: bool) -> bool:
    """Whether `flag` is set on any rank of a CPU group; all ranks must call this."""
    return bool(group.all_reduce(torch.tensor([int(flag)])).item())
