"""Kill a job at any moment of its life, go on under any layout: the same bytes in the end, no row lost or done twice.

Under torchrun, as people run it. SPMD_WORKER_KILLS sets how many kills the slow test makes.
"""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks

LAUNCH = ranks.REPOSITORY / "launch.py"
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
NUM_KILLS = int(os.environ.get("SPMD_WORKER_KILLS", "10"))
NUM_ROWS = 500
LIFE_S = 9.0
"""About how long the job lives; moments are drawn from it, start and merge included."""
LIMIT_S = 120.0

LAYOUTS = {
    "two shards": (2, ["parallel.tensor_parallel_size=2"]),
    "two replicas": (2, ["parallel.data_parallel_size=2"]),
    "two stages": (2, ["parallel.pipeline_parallel_size=2"]),
    "one rank": (1, []),
}


def write_rows(folder: Path) -> None:
    rows = [
        {"prompt": f"add {index} 7 =", "max_tokens": 40 + index % 50, "ignore_eos": True} for index in range(NUM_ROWS)
    ]
    rows[13] = {"prompt": 7}
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def command(folder: Path, layout: str) -> list[str]:
    num_ranks, overrides = LAYOUTS[layout]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), str(LAUNCH)]
    return [
        *(sys.executable, *launcher, f"model.path={MODEL}", "model.dtype=float32", "device=cpu"),
        *(
            "cache.num_blocks=512",
            "scheduler.max_num_seqs=32",
            "job.commit_rows=8",
            "executor.timeout_s=20",
            *overrides,
        ),
        *(f"job.input={folder / 'rows.jsonl'}", f"job.output={folder / 'out.jsonl'}"),
    ]


class Attempt:
    """One start of the job, which `kill` may end."""

    def __init__(self, folder: Path, layout: str) -> None:
        self._token = secrets.token_hex(16)
        environment = {
            **os.environ,
            ranks.TOKEN_VARIABLE: self._token,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ranks.REPOSITORY),
        }
        self._log = open(folder / "log", "ab")  # noqa: SIM115  # closed with the attempt
        self._process = subprocess.Popen(
            command(folder, layout), env=environment, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self, victim: int | None) -> None:
        """All processes at once, or one rank; then wait for the end of all."""
        pids = ranks.processes_of(self._token)
        if victim is not None:
            wanted = f"RANK={victim}".encode()
            pids = [pid for pid in pids if wanted in ranks._proc_bytes(Path(f"/proc/{pid}/environ")).split(b"\0")]
        for pid in pids:
            ranks._send(pid, signal.SIGKILL)
        self.close()

    def close(self) -> int:
        try:
            if not self.ends_within(LIMIT_S):
                raise AssertionError("the ranks did not end")
            deadline_s = time.monotonic() + 10
            while ranks.processes_of(self._token) and time.monotonic() < deadline_s:
                time.sleep(0.05)
        finally:
            for pid in ranks.processes_of(self._token):
                ranks._send(pid, signal.SIGKILL)
            self._log.close()
        return self._process.returncode


def whole_output(folder: Path, layout: str = "two shards") -> bytes:
    folder.mkdir()
    write_rows(folder)
    attempt = Attempt(folder, layout)
    assert attempt.ends_within(LIMIT_S), (folder / "log").read_text()
    assert attempt.close() == 0, (folder / "log").read_text()
    return (folder / "out.jsonl").read_bytes()


def killed_job(folder: Path, chance: random.Random, most_kills: int, first: str) -> tuple[bytes, int]:
    """The output of a job that was killed up to `most_kills` times, and how often it was."""
    folder.mkdir()
    write_rows(folder)
    num_kills = 0
    while True:
        layout = first if chance.random() < 0.5 else chance.choice(list(LAYOUTS))
        attempt = Attempt(folder, layout)
        if num_kills < most_kills and not attempt.ends_within(chance.uniform(0, LIFE_S)):
            num_ranks = LAYOUTS[layout][0]
            attempt.kill(chance.choice([None, None, *range(num_ranks)]))
            num_kills += 1
            continue
        assert attempt.ends_within(LIMIT_S), (folder / "log").read_text()
        assert attempt.close() == 0, (folder / "log").read_text()
        return (folder / "out.jsonl").read_bytes(), num_kills


def check_lines(output: bytes) -> None:
    assert [json.loads(line)["index"] for line in output.splitlines()] == list(range(NUM_ROWS))


def test_a_job_killed_twice_ends_with_the_bytes_of_one_that_was_not(tmp_path: Path):
    expected = whole_output(tmp_path / "whole")
    output, num_kills = killed_job(tmp_path / "killed", random.Random(4), 2, "two replicas")
    assert num_kills == 2
    check_lines(output)
    assert output == expected


@pytest.mark.slow
def test_kills_at_many_moments_lose_no_row_and_repeat_none(tmp_path: Path):
    chance, num_kills, number = random.Random(1), 0, 0
    expected = whole_output(tmp_path / "whole")
    while num_kills < NUM_KILLS:
        number += 1
        first = ("two shards", "two replicas")[number % 2]
        output, more = killed_job(tmp_path / f"job {number}", chance, min(8, NUM_KILLS - num_kills), first)
        num_kills += more
        print(f"KILLS {num_kills} in {number} jobs", flush=True)
        check_lines(output)
        assert output == expected
