"""Connects the ranks of a replica: followers to rank 0 over TCP, or all ranks over gloo if that is not possible.

The listening socket is bound to loopback for a replica on one node and to the launcher's interface otherwise, never to
all interfaces; it closes when all ranks are connected. A client must send a random token from the control group.
"""

import hmac
import json
import logging
import os
import socket
import time
from typing import Final

from spmd_worker.ranks.network_interface import local_address
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.ranks.transport.frames import FrameError, FrameKind, PeerGoneError, receive_frame, send_frame
from spmd_worker.ranks.transport.step_channel import GlooStepChannel, TcpFollower, TcpLeader

logger = logging.getLogger(__name__)

_CONNECT_S: Final = 10.0
_TOKEN_BYTES: Final = 16
_HELLO_TIMEOUT_S: Final = 2.0


def open_step_channel(
    control: ControlChannel, master_address: str | None, timeout_s: float
) -> TcpLeader | TcpFollower | GlooStepChannel:
    """Connect this rank; every rank of the replica calls this. `master_address` is None if all ranks are on one node.
    Falls back to gloo, with a warning from rank 0, unless every rank is connected.
    """
    is_leader = control.rank == 0
    channel = _lead(control, master_address, timeout_s) if is_leader else _join(control, timeout_s)
    problems = [text.decode() for text in control.gather(channel.encode() if isinstance(channel, str) else b"")]
    # Rank 0 only knows that a rank is missing; that rank, later in the list, knows why.
    problem = next((text for text in reversed(problems) if text), None)
    if problem is None:
        assert not isinstance(channel, str), channel
        if isinstance(channel, TcpLeader):
            channel.start()
        return channel
    if not isinstance(channel, str):
        channel.close()
    if is_leader:
        logger.warning("step messages go over gloo, which is slower: %s", problem)
    return GlooStepChannel(control)


def _lead(control: ControlChannel, master_address: str | None, timeout_s: float) -> TcpLeader | str:
    token = os.urandom(_TOKEN_BYTES)
    try:
        listener = socket.create_server((local_address(master_address), 0), backlog=control.size)
    except OSError as error:
        control.broadcast(json.dumps(None).encode())
        return f"rank 0 cannot listen ({error})"
    with listener:
        host, port = listener.getsockname()[:2]
        control.broadcast(json.dumps([host, port, token.hex()]).encode())
        connections = _accept_all(listener, control.size, token)
    missing = [rank for rank in range(1, control.size) if rank not in connections]
    if missing:
        for connection in connections.values():
            connection.close()
        return f"rank {missing[0]} could not connect to {host}"
    return TcpLeader([connections[rank] for rank in range(1, control.size)], timeout_s)


def _accept_all(listener: socket.socket, size: int, token: bytes) -> dict[int, socket.socket]:
    """Connections by rank; foreign clients are rejected, and missing ranks are awaited for a limited time."""
    deadline_s = time.monotonic() + _CONNECT_S
    connections: dict[int, socket.socket] = {}
    while len(connections) < size - 1 and time.monotonic() < deadline_s:
        listener.settimeout(max(deadline_s - time.monotonic(), 0.001))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        rank = _greet(connection, token)
        if rank is None or not 0 < rank < size or rank in connections:
            connection.close()
        else:
            connections[rank] = connection
    return connections


def _greet(connection: socket.socket, token: bytes) -> int | None:
    """The rank of a client; None if it is foreign."""
    connection.settimeout(_HELLO_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        # An unknown client: nothing longer than a token is read.
        frame = receive_frame(connection, max_bytes=_TOKEN_BYTES)
    except (TimeoutError, PeerGoneError, FrameError):
        return None
    is_ours = frame.kind is FrameKind.HELLO and hmac.compare_digest(frame.payload, token)
    return frame.number if is_ours else None


def _join(control: ControlChannel, timeout_s: float) -> TcpFollower | str:
    address = json.loads(control.broadcast(None))
    if address is None:
        return ""
    host, port, token = address
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_frame(connection, FrameKind.HELLO, control.rank, bytes.fromhex(token))
    except OSError as error:
        return f"rank {control.rank} cannot reach {host}:{port} ({error})"
    return TcpFollower(connection, control.rank, control.size, timeout_s)
