"""Exceptions of signal handlers in a call that runs steps: the call ends at a step that all ranks agree on.

An exception between two bytecodes of a step would leave scheduler and devices in different states for good. So signals
are deferred (`base/liveness/deferred_signals.py`), and each rank checks for them before each step. Rank 0 sends its own
exception, or the one that a rank reported with its answer to the last step, as an `Interrupt` event, together with
aborts of all open requests.
"""

from typing import Final

from spmd_worker.base.errors import RankFailedError
from spmd_worker.base.liveness.deferred_signals import deliver_later, deliver_signals

_MAX_CHARACTERS: Final = 2000


class Interruption:
    """One call on this rank, and the error that ends it. `error` was raised by a handler here; `agreed_error`, a rank
    and its text, is the one for which all ranks have ended the call.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.agreed_error: tuple[int, str] | None = None
        self.requested_error: tuple[int, str] | None = None
        """On a replica's leader: error of another rank or replica for which the call is to end."""
        self.is_sent = False
        """On a replica's leader: whether the `Interrupt` event was sent."""

    @property
    def is_ending(self) -> bool:
        """Whether this call takes no more work."""
        return bool(self.error or self.agreed_error or self.requested_error)

    @property
    def error_text(self) -> str:
        """Text of `error` for the other ranks; "" without one."""
        return "" if self.error is None else error_text(self.error)

    def check_signals(self) -> None:
        """Call the handlers of deferred signals; call this between two steps. The first exception counts."""
        try:
            deliver_signals()
        except BaseException as error:  # raised again by `check`, once the call has ended on all ranks
            self.error = self.error or error

    def check(self) -> None:
        """Raise the error that ended this call, if one did; call this once no request is open. An error that was raised
        here too late for the other ranks is raised at the next exchange, or at the end of the outermost call.
        """
        if self.error is not None and self.agreed_error is None:
            deliver_later(self.error)
        elif self.error is not None:
            raise self.error
        elif self.agreed_error is not None:
            raise error_of_rank(*self.agreed_error, "was interrupted")


def error_text(error: BaseException) -> str:
    """Text of any error for the other ranks."""
    text = f"{type(error).__name__}: {error}"
    return text[:_MAX_CHARACTERS].encode("utf-8", "replace").decode()


def error_of_rank(rank: int, text: str, what: str) -> BaseException:
    """The error to raise for an error of another rank, given its `error_text`: KeyboardInterrupt for KeyboardInterrupt,
    so that a program that catches it does so on every rank; else RankFailedError.
    """
    if text.startswith(f"{KeyboardInterrupt.__name__}:"):
        return KeyboardInterrupt(f"on rank {rank}")
    failed = RankFailedError(f"rank {rank} {what}: {text}")
    failed.names_cause = True
    return failed
