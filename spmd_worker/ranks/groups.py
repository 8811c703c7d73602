"""Process groups of a rank: tensor-parallel, pipeline-parallel, and CPU groups for control.

In a world that the caller initialised, only the sub-groups made here are destroyed.
"""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store
from torch.distributed.rendezvous import rendezvous

from spmd_worker.base.errors import LauncherGoneError, RankFailedError
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.meeting import meet
from spmd_worker.ranks.network_interface import named_interface
from spmd_worker.ranks.topology import RankLayout, in_every_engine


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """`tensor` and `pipeline` carry device tensors; `control` spans one replica and is gloo on the CPU, and so is
    `engine`, which spans all replicas of an engine: the same group as `control` if there is one replica.
    """

    layout: RankLayout
    tensor: GroupHandle
    pipeline: GroupHandle
    control: GroupHandle
    engine: GroupHandle
    own_world: ProcessGroup | None = None
    """The world that `join_groups` made, which other engines may share; None in a caller's."""
    owner: int = field(default_factory=os.getpid)
    """Id of the process that joined."""

    def destroy(self) -> None:
        """Destroy what `join_groups` made and nothing else. Call once, on every rank. Does nothing in a forked process,
        which shares the connections.
        """
        if os.getpid() != self.owner:
            return
        for handle in (self.tensor, self.pipeline):
            if handle.fast is not None:
                handle.fast.close()
        if self.own_world is not None and _our_world.leave(self.own_world):
            return
        of_all_replicas = () if self.engine is self.control else (self.engine,)
        for handle in (self.tensor, self.pipeline, self.control, *of_all_replicas):
            if handle.group is not None:
                _destroy(handle.group)


class _OurWorld:
    """The world that `join_groups` made in this process, and its number of engines: the last one ends it."""

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None
        self._num_engines = 0

    def join(self, device: torch.device, timeout: timedelta) -> ProcessGroup | None:
        """Make a world if there is none. Returns the existing one if it is ours; None for a caller's."""
        if not dist.is_initialized():
            _join_world(device, timeout)
            self._group, self._num_engines = dist.group.WORLD, 0
        if dist.group.WORLD is not self._group:
            return None
        self._num_engines += 1
        return self._group

    def leave(self, world: ProcessGroup) -> bool:
        """Leave `world`, which `join` returned. Whether that was its last engine, so that all its groups are gone."""
        if world is not self._group:
            # The world was ended elsewhere, and this one belongs to a later engine.
            return False
        self._num_engines -= 1
        if self._num_engines:
            return False
        self._group = None
        if dist.is_initialized() and dist.group.WORLD is world:
            dist.destroy_process_group()
        return True


_our_world = _OurWorld()


def _destroy(group: ProcessGroup) -> None:
    """Destroy a group, unless the world was ended, and every group with it."""
    if group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def join_groups(
    layout: RankLayout, environment: RankEnvironment, device: torch.device, timeout_s: float
) -> ParallelGroups:
    """Make the groups of `layout`; every rank of the world calls this, in the same order.

    In a world of several engines each gets groups of its own, and engines neither compare nor wait for one another
    later. Raises RankFailedError, or an error of torch.distributed, when the other ranks do not arrive within
    `timeout_s`.
    """
    if layout.world_size == 1:
        alone = single_group()
        return ParallelGroups(layout, alone, alone, alone, alone)
    with named_interface(environment):
        return _join_all(layout, environment, device, timedelta(seconds=timeout_s))


def _join_all(
    layout: RankLayout, environment: RankEnvironment, device: torch.device, timeout: timedelta
) -> ParallelGroups:
    own_world = _our_world.join(device, timeout)
    data_backend = "nccl" if device.type == "cuda" else "gloo"
    replica_size = layout.tensor_parallel_size * layout.pipeline_parallel_size
    replicas = [list(range(start, start + replica_size)) for start in range(0, layout.world_size, replica_size)]

    made: list[ProcessGroup] = []

    def join(groups: list[list[int]], backend: str) -> GroupHandle:
        """Make every group on every rank, as torch.distributed requires; keep this rank's."""
        mine = single_group(environment.rank)
        for ranks in in_every_engine(groups, layout, environment.world_size):
            if len(ranks) == 1:
                continue
            group = dist.new_group(ranks, backend=backend, timeout=timeout)
            if environment.rank in ranks:
                made.append(group)
                mine = GroupHandle(tuple(ranks), ranks.index(environment.rank), group)
        if backend == "nccl" and mine.group is not None:
            # NCCL connects in the first collective: here, where all ranks make their groups in one order.
            dist.all_reduce(torch.zeros(1, device=device), group=mine.group)
        return mine

    try:
        with _without_splits():
            tensor, pipeline = (
                join(groups, data_backend) for groups in (layout.tensor_groups(), layout.pipeline_groups())
            )
            control = join(replicas, "gloo")
            engine = control if len(replicas) == 1 else join([list(range(layout.world_size))], "gloo")
    except BaseException:
        # A caller that continues finds the state before the call.
        if own_world is None or not _our_world.leave(own_world):
            for group in made:
                _destroy(group)
        raise
    return ParallelGroups(layout, tensor, pipeline, control, engine, own_world)


@contextmanager
def _without_splits() -> Iterator[None]:
    """Unbind the world from its device while groups are made. In a bound world torch splits NCCL's communicator, in
    which non-members must take part: for gloo groups only these split and the members do not, a deadlock (torch 2.13,
    distributed_c10d.py, `_new_process_group_helper`). Unbound, a group involves only its members.
    """
    world = distributed_c10d._get_default_group()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


_CALL_S: Final = 5.0

_hosted: list[Store] = []
"""Rank 0's store without a launcher. It serves all later worlds of these processes too; as under a launcher, a caller's
own worlds on this port see the keys of earlier ones.
"""


def _join_world(device: torch.device, timeout: timedelta) -> None:
    """Initialise the default group. The launcher's store outlives every world, and torch uses the same keys in each: a
    second world would find the addresses of the first. So each world has its own keys, under a name that its ranks
    agree on. Raises RankFailedError for missing ranks, and LauncherGoneError.
    """
    _check_launcher()
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not _hosted:
        _hosted.append(store)
    store.set_timeout(timeout)
    name = meet(PrefixStore("spmd_worker/meeting", store), rank, world_size, timeout)
    where = {
        "store": PrefixStore(f"spmd_worker/world {name}", store),
        "rank": rank,
        "world_size": world_size,
        "timeout": timeout,
    }
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", **where)
    else:
        dist.init_process_group("gloo", **where)


def _check_launcher() -> None:
    """Raise LauncherGoneError if the launcher's store is on this node and nothing listens there: the launcher ended
    before this process saw it as its parent, and torch would retry until the timeout.
    """
    variables = os.environ
    is_on_node = variables.get("LOCAL_WORLD_SIZE", "") == variables.get("WORLD_SIZE")
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not is_on_node:
        return
    address, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    try:
        found = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        # Torch reports an invalid address itself.
        return
    if found and all(_is_rejected(family, kind, endpoint) for family, kind, _, _, endpoint in found):
        raise LauncherGoneError(
            f"the launcher is gone: nothing listens at {address}:{port}, where torchrun keeps its store while it runs"
        )


def _is_rejected(family: int, kind: int, endpoint: Any) -> bool:
    try:
        with socket.socket(family, kind) as client:
            client.settimeout(_CALL_S)
            return client.connect_ex(endpoint) == errno.ECONNREFUSED
    except OSError:
        # An address family that this machine does not support.
        return True


def shared_store() -> Store:
    """The store of these ranks' world: the launcher's, or the caller's own."""
    assert dist.is_initialized(), "join_groups comes first"
    # Torch offers no other access to the store of a world that the caller initialised.
    return distributed_c10d._get_default_store()


def world_environment(
    environment: RankEnvironment, num_ranks: int, timeout_s: float, node: str | None = None
) -> RankEnvironment:
    """This process's rank environment, read from torch.distributed if the caller initialised it without torchrun's
    variables, or without the number of ranks on each node.

    If the engine has more than one rank (`num_ranks`), every rank of the world calls this and publishes its `node`;
    RankFailedError names those that have not within `timeout_s`. An engine of one rank may be the only one of a world,
    so it asks no other and assumes that all are on its node.
    """
    is_known = environment.is_launched and environment.is_local_size_known
    if is_known or not dist.is_available() or not dist.is_initialized():
        return environment
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = shared_store()
    nodes = _nodes(PrefixStore("spmd_worker/node of rank", store), rank, timeout_s, node) if num_ranks > 1 else [b""]
    neighbours = [other for other in range(world_size) if nodes[other % len(nodes)] == nodes[rank % len(nodes)]]
    return replace(
        environment,
        rank=rank,
        world_size=world_size,
        local_rank=environment.local_rank if environment.is_launched else neighbours.index(rank),
        local_world_size=len(neighbours),
        master_address=environment.master_address or _host_of(store),
        is_launched=True,
        is_local_size_known=True,
    )


def _nodes(store: Store, rank: int, timeout_s: float, node: str | None) -> list[bytes]:
    """Node of each rank of the world. A rank publishes the same value for every engine."""
    store.set(str(rank), node_id() if node is None else node)
    ranks = [str(other) for other in range(dist.get_world_size())]
    try:
        store.wait(ranks, timedelta(seconds=timeout_s))
    except RuntimeError as error:  # the base class of the store's errors
        silent = ", ".join(other for other in ranks if not store.check([other]))
        raise RankFailedError(
            f"rank {silent} has not published its node within {timeout_s:g} s: every rank makes its engine, in the "
            f"same order, or none"
        ) from error
    return [store.get(other) for other in ranks]


def _host_of(store: Store) -> str | None:
    """Host of a world's store; None for one that is not a server, such as a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def node_id() -> str:
    """Id shared by processes that reach each other by loopback: the kernel's boot id and the network namespace; the
    host's name if these are unknown.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
