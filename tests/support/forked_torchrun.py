"""torchrun whose ranks are forked in place of fresh interpreters: `-m forked_torchrun`, and torchrun's arguments.

torchrun's own code runs, and its processes are in the places that they have without this: the ranks are its children
(adopted: a process that has started no thread forks them, from one that ends at once), in sessions of their own, and
end with it. What differs: nobody imports torch for two seconds, and all ranks have the hash seed of the fork server.
"""

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

import fork_server

from spmd_worker.base.process import end_with_parent

PR_SET_CHILD_SUBREAPER = 36


class Adopted(subprocess.Popen[bytes]):
    """`subprocess.Popen`'s methods that torchrun uses, for a child of this process that another has forked."""

    def __init__(self, command: Sequence[str], pid: int) -> None:
        self.args, self.pid, self.returncode = command, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


class Nursery:
    """Forks ranks for torchrun, which has threads. Made before it has any."""

    def __init__(self) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the ranks cannot be adopted")
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        launcher = os.getpid()
        fork_server.check_that_forks_are_safe()
        self._process = os.fork()
        if self._process == 0:
            self._connection.close()
            end_with_parent(launcher)
            order = serve_ranks(theirs, launcher)
            fork_server.run_to_its_end(order["command"])
        theirs.close()

    def start(
        self, command: Sequence[str], env: Mapping[str, str], stdout: IO[Any] | None, stderr: IO[Any] | None
    ) -> Adopted:
        """`python -u SCRIPT ARGUMENT...` or `python -u -m MODULE ARGUMENT...`, as torchrun asks for them."""
        assert list(command[:2]) == [sys.executable, "-u"], f"{command}: only Python is forked"
        streams = [stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2]
        with self._lock:
            fork_server.send_order(self._connection, command[2:], env, os.getcwd(), streams)
            answer = self._connection.recv(1 << 10)
        if not answer:
            raise fork_server.ForkServerError("the process that forks torchrun's ranks has ended")
        return Adopted(command, json.loads(answer)["pid"])


def serve_ranks(connection: socket.socket, launcher: int) -> dict[str, Any]:
    """Serve until the launcher ends. Returns in each rank, once the launcher is its parent, with its order."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # They are meant for torchrun, in whose session this is.
        signal.signal(number, signal.SIG_IGN)
    while True:
        words, descriptors, _, _ = socket.recv_fds(connection, 16, fork_server.MAX_DESCRIPTORS)
        if not words:
            os._exit(0)
        order = json.loads(fork_server.read_all(descriptors[0]))
        between = os.fork()
        if between == 0:
            own = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            while (parent := os.getppid()) != launcher:
                if parent != own:
                    # Somebody else has adopted it: the launcher was killed meanwhile.
                    os._exit(1)
                os.sched_yield()
            fork_server.send(connection, {"pid": os.getpid()})
            connection.close()
            os.close(descriptors[0])
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            fork_server.become(order, descriptors[1:])
            return order
        for each in descriptors:
            os.close(each)
        os.waitpid(between, 0)


def main() -> None:
    # Imported by the server, and here where there is none.
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # The same name, for events that nobody reads: torch looks through the sources of all modules for it.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    nursery = Nursery()

    def popen(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> Adopted:
        return nursery.start(args, env, handler._stdout, handler._stderr)

    subprocess_handler.SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]
    # It has been imported; run_module would say that this may surprise.
    sys.modules.pop("torch.distributed.run", None)
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
