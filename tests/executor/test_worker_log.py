"""Lines of workers: each with its worker's name and pid, whole, also where it was written in pieces or never ended."""

import io
import os
import sys
import threading

import pytest
from plain_executors import plain
from waiting import LIMIT_S

from spmd_worker.executor.worker_log import LinePrefixer, forward_lines, line_prefix


def prefixed(*pieces: bytes) -> list[bytes]:
    prefixer = LinePrefixer("(worker 1 pid=7) ")
    return [*[prefixer.feed(piece) for piece in pieces], prefixer.finish()]


def test_the_prefix_names_worker_and_process():
    assert line_prefix(1, 123) == "(worker 1 pid=123) "


def test_every_line_of_a_piece_has_the_prefix():
    assert prefixed(b"one\n\ntwo\n") == [b"(worker 1 pid=7) one\n(worker 1 pid=7) \n(worker 1 pid=7) two\n", b""]


def test_a_line_in_pieces_is_one_line():
    assert prefixed(b"on", b"e", b"\nt", b"wo\n") == [
        b"",
        b"",
        b"(worker 1 pid=7) one\n",
        b"(worker 1 pid=7) two\n",
        b"",
    ]


def test_what_is_unfinished_at_the_end_is_ended():
    assert prefixed(b"one\ntw", b"o") == [b"(worker 1 pid=7) one\n", b"", b"(worker 1 pid=7) two\n"]


def test_a_character_in_pieces_is_one_character():
    first, second = "ä".encode()[:1], "ä".encode()[1:]
    assert b"".join(prefixed(first, second + b"\n")).decode() == "(worker 1 pid=7) ä\n"


def test_overlong_line_is_split():
    pieces = [b"x" * 300_000] * 5
    *lines, last = prefixed(*pieces)
    assert [len(line) for line in lines] == [0, 0, 0, len("(worker 1 pid=7) \n") + 1_200_000, 0]
    assert last == b"(worker 1 pid=7) " + b"x" * 300_000 + b"\n"


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("latin-1", b"w: caf\xe9 \\u4f60\n"),
        ("ascii", b"w: caf\\xe9 \\u4f60\n"),
        # Python's error names these two "charmap", which is Latin-1 to it.
        ("iso8859-15", b"w: caf\xe9 \\u4f60\n"),
        ("koi8-r", b"w: caf\\xe9 \\u4f60\n"),
    ],
)
def test_unencodable_characters_are_escaped(monkeypatch: pytest.MonkeyPatch, encoding: str, written: bytes):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    reader, writer = os.pipe()
    os.write(writer, "café 你\n".encode())
    os.close(writer)
    forward_lines("w: ", {"stdout": os.fdopen(reader, "rb", 0)})
    assert stream.buffer.getvalue() == written  # type: ignore[attr-defined]  # a BytesIO


def test_unread_stream_does_not_block_worker(monkeypatch: pytest.MonkeyPatch):
    class Closed:
        def write(self, text: str) -> None:
            raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(sys, "stdout", Closed())
    reader, writer = os.pipe()
    thread = threading.Thread(target=forward_lines, args=("", {"stdout": os.fdopen(reader, "rb", 0)}))
    thread.start()
    for _ in range(100):
        os.write(writer, b"x" * 10_000 + b"\n")
    os.close(writer)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_worker_lines_are_prefixed_on_their_stream(capfd: pytest.CaptureFixture[str]):
    with plain() as executor:
        first, second = executor.worker_pids
        executor.collective_rpc("write", args=("he", "llo\nw", "orld\n"))
        executor.collective_rpc("write", args=("warn", "ing\n"), kwargs={"stream": "stderr"})
        executor.collective_rpc("write", args=("left unfinished",))
    out, errors = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        *(f"(worker 0 pid={first}) {line}" for line in ("hello", "left unfinished", "world")),
        *(f"(worker 1 pid={second}) {line}" for line in ("hello", "left unfinished", "world")),
    ]
    assert sorted(line for line in errors.splitlines() if line.startswith("(worker")) == [
        f"(worker 0 pid={first}) warning",
        f"(worker 1 pid={second}) warning",
    ]


def test_interpreter_crash_output_is_prefixed(capfd: pytest.CaptureFixture[str]):
    with plain() as executor:
        pid = executor.worker_pids[1]
        future = executor.collective_rpc("act_on", args=(1, "fault"), non_block=True)[1]
        assert future.exception(timeout=LIMIT_S) is not None
    errors = capfd.readouterr().err
    assert f"(worker 1 pid={pid}) Fatal Python error: Segmentation fault\n" in errors
    assert f'(worker 1 pid={pid})   File "' in errors
