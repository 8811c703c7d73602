"""Settings of the product in the environment of a test run. A test sets those that it is about.

With SPMD_WORKER_CHECK=1 from outside mirrors saw the faults of controls before the check that they are about.
"""

from collections.abc import MutableMapping
from typing import Final

SETTINGS: Final = (
    "SPMD_WORKER_API_KEY",
    "SPMD_WORKER_CHECK",
    "SPMD_WORKER_MAP_PROCESSES",
    "SPMD_WORKER_SECRET",
    "SPMD_WORKER_SHARE_GPUS",
    "SPMD_WORKER_THREADS",
)


def drop_settings(environment: MutableMapping[str, str]) -> None:
    """Remove them; variables of the tests themselves, such as SPMD_WORKER_KILLS, stay."""
    for name in SETTINGS:
        environment.pop(name, None)
