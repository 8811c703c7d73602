"""Starts ranks for tests, ends them in time, and leaves no process behind.

Ranks are forked from a process that has imported everything (`fork_server.py`), with the variables and the store that
torchrun would give them. torchrun itself runs in the tests that are about it: `ABOUT_TORCHRUN`. There too it and its
ranks are forked (`forked_torchrun.py`), but where `is_fresh` asks for interpreters that people would start.
Every rank has a session of its own, so killing a launcher's process group leaves the ranks running. Each run therefore
carries a token in its environment, which all of its descendants inherit, and is found again by it in /proc.
Knows nothing of what the ranks compute.
"""

import json
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from fork_server import IMPORT_PATH, ForkedProcess, fork_server

REPOSITORY = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).parent
STORE_HOST = str(SUPPORT / "store_host.py")
TOKEN_VARIABLE = "TESTS_RANKS_TOKEN"
GRACE_S = 60.0
# As torchrun's.
LAUNCHER_GRACE_S = 30.0
KILLED_S = 60.0
POLL_S = 0.05
STACKS_S = 60.0
UNANSWERED_NAME = re.compile(r"^\[W.* The hostname of the client socket cannot be retrieved\. err=-3\n", re.MULTILINE)
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
ABOUT_TORCHRUN: tuple[str, ...] = (
    "tests/replica/lockstep/test_divergence.py",
    "tests/ranks/test_cores.py",
    "tests/base/liveness/test_signals.py",
    "tests/scenarios/test_external_launcher.py",
    "tests/scenarios/test_fault_matrix.py",
    "tests/scenarios/test_kill_resume.py",
    "tests/scenarios/test_encoder_decoders_in_jobs.py",
    "tests/frontends/serve/test_server_on_ranks.py",
    "tests/test_launch.py",
    "tests/scripts/test_packaging.py",
    "tests/scenarios/test_gpu.py",
    "tests/support/test_ranks_helper.py",
    "tests/scenarios/test_pool_histories.py",
    "tests/scenarios/test_thousand_kills.py",
    "tests/scenarios/test_two_nodes.py",
)
"""The files of the tests that start torchrun, because they are about it. All others fork their ranks."""


@dataclass(frozen=True, slots=True)
class CompletedRanks:
    """Result of a run. `returncode` is a launcher's: 1 for any failed rank. `exit_codes` are the ranks'
    own, where they were forked; those of signals are negative.
    """

    returncode: int
    stdout: str
    stderr: str
    wall_s: float
    exit_codes: tuple[int, ...] = ()

    @property
    def output(self) -> str:
        """Both streams, for a test's failure message."""
        ending = f"exit code {self.returncode} after {self.wall_s:.1f} s"
        return f"{ending}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def checked(self) -> "CompletedRanks":
        """The result itself, whose exit code is 0."""
        assert self.returncode == 0, self.output
        return self


class RanksTimedOut(AssertionError):
    """The ranks were still running at the timeout; the message holds their output and the stacks of every rank."""


class RanksLeftBehind(AssertionError):
    """The ranks ended and processes that they started did not; they were killed."""


class Launched(Protocol):
    """A started command, or forked ranks."""

    def has_ended(self, timeout_s: float) -> bool:
        """Whether all processes have ended within `timeout_s`."""

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """Exit codes of the ranks, after their end."""

    @property
    def returncode(self) -> int:
        """Once it has ended."""


Launch = Callable[[dict[str, str], str | Path, IO[bytes], IO[bytes]], Launched]
"""Starts something with all of its environment, in a folder, with its stdout and stderr."""


def run_torchrun(
    script_or_args: str | Path | Sequence[str | Path],
    nproc: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    *,
    is_fresh: bool = False,
) -> CompletedRanks:
    """Run `script_or_args` (a script, or a script and its arguments) on `nproc` ranks and wait for torchrun's end.

    The ranks find the repository and tests/ on their path and start in `cwd`, by default the repository. `env` is added
    to this process's environment. Raises RanksTimedOut after `timeout_s` and RanksLeftBehind; a failed rank is no
    exception here but a returncode. `is_fresh`: torchrun and its ranks are interpreters that import torch themselves.
    """
    script = [script_or_args] if isinstance(script_or_args, (str, Path)) else list(script_or_args)
    words = [str(word) for word in script]
    if is_fresh:
        return run_command([*torchrun(nproc), *words], timeout_s, env, cwd)
    return run_script([*forked_torchrun(nproc), *words], timeout_s, env, cwd)


def torchrun(nproc: int) -> list[str]:
    """The beginning of a command line. Only tests of `ABOUT_TORCHRUN` may ask for it."""
    return [sys.executable, "-m", "torch.distributed.run", *_torchrun_arguments(nproc)]


def forked_torchrun(nproc: int) -> list[str]:
    """`torchrun` for the fork server."""
    return ["-m", "forked_torchrun", *_torchrun_arguments(nproc)]


def _torchrun_arguments(nproc: int) -> list[str]:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    assert not test or test in ABOUT_TORCHRUN, f"{test} is not in ABOUT_TORCHRUN of tests/support/ranks.py"
    return ["--standalone", "--nproc-per-node", str(nproc)]


def run_ranks(
    source: str,
    nproc: int,
    timeout_s: float,
    arguments: Sequence[str | Path] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    *,
    under_torchrun: bool = False,
    is_fresh: bool = False,
    hash_seeds: bool = False,
    has_agent_store: bool = True,
) -> CompletedRanks:
    """Run `source`, the text of a script (indented as it stands in the test), on `nproc` ranks. See `run_forked`, and
    with `under_torchrun` `run_torchrun`.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        script = Path(folder) / "ranks_script.py"
        script.write_text(textwrap.dedent(source), encoding="utf-8")
        command = [script, *arguments]
        if under_torchrun:
            return run_torchrun(command, nproc, timeout_s, env, cwd, is_fresh=is_fresh)
        return run_forked(command, nproc, timeout_s, env, cwd, hash_seeds=hash_seeds, has_agent_store=has_agent_store)


def reports(
    script: str,
    nproc: int,
    folder: Path,
    arguments: Sequence[str | Path] = (),
    timeout_s: float = 240.0,
    **options: Any,
) -> list[Any]:
    """Reports of the ranks of a script (`run_ranks`): each writes RANK.json in `folder`, its last argument."""
    run_ranks(script, nproc, timeout_s=timeout_s, arguments=[*arguments, folder], **options).checked()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nproc)]


def reports_of_job(script: str, nproc: int, folder: Path, job: Mapping[str, Any], **options: Any) -> list[Any]:
    """`reports` of a script whose first argument is a file with `job`."""
    (folder / "job.json").write_text(json.dumps(job))
    return reports(script, nproc, folder, [folder / "job.json"], **options)


def run_forked(
    command: Sequence[str | Path],
    nproc: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    *,
    hash_seeds: bool = False,
    has_agent_store: bool = True,
) -> CompletedRanks:
    """As `run_torchrun`, on ranks that are forked: when one has failed, the others get SIGTERM.

    `hash_seeds`: neighbours have another PYTHONHASHSEED, as the ranks of a launcher have. `has_agent_store`: the store
    is not one of the ranks' and outlives them, as under torchrun; else it is rank 0's, as without a launcher.
    """
    words = [str(word) for word in command]

    def launch(variables: dict[str, str], folder: str | Path, stdout: IO[bytes], stderr: IO[bytes]) -> ForkedRanks:
        # Two differ as much as many do, and each is a server that imports everything.
        seeds = [rank % 2 if hash_seeds else 0 for rank in range(nproc)]
        return ForkedRanks(words, seeds, has_agent_store, variables, folder, stdout, stderr)

    return _run(launch, " ".join(words), timeout_s, env, cwd)


def run_script(
    command: Sequence[str | Path],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> CompletedRanks:
    """As `run_command` of this interpreter with a script and its arguments, which is forked. No launcher started it."""
    words = [str(word) for word in command]

    def launch(variables: dict[str, str], folder: str | Path, stdout: IO[bytes], stderr: IO[bytes]) -> ForkedScript:
        return ForkedScript(fork_server().fork(words, variables, folder, stdout, stderr))

    return _run(launch, " ".join(words), timeout_s, env, cwd)


def run_command(
    command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None, cwd: str | Path | None = None
) -> CompletedRanks:
    """Run any command with the same care: its own session, one thread a process, nothing left behind."""

    def launch(variables: dict[str, str], folder: str | Path, stdout: IO[bytes], stderr: IO[bytes]) -> StartedCommand:
        return StartedCommand(list(command), variables, folder, stdout, stderr)

    return _run(launch, " ".join(command), timeout_s, env, cwd)


class StartedCommand:
    """Implements `Launched`."""

    exit_codes = ()

    def __init__(
        self, command: list[str], env: dict[str, str], cwd: str | Path, stdout: IO[bytes], stderr: IO[bytes]
    ) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=cwd, env=env, start_new_session=True
        )

    def has_ended(self, timeout_s: float) -> bool:
        return _has_ended(self._process, timeout_s)

    @property
    def returncode(self) -> int:
        return self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid


class ForkedScript:
    """Implements `Launched` for one process."""

    exit_codes = ()

    def __init__(self, process: ForkedProcess) -> None:
        self._process, self.pid = process, process.pid

    def has_ended(self, timeout_s: float) -> bool:
        return _has_ended(self._process, timeout_s)

    @property
    def returncode(self) -> int:
        return self._process.wait(KILLED_S)


class ForkedRanks:
    """Implements `Launched` for ranks, and does what torchrun does for them."""

    def __init__(
        self,
        command: list[str],
        hash_seeds: Sequence[int],
        has_agent_store: bool,
        env: dict[str, str],
        cwd: str | Path,
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        servers = [fork_server(seed) for seed in hash_seeds]
        # Else the first ranks would wait for others whose server still imports, and their timeout goes on.
        for server in servers:
            server.wait_until_ready()
        self._store = StoreHost(env) if has_agent_store else None
        port = self._store.port if self._store else free_port()
        self.processes = [
            server.fork(command, rank_variables(env, rank, len(servers), port, has_agent_store), cwd, stdout, stderr)
            for rank, server in enumerate(servers)
        ]
        self._ends_at_s: float | None = None
        """When those are killed that SIGTERM has not ended; None while no rank has failed."""

    def has_ended(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while (running := [each for each in self.processes if each.poll() is None]) and time.monotonic() < deadline_s:
            if any(each.returncode for each in self.processes):
                self._end(running)
            _has_ended(running[0], POLL_S)
        if not running and self._store:
            self._store.close()
        return not running

    def _end(self, running: list[ForkedProcess]) -> None:
        is_first, now_s = self._ends_at_s is None, time.monotonic()
        if is_first:
            self._ends_at_s = now_s + LAUNCHER_GRACE_S
        if is_first or now_s > self._ends_at_s:
            for each in running:
                each.send_signal(signal.SIGTERM if is_first else signal.SIGKILL)

    @property
    def exit_codes(self) -> tuple[int, ...]:
        return tuple(each.wait(KILLED_S) for each in self.processes)

    @property
    def returncode(self) -> int:
        return int(any(self.exit_codes))


class StoreHost:
    """A process that has torch's store, as torchrun's has it for its ranks."""

    def __init__(self, env: Mapping[str, str]) -> None:
        receiving, sending = os.pipe()
        with open(sending, "wb") as answer, open(os.devnull, "wb") as nothing:
            self._process = fork_server().fork([STORE_HOST], env, REPOSITORY, answer, nothing)
        with open(receiving, "rb") as answer:
            self.port = int(answer.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait(KILLED_S)


def rank_variables(
    env: Mapping[str, str], rank: int, num_ranks: int, port: int, has_agent_store: bool = False
) -> dict[str, str]:
    """`env`, and what torchrun tells a rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": 0}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if has_agent_store:
        place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        place |= {"TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": env[TOKEN_VARIABLE]}
    return {**env, **{name: str(value) for name, value in place.items()}}


def free_port() -> int:
    """A TCP port that nobody listens on now, and that the system gives to nobody else while this process lives.

    It stays bound here, which keeps no listener away that shares addresses, as those of stores do.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held_ports.append(held)
    return int(held.getsockname()[1])


_held_ports: list[socket.socket] = []


def _run(
    launch: Launch, title: str, timeout_s: float, env: Mapping[str, str] | None, cwd: str | Path | None
) -> CompletedRanks:
    token = secrets.token_hex(16)
    # Files, not pipes: a process left behind would hold a pipe open and reading it would never end.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        started = time.monotonic()
        try:
            launched = launch(environment(token, env or {}), cwd or REPOSITORY, stdout, stderr)
            is_late = not launched.has_ended(timeout_s)
            if is_late:
                ask_for_stacks(token)
            left_behind = [] if is_late else _wait_for_stragglers(token)
        finally:
            kill_all(token)
        launched.has_ended(KILLED_S)
        wall_s = time.monotonic() - started
        completed = CompletedRanks(launched.returncode, _text(stdout), _text(stderr), wall_s, launched.exit_codes)
    if is_late:
        raise RanksTimedOut(f"still running after {timeout_s} s: {title}\n{completed.output}")
    if left_behind:
        raise RanksLeftBehind(f"left behind by {title}: {', '.join(left_behind)}\n{completed.output}")
    return completed


def processes_of(token: str) -> list[int]:
    """The ids of the living processes that carry `token` in the environment they were started with."""
    marker = f"{TOKEN_VARIABLE}={token}".encode()
    deadline = time.monotonic() + EXEC_S
    while True:
        environments = {int(folder.name): environment_of(folder) for folder in Path("/proc").glob("[0-9]*")}
        # A process in the middle of its exec has an empty environment for an instant: one is looked at again.
        is_complete = not any(environment == b"" and _is_running(pid) for pid, environment in environments.items())
        if is_complete or time.monotonic() > deadline:
            return [pid for pid, environment in environments.items() if environment and marker in environment]
        time.sleep(0.01)


def environment(token: str, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's, without what a launcher told it, with what ranks need and `extra`."""
    inherited = {name: value for name, value in os.environ.items() if not _is_set_by_a_launcher(name)}
    python_path = [*IMPORT_PATH, inherited.get("PYTHONPATH", "")]
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


def _has_ended(process: subprocess.Popen[bytes] | ForkedProcess, timeout_s: float) -> bool:
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


def ask_for_stacks(token: str) -> None:
    """Have every rank write its stacks to stderr: faulthandler does on SIGABRT, even while a collective blocks.

    A launcher that is no Python, or has no handler, just ends.
    """
    for pid in processes_of(token):
        _leave_no_core_file(pid)
        send(pid, signal.SIGABRT)
        # One after the other: what two write at once cannot be read.
        deadline_s = time.monotonic() + STACKS_S
        while _is_running(pid) and time.monotonic() < deadline_s:
            time.sleep(0.01)


def _leave_no_core_file(pid: int) -> None:
    try:
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    except (ProcessLookupError, PermissionError):
        return


def kill_all(token: str) -> None:
    """Kill until none is found: a launcher may start a rank between the search and the kill."""
    while pids := processes_of(token):
        for pid in pids:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)


def send(pid: int, signal_number: signal.Signals) -> None:
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return


def environment_of(folder: Path) -> bytes | None:
    """What a process was started with; None where it has ended, is another user's, or is a thread of the kernel."""
    try:
        return (folder / "environ").read_bytes()
    except OSError:
        return None


def _is_running(pid: int) -> bool:
    """Whether `pid` still maps memory: a zombie does not, and its environment stays empty."""
    state, *fields = proc_bytes(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split() or [b"X"]
    return state not in (b"Z", b"X") and int(fields[VIRTUAL_SIZE_FIELD]) > 0


def _command_line(pid: int) -> str:
    return proc_bytes(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode(errors="replace").strip()


def proc_bytes(path: Path) -> bytes:
    """The file's bytes, or none where the process has ended or is another user's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return without_unanswered_names(stream.read().decode(errors="replace"))


def without_unanswered_names(text: str) -> str:
    """Without the lines in which torch says that no name server answered: tests ask none (see conftest.py)."""
    return UNANSWERED_NAME.sub("", text)
