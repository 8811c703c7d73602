"""History of a pool: who held which rows when, from the entries of the ranges' logs and the server's times of them."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from spmd_worker.base.errors import PoolError
from spmd_worker.frontends.batch.pool.driver import perform_soon
from spmd_worker.frontends.batch.pool.records import RANGES, Entry, RangeRecord, number_and_entry, range_name
from spmd_worker.frontends.batch.pool.store import List, Listed, PoolStore, Read

MAX_RANGES: Final = 20_000
"""Most ranges of a history: the last ones."""
_NUM_THREADS: Final = 16


@dataclass(frozen=True, slots=True)
class Holding:
    """A lease of a range, from `start_s` to `end_s` of the server's clock; `end_s` is None for one that has not ended.
    `end` is done, handback or lost (another worker leased the range), else None. `parts` are (time, rows) of each part.
    """

    number: int
    worker: str
    start_s: float
    end_s: float | None
    end: str | None
    parts: tuple[tuple[float, int], ...]

    @property
    def num_rows(self) -> int:
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True, slots=True)
class PoolHistory:
    """Leases in the order of their ranges. `num_skipped`: earlier ranges that were not read."""

    holdings: tuple[Holding, ...]
    num_skipped: int


def read_history(store: PoolStore, max_ranges: int = MAX_RANGES) -> PoolHistory:
    """Read the logs of the last ranges; a store that fails is asked again for seconds. Raises PoolError, OSError."""
    entries: defaultdict[int, list[Listed]] = defaultdict(list)
    listed: list[Listed] = perform_soon(store, List(f"{RANGES}/"))
    for each in listed:
        found = number_and_entry(each.name)
        if found is not None:
            entries[found[0]].append(each)
    numbers = sorted(entries)[-max_ranges:]

    def read(name: str) -> bytes | None:
        data: bytes | None = perform_soon(store, Read(name))
        return data

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        logs = threads.map(lambda number: _read_log(read, number, entries[number]), numbers)
        return PoolHistory(tuple(each for log in logs for each in log), len(entries) - len(numbers))


def _read_log(read: Callable[[str], bytes | None], number: int, entries: Iterable[Listed]) -> list[Holding]:
    """Leases of a range. The logs themselves were checked by their writers."""
    holdings: list[Holding] = []
    num_left = 0
    for each in sorted(entries, key=lambda entry: number_and_entry(entry.name) or (0, 0)):
        data = read(each.name)
        if data is None or (not holdings and each.name != range_name(number)):
            raise PoolError(f"{each.name} of the pool or an entry before it is missing: was it removed by hand?")
        if not holdings:
            record = RangeRecord.from_bytes(each.name, data)
            num_left = record.stop - record.start
            holdings = [Holding(number, record.worker, each.time_s, None, None, ())]
            continue
        entry, last = Entry.from_bytes(each.name, data), holdings[-1]
        if entry.part is not None:
            num_rows = sum(stop - start for start, stop in entry.part.spans)
            num_left -= num_rows
            last = replace(last, parts=(*last.parts, (each.time_s, num_rows)))
        end = {"lease": "lost", "handback": "handback"}.get(entry.kind, None if num_left else "done")
        if last.end is None and end is not None:
            last = replace(last, end_s=each.time_s, end=end)
        holdings[-1] = last
        if entry.kind == "lease":
            holdings.append(Holding(number, entry.worker, each.time_s, None, None, ()))
    return holdings
