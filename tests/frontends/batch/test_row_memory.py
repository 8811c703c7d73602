"""Memory of a job by its number of rows: the journal keeps chunks that are being answered, custom ids are on disk."""

import io
import json
import random
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from spmd_worker.base.config.schema import JobConfig, RowLimits
from spmd_worker.base.digest_set import DigestSet
from spmd_worker.base.errors import JournalError
from spmd_worker.frontends.batch.input.row_reader import rows_in
from spmd_worker.frontends.batch.job_rows import JobInput, JobOutput
from spmd_worker.frontends.batch.parts_thread import PartsThread
from spmd_worker.frontends.batch.progress import Progress
from spmd_worker.frontends.batch.run_dir import row_chunks
from spmd_worker.frontends.batch.run_dir.journal import LINES_NAME, RowJournal, RowKey
from spmd_worker.frontends.batch.run_dir.row_chunks import RowChunks
from spmd_worker.frontends.openai import row_parser
from spmd_worker.frontends.openai.row import RowError
from spmd_worker.frontends.openai.row_writer import RowAnswer, error_result
from spmd_worker.replica.sequence.sampling_params import SamplingParams

WINDOW, COMMIT_ROWS = 8, 4


@pytest.fixture(autouse=True)
def few_records_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("row_chunks", "journal_reads", "journal"):
        monkeypatch.setattr(f"spmd_worker.frontends.batch.run_dir.{module}.BLOCK_RECORDS", 3)


@settings(max_examples=60, deadline=None)
@given(some.permutations(range(14)), some.integers(1, 5), some.integers(0, 14))
def test_chunks_know_rows_in_any_order(rows: list[int], chunk_rows: int, num_done: int):
    chunks = RowChunks(chunk_rows)
    for record, row in enumerate(rows[:num_done]):
        assert not chunks.has(row)
        chunks.append(row)
        assert chunks.has(row)
        # Twice, as after Ctrl-C.
        chunks.commit(row, record)
        chunks.commit(row, record)
    done = set(rows[:num_done])
    assert [chunks.has(row) for row in range(15)] == [row in done for row in range(15)]
    assert [chunks.committed_until(row) for row in range(15)] == [
        next(end for end in range(row, 16) if end not in done) for row in range(15)
    ]
    partly = {row // chunk_rows for row in done if not {*range(row // chunk_rows * chunk_rows, row)} <= done}
    assert chunks.num_held_rows >= len(partly) * chunk_rows


def answer_of(row: int) -> RowAnswer:
    return RowAnswer(row, b"%d\n" % (row * 7919), num_prompt_tokens=row)


@settings(max_examples=30, deadline=None)
@given(some.permutations(range(20)), some.integers(1, 7), some.integers(0, 20))
def test_journal_of_any_chunks_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], chunk_rows: int, num_before: int
):
    folder, first = tmp_path_factory.mktemp("run"), 1000
    for rows in (order[:num_before], order[num_before:]):
        journal = RowJournal(folder, 3, 1e9, lambda descriptor: None, chunk_rows=chunk_rows)
        assert [journal.has(first + row) for row in range(20)] == [
            row in order[:num_before] and rows != order[:num_before] for row in range(20)
        ]
        for row in rows:
            journal.append(RowKey(row), answer_of(first + row))
        journal.commit()
        done = order[: num_before if rows == order[:num_before] else 20]
        stop = next(row for row in range(21) if row not in done)
        assert list(journal.lines(first)) == [answer_of(first + row).line for row in range(stop)]
        found = [row - first for each in journal.in_order() for row in each["row"].tolist()]
        assert found == sorted(done)
        assert [journal.key_of(first + row) for row in sorted(done)] == sorted(done)
        journal.close()


def test_line_that_changed_is_not_written(tmp_path: Path):
    journal = RowJournal(tmp_path, 1, 1e9)
    for row in range(3):
        journal.append(RowKey(row), answer_of(row))
    (tmp_path / LINES_NAME).write_bytes((tmp_path / LINES_NAME).read_bytes().replace(b"7919", b"7918"))
    with pytest.raises(JournalError, match=r"rows\.part does not hold the line of row 1"):
        list(journal.lines())
    journal.close()


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    return enumerate(rows_in(io.BytesIO(b"".join(lines)), 1 << 20))


class Run:
    """One start of a job without an engine: WINDOW rows are in flight, and end in random order."""

    def __init__(self, folder: Path, lines: Iterable[bytes], chunk_rows: int) -> None:
        self.journal = RowJournal(folder, COMMIT_ROWS, 1e9, lambda descriptor: None, chunk_rows=chunk_rows)
        source = numbered(lines)
        self.rows = JobInput(source, JobConfig(), RowLimits(), SamplingParams(), self.journal, folder=folder)
        self.output = JobOutput(self.journal, self.rows.keys, Progress(None, io.StringIO()))
        self.most_held_rows = self.num_computed = 0
        self._flying: list[RowAnswer] = []
        self._random = random.Random(3)

    def answer(self, num_rows: int | None = None) -> None:
        """Answer this many rows, or all."""
        while not self.rows.has_ended and (num_rows is None or self.num_computed < num_rows):
            if (found := self.rows.next_row()) is None:
                continue
            if isinstance(found.row, RowError):
                self._flying.append(error_result(found.row))
            else:
                self.num_computed += 1
                text = json.dumps({"custom_id": found.row.custom_id, "index": found.row.index, "text": "x"}) + "\n"
                self._flying.append(RowAnswer(found.row.index, text.encode()))
            if len(self._flying) == WINDOW:
                self._end_one()
        while self._flying and num_rows is None:
            self._end_one()

    def _end_one(self) -> None:
        self.output.add(self._flying.pop(self._random.randrange(len(self._flying))))
        self.most_held_rows = max(self.most_held_rows, self.journal.num_held_rows)

    def close(self) -> None:
        self.rows.close()
        self.journal.close()


def input_line(row: int) -> bytes:
    """Custom ids that occur near and far, in rows that are answered, rejected, and without one."""
    if row % 7 == 5:
        return b'{"prompt": "x"}\n'
    prompt: object = 7 if row % 11 == 3 else "x"
    return json.dumps({"custom_id": f"id {row * row % 149}", "prompt": prompt}).encode() + b"\n"


def answered(folder: Path, num_rows: int, chunk_rows: int, *stops: int) -> tuple[list[bytes], int, int]:
    """Output lines of a job that is cut off after each number of rows; most rows held, and rows computed."""
    folder.mkdir()
    most_held_rows = num_computed = 0
    for stop in (*stops, None):
        run = Run(folder, map(input_line, range(num_rows)), chunk_rows)
        run.answer(stop)
        most_held_rows, num_computed = max(most_held_rows, run.most_held_rows), num_computed + run.num_computed
        run.journal.commit()
        lines = list(run.journal.lines())
        run.close()
    return lines, most_held_rows, num_computed


@pytest.mark.guarantee("A job's memory does not grow with its rows")
def test_rows_held_are_those_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Bytes, and the rows that are computed, are those of a job whose rows and custom ids are all in memory."""
    expected, _, num_computed = answered(tmp_path / "whole", 600, 100_000)
    assert sum(b"duplicate_custom_id" in line for line in expected) > 300
    held: list[DigestSet] = []
    monkeypatch.setattr(row_parser, "DigestSet", lambda folder: held.append(DigestSet(folder, 5)) or held[-1])
    lines, most_held_rows, num_computed_here = answered(tmp_path / "chunks", 600, WINDOW)
    assert (lines, num_computed_here) == (expected, num_computed)
    # Each row that is in flight or not committed holds its chunk at most.
    assert most_held_rows <= (WINDOW + COMMIT_ROWS) * WINDOW
    for number, stops in enumerate([(20,), (3, 40), (0, 90, 1)]):
        assert answered(tmp_path / f"{number}", 600, WINDOW, *stops)[0] == expected
    assert len(held) == 10


@pytest.mark.control("A job's memory does not grow with its rows")
def test_held_rows_count_detects_chunks_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: chunks whose rows are all committed, and stay."""
    monkeypatch.setattr(row_chunks, "_COMMITTED", b"\1")
    monkeypatch.setattr(RowChunks, "commit", lambda self, row, record: None)
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder, map(input_line, range(600)), WINDOW)
    run.answer()
    run.close()
    assert run.most_held_rows >= 600


@pytest.mark.parametrize("first_row", [0, 40])
def test_parts_begin_with_the_first_row(tmp_path: Path, first_row: int):
    """Rows end in any order: the first that is committed may be any of them."""
    journal, given = RowJournal(tmp_path, 1, 1e9), []
    known: list[int | None] = [None]

    def write(lines: Iterable[bytes]) -> dict[str, int]:
        given.extend(lines)
        return {"lines": len(given)}

    thread = PartsThread(journal, lambda: known[0], 4, write)
    for row in (5, 3, 1, 2, 0, 4):
        journal.append(RowKey(row), answer_of(first_row + row))
    known[0] = first_row
    assert thread.end(6, lambda: None) == {"lines": 6}
    assert given == [answer_of(first_row + row).line for row in range(6)]
    thread.close()
    journal.close()


@pytest.mark.stress
def test_million_rows_hold_a_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_parser, "DigestSet", partial(DigestSet, most_recent=10_000))
    run = Run(tmp_path, (b'{"prompt": "x", "custom_id": "%d"}\n' % row for row in range(10**6)), 1024)
    run.answer()
    assert run.most_held_rows <= 4 * 1024
    assert sum(1 for _ in run.journal.lines()) == 10**6
    run.close()
