"""Which interface groups use: loopback on one node, the one towards the launcher elsewhere, or the user's own."""

import os
import socket

import pytest

from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.network_interface import INTERFACE_VARIABLES, interface_of, named_interface, own_address

ONE_NODE = RankEnvironment(0, 2, 0, 2, True, "127.0.0.1")
TWO_NODES = RankEnvironment(0, 2, 0, 1, True, "127.0.0.1")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in INTERFACE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def named(environment: RankEnvironment) -> list[str | None]:
    with named_interface(environment):
        return [os.environ.get(variable) for variable in INTERFACE_VARIABLES]


def test_on_one_node_it_is_loopback_and_the_environment_is_as_before_afterwards():
    before = dict(os.environ)
    loopback = interface_of("127.0.0.1")
    assert loopback in [name for _, name in socket.if_nameindex()]
    assert named(ONE_NODE) == [loopback, loopback]
    assert dict(os.environ) == before


def test_across_nodes_it_is_the_one_that_reaches_the_launcher():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert named(TWO_NODES) == [interface_of("127.0.0.1")] * 2


def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "theirs")
    assert named(ONE_NODE) == ["theirs", interface_of("127.0.0.1")]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "theirs"


def test_a_master_that_cannot_be_reached_names_nothing():
    assert named(RankEnvironment(0, 2, 0, 1, True, "no-such-host.invalid")) == [None, None]
    assert interface_of("203.0.113.250") is None
