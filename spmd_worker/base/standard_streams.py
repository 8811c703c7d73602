"""Standard streams of a program: there when they are closed, and without effect on it when nobody reads them.

Needs no package: a program imports it before everything else.
"""

import contextlib
import errno
import io
import os
import sys
from typing import Any, BinaryIO, cast


def open_standard_streams() -> None:
    """One of the first calls of a program of ours. Standard streams that are closed (`2>&-`, some daemons) become
    /dev/null: else the next file that is opened would have their number, and what libraries write to standard error
    would be in it. Reading standard input remains an error.

    What is written to a standard error that takes no more is lost: a job goes on when its terminal is closed, when the
    reader of its log ends (`| head`), or when the disk of its log is full. A log that goes on later says so.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_WRONLY), True)
    if sys.stdout is None:
        stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "backslashreplace")
        vars(sys).update(stdout=stdout, __stdout__=stdout)
    elif sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        # A locale may lack letters of a name or an answer, and a name may hold bytes that are no letter. A stream whose
        # file was replaced by a pipe since, as in a fork, cannot be changed.
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is not sys.__stderr__:
        # A caller's own stream, in the caller's process.
        return
    buffer = io.BufferedWriter(_LossyFile(2, "w", closefd=False))
    encoding = getattr(sys.stderr, "encoding", "utf-8")
    stderr = io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True, write_through=True)
    # The types' stubs say that the second name is never assigned.
    vars(sys).update(stderr=stderr, __stderr__=stderr)


def keep_on_without_reader() -> None:
    """Writes to standard output are lost from now on once its reader has ended (`| head`): a program that checks
    something ends with the result of the check. A caller's own stream is left as it is.
    """
    stream = sys.stdout
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return
    raw = _UnreadFile(stream.fileno(), "w", closefd=False)
    buffer = io.BufferedWriter(raw) if stream.line_buffering or not stream.write_through else raw
    stdout = io.TextIOWrapper(
        cast("BinaryIO", buffer),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    vars(sys).update(stdout=stdout, __stdout__=stdout)


def has_reader() -> bool:
    """Whether the reader of standard output has not ended, as far as writes have shown."""
    buffer = getattr(sys.stdout, "buffer", None)
    return not getattr(getattr(buffer, "raw", buffer), "is_unread", False)


def discard_output() -> None:
    """Nothing more can be written to standard output, at the end of the process either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_full(error: OSError) -> bool:
    """True for an error of a full disk that names no file, as that of standard output."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename is None


class _UnreadFile(io.FileIO):
    """A pipe whose writes have no effect when its reader has ended."""

    is_unread = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            self.is_unread = True
            return memoryview(data).nbytes


class _LossyFile(io.FileIO):
    """A file whose failing writes have no effect, but that the next one that does not fail says how much is lost."""

    _num_lost = 0

    def write(self, data: Any, /) -> int:
        num_bytes = memoryview(data).nbytes
        try:
            if self._num_lost and super().write(b"[%d bytes of this log are lost]\n" % self._num_lost) is not None:
                self._num_lost = 0
            # None: a terminal or pipe that does not block, and is full.
            written = None if self._num_lost else super().write(data)
        except OSError:
            written = None
        self._num_lost += num_bytes if written is None else 0
        return num_bytes if written is None else written
