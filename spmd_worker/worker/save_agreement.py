"""Agreement of ranks during a save: all of them go on, or all raise.

    agreement = SaveAgreement(channel, path)
    with agreement.shared():
        ...                          # an error here reaches the other ranks in the call in which they wait
        answers = agreement(answer)  # of every rank, in rank order; raises SaveError if another rank failed

Between two agreements a rank may transfer tensors, if both sides do so before anything can raise.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spmd_worker.base.errors import SaveError
from spmd_worker.ranks.transport.channel import ControlChannel


class SaveAgreement:
    """One save of the ranks of `channel` to `path`."""

    def __init__(self, channel: ControlChannel, path: Path) -> None:
        self._channel, self._path = channel, path
        self._is_over = False
        """The ranks know of an error, or can no longer exchange anything."""

    def __call__(self, answer: Any = None) -> list[Any]:
        """Answers of all ranks, JSON values. Raises SaveError with the text of the lowest rank that failed."""
        return self._exchange(answer, "")

    def wait_until_all(self) -> None:
        """Take part in the rounds of others, which have more to write, until all are here."""
        while not all(self(True)):
            pass

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Block whose errors are raised on every rank. OSError becomes SaveError that says that nothing was saved."""
        try:
            yield
        except BaseException as error:
            known = error
            if isinstance(error, OSError):
                known = SaveError(f"nothing was saved to {self._path}, and what was there is unchanged: {error}")
            if not self._is_over:
                self._exchange(None, str(known) or type(known).__name__, is_raised=False)
            if known is error:
                raise
            raise known from error

    def _exchange(self, answer: Any, problem: str, *, is_raised: bool = True) -> list[Any]:
        self._is_over = True
        payload = json.dumps([answer, problem]).encode("utf-8", "replace")
        replies = [json.loads(each) for each in self._channel.gather(payload)]
        failed = next(((rank, text) for rank, (_, text) in enumerate(replies) if text), None)
        if failed is not None and is_raised:
            raise SaveError(f"rank {failed[0]}: {failed[1]}")
        self._is_over = failed is not None
        return [each for each, _ in replies]
