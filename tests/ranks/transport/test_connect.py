"""Connecting the ranks of a replica: who is let in, where rank 0 listens, and what happens when that cannot be had."""

import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from open_links import open_links
from thread_control import thread_controls
from waiting import wait_until

from spmd_worker.ranks.transport import connect
from spmd_worker.ranks.transport.connect import open_step_channel
from spmd_worker.ranks.transport.frames import FrameKind, send_frame
from spmd_worker.ranks.transport.relay_channel import TcpLeaf, TcpRelay, TreeLeader
from spmd_worker.ranks.transport.step_channel import GlooStepChannel, TcpFollower, TcpLeader

TIMEOUT_S = 20.0
Address = tuple[str, int]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Neither a socket nor a thread, whatever the test did; it closes what it was given."""
    threads, sockets = threading.enumerate(), open_sockets()
    yield
    # A channel's thread is not waited for without end.
    wait_until(lambda: all(thread in threads for thread in threading.enumerate()))
    assert open_sockets() <= sockets


@pytest.fixture(autouse=True)
def _nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are stopped for seconds would use gloo, which is right and not what is looked at here."""
    monkeypatch.setattr(connect, "_HELLO_TIMEOUT_S", 600.0)
    monkeypatch.setattr(connect, "_CONNECT_S", 600.0)


def open_sockets() -> int:
    return sum(link.startswith("socket:") for link in open_links())


def open_all(
    size: int,
    before_broadcast: Callable[[bytes], None] = lambda payload: None,
    master: str | None = None,
    min_relayed_ranks: int | None = None,
):
    """Every rank's channel; `before_broadcast` sees rank 0's address before the others do."""
    controls = thread_controls(size)
    controls[0].table.before_broadcast = before_broadcast
    with ThreadPoolExecutor(size) as pool:
        futures = [
            pool.submit(open_step_channel, control, master, TIMEOUT_S, min_relayed_ranks) for control in controls
        ]
        return [future.result(60) for future in futures]


def close_all(channels) -> None:
    for channel in channels:
        channel.close()


def check_messages_cross(channels) -> None:
    leader, *followers = channels
    with ThreadPoolExecutor(len(channels)) as pool:
        answers = [pool.submit(follower.answer, 1, bytes([follower.rank])) for follower in followers]
        assert leader.collect(1) == [bytes([rank]) for rank in range(1, len(channels))]
        received = [pool.submit(follower.receive) for follower in followers]
        leader.send(b"message")
        assert [future.result(TIMEOUT_S) for future in received] == [b"message"] * len(followers)
        assert [future.result(TIMEOUT_S) for future in answers] == [None] * len(followers)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_connects_to_rank_0_over_tcp(size: int):
    channels = open_all(size)
    assert [type(channel) for channel in channels] == [TcpLeader] + [TcpFollower] * (size - 1)
    assert [channel.rank for channel in channels] == list(range(size))
    check_messages_cross(channels)
    close_all(channels)


def test_ranks_of_groups_connect_to_their_relays():
    channels = open_all(8, min_relayed_ranks=2)
    kinds = [TreeLeader, TcpFollower, TcpFollower, TcpRelay, TcpLeaf, TcpLeaf, TcpRelay, TcpLeaf]
    assert [type(channel) for channel in channels] == kinds
    check_messages_cross(channels)
    close_all(channels)


@pytest.mark.parametrize("place", ["create_connection", "create_server"])
def test_ranks_without_relays_are_a_star(monkeypatch, caplog, place: str):
    """The first of a group cannot listen, or another not connect to it."""
    right, lock, numbers = getattr(socket, place), threading.Lock(), iter(range(100))

    def refuse_later_ones(*arguments, **options) -> socket.socket:
        with lock:
            is_first = next(numbers) < (3 if place == "create_connection" else 1)
        return right(*arguments, **options) if is_first else refuse()

    link = connect._link

    def link_soon(*arguments) -> connect._Opened | str:
        # Every rank is connected with rank 0, however late it was: only for one that never comes the wait is short.
        monkeypatch.setattr(connect, "_CONNECT_S", 0.3)
        return link(*arguments)

    monkeypatch.setattr(socket, place, refuse_later_ones)
    monkeypatch.setattr(connect, "_link", link_soon)
    channels = open_all(4, min_relayed_ranks=2)
    assert [type(channel) for channel in channels] == [TcpLeader, *[TcpFollower] * 3]
    assert "rank 0 sends its step messages to every rank itself, which is slower: rank" in caplog.text
    check_messages_cross(channels)
    close_all(channels)


@pytest.mark.parametrize("master", [None, "127.0.0.1"])
def test_rank_0_listens_on_loopback_until_all_connect(monkeypatch, master):
    """Rank 0 of a single node listens on loopback alone, and no longer than until every rank has connected."""
    bound: list[Address] = []
    listeners: list[socket.socket] = []
    right = socket.create_server

    def create_server(address: Address, **options) -> socket.socket:
        listeners.append(right(address, **options))
        bound.append(listeners[-1].getsockname())
        return listeners[-1]

    monkeypatch.setattr(socket, "create_server", create_server)
    close_all(open_all(2, master=master))
    assert [host for host, _ in bound] == ["127.0.0.1"]
    # Not by a connection: the system gives the port to others again.
    assert [listener.fileno() for listener in listeners] == [-1]


def test_rank_0_listens_on_one_interface_across_nodes():
    """No packet is sent: 192.0.2.1 is an address for documentation, which nobody has."""
    try:
        address = connect.local_address("192.0.2.1")
    except OSError:
        # A machine without any route has no such interface, and rank 0 says that it cannot listen.
        return
    assert address not in ("", "0.0.0.0", "::")


# Strangers.


def stranger(report: Callable[[socket.socket], None]) -> tuple[Callable[[bytes], None], list[socket.socket]]:
    """Connects before any rank can, and speaks."""
    sockets: list[socket.socket] = []

    def come(payload: bytes) -> None:
        address = json.loads(payload)
        if address is not None and not sockets:
            sockets.append(socket.create_connection(address[:2], timeout=5))
            report(sockets[0])

    return come, sockets


STRANGERS = {
    "with a token of its own": lambda connection: send_frame(connection, FrameKind.HELLO, 1, os.urandom(16)),
    "without a token": lambda connection: send_frame(connection, FrameKind.HELLO, 1),
    "with another kind of frame": lambda connection: send_frame(connection, FrameKind.ABORT, 1, b"\0go away"),
    "with bytes that are no frame": lambda connection: connection.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "with a length that would fill the memory": lambda connection: connection.sendall(
        struct.pack("<BQI", FrameKind.HELLO, 1, 1 << 29) + bytes(1 << 16)
    ),
    "that leaves again": lambda connection: connection.shutdown(socket.SHUT_RDWR),
}


@pytest.mark.parametrize("report", STRANGERS.values(), ids=STRANGERS.keys())
def test_stranger_is_rejected_and_ranks_connect(report):
    # Nobody waits for a stranger that has said something: with those seconds the ranks would not connect in time.
    assert connect._HELLO_TIMEOUT_S == 600.0
    come, sockets = stranger(report)
    channels = open_all(3, come)
    check_messages_cross(channels)
    close_all(channels)
    sockets[0].close()


def test_silent_stranger_delays_start_only_briefly(monkeypatch):
    greet, waits_s = connect._greet, iter([0.3])

    def greet_first_one_briefly(*arguments) -> int | None:
        # The stranger comes first; a rank may be late.
        monkeypatch.setattr(connect, "_HELLO_TIMEOUT_S", next(waits_s, 600.0))
        return greet(*arguments)

    monkeypatch.setattr(connect, "_greet", greet_first_one_briefly)
    come, sockets = stranger(lambda connection: None)
    channels = open_all(2, come)
    check_messages_cross(channels)
    close_all(channels)
    sockets[0].close()


@pytest.mark.parametrize("rank", [0, 3, 2**63])
def test_unknown_rank_is_rejected_despite_right_token(rank: int):
    sockets: list[socket.socket] = []

    def come(payload: bytes) -> None:
        address = json.loads(payload)
        sockets.append(socket.create_connection(address[:2], timeout=5))
        send_frame(sockets[0], FrameKind.HELLO, rank, bytes.fromhex(address[2]))

    channels = open_all(3, come)
    check_messages_cross(channels)
    close_all(channels)
    sockets[0].close()


def test_peer_is_accepted_only_with_right_token():
    """Negative control: the token is what keeps strangers out."""
    token = bytes(range(16))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for shown, rank in ((token, 1), (bytes(16), None)):
            with socket.create_connection(listener.getsockname(), timeout=5) as comer:
                send_frame(comer, FrameKind.HELLO, 1, shown)
                connection, _ = listener.accept()
                with connection:
                    assert connect._greet(connection, token) == rank


# Where it cannot be had.


def refuse(*arguments, **options) -> None:
    raise ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize("place", ["create_connection", "create_server"])
def test_ranks_use_gloo_when_tcp_fails(monkeypatch, caplog, place: str):
    """Rank 0 logs it once."""
    monkeypatch.setattr(socket, place, refuse)
    monkeypatch.setattr(connect, "_CONNECT_S", 0.3)
    with caplog.at_level(logging.WARNING):
        channels = open_all(3)
    assert [type(channel) for channel in channels] == [GlooStepChannel] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith("step messages go over gloo, which is slower: ")
    check_messages_cross(channels)


def test_limit_of_open_files_is_named(monkeypatch, caplog):
    """As many ranks as a process may have files: the ranks use gloo, and rank 0 logs why."""

    def accept(self: socket.socket) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    channels = open_all(3)
    assert [type(channel) for channel in channels] == [GlooStepChannel] * 3
    assert "2 ranks cannot be accepted: [Errno 24] Too many open files" in caplog.text


def test_connections_are_closed_when_one_rank_cannot_connect(monkeypatch, caplog):
    right = socket.create_connection

    def refuse_the_second(*arguments, **options) -> socket.socket:
        return refuse() if next(numbers) else right(*arguments, **options)

    numbers = iter((0, 1))
    monkeypatch.setattr(socket, "create_connection", refuse_the_second)
    monkeypatch.setattr(connect, "_CONNECT_S", 0.3)
    channels = open_all(3)
    assert [type(channel) for channel in channels] == [GlooStepChannel] * 3
    assert "Connection refused" in caplog.text
