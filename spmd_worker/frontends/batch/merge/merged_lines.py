"""Lines of a job's parts as the job in one piece writes them: a later row with the custom_id of an earlier one, in
another part, is an error row.
"""

import contextlib
import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from spmd_worker.base.digest_set import DigestSet
from spmd_worker.frontends.batch.run_dir.kept_digests import KeptDigest
from spmd_worker.frontends.openai.row import ErrorShape
from spmd_worker.frontends.openai.row_parser import duplicate_error
from spmd_worker.frontends.openai.row_writer import format_error


def later_duplicates(custom_ids: Iterable[KeptDigest], folder: Path | None = None) -> "array[int]":
    """The rows, in order, whose custom_id an earlier row has and whose line the parser accepted; `custom_ids` are of
    all rows, in order. `folder` is for a temporary file. Raises OSError.
    """
    with contextlib.closing(DigestSet(folder)) as seen:
        return array("Q", [row for digest, row, is_rejected in custom_ids if seen.add(digest) and not is_rejected])


def merged_lines(lines: Iterable[tuple[int, bytes]], duplicates: Sequence[int]) -> Iterator[bytes]:
    """The lines of (row, line) in order of the rows, those of `duplicates` as error rows."""
    number = 0
    for row, line in lines:
        if number < len(duplicates) and duplicates[number] == row:
            number += 1
            yield duplicate_line(row, line)
        else:
            yield line


def is_duplicate(duplicates: Sequence[int], row: int) -> bool:
    """Whether the row is one of the duplicates, which are in order."""
    slot = bisect_left(duplicates, row)
    return slot < len(duplicates) and duplicates[slot] == row


def duplicate_line(row: int, line: bytes) -> bytes:
    """The error line of a row whose custom_id an earlier one had, from its answer."""
    answer = json.loads(line)
    # Only OpenAI's rows have a response, also in errors.
    shape: ErrorShape = "openai" if "response" in answer else "plain"
    return format_error(duplicate_error(row, answer["custom_id"], shape))
