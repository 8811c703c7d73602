"""A disk that is full, for this process: no file of its grows beyond so many bytes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_limit(most_bytes: int) -> Iterator[None]:
    """Writes beyond raise OSError (File too large): Python ignores the signal that comes with it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
