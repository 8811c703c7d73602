"""What a caller is told of a worker in another process: what it raised, or how it died.

Knows words only. Both are failures of a rank, so whoever handles `RankFailedError` handles these.
"""

from spmd_worker.lockstep.errors import RankFailedError


class WorkerError(RankFailedError):
    """A worker raised. `order` counts failures as they arrived, so that the first of several is known."""

    def __init__(self, rank: int, method: str, type_name: str, message: str, trace: str = "", order: int = 0) -> None:
        super().__init__(f"rank {rank} raised {type_name} in {method}: {message}")
        self.rank, self.method, self.type_name, self.message, self.order = rank, method, type_name, message, order
        if trace:
            self.add_note(f"rank {rank}'s own traceback:\n{trace.rstrip()}")

    @property
    def cause(self) -> tuple[str, str]:
        """Type and message without the rank's own number: equal where ranks failed for one reason."""
        return self.type_name, self.message.replace(f"rank {self.rank}", "rank")


class WorkerDiedError(RankFailedError):
    """A worker process ended without being asked to; the message has its rank, pid and exit code or signal."""
