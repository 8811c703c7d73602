"""Files of a failing rank: its error record, its stacks, and the file that torchrun's summary is made from.

Records are JSON, complete or absent, one a rank: `error.rank<N>.json`; stacks are text: `stacks.rank<N>.txt`. Writing
never raises: a full disk must not keep a rank from ending.
"""

import contextlib
import faulthandler
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.files import create_job_file, parse_json_object, read_job_file, write_file, write_json
from spmd_worker.base.liveness.failure_diagnosis import Diagnosis, RankStatus
from spmd_worker.base.liveness.heartbeat import RankHeartbeat

logger = logging.getLogger(__name__)

ELASTIC_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
RECORD_NAME: Final = "error.rank{}.json"
STACKS_NAME: Final = "stacks.rank{}.txt"
_MAX_S: Final = 1 << 36
"""Seconds since 1970, far beyond any run, that still convert to a date."""


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """One rank's view of the failure: the last heartbeats of all ranks, its own with its failure, and the diagnosis."""

    rank: int
    wall_s: float
    """Seconds since 1970."""
    statuses: tuple[RankStatus, ...]
    diagnosis: Diagnosis | None
    traceback: str = ""

    def as_plain(self) -> dict[str, Any]:
        own = next((each.last_heartbeat for each in self.statuses if each.rank == self.rank), None)
        diagnosis = self.diagnosis
        return {
            "rank": self.rank,
            "wall_s": self.wall_s,
            "step": own.step if own else 0,
            "phase": own.phase if own else "",
            "phase_age_s": own.phase_age_s if own else 0.0,
            "text": own.failure.text if own and own.failure else "",
            "diagnosis": None if diagnosis is None else {"ranks": diagnosis.ranks, "text": diagnosis.text},
            "traceback": self.traceback,
            "ranks": [
                {
                    "rank": each.rank,
                    "heard_ago_s": round(each.heard_ago_s, 3),
                    "is_gone": each.is_gone,
                    "heartbeat": asdict(each.last_heartbeat) if each.last_heartbeat else None,
                }
                for each in self.statuses
            ],
        }

    @staticmethod
    def from_plain(value: Any) -> "ErrorRecord":
        """The record of JSON values. Raises ValueError for invalid ones."""
        try:
            diagnosis = value["diagnosis"]
            record = ErrorRecord(
                int(value["rank"]),
                float(value["wall_s"]),
                tuple(
                    RankStatus(
                        int(each["rank"]),
                        RankHeartbeat.from_plain(each["heartbeat"]) if each["heartbeat"] else None,
                        float(each["heard_ago_s"]),
                        bool(each["is_gone"]),
                    )
                    for each in value["ranks"]
                ),
                None if diagnosis is None else Diagnosis(tuple(map(int, diagnosis["ranks"])), str(diagnosis["text"])),
                str(value["traceback"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not an error record: {error!r}") from None
        times = (record.wall_s, *(each.heard_ago_s for each in record.statuses))
        if not record.statuses or not all(0 <= time_s < _MAX_S for time_s in times):
            raise ValueError("not an error record: it has no rank, or an invalid time")
        return record


def write_record(run_dir: Path | None, record: ErrorRecord) -> None:
    """Write a record to the run directory, if this node has it."""
    if run_dir is None or not os.path.isdir(run_dir):
        return
    path = run_dir / RECORD_NAME.format(record.rank)
    try:
        write_json(path, record.as_plain())
    except OSError as error:
        logger.warning("the error record could not be written: %s", error)


def read_records(run_dir: Path) -> list[ErrorRecord]:
    """All records in rank order. Raises OSError, and ValueError naming the file, for an unreadable one."""
    records = []
    for path in run_dir.glob(RECORD_NAME.format("*")):
        try:
            records.append(ErrorRecord.from_plain(parse_json_object(read_job_file(path))))
        except ValueError as error:
            raise ValueError(f"{path}: {error}; remove it to see the rest") from None
    return sorted(records, key=lambda record: record.rank)


def clear_records(run_dir: Path) -> None:
    """Remove the records and stacks of an earlier run; rank 0, before the others begin. Raises OSError."""
    for name in (RECORD_NAME, STACKS_NAME):
        for path in run_dir.glob(name.format("*")):
            path.unlink()


def write_stacks(run_dir: Path | None, rank: int) -> str:
    """Write the stacks of all threads of this process to the run directory, else to stderr. Returns the path, or
    `stderr`.
    """
    if run_dir is not None and os.path.isdir(run_dir):
        path = run_dir / STACKS_NAME.format(rank)
        try:
            with create_job_file(path) as stream:
                faulthandler.dump_traceback(stream)
            return str(path)
        except OSError as error:
            logger.warning("the stacks could not be written: %s", error)
    # Not sys.stderr, which may have no descriptor: the interpreter's C code writes the stacks.
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"[rank {rank}] stacks:", file=sys.__stderr__, flush=True)
            faulthandler.dump_traceback(sys.__stderr__)
    return "stderr"


def write_elastic_file(text: str, traceback: str, wall_s: float, variables: Mapping[str, str] = os.environ) -> None:
    """Write the file that torchrun reads when a rank has failed: it names the rank whose file has the earliest time
    stamp.
    """
    path = variables.get(ELASTIC_VARIABLE)
    if not path:
        return
    value = {"message": {"message": text, "extraInfo": {"py_callstack": traceback, "timestamp": str(int(wall_s))}}}
    try:
        write_file(Path(path), json.dumps(value).encode("ascii"), is_durable=False)
    except OSError as error:
        logger.warning("torchrun's error file could not be written: %s", error)
