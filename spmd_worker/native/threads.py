"""Number of threads of the compiled kernels: as many as torch has, or those that torch leaves to them.

Torch's OpenMP threads spin for milliseconds after each of its operations and take the cores from the kernels' threads
(thread_pool.h) meanwhile. Most of a step is computed by the kernels, so torch computes the rest with the calling thread
alone.
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


class _Local(threading.local):
    num_threads: int | None = None


_local = _Local()


def num_threads() -> int:
    """Threads of one call of a kernel, the calling thread included."""
    return torch.get_num_threads() if _local.num_threads is None else _local.num_threads


@contextlib.contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Torch's operations have one thread and the kernels all of torch's, in the calling thread. May be nested."""
    threads = num_threads()
    # With one thread there is nothing to do, and `_set_openmp_threads` could not identify torch's OpenMP.
    set_openmp_threads = None if threads == 1 or _local.num_threads is not None else _set_openmp_threads()
    if set_openmp_threads is None:
        yield
        return
    try:
        _local.num_threads = threads
        set_openmp_threads(1)
        yield
    finally:
        set_openmp_threads(threads)
        _local.num_threads = None


@contextlib.contextmanager
def multi_threaded_torch() -> Iterator[None]:
    """All threads for large operations of torch, inside `single_threaded_torch`."""
    set_openmp_threads = None if _local.num_threads is None else _set_openmp_threads()
    if set_openmp_threads is None:
        yield
        return
    threads = num_threads()
    try:
        set_openmp_threads(threads)
        _local.num_threads = None
        yield
    finally:
        _local.num_threads = threads
        set_openmp_threads(1)


def use_single_threaded_torch() -> None:
    """Limit torch's operations in the calling thread to one thread for good: for each thread of a pool with one thread
    per core. Does nothing if torch's OpenMP is not GNU's.
    """
    set_openmp_threads = _set_openmp_threads()
    if set_openmp_threads is not None:
        torch.get_num_threads()  # A thread's first call applies the process-wide setting.
        set_openmp_threads(1)


def torch_threads_are_passive() -> bool:
    """Whether torch's threads sleep without spinning, which OpenMP decides when torch is imported."""
    return os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"


@functools.cache
def _set_openmp_threads() -> Callable[[int], Any] | None:
    """OpenMP's own function, which applies to the calling thread; torch's applies to new threads too. None if torch's
    OpenMP is not GNU's.
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
            # A number other than the current one, to see whether torch follows.
            function(before + 1)
            was_called = torch.get_num_threads() == before + 1
        finally:
            function(before)
        if was_called:
            return function
    return None


def _openmp_libraries() -> list[str]:
    """Paths of GNU OpenMP in this process: torch's may have its own name, and other packages may bring others."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "libgomp" in line}
    return sorted(paths)
