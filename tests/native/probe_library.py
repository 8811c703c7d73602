"""Compiles a C++ file beside the tests, which sees what the compiled kernels keep to themselves."""

import ctypes
import functools
import subprocess
from pathlib import Path

from run_folder import made_once

from spmd_worker.native import build


def probe_library(source_name: str, folder: Path, *more_flags: str) -> ctypes.CDLL:
    """Of tests/native/`source_name`, with the kernels' headers and the threads' source; the library is in `folder`."""
    sources, library = Path(build.__file__).parent, folder / f"{source_name}.so"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-O0", "-fPIC", "-shared", f"-I{sources}"]
    source = Path(__file__).with_name(source_name)
    command = [
        *build._compilers()[0],
        *flags,
        *more_flags,
        source,
        sources / "thread_pool.cpp",
        "-pthread",
        "-o",
        library,
    ]
    subprocess.run(list(map(str, command)), check=True, timeout=240)
    return ctypes.CDLL(str(library))


@functools.cache
def divided_work() -> ctypes.CDLL:
    """divided_work.cpp, compiled once for the files of this run's tests that look into it."""

    def make(folder: Path) -> None:
        folder.mkdir()
        probe_library("divided_work.cpp", folder)

    return ctypes.CDLL(str(made_once("divided_work", make) / "divided_work.cpp.so"))
