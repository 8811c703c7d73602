"""What a device has and what is taken of it, measured: the figures that size the cache.

On CUDA only our own allocator and the device's free memory at the start are trusted, because a co-tenant may take or
free memory meanwhile. On the CPU activations are computed, not profiled: a forward pass of the largest step would take
seconds of every start, and the host's allocator returns what a step held.
"""

from collections.abc import Callable

import torch

from kv_cache.cache_sizing import MemoryMeasurement
from spmd_worker.memory import host


def measure_host(weights: int, activations: int, local_world_size: int) -> MemoryMeasurement:
    """This rank's share of the host: what is available now plus what it holds already, split among the node's ranks."""
    resident = host.resident_bytes()
    share = host.available_bytes() // local_world_size + resident
    outside = max(resident - weights, 0)
    return MemoryMeasurement(min(share, host.total_bytes()), weights, activations, outside)


def measure_cuda(
    device: torch.device, weights: int, free_at_start: int, forward: Callable[[], None]
) -> MemoryMeasurement:
    """Run the largest step once and see what our allocator held beyond the weights.

    `free_at_start` bytes were free on the device before this rank took any, so co-tenants are not counted as ours.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    forward()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    reserved = torch.cuda.memory_reserved(device)
    free_now, _ = torch.cuda.mem_get_info(device)
    outside = max(free_at_start - free_now - reserved, 0)
    torch.cuda.empty_cache()
    return MemoryMeasurement(free_at_start, weights, activations, outside)
