"""A batch job under torchrun that tests start, kill and start again, under any layout.

Rows are many and short, so that a job lives for seconds and any moment of it can be hit.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import ranks

LAUNCH = ranks.REPOSITORY / "launch.py"
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
NUM_ROWS = 500
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


def command(folder: Path, layout: str, *more: str, launcher_arguments: tuple[str, ...] = ()) -> list[str]:
    num_ranks, overrides = LAYOUTS[layout]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
        *launcher_arguments,
        str(LAUNCH),
    ]
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
        *more,
    ]


class Attempt:
    """One start of the job, which `kill` may end."""

    def __init__(self, folder: Path, layout: str, *more: str, launcher_arguments: tuple[str, ...] = ()) -> None:
        self._token = secrets.token_hex(16)
        environment = {
            **os.environ,
            ranks.TOKEN_VARIABLE: self._token,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ranks.REPOSITORY),
        }
        self._log = open(folder / "log", "ab")  # noqa: SIM115  # closed with the attempt
        self._process = subprocess.Popen(
            command(folder, layout, *more, launcher_arguments=launcher_arguments),
            env=environment,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self, victim: int | None) -> None:
        """All processes at once, or one rank; then wait for the end of all."""
        self.send(signal.SIGKILL, victim)
        self.close()

    def send(self, number: int, victim: int | None) -> None:
        """To one rank, or to all processes."""
        pids = ranks.processes_of(self._token)
        if victim is not None:
            wanted = f"RANK={victim}".encode()
            pids = [pid for pid in pids if wanted in ranks._proc_bytes(Path(f"/proc/{pid}/environ")).split(b"\0")]
        for pid in pids:
            ranks._send(pid, number)

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
