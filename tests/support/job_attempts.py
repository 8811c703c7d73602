"""A batch job on ranks, forked or torchrun's, that tests start, kill and start again, under any layout.

Rows are many and short, so that a job lives for a second or two on a quiet machine and any moment of it can be hit.
"""

import json
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path

import ranks
from fork_server import fork_server
from waiting import wait_until

LAUNCH = ranks.REPOSITORY / "launch.py"
SLOW_JOB = Path(__file__).with_name("slow_job.py")
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
NUM_ROWS = 100
NUM_LONG_ROWS = 500
"""Of a job that is killed at moments drawn from its whole life."""
LIMIT_S = 240.0

LAYOUTS = {
    "two shards": (2, ["parallel.tensor_parallel_size=2"]),
    "two replicas": (2, ["parallel.data_parallel_size=2"]),
    "two stages": (2, ["parallel.pipeline_parallel_size=2"]),
    "one rank": (1, []),
}
WIDE_LAYOUTS = {
    "four shards": (4, ["parallel.tensor_parallel_size=4"]),
    "replicas of shards": (4, ["parallel.data_parallel_size=2", "parallel.tensor_parallel_size=2"]),
    "stages of shards": (4, ["parallel.pipeline_parallel_size=2", "parallel.tensor_parallel_size=2"]),
}
ALL_LAYOUTS = LAYOUTS | WIDE_LAYOUTS


def write_rows(folder: Path, num_rows: int = NUM_ROWS, num_tokens: int = 40) -> None:
    """Greedy rows and sampled ones, of `num_tokens` to 49 more. Log-probabilities of some show a layout with other
    bits.
    """
    rows: list[dict[str, object]] = [
        {"prompt": f"add {index} 7 =", "max_tokens": num_tokens + index % 50, "ignore_eos": True}
        for index in range(num_rows)
    ]
    for index, row in enumerate(rows):
        row |= {"temperature": 0.9} if index % 2 else {}
        row |= {"logprobs": 1} if index % 5 < 2 else {}
    rows[13] = {"prompt": 7}
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def slow_after(num_steps: int, folder: Path) -> tuple[str, ...]:
    """A script for `Attempt`: after so many steps the job is slow, until the file FOLDER/struck is there."""
    return (str(SLOW_JOB), str(num_steps), str(folder))


def command(folder: Path, layout: str, *more: str, script: Sequence[str] = (str(LAUNCH),)) -> list[str]:
    """launch.py, or a script that runs it, and its arguments."""
    _, overrides = ALL_LAYOUTS[layout]
    return [
        *(*script, f"model.path={MODEL}", "model.dtype=float32", "device=cpu"),
        *(
            "cache.num_blocks=512",
            "scheduler.max_num_seqs=32",
            "job.commit_rows=8",
            "executor.timeout_s=45",
            *overrides,
        ),
        *(f"job.input={folder / 'rows.jsonl'}", f"job.output={folder / 'out.jsonl'}"),
        *more,
    ]


class Attempt:
    """One start of the job, which `kill` may end. With `torchrun`, its arguments, torchrun starts the ranks, fresh ones
    with `is_fresh`.
    """

    def __init__(
        self,
        folder: Path,
        layout: str,
        *more: str,
        torchrun: Sequence[str] | None = None,
        is_fresh: bool = False,
        script: Sequence[str] = (str(LAUNCH),),
    ) -> None:
        self._folder, self._token = folder, secrets.token_hex(16)
        num_ranks, _ = ALL_LAYOUTS[layout]
        words, environment = command(folder, layout, *more, script=script), ranks.environment(self._token, {})
        self._log = open(folder / "log", "ab")  # noqa: SIM115  # closed with the attempt
        started: ranks.Launched
        if torchrun is None:
            started = ranks.ForkedRanks(words, [0] * num_ranks, True, environment, folder, self._log, self._log)
        elif is_fresh:
            words = [*ranks.torchrun(num_ranks), *torchrun, *words]
            started = ranks.StartedCommand(words, environment, folder, self._log, self._log)
        else:
            words = [*ranks.forked_torchrun(num_ranks), *torchrun, *words]
            started = ranks.ForkedScript(fork_server().fork(words, environment, folder, self._log, self._log))
        self._started = started

    def running(self) -> list[int]:
        """All processes of the attempt."""
        return ranks.processes_of(self._token)

    @property
    def launcher(self) -> int:
        """The process of torchrun."""
        assert isinstance(self._started, ranks.StartedCommand | ranks.ForkedScript), "no torchrun was asked for"
        return self._started.pid

    def ends_within(self, seconds: float) -> bool:
        return self._started.has_ended(seconds)

    def wait_for_steps(self, num_steps: int) -> None:
        """Wait until the job has written this number of steps."""
        path = self._folder / "out.jsonl.run" / "steps.csv"

        def is_there() -> bool:
            assert not self.ends_within(0.0), (self._folder / "log").read_text()
            return path.exists() and path.read_bytes().count(b"\n") > num_steps

        wait_until(is_there)

    def kill(self, victim: int | None) -> None:
        """Kill all processes or one rank, once it is there, and wait for the end of all."""
        wait_until(lambda: self.send(signal.SIGKILL, victim) > 0 or self.ends_within(0.0))
        self.close()

    def send(self, number: int, victim: int | None) -> int:
        """To one rank, or to all processes. Returns how many there were."""
        pids = ranks.processes_of(self._token)
        if victim is not None:
            wanted = f"RANK={victim}".encode()
            pids = [pid for pid in pids if wanted in ranks.proc_bytes(Path(f"/proc/{pid}/environ")).split(b"\0")]
        for pid in pids:
            ranks.send(pid, number)
        return len(pids)

    def close(self) -> int:
        try:
            if not self.ends_within(LIMIT_S):
                raise AssertionError("the ranks did not end")
            wait_until(lambda: not ranks.processes_of(self._token))
        finally:
            ranks.kill_all(self._token)
            self._log.close()
        return self._started.returncode
