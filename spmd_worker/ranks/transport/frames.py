"""Frames on a stream socket: kind, number, length, payload.

    kind    1 byte
    number  8 bytes, little-endian: on the step channel the number of messages sent before, in answers the step; on a
            worker's queue the call, repeated in its result
    length  4 bytes, little-endian
    payload

One protocol for ranks (`FrameKind`) and for worker processes (`executor/worker_channel.py` has their kinds).
"""

import os
import socket
import struct
from enum import IntEnum
from typing import Final, NamedTuple

_HEAD: Final = struct.Struct("<BQI")
MAX_FRAME_BYTES: Final = 1 << 30
"""A larger length is invalid."""


class FrameKind(IntEnum):
    """Kinds of frames between ranks. A HEARTBEAT has no payload; its number is that of the messages sent so far. STEP
    is the reply to STEP_WANTED of a rank that is there.
    """

    HELLO = 1
    MESSAGE = 2
    ANSWER = 3
    RECORD_WANTED = 4
    RECORD = 5
    DIAGNOSIS = 6
    ABORT = 7
    HEARTBEAT = 8
    STEP_WANTED = 9
    STEP = 10


class Frame(NamedTuple):
    """One frame as it arrived."""

    kind: IntEnum
    number: int
    payload: bytes


class PeerGoneError(ConnectionError):
    """The other end closed the connection or died."""


class FrameError(ValueError):
    """Bytes that are not a valid frame."""


class FrameParser:
    """Turns received bytes into complete frames of `kinds`."""

    def __init__(self, kinds: type[IntEnum]) -> None:
        self._kinds = kinds
        self._data = bytearray()

    def feed(self, piece: bytes) -> list[Frame]:
        """The frames that `piece` completes. Raises FrameError for an invalid frame."""
        self._data += piece
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        if len(self._data) < _HEAD.size:
            return None
        kind, number, length = _read_head(self._data, self._kinds, MAX_FRAME_BYTES)
        end = _HEAD.size + length
        if len(self._data) < end:
            return None
        payload = bytes(memoryview(self._data)[_HEAD.size : end])
        del self._data[:end]
        return Frame(kind, number, payload)


def send_frame(connection: socket.socket, kind: IntEnum, number: int, payload: bytes = b"") -> None:
    """Send a frame. Raises PeerGoneError if the peer is gone, TimeoutError if it does not read, FrameError for a
    payload that is too long.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a payload of {len(payload)} bytes is longer than {MAX_FRAME_BYTES}")
    frame = _HEAD.pack(kind, number, len(payload)) + payload
    try:
        num_sent = _write_now(connection, frame)
        if num_sent < len(frame):
            connection.sendall(memoryview(frame)[num_sent:])
    except TimeoutError:
        raise
    except BlockingIOError:
        # The kernel's limit (SO_SNDTIMEO), without a Python timeout.
        raise TimeoutError("the other process does not read") from None
    except OSError as error:
        raise PeerGoneError(str(error)) from None


def _write_now(connection: socket.socket, frame: bytes) -> int:
    """Number of bytes written without a wait. A socket with a timeout would be polled before each send: a second system
    call, for each of a thousand ranks.
    """
    if connection.gettimeout() is None:
        return 0
    try:
        return os.write(connection.fileno(), frame)
    except BlockingIOError:
        return 0


def receive_frame(connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> Frame:
    """The next frame between ranks. Raises PeerGoneError at the end of the stream, TimeoutError after the socket's
    timeout, FrameError for an unknown kind or a payload above `max_bytes`, which is not read.
    """
    kind, number, length = _read_head(_receive_exactly(connection, _HEAD.size), FrameKind, max_bytes)
    return Frame(kind, number, _receive_exactly(connection, length) if length else b"")


def _read_head(data: bytes | bytearray, kinds: type[IntEnum], max_bytes: int) -> tuple[IntEnum, int, int]:
    kind, number, length = _HEAD.unpack_from(data)
    try:
        known = kinds(kind)
    except ValueError:
        known = None
    if known is None or length > max_bytes:
        raise FrameError(f"kind {kind}, length {length}: not a frame of this protocol")
    return known, number, length


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    received = bytearray(_read_now(connection, num_bytes))
    while len(received) < num_bytes:
        try:
            piece = connection.recv(num_bytes - len(received))
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGoneError(str(error)) from None
        if not piece:
            raise PeerGoneError("the connection was closed")
        received += piece
    return bytes(received)


def _read_now(connection: socket.socket, num_bytes: int) -> bytes:
    """Bytes that can be read without a wait, and without a poll before it."""
    if connection.gettimeout() is None:
        return b""
    try:
        return os.read(connection.fileno(), num_bytes)
    except BlockingIOError:
        return b""
    except OSError as error:
        raise PeerGoneError(str(error)) from None
