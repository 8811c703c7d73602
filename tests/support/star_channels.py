"""Step channels over TCP between rank 0 and its followers, with or without relays, all in this process."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_worker.ranks.transport.relay_channel import TcpLeaf, TcpRelay, TreeLeader
from spmd_worker.ranks.transport.relay_tree import RelayTree
from spmd_worker.ranks.transport.step_channel import TcpFollower, TcpLeader

LONG_S = 600.0
"""A timeout that a test must not reach."""


@contextmanager
def star(num_followers: int, timeout_s: float = LONG_S) -> Iterator[tuple[TcpLeader, list[TcpFollower]]]:
    """Rank 0's end and the followers', connected."""
    pairs = [socket.socketpair() for _ in range(num_followers)]
    leader = TcpLeader([ours for ours, _ in pairs], timeout_s)
    size = num_followers + 1
    followers = [TcpFollower(theirs, rank, size, timeout_s) for rank, (_, theirs) in enumerate(pairs, start=1)]
    leader.start()
    try:
        yield leader, followers
    finally:
        for channel in (leader, *followers):
            channel.close()


@contextmanager
def tree(size: int, group_size: int, timeout_s: float = LONG_S) -> Iterator[list[TcpLeader | TcpFollower]]:
    """The ends of all ranks, connected, in groups of `group_size`."""
    shape = RelayTree(size, group_size)
    pairs = [socket.socketpair() for _ in range(size - 1)]
    channels: list[TcpLeader | TcpFollower] = [TreeLeader([ours for ours, _ in pairs], timeout_s, shape)]
    links: dict[int, socket.socket] = {}
    for rank, (_, theirs) in enumerate(pairs, start=1):
        children = shape.children(rank)
        if children:
            relayed = [socket.socketpair() for _ in children]
            links |= zip(children, [leaf for _, leaf in relayed])
            channels.append(TcpRelay(theirs, rank, size, timeout_s, [relay for relay, _ in relayed]))
        elif rank in links:
            channels.append(TcpLeaf(theirs, rank, size, timeout_s, shape.parent(rank), links[rank]))
        else:
            channels.append(TcpFollower(theirs, rank, size, timeout_s))
    for channel in channels:
        if isinstance(channel, TcpLeader | TcpRelay):
            channel.start()
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()
