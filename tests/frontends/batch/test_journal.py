"""The journal: commits in order, torn tails at every byte, full disks and failing syncs."""

import linecache
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from spmd_worker.base import files
from spmd_worker.base.errors import JournalError
from spmd_worker.frontends.batch.run_dir import journal as journal_module
from spmd_worker.frontends.batch.run_dir import row_chunks
from spmd_worker.frontends.batch.run_dir.journal import (
    JOURNAL_NAME,
    LINES_NAME,
    JournalRecord,
    RowJournal,
    RowKey,
    read_journal,
)
from spmd_worker.frontends.openai.row_writer import RowAnswer

RECORD_BYTES = journal_module.RECORD_BYTES
HEADER_BYTES = len(journal_module._HEADER)


def answer(index: int) -> RowAnswer:
    code = "not_json" if index % 3 == 0 else None
    return RowAnswer(index, f'{{"index": {index}, "text": "{"x" * index}"}}\n'.encode(), code, index, index // 2, 7)


def opened(folder: Path, commit_rows: int = 1000, **settings) -> RowJournal:
    return RowJournal(folder, commit_rows, settings.pop("commit_s", 1e9), **settings)


def filled(folder: Path, indices: list[int], **settings) -> None:
    journal = opened(folder, **settings)
    for index in indices:
        journal.append(RowKey(100 + index), answer(index))
    journal.close()


def test_committed_rows_are_read_back_with_counts(tmp_path: Path):
    filled(tmp_path, [2, 0, 1])
    journal = opened(tmp_path)
    assert [record.row for record in journal.records()] == [2, 0, 1]
    assert [record.error_code for record in journal.records()] == [None, "not_json", None]
    assert next(journal.records())[5:8] == (2, 1, 7)
    assert [journal.key_of(index) for index in range(3)] == [100, 101, 102]
    assert (journal.has(2), journal.has(3), journal.num_rows) == (True, False, 3)
    assert list(journal.lines()) == [answer(index).line for index in range(3)]


def interrupted_after(num_lines: int, call: Callable[[], None]) -> bool:
    """Whether Ctrl-C came in the middle of a call, after this number of its lines in this file or the journal's."""
    left = num_lines

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        nonlocal left
        if frame.f_code.co_filename not in (journal_module.__file__, row_chunks.__file__, __file__):
            return None
        # Python looks for signals behind calls: not between a lock that is taken, or given back, and its block.
        is_lock = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        left -= event == "line" and not is_lock
        if left < 0 and not is_lock:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(former)
    return False


@pytest.mark.control("Exit 0: every row has its line, in input order")
@pytest.mark.parametrize("is_broken", [False, True])
def test_interrupted_append_loses_no_earlier_row(tmp_path: Path, is_broken: bool):
    """Control: a row that is pending before it has a place took all others with it."""

    def append(journal: RowJournal, key: RowKey, made: RowAnswer) -> None:
        with journal._lock:
            journal._pending.append((key, made))
            journal._add(made.index)

    lost = []
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        journal = opened(folder, chunk_rows=4)
        journal.append(RowKey(105), answer(5))
        add = partial(append, journal) if is_broken else journal.append
        is_interrupted = interrupted_after(number, partial(add, RowKey(109), answer(9)))
        try:
            journal.close()
        except KeyError:
            lost.append(number)
            continue
        kept = [index for index, _ in read_journal(folder)]
        assert kept in ([5], [5, 9])
        if not is_interrupted:
            break
    assert kept == [5, 9]
    assert number > 8
    assert bool(lost) == is_broken


@pytest.mark.parametrize("first", [0, 5, 2**40])
def test_rows_may_begin_anywhere_in_any_order(tmp_path: Path, first: int):
    rows = [first + number for number in (9, 4, 5, 0, 1, 2, 3, 8, 7, 6)]
    journal = opened(tmp_path)
    for row in rows:
        journal.append(RowKey(row, bytes([row % 251]) * 16, row % 2 == 1), RowAnswer(row, b"%d\n" % row))
    journal.close()
    journal = opened(tmp_path)
    expected = sorted(rows)
    assert [journal.has(row) for row in (first - 1, *expected, first + 10)] == [False, *[True] * 10, False]
    assert [journal.key_of(row) for row in expected] == expected
    assert list(journal.lines(first)) == [b"%d\n" % row for row in expected]
    assert list(journal.lines(first + 10)) == []
    assert [(each.row, each.custom_id[0], each.is_rejected) for each in journal.committed()] == [
        (row, row % 251, row % 2 == 1) for row in rows
    ]


def test_lines_end_at_a_missing_row(tmp_path: Path):
    filled(tmp_path, [0, 1, 3])
    assert list(opened(tmp_path).lines()) == [answer(0).line, answer(1).line]


def test_commit_comes_after_enough_rows_or_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now_s = [0.0]
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: now_s[0])
    journal = opened(tmp_path, commit_rows=3, commit_s=5.0)

    def on_disk() -> int:
        return ((tmp_path / JOURNAL_NAME).stat().st_size - HEADER_BYTES) // RECORD_BYTES

    journal.append(RowKey(0), answer(0))
    journal.append(RowKey(0), answer(1))
    assert on_disk() == 0
    journal.append(RowKey(0), answer(2))
    assert on_disk() == 3
    journal.append(RowKey(0), answer(3))
    now_s[0] = 4.9
    journal.tick()
    assert on_disk() == 3
    now_s[0] = 5.0
    journal.tick()
    assert on_disk() == 4


def test_lines_are_durable_before_their_records(tmp_path: Path):
    synced: list[tuple[str, int, int]] = []

    def sync(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((name, (tmp_path / LINES_NAME).stat().st_size, (tmp_path / JOURNAL_NAME).stat().st_size))

    journal = opened(tmp_path, sync=sync)
    synced.clear()
    journal.append(RowKey(0), answer(0))
    journal.commit()
    length = len(answer(0).line)
    assert synced == [(LINES_NAME, length, HEADER_BYTES), (JOURNAL_NAME, length, HEADER_BYTES + RECORD_BYTES)]


def test_torn_record_costs_only_its_row(tmp_path: Path):
    filled(tmp_path, [0, 1, 2])
    whole = {name: (tmp_path / name).read_bytes() for name in (LINES_NAME, JOURNAL_NAME)}
    for cut in range(RECORD_BYTES):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / LINES_NAME).write_bytes(whole[LINES_NAME])
        (folder / JOURNAL_NAME).write_bytes(whole[JOURNAL_NAME][: HEADER_BYTES + 2 * RECORD_BYTES + cut])
        journal = opened(folder)
        assert [record.row for record in journal.records()] == [0, 1]
        assert (folder / LINES_NAME).read_bytes() == answer(0).line + answer(1).line
        journal.append(RowKey(102), answer(2))
        journal.close()
        assert {name: (folder / name).read_bytes() for name in whole} == whole


@pytest.mark.parametrize("num_bytes", range(9))
def test_journal_cut_within_its_header_starts_over(tmp_path: Path, num_bytes: int):
    filled(tmp_path, [0])
    os.truncate(tmp_path / JOURNAL_NAME, min(num_bytes, HEADER_BYTES))
    journal = opened(tmp_path)
    assert list(journal.records()) == []
    assert (tmp_path / LINES_NAME).read_bytes() == b""


def test_zero_header_means_nothing_was_recorded(tmp_path: Path):
    """The file's size may reach the disk before its bytes; no record exists then."""
    (tmp_path / LINES_NAME).write_bytes(b"unfinished")
    (tmp_path / JOURNAL_NAME).write_bytes(bytes(HEADER_BYTES))
    filled(tmp_path, [0])
    assert [row for row, _ in read_journal(tmp_path)] == [0]
    (tmp_path / JOURNAL_NAME).write_bytes(bytes(HEADER_BYTES + RECORD_BYTES))
    with pytest.raises(JournalError, match=r"not .*journal .*version"):
        opened(tmp_path)


def synced_names(names: list[str], interrupted_at: int = 0) -> Callable[[int], None]:
    def sync(descriptor: int) -> None:
        names.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        if len(names) == interrupted_at:
            raise KeyboardInterrupt

    return sync


def test_torn_tail_is_cut_durably_before_any_write(tmp_path: Path):
    """Lines that are gone while a record names them would be damage."""
    filled(tmp_path, [0])
    for name in (LINES_NAME, JOURNAL_NAME):
        with open(tmp_path / name, "ab") as file:
            file.write(b"torn")
    names: list[str] = []
    opened(tmp_path, sync=synced_names(names))
    assert names == [JOURNAL_NAME, LINES_NAME]
    opened(tmp_path, sync=synced_names(names))
    assert names == [JOURNAL_NAME, LINES_NAME]


def test_interrupted_commit_is_undone_durably_records_first(tmp_path: Path):
    """Killed in between, or without power, the job would have found records of lines that are not there."""
    names: list[str] = []
    journal = opened(tmp_path, commit_rows=1, sync=synced_names(names, interrupted_at=3))
    with pytest.raises(KeyboardInterrupt):
        journal.append(RowKey(0), answer(0))
    assert names == [JOURNAL_NAME, LINES_NAME, JOURNAL_NAME, JOURNAL_NAME, LINES_NAME]


def test_names_are_durable_before_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names: list[str] = []
    monkeypatch.setattr(files.os, "fsync", synced_names(names))
    opened(tmp_path, sync=synced_names(names))
    assert names == [JOURNAL_NAME, tmp_path.name]


def test_lines_without_a_record_are_cut_off(tmp_path: Path):
    filled(tmp_path, [0])
    with open(tmp_path / LINES_NAME, "ab") as lines:
        lines.write(answer(1).line[:7])
    opened(tmp_path).close()
    assert (tmp_path / LINES_NAME).read_bytes() == answer(0).line


def test_records_before_their_lines_are_detected(tmp_path: Path):
    """Negative control: the other order of writing leaves records of lines that are not there."""
    filled(tmp_path, [0, 1])
    os.truncate(tmp_path / LINES_NAME, len(answer(0).line) + 3)
    with pytest.raises(JournalError, match=r"record 1 \(row 1\) .*bytes \d+ .* \d+ .*rows\.part"):
        opened(tmp_path)


def test_other_file_is_not_a_journal(tmp_path: Path):
    (tmp_path / JOURNAL_NAME).write_bytes(b"hello, world")
    with pytest.raises(JournalError, match=r"not .*journal .*version"):
        opened(tmp_path)
    (tmp_path / JOURNAL_NAME).write_bytes(b"hey")
    with pytest.raises(JournalError, match=r"not .*journal: .*b'hey'"):
        opened(tmp_path)


@pytest.mark.parametrize("fails_at", range(2))
def test_failed_sync_is_error_and_stops_all_writes(tmp_path: Path, fails_at: int):
    calls = [0]

    def sync(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == 4 + fails_at:
            raise OSError(5, "Input/output error")

    journal = opened(tmp_path, commit_rows=1, sync=sync)
    journal.append(RowKey(0), answer(0))
    with pytest.raises(OSError, match="Input/output error"):
        journal.append(RowKey(1), answer(1))
    sizes = [(tmp_path / name).stat().st_size for name in (LINES_NAME, JOURNAL_NAME)]
    # Whoever tries again, the end of the job too, is told: what was not written must not be taken for written.
    with pytest.raises(OSError, match="Input/output error"):
        journal.append(RowKey(2), answer(2))
    with pytest.raises(OSError, match="Input/output error"):
        journal.commit()
    with pytest.raises(OSError, match="Input/output error"):
        journal.close()
    journal.close()
    assert [(tmp_path / name).stat().st_size for name in (LINES_NAME, JOURNAL_NAME)] == sizes
    again = opened(tmp_path)
    assert [record.row for record in again.records()] in ([0], [0, 1])


@pytest.mark.parametrize("at_call", [1, 2])
def test_interrupted_commit_loses_and_repeats_nothing(tmp_path: Path, at_call: int):
    calls = [0]

    def sync(descriptor: int) -> None:
        calls[0] += 1
        # The first is the header's.
        if calls[0] == 1 + at_call:
            raise KeyboardInterrupt

    journal = opened(tmp_path, commit_rows=2, sync=sync)
    journal.append(RowKey(0), answer(0))
    with pytest.raises(KeyboardInterrupt):
        journal.append(RowKey(1), answer(1))
    journal.append(RowKey(2), answer(2))
    journal.close()
    assert [record.row for record in opened(tmp_path).records()] == [0, 1, 2]
    assert [row for row, _ in read_journal(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("at_call", [1, 2])
def test_interrupted_last_commit_loses_nothing(tmp_path: Path, at_call: int):
    """Nobody would begin it again: `close` does, and says that it was interrupted."""
    calls = [0]

    def sync(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == 1 + at_call:
            raise KeyboardInterrupt

    journal = opened(tmp_path, sync=sync)
    journal.append(RowKey(0), answer(0))
    journal.append(RowKey(1), answer(1))
    with pytest.raises(KeyboardInterrupt):
        journal.close()
    assert [row for row, _ in read_journal(tmp_path)] == [0, 1]
    # Its descriptors are other files' by now.
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(4)]
    journal.close()
    for descriptor in others:
        # Raises OSError for one that was closed.
        os.close(descriptor)


def test_full_disk_is_error_and_keeps_committed_rows(tmp_path: Path):
    script = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_journal import RowKey, answer, opened
from pathlib import Path
journal = opened(Path({str(tmp_path)!r}), commit_rows=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
for index in range(1000):
    journal.append(RowKey(index), answer(index))
"""
    # Without its handler the signal would end the process, as the system's default is.
    ignore = f"import signal; signal.signal({int(signal.SIGXFSZ)}, signal.SIG_IGN)\n"
    done = subprocess.run([sys.executable, "-c", ignore + script], capture_output=True, text=True, check=False)
    assert f"OSError: [Errno 27] File too large: '{tmp_path}'" in done.stderr
    records = list(opened(tmp_path).records())
    assert len(records) > 3
    assert [record.row for record in records] == list(range(len(records)))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1500


def test_record_round_trips_and_damage_is_detected():
    record = JournalRecord(2**63, 2**64 - 1, 2**40, 2**31, 2**32 - 1, 1, 2, 3, "prompt_too_long")
    assert JournalRecord.unpack(record.pack()) == record
    for place in range(RECORD_BYTES):
        damaged = bytearray(record.pack())
        damaged[place] ^= 1
        assert JournalRecord.unpack(bytes(damaged)) is None


def test_leading_rows_begin_with_row_0(tmp_path: Path):
    """Regression: outputs of parts began with the row that was committed first, twice, and lacked row 0."""
    journal = opened(tmp_path)
    for indices, num_leading in (([4, 2], 0), ([1], 0), ([0], 3), ([3], 5)):
        for index in indices:
            journal.append(RowKey(100 + index), answer(index))
        journal.commit()
        assert journal.committed_until(0) == num_leading
    assert list(journal.lines()) == [answer(row).line for row in range(5)]
    journal.close()
