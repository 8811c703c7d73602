"""Commits of new weights: complete and the same on every rank before a step computes with them.

Trainers load tensors directly into each rank's model, any number per call, without marking the last. So each rank
commits by itself in the next call that needs complete weights. Loaded tensors are compared with rank 0's in the
message of the step, and before that in the exchange of a call that has one. The calls of `apply_model` whose changes a
rank rejected, which each rank does by itself, are compared in the same way.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Final

from spmd_worker.base.errors import CheckpointError, MissingWeightsError, RanksDisagreeError, ReplicaDivergedError
from spmd_worker.executor.executor import Executor
from spmd_worker.model.weights.weight_update import WeightUpdateReport
from spmd_worker.replica.sequence.events import CommitWeights, EndWorkerEvent, Event

REJECTED_CHANGES: Final = "changes that apply_model rejected"
"""Key among the weights' names in `uncompared`: the calls of `apply_model` that this rank rejected."""


class WeightUpdates:
    """Weight updates of this rank. `num_in_flight` counts the requests in flight, during which no weight may change;
    `is_held` is set from `LLM.start_weight_update` to its end.
    """

    def __init__(self, executor: Executor, rank: int, num_in_flight: Callable[[], int]) -> None:
        self.is_held = self._is_partial = False
        self.uncompared: dict[str, str] = {}
        """Digests of committed weights not yet compared in the exchange of a call, by checkpoint name."""
        self._executor, self._rank, self._num_in_flight = executor, rank, num_in_flight
        executor.watch_requests(num_in_flight)
        self._agreed_version = 0
        self._digests: dict[str, str] = {}
        """Digests of weights committed since the last agreement with rank 0, by checkpoint name."""
        self._is_complete = False
        """Whether these include a complete set, so that no older weight is left."""
        self._expected: CommitWeights | None = None

    def hold(self, *, is_partial: bool) -> None:
        """Begin an update, which `release` ends. Raises RuntimeError within another."""
        self.check_not_held()
        self.is_held, self._is_partial = True, is_partial

    def release(self) -> bool:
        """End the update; returns whether it is partial. Raises RuntimeError without an update."""
        if not self.is_held:
            raise RuntimeError("no weight update was begun: call start_weight_update first")
        self.is_held = False
        return self._is_partial

    @property
    def is_open(self) -> bool:
        """Whether an update was begun, or weights were loaded or dropped since the last commit."""
        return self.is_held or any(update is not None for update in self._executor.get_weight_updates())

    @property
    def has_missing(self) -> bool:
        return any(update[1] for update in self._executor.get_weight_updates() if update is not None)

    def check_complete(self) -> None:
        """Raise what `commit` of all weights would, but for requests that are in flight still."""
        self._checked(self._executor.get_weight_updates(), is_partial=False)

    def check_not_held(self) -> None:
        """Raise RuntimeError between `hold` and `release`."""
        if self.is_held:
            raise RuntimeError("a weight update was begun: call finish_weight_update before anything is computed")

    def commit(self, *, is_partial: bool) -> CommitWeights | None:
        """Commit the open update, if any; returns the event for the replicas.

        Raises MissingWeightsError for missing weights, unless `is_partial` and none was dropped, CheckpointError for a
        head that differs from the embedding it is tied to, and RanksDisagreeError if the workers of this executor were
        given different weights; the update stays open. The ranks compare rejected changes, too: if all have rejected
        them, nothing was changed.
        """
        updates = self._executor.get_weight_updates()
        is_open = any(update is not None and (update[0] or update[1]) for update in updates)
        if is_open and self._num_in_flight():
            raise RuntimeError(
                f"weights were loaded while {self._num_in_flight()} requests were in flight, whose answers mix old and "
                f"new weights: close this LLM and make a new one"
            )
        update = self._checked(updates, is_partial=is_partial)
        if update is None:
            return None
        digests, _, _, rejected_calls, has_all, _ = update
        self._executor.end_weight_update()
        # Buffers may be left out: their earlier digests are kept then.
        is_complete = is_open and has_all
        self._digests = _merged({} if is_complete else self._digests, digests, rejected_calls)
        self._is_complete |= is_complete
        self.uncompared = _merged({} if is_complete else self.uncompared, digests, rejected_calls)
        self._expected = CommitWeights(self._next_version(), len(digests))
        return self._expected

    def _checked(self, updates: Sequence[WeightUpdateReport | None], *, is_partial: bool) -> WeightUpdateReport | None:
        """The workers' update, None if none is open. Raises as `commit` does."""
        update = next(filter(None, updates), None)
        if update is None:
            return None
        if any(each != update for each in updates) or len(updates) != self._executor.num_workers:
            raise RanksDisagreeError("the workers of this executor have loaded different weights: load them again")
        digests, missing, must_be_complete, _, _, head_fault = update
        if missing and (must_be_complete or not is_partial):
            raise MissingWeightsError(missing, len(digests) + len(missing), were_dropped=must_be_complete)
        if head_fault:
            self._executor.collective_rpc("reject_weight_update")
            raise CheckpointError(head_fault)
        return update

    def _next_version(self) -> int:
        """Version of the weights as they are now. It is derived from the last version that all ranks agreed on, so that
        an update can be repeated even if some ranks have committed more attempts than others.
        """
        # Older weights count if some of them are left.
        before = "" if self._is_complete else str(self._agreed_version)
        content = json.dumps([before, sorted(self._digests.items())]).encode()
        digest = blake2b(content, digest_size=8, person=b"spmd-weights").digest()
        return int.from_bytes(digest, "little", signed=True)

    def check_agreed(self, events: Iterable[Event]) -> None:
        """Check rank 0's `events` before the step runs. Raises ReplicaDivergedError unless rank 0 commits the weights
        that this rank has committed since the last step. Commits of a worker event (`then`) are not compared.
        """
        given = tuple(events)
        # Events after the end of a worker event belong to it: all ranks have agreed on them.
        before = takewhile(lambda event: not isinstance(event, EndWorkerEvent), given)
        leaders = next((event for event in before if isinstance(event, CommitWeights)), None)
        own, self._expected = self._expected, None
        if leaders != own:
            raise ReplicaDivergedError(
                f"new weights: {_describe(leaders)} on rank 0, {_describe(own)} on rank {self._rank}; give every rank "
                f"the same tensors before the same call"
            )
        if own is not None:
            self._digests, self._is_complete = {}, False
        for event in given:
            if isinstance(event, CommitWeights):
                self._agreed_version = event.version


def _merged(before: dict[str, str], digests: dict[str, str], rejected_calls: list[int]) -> dict[str, str]:
    """Digests to compare; a rejected call stays rejected, whatever later calls load."""
    merged = {**before, **digests}
    if rejected_calls:
        earlier = [before[REJECTED_CHANGES]] if REJECTED_CHANGES in before else []
        merged[REJECTED_CHANGES] = ", ".join([*earlier, *(f"call {number}" for number in rejected_calls)])
    return merged


def _describe(event: CommitWeights | None) -> str:
    if event is None:
        return "none"
    # Without tensors the commit is one of rejected changes.
    rejected = f" or {REJECTED_CHANGES}" if event.num_tensors == 0 else ""
    return f"{event.num_tensors} tensors{rejected} of version {event.version}"
