"""What a replica cannot compute by itself: it enters through rank 0, in order, stamped with a step number.

A new event is a class here, listed in `Event`, and what raises and what applies it: its bytes, its digest and the words
for a difference follow from its fields.
"""

from dataclasses import dataclass

from spmd_worker.replica.sequence.record_checks import check_fields
from spmd_worker.replica.sequence.request import Request, RequestId, whole_number


@dataclass(frozen=True, slots=True)
class Admit:
    """A request joins the queue."""

    request: Request

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Abort:
    """A request ends now, wherever it stands; one that has already ended is not an error."""

    request_id: RequestId

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError, in the caller, as `SetWeightVersion` does."""
        object.__setattr__(self, "request_id", whole_number("request_id", self.request_id))


@dataclass(frozen=True, slots=True)
class Close:
    """The engine ends after this step: ranks that follow leave their loop."""


@dataclass(frozen=True, slots=True)
class EndRound:
    """What the replica was given is answered: ranks that follow return to their caller, and the engine goes on."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The call that the ranks are in ends with this step: a signal's handler raised `error` on `rank` of the replica,
    in words. What the call has left open is aborted in the same step.
    """

    rank: int
    error: str

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Nothing that is in the cache now may be found by a later request; requests in flight go on."""


@dataclass(frozen=True, slots=True)
class SetWeightVersion:
    """The weights are others from now on: `version` enters the name of everything that is cached."""

    version: int

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError: later, as a step's message is coded, it would be the end of every rank."""
        object.__setattr__(self, "version", whole_number("version", self.version))


@dataclass(frozen=True, slots=True)
class FinishTransfers:
    """Every rank has finished these transfers (`BlockOps.transfer`)."""

    numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """Every worker prepares `name` with `payload` (bytes of the executor's coding) before the next step; the answers go
    up with that step. At most one is open: from its step to that of its `EndWorkerEvent`.
    """

    number: int
    name: str
    payload: bytes

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class EndWorkerEvent:
    """Every worker commits worker event `number` before the next step, or undoes it where there is a `problem`: what
    the lowest rank that refused said.
    """

    number: int
    problem: str

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class CommitWeights:
    """All ranks have loaded new weights: as `SetWeightVersion`. `version` is a digest of what was loaded, `num_tensors`
    of them; each rank compares both with its own before the step runs, unless they come with a worker event's commit.
    """

    version: int
    num_tensors: int

    def __post_init__(self) -> None:
        check_fields(self)


Event = (
    Admit
    | Abort
    | Close
    | EndRound
    | Interrupt
    | ResetPrefixCache
    | SetWeightVersion
    | FinishTransfers
    | WorkerEvent
    | EndWorkerEvent
    | CommitWeights
)


CommittedWith = ResetPrefixCache | SetWeightVersion | CommitWeights
"""What may take effect with the commit of a worker event."""


def concern_workers(events: tuple[Event, ...]) -> bool:
    """Whether workers change between this step and the next, so that no later one may be in flight on any stage."""
    return any(isinstance(event, WorkerEvent | EndWorkerEvent) for event in events)
