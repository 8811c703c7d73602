"""New weights as an engine sees them: complete and the same on every rank before a step computes with them.

Trainers load tensors straight into each rank's model, as many as a call as they like, and nobody says which is the
last. So the commit comes with the next call that needs whole weights, on every rank by itself. What was loaded is
compared with rank 0's in the step's own message, and before that in the exchange of a call that has one. So is in which
calls of `apply_model` a rank refused what was changed there, as it does by itself.
"""

import json
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import takewhile
from typing import Final

from spmd_worker.base.errors import CheckpointError, MissingWeightsError, RanksDisagreeError, ReplicaDivergedError
from spmd_worker.executor.executor import Executor
from spmd_worker.replica.sequence.events import CommitWeights, EndWorkerEvent, Event

CHANGES_REFUSED: Final = "changes that apply_model refused"
"""Stands beside the names of weights: what ranks compare of calls that changed weights on some of them alone."""


class WeightUpdates:
    """This rank's part. `num_in_flight` counts the requests that are being answered, while which no weight may change.
    `is_held`: the caller says when an update ends (`LLM.start_weight_update`)."""

    def __init__(self, executor: Executor, rank: int, num_in_flight: Callable[[], int]) -> None:
        self.is_held = self._is_partial = False
        self.uncompared: dict[str, str] = {}
        """Digests of what was committed and not compared in a call's exchange yet, by checkpoint name."""
        self._executor, self._rank, self._num_in_flight = executor, rank, num_in_flight
        executor.watch_requests(num_in_flight)
        self._agreed_version = 0
        self._digests: dict[str, str] = {}
        """Of what was committed since rank 0 last said the same, by checkpoint name."""
        self._is_whole = False
        """Whether these began with all weights, so that none of before is left."""
        self._expected: CommitWeights | None = None

    def hold(self, *, is_partial: bool) -> None:
        """An update begins, which `release` ends. Raises RuntimeError within another."""
        self.check_not_held()
        self.is_held, self._is_partial = True, is_partial

    def release(self) -> bool:
        """Whether the update that ends is partial. Raises RuntimeError where none was begun."""
        if not self.is_held:
            raise RuntimeError("no weight update was begun: call start_weight_update first")
        self.is_held = False
        return self._is_partial

    @property
    def has_missing(self) -> bool:
        """Whether an update is open and not all weights were loaded."""
        return any(update[1] for update in self._executor.get_weight_updates() if update is not None)

    def check_not_held(self) -> None:
        """Raise RuntimeError between the calls that begin and end an update."""
        if self.is_held:
            raise RuntimeError("a weight update was begun: call finish_weight_update before anything is computed")

    def commit(self, *, is_partial: bool) -> CommitWeights | None:
        """End the update that is open, if one is: what to tell the replicas.

        Raises MissingWeightsError for weights that were not loaded, unless `is_partial` and none was dropped,
        CheckpointError for a head that differs from the embedding it is tied to, and RanksDisagreeError where the
        workers of this executor were given different ones; the update stays open. Changes
        that were refused are for the ranks to compare, too: where all have refused them, nothing was changed.
        """
        updates = [update for update in self._executor.get_weight_updates() if update is not None]
        if not updates:
            return None
        digests, missing, must_be_whole, refused_calls, has_all, head_fault = updates[0]
        is_open = bool(digests or missing)
        if is_open and self._num_in_flight():
            raise RuntimeError(
                f"weights were loaded while {self._num_in_flight()} requests were being answered, with neither the old "
                f"ones nor the new: close this LLM and make a new one"
            )
        if any(update != updates[0] for update in updates) or len(updates) != self._executor.num_workers:
            raise RanksDisagreeError("the workers of this executor have loaded different weights: load them again")
        if missing and (must_be_whole or not is_partial):
            raise MissingWeightsError(missing, len(digests) + len(missing), were_dropped=must_be_whole)
        if head_fault:
            self._executor.collective_rpc("reject_weight_update")
            raise CheckpointError(head_fault)
        self._executor.end_weight_update()
        # Where buffers were left out, what was loaded of them before counts on.
        is_whole, num_tensors = is_open and has_all, len(digests)
        self._digests = _with({} if is_whole else self._digests, digests, refused_calls)
        self._is_whole |= is_whole
        self.uncompared = _with({} if is_whole else self.uncompared, digests, refused_calls)
        self._expected = CommitWeights(self._next_version(), num_tensors)
        return self._expected

    def _next_version(self) -> int:
        """Of the weights as they are now. It goes on from a version that all ranks have agreed on, so that an update of
        which some ranks have committed more tries than others can be made again.
        """
        # Whatever was loaded before counts where some of it is left.
        before = "" if self._is_whole else str(self._agreed_version)
        content = json.dumps([before, sorted(self._digests.items())]).encode()
        digest = blake2b(content, digest_size=8, person=b"spmd-weights").digest()
        return int.from_bytes(digest, "little", signed=True)

    def check_agreed(self, events: Iterable[Event]) -> None:
        """Before a step with rank 0's `events` runs. Raises ReplicaDivergedError unless rank 0 commits what this rank
        has committed since the last step. What is committed with a worker event (`then`) is not compared.
        """
        given = tuple(events)
        # What comes after the end of a worker event was committed with it, on all ranks: it is no rank's own.
        before = takewhile(lambda event: not isinstance(event, EndWorkerEvent), given)
        said = next((event for event in before if isinstance(event, CommitWeights)), None)
        own, self._expected = self._expected, None
        if said != own:
            raise ReplicaDivergedError(
                f"new weights: {_in_words(said)} on rank 0, {_in_words(own)} on rank {self._rank}; give every rank the "
                f"same tensors before the same call"
            )
        if own is not None:
            self._digests, self._is_whole = {}, False
        for event in given:
            if isinstance(event, CommitWeights):
                self._agreed_version = event.version


def _with(before: dict[str, str], digests: dict[str, str], refused_calls: list[int]) -> dict[str, str]:
    """What is to be compared after these; a call that was refused stays refused, whatever came of later ones."""
    found = {**before, **digests}
    if refused_calls:
        earlier = [before[CHANGES_REFUSED]] if CHANGES_REFUSED in before else []
        found[CHANGES_REFUSED] = ", ".join([*earlier, *(f"call {number}" for number in refused_calls)])
    return found


def _in_words(event: CommitWeights | None) -> str:
    if event is None:
        return "none"
    # Nothing was loaded: changes were refused.
    refused = f" or {CHANGES_REFUSED}" if event.num_tensors == 0 else ""
    return f"{event.num_tensors} tensors{refused} of version {event.version}"
