"""Counts, from its import on, how often this process opens the files that a run is resolved from.

Also a worker extension, for the processes of the multiproc executor.
"""

import os
import sys
from collections import Counter

NAMES = ("config.json", "generation_config.json", "tokenizer.json")
COUNTS: Counter[str] = Counter()


def _count(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        name = os.path.basename(os.fsdecode(arguments[0]))
        if name in NAMES:
            COUNTS[name] += 1


sys.addaudithook(_count)


class OpenedFiles:
    """Files that a worker's process has opened, for `collective_rpc`."""

    def opened_files(self) -> dict[str, int]:
        return dict(COUNTS)
