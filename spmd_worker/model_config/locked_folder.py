"""Folders of a cache that one process makes while the others wait: a lock of the kernel, and names that are digests."""

import contextlib
import fcntl
import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`, which the kernel releases when the process ends."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def short_digest(value: object) -> str:
    """A digest of what JSON can say, 16 hexadecimal digits."""
    return blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
