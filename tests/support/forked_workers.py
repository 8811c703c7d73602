"""Worker processes of the multiprocess executor, forked by the tests' server in place of fresh interpreters.

A fresh one imports torch for two seconds. Everything else is as it is: the command line, the descriptors, the pipes,
the threads that watch. A worker's parent is the server, which ends with the tests. Tests that are about the start or
about the driver's end do not use this, and start real ones.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO
from unittest import mock

from fork_server import ForkedProcess, fork_server

from spmd_worker.executor import worker_handle


class ForkedWorker(ForkedProcess):
    """A forked process with the ends of its pipes, like Popen's."""

    stdout: IO[bytes]
    stderr: IO[bytes]


def fork_worker(
    command: Sequence[str], env: Mapping[str, str], stdin: int, stdout: int, stderr: int, pass_fds: Sequence[int]
) -> ForkedWorker:
    """Arguments of `subprocess.Popen` in worker_handle.py: `python -P -m MODULE OPTION VALUE...`."""
    assert (stdin, stdout, stderr) == (subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE)
    words = list(command[command.index("-m") :])
    descriptor, driver = words.index("--descriptor") + 1, words.index("--driver-pid") + 1
    assert [int(words[descriptor])] == list(pass_fds)
    server = fork_server()
    words[descriptor], words[driver] = "{0}", str(server.pid)
    pipes = [os.pipe(), os.pipe()]
    (_, stdout_writer), (_, stderr_writer) = pipes
    with open(stdout_writer, "wb", buffering=0) as output, open(stderr_writer, "wb", buffering=0) as errors:
        process = server.fork(words, env, os.getcwd(), output, errors, pass_fds)
    worker = ForkedWorker(server, process.pid)
    worker.stdout, worker.stderr = (os.fdopen(reader, "rb") for reader, _ in pipes)
    return worker


@contextmanager
def forked() -> Iterator[None]:
    """Worker processes are forked here."""
    forking = SimpleNamespace(Popen=fork_worker, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    with mock.patch.object(worker_handle, "subprocess", forking):
        yield
