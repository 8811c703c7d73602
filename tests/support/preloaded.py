"""Libraries in C that tests preload into a program of their own, compiled when they are needed.

Knows a C compiler. Knows nothing of what the libraries do.
"""

import shutil
import subprocess
from pathlib import Path


def build(name: str, folder: Path) -> Path:
    """`tests/support/NAME.c`, compiled into `folder`. Tests need a compiler, for emulated instructions too."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, f"tests/support/{name}.c needs a C compiler: install gcc"
    source, library = Path(__file__).with_name(f"{name}.c"), folder / f"{name}.so"
    command = [compiler, "-Wall", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-lpthread"]
    subprocess.run(command, check=True, timeout=240)
    return library
