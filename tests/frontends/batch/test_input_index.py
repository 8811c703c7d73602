"""Index of an input, and ranges of its rows read by it."""

import gzip
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as some

from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.input import file_pieces, input_index
from spmd_worker.frontends.batch.input.input_index import InputIndex, RangeReader, index_input
from spmd_worker.frontends.batch.input.row_reader import RowReader

MAX_LINE_BYTES = 8
LINES = [b"", b" \t", b"a", b"bb", b'{"a":1}', b" " * 12, b"x" * 30, b"\xef\xbb\xbf", b" " * 8, b"\r", b"  \r\r"]


@contextmanager
def small_pieces(block_bytes: int = 7, piece_bytes: int = 16) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(file_pieces, "BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(input_index, "_PIECE_BYTES", piece_bytes)
        monkeypatch.setattr(input_index, "_MOST_HELD_BYTES", 24)
        yield


def write_parquet(path: Path, content: bytes, rows_per_group: int = 3) -> None:
    texts = [str(number) for number in range(len(content.splitlines()))]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), path, row_group_size=rows_per_group)


WRITERS: dict[str, Callable[[Path, bytes], Any]] = {
    "jsonl": Path.write_bytes,
    "gz": lambda path, content: path.write_bytes(gzip.compress(content[: len(content) // 2]) + gzip.compress(content)),
    "zst": lambda path, content: path.write_bytes(zstandard.compress(content) * 2),
    "parquet": write_parquet,
}


def ranges_equal_complete_reader(paths: list[Path], start: int, stop: int, max_line_bytes: int) -> None:
    reader = RowReader(tuple(paths), max_line_bytes)
    complete = list(reader)
    index = InputIndex.from_bytes(index_input(reader).to_bytes())
    assert index.num_rows == len(complete)
    assert list(RangeReader(reader, index).rows(start, stop)) == complete[start:stop]


@settings(max_examples=60, deadline=None)
@given(
    some.lists(
        some.tuples(
            some.booleans(),
            some.lists(some.tuples(some.sampled_from(LINES), some.sampled_from([b"\n", b"\r\n"])), max_size=12),
            some.sampled_from([b"", b"z", b"  ", b"\xef\xbb"]),
        ),
        min_size=1,
        max_size=3,
    ),
    some.integers(0, 30),
    some.integers(0, 30),
    some.integers(1, 9),
)
def test_range_equals_part_of_complete_reader(tmp_path_factory, files, start, length, block_bytes):
    folder = tmp_path_factory.mktemp("files")
    paths = []
    for number, (has_mark, lines, last) in enumerate(files):
        paths.append(folder / f"{number}.jsonl")
        mark = b"\xef\xbb\xbf" if has_mark else b""
        paths[-1].write_bytes(mark + b"".join([line + end for line, end in lines]) + last)
    with small_pieces(block_bytes):
        ranges_equal_complete_reader(paths, start, start + length, MAX_LINE_BYTES)


@pytest.mark.parametrize("suffix", WRITERS)
def test_formats_have_same_ranges_as_complete_reader(tmp_path: Path, suffix: str):
    contents = [b"a\n\n{}\nccc\n" * 3, b"", b"last\n \nd", b"\n"]
    paths = [tmp_path / f"{number}.{suffix}" for number in range(len(contents))]
    for path, content in zip(paths, contents):
        WRITERS[suffix](path, content)
    num_rows = len(list(RowReader(tuple(paths), 100)))
    with small_pieces():
        for start in range(num_rows + 1):
            for stop in (start, start + 1, start + 4, num_rows):
                ranges_equal_complete_reader(paths, start, stop, 100)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """(name of a file, byte) -> how often the byte was read."""
    counts: Counter[tuple[str, int]] = Counter()
    open_bytes = input_index.open_bytes

    def counted(path: Path) -> Any:
        file = open_bytes(path)

        class Counted:
            def read(self, size: int) -> bytes:
                at = file.tell()
                data = file.read(size)
                counts.update([(path.name, byte) for byte in range(at, at + len(data))])
                return data

            def __enter__(self) -> "Counted":
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return Counted()

    monkeypatch.setattr(input_index, "open_bytes", counted)
    return counts


def test_range_reads_only_its_own_pieces(tmp_path: Path, opened: Counter[tuple[str, int]]):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"]
    for path in paths:
        path.write_bytes(b"".join([b'{"prompt": "%d"}\n' % number for number in range(40)]))
    reader = RowReader(tuple(paths))
    with small_pieces(32, 64):
        index = index_input(reader)
        assert {byte for _, byte in opened} == set(range(index.files[0].num_bytes))
        assert set(opened.values()) == {1}, "the index reads every byte once"
        for start, stop in [(0, 1), (39, 41), (50, 60), (119, 120), (7, 7)]:
            opened.clear()
            assert [row for row, _ in RangeReader(reader, index).rows(start, stop)] == list(range(start, stop))
            expected = set()
            for number, file in enumerate(index.files):
                rows = [mark.row + 40 * number for mark in file.marks] + [40 * (number + 1)]
                for piece, (first, end) in enumerate(pairwise(rows)):
                    if first < stop and start < end and start < stop:
                        expected |= {(paths[number].name, byte) for byte in range(*file.piece(piece))}
            assert set(opened) == expected


@pytest.mark.parametrize("suffix", WRITERS)
def test_changed_piece_is_rejected(tmp_path: Path, suffix: str):
    path = tmp_path / f"a.{suffix}"
    WRITERS[suffix](path, b"".join([b'{"prompt": %d}\n' % number for number in range(20)]))
    content = path.read_bytes()
    reader = RowReader((path,))
    with small_pieces(32, 64):
        index = index_input(reader)
        for changed in (content[:-1], content + b"\n", content[:10] + b"#" + content[11:]):
            path.write_bytes(changed)
            with pytest.raises(ConfigError, match=rf"^job\.input={path} changed since .*: start the job again"):
                list(RangeReader(reader, index).rows(0, 20))


def test_change_outside_the_range_is_not_read(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"aaaa\n" * 100)
    reader = RowReader((path,))
    with small_pieces(32, 64):
        index = index_input(reader)
        path.write_bytes(b"bbbb\n" + b"aaaa\n" * 99)
        assert len(list(RangeReader(reader, index).rows(50, 100))) == 50
        assert index_input(reader).digest != index.digest


def test_pieces_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.jsonl").write_bytes(b"aaaaaaa\n" * 4096)
    reader = RowReader((tmp_path / "a.jsonl",))
    with small_pieces(32, 64):
        assert len(index_input(reader).files[0].marks) == 4096 * 8 // 64
        monkeypatch.setattr(input_index, "_PIECE_SHIFT", 4)
        assert len(index_input(reader).files[0].marks) < 100


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.replace(b'"num_rows": 2', b'"num_rows": 3'), "is damaged"),
        (lambda data: data[:-5], "is not an index of an input"),
        (lambda data: re.sub(b'"max_line_bytes": [0-9]+', b'"max_line_bytes": null', data), "is damaged: its numbers"),
        (lambda data: b"{}", "is not an index of version 1"),
        (lambda data: data.replace(b'"marks"', b'"names"'), "is not an index of an input"),
    ],
)
def test_damaged_index_is_rejected(tmp_path: Path, change: Callable[[bytes], bytes], why: str):
    (tmp_path / "a.jsonl").write_bytes(b"a\nb\n")
    data = index_input(RowReader((tmp_path / "a.jsonl",))).to_bytes()
    with pytest.raises(ConfigError, match=f"^{why}"):
        InputIndex.from_bytes(change(data))


def test_index_of_another_input_is_rejected(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(b"a\nb\n")
    one = RowReader.of(str(tmp_path / "a.jsonl"))
    with pytest.raises(ConfigError, match=r"^job\.input has 2 files, and its index 1: give the input"):
        RangeReader(RowReader.of(str(tmp_path / "*.jsonl")), index_input(one))
    RangeReader(one, index_input(replace(one, max_line_bytes=8)))
    (tmp_path / "a.jsonl").write_bytes(b"a\n" + b" " * 9 + b"\nb")
    with pytest.raises(ConfigError, match=r"^job\.input has blank lines of 9 bytes.* 8 in its index and .*: remove"):
        RangeReader(one, index_input(replace(one, max_line_bytes=8)))
