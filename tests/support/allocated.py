"""Bytes that torch's allocator gives at once while something is computed on the CPU."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(compute: Callable[[], object]) -> int:
    """Those that are given at most, without what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        compute()
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
