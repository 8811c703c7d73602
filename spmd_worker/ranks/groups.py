"""Joining the groups: this rank's tensor-parallel and pipeline-parallel group, and one on the CPU for control.

When the caller has initialised torch.distributed already, its world is used, sub-groups are made beside its own, and
only those are destroyed.
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
    `engine`, which spans all replicas of an engine: the same group as `control` where there is one.
    """

    layout: RankLayout
    tensor: GroupHandle
    pipeline: GroupHandle
    control: GroupHandle
    engine: GroupHandle
    own_world: ProcessGroup | None = None
    """The world that `join_groups` made and other engines may be in too; None in a caller's."""
    owner: int = field(default_factory=os.getpid)
    """The process that joined."""

    def destroy(self) -> None:
        """Leave: destroys what `join_groups` made and nothing else. Call once, on every rank. Nothing in a process that
        was forked from the rank's, with which it shares the connections.
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
    """The world that `join_groups` made in this process, and how many engines are in it: the last one ends it."""

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None
        self._num_engines = 0

    def join(self, device: torch.device, timeout: timedelta) -> ProcessGroup | None:
        """Make a world where there is none. The world there is, if it is ours; None for a caller's."""
        if not dist.is_initialized():
            _join_world(device, timeout)
            self._group, self._num_engines = dist.group.WORLD, 0
        if dist.group.WORLD is not self._group:
            return None
        self._num_engines += 1
        return self._group

    def leave(self, world: ProcessGroup) -> bool:
        """`world` is what `join` gave. Whether that was its last engine: then all its groups are gone."""
        if world is not self._group:
            # Somebody else has ended it, and this one is a later engine's.
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
    """Whoever has ended the world has ended every group in it."""
    if group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def join_groups(
    layout: RankLayout, environment: RankEnvironment, device: torch.device, timeout_s: float
) -> ParallelGroups:
    """Make the groups of `layout`; every rank of the world calls this, in the same order.

    In a world of several engines each gets groups of its own, and nothing is compared or waited for between them later.
    Raises RankFailedError, or what torch.distributed raises, when the other ranks do not come within `timeout_s`.
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
        everywhere = in_every_engine(groups, layout, environment.world_size)
        return _join_one(everywhere, environment.rank, backend, timeout, device, made)

    try:
        with _without_splits():
            tensor, pipeline = (
                join(groups, data_backend) for groups in (layout.tensor_groups(), layout.pipeline_groups())
            )
            control = join(replicas, "gloo")
            engine = control if len(replicas) == 1 else join([list(range(layout.world_size))], "gloo")
    except BaseException:
        # A caller who goes on has what there was before.
        if own_world is None or not _our_world.leave(own_world):
            for group in made:
                _destroy(group)
        raise
    return ParallelGroups(layout, tensor, pipeline, control, engine, own_world)


@contextmanager
def _without_splits() -> Iterator[None]:
    """In a world that is bound to a device torch makes groups by splitting NCCL's communicator, in which the ranks that
    a group leaves out must take part: for groups of gloo it has these split and the members not, and they wait for each
    other (torch 2.13, distributed_c10d.py, `_new_process_group_helper`). Unbound, a group is its members' affair.
    """
    world = distributed_c10d._get_default_group()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


_CALL_S: Final = 5.0

_hosted: list[Store] = []
"""Where no launcher keeps a store, that of rank 0 serves every later world of these processes too: whoever comes first
to the next one still finds it. As under a launcher, a caller's own worlds on this port find what earlier ones left.
"""


def _join_world(device: torch.device, timeout: timedelta) -> None:
    """The launcher's store outlives every world, and torch gives each the same keys: a second world in a process, ours
    or the caller's, would find the addresses of the first. So each of ours has keys of its own, under a name that its
    ranks agree on. Raises RankFailedError for ranks that do not come, and LauncherGoneError.
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
    """Raise LauncherGoneError where the launcher's store is on this node and nothing listens there: the launcher ended
    before this process could see that it was its parent, and torch would call until the timeout.
    """
    variables = os.environ
    is_on_node = variables.get("LOCAL_WORLD_SIZE", "") == variables.get("WORLD_SIZE")
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not is_on_node:
        return
    address, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    try:
        places = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        # What is wrong there torch says in its words.
        return
    if places and all(_is_refused(family, kind, place) for family, kind, _, _, place in places):
        raise LauncherGoneError(
            f"the launcher is gone: nothing listens at {address}:{port}, where torchrun keeps its store while it runs"
        )


def _is_refused(family: int, kind: int, place: Any) -> bool:
    try:
        with socket.socket(family, kind) as caller:
            caller.settimeout(_CALL_S)
            return caller.connect_ex(place) == errno.ECONNREFUSED
    except OSError:
        # A family of addresses that this machine does not have.
        return True


def _join_one(
    groups: list[list[int]],
    rank: int,
    backend: str,
    timeout: timedelta,
    device: torch.device,
    made: list[ProcessGroup],
) -> GroupHandle:
    """Every rank makes every group (torch.distributed demands it) and keeps the one it is in, in `made` too."""
    mine = single_group(rank)
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks, backend=backend, timeout=timeout)
        if rank in ranks:
            made.append(group)
            mine = GroupHandle(ranks=tuple(ranks), rank=ranks.index(rank), group=group)
    if backend == "nccl" and mine.group is not None:
        # NCCL connects in the first collective: here, where all ranks make their groups in one order.
        dist.all_reduce(torch.zeros(1, device=device), group=mine.group)
    return mine


def shared_store() -> Store:
    """The store of the world that these ranks are in: the launcher's, or the caller's own."""
    assert dist.is_initialized(), "join_groups comes first"
    # Torch offers no other way to the store of a world that somebody else initialised.
    return distributed_c10d._get_default_store()


def world_environment(
    environment: RankEnvironment, num_ranks: int, timeout_s: float, node: str | None = None
) -> RankEnvironment:
    """This process's place, asked of torch.distributed where the caller initialised it without torchrun's variables, or
    without the number of ranks on each node.

    For an engine of more than one of `num_ranks` every rank of the world calls this, and each says which `node` it is
    on: RankFailedError names those that have not within `timeout_s`. An engine of one rank may be the only one of a
    world, so its process asks nobody and takes all to be on its node.
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
    """Of each rank of the world. What a rank says is always the same, however many engines ask."""
    store.set(str(rank), own_node() if node is None else node)
    everyone = [str(other) for other in range(dist.get_world_size())]
    try:
        store.wait(everyone, timedelta(seconds=timeout_s))
    except RuntimeError as error:  # of which the store's own is a kind
        silent = ", ".join(other for other in everyone if not store.check([other]))
        raise RankFailedError(
            f"rank {silent} has not said in {timeout_s:g} s which node it is on: every rank makes its engine, in the "
            f"same order, or none"
        ) from error
    return [store.get(other) for other in everyone]


def _host_of(store: Store) -> str | None:
    """Where the store of a world is; None for one that is no server, such as a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def own_node() -> str:
    """What processes have in common that reach each other by loopback: the kernel's boot and the network namespace; the
    host's name where the system tells neither.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()
