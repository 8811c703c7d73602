"""Code identity: the version, and a fingerprint of every source file. Ranks that run different code are detected at
start.
"""

import os
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from importlib import metadata
from itertools import chain
from pathlib import Path

_PACKAGES = ("spmd_worker", "kv_cache")


@cache
def version() -> str:
    """The installed version; "0+unknown" when run from a tree that is not installed."""
    try:
        return metadata.version("spmd-worker")
    except metadata.PackageNotFoundError:
        return "0+unknown"


@cache
def code_fingerprint() -> str:
    """Hex digest over the names and contents of the packages' source files, wherever they are installed."""
    root = Path(__file__).resolve().parents[2]
    digest = blake2b(digest_size=16)
    for path in sorted(chain.from_iterable(_source_files(root / package) for package in _PACKAGES)):
        digest.update(f"{os.path.relpath(path, root)}\0".encode())
        with open(path, "rb", buffering=0) as stream:
            digest.update(blake2b(stream.read()).digest())
    return digest.hexdigest()


def _source_files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in names if name.endswith((".py", ".cpp", ".h")))
