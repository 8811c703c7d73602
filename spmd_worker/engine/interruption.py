"""An exception of a signal's handler in a call that runs steps: the call ends at a step that all ranks agree on.

An exception between two bytecodes of a step would leave scheduler and devices in different states for good. So signals
are deferred (`base/liveness/deferred_signals.py`); before each step a rank looks for them. Rank 0's exception, or
that of a rank that said so with its answer to the last step, goes down as an `Interrupt` event beside the aborts of
what is open.
"""

from typing import Final

from spmd_worker.base.errors import RankFailedError
from spmd_worker.base.liveness.deferred_signals import deliver_later, deliver_signals

_MAX_CHARACTERS: Final = 2000


class Interruption:
    """One call on this rank, and what ends it: `own` is what a handler raised here, `agreed` the rank and the words for
    which the ranks have ended it.
    """

    def __init__(self) -> None:
        self.own: BaseException | None = None
        self.agreed: tuple[int, str] | None = None
        self.wanted: tuple[int, str] | None = None
        """On a replica's leader: what another rank or replica wants the call to end for."""
        self.has_begun = False
        """On a replica's leader: whether the event has gone down."""

    @property
    def is_ending(self) -> bool:
        """Whether this call takes no more work."""
        return bool(self.own or self.agreed or self.wanted)

    @property
    def own_text(self) -> str:
        """The words for the other ranks; "" where nothing was raised here."""
        return "" if self.own is None else error_text(self.own)

    def look(self) -> None:
        """Between two steps: call the handlers of the signals that came. The first exception counts."""
        try:
            deliver_signals()
        except BaseException as error:  # raised again by `check`, where the call has ended on all ranks
            self.own = self.own or error

    def check(self) -> None:
        """Once nothing is open: raise what this call ended for, if it did. What was raised here too late for the others
        is raised where they can hear of it, or at the end of the outermost call.
        """
        if self.own is not None and self.agreed is None:
            deliver_later(self.own)
        elif self.own is not None:
            raise self.own
        elif self.agreed is not None:
            raise error_of_rank(*self.agreed, "was interrupted")


def error_text(error: BaseException) -> str:
    """The words in which a rank tells the others of its error, which may be any."""
    text = f"{type(error).__name__}: {error}"
    return text[:_MAX_CHARACTERS].encode("utf-8", "replace").decode()


def error_of_rank(rank: int, text: str, what: str) -> BaseException:
    """The error that other ranks raise for one of `rank`, given as `error_text` has it: KeyboardInterrupt where it was
    that, so that a host that catches it does so on every rank; else RankFailedError.
    """
    if text.startswith(f"{KeyboardInterrupt.__name__}:"):
        return KeyboardInterrupt(f"on rank {rank}")
    failed = RankFailedError(f"rank {rank} {what}: {text}")
    failed.names_cause = True
    return failed
