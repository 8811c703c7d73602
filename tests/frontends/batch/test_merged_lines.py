"""Error rows of custom_ids that occur in several parts of a job, and the digests that the parts keep."""

import json
import tracemalloc
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from spmd_worker.base.digest_set import DigestSet
from spmd_worker.frontends.batch.merge import merged_lines as merged_lines_module
from spmd_worker.frontends.batch.merge.merged_lines import is_duplicate, later_duplicates, merged_lines
from spmd_worker.frontends.batch.run_dir.journal import NO_CUSTOM_ID, JournalRecord
from spmd_worker.frontends.batch.run_dir.journal_reads import RECORD_TYPE
from spmd_worker.frontends.batch.run_dir.kept_digests import (
    CUSTOM_IDS_NAME,
    MEDIA_NAME,
    KeptDigestsError,
    keep_digests,
    read_kept,
)
from spmd_worker.frontends.openai.row import RowError
from spmd_worker.frontends.openai.row_parser import CustomIds, custom_id_digest, parse_row
from spmd_worker.frontends.openai.row_writer import error_result
from spmd_worker.replica.sequence.sampling_params import SamplingParams

NAMES = ["a", "b", "\udc80", "é\u2028", "x" * 300, ""]
LINES = [
    lambda name: {"custom_id": name, "prompt": "x"},
    lambda name: {"custom_id": name, "prompt": 7},
    lambda name: {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
    lambda name: {"prompt": "x"},
]


def kept_of(folder: Path, records: list[JournalRecord]) -> dict[str, str]:
    """`keep_digests` of the records, in two pieces."""
    packed = np.frombuffer(b"".join([each.pack() for each in records]), RECORD_TYPE)
    return keep_digests(folder, lambda: [packed[: len(packed) // 3], packed[len(packed) // 3 :]])


def answered(lines: list[bytes], ids: CustomIds, first: int) -> Iterator[tuple[JournalRecord, bytes]]:
    """Records and output lines of rows in one part."""
    for index, line in enumerate(lines, first):
        parsed = parse_row(index, line, SamplingParams())
        row = ids.check(parsed)
        digest = NO_CUSTOM_ID if parsed.custom_id is None else custom_id_digest(parsed.custom_id)
        record = JournalRecord(index, 0, 0, 1, 0, 0, 0, 0, None, "", digest, isinstance(parsed, RowError))
        plain = {"custom_id": row.custom_id, "index": index, "outputs": [], "error": None}
        openai = {"id": f"batch-{index}", "custom_id": row.custom_id, "response": {}, "error": None}
        is_plain = isinstance(row, RowError) or row.kind == "plain"
        answer = error_result(row).line if isinstance(row, RowError) else json.dumps(plain if is_plain else openai)
        yield record, answer if isinstance(answer, bytes) else answer.encode()


@settings(max_examples=20, deadline=None)
@given(
    some.lists(
        some.lists(some.tuples(some.sampled_from(LINES), some.sampled_from(NAMES)), max_size=6), min_size=1, max_size=4
    )
)
def test_merged_parts_equal_one_part(tmp_path_factory: pytest.TempPathFactory, parts):
    folder = tmp_path_factory.mktemp("parts")
    lines = [[json.dumps(make(name)).encode() for make, name in part] for part in parts]
    whole = [line for _, line in answered([line for part in lines for line in part], CustomIds(), 0)]
    first, kept, found = 0, [], []
    for number, part in enumerate(lines):
        rows = list(answered(part, CustomIds(), first))
        found += [(record.row, line) for record, line in rows]
        own = folder / str(number)
        own.mkdir()
        digests = kept_of(own, [record for record, _ in rows])
        kept.append(list(read_kept(own / CUSTOM_IDS_NAME, digests[CUSTOM_IDS_NAME])))
        assert list(read_kept(own / MEDIA_NAME, digests[MEDIA_NAME])) == []
        first += len(part)
    duplicates = later_duplicates(chain.from_iterable(kept))
    assert list(merged_lines(found, duplicates)) == whole
    assert [row for row in range(first) if is_duplicate(duplicates, row)] == list(duplicates)


def test_media_digests_are_kept_in_row_order(tmp_path: Path):
    records = [JournalRecord(row, 0, 0, 1, 0, 0, 0, 0, None, f"{99 - row:02d}" * 16) for row in (3, 4, 5, 2**40)]
    records[1] = records[1]._replace(media_digest="")
    records[3] = records[3]._replace(media_digest="ab" * 16)
    digests = kept_of(tmp_path, records)
    found = list(read_kept(tmp_path / MEDIA_NAME, digests[MEDIA_NAME]))
    assert [(each.row, each.digest.hex()) for each in found] == [(3, "96" * 16), (5, "94" * 16), (2**40, "ab" * 16)]
    with pytest.raises(KeptDigestsError, match="media_digests is damaged"):
        list(read_kept(tmp_path / MEDIA_NAME, digests[CUSTOM_IDS_NAME]))


def test_search_for_duplicates_holds_no_custom_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The digests of 6,000 rows take 0.14 MB on disk; a set of them takes five times that."""
    monkeypatch.setattr(merged_lines_module, "DigestSet", partial(DigestSet, most_recent=256))
    digests = [custom_id_digest(str(number % 5_990)) for number in range(6_000)]
    records = [JournalRecord(row, 0, 0, 1, 0, 0, 0, 0, None, "", digest) for row, digest in enumerate(digests)]
    kept = kept_of(tmp_path, records)
    tracemalloc.start()
    found = later_duplicates(read_kept(tmp_path / CUSTOM_IDS_NAME, kept[CUSTOM_IDS_NAME]), tmp_path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert list(found) == [*range(5_990, 6_000)]
    assert peak_bytes < 350_000
