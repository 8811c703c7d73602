"""The driver's end of one worker process: its start, its queue, its log lines, its end.

A worker has two threads. The monitor starts the process and waits for its end: the kernel ends a worker with the thread
that started it, so that thread must stay. The other copies the worker's lines.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Final

from spmd_worker.base.process import state_of
from spmd_worker.executor.worker_channel import FrameKind, limit_sending, receive_piece
from spmd_worker.executor.worker_log import forward_lines, line_prefix
from spmd_worker.ranks.transport.frames import send_frame

_WORKER_MODULE: Final = "spmd_worker.executor.worker_process"
_LAST_LINES_S: Final = 2.0
"""Time to read the last lines of an ended worker, whose own child processes may hold the pipes open."""

_STATES: Final = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk or a device", "Z": "ended"}


class WorkerHandle:
    """One worker process. Call `start`, then `wait_until_started`."""

    def __init__(self, rank: int, environment: Mapping[str, str], send_timeout_s: float, log_level: int) -> None:
        self.rank = rank
        self.exited = threading.Event()
        self.read_to_end = threading.Event()
        """Set when all its answers are read."""
        self.is_leaving = False
        """Whether it was asked to stop."""
        self.connection, self._workers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._environment, self._send_timeout_s, self._log_level = environment, send_timeout_s, log_level
        self._process: subprocess.Popen[bytes] | None = None
        self._start_error: OSError | None = None
        self._has_started = threading.Event()
        self._monitor: threading.Thread | None = None
        self._log: threading.Thread | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    def start(self, on_exit: Callable[[], None]) -> None:
        """Begin to start the process; `on_exit` is called in the monitor's thread when it has ended."""
        limit_sending(self.connection, self._send_timeout_s)
        self._monitor = threading.Thread(
            target=self._run, args=(on_exit,), name=f"spmd-monitor-{self.rank}", daemon=True
        )
        self._monitor.start()

    def wait_until_started(self) -> None:
        """Raises OSError if the process could not be started."""
        self._has_started.wait()
        if self._start_error is not None:
            raise self._start_error

    def send(self, kind: FrameKind, number: int, payload: bytes) -> None:
        """Raises PeerGoneError and TimeoutError as `send_frame` does."""
        send_frame(self.connection, kind, number, payload)

    def receive(self) -> bytes | None:
        """The available bytes, without waiting; empty at the end of the stream, None if there are none."""
        return receive_piece(self.connection, wait=False)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def ending(self) -> str:
        """A description of the process's end, once `exited` is set."""
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "ended"
        if code >= 0:
            return f"exited with code {code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"

    def state(self) -> str:
        """State of a process that does not answer, such as "stopped"; empty if it runs."""
        try:
            return _STATES.get(state_of(self.pid) or "", "")
        except OSError:
            return ""

    def close(self) -> None:
        """Join the threads and close the queue, after the process has ended."""
        for thread in (self._monitor, self._log):
            if thread is not None and thread is not threading.current_thread():
                thread.join(_LAST_LINES_S)
        self.connection.close()
        self._workers_end.close()

    def _run(self, on_exit: Callable[[], None]) -> None:
        # The worker inherits this mask: Ctrl-C reaches all processes of the terminal, and would end a worker that does
        # not ignore it yet.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._process = self._start_process()
        except OSError as error:
            self._start_error = error
            self.exited.set()
            return
        finally:
            self._workers_end.close()
            self._has_started.set()
        pipes = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        log = (line_prefix(self.rank, self.pid), pipes)
        self._log = threading.Thread(target=forward_lines, args=log, name=f"spmd-log-{self.rank}", daemon=True)
        self._log.start()
        self._process.wait()
        self.exited.set()
        on_exit()

    def _start_process(self) -> subprocess.Popen[bytes]:
        descriptor = self._workers_end.fileno()
        numbers = ("--rank", self.rank, "--descriptor", descriptor, "--driver-pid", os.getpid())
        arguments = map(str, (*numbers, "--log-level", self._log_level))
        return subprocess.Popen(
            # -P: the current folder is on the import path only if it is on this process's.
            [sys.executable, "-P", "-m", _WORKER_MODULE, *arguments],
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(descriptor,),
        )
