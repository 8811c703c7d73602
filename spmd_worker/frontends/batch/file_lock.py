"""One job per file: a lock that ends with its process, however that ends, and names its holder.

The file holds one line of JSON about its holder, which a rejected process reads. A process that is about to end (its
launcher is gone, it was signalled, the kernel is terminating it) still has its locks for a moment, and is waited for.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, get_type_hints

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import JsonError, open_job_file, parse_json_object
from spmd_worker.base.process import age_s, command_of, is_exiting, node_name, parent_of, start_time_of

ENDING: Final = "ending"
"""Activity of a holder that is about to end."""

_LEAVE_S: Final = 15.0
"""Time to wait for a holder that is about to end: longer than a signalled rank takes to learn the cause and end."""
_POLL_S: Final = 0.05
_RECORD_BYTES: Final = 4096
_COMMAND_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Holder of a lock, by its own record. Its process ids are valid on this machine if `node` is this one."""

    pid: int
    parent: int
    start_time: int
    host: str
    node: str
    doing: str

    @property
    def is_leaving(self) -> bool:
        """Whether it will soon end by itself."""
        if self.doing == ENDING or self.node != node_name():
            return self.doing == ENDING
        has_ended = start_time_of(self.pid) != self.start_time
        return has_ended or is_exiting(self.pid) or parent_of(self.pid) != self.parent

    def describe(self) -> str:
        """Its process, age and activity, as text."""
        if self.node != node_name():
            return f"process {self.pid} on {self.host}, {self.doing}"
        command = command_of(self.pid)
        if len(command) > _COMMAND_CHARACTERS:
            command = f"{command[:_COMMAND_CHARACTERS]}..."
        return f"process {self.pid}, started {age_s(self.start_time):.0f} s ago, {self.doing}: {command}"


class FileLock:
    """A lock held from `__enter__` to `__exit__`, which removes the file if it `is_temporary`. `__enter__` raises
    ConfigError naming the holder, or the file that cannot be opened; its message has `owned` and `way_out`
    (`job.run_dir=DIR`, `give another job.run_dir`).
    """

    def __init__(self, path: Path, owned: str, way_out: str, *, is_temporary: bool = False) -> None:
        self._path, self._owned, self._way_out, self._is_temporary = path, owned, way_out, is_temporary
        self._descriptor = -1
        self._noting, self._is_ending = threading.Lock(), False

    def __enter__(self) -> "FileLock":
        while self._descriptor < 0:
            try:
                descriptor = open_job_file(self._path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise ConfigError(f"{self._owned} cannot be written ({error.strerror}): {self._way_out}") from None
            try:
                self._wait(descriptor)
                # Its last holder may have removed the file since it was opened.
                is_there = _is_same_file(descriptor, self._path)
            except BaseException:
                os.close(descriptor)
                raise
            if is_there:
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_temporary and _is_same_file(self._descriptor, self._path):
            with contextlib.suppress(OSError):
                self._path.unlink()
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def note(self, doing: str) -> None:
        """Write the process's current activity, for rejected processes to read; no effect without the lock, or after
        `ENDING`.
        """
        with self._noting:
            if self._is_ending:
                return
            self._is_ending = doing == ENDING
            # The lock holds without its record too: on a full disk, or without free file descriptors.
            with contextlib.suppress(OSError):
                descriptor, pid = self._descriptor, os.getpid()
                if descriptor >= 0 and _is_same_file(descriptor, self._path):
                    host, started = socket.gethostname(), start_time_of(pid) or 0
                    own = LockHolder(pid, os.getppid(), started, host, node_name(), doing)
                    record = json.dumps(asdict(own)).encode("ascii") + b"\n"
                    os.pwrite(descriptor, record, 0)
                    os.ftruncate(descriptor, len(record))

    def _wait(self, descriptor: int) -> None:
        deadline_s = time.monotonic() + _LEAVE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = _read_holder(descriptor)
            except OSError as error:
                # Some network file systems support locks only with certain mount options, or never.
                raise ConfigError(
                    f"{self._owned} is on a file system that cannot lock {self._path} ({error.strerror}): mount it "
                    f"with locks (for Lustre -o flock), or {self._way_out} on another file system"
                ) from None
            if holder is None or not holder.is_leaving or time.monotonic() > deadline_s:
                who = "unknown process" if holder is None else holder.describe()
                raise ConfigError(
                    f"{self._owned} is in use by a running job ({who}): wait for its end, or {self._way_out}"
                )
            time.sleep(_POLL_S)


def _read_holder(descriptor: int) -> LockHolder | None:
    try:
        values = parse_json_object(os.pread(descriptor, _RECORD_BYTES, 0))
    except JsonError:
        return None
    # Each field is an int or a str.
    if {name: type(value) for name, value in values.items()} != get_type_hints(LockHolder):
        return None
    is_valid = all(0 <= value < 1 << 63 for value in values.values() if isinstance(value, int))
    return LockHolder(**values) if is_valid else None


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
