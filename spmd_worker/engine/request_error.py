"""RequestError: why a request cannot be answered."""

from spmd_worker.base.picklable_error import PicklableError


class RequestError(PicklableError, ValueError):
    """A request that cannot be answered: the message says what to change, `code` is the code of an error row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
