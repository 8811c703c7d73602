"""Which interface groups use: loopback on one node, the one towards the launcher elsewhere, or the user's own."""

import os
import socket

import pytest

from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.network_interface import INTERFACE_VARIABLES, interface_of, local_address, named_interface

ONE_NODE = RankEnvironment(0, 2, 0, 2, True, "127.0.0.1")
TWO_NODES = RankEnvironment(0, 2, 0, 1, True, "127.0.0.1")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in INTERFACE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def named(environment: RankEnvironment) -> list[str | None]:
    with named_interface(environment):
        return [os.environ.get(variable) for variable in INTERFACE_VARIABLES]


def test_interface_is_loopback_on_one_node():
    """The environment is restored afterwards."""
    before = dict(os.environ)
    loopback = interface_of("127.0.0.1")
    assert loopback in [name for _, name in socket.if_nameindex()]
    assert named(ONE_NODE) == [loopback, loopback]
    assert dict(os.environ) == before


def test_interface_reaches_the_launcher_across_nodes():
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert named(TWO_NODES) == [interface_of("127.0.0.1")] * 2


def test_interface_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "theirs")
    assert named(ONE_NODE) == ["theirs", interface_of("127.0.0.1")]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "theirs"


def test_interface_is_unset_when_master_is_unreachable():
    assert named(RankEnvironment(0, 2, 0, 1, True, "no-such-host.invalid")) == [None, None]
    assert interface_of("203.0.113.250") is None
