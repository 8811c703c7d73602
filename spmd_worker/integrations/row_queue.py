"""Rows of many coroutines in one engine: a thread answers what is there, and takes up more between steps."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count

from spmd_worker.frontends.openai.row_writer import RowAnswer
from spmd_worker.integrations.row_engine import KeyedRow, Placed, RowEngine


class RowQueue:
    """Thread that runs `engine`. It ends with the process."""

    def __init__(self, engine: RowEngine) -> None:
        self._engine = engine
        self._arrived: queue.SimpleQueue[tuple[KeyedRow, Future[RowAnswer]]] = queue.SimpleQueue()
        self._open: dict[int, Future[RowAnswer]] = {}
        self._places = count()
        threading.Thread(target=self._run, name="spmd-rows", daemon=True).start()

    async def answer(self, row: KeyedRow) -> RowAnswer:
        """The row's answer. Raises the error of `RowEngine.run`, which ends all rows of its time."""
        future: Future[RowAnswer] = Future()
        self._arrived.put((row, future))
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            first = self._placed(*self._arrived.get())
            try:
                self._engine.run(self._rows(first), self._give)
            except Exception as error:  # reported to the coroutines
                for future in self._open.values():
                    future.set_exception(error)
                self._open.clear()

    def _rows(self, first: Placed) -> Iterator[Placed | None]:
        yield first
        while True:
            try:
                yield self._placed(*self._arrived.get_nowait())
            except queue.Empty:
                yield None

    def _placed(self, row: KeyedRow, future: Future[RowAnswer]) -> Placed:
        place = next(self._places)
        self._open[place] = future
        return place, row

    def _give(self, place: int, answer: RowAnswer) -> None:
        future = self._open.pop(place)
        # False if its coroutine was cancelled.
        if future.set_running_or_notify_cancel():
            future.set_result(answer)
