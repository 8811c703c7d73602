"""Deprecated worker class: the earlier name of `executor.device_backend=triton`."""

import logging
from typing import Final

from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.backends.choice import with_device_backend
from spmd_worker.worker.worker import Worker

logger = logging.getLogger(__name__)

_SUCCESSOR: Final = (
    "executor.worker_cls=spmd_worker.worker.triton_worker.TritonWorker still works but is deprecated: set "
    "executor.device_backend=triton"
)


class TritonWorker(Worker):
    """`Worker` with the triton backend, whatever `executor.device_backend` is."""

    def __init__(self, resolved: ResolvedRun, environment: RankEnvironment) -> None:
        super().__init__(with_device_backend(resolved, "triton"), environment)
        if environment.rank == 0:
            logger.warning(_SUCCESSOR)
