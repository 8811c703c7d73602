"""One worker in this process, one process a rank, started by somebody else (torchrun, or a trainer that owns the
ranks).

Each rank has an executor of one: `rpc_rank` 0, its own global rank. What has to be the same everywhere is agreed over
the control group.
"""

from spmd_worker.base.errors import ConfigError
from spmd_worker.executor.uniproc import UniProcExecutor
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.ranks.topology import check_whole_engines
from spmd_worker.ranks.transport.channel import ControlChannel


class ExternalLauncherExecutor(UniProcExecutor):
    """This rank's part of a world that exists already."""

    def _set_up(self) -> None:
        """Raises ConfigError for a worker class whose `init_device` joins no groups although there are other ranks."""
        super()._set_up()
        if self.layout.world_size > 1 and self._groups is None:
            raise ConfigError(
                f"executor.worker_cls={self.config.executor.worker_cls} has no process groups after init_device, and "
                f"the layout has {self.layout.world_size} ranks that must agree on each step: have init_device set "
                f"self.groups = join_groups(layout, environment, device, timeout_s) of spmd_worker.ranks.groups"
            )

    @property
    def channel(self) -> ControlChannel:
        """The replica's control channel."""
        return ControlChannel(self._groups.control if self._groups is not None else single_group())

    @property
    def engine_channel(self) -> ControlChannel:
        """The control channel of all replicas: the replica's own where there is one."""
        return ControlChannel(self._groups.engine if self._groups is not None else single_group())

    @property
    def _groups(self) -> ParallelGroups | None:
        worker = self.driver_worker.worker
        assert worker is not None, "start comes first"
        return worker.groups

    def _check_world(self) -> None:
        check_whole_engines(self.layout, self.environment.world_size)
