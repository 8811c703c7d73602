"""Frames of a worker's queue: whole however they are cut, refused when they are not ours, never stuck for ever."""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_worker.executor.worker_channel import FrameKind, limit_sending, receive_piece
from spmd_worker.ranks.transport.frames import Frame, FrameError, FrameParser, PeerGoneError, send_frame

FRAMES = [Frame(FrameKind.CALL, 0, b"first"), Frame(FrameKind.STEP, 1, b""), Frame(FrameKind.RESULT, 2**63, b"x" * 999)]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def sent(frames: list[Frame]) -> bytes:
    one, other = socket.socketpair()
    with one, other:
        for frame in frames:
            send_frame(one, *frame)
        data = receive_piece(other, wait=True)
        assert data is not None
        return data


@given(st.lists(st.integers(min_value=1, max_value=400), max_size=20))
def test_frames_are_parsed_from_any_pieces(lengths: list[int]):
    data, parser, frames, start = sent(FRAMES), FrameParser(FrameKind), [], 0
    for length in lengths:
        frames += parser.feed(data[start : start + length])
        start += length
    assert [*frames, *parser.feed(data[start:])] == FRAMES


@pytest.mark.parametrize("head", [b"\x00" + bytes(12), b"\x63" + bytes(12), b"\x01" + bytes(8) + b"\xff" * 4])
def test_foreign_bytes_are_rejected_at_once(head: bytes):
    with pytest.raises(FrameError, match=r"^kind \d+, length \d+: .*frame"):
        FrameParser(FrameKind).feed(head)


def test_end_of_stream_differs_from_silence(pair: tuple[socket.socket, socket.socket]):
    one, other = pair
    assert receive_piece(one, wait=False) is None
    send_frame(other, FrameKind.STOP, 0)
    other.close()
    assert FrameParser(FrameKind).feed(receive_piece(one, wait=True) or b"") == [Frame(FrameKind.STOP, 0, b"")]
    assert receive_piece(one, wait=False) == b""
    with pytest.raises(PeerGoneError):
        send_frame(one, FrameKind.STOP, 0)


def test_send_limit_does_not_limit_receiving(pair: tuple[socket.socket, socket.socket]):
    one, other = pair
    limit_sending(one, 0.2)
    with pytest.raises(TimeoutError, match=r"other process .*not"):
        send_frame(one, FrameKind.CALL, 0, bytes(10_000_000))
    send_frame(other, FrameKind.RESULT, 0)
    assert receive_piece(one, wait=True) is not None
