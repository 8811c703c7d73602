"""Starts ranks under torchrun for tests, ends them in time, and leaves no process behind.

torchrun puts every rank in a session of its own, so killing its process group leaves the ranks running. Each run
therefore carries a token in its environment, which all of its descendants inherit, and is found again by it in /proc.
Knows nothing of what the ranks compute.
"""

import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).resolve().parents[1]
STARTER = str(Path(__file__).with_name("rank_starter.py"))
TOKEN_VARIABLE = "TESTS_RANKS_TOKEN"
GRACE_S = 3.0
STACKS_S = 0.5
EXEC_S = 0.5
# In /proc/PID/stat, counted from the field after the state: `vsize` is the 23rd field of proc(5).
VIRTUAL_SIZE_FIELD = 19
# What torchrun or an outer launcher would hand down, and what would then describe the wrong run.
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True, slots=True)
class CompletedRanks:
    """How a run under torchrun ended. `returncode` is torchrun's: 1 whatever a failed rank exited with."""

    returncode: int
    stdout: str
    stderr: str
    wall_s: float

    @property
    def output(self) -> str:
        """Both streams, for a test's failure message."""
        ending = f"exit code {self.returncode} after {self.wall_s:.1f} s"
        return f"{ending}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class RanksTimedOut(AssertionError):
    """The ranks were still running at the timeout; the message holds their output and the stacks of every rank."""


class RanksLeftBehind(AssertionError):
    """torchrun ended and processes that it started did not; they were killed."""


def run_torchrun(
    script_or_args: str | Path | Sequence[str | Path],
    nproc: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> CompletedRanks:
    """Run `script_or_args` (a script, or a script and its arguments) on `nproc` ranks and wait for torchrun's end.

    The ranks find the repository and tests/ on their path and start in `cwd`, by default the repository. `env` is added
    to this process's environment. Raises RanksTimedOut after `timeout_s` and RanksLeftBehind; a failed rank is no
    exception here but a returncode.
    """
    script = [script_or_args] if isinstance(script_or_args, (str, Path)) else list(script_or_args)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return run_command([*launcher, *map(str, script)], timeout_s, env, cwd)


def run_ranks(
    source: str,
    nproc: int,
    timeout_s: float,
    arguments: Sequence[str | Path] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    *,
    under_torchrun: bool = False,
) -> CompletedRanks:
    """Run `source`, the text of a script (indented as it stands in the test), on `nproc` ranks. See `run_torchrun`.

    Unless it is to be `under_torchrun`, a launcher starts them that takes half the time (`rank_starter.py`). The store
    of such a world is the first rank's and goes with it: a script that starts one world after another needs torchrun.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        script = Path(folder) / "ranks_script.py"
        script.write_text(textwrap.dedent(source), encoding="utf-8")
        if under_torchrun:
            return run_torchrun([script, *arguments], nproc, timeout_s, env, cwd)
        return run_started([script, *arguments], nproc, timeout_s, env, cwd)


def run_started(
    command: Sequence[str | Path],
    nproc: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> CompletedRanks:
    """As `run_torchrun`, by a launcher that takes half the time: a script and its arguments."""
    return run_command([sys.executable, STARTER, str(nproc), *map(str, command)], timeout_s, env, cwd)


def run_command(
    command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None, cwd: str | Path | None = None
) -> CompletedRanks:
    """Run any command with the same care: its own session, one thread a process, nothing left behind."""
    token = secrets.token_hex(16)
    # Files, not pipes: a process left behind would hold a pipe open and reading it would never end.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        started = time.monotonic()
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd or REPOSITORY,
            env=_environment(token, env or {}),
            start_new_session=True,
        )
        try:
            is_late = not _has_ended(process, timeout_s)
            if is_late:
                _ask_for_stacks(token, process.pid)
            left_behind = [] if is_late else _wait_for_stragglers(token)
        finally:
            _kill_all(token, process)
        completed = CompletedRanks(process.returncode, _text(stdout), _text(stderr), time.monotonic() - started)
    if is_late:
        raise RanksTimedOut(f"still running after {timeout_s} s: {' '.join(command)}\n{completed.output}")
    if left_behind:
        raise RanksLeftBehind(f"left behind by {' '.join(command)}: {', '.join(left_behind)}\n{completed.output}")
    return completed


def processes_of(token: str) -> list[int]:
    """The ids of the living processes that carry `token` in the environment they were started with."""
    marker = f"{TOKEN_VARIABLE}={token}".encode()
    deadline = time.monotonic() + EXEC_S
    while True:
        environments = {int(folder.name): _environment_of(folder) for folder in Path("/proc").glob("[0-9]*")}
        # A process in the middle of its exec has an empty environment for an instant: one is looked at again.
        is_complete = not any(environment == b"" and _is_running(pid) for pid, environment in environments.items())
        if is_complete or time.monotonic() > deadline:
            return [pid for pid, environment in environments.items() if environment and marker in environment]
        time.sleep(0.01)


def _environment(token: str, extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not _is_set_by_a_launcher(name)}
    python_path = [str(REPOSITORY), str(REPOSITORY / "tests"), inherited.get("PYTHONPATH", "")]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        **extra,
        TOKEN_VARIABLE: token,
    }


def _is_set_by_a_launcher(name: str) -> bool:
    return name in LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_")


def _has_ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _wait_for_stragglers(token: str) -> list[str]:
    """What still runs `GRACE_S` after torchrun's end, as `pid (command line)`."""
    deadline = time.monotonic() + GRACE_S
    while (pids := processes_of(token)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"{pid} ({_command_line(pid)})" for pid in pids]


def _ask_for_stacks(token: str, launcher_pid: int) -> None:
    """Have every rank write its stacks to stderr: faulthandler does on SIGABRT, even while a collective blocks."""
    for pid in processes_of(token):
        if pid != launcher_pid:
            _leave_no_core_file(pid)
            _send(pid, signal.SIGABRT)
    time.sleep(STACKS_S)


def _leave_no_core_file(pid: int) -> None:
    try:
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    except (ProcessLookupError, PermissionError):
        return


def _kill_all(token: str, process: subprocess.Popen[bytes]) -> None:
    """Kill until none is found: a launcher may start a rank between the search and the kill."""
    while pids := processes_of(token):
        for pid in pids:
            _send(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.wait()


def _send(pid: int, signal_number: signal.Signals) -> None:
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return


def _environment_of(folder: Path) -> bytes | None:
    """What a process was started with; None where it has ended, is another user's, or is a thread of the kernel."""
    try:
        return (folder / "environ").read_bytes()
    except OSError:
        return None


def _is_running(pid: int) -> bool:
    """Whether `pid` still maps memory: a zombie does not, and its environment stays empty."""
    state, *fields = _proc_bytes(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split() or [b"X"]
    return state not in (b"Z", b"X") and int(fields[VIRTUAL_SIZE_FIELD]) > 0


def _command_line(pid: int) -> str:
    return _proc_bytes(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode(errors="replace").strip()


def _proc_bytes(path: Path) -> bytes:
    """The file's bytes, or none where the process has ended or is another user's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")
