import os
import tracemalloc

import pytest

from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.input.row_reader import RowReader


def rows_of(tmp_path, content, **limits):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    return list(RowReader((path,), **limits))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"\n\na\n \t\n\r\nb\n\n", [b"a", b"b"]),
        (b"\xef\xbb\xbfa\nb\n", [b"a", b"b"]),
        (b"\xef\xbb\xbf\na\n", [b"a"]),
        (b"a\n\xef\xbb\xbfb\n", [b"a", b"\xef\xbb\xbfb"]),
        (b"a\rb\n", [b"a\rb"]),
        ("a\u2028b\x0bc\n".encode(), ["a\u2028b\x0bc".encode()]),
        (b"\x00\n", [b"\x00"]),
    ],
)
def test_rows_are_non_blank_lines_numbered_from_0(tmp_path, content, expected):
    assert rows_of(tmp_path, content) == list(enumerate(expected))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_may_be_exactly_as_long_as_limit(tmp_path, end, mark):
    assert rows_of(tmp_path, mark + b"x" * 8 + end, max_line_bytes=8) == [(0, b"x" * 8)]
    assert rows_of(tmp_path, mark + b"x" * 9 + end, max_line_bytes=8) == [(0, b"x" * 9)]


@pytest.mark.parametrize("length", [9, 10, 11, 12, 13, 100])
def test_longer_line_is_cut_behind_the_limit(tmp_path, length):
    """The reader gives one byte more than the limit, and the next line is complete."""
    content = b"a\n" + b"x" * length + b"\nb\n"
    assert rows_of(tmp_path, content, max_line_bytes=8) == [(0, b"a"), (1, b"x" * 9), (2, b"b")]
    content = b"a\n" + b"x" * (length - 1) + b"\ry\nb"
    assert rows_of(tmp_path, content, max_line_bytes=8)[2] == (2, b"b")


def test_long_line_with_blank_beginning_is_a_row(tmp_path):
    assert [len(line) for _, line in rows_of(tmp_path, b" " * 20 + b"{}\n", max_line_bytes=8)] == [9]


def test_memory_is_bounded_by_limit_not_by_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    with open(path, "wb") as file:
        for _ in range(32):
            file.write(b"x" * 1024 * 1024)
        file.write(b"\nb\n")
    tracemalloc.start()
    assert [len(line) for _, line in RowReader((path,), max_line_bytes=1000)] == [1001, 1]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 * 1024 * 1024


def test_dash_is_standard_input_which_stays_open(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_bytes(b"a\n\nb")
    with (tmp_path / "rows.jsonl").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert list(RowReader.of("-")) == [(0, b"a"), (1, b"b")]
        assert os.fstat(stdin.fileno()).st_size == 4


def test_closed_standard_input_is_a_config_error(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ConfigError, match=r"^job\.input=-, .*standard input .*closed"):
        list(RowReader.of("-"))


def test_file_can_be_read_again(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"a\nb\n")
    reader = RowReader((tmp_path / "rows.jsonl",))
    assert list(reader) == list(reader)


def test_missing_file_is_os_error_naming_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        list(RowReader((tmp_path / "absent.jsonl",)))
