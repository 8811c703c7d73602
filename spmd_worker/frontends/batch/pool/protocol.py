"""Ranges of a pool: leasing one, committing parts of it, handing it back; and the lease of the merge.

Exactness rests on one rule: an entry of a log is created under the number after all that its writer has read, and a
name is created once. Heartbeats and clocks only decide when another worker may try. Functions are generators of
operations on the store; they know neither threads nor clocks.
"""

from collections import defaultdict
from dataclasses import replace
from enum import Enum
from typing import Final
from zlib import crc32

from spmd_worker.base.errors import PoolError
from spmd_worker.frontends.batch.pool.lease_log import LeaseLog
from spmd_worker.frontends.batch.pool.members import Lease, Member, create_own, live_workers, read_existing
from spmd_worker.frontends.batch.pool.records import (
    BLOCK_RANGES,
    DONE,
    PARTS,
    RANGES,
    DoneRecord,
    Entry,
    Merged,
    Part,
    PoolJob,
    RangeRecord,
    Spans,
    block_prefix,
    digest_of,
    done_name,
    number_and_entry,
    part_name,
    range_name,
)
from spmd_worker.frontends.batch.pool.store import Create, Delete, List, Listed, Read, Steps

MAX_LEASES: Final = 2
"""Ranges that a worker holds at a time: one that it computes, and the next."""
_RANGES_A_WORKER: Final = 4
"""A range has this fraction of a live worker's share of the remaining rows."""
_LEAST_FRACTION: Final = 64
"""The smallest range has `job.lease_rows` divided by this."""


class Unleased(Enum):
    """Reasons for a claim without a lease."""

    WAIT = "others hold everything that is left: ask again"
    OVER = "everything is done"


def claim(member: Member) -> Steps[Lease | Unleased]:
    """Lease a range: new rows while there are any, else one whose holder is dead, or that was handed back. Raises
    PoolError.
    """
    assert len(member.leases) < MAX_LEASES, member.leases.keys()
    lease = None
    if member.next_row < member.job.num_rows:
        lease = yield from _allocate(member)
    if lease is not None:
        return lease
    return (yield from _take_over(member))


def range_rows(job: PoolJob, num_remaining: int, num_live: int) -> int:
    """Rows of a new range: they shrink towards the end, between limits that keep a worker's leases in `lease_rows`."""
    most = max(job.lease_rows // MAX_LEASES, 1)
    least = max(job.lease_rows // _LEAST_FRACTION, 1)
    share = -(-num_remaining // (_RANGES_A_WORKER * max(num_live, 1)))
    return min(max(share, least), most, num_remaining)


def _allocate(member: Member) -> Steps[Lease | None]:
    """Lease the next rows. None: there are none."""
    live = yield from live_workers(member)
    while member.next_row < member.job.num_rows:
        start, number = member.next_row, member.next_number
        stop = start + range_rows(member.job, member.job.num_rows - start, len(live))
        record = RangeRecord(start, stop, member.worker, next(member.nonces))
        if (yield from create_own(range_name(number), record.to_bytes())):
            member.next_number, member.next_row = number + 1, stop
            return _leased(member, LeaseLog.of_range(number, record))
        yield from _find_end(member)
    return None


def _find_end(member: Member) -> Steps[None]:
    """Find the last range, beginning with one that exists. Numbers are dense, so a search in growing and then halving
    steps needs few reads, however many ranges there are.
    """
    last, step, is_growing = member.next_number, 1, True
    record = RangeRecord.from_bytes(range_name(last), (yield from read_existing(range_name(last))))
    while step:
        data: bytes | None = yield Read(range_name(last + step))
        if data is not None:
            last += step
            record = RangeRecord.from_bytes(range_name(last), data)
        is_growing = is_growing and data is not None
        step = step * 2 if is_growing else step // 2
    _check_stop(member, last, record.stop)
    member.next_number, member.next_row = last + 1, record.stop


def _check_stop(member: Member, number: int, stop: int) -> None:
    if stop > member.job.num_rows:
        raise PoolError(
            f"{range_name(number)} of the pool ends with row {stop}, but the job has {member.job.num_rows} rows: "
            f"restore the pool's folder from before, or give job.pool another"
        )


def _take_over(member: Member) -> Steps[Lease | Unleased]:
    """Lease a range that nobody alive holds."""
    yield from _read_open(member)
    assert member.open is not None
    if not member.open:
        return Unleased.OVER
    live = yield from live_workers(member)
    if not live:
        return Unleased.WAIT
    # Each begins elsewhere, so that idle workers do not all try the same.
    numbers, turn = sorted(member.open), crc32(member.worker.encode()) % len(member.open)
    for number in (*numbers[turn:], *numbers[:turn]):
        log = member.open[number]
        assert log is not None, number
        is_own = log.holder == member.worker
        if number in member.leases or (log.holder in live and not is_own):
            continue
        entry = Entry("lease", member.worker, next(member.nonces))
        if (yield from create_own(log.entry_name, entry.to_bytes())):
            log.apply(entry)
            # A copy: what is read of the log later must not move the lease's next entry.
            return _leased(member, _copy(log))
    return Unleased.WAIT


def _read_open(member: Member) -> Steps[None]:
    """Bring `member.open` up to date: listings of the blocks that have open ranges, and reads of logs that grew."""
    if member.open is None:
        member.open = dict.fromkeys(range(member.next_number))
    blocks: defaultdict[int, list[int]] = defaultdict(list)
    for number in member.open:
        blocks[number // BLOCK_RANGES].append(number)
    for block, numbers in blocks.items():
        done = yield from _list_numbers(DONE, block)
        for number in numbers:
            if number in done:
                del member.open[number]
        if any(number not in done for number in numbers):
            entries = yield from _list_numbers(RANGES, block)
            for number in numbers:
                if number not in done:
                    yield from _read_log(member, number, entries.get(number, 1))


def _list_numbers(folder: str, block: int) -> Steps[dict[int, int]]:
    """Last entry of every range of a block."""
    listed: list[Listed] = yield List(block_prefix(folder, block))
    last: dict[int, int] = {}
    for each in listed:
        number, entry = number_and_entry(each.name) or (-1, 0)
        if number // BLOCK_RANGES == block:
            last[number] = max(entry, last.get(number, 0))
    return last


def _read_log(member: Member, number: int, last_entry: int) -> Steps[None]:
    """Read the entries of a range's log up to `last_entry`."""
    assert member.open is not None
    log = member.open[number]
    if log is None:
        data = yield from read_existing(range_name(number))
        log = LeaseLog.of_range(number, RangeRecord.from_bytes(range_name(number), data))
        # Nobody could finish it.
        _check_stop(member, number, log.stop)
        member.open[number] = log
    while log.next_entry <= last_entry:
        log.apply(Entry.from_bytes(log.entry_name, (yield from read_existing(log.entry_name))))
    if log.is_over:
        # Its holder ended between the last part and this.
        yield from _summarise(log)
        del member.open[number]


def _summarise(log: LeaseLog) -> Steps[None]:
    """Write the summary of a log that is over: the same bytes, whoever does."""
    yield Create(done_name(log.number), DoneRecord(log.start, log.stop, tuple(log.parts)).to_bytes())


def commit(member: Member, lease: Lease, spans: Spans, data: bytes) -> Steps[bool]:
    """Commit finished rows of a lease: `data` has their lines and records. Returns whether they are committed: False
    means that the lease was lost, and that the work on it must be given up. When every row is done the lease ends.

    May be repeated with the same rows after an interruption.
    """
    if not (yield from _settle(member, lease)):
        return False
    if lease.log.has_all(spans):
        return True
    # Saves the writing of a part that nothing will name. The entry decides.
    if (yield Read(lease.log.entry_name)) is not None:
        forget(member, lease)
        return False
    nonce = next(member.nonces)
    part = Part(part_name(lease.log.entry_name, member.worker, nonce), spans, len(data), digest_of(data))
    yield Create(part.name, data)
    return (yield from _append(member, lease, Entry("part", member.worker, nonce, part)))


def hand_back(member: Member, lease: Lease) -> Steps[bool]:
    """Hand a lease back: another worker takes it up at once, with the parts that it has. False: it was lost before."""
    if not (yield from _settle(member, lease)):
        return False
    if lease.log.is_over:
        return True
    is_handed_back = lease.log.holder is None or (
        yield from _append(member, lease, Entry("handback", member.worker, next(member.nonces)))
    )
    forget(member, lease)
    return is_handed_back


def forget(member: Member, lease: Lease) -> None:
    """Give up the work on a lease that was lost."""
    lease.is_lost = True
    member.leases = {number: each for number, each in member.leases.items() if each is not lease}


def still_holds(lease: Lease) -> Steps[bool]:
    """Whether no other worker had the lease by now. Only a hint: it may be lost right after."""
    return not lease.is_lost and (yield Read(lease.log.entry_name)) is None


def claim_merge(member: Member) -> Steps[Lease | Merged | None]:
    """Lease the merge, after `claim` returned OVER. `Merged`: it was done; None: another worker merges."""
    assert member.open == {}, "not every range is done"
    log = member.merge
    while (data := (yield Read(log.entry_name))) is not None:
        log.apply(Entry.from_bytes(log.entry_name, data))
    if log.merged is not None:
        return log.merged
    live = yield from live_workers(member)
    if not live or (log.holder in live and log.holder != member.worker):
        return None
    entry = Entry("lease", member.worker, next(member.nonces))
    if not (yield from create_own(log.entry_name, entry.to_bytes())):
        return None
    log.apply(entry)
    return Lease(_copy(log))


def end_merge(member: Member, lease: Lease, merged: Merged) -> Steps[bool]:
    """Record the end of a merge, once the output has its name. False: the lease was lost; another worker writes, or has
    written, the same output.
    """
    if not (yield from _settle(member, lease)):
        return False
    return lease.log.is_over or (
        yield from _append(member, lease, Entry("end", member.worker, next(member.nonces), merged=merged))
    )


def read_done(member: Member, number: int, start: int) -> Steps[DoneRecord]:
    """The parts of a range that must begin with row `start`. Raises PoolError."""
    name = done_name(number)
    record = DoneRecord.from_bytes(name, (yield from read_existing(name)))
    log = LeaseLog(range_name(number), record.start, record.stop, member.worker)
    for part in record.parts:
        log.apply(Entry("part", member.worker, 0, part))
    if record.start != start or not log.is_over:
        raise PoolError(f"{name} of the pool has rows {record.start} to {record.stop}, not all from row {start} on")
    return record


def remove_garbage(block: int, named: frozenset[str]) -> Steps[int]:
    """Delete the parts of a block's ranges that no entry names. Only when all of them are done. Returns how many."""
    listed: list[Listed] = yield List(block_prefix(PARTS, block))
    found = [(each.name, number_and_entry(each.name)) for each in listed if each.name not in named]
    garbage = [name for name, number in found if number is not None and number[0] // BLOCK_RANGES == block]
    for name in garbage:
        yield Delete(name)
    return len(garbage)


def _leased(member: Member, log: LeaseLog) -> Lease:
    lease = member.leases[log.number] = Lease(log)
    return lease


def _copy(log: LeaseLog) -> LeaseLog:
    return replace(log, parts=list(log.parts))


def _append(member: Member, lease: Lease, entry: Entry) -> Steps[bool]:
    """Create the next entry of a lease's log. False: the lease was lost."""
    lease.unsettled = lease.log.entry_name, entry.to_bytes()
    return (yield from _settle(member, lease))


def _settle(member: Member, lease: Lease) -> Steps[bool]:
    """Create the entry that an interruption may have left. False: the lease was lost, now or before."""
    if lease.is_lost or lease.unsettled is None:
        return not lease.is_lost
    name, data = lease.unsettled
    if name == lease.log.entry_name:
        if not (yield from create_own(name, data)):
            forget(member, lease)
            return False
        lease.log.apply(Entry.from_bytes(name, data))
    if lease.log.is_over and lease.log.merged is None:
        yield from _summarise(lease.log)
        member.leases.pop(lease.log.number, None)
    lease.unsettled = None
    return True
