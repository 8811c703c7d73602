"""Worker events `start_profile` and `stop_profile`: one rank's torch profiler, which writes a Perfetto trace.

A profile ends with its worker, or with its process.
"""

import atexit
import logging
import os
import threading
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from spmd_worker.base.files import JobFileError, job_file_fault

logger = logging.getLogger(__name__)


class TraceProfiler:
    """Handles the two events, which alternate."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._path, self._thread = Path(), 0
        self._profile: profile | None = None

    @property
    def _is_in_its_thread(self) -> bool:
        """True in the thread that began the profile: torch crashes where another one writes it."""
        return threading.get_ident() == self._thread

    def prepare_start_profile(self, folder: str) -> Path:
        """Path of the trace. Raises RuntimeError while a profile runs, OSError if the file cannot be written."""
        if self._profile is not None:
            raise RuntimeError(f"a profile is running already, for {self._path}: call stop_profile first")
        path = Path(folder).absolute() / f"trace.rank{self._rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        fault = job_file_fault(path)
        if fault is not None:
            raise JobFileError(path, fault)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(f"{path} cannot be written")
        return path

    def commit_start_profile(self, path: Path) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._path, self._profile, self._thread = path, profile(activities=activities), threading.get_ident()
        self._profile.start()
        atexit.register(self.close)

    def prepare_stop_profile(self, payload: None) -> None:
        if self._profile is None:
            raise RuntimeError("no profile is running: call start_profile first")
        if not self._is_in_its_thread:
            raise RuntimeError("the profile is another thread's: call stop_profile in that which called start_profile")

    def commit_stop_profile(self, staged: None) -> str:
        """Write the trace and return its path. A failed write is only logged, because the steps are unaffected."""
        assert self._profile is not None, "prepare_stop_profile comes first"
        recorded, self._profile = self._profile, None
        atexit.unregister(self.close)
        try:
            recorded.stop()
            if self._is_in_its_thread:
                recorded.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError):
            logger.exception("rank %d could not write its trace %s", self._rank, self._path)
        return str(self._path)

    def close(self) -> None:
        """Stop a profile that still runs, and write its trace: torch ends a process in which one does by SIGSEGV."""
        if self._profile is not None:
            is_written = self._is_in_its_thread
            told = f"writes its trace to {self._path}" if is_written else "has no trace, which another thread began"
            logger.warning("stop_profile was not called: rank %d %s", self._rank, told)
            self.commit_stop_profile(None)
