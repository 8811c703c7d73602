"""Log lines with a rank: everything from rank 0, warnings and worse from the others.

Configures the runtime's own loggers and no other.
"""

import logging
import sys
from typing import Final

from spmd_worker.base.urls import without_credentials

LOGGER_NAME = "spmd_worker"
LOGGER_NAMES: Final = (LOGGER_NAME, "kv_cache")

SAME_ON_EVERY_RANK: Final = {"is_same_on_every_rank": True}
"""`extra` of a line that all ranks derive from the same input: rank 0 logs it for them."""


def configure_logging(rank: int, world_size: int) -> None:
    """Set up a program's logging (`launch.py`): INFO on rank 0, WARNING and up with a rank tag on the others, without
    the lines that rank 0 logs for all. A library must not call it.
    """
    tag = f"[rank {rank}] " if world_size > 1 and rank > 0 else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"{tag}%(levelname)s %(message)s"))
    if rank > 0:
        handler.addFilter(_is_of_one_rank)
    for name in LOGGER_NAMES:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        logger.propagate = False


class _Formatter(logging.Formatter):
    """Formats lines, and tracebacks, without users and queries of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return without_credentials(super().format(record))


def leave_to_rank_0(rank: int) -> None:
    """Suppress on other ranks the warnings that rank 0 logs for all, where a program sets up no logging and Python
    prints them. The program's own handlers get every line.
    """
    if rank > 0 and logging.lastResort is not None:
        logging.lastResort.addFilter(_is_of_one_rank)


def _is_of_one_rank(record: logging.LogRecord) -> bool:
    return not getattr(record, "is_same_on_every_rank", False)
