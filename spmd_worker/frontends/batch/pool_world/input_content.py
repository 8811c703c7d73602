"""Comparison of a world's input with the pool's index: a world that finds no row to answer reads nothing else of it."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.remote_names import FilePath
from spmd_worker.frontends.batch.input.file_pieces import digest_of
from spmd_worker.frontends.batch.input.input_files import open_bytes
from spmd_worker.frontends.batch.input.input_index import IndexedFile, InputIndex, RangeReader
from spmd_worker.frontends.batch.input.row_reader import RowReader

_LOCAL_BYTES: Final = 256 << 20
_REMOTE_BYTES: Final = 32 << 20
"""Most bytes that are compared, for a large input."""
_REMOTE_FILES: Final = 256
"""Most remote files that are opened: each takes requests, one after another, before the world can begin."""


class IndexOrigin(NamedTuple):
    """Origin of an index, in errors."""

    place: str
    rule: str


POOLS_INDEX: Final = IndexOrigin(
    "the pool", "every world of a pool must have the same job: give the pool's input, or another job.pool for this one"
)
OWN_INDEX: Final = IndexOrigin(
    "job.input_index", "an index is of unchanged files: make it again with spmd-worker-index, or leave it out"
)


def check_content(reader: RowReader, index: InputIndex, origin: IndexOrigin, is_over: Callable[[], bool]) -> None:
    """Raise ConfigError, naming both, for files that are not the index's: by their number, the sizes of local ones, and
    the digests of their pieces, of which a large input's are not all read (and the sizes of remote files of which some
    are). Stops once `is_over`. Raises OSError.
    """
    paths = reader.paths or ()
    if len(paths) != len(index.files):
        raise ConfigError(f"job.input has {len(paths)} files, and {len(index.files)} in {origin.place}: {origin.rule}")
    RangeReader(reader, index)
    files = list(zip(paths, index.files))
    is_local = all(isinstance(path, Path) for path, _ in files)
    for path, file in files:
        if isinstance(path, Path):
            _check_size(path, file, path.stat().st_size, origin)
    most_bytes, most_files = (_LOCAL_BYTES, len(files)) if is_local else (_REMOTE_BYTES, _REMOTE_FILES)
    chosen = _choose(index.files, most_bytes, most_files)
    for (path, file), numbers in zip(files, chosen):
        if not numbers:
            continue
        with open_bytes(path) as stream:
            _check_size(path, file, stream.seek(0, io.SEEK_END), origin)
            for number in numbers:
                start, end = file.piece(number)
                digest = digest_of(stream, start, end, is_over)
                if is_over():
                    return
                if digest != file.marks[number].digest:
                    raise ConfigError(
                        f"job.input has other bytes in {path} than in {origin.place} ({file.path}): from byte {start} "
                        f"to {end} their digest is {digest}, and {file.marks[number].digest} in {origin.place}: "
                        f"{origin.rule}"
                    )


def _check_size(path: FilePath, file: IndexedFile, num_bytes: int, origin: IndexOrigin) -> None:
    if num_bytes != file.num_bytes:
        raise ConfigError(
            f"job.input has {num_bytes} bytes in {path}, and {file.num_bytes} in {origin.place} ({file.path}): "
            f"{origin.rule}"
        )


def _choose(files: tuple[IndexedFile, ...], most_bytes: int, most_files: int) -> list[list[int]]:
    """Numbers of pieces of each file, evenly spread: all, or of about `most_bytes`, of `most_files`; at least one."""
    pieces = [(slot, number) for slot, file in enumerate(files) for number in range(len(file.marks))]

    def size(piece: tuple[int, int]) -> int:
        start, end = files[piece[0]].piece(piece[1])
        return end - start

    # A compressed file is one piece.
    fitting = [each for each in pieces if size(each) <= most_bytes] or sorted(pieces, key=size)[:1]
    step = max(1, -(-sum(map(size, fitting)) // most_bytes))
    chosen: list[list[int]] = [[] for _ in files]
    # From the end: appended rows and a Parquet footer are there.
    for slot, number in fitting[::-1][::step]:
        chosen[slot].append(number)
    opened = [slot for slot, numbers in enumerate(chosen) if numbers][::-1]
    kept = set(opened[:: max(1, -(-len(opened) // most_files))])
    return [numbers if slot in kept else [] for slot, numbers in enumerate(chosen)]
