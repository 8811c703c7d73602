"""Both ends of a process with limits that decodes and prepares media, and threads that have one each."""

import contextlib
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

from spmd_worker.media.errors import MediaError
from spmd_worker.media.source import Medium
from spmd_worker.tokenizer.bounded_process import BoundedProcess, BoundedProcessError, pack

Message: TypeAlias = Mapping[str, Any]


class MediaProcess:
    """Base of what is prepared in a process, one after the other (`BoundedProcess`). Not shared with forked processes:
    each starts a process of its own.
    """

    def __init__(self, medium: Medium, process: BoundedProcess) -> None:
        self._medium, self._process = medium, process

    @property
    def pid(self) -> int | None:
        """Id of the running process; None without one."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _ask(self, request: Message) -> Message:
        """The answer to a request. Raises MediaError, that of the process too."""
        try:
            answer = self._process.ask(pack(request))
        except BoundedProcessError as error:
            raise self._medium.error("unreadable", f"decoding was ended: {error}") from None
        if "code" in answer:
            raise MediaError(answer["code"], answer["message"])
        return answer


def with_errors(answer: Callable[[Message], Message]) -> Callable[[Message], Message]:
    """`answer` as the process gives it: a MediaError of it is an answer too."""

    def answer_or_error(request: Message) -> Message:
        try:
            return answer(request)
        except MediaError as error:
            return {"code": error.code, "message": str(error)}

    return answer_or_error


class _Helper(Protocol):
    def close(self) -> None: ...


_H = TypeVar("_H", bound=_Helper)
_T = TypeVar("_T")
_U = TypeVar("_U")


class HelperThreads(Generic[_H]):
    """Base of what is prepared ahead of time, with one of `helpers` at a time. Threads may share it. Close it, or leave
    its `with`, to end threads and helpers.
    """

    def __init__(self, medium: Medium, helpers: Sequence[_H]) -> None:
        self._medium, self._is_closed = medium, False
        self._threads = ThreadPoolExecutor(len(helpers), thread_name_prefix=medium.plural)
        self._idle: queue.SimpleQueue[_H] = queue.SimpleQueue()
        for helper in helpers:
            self._idle.put(helper)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Work that has not begun is cancelled; what has ends as errors, behind the image or window it is at."""
        self._is_closed = True
        self._threads.shutdown(cancel_futures=True)
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def _submitted(self, given_of: Callable[[], _T], work: Callable[[_H, _T], _U]) -> "Future[_U]":
        """The result of `work` with a helper, ahead of time and in the order of calls; `given_of` is called here. An
        error of either is the result's.
        """
        try:
            given = given_of()
        except MediaError as error:
            failed: Future[_U] = Future()
            failed.set_exception(error)
            return failed
        return self._threads.submit(self._run, work, given)

    def _run(self, work: Callable[[_H, _T], _U], given: _T) -> _U:
        helper = self._idle.get()
        try:
            return work(helper, given)
        finally:
            self._idle.put(helper)

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._medium.error("unreadable", "the run has ended before it was prepared")
