"""pytest-xdist's processes, forked from one that has imported the tests and all that they import.

Each of them collects all tests, for which a fresh one imports torch, transformers and 700 test modules. One does so
for all, and what it imported stays shared memory. Fixtures, options and everything else of a run are made in the fork.
Where that process cannot be had, because it has a second thread or is ended, the others start as pytest-xdist does it.

A run of all tests alone does this: few files need little of what would be imported.

    python forked_pytest.py DESCRIPTOR            serve
"""

import contextlib
import os
import random
import socket
import sys
import types
import warnings
from typing import IO, Any

import fork_server
import pytest
from _pytest.config import Config, _prepareconfig
from _pytest.pathlib import import_path
from execnet import gateway_io

IMPORTED_S = 600.0


class ForkedIO(gateway_io.Popen2IOMaster):
    """execnet's end of the pipes to a forked process."""

    def __init__(self, server: fork_server.ForkServer, args: list[str], execmodel: Any) -> None:
        assert args[-2:] == ["-c", gateway_io.popen_bootstrapline], args
        try:
            self.popen, streams = fork(server)
        except fork_server.ForkServerError as error:
            say_fresh(error)
            super().__init__(args, execmodel)
            return
        gateway_io.Popen2IO.__init__(self, *streams, execmodel=execmodel)


def fork(server: fork_server.ForkServer) -> tuple[fork_server.ForkedProcess, tuple[IO[bytes], IO[bytes]]]:
    """A process that reads its program from its standard input, and the other ends of its input and output."""
    (input_reader, input_writer), (output_reader, output_writer) = os.pipe(), os.pipe()
    streams = os.fdopen(input_writer, "wb"), os.fdopen(output_reader, "rb")
    with open(input_reader, "rb") as given, open(output_writer, "wb") as output, open(os.dup(2), "wb") as errors:
        process = server.fork(["{0}"], os.environ, os.getcwd(), output, errors, [given.fileno()])
    return process, streams


def fork_processes(config: pytest.Config) -> None:
    """Fork the processes that pytest-xdist starts from here on, in a run of all tests."""
    if config.args_source is not Config.ArgsSource.TESTPATHS:
        return
    # As fresh ones would have: of tests that depend on it, each run has another one.
    given = os.environ.get("PYTHONHASHSEED", "random")
    seed = random.randrange(1 << 32) if given == "random" else int(given)
    try:
        server = fork_server.ForkServer(seed, __file__)
        server.wait_until_ready(IMPORTED_S)
    except (fork_server.ForkServerError, OSError) as error:
        say_fresh(error)
        return

    def start(args: list[str], execmodel: Any) -> ForkedIO:
        return ForkedIO(server, args, execmodel)

    gateway_io.Popen2IOMaster = start


def say_fresh(error: Exception) -> None:
    print(f"processes of tests are not forked: {error}", file=sys.stderr)


# In the process that is forked.


def import_tests() -> None:
    """Import test modules as a process that collects them does, with pytest's plugins and rewritten assertions.

    A module that cannot be imported is left to the forks, which say so.
    """
    # Captured output, and where faults are written, would be files that each fork has open.
    config = _prepareconfig(["--capture=no", "-p", "no:faulthandler"])
    # For conftest.py, which makes and removes the folder of a run, this is one of the run's processes.
    config.workerinput = {}
    # Marks that nobody has registered are errors from here on.
    config._do_configure()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in sorted((fork_server.REPOSITORY / "tests").rglob("test_*.py")):
            with contextlib.suppress(BaseException):
                import_path(path, mode="prepend", root=config.rootpath, consider_namespace_packages=False)
    config._ensure_unconfigure()
    sys.stdout.flush()
    fork_server.check_that_forks_are_safe()


def run_given_program(command: list[str]) -> None:
    """`python -u -c` with execnet's first line: its standard input is the descriptor that was passed."""
    os.dup2(int(command[0]), 0)
    os.close(int(command[0]))
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # until the end
    sys.argv[:] = ["-c"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(gateway_io.popen_bootstrapline, main.__dict__)


if __name__ == "__main__":
    order = fork_server.serve(socket.socket(fileno=int(sys.argv[1])), import_tests)
    fork_server.run_to_its_end(order["command"], run_given_program)
