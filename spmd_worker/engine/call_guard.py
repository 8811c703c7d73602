"""One thread at a time drives an engine; other threads queue events for its next step.

A step reads and writes state that no lock guards, and the ranks of an engine make the same calls in the same order,
which threads would make random. So a call from another thread is an error while one is running. Any thread may add and
abort requests while an engine steps: `lock` is held where they are queued and where a step takes them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_worker.base.liveness.deferred_signals import deferred_signals
from spmd_worker.ops.default_device import host_by_default
from spmd_worker.replica.sequence.events import CommitWeights, Event, ResetPrefixCache, SetWeightVersion


class CallGuard:
    """Calls of one engine, which may be nested, and this rank's events for the next step (rank 0's are used)."""

    def __init__(self) -> None:
        # Reentrant: a finalizer or a signal handler may abort a request in the thread that queues one.
        self.lock = threading.RLock()
        self.events: list[Event] = []
        self._earlier_versions: list[SetWeightVersion] = []
        """Those of `events` that were set before the weights of the next commit were loaded."""
        self._thread: threading.Thread | None = None
        self._call, self._is_alone, self._depth = "", False, 0

    @contextmanager
    def inside(self, call: str, *, is_alone: bool = False) -> Iterator[None]:
        """Block in which this thread is in `call`, signals are deferred, and torch's default device is the host. Other
        threads may queue requests unless `is_alone`. The outermost of nested calls counts. Raises RuntimeError while
        another thread is in a call.
        """
        with deferred_signals():
            with self.lock:
                self._check(call)
                if self._depth == 0:
                    self._thread, self._call, self._is_alone = threading.current_thread(), call, is_alone
                self._depth += 1
            try:
                with host_by_default():
                    yield
            finally:
                with self.lock:
                    self._depth -= 1
                    if self._depth == 0:
                        self._thread = None

    @contextmanager
    def queueing(self, call: str) -> Iterator[None]:
        """Block in which this thread queues requests or aborts, with `lock` held. Raises RuntimeError while another
        thread is in an `is_alone` call, which answers its own prompts or needs an engine without requests.
        """
        with self.lock:
            if self._is_alone:
                self._check(call)
            yield

    def queue(self, event: Event) -> None:
        with self.lock:
            self.events.append(event)

    def queue_reset(self) -> None:
        """Queue a reset of the prefix cache, unless the last event is one."""
        with self.lock:
            if not (self.events and isinstance(self.events[-1], ResetPrefixCache)):
                self.events.append(ResetPrefixCache())

    def queue_version(self, event: SetWeightVersion, *, is_of_next_commit: bool) -> None:
        """Queue a version that the caller has set: of weights that are being loaded, or of those before them."""
        with self.lock:
            self.events.append(event)
            if not is_of_next_commit:
                self._earlier_versions.append(event)

    def queue_commit(self, event: CommitWeights) -> None:
        """Queue a commit, in place of an earlier one, before the requests that wait to be admitted. Versions of earlier
        weights come before it.
        """
        with self.lock:
            for earlier in [each for each in self.events if isinstance(each, CommitWeights)]:
                self.events.remove(earlier)
            self.events.insert(0, event)
            for version in reversed(self._earlier_versions):
                self.events.remove(version)
                self.events.insert(0, version)

    def next_weight_version(self, version: int) -> int:
        """Version of the weights once the queued events have taken effect; `version` is the one before."""
        with self.lock:
            for event in self.events:
                if isinstance(event, SetWeightVersion | CommitWeights):
                    version = event.version
            return version

    def take(self) -> list[Event]:
        """Remove and return all queued events, for the step that begins."""
        with self.lock:
            # An event that a finalizer or a signal handler adds in this thread meanwhile is in one of the two lists.
            taken, self.events, self._earlier_versions = self.events, [], []
            return taken

    def _check(self, call: str) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            raise RuntimeError(
                f"{call} was called in thread {threading.current_thread().name!r} while thread {self._thread.name!r} "
                f"is in {self._call}: one thread at a time drives an LLM; others may call llm_engine.add_request and "
                f"abort_request while one calls llm_engine.step"
            )
