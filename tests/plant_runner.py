"""Runs planted jobs on ranks that are forked, not started: a torch import costs seconds, and there are many plants.

One template process a rank imports everything once, without starting a thread, and forks a rank for each job. The
templates differ in PYTHONHASHSEED, as ranks do that a launcher starts. As torchrun does, and sooner, SIGTERM goes to
all ranks when one has failed. Knows nothing of what is planted (`plants.py` does).

    with ForkedRanks(2, tests/lockstep/plants.py) as ranks:
        job = ranks.run("sampled_id", folder, ["executor.digest_every=0"], limit_s=10)
"""

import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[1]
STRUCK_NAME = "struck.rank{}"
START_S = 90.0
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class ForkedJob:
    """How a job ended. `exit_codes` by rank, negative for a signal, None for a rank that was killed at the deadline.

    `seconds` is the time from the plant's first strike to the end of the last rank; from the fork where none struck.
    """

    exit_codes: tuple[int | None, ...]
    stderr: tuple[str, ...]
    stdout: tuple[str, ...]
    has_struck: bool
    seconds: float

    @property
    def output(self) -> str:
        """Everything, for a test's failure message."""
        texts = [f"--- rank {rank}\n{text}" for rank, text in enumerate(self.stderr)]
        return f"exit codes {self.exit_codes}, {self.seconds:.1f} s\n" + "\n".join(texts)


class ForkedRanks:
    """`num_ranks` templates that have imported everything, and `plants`, a file whose `run(name, ...)` they call."""

    def __init__(self, num_ranks: int, plants: Path) -> None:
        self.num_ranks = num_ranks
        self._templates = [_start_template(rank, plants) for rank in range(num_ranks)]

    def __enter__(self) -> Self:
        for template in self._templates:
            assert _read_line(template, time.monotonic() + START_S) == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for template in self._templates:
            template.stdin.close()
            # Its own session: whatever it forked goes with it.
            os.killpg(template.pid, signal.SIGKILL)
            template.wait()
            template.stdout.close()

    def run(self, name: str, folder: Path, arguments: list[str], limit_s: float) -> ForkedJob:
        """One job with plant `name` on every rank; ranks that still run after `limit_s` are killed."""
        port = free_port()
        started_s = time.monotonic()
        for rank, template in enumerate(self._templates):
            order = {
                "name": name,
                "folder": str(folder),
                "arguments": arguments,
                "limit_s": limit_s,
                "variables": _variables(rank, self.num_ranks, port),
            }
            template.stdin.write(json.dumps(order).encode() + b"\n")
            template.stdin.flush()
        answers = self._answers(started_s + limit_s + START_S)
        paths = [folder / STRUCK_NAME.format(rank) for rank in range(self.num_ranks)]
        strikes = [float(path.read_text()) for path in paths if path.exists()]
        return ForkedJob(
            exit_codes=tuple(answer["exit_code"] for answer in answers),
            stderr=_texts(folder, "stderr", self.num_ranks),
            stdout=_texts(folder, "stdout", self.num_ranks),
            has_struck=bool(strikes),
            seconds=max(answer["ended_s"] for answer in answers) - min(strikes, default=started_s),
        )

    def _answers(self, deadline_s: float) -> list[dict[str, Any]]:
        """How each rank ended, in rank order."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self.num_ranks:
            waiting = [rank for rank in range(self.num_ranks) if rank not in answers]
            streams = [self._templates[rank].stdout for rank in waiting]
            ready, _, _ = select.select(streams, [], [], max(deadline_s - time.monotonic(), 0))
            assert ready, f"the templates of ranks {waiting} say nothing"
            for rank in waiting:
                if self._templates[rank].stdout in ready:
                    answers[rank] = json.loads(_read_line(self._templates[rank], deadline_s))
            if any(answer["exit_code"] for answer in answers.values()):
                self._end_others([rank for rank in waiting if rank not in answers])
        return [answers[rank] for rank in range(self.num_ranks)]

    def _end_others(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._templates[rank].stdin.write(b"end\n")
            self._templates[rank].stdin.flush()


def struck(folder: Path, rank: int) -> None:
    """Called by a plant in its rank when it strikes; the first strike counts."""
    path = folder / STRUCK_NAME.format(rank)
    if not path.exists():
        path.write_text(str(time.monotonic()))


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start_template(rank: int, plants: Path) -> subprocess.Popen[bytes]:
    path = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONHASHSEED": str(rank + 1),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, __file__, str(plants)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        start_new_session=True,
    )


def _variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _texts(folder: Path, stream: str, num_ranks: int) -> tuple[str, ...]:
    return tuple((folder / f"{stream}.rank{rank}").read_text(errors="replace") for rank in range(num_ranks))


def _read_line(template: subprocess.Popen[bytes], deadline_s: float) -> str:
    """Templates answer with one short line at a time, in one write."""
    ready, _, _ = select.select([template.stdout], [], [], max(deadline_s - time.monotonic(), 0))
    line = template.stdout.readline().decode().strip() if ready else ""
    assert line, f"the template of a rank says nothing (exit code {template.poll()})"
    return line


# In the template process.


def _serve(plants_path: Path) -> None:
    plants = _load(plants_path)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process of {len(threads)} threads cannot be forked safely"
    print("ready", flush=True)
    while line := sys.stdin.buffer.raw.readline():
        if line == b"end\n":
            # For a rank that had ended meanwhile.
            continue
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _be_a_rank(plants, order)
        exit_code = _wait(pid, order["limit_s"])
        print(json.dumps({"exit_code": exit_code, "ended_s": time.monotonic()}), flush=True)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _be_a_rank(plants: ModuleType, order: dict[str, Any]) -> None:
    """Never returns."""
    exit_code: Any = 1
    try:
        folder, rank = Path(order["folder"]), int(order["variables"]["RANK"])
        os.environ.update(order["variables"])
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            with open(folder / f"{name}.rank{rank}", "wb") as stream:
                os.dup2(stream.fileno(), descriptor)
        with open(os.devnull, "rb") as stream:
            os.dup2(stream.fileno(), 0)
        exit_code = plants.run(order["name"], rank, folder, order["arguments"])
    except SystemExit as error:
        exit_code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code if isinstance(exit_code, int) else 1)


def _wait(pid: int, limit_s: float) -> int | None:
    """The exit code, negative for a signal; None for a rank that had to be killed."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if select.select([0], [], [], _POLL_S)[0]:
            order = sys.stdin.buffer.raw.readline()
            assert order == b"end\n", order
            os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
