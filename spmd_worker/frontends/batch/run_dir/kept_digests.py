"""Digests that an ended shard keeps for the merge, because its journal is removed.

    custom_ids       of the custom_ids of its rows, in order of the digests, so that a merge finds equal ones
    media_digests    of the images or audio of its rows, in order of the rows

A record is a digest of 16 bytes and 8 bytes (the most significant first) of twice the row's index, and one more if the
parser rejected the row's line: such a row is an error whichever row has its custom_id.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from spmd_worker.base.files import write_file
from spmd_worker.frontends.batch.run_dir.journal import NO_CUSTOM_ID, JournalRecord

CUSTOM_IDS_NAME: Final = "custom_ids"
MEDIA_NAME: Final = "media_digests"
_RECORD_BYTES: Final = 24
_READ_RECORDS: Final = 4096


class KeptDigest(NamedTuple):
    """One record; in order of the digests, then of the rows."""

    digest: bytes
    row: int
    is_rejected: bool


class KeptDigestsError(ValueError):
    """The file has other records than the shard wrote."""


def keep_digests(folder: Path, records: Iterable[JournalRecord]) -> dict[str, str]:
    """Write both files. Returns the digest of each file's bytes, by its name. Raises OSError."""
    custom_ids, media = bytearray(), bytearray()
    for record in records:
        if record.custom_id != NO_CUSTOM_ID:
            custom_ids += _pack(record.custom_id, record.row, record.is_rejected)
        if record.media_digest:
            media += _pack(bytes.fromhex(record.media_digest), record.row, record.is_rejected)
    contents = {CUSTOM_IDS_NAME: _sorted(custom_ids, (0, 1, 2)), MEDIA_NAME: _sorted(media, (2,))}
    for name, content in contents.items():
        write_file(folder / name, content)
    return {name: blake2b(content, digest_size=16).hexdigest() for name, content in contents.items()}


def read_kept(path: Path, expected: Any) -> Iterator[KeptDigest]:
    """The records of a file. Raises OSError, and at their end KeptDigestsError if its digest is not `expected`."""
    digest = blake2b(digest_size=16)
    with open(path, "rb") as file:
        while data := file.read(_RECORD_BYTES * _READ_RECORDS):
            digest.update(data)
            for start in range(0, len(data) - _RECORD_BYTES + 1, _RECORD_BYTES):
                row, is_rejected = divmod(int.from_bytes(data[start + 16 : start + _RECORD_BYTES], "big"), 2)
                yield KeptDigest(data[start : start + 16], row, bool(is_rejected))
    if digest.hexdigest() != expected:
        raise KeptDigestsError(f"{path} is damaged: its digest is not that of the shard's manifest")


def _pack(digest: bytes, row: int, is_rejected: bool) -> bytes:
    return digest + (2 * row + is_rejected).to_bytes(8, "big")


def _sorted(records: bytearray, columns: tuple[int, ...]) -> bytes:
    """The records, by these columns of 8 bytes."""
    rows = np.frombuffer(records, ">u8").reshape(-1, _RECORD_BYTES // 8)
    return rows[np.lexsort([rows[:, column] for column in reversed(columns)])].tobytes()
