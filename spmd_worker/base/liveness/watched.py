"""The rank that a watchdog watches, and its world."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MIN_SOFT_LIMIT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Watched:
    """`run_dir` is the folder for the rank's files, if it exists; with `exits` the watchdog may end the process.

    `abort_groups` is called before the process ends. With `has_launcher` the parent process is torchrun's agent,
    without which there is no heartbeat store, and which alone could restart the job. `spins`: the main thread computes
    while it waits, too.
    """

    rank: int
    ranks: tuple[int, ...]
    timeout_s: float
    run_dir: Path | None = None
    exits: bool = False
    abort_groups: Callable[[], None] | None = None
    has_launcher: bool = False
    spins: bool = False

    @property
    def soft_limit_s(self) -> float:
        """Time without progress after which a rank logs it."""
        return min(max(self.timeout_s / 5, _MIN_SOFT_LIMIT_S), 0.8 * self.timeout_s)
