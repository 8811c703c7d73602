"""Merge of a pool: the lines of all ranges in order of the rows, as a job in one piece would have written them."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.digest_set import DigestSet
from spmd_worker.base.errors import PoolError
from spmd_worker.base.remote_names import FilePath, RemotePath
from spmd_worker.base.remote_upload import remove_leftovers
from spmd_worker.frontends.batch.merge.merged_lines import duplicate_line
from spmd_worker.frontends.batch.output_file import own_partial, write_lines
from spmd_worker.frontends.batch.output_parts import PART_ROWS, is_parts
from spmd_worker.frontends.batch.parquet_rows import VectorColumns
from spmd_worker.frontends.batch.pool.driver import done_ranges, run
from spmd_worker.frontends.batch.pool.members import Lease, Member, put_once
from spmd_worker.frontends.batch.pool.protocol import end_merge, still_holds
from spmd_worker.frontends.batch.pool.records import (
    MERGED,
    OUTPUT_NAME,
    WORKERS,
    DoneRecord,
    Merged,
    Part,
    digest_of,
    free_record,
    read_free_record,
    worker_and_kind,
)
from spmd_worker.frontends.batch.pool.store import PoolStore
from spmd_worker.frontends.batch.pool_world.parts import decode_part
from spmd_worker.frontends.batch.run_dir.journal import NO_CUSTOM_ID, JournalRecord
from spmd_worker.frontends.batch.run_dir.provenance import DigestChain
from spmd_worker.frontends.openai.row_parser import DUPLICATE_CODE

PROVENANCE: Final = f"{MERGED}/provenance.json"
"""The provenance of the output, in the pool."""


def merge_pool(
    store: PoolStore,
    member: Member,
    lease: Lease,
    output: FilePath,
    vectors: VectorColumns | None,
    record: Mapping[str, Any],
    advance: Callable[[], Any],
    part_rows: int = PART_ROWS,
    folder: Path | None = None,
) -> None:
    """Write the output and the pool's provenance, with `record`, and end the pool; nothing if the lease was lost.
    `advance` is called between two ranges; `folder` is for a temporary file. Raises PoolError, OSError.
    """

    def go_on() -> None:
        advance()
        if not run(store, still_holds(lease)):
            # What it writes may be in use already: another manifest must not appear.
            raise InterruptedError("the lease of the merge was lost")

    rows = MergedRows(store, member, go_on, folder)
    name = read_free_record(store.read(OUTPUT_NAME)).get("run", "") if is_parts(output) else ""
    try:
        with contextlib.closing(rows):
            digest = write_lines(rows, output, vectors, part_rows, writer=member.worker, run=name)
    except OSError:
        if run(store, still_holds(lease)):
            raise
        # Another world writes the same output, and may have removed this one's partial file.
        return
    merged = {
        **record,
        "output": {"path": str(output), **digest},
        "images": rows.images.value(),
        "error_codes": dict(rows.error_codes),
        "merged_by": member.worker,
    }
    # Durable before the end is; that of a merge that was taken over is the same, but for who merged.
    run(store, put_once(PROVENANCE, free_record(merged)))
    if run(store, end_merge(member, lease, Merged(**digest))):
        _remove_partials(store, output)


def _remove_partials(store: PoolStore, output: FilePath) -> None:
    """Remove what worlds left that died while they merged."""
    if isinstance(output, RemotePath):
        with contextlib.suppress(PermissionError):
            remove_leftovers(output.raw)
        return
    for listed in store.list(f"{WORKERS}/"):
        worker, kind = worker_and_kind(listed.name) or ("", "")
        if kind == "json":
            own = own_partial(output, worker)
            for path in output.parent.glob(own.name) if is_parts(output) else [own]:
                path.unlink(missing_ok=True)


class MergedRows:
    """Iterates the output lines, once, and sums up what is known afterwards.

    A world sees the custom_ids of a range, not those of other ranges: the second row with one becomes an error row
    here. Raises PoolError for missing or damaged rows, OSError.
    """

    def __init__(
        self,
        store: PoolStore,
        member: Member,
        advance: Callable[[], Any] = lambda: None,
        folder: Path | None = None,
    ) -> None:
        """`advance` is called between two ranges; `folder` is for the file of many custom_ids."""
        self.error_codes: Counter[str] = Counter()
        self.images = DigestChain()
        self._store, self._member, self._advance = store, member, advance
        self._custom_ids = DigestSet(folder)

    def __iter__(self) -> Iterator[bytes]:
        for done in done_ranges(self._store, self._member):
            self._advance()
            for record, line in _rows_of(self._store, done):
                yield self._line(record, line)

    def close(self) -> None:
        """Remove the file of custom_ids."""
        self._custom_ids.close()

    def _line(self, record: JournalRecord, line: bytes) -> bytes:
        code, media_digest = record.error_code, record.media_digest
        is_seen = record.custom_id != NO_CUSTOM_ID and self._custom_ids.add(record.custom_id)
        if is_seen and not record.is_rejected:
            line, code, media_digest = duplicate_line(record.row, line), DUPLICATE_CODE, ""
        if code is not None:
            self.error_codes[code] += 1
        if media_digest:
            self.images.add(record.row, media_digest)
        return line


def _rows_of(store: PoolStore, done: DoneRecord) -> list[tuple[JournalRecord, bytes]]:
    """(record, line) of the rows of a range, in order."""
    rows = [each for part in done.parts for each in decode_part(part.name, _read_part(store, part))]
    rows.sort(key=lambda each: each[0].row)
    if [record.row for record, _ in rows] != list(range(done.start, done.stop)):
        raise PoolError(f"the pool's parts do not have the rows {done.start} to {done.stop}: {_WAY_OUT}")
    return rows


def _read_part(store: PoolStore, part: Part) -> bytes:
    data = store.read(part.name)
    if data is None or len(data) != part.num_bytes or digest_of(data) != part.digest:
        raise PoolError(f"{part.name} of the pool is {'missing' if data is None else 'damaged'}: {_WAY_OUT}")
    return data


_WAY_OUT: Final = "restore the pool's folder from before, or give job.pool another"
