"""Forwards the workers' output line by line, each with a prefix: `(worker 1 pid=123) text`.

The driver reads both streams of each worker through pipes, so output of C libraries and of a dying interpreter has the
prefix too. A line written in pieces stays one line; an unfinished line is completed when its worker ends.
"""

import os
import selectors
import sys
from collections.abc import Mapping
from typing import IO, Final

_PIECE_BYTES: Final = 1 << 16
_MAX_LINE_BYTES: Final = 1 << 20
"""Longer unfinished lines are split."""


def line_prefix(rank: int, pid: int) -> str:
    """Prefix of a worker's lines."""
    return f"(worker {rank} pid={pid}) "


class LinePrefixer:
    """Turns pieces of one stream into complete lines with a prefix."""

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
        """The unfinished line, completed."""
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
    """Write to a stream of `sys`. Characters that its encoding lacks are escaped (`\\u4f60`)."""
    # Looked up each time: a program may replace it.
    stream = getattr(sys, name)
    if not lines or stream is None:
        return
    text = lines.decode(errors="replace")
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError as error:
            # For its own codecs, Python's error only says "charmap".
            encoding = stream.encoding or error.encoding
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        # The stream has no reader or is closed, which must not block a worker.
        return
