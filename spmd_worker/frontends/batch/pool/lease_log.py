"""Log of a lease: who holds a range, or the merge, and which of its rows are done.

The log's entries are objects with dense numbers. Every entry is created as the one after all that its writer has read,
and a name can be created once: so every reader sees the same log, and an entry by anyone but the holder cannot exist.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from spmd_worker.base.errors import PoolError
from spmd_worker.frontends.batch.pool.records import Entry, Merged, Part, RangeRecord, Spans, range_name


@dataclass(slots=True)
class LeaseLog:
    """State after the entries that were read. `name` is the log's, rows are [start, stop); of a merge [0, 0)."""

    name: str
    start: int = 0
    stop: int = 0
    holder: str | None = None
    next_entry: int = 1
    num_leases: int = 0
    spans: Spans = ()
    """Rows that are done."""
    parts: list[Part] = field(default_factory=list)
    merged: Merged | None = None

    @staticmethod
    def of_range(number: int, record: RangeRecord) -> "LeaseLog":
        return LeaseLog(range_name(number), record.start, record.stop, record.worker, 2, 1)

    @property
    def entry_name(self) -> str:
        """Name of the next entry."""
        return f"{self.name}.{self.next_entry:04}"

    @property
    def number(self) -> int:
        """Number of the range."""
        return int(self.name.rpartition("/")[2])

    @property
    def num_rows_done(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    @property
    def is_over(self) -> bool:
        """Whether every row is done, or the merge has ended: no entry follows."""
        return self.merged is not None or self.start < self.stop == self.start + self.num_rows_done

    def has_all(self, spans: Spans) -> bool:
        """Whether all of these rows are done."""
        return all(any(start <= first and last <= stop for start, stop in self.spans) for first, last in spans)

    def missing(self) -> list[tuple[int, int]]:
        """Rows that are not done, as [start, stop)."""
        edges = [self.start, *(edge for span in self.spans for edge in span), self.stop]
        return [(start, stop) for start, stop in zip(edges[::2], edges[1::2]) if start < stop]

    def apply(self, entry: Entry) -> None:
        """Apply the next entry. Raises PoolError for one that cannot follow; the log is unchanged then."""
        if self.is_over or (entry.kind != "lease" and entry.worker != self.holder):
            raise PoolError(
                f"{self.entry_name} of the pool is a {entry.kind} by {entry.worker!r}, but the range is "
                f"{'done' if self.is_over else f'held by {self.holder!r}'}: names in the pool's store were created "
                f"twice; use a store that gives what the documentation of pools names"
            )
        if entry.part is not None:
            self.spans = join_spans(self.spans, self._checked(entry.part))
            self.parts.append(entry.part)
        elif entry.kind == "lease":
            self.holder = entry.worker
            self.num_leases += 1
        elif entry.kind == "handback":
            self.holder = None
        self.merged = entry.merged
        self.next_entry += 1

    def _checked(self, part: Part) -> Spans:
        edges = [edge for span in part.spans for edge in span]
        is_inside = bool(edges) and edges == sorted(edges) and self.start <= edges[0] and edges[-1] <= self.stop
        if not is_inside or any(start == stop for start, stop in part.spans):
            raise PoolError(f"{self.entry_name} of the pool is damaged: rows {part.spans} are not of its range")
        if any(start < other_stop and other < stop for start, stop in part.spans for other, other_stop in self.spans):
            raise PoolError(f"{self.entry_name} of the pool is damaged: some of its rows are done already")
        return part.spans


def join_spans(first: Spans, second: Spans) -> Spans:
    """The union of disjoint spans; spans that touch become one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted((*first, *second)):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def spans_of(rows: Iterable[int]) -> Spans:
    """Rows as spans."""
    return join_spans(tuple((row, row + 1) for row in rows), ())
