"""What a replica cannot compute by itself: it enters through rank 0, in order, stamped with a step number.

Knows nothing about who raised an event or how it travels.
"""

from dataclasses import dataclass

from spmd_worker.sequence.request import Request, RequestId, whole_number


@dataclass(frozen=True, slots=True)
class Admit:
    """A request joins the queue."""

    request: Request


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


Event = Admit | Abort | Close | EndRound | ResetPrefixCache | SetWeightVersion | FinishTransfers
