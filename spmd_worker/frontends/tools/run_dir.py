"""A run directory for all tools: its validity, the state of its run, and its metrics. Changes nothing."""

import fcntl
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.files import JsonError, describe_os_error, open_job_file, read_json_object
from spmd_worker.base.remote_names import RemotePath, file_path
from spmd_worker.frontends.batch.output_parts import last_path, size_of
from spmd_worker.frontends.batch.run_dir.job_files import MANIFEST_NAME, METRICS_NAME
from spmd_worker.frontends.batch.run_dir.manifest import output_in, read_manifest
from spmd_worker.frontends.batch.run_dir.run_lock import LOCK_NAME

WHERE: Final = "a run's directory is job.run_dir, by default <job.output>.run"
NO_JOB: Final = "no job ran in this folder; give job.run_dir, by default <job.output>.run"
NO_STEP: Final = "no job reached its first step here"
_NUMBERS: Final[tuple[str, ...]] = (
    *("rows", "error_rows", "prompt_tokens", "cached_prompt_tokens", "computed_prompt_tokens", "output_tokens"),
    *("resumed_rows", "resumed_output_tokens", "computed_tokens", "recomputed_tokens", "preemptions", "steps"),
    *("load_s", "generate_s", "wall_s"),
)
"""Keys of metrics that the tools report."""


class RunDirError(Exception):
    """The argument cannot be read as a run directory; the message has the reason and the way out."""


class RunState(Enum):
    """State of a run."""

    UNKNOWN = "the folder has no manifest"
    UNFINISHED = "not ended, and not running"
    RUNNING = "running"
    COMPLETE = "output complete, but the job failed (`job.max_error_rows`)"
    ENDED = "ended well"


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory with the run's state. `output` is the job's, or its shard's file."""

    folder: Path
    state: RunState
    output: str = ""


def check_folder(path: Path) -> None:
    """Raise RunDirError for anything but a folder."""
    try:
        if path.is_dir():
            return
        is_there = path.exists()
    except OSError as error:
        raise RunDirError(f"{path}: {error.strerror} ({WHERE})") from None
    if not is_there:
        raise RunDirError(f"{path}: no such folder ({WHERE})")
    run_dir = Path(f"{path}.run")
    raise RunDirError(f"{path}: is a file: give {run_dir if run_dir.is_dir() else 'its folder'} ({WHERE})")


def look_at_run(folder: Path) -> Run:
    """State of the run. Raises RunDirError for anything but a folder, and for an unreadable manifest or lock."""
    check_folder(folder)
    try:
        manifest = read_manifest(folder / MANIFEST_NAME)
    except (OSError, ValueError) as error:
        raise RunDirError(describe_os_error(error)) from None
    if manifest is None:
        return Run(folder, RunState.UNKNOWN)
    # An older version may lack it.
    output = str(output_in(folder, manifest) or "")
    if manifest["has_ended"]:
        return Run(folder, RunState.ENDED, output)
    if _is_locked(folder / LOCK_NAME):
        return Run(folder, RunState.RUNNING, output)
    # Removed by each start, and written when the output is complete.
    has_metrics = (folder / METRICS_NAME).exists()
    return Run(folder, RunState.COMPLETE if has_metrics else RunState.UNFINISHED, output)


def is_missing(output: str) -> bool:
    """Whether an output, or the last file of one in parts, is not there. A remote one counts as there."""
    path = file_path(output)
    if isinstance(path, RemotePath):
        return False
    try:
        return size_of(last_path(path)) is None
    except OSError:
        # Below a folder that may not be entered.
        return False


def read_metrics(folder: Path) -> dict[str, Any] | None:
    """Metrics, which are written when the output is complete; None before. Raises RunDirError."""
    path = folder / METRICS_NAME
    try:
        metrics = read_json_object(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirError(f"cannot read {path}: {error.strerror}") from None
    except JsonError as error:
        raise RunDirError(f"{error}: remove it to see the steps without it") from None
    codes = metrics.get("error_codes", {})
    values = {key: [metrics[key]] for key in _NUMBERS if key in metrics}
    values["error_codes"] = list(codes.values()) if isinstance(codes, dict) else [codes]
    wrong = next((key for key, found in values.items() if not all(map(_is_count, found))), None)
    if wrong is not None:
        raise RunDirError(f"{path} is damaged: {wrong} is not a valid number: remove it to see the steps without it")
    return metrics


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < 2**63


def _is_locked(path: Path) -> bool:
    """Raises RunDirError for a lock that cannot be opened: the run may be running."""
    try:
        descriptor = open_job_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RunDirError(describe_os_error(error)) from None
    try:
        # Closing the descriptor releases the lock at once.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False
