"""Worker events: what changes the workers between two steps, prepared on every rank before it is committed on any.

Three steps: with the first every worker prepares, the second takes the answers up to rank 0, and with the third all
commit, or all undo when one refused. No later step is in flight on any stage when workers prepare, commit or undo, so
all of them change between the same two steps.
"""

from typing import Any

from spmd_worker.base.errors import WorkerEventError
from spmd_worker.executor.executor import Executor
from spmd_worker.executor.rpc_coding import decode_value, encode_value
from spmd_worker.replica.sequence.events import EndWorkerEvent, WorkerEvent


class WorkerEvents:
    """This rank's part in worker events, one after another. `problem` is what it answers to the one being prepared."""

    def __init__(self, executor: Executor) -> None:
        self.open: WorkerEvent | None = None
        self.problem = ""
        self._executor = executor
        self._num_events = 0
        self._error: WorkerEventError | None = None
        self._results: list[Any] = []

    def new(self, name: str, payload: Any) -> WorkerEvent:
        """The next event. Raises ValueError for what can name no method, TypeError for what cannot cross processes."""
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"worker event {name!r}: give the NAME of workers' methods prepare_NAME and commit_NAME")
        if self.open is not None:
            raise RuntimeError(f"worker event {self.open.name!r} was interrupted: close this LLM and make a new one")
        return WorkerEvent(self._num_events + 1, name, encode_value(payload))

    def apply(self, event: WorkerEvent | EndWorkerEvent) -> None:
        """Have the workers of this rank's executor do what the step brought. What a commit raises is for good."""
        if isinstance(event, WorkerEvent):
            assert self.open is None, (self.open, event)
            # A rank that did not raise it counts it too.
            self.open, self._num_events = event, event.number
            problem = self._executor.prepare_event(event.name, decode_value(event.payload))
            # It goes over the wire, where half of a surrogate pair has no form.
            self.problem = problem.encode("utf-8", "replace").decode()
            return
        assert self.open is not None, event
        assert self.open.number == event.number, (self.open, event)
        self._results = self._executor.end_event(is_committed=not event.problem)
        what = f"worker event {self.open.name!r} was undone on every rank"
        self._error = WorkerEventError(f"{what}: {event.problem}") if event.problem else None
        self.open, self.problem = None, ""

    def take_results(self) -> list[Any]:
        """What the last event's commit returned, by worker of this executor. Raises its WorkerEventError."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._results
