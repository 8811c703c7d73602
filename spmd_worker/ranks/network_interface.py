"""Network interface between ranks: loopback on one node, else the one that reaches the launcher's store.

By default gloo uses the interface of the host's name, which may be public or unreachable.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from spmd_worker.ranks.environment import RankEnvironment

INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK: Final = "127.0.0.1"
_SIOCGIFADDR: Final = 0x8915
_MAX_NAME_BYTES: Final = 15


def local_address(master_address: str | None) -> str:
    """Loopback for None, else the address of the interface over which this node reaches the launcher's store."""
    if master_address is None:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; the kernel only chooses the interface.
        probe.connect((master_address, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Interface that has this IPv4 address; None if none has, or it is unknown."""
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


@contextmanager
def named_interface(environment: RankEnvironment) -> Iterator[None]:
    """Context in which new groups use this node's right interface; the user's own variables win."""
    is_one_node = environment.local_world_size == environment.world_size
    try:
        name = interface_of(local_address(None if is_one_node else environment.master_address))
    except OSError:
        name = None
    added = [] if name is None else [variable for variable in INTERFACE_VARIABLES if variable not in os.environ]
    os.environ.update(dict.fromkeys(added, name or ""))
    try:
        yield
    finally:
        for variable in added:
            os.environ.pop(variable, None)


def _address_of(name: str) -> str | None:
    """An interface's IPv4 address, from the kernel; None if it has none, and on systems other than Linux."""
    try:
        import fcntl  # missing on some systems

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:_MAX_NAME_BYTES])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except (ImportError, OSError):
        return None
