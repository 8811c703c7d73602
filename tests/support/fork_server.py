"""A process that has imported torch and the package once and forks scripts from there, in milliseconds.

Importing takes two seconds of a core, which is longer than what most tests do on their ranks. The server imports
everything, starts no thread and runs no parallel region (either would break in a fork), and waits. A forked script sees
what a fresh interpreter would: its own environment (in /proc/PID/environ too, where tests look for processes), session,
standard streams, folder, arguments, `__main__` and an interpreter that ends as usual. PYTHONHASHSEED is read when an
interpreter starts, so there is a server for each hash seed that is asked for. When the process that started a server
ends, the server ends all it has forked.

    process = fork_server().fork(["script.py", "argument"], env, cwd, stdout=file, stderr=file)
    process.wait(10.0)

A command may begin with `-m MODULE` too, which runs as `python -P -m MODULE` does. Descriptors that are passed have
other numbers in the forked process: the argument `{0}` becomes that of the first.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import math
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
IMPORT_PATH = tuple(str(REPOSITORY / folder) for folder in (".", "tests", "tests/support", "tests/scenarios"))
"""The product, tests that a script imports, and what tests share."""
START_S = 120.0
LONG_S = 3600.0
ENVIRONMENT_BYTES = 1 << 16
MAX_DESCRIPTORS = 8
PASSED = re.compile(r"\{\d\}")
PADDING_VARIABLE = "FORK_SERVER_PADDING"
# In /proc/PID/stat, counted from the field after the state: `env_start` and `env_end` are the 50th and 51st of proc(5).
ENVIRONMENT_FIELDS = slice(46, 48)


class ForkServerError(RuntimeError):
    """The server has ended, or says nothing."""


class ForkServer:
    """One server process, which runs `script`, and this end of the connection to it. Any thread may fork and wait."""

    def __init__(self, hash_seed: int, script: str = __file__) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(IMPORT_PATH),
            "PYTHONHASHSEED": str(hash_seed),
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            PADDING_VARIABLE: "x" * ENVIRONMENT_BYTES,
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, script, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=variables,
                cwd=REPOSITORY,
                start_new_session=True,
            )
        self._exit_codes: dict[int, int] = {}
        self._forked: int | None = None
        self._is_ready = False
        self._fork_lock = threading.Lock()
        # Guards what was read; one thread reads while the others wait for what it reads.
        self._news = threading.Condition()
        self._is_being_read = False

    @property
    def pid(self) -> int:
        """Process id of the server, the parent of all that it forks."""
        return self._process.pid

    def fork(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | Path,
        stdout: IO[bytes],
        stderr: IO[bytes],
        pass_fds: Sequence[int] = (),
    ) -> "ForkedProcess":
        """Run a script and its arguments as `python SCRIPT ARGUMENT...` would. `env` is all of its environment."""
        with self._fork_lock:
            send_order(self._connection, command, env, cwd, [stdout.fileno(), stderr.fileno(), *pass_fds])
            if not self._wait_until(lambda: self._forked is not None, START_S):
                raise ForkServerError(f"the fork server has not answered for {START_S} s")
            pid, self._forked = self._forked, None
        assert pid is not None, "waited for"
        return ForkedProcess(self, pid)

    def wait_until_ready(self) -> None:
        """Wait until the server has imported everything."""
        if not self._wait_until(lambda: self._is_ready, START_S):
            raise ForkServerError(f"the fork server is not ready after {START_S} s")

    def exit_code_of(self, pid: int, timeout_s: float) -> int | None:
        """Once it is known, which is when the process has ended; None after `timeout_s`."""
        self._wait_until(lambda: pid in self._exit_codes, timeout_s)
        return self._exit_codes.get(pid)

    def close(self) -> None:
        """Ends the server and what it has forked."""
        self._connection.close()
        self._process.wait(START_S)

    def _wait_until(self, is_known: Callable[[], bool], timeout_s: float) -> bool:
        """Whether the exit code is known within that time."""
        deadline_s = time.monotonic() + timeout_s
        with self._news:
            while not is_known():
                left_s = deadline_s - time.monotonic()
                if self._is_being_read:
                    if left_s <= 0 or not self._news.wait(left_s):
                        return is_known()
                    continue
                if not self._read(max(left_s, 0.0)):
                    return is_known()
        return True

    def _read(self, timeout_s: float) -> bool:
        """Take note of the next message; false after `timeout_s`. The condition is held before and after."""
        self._is_being_read = True
        self._news.release()
        message = None
        try:
            if select.select([self._connection], [], [], timeout_s)[0]:
                message = self._connection.recv(1 << 16)
        finally:
            self._news.acquire()
            self._is_being_read = False
            self._news.notify_all()
        if message is None:
            return False
        if not message:
            raise ForkServerError(f"the fork server has ended (exit code {self._process.poll()})")
        content = json.loads(message)
        if "ready" in content:
            self._is_ready = True
        elif "exit_code" in content:
            self._exit_codes[content["ended"]] = content["exit_code"]
        else:
            # The system gives numbers out again.
            self._exit_codes.pop(content["pid"], None)
            self._forked = content["pid"]
        return True


def send_order(
    connection: socket.socket,
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str | Path,
    descriptors: Sequence[int],
) -> None:
    """Ask the process at the other end to fork. The first two `descriptors` are standard output and error."""
    payload = os.memfd_create("order")
    try:
        os.write(payload, json.dumps({"command": list(command), "env": dict(env), "cwd": str(cwd)}).encode())
        os.lseek(payload, 0, os.SEEK_SET)
        socket.send_fds(connection, [b"fork"], [payload, *descriptors])
    finally:
        os.close(payload)


class ForkedProcess:
    """`subprocess.Popen`'s methods that tests use, for a process that the server has forked."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._server.exit_code_of(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline_s = time.monotonic() + timeout
        while self.returncode is None:
            left_s = deadline_s - time.monotonic()
            self.returncode = self._server.exit_code_of(self.pid, min(max(left_s, 0.0), LONG_S))
            if self.returncode is None and left_s <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # It may have ended since, and the server may know.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork_server(hash_seed: int = 0) -> ForkServer:
    """The server of this process with that PYTHONHASHSEED, started at the first call."""
    return _started(hash_seed)


@functools.cache
def _started(hash_seed: int) -> ForkServer:
    """A function of its own: `functools.cache` tells an argument that is left out from one that is its default."""
    return ForkServer(hash_seed)


# In the server.


def serve(connection: socket.socket, prepare: Callable[[], None] | None = None) -> dict[str, Any]:
    """Serve until the other end is closed. Returns in each forked process, with its order. `prepare`: what is done once
    for all forks, else `prepare_ranks`.
    """
    import gc

    import quick_sync

    # It is started by the first test that wants a fork, perhaps while the engine there defers Ctrl-C, or in a shell's
    # background job, which ignores it: all that it forks would.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    quick_sync.make_quick()
    import spmd_worker.worker.memory.garbage

    # Modules are no garbage: a fifth of the time was spent looking for some.
    gc.disable()
    (prepare or prepare_ranks)()
    gc.freeze()
    gc.enable()
    # Each job would count them.
    spmd_worker.worker.memory.garbage.has_frozen_objects = lambda: True
    send(connection, {"ready": True})
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    children: dict[int, int] = {}
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != connection.fileno():
                poll.unregister(descriptor)
                os.close(descriptor)
                pid = children.pop(descriptor)
                exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                send(connection, {"ended": pid, "exit_code": exit_code})
                continue
            words, descriptors, _, _ = socket.recv_fds(connection, 16, MAX_DESCRIPTORS)
            if not words:
                end_all(list(children.values()))
            order = json.loads(read_all(descriptors[0]))
            pid = os.fork()
            if pid == 0:
                connection.close()
                for other in children:
                    os.close(other)
                os.close(descriptors[0])
                become(order, descriptors[1:])
                return order
            for each in descriptors:
                os.close(each)
            child = os.pidfd_open(pid)
            children[child] = pid
            poll.register(child, select.POLLIN)
            send(connection, {"pid": pid})


def prepare_ranks() -> None:
    import_everything()
    check_that_forks_are_safe()
    try_products_once()
    leave_libraries()
    let_waiting_ranks_sleep()


def import_everything() -> None:
    """Import the modules of ranks, without those of reference models."""
    import importlib
    import pkgutil

    import torch.distributed.distributed_c10d
    import torch.distributed.launcher.api
    import torch.distributed.run  # noqa: F401  # for forked_torchrun.py

    # Scripts in files of tests import the first, sockets the second.
    for name in ("pytest", "encodings.idna"):
        importlib.import_module(name)
    import kv_cache
    import spmd_worker

    for package in (kv_cache, spmd_worker):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".integrations" not in module.name:
                importlib.import_module(module.name)
    importlib.import_module("launch")
    # As imports do that are paid for once: files and parsers of settings, and a digest of all source files.
    importlib.import_module("composed_once").compose_defaults_once()
    spmd_worker.base.config.compose.compose_run(REPOSITORY / "conf", ["model.path=model", "device=cpu"])
    spmd_worker.base.version.code_fingerprint()


def check_that_forks_are_safe() -> None:
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process of {len(threads)} threads cannot be forked safely"


def try_products_once() -> None:
    """A fork tries oneDNN's products, as each process does before its first, a third of the start of a small model; no
    other fork tries them again where rows do not depend on the batch.
    """
    import torch

    from spmd_worker.ops.kernels.cpu import linear

    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            linear.keep_onednn_from_amx()
            os._exit(0 if all(map(linear.rows_are_invariant, (torch.float32, torch.bfloat16))) else 1)
        os._exit(1)
    if os.waitpid(pid, 0)[1] == 0:
        linear.rows_are_invariant = lambda dtype: True


def leave_libraries() -> None:
    """Skip torch's removal of operators defined in Python at the end of a process, which takes 40 ms."""
    import weakref

    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False


def let_waiting_ranks_sleep() -> None:
    """Have ranks that share memory sleep at once, as where they have no cores of their own: tests run more processes
    than there are cores, and a rank that spins keeps the one that it waits for from its core.
    """
    from spmd_worker.ranks import shared_memory

    shared_memory._num_cores = lambda: 0


def become(order: dict[str, Any], streams: list[int]) -> None:
    """This forked process has the session, streams, folder, environment and path that were asked for. The first two of
    `streams` are standard output and error, the others were passed.
    """
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor, stream in zip((1, 2), streams[:2], strict=True):
        os.dup2(stream, descriptor)
        os.close(stream)
    os.chdir(order["cwd"])
    own_path = os.environ["PYTHONPATH"].split(os.pathsep)
    rest = [entry for entry in sys.path[1:] if entry not in own_path]
    os.environ.clear()
    os.environ.update(order["env"])
    show_environment()
    asked_path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    order["command"] = [word.format(*streams[2:]) if PASSED.fullmatch(word) else word for word in order["command"]]
    is_module = order["command"][0] == "-m"
    sys.argv[:] = order["command"][is_module:]
    own_folder = [] if is_module else [str(Path(sys.argv[0]).resolve().parent)]
    sys.path[:] = [*own_folder, *asked_path, *rest]
    set_num_threads()


def show_environment() -> None:
    """In /proc/PID/environ, which shows the memory in which the server's environment was. Nothing points there since
    every variable was unset.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[1:]
    start, end = map(int, fields[ENVIRONMENT_FIELDS])
    content = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    assert len(content) < end - start, f"an environment of {len(content)} bytes is larger than {ENVIRONMENT_BYTES}"
    ctypes.memmove(start, content + bytes(end - start - len(content)), end - start)


def set_num_threads() -> None:
    """Set the number of OpenMP threads, which read the variable in the server."""
    if "torch" not in sys.modules:
        return
    import torch

    wanted = os.environ.get("OMP_NUM_THREADS", "")
    num_threads = int(wanted) if wanted else len(os.sched_getaffinity(0))
    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)


def run(command: list[str]) -> None:
    """The script or the module, as `__main__`."""
    if command[0] == "-m":
        # It has been imported; run_module would say that this may surprise.
        sys.modules.pop(command[1], None)
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    script = command[0]
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def run_to_its_end(command: list[str]) -> NoReturn:
    """As `run`, and then what an interpreter does at its end, but for taking every module apart: that copies most of
    what a forked process shares with the server, for a quarter of a second.
    """
    exit_code: object = 0
    try:
        run(command)
    except SystemExit as ending:
        exit_code = 0 if ending.code is None else ending.code
        if not isinstance(exit_code, int):
            # Words, which the interpreter prints.
            raise
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(exit_code)
    # Nobody reads them any more, of which the interpreter has its own to say.
    sys.exit(exit_code)


def end_all(pids: list[int]) -> None:
    """Never returns."""
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os._exit(0)


def read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.send(json.dumps(message).encode())
    except BrokenPipeError:
        # The next thing to be read is the end.
        return


if __name__ == "__main__":
    run_to_its_end(serve(socket.socket(fileno=int(sys.argv[1])))["command"])
