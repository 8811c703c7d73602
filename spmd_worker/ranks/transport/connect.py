"""Connects the ranks of a replica: followers to rank 0 over TCP, or all ranks over gloo if that is not possible. With
many ranks followers also connect to relays (`relay_tree.py`); if one cannot, rank 0 serves all.

The listening socket is bound to loopback for a replica on one node and to the launcher's interface otherwise, never to
all interfaces; it closes when all ranks are connected. A client must send a random token from the control group.
"""

import hmac
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from spmd_worker.ranks.network_interface import local_address
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.ranks.transport.frames import FrameError, FrameKind, PeerGoneError, receive_frame, send_frame
from spmd_worker.ranks.transport.relay_channel import TcpLeaf, TcpRelay, TreeLeader
from spmd_worker.ranks.transport.relay_tree import RelayTree, tree_of
from spmd_worker.ranks.transport.step_channel import GlooStepChannel, TcpFollower, TcpLeader

logger = logging.getLogger(__name__)

_CONNECT_S: Final = 10.0
_TOKEN_BYTES: Final = 16
_HELLO_TIMEOUT_S: Final = 2.0


def open_step_channel(
    control: ControlChannel,
    master_address: str | None,
    timeout_s: float,
    min_relayed_ranks: int | None = None,
) -> TcpLeader | TcpFollower | GlooStepChannel:
    """Connect this rank; every rank of the replica calls this. `master_address` is None if all ranks are on one node.
    Falls back to gloo, with a warning from rank 0, unless every rank is connected. From `min_relayed_ranks` on, by
    default `MIN_RELAYED_RANKS`, there are relays.
    """
    is_leader = control.rank == 0
    opened = _lead(control, master_address) if is_leader else _join(control)
    # Rank 0 only knows that a rank is missing; that rank, later in the list, knows why.
    problem = _last_problem(control, opened)
    if problem is not None:
        if not isinstance(opened, str):
            opened.close()
        if is_leader:
            logger.warning("step messages go over gloo, which is slower: %s", problem)
        return GlooStepChannel(control)
    assert not isinstance(opened, str), opened
    tree = tree_of(control.size, min_relayed_ranks)
    channel = _with_relays(control, opened, tree, master_address, timeout_s) if tree.has_relays else None
    if channel is None and is_leader:
        channel = TcpLeader(opened.connections, timeout_s)
    elif channel is None:
        channel = TcpFollower(opened.connections[0], control.rank, control.size, timeout_s)
    if isinstance(channel, TcpLeader | TcpRelay):
        channel.start()
    return channel


class _Opened(NamedTuple):
    """Connections of a rank in rank order, and what a client of the replica must send."""

    connections: list[socket.socket]
    token: bytes

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def _last_problem(control: ControlChannel, opened: _Opened | str) -> str | None:
    problems = [text.decode() for text in control.gather(opened.encode() if isinstance(opened, str) else b"")]
    return next((text for text in reversed(problems) if text), None)


def _with_relays(
    control: ControlChannel, opened: _Opened, tree: RelayTree, master_address: str | None, timeout_s: float
) -> TcpLeader | TcpFollower | None:
    """This rank's end of the tree; None, on every rank, if some rank cannot connect to its relay."""
    rank, children = control.rank, tree.children(control.rank)
    links = _link(control, opened.token, tree, master_address)
    problem = _last_problem(control, links)
    if problem is not None:
        if not isinstance(links, str):
            links.close()
        if rank == 0:
            logger.warning("rank 0 sends its step messages to every rank itself, which is slower: %s", problem)
        return None
    assert not isinstance(links, str), links
    if rank == 0:
        return TreeLeader(opened.connections, timeout_s, tree)
    (connection,) = opened.connections
    if children:
        return TcpRelay(connection, rank, control.size, timeout_s, links.connections)
    if links.connections:
        return TcpLeaf(connection, rank, control.size, timeout_s, tree.parent(rank), links.connections[0])
    return TcpFollower(connection, rank, control.size, timeout_s)


def _link(control: ControlChannel, token: bytes, tree: RelayTree, master_address: str | None) -> _Opened | str:
    """Connect a relay with its children, or a leaf with its relay. Every rank calls this."""
    rank, children = control.rank, tree.children(control.rank)
    if not (rank and children):
        addresses = [json.loads(each) for each in control.gather(json.dumps(None).encode())]
        relay = tree.parent(rank) if rank else 0
        return _connect(addresses[relay], token, rank, relay) if relay else _Opened([], token)
    try:
        listener = socket.create_server((local_address(master_address), 0), backlog=len(children))
    except OSError as error:
        control.gather(json.dumps(None).encode())
        return f"rank {rank} cannot listen ({error})"
    with listener:
        control.gather(json.dumps(listener.getsockname()[:2]).encode())
        return _accept_all(listener, children, token)


def _lead(control: ControlChannel, master_address: str | None) -> _Opened | str:
    token = os.urandom(_TOKEN_BYTES)
    try:
        listener = socket.create_server((local_address(master_address), 0), backlog=control.size)
    except OSError as error:
        control.broadcast(json.dumps(None).encode())
        return f"rank 0 cannot listen ({error})"
    with listener:
        host, port = listener.getsockname()[:2]
        control.broadcast(json.dumps([host, port, token.hex()]).encode())
        return _accept_all(listener, list(range(1, control.size)), token)


def _accept_all(listener: socket.socket, ranks: list[int], token: bytes) -> _Opened | str:
    """Connections of `ranks`; foreign clients are rejected, and missing ranks are awaited for a limited time."""
    deadline_s = time.monotonic() + _CONNECT_S
    connections: dict[int, socket.socket] = {}
    while len(connections) < len(ranks) and time.monotonic() < deadline_s:
        listener.settimeout(max(deadline_s - time.monotonic(), 0.001))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        except OSError as error:
            # Such as a limit of open files below the number of ranks; ranks that come later only see a closed port.
            logger.warning("%d ranks cannot be accepted: %s", len(ranks), error)
            break
        rank = _greet(connection, token)
        if rank not in ranks or rank in connections:
            connection.close()
        else:
            connections[rank] = connection
    missing = [rank for rank in ranks if rank not in connections]
    if not missing:
        return _Opened([connections[rank] for rank in ranks], token)
    for connection in connections.values():
        connection.close()
    return f"rank {missing[0]} could not connect to {listener.getsockname()[0]}"


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


def _join(control: ControlChannel) -> _Opened | str:
    address = json.loads(control.broadcast(None))
    if address is None:
        return ""
    host, port, token = address
    return _connect((host, port), bytes.fromhex(token), control.rank, 0)


def _connect(address: Sequence[Any] | None, token: bytes, rank: int, to: int) -> _Opened | str:
    if address is None:
        # Rank `to` says why.
        return ""
    host, port = address
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_frame(connection, FrameKind.HELLO, rank, token)
    except OSError as error:
        return f"rank {rank} cannot reach {f'rank {to} at ' if to else ''}{host}:{port} ({error})"
    return _Opened([connection], token)
