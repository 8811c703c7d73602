"""Step channels over TCP between rank 0 and its followers, all in this process."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

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
