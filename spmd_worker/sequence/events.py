"""What a replica cannot compute by itself: it enters through rank 0, in order, stamped with a step number.

Knows nothing about who raised an event or how it travels.
"""

from dataclasses import dataclass

from spmd_worker.sequence.request import Request, RequestId


@dataclass(frozen=True, slots=True)
class Admit:
    """A request joins the queue."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """A request ends now, wherever it stands; one that has already ended is not an error."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Close:
    """The engine ends after this step: ranks that follow leave their loop."""


Event = Admit | Abort | Close
