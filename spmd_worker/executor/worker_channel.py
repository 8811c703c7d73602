"""Task and result queue of one worker process: frames (`ranks/transport/frames.py`) on a Unix socket pair.

Frames arrive in order; their number is the call's.
"""

import socket
import struct
from enum import IntEnum
from typing import Final

_PIECE_BYTES: Final = 1 << 18


class FrameKind(IntEnum):
    """Tasks: SETUP (a method of the wrapper), CALL (a method of the worker), STEP, STOP. Answers: RESULT, FAILURE."""

    SETUP = 1
    CALL = 2
    STEP = 3
    STOP = 4
    RESULT = 5
    FAILURE = 6


def receive_piece(connection: socket.socket, *, wait: bool) -> bytes | None:
    """Bytes for a FrameParser; empty at the end of the stream, None if there are none and `wait` is False."""
    try:
        return connection.recv(_PIECE_BYTES, 0 if wait else socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        # A reset ends the stream too.
        return b""


def limit_sending(connection: socket.socket, timeout_s: float) -> None:
    """Limit `send_frame` to `timeout_s`; a Python timeout would limit receiving too."""
    seconds = int(timeout_s)
    limit = struct.pack("@ll", seconds, int((timeout_s - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
