"""NCCL's flight recorder: files in the run directory with the collectives that each rank had begun when a group gave
up.

Read them with torch's `torchfrtrace`. Environment variables configure it, which must be set before the first group is
made; those that the user set win.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

_NUM_ENTRIES: Final = "2000"
DUMP_NAME: Final = "nccl_trace.rank"
"""NCCL appends the rank's number."""

_EACH: Final = (
    # The newer name and the older one, which torch 2.11 knows.
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), _NUM_ENTRIES),
    (("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"), "1"),
)
_FILE_NAMES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def flight_recorder_variables(variables: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """Variables to add to the environment. A setting that the user made under either name is left alone."""
    wanted = (*_EACH, (_FILE_NAMES, str(run_dir.resolve() / DUMP_NAME)))
    return {name: value for names, value in wanted if not any(each in variables for each in names) for name in names}
