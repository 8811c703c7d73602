"""Standard streams that are closed, and a standard error that takes no more."""

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY

from spmd_worker.base.standard_streams import _LossyFile, open_standard_streams


@pytest.mark.parametrize("closed", [(2,), (0, 2), (0, 1, 2), ()])
def test_closed_standard_streams_become_the_null_device(tmp_path: Path, closed: tuple[int, ...]):
    """The journal was standard error, and a job ended in an AttributeError that nobody saw."""
    script = f"""
import os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from spmd_worker.base.standard_streams import open_standard_streams
open_standard_streams()
file = open({str(tmp_path / "file")!r}, "w")
print("lost or shown", file=sys.stderr, flush=True)
os.write(2, b"the same of a library")
is_readable = True
try:
    os.read(0, 1)
except OSError:
    is_readable = False
file.write(f"{{file.fileno() > 2}} {{sys.stderr is sys.__stderr__}} {{is_readable}}")
"""
    redirections = " ".join(f"{number}>&-" for number in closed)
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirections}', sys.executable, script]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert (tmp_path / "file").read_text() == f"True True {0 not in closed}"
    assert done.stderr == ("" if 2 in closed else "lost or shown\nthe same of a library")


@pytest.mark.parametrize(
    ("encoding", "shown"), [("latin-1", b"\xe9 \\u884c \\udcff\n"), ("utf-8", b"\xc3\xa9 \xe8\xa1\x8c \\udcff\n")]
)
def test_standard_output_shows_letters_it_lacks(encoding: str, shown: bytes):
    """Regression: `--cfg job` and spmd-worker-verify ended in a UnicodeEncodeError."""
    script = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from spmd_worker.base.standard_streams import open_standard_streams
open_standard_streams()
print("\\xe9 \\u884c \\udcff")
"""
    variables = os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=variables, check=True)
    assert done.stdout == shown


@pytest.mark.parametrize("end", ["a pipe", "a terminal", "a full disk"])
def test_standard_error_without_reader_loses_what_is_written(end: str):
    """A job of hours ended when its terminal was closed, or its log was cut by `| head`."""
    script = f"""
import os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from spmd_worker.base.standard_streams import open_standard_streams
is_ours = sys.argv[1:] == ["ours"]
if is_ours:
    open_standard_streams()
print("ready", flush=True)
sys.stdin.read()
print("é", sys.stderr.isatty(), file=sys.stderr, flush=True)
print("goes on")
"""
    for name, told in (("ours", ["ready", "goes on"]), ("control", ["ready"])):
        reader, writer = pty.openpty() if end == "a terminal" else os.pipe()
        if end == "a full disk":
            os.close(writer)
            writer = os.open("/dev/full", os.O_WRONLY)
        command = [sys.executable, "-c", script, name]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writer, text=True, start_new_session=True
        )
        os.close(writer)
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        os.close(reader)
        lines += process.communicate()[0].splitlines(keepends=True)
        assert [line.strip() for line in lines] == told
        assert (process.returncode == 0) == (name == "ours")


def test_log_that_goes_on_says_what_is_lost():
    """A full pipe that does not block ended a job with BlockingIOError."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with _LossyFile(writer, "w") as log:
        # Whole pages, until it is full.
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        assert [log.write(b"12345"), log.write(b"678")] == [5, 3]
        os.read(reader, 1 << 20)
        assert log.write(b"goes on") == 7
        assert os.read(reader, 1 << 20) == b"[8 bytes of this log are lost]\ngoes on"
    os.close(reader)


def test_standard_error_of_a_caller_is_kept(capsys: pytest.CaptureFixture[str]):
    before = sys.stderr
    open_standard_streams()
    assert sys.stderr is before
