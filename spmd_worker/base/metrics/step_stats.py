"""Step statistics, one line of `steps.csv` a step: start, time per phase, use of the batch and the cache.

Times are measured and differ from run to run; the counts do not.
"""

from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from spmd_worker.base.errors import StepStatsError
from spmd_worker.base.files import create_job_file, read_job_file

STEP_STATS_NAME: Final = "steps.csv"


class StepStats(NamedTuple):
    """One step. Its phases follow one another in the order of the fields, beginning at `start_us`.

    `start_us` counts from the beginning of the run's first step. Device blocks are used (listed in some table), cached
    (free, but holding a prefix that can be found) or free (holding nothing): together all there are.
    """

    step: int
    start_us: int
    schedule_us: int
    lockstep_us: int
    execute_us: int
    apply_us: int
    num_rows: int
    """Sequences computed in the step."""
    num_waiting: int
    """Sequences that wait, preempted ones included."""
    num_swapped: int
    """The waiting sequences whose blocks are in host memory."""
    num_tokens: int
    """Tokens computed."""
    num_decode_tokens: int
    """The computed tokens of sequences that continue; the rest are prompt tokens, or tokens computed again."""
    num_sampled_tokens: int
    num_blocks_used: int
    num_blocks_cached: int
    num_blocks_free: int
    num_host_blocks_used: int
    """Host blocks of sequences that are swapped out."""
    num_swapped_out: int
    """Sequences preempted by swap in this step."""
    num_recomputed: int
    """Sequences preempted by recompute in this step: their computed tokens are lost."""
    num_swapped_in: int
    """Sequences swapped in from the host in this step."""
    num_cached_tokens: int
    """Prompt tokens found in the cache by sequences that began in this step."""
    num_finished: int
    """Requests that ended in this step."""
    num_verified_hits: int = 0
    """Prefix-cache hits whose last block was computed again and compared in this step (`cache.verify_hits`)."""
    num_drafted_tokens: int = 0
    """Drafted tokens that were computed, of the decode tokens (`speculative_config`)."""
    num_accepted_tokens: int = 0
    """The drafts of this step that were what was sampled."""

    @property
    def duration_us(self) -> int:
        """Sum of all phases, without the time until the next step."""
        return self.schedule_us + self.lockstep_us + self.execute_us + self.apply_us

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, and tokens computed again."""
        return self.num_tokens - self.num_decode_tokens

    @property
    def num_rejected_tokens(self) -> int:
        """Drafts that were computed in vain."""
        return max(0, self.num_drafted_tokens - self.num_accepted_tokens)

    @property
    def num_kept_decode_tokens(self) -> int:
        """Decode tokens without rejected drafts."""
        return self.num_decode_tokens - self.num_rejected_tokens

    @property
    def num_blocks(self) -> int:
        return self.num_blocks_used + self.num_blocks_cached + self.num_blocks_free


_MAX_VALUE: Final = 1 << 62
"""More than any count or microsecond of a run."""
_NUM_FIELDS: Final = len(StepStats._fields)
_HEADER: Final = ",".join(StepStats._fields)
_LINE: Final = b",".join([b"%d"] * _NUM_FIELDS) + b"\n"


class StepStatsWriter:
    """Writes one line a step; a reader of the file sees every line whose `write` has returned.

    Each line goes to the operating system at once (about 1.5 microseconds): a run that is killed, or hangs for an hour
    in a step, leaves every line before it. Nothing waits for the disk. The caller handles OSError (a full disk).
    """

    def __init__(self, path: Path) -> None:
        self._stream: BinaryIO = create_job_file(path)
        self._write_all(f"{_HEADER}\n".encode())

    def write(self, stats: StepStats) -> None:
        """Steps come in order: `step` rises, `start_us` does not fall."""
        self._write_all(_LINE % stats)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "StepStatsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_all(self, data: bytes) -> None:
        """Write all data: an unbuffered write may write only a part of it (on a disk that fills up). Raises OSError."""
        while data:
            data = data[self._stream.write(data) :]


def read_step_stats(path: Path) -> list[StepStats]:
    """All complete lines of a file, which may be growing; a last line without its end, as a killed run leaves, is
    dropped.

    Raises StepStatsError for another file, a damaged line or steps out of order, and OSError.
    """
    header, *lines = read_job_file(path).decode("utf-8", "replace").split("\n")
    if not lines and _HEADER.startswith(header):
        return []  # killed within the header
    if header != _HEADER or not lines:
        raise StepStatsError(f"{path}: line 1 does not name the columns of step statistics: {_header_fault(header)}")
    lines.pop()  # the text after the last line end: empty, or the start of a line
    all_stats: list[StepStats] = []
    last_step, last_start_us = -1, 0
    for line in lines:
        stats = _parse_line(line)
        if stats is None or stats.step <= last_step or stats.start_us < last_start_us:
            raise StepStatsError(f"{path}: line {len(all_stats) + 2} {_line_fault(line, last_step, last_start_us)}")
        last_step, last_start_us = stats.step, stats.start_us
        all_stats.append(stats)
    return all_stats


def _parse_line(line: str) -> StepStats | None:
    try:
        stats = StepStats._make(map(int, line.split(",")))
    except (TypeError, ValueError):
        return None
    return stats if min(stats) >= 0 and max(stats) <= _MAX_VALUE else None


def _header_fault(header: str) -> str:
    names, known = header.split(","), StepStats._fields
    if not set(names) & set(known):
        return f"it begins with {header[:40]!r}"
    faults = (
        ("missing", [name for name in known if name not in names]),
        ("unknown", [name for name in names if name not in known]),
    )
    found = "; ".join(f"{', '.join(each)} {fault}" for fault, each in faults if each)
    return f"{found or 'they are in another order'} (another version wrote it)"


def _line_fault(line: str, last_step: int, last_start_us: int) -> str:
    values = line.split(",")
    if len(values) != _NUM_FIELDS:
        return f"has {len(values)} values, not {_NUM_FIELDS}: the file is damaged"
    for name, value in zip(StepStats._fields, values):
        if not (value.isascii() and value.isdigit() and len(value) < len(str(_MAX_VALUE))):
            return f"has {name}={value[:40]!r}, which is not a count: the file is damaged"
    step, start_us = int(values[0]), int(values[1])
    if step <= last_step:
        return f"is of step {step}, after step {last_step}: these are not the steps of one run"
    return f"has start_us={start_us}, before the {last_start_us} of the step before: these are not the steps of one run"
