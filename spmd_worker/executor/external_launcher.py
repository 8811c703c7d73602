"""One worker in this process, one process a rank, started by somebody else (torchrun, or a trainer that owns the
ranks).

Each rank has an executor of one: `rpc_rank` 0, its own global rank. What has to be the same everywhere is agreed over
the control group. Knows nothing about who started the ranks.
"""

from spmd_worker.distributed.topology import check_whole_engines
from spmd_worker.executor.uniproc import UniProcExecutor
from spmd_worker.lockstep.transport.channel import ControlChannel
from spmd_worker.worker.worker import Worker


class ExternalLauncherExecutor(UniProcExecutor):
    """This rank's part of a world that exists already."""

    @property
    def channel(self) -> ControlChannel:
        """The replica's control channel."""
        worker = self.driver_worker.worker
        assert isinstance(worker, Worker), type(worker)
        assert worker.groups is not None, "start comes first"
        return ControlChannel(worker.groups.control)

    @property
    def engine_channel(self) -> ControlChannel:
        """The control channel of all replicas: the replica's own where there is one."""
        worker = self.driver_worker.worker
        assert isinstance(worker, Worker), type(worker)
        assert worker.groups is not None, "start comes first"
        return ControlChannel(worker.groups.engine)

    def _check_world(self) -> None:
        check_whole_engines(self.layout, self.environment.world_size)
