"""How many threads the compiled kernels take: as many as torch would, or those that torch leaves to them.

Torch's own threads are OpenMP's, which spin for milliseconds after each of its operations and take the cores from the
kernels' threads (thread_pool.h) meanwhile. In a step nearly all is computed by the kernels, so torch computes the rest of it
with the calling thread alone.
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


class _Left(threading.local):
    num_threads: int | None = None


_left = _Left()


def num_threads() -> int:
    """Of one call of a kernel, the calling thread among them."""
    return torch.get_num_threads() if _left.num_threads is None else _left.num_threads


@contextlib.contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Inside, torch's operations take one thread and the kernels as many as torch did; in this thread only. May be
    nested.
    """
    threads = num_threads()
    # With one thread nothing is to be done, and it could not be seen whose OpenMP that is.
    set_openmp_threads = None if threads == 1 or _left.num_threads is not None else _set_openmp_threads()
    if set_openmp_threads is None:
        yield
        return
    try:
        _left.num_threads = threads
        set_openmp_threads(1)
        yield
    finally:
        set_openmp_threads(threads)
        _left.num_threads = None


@contextlib.contextmanager
def multi_threaded_torch() -> Iterator[None]:
    """Inside `single_threaded_torch`, where torch's operations are large after all: with as many threads as elsewhere."""
    set_openmp_threads = None if _left.num_threads is None else _set_openmp_threads()
    if set_openmp_threads is None:
        yield
        return
    threads = num_threads()
    try:
        set_openmp_threads(threads)
        _left.num_threads = None
        yield
    finally:
        _left.num_threads = threads
        set_openmp_threads(1)


def use_single_threaded_torch() -> None:
    """From now on torch's operations take one thread in the calling thread: one of a pool whose threads are as many as
    the cores, each of which would start as many again. Nothing where torch has another OpenMP than GNU's.
    """
    set_openmp_threads = _set_openmp_threads()
    if set_openmp_threads is not None:
        torch.get_num_threads()  # A thread's first question takes over what was set for all.
        set_openmp_threads(1)


def torch_threads_are_passive() -> bool:
    """Whether torch's threads sleep as soon as they have nothing to do, which OpenMP reads when torch is imported
    (`distributed.cores.waiting_variables`).
    """
    return os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"


@functools.cache
def _set_openmp_threads() -> Callable[[int], Any] | None:
    """OpenMP's own, which counts for the calling thread; torch's counts for threads that start meanwhile, too. None
    where torch has another OpenMP than GNU's.
    """
    before = torch.get_num_threads()
    for path in _openmp_libraries():
        try:
            function = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL).omp_set_num_threads
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = (ctypes.c_int,), None
        was_called = False
        try:
            # Another number than the one in force, which says nothing.
            function(before + 1)
            was_called = torch.get_num_threads() == before + 1
        finally:
            function(before)
        if was_called:
            return function
    return None


def _openmp_libraries() -> list[str]:
    """Those of GNU that are in this process: torch's may have a name of its own, and another package bring another."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "libgomp" in line}
    return sorted(paths)
