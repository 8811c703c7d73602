"""Name, arguments and help of a tool's program, which is run as an installed command or as a module."""

import argparse
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from spmd_worker.base.files import describe_os_error
from spmd_worker.base.remote_names import is_remote, shown_name
from spmd_worker.base.standard_streams import (
    discard_output,
    is_full,
    keep_on_without_reader,
    open_standard_streams,
)
from spmd_worker.base.urls import without_credentials


def program_name(tool: str) -> str:
    """Program name as the user typed it: `spmd-worker-report` or `python -m spmd_worker.tools.report`."""
    is_command = Path(sys.argv[0]).name.startswith("spmd-worker-")
    return f"spmd-worker-{tool}" if is_command else f"python -m spmd_worker.tools.{tool}"


def ends_without_its_reader(main: Callable[[list[str] | None], int]) -> Callable[..., int]:
    """`main`, whose exit code is the same when its reader ends: `spmd-worker-doctor RUN_DIR | head`. On a full disk it
    ends with 2, which means for all tools that the result is unknown.
    """

    @wraps(main)
    def run(arguments: list[str] | None = None) -> int:
        open_standard_streams()
        keep_on_without_reader()
        try:
            try:
                return main(arguments)
            finally:
                sys.stdout.flush()
        except OSError as error:
            if not is_full(error):
                raise
            discard_output()
            print_error(main.__module__.rpartition(".")[2], f"standard output: {error.strerror}: redirect it elsewhere")
            return 2

    return run


def make_parser(tool: str, description: str | None) -> argparse.ArgumentParser:
    """`description` is the module's docstring, whose examples are shown with the program's name."""
    program = program_name(tool)
    text = (description or "").replace(f"python -m spmd_worker.tools.{tool}", program)
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=program, description=text, formatter_class=layout)


def add_run_dir_or_pool(parser: argparse.ArgumentParser) -> None:
    """A string: a pool may be a name in an object store."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run's directory, such as runs/demo, or a pool")


def output_name(text: str) -> str:
    """`--output` of a tool. Raises ArgumentTypeError for -, which would be a file of that name."""
    if text == "-":
        raise argparse.ArgumentTypeError("it is not written to standard output: give the file to write")
    return text


def local_output_name(text: str) -> str:
    """`output_name` of a file that is written to this machine. Raises ArgumentTypeError."""
    if is_remote(text):
        raise argparse.ArgumentTypeError(f"{shown_name(text)} is remote: give a local file, and copy it there")
    return output_name(text)


def local_folder(text: str) -> Path:
    """A run's directory. Raises ArgumentTypeError for a remote name."""
    if is_remote(text):
        raise argparse.ArgumentTypeError(f"{shown_name(text)} is remote: a run's directory is on the job's machine")
    return Path(text)


def print_error(tool: str, error: Exception | str) -> None:
    text = error if isinstance(error, str) else describe_os_error(error)
    print(f"{program_name(tool)}: {without_credentials(text)}", file=sys.stderr)
