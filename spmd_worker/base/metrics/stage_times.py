"""Busy times of pipeline stages: one rank's clock, and all ranks' as `stages.csv`.

A stage is busy while it prepares or computes a step, and not while it waits for the previous stage's output or for a
step: that is the bubble. The clock is the host's: on a GPU, where calls return before the work is done, a stage looks
idler than it is.
"""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from spmd_worker.base.files import read_job_file, write_file

STAGE_TIMES_NAME: Final = "stages.csv"
_NUM_KEPT_SPANS: Final = 20_000


class StageSpan(NamedTuple):
    """A piece of one step on one stage; microseconds since the run's first step began."""

    replica: int
    stage: int
    step: int
    start_us: int
    end_us: int


class StageClock:
    """Call `begin` and `end` around each piece of work. The last `num_kept` pieces are kept; sums cover all."""

    def __init__(self, stage: int, num_kept: int = _NUM_KEPT_SPANS) -> None:
        self._stage = stage
        self._spans: deque[tuple[int, int, int]] = deque(maxlen=num_kept)
        self._busy_us = self._first_us = self._last_us = 0
        self._step = self._began_us = 0

    def begin(self, step: int | None = None) -> None:
        """The stage works on `step`, or continues with the last one."""
        self._step, self._began_us = self._step if step is None else step, now_us()
        self._first_us = self._first_us or self._began_us

    def end(self) -> None:
        """The stage waits, or has passed on its output."""
        self._last_us = now_us()
        self._busy_us += self._last_us - self._began_us
        self._spans.append((self._step, self._began_us, self._last_us))

    def report(self) -> dict[str, Any]:
        """Plain values for rank 0; times in microseconds since the epoch."""
        return {
            "stage": self._stage,
            "busy_us": self._busy_us,
            "first_us": self._first_us,
            "last_us": self._last_us,
            "spans": [list(span) for span in self._spans],
        }


class BusyShare(NamedTuple):
    """A stage's share of busy time, from the first step to the last on any stage of its replica."""

    replica: int
    stage: int
    share: float


def now_us() -> int:
    """Microseconds since the epoch: comparable between nodes."""
    return time.time_ns() // 1000


def busy_shares(replicas: Sequence[Sequence[dict[str, Any]]]) -> list[BusyShare]:
    """`replicas` holds the reports of each replica's stages, in order. Stages that never ran are left out."""
    shares = []
    for replica, reports in enumerate(replicas):
        ran = [report for report in reports if report["spans"]]
        if not ran:
            continue
        wall_us = max(report["last_us"] for report in ran) - min(report["first_us"] for report in ran)
        shares += [BusyShare(replica, report["stage"], report["busy_us"] / max(wall_us, 1)) for report in ran]
    return shares


def write_stage_times(path: Path, replicas: Sequence[Sequence[dict[str, Any]]], origin_us: int) -> None:
    """Write one line per piece of work; `origin_us` is when the run's first step began. Raises OSError."""
    lines = [",".join(StageSpan._fields)]
    for replica, reports in enumerate(replicas):
        for report in reports:
            for step, start_us, end_us in report["spans"]:
                lines.append(f"{replica},{report['stage']},{step},{start_us - origin_us},{end_us - origin_us}")
    write_file(path, "".join(f"{line}\n" for line in lines).encode("ascii"), is_durable=False)


def read_stage_times(path: Path) -> list[StageSpan]:
    """Read a file that `write_stage_times` wrote. Raises ValueError naming the line, and OSError."""
    header, *lines = read_job_file(path).decode("ascii", "replace").removesuffix("\n").split("\n")
    if header != ",".join(StageSpan._fields):
        raise ValueError(f"{path}: line 1 does not name the columns of stage times")
    spans = []
    for number, line in enumerate(lines, start=2):
        try:
            spans.append(StageSpan._make(map(int, line.split(","))))
            if not 0 <= max(spans[-1]) < 1 << 62 or min(spans[-1][:3]) < 0:
                raise ValueError
        except (TypeError, ValueError):
            raise ValueError(f"{path}: line {number} is not a stage time: {line[:100]}") from None
    return spans
