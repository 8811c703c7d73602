"""The task and result queue of one worker process: frames on a Unix socket pair.

    kind    1 byte
    number  8 bytes, little-endian: the call; its result bears the same
    length  4 bytes, little-endian
    payload

Frames arrive in the order in which they were sent. Knows sockets. Knows nothing about what payloads mean, and never
unpickles one.
"""

import socket
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from spmd_worker.lockstep.transport.frames import MAX_FRAME_BYTES, FrameError, PeerGoneError

_HEAD: Final = struct.Struct("<BQI")
_PIECE_BYTES: Final = 1 << 18


class FrameKind(IntEnum):
    """Tasks of a worker: SETUP (a method of its wrapper), CALL (a method of the worker), STEP, STOP. Answers: RESULT,
    FAILURE.
    """

    SETUP = 1
    CALL = 2
    STEP = 3
    STOP = 4
    RESULT = 5
    FAILURE = 6


class Frame(NamedTuple):
    """One frame as it arrived."""

    kind: FrameKind
    number: int
    payload: bytes


class FrameParser:
    """Bytes as they come in, frames as they are whole."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, piece: bytes) -> list[Frame]:
        """The frames that `piece` completes. Raises FrameError for bytes that are no frame of ours."""
        self._data += piece
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        if len(self._data) < _HEAD.size:
            return None
        kind, number, length = _HEAD.unpack_from(self._data)
        if kind not in FrameKind.__members__.values() or length > MAX_FRAME_BYTES:
            raise FrameError(f"kind {kind}, length {length}: not a frame of this protocol")
        end = _HEAD.size + length
        if len(self._data) < end:
            return None
        payload = bytes(memoryview(self._data)[_HEAD.size : end])
        del self._data[:end]
        return Frame(FrameKind(kind), number, payload)


def send_frame(connection: socket.socket, kind: FrameKind, number: int, payload: bytes = b"") -> None:
    """Raises PeerGoneError when nobody is there, TimeoutError when nobody reads (see `limit_sending`), FrameError for a
    payload that is too long.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a payload of {len(payload)} bytes is longer than {MAX_FRAME_BYTES}")
    try:
        connection.sendall(_HEAD.pack(kind, number, len(payload)) + payload)
    except BlockingIOError:
        raise TimeoutError("the other process does not read") from None
    except OSError as error:
        raise PeerGoneError(str(error)) from None


def receive_piece(connection: socket.socket, *, wait: bool) -> bytes | None:
    """Bytes for a FrameParser: none at the end of the stream, None where nothing has come and `wait` is False."""
    try:
        return connection.recv(_PIECE_BYTES, 0 if wait else socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        # A reset is an end too.
        return b""


def limit_sending(connection: socket.socket, timeout_s: float) -> None:
    """Let `send_frame` give up after `timeout_s`. Receiving stays as it is, which a Python timeout would change too."""
    seconds = int(timeout_s)
    limit = struct.pack("@ll", seconds, int((timeout_s - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
