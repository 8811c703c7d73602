"""Compiles kernels before they are launched, several at a time, from launches that compute nothing.

    with compiling(device, num_threads) as compiled:
        ...  # launches of this thread

Triton compiles a kernel for each specialisation of its arguments when it is first launched, and some versions have a C
compiler build its launcher: one after another these take most of a first start. Triton keeps both in its cache folder
(TRITON_CACHE_DIR), so a second start only loads them. A kernel that cannot be compiled is left to its first launch,
which raises the error.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

_ALLOCATIONS: Final = frozenset(("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"))


@dataclass(slots=True)
class Compiled:
    """Whether each kernel that was not loaded yet came from the cache folder."""

    cache_hits: list[bool] = field(default_factory=list)

    def __str__(self) -> str:
        num_compiled = self.cache_hits.count(False)
        return f"{num_compiled} compiled, {len(self.cache_hits) - num_compiled} cached"


class _Compilers:
    """Compiles in threads and loads what was compiled; Triton calls it as an executor."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self._threads.submit(_loaded, compile_kernel)


class ZeroedMemory(TorchFunctionMode):
    """Zero-fills this thread's allocations by torch's functions: outputs that nobody computed may be used as indices.
    A mode of dispatch would see all of torch's own too, and import its compiler, which takes seconds.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **options or {})
        return result.zero_() if getattr(function, "__name__", "") in _ALLOCATIONS else result


@contextmanager
def compiling(device: torch.device, num_threads: int) -> Iterator[Compiled]:
    """Context in which launches of the calling thread compile kernels for `device` and compute nothing: what they would
    write is 0. Compiled kernels are loaded at its end. Other threads launch as always.
    """
    launch, listener = JITFunction.run, triton.knobs.compilation.listener
    owner, compiled = threading.get_ident(), Compiled()

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        only_compiles = warmup or threading.get_ident() == owner
        return launch(kernel, *arguments, grid=grid, warmup=only_compiles, **options)

    def listen(**facts: Any) -> None:
        compiled.cache_hits.append(facts["cache_hit"])
        if listener is not None:
            listener(**facts)

    def enter_thread() -> None:
        # Without an index it is the current one, which is a new thread's too if it is the first.
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)

    try:
        with ThreadPoolExecutor(num_threads, "compile-kernels", enter_thread) as threads:
            JITFunction.run = compile_only
            triton.knobs.compilation.listener = listen
            with triton.AsyncCompileMode(_Compilers(threads), ignore_errors=True), ZeroedMemory():
                yield compiled
    finally:
        JITFunction.run, triton.knobs.compilation.listener = launch, listener


def _loaded(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    # The launch raises it again.
    with suppress(OutOfResources):
        # Loads the kernel, and builds its launcher.
        _ = kernel.run
    return kernel
