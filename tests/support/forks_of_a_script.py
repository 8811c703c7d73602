"""Worker processes of a script that the tests' fork server has forked: forked from the script itself, as it begins.

The script has imported everything, so its workers need not. To be called before the script starts a thread:

    from forks_of_a_script import fork_workers
    fork_workers()

As a script it is launch.py, with such workers.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import fork_server
import forked_workers

from spmd_worker.executor import worker_handle


class ForkOfThis:
    """`subprocess.Popen`'s methods that a fork server's owner uses, for a fork of this process."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> None:
        (descriptor,) = pass_fds
        assert command == [sys.executable, fork_server.__file__, str(descriptor)], command
        self.pid = os.fork()
        if self.pid == 0:
            # The other end above all, which would keep this process from ever hearing that its maker has ended.
            os.closerange(3, descriptor)
            os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
            fork_server.run_to_its_end(fork_server.serve(socket.socket(fileno=descriptor))["command"])

    def poll(self) -> int | None:
        return None


def fork_workers() -> None:
    """Fork this process's workers from here on."""
    fork_server.subprocess = SimpleNamespace(Popen=ForkOfThis, DEVNULL=subprocess.DEVNULL)
    fork_server.fork_server()
    fork_server.subprocess = subprocess
    forking = SimpleNamespace(Popen=forked_workers.fork_worker, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    worker_handle.subprocess = forking


if __name__ == "__main__":
    fork_workers()
    import launch

    sys.exit(launch.main())
