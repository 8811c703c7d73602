"""How many threads the compiled kernels take: as many as torch would, or those that torch leaves to them.

Torch's own threads are OpenMP's, which spin for milliseconds after each of its operations and take the cores from the
kernels' threads (team.h) meanwhile. In a step nearly all is computed by the kernels, so torch computes the rest of it
with the calling thread alone.
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class _Left(threading.local):
    num_threads: int | None = None


_left = _Left()


def num_threads() -> int:
    """Of one call of a kernel, the calling thread among them."""
    return torch.get_num_threads() if _left.num_threads is None else _left.num_threads


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """Inside, torch's operations take one thread and the kernels as many as torch did; in this thread only. May be
    nested.
    """
    threads, set_openmp_threads = num_threads(), _set_openmp_threads()
    if threads == 1 or _left.num_threads is not None or set_openmp_threads is None:
        yield
        return
    _left.num_threads = threads
    set_openmp_threads(1)
    try:
        yield
    finally:
        _left.num_threads = None
        set_openmp_threads(threads)


def keep_alone() -> None:
    """From now on torch's operations take one thread in the calling thread: one of a pool whose threads are as many as
    the cores, each of which would start as many again. Nothing where torch has another OpenMP than GNU's.
    """
    set_openmp_threads = _set_openmp_threads()
    if set_openmp_threads is not None:
        torch.get_num_threads()  # A thread's first question takes over what was set for all.
        set_openmp_threads(1)


def torchs_threads_sleep() -> bool:
    """Whether torch's threads sleep as soon as they have nothing to do, which OpenMP reads when torch is imported
    (`distributed.cores.waiting_variables`).
    """
    return os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"


@functools.cache
def _set_openmp_threads() -> Callable[[int], Any] | None:
    """OpenMP's own, which counts for the calling thread; torch's counts for threads that start meanwhile, too. None
    where torch has another OpenMP than GNU's.
    """
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
    except (OSError, AttributeError):
        return None
    function = library.omp_set_num_threads
    function.argtypes, function.restype = (ctypes.c_int,), None
    function(before := torch.get_num_threads())
    return function if torch.get_num_threads() == before else None
