"""Digests that an ended shard keeps for the merge, because its journal is removed, in order of the rows.

    custom_ids       of the custom_ids of its rows
    media_digests    of the images or audio of its rows

A record is a digest of 16 bytes and 8 bytes (the most significant first) of twice the row's index, and one more if the
parser rejected the row's line: such a row is an error whichever row has its custom_id.
"""

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_worker.base.files import write_pieces

CUSTOM_IDS_NAME: Final = "custom_ids"
MEDIA_NAME: Final = "media_digests"
_RECORD: Final = np.dtype([("digest", "<u8", 2), ("row", ">u8")])
_READ_RECORDS: Final = 4096


class KeptDigest(NamedTuple):
    """One record."""

    digest: bytes
    row: int
    is_rejected: bool


class KeptDigestsError(ValueError):
    """The file has other records than the shard wrote."""


def keep_digests(folder: Path, in_order: "Callable[[], Iterable[NDArray[Any]]]") -> dict[str, str]:
    """Write both files, of the records (RECORD_TYPE) that `in_order` returns in order of the rows. Returns the digest
    of each file's bytes, by its name. Raises OSError.
    """
    digests = {}
    for name, field in ((CUSTOM_IDS_NAME, "custom_id"), (MEDIA_NAME, "media_digest")):
        digest = blake2b(digest_size=16)
        write_pieces(folder / name, _packed(in_order(), field, digest.update))
        digests[name] = digest.hexdigest()
    return digests


def read_kept(path: Path, expected: Any) -> Iterator[KeptDigest]:
    """The records of a file. Raises OSError, and at their end KeptDigestsError if its digest is not `expected`."""
    digest = blake2b(digest_size=16)
    with open(path, "rb") as file:
        while data := file.read(_RECORD.itemsize * _READ_RECORDS):
            digest.update(data)
            for start in range(0, len(data) - _RECORD.itemsize + 1, _RECORD.itemsize):
                row, is_rejected = divmod(int.from_bytes(data[start + 16 : start + _RECORD.itemsize], "big"), 2)
                yield KeptDigest(data[start : start + 16], row, bool(is_rejected))
    if digest.hexdigest() != expected:
        raise KeptDigestsError(f"{path} is damaged: its digest is not that of the shard's manifest")


def _packed(found: "Iterable[NDArray[Any]]", field: str, digest: Callable[[bytes], None]) -> Iterator[bytes]:
    """The records whose digest in `field` is not zeros."""
    for records in found:
        some = records[records[field].any(axis=1)]
        packed = np.empty(len(some), _RECORD)
        packed["digest"], packed["row"] = some[field], 2 * some["row"] + some["is_rejected"]
        digest(data := packed.tobytes())
        yield data
