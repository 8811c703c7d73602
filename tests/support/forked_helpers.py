"""Helper processes of tokenizers and media (`bounded_process.py`), forked in place of fresh interpreters.

Each of hundreds of tests starts one for a chat template, and a fresh one imports Jinja, or numpy, for 0.1 s of a core.
Limits, pipes, messages and environment are as they are; a helper's parent is the server, and its session its own.
Files about helper processes (`ABOUT_HELPERS`) start real ones.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any

import helper_fork_server
from fork_server import ForkedProcess, ForkServer

from spmd_worker.tokenizer import bounded_process

ABOUT_HELPERS = (
    "tests/media/test_audio_preparer.py",
    "tests/media/test_image_preparer.py",
    "tests/tokenizer/test_hostile_tokenizers.py",
    "tests/tokenizer/test_many_templates.py",
    "tests/tokenizer/test_template_process.py",
)


class ForkedHelper(ForkedProcess):
    """A forked process with the ends of its pipes, like Popen's."""

    stdin: IO[bytes]
    stdout: IO[bytes]


def fork_helper(
    server: ForkServer, command: Sequence[str], stdin: int, stdout: int, stderr: int, env: Mapping[str, str]
) -> ForkedHelper:
    """Arguments of `subprocess.Popen` in bounded_process.py: `python -P -m MODULE`."""
    assert (stdin, stdout, stderr) == (subprocess.PIPE, subprocess.PIPE, subprocess.DEVNULL)
    (input_reader, input_writer), (output_reader, output_writer) = os.pipe(), os.pipe()
    words = ["-m", helper_fork_server.__name__, "{0}", command[-1]]
    with open(input_reader, "rb") as given, open(output_writer, "wb") as output, open(os.devnull, "wb") as nothing:
        process = server.fork(words, env, os.getcwd(), output, nothing, [given.fileno()])
    helper = ForkedHelper(server, process.pid)
    helper.stdin, helper.stdout = os.fdopen(input_writer, "wb"), os.fdopen(output_reader, "rb")
    return helper


def fork_helpers() -> None:
    """Fork this process's helpers from here on."""
    server, owner = ForkServer(0, helper_fork_server.__file__), os.getpid()

    def start(command: Sequence[str], **streams: Any) -> "ForkedHelper | subprocess.Popen[bytes]":
        test, module = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0], command[-1]
        is_known = module in helper_fork_server.HELPERS
        # A fork of this process would read its owner's messages.
        if is_known and test not in ABOUT_HELPERS and os.getpid() == owner:
            return fork_helper(server, command, **streams)
        return subprocess.Popen(command, **streams)

    bounded_process.subprocess = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
