"""Executor of one worker in this process, one process per rank, started by torchrun or by a trainer.

Each rank has its own executor, with `rpc_rank` 0 and its global rank; ranks agree over the control group.
"""

from spmd_worker.base.errors import ConfigError
from spmd_worker.executor.uniproc import UniProcExecutor
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.ranks.topology import check_complete_engines
from spmd_worker.ranks.transport.channel import ControlChannel


class ExternalLauncherExecutor(UniProcExecutor):
    """Executor of this rank in an existing world."""

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
        return ControlChannel(self._groups.control if self._groups is not None else single_group())

    @property
    def engine_channel(self) -> ControlChannel:
        """The control channel of all replicas; the replica's own if there is one replica."""
        return ControlChannel(self._groups.engine if self._groups is not None else single_group())

    @property
    def _groups(self) -> ParallelGroups | None:
        worker = self.driver_worker.worker
        assert worker is not None, "start comes first"
        return worker.groups

    def _check_world(self) -> None:
        check_complete_engines(self.layout, self.environment.world_size)
