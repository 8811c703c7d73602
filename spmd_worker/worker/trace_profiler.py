"""A rank's torch profiler: on between the worker events `start_profile` and `stop_profile`, then one trace file, which
Perfetto opens.
"""

import logging
import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from spmd_worker.base.files import OwnFileError, own_file_fault

logger = logging.getLogger(__name__)


class TraceProfiler:
    """Handler of the two events, which come in turn."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._path = Path()
        self._profile: profile | None = None

    def prepare_start_profile(self, folder: str) -> Path:
        """Where the trace will go. Raises RuntimeError while one is made, OSError where no file can be written."""
        if self._profile is not None:
            raise RuntimeError(f"a profile is being made already, for {self._path}: call stop_profile first")
        path = Path(folder).absolute() / f"trace.rank{self._rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        fault = own_file_fault(path)
        if fault is not None:
            raise OwnFileError(path, fault)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(f"{path} cannot be written")
        return path

    def commit_start_profile(self, path: Path) -> None:
        """Record from now on."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._path, self._profile = path, profile(activities=activities)
        self._profile.start()

    def prepare_stop_profile(self, payload: None) -> None:
        """Raises RuntimeError where no profile is being made."""
        if self._profile is None:
            raise RuntimeError("no profile is being made: call start_profile first")

    def commit_stop_profile(self, staged: None) -> str:
        """Write the trace and return its path. A trace that cannot be written is an error in the log, and of no rank's
        work: the steps are none the worse for it.
        """
        assert self._profile is not None, "prepare_stop_profile comes first"
        recorded, self._profile = self._profile, None
        recorded.stop()
        try:
            recorded.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError):
            logger.exception("rank %d could not write its trace %s", self._rank, self._path)
        return str(self._path)
