"""What workers write, line by line with the worker's name: `(worker 1 pid=123) text`.

The driver reads both streams of each worker through pipes, so what C libraries write, and what a dying interpreter
writes, has its prefix too. A line that is written in pieces is one line; what a worker leaves unfinished when it ends
is ended here.
"""

import os
import selectors
import sys
from collections.abc import Mapping
from typing import IO, Final

_PIECE_BYTES: Final = 1 << 16
_MAX_LINE_BYTES: Final = 1 << 20
"""An unfinished line is held at most this long."""


def line_prefix(rank: int, pid: int) -> str:
    """What stands before every line of a worker."""
    return f"(worker {rank} pid={pid}) "


class LinePrefixer:
    """Pieces of one stream in, whole lines with their prefix out."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._rest = bytearray()

    def feed(self, piece: bytes) -> bytes:
        """The lines that `piece` completes, each with the prefix and its newline."""
        self._rest += piece
        *lines, rest = bytes(self._rest).split(b"\n") if b"\n" in piece else (bytes(self._rest),)
        if len(rest) > _MAX_LINE_BYTES:
            lines.append(rest)
            rest = b""
        self._rest = bytearray(rest)
        return b"".join([b"%b%b\n" % (self._prefix, line) for line in lines])

    def finish(self) -> bytes:
        """What was left unfinished, ended."""
        return self.feed(b"\n") if self._rest else b""


def forward_lines(prefix: str, pipes: Mapping[str, IO[bytes]]) -> None:
    """Copy each pipe to this process's stream of that name (`stdout`, `stderr`) until all have ended; closes them."""
    with selectors.DefaultSelector() as selector:
        for name, pipe in pipes.items():
            selector.register(pipe, selectors.EVENT_READ, (name, LinePrefixer(prefix)))
        while selector.get_map():
            for key, _ in selector.select():
                name, prefixer = key.data
                piece = os.read(key.fd, _PIECE_BYTES)
                _write(name, prefixer.feed(piece) if piece else prefixer.finish())
                if not piece:
                    selector.unregister(key.fileobj)
                    pipes[name].close()


def _write(name: str, lines: bytes) -> None:
    """The stream is looked up each time, because a program may put another in its place. What its encoding has no
    character for is written as its escape (`\\u4f60`).
    """
    stream = getattr(sys, name)
    if not lines or stream is None:
        return
    text = lines.decode(errors="replace")
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError as error:
            # Of its own encodings Python's error says "charmap" alone.
            encoding = stream.encoding or error.encoding
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        # Nobody reads it, or it was closed: a worker must not stand still for that.
        return
