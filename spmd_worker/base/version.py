"""Code identity: the version, and a fingerprint of every source file. Ranks that run different code are detected at
start.
"""

from functools import cache
from hashlib import blake2b
from importlib import metadata
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
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
                digest.update(blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
