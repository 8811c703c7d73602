"""Frames on a stream socket: kind, number, length, payload.

    kind    1 byte
    number  8 bytes, little-endian: how many messages were sent before this one; in answers, the step
    length  4 bytes, little-endian
    payload

Knows sockets. Knows nothing about what payloads mean, and never unpickles one.
"""

import socket
import struct
from enum import IntEnum
from typing import Final, NamedTuple

_HEAD: Final = struct.Struct("<BQI")
MAX_FRAME_BYTES: Final = 1 << 30
"""A length above this is not a frame of ours."""


class FrameKind(IntEnum):
    """What a frame is for. HEARTBEAT carries no payload: its number says how many messages were sent so far."""

    HELLO = 1
    MESSAGE = 2
    ANSWER = 3
    RECORD_WANTED = 4
    RECORD = 5
    DIAGNOSIS = 6
    ABORT = 7
    HEARTBEAT = 8


class Frame(NamedTuple):
    """One frame as it arrived."""

    kind: FrameKind
    number: int
    payload: bytes


class PeerGoneError(ConnectionError):
    """The other end closed the connection or died."""


class FrameError(ValueError):
    """Bytes that are not a frame of ours."""


def send_frame(connection: socket.socket, kind: FrameKind, number: int, payload: bytes = b"") -> None:
    """One send a frame. Raises PeerGoneError when nobody is there, TimeoutError when nobody reads."""
    try:
        connection.sendall(_HEAD.pack(kind, number, len(payload)) + payload)
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerGoneError(str(error)) from None


def receive_frame(connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> Frame:
    """The next frame, whole. Raises PeerGoneError at the end of the stream, TimeoutError after the socket's timeout,
    FrameError for a kind that does not exist or a payload above `max_bytes`, before any of it is read.
    """
    kind, number, length = _HEAD.unpack(_receive_exactly(connection, _HEAD.size))
    if kind not in FrameKind.__members__.values() or length > max_bytes:
        raise FrameError(f"kind {kind}, length {length}: not a frame of this protocol")
    return Frame(FrameKind(kind), number, _receive_exactly(connection, length) if length else b"")


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
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
