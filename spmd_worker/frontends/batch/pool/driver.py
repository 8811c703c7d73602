"""Runs protocol functions on a real store: repeats operations that failed, and a thread that sends heartbeats."""

import errno
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, TypeVar

from spmd_worker.base.errors import PoolError
from spmd_worker.base.remote_store import RemoteError
from spmd_worker.frontends.batch.pool.members import Lease, Member, check_member, heartbeat
from spmd_worker.frontends.batch.pool.protocol import read_done, remove_garbage
from spmd_worker.frontends.batch.pool.records import BLOCK_RANGES, DoneRecord, worker_of
from spmd_worker.frontends.batch.pool.store import Operation, PoolStore, Steps, perform

logger = logging.getLogger(__name__)

PAUSES_S: Final = (0.1, 0.3, 1.0, 3.0, *(10.0,) * 60)
"""Pauses before an operation is repeated; after the last one, in ten minutes, its error is raised."""
_SHORT_PAUSES_S: Final = (0.1, 0.3, 1.0)
"""Pauses of a tool that reports once."""
_MUCH_S: Final = 1.0
"""A pause that is reported."""
_HEARTBEATS_A_LEASE: Final = 4
_JOIN_S: Final = 5.0
_PERMANENT: Final = frozenset(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
)
_Value = TypeVar("_Value")


def run(
    store: PoolStore, steps: Steps[_Value], pauses_s: Iterable[float] = PAUSES_S, *, is_patient: bool = True
) -> _Value:
    """Run a protocol function. Raises what it raises, and OSError when an operation failed for good. Without
    `is_patient` as `perform_soon`.
    """
    try:
        operation = next(steps)
        while True:
            answer = _perform(store, operation, pauses_s) if is_patient else perform_soon(store, operation)
            operation = steps.send(answer)
    except StopIteration as end:
        value: _Value = end.value
        return value


def perform_soon(store: PoolStore, operation: Operation) -> Any:
    """The answer to an operation that is repeated for a second or two; not one on a remote store that is out of reach,
    which has been tried for half a minute then. Raises OSError.
    """
    return _perform(store, operation, _SHORT_PAUSES_S, repeats_remote=False)


def _perform(store: PoolStore, operation: Operation, pauses_s: Iterable[float], *, repeats_remote: bool = True) -> Any:
    """Any operation may be repeated: the protocol recognises an object that an earlier try created."""
    for pause_s in pauses_s:
        try:
            return perform(store, operation)
        except OSError as error:
            if error.errno in _PERMANENT or (is_out_of_reach(error) and not repeats_remote):
                raise
            log = logger.warning if pause_s >= _MUCH_S else logger.info
            log("The pool's store failed (%s), and is asked again in %.1f s", error, pause_s)
            time.sleep(pause_s)
    return perform(store, operation)


def is_out_of_reach(error: OSError) -> bool:
    """True if a remote store failed in all tries of a request, of which it has many."""
    return isinstance(error, RemoteError) and error.is_transient


def new_worker() -> str:
    """Id of a worker that no other has or had: host, process and a random number."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:48]
    return f"{host}-{os.getpid()}-{secrets.token_hex(8)}"


def done_ranges(store: PoolStore, member: Member) -> Iterator[DoneRecord]:
    """The parts of every range, in order of the rows; removes garbage. For the holder of the merge. Raises PoolError
    for a pool in which rows are missing, OSError.
    """
    start, named, members = 0, set[str](), {member.worker}
    run(store, check_member(member.worker))
    for number in range(member.next_number):
        record = run(store, read_done(member, number, start))
        named.update(part.name for part in record.parts)
        for worker in sorted({worker_of(part) for part in record.parts} - members):
            # Rows of another job, whose pool had this name.
            run(store, check_member(worker))
            members.add(worker)
        start = record.stop
        yield record
        if (number + 1) % BLOCK_RANGES == 0 or number + 1 == member.next_number:
            run(store, remove_garbage(number // BLOCK_RANGES, frozenset(named)))
            named.clear()
    assert start == member.job.num_rows, (start, member.job.num_rows)
    # Before the output gets its name.
    run(store, check_member(member.worker))


class Heartbeats:
    """A thread that shows that a worker is alive, from `__enter__` to `__exit__`, and notices leases that were lost.

    `counts` returns what a heartbeat shows, and `lost` is called once with each lost lease; both in the thread.
    """

    def __init__(
        self,
        store: PoolStore,
        member: Member,
        counts: Callable[[], Mapping[str, Any]],
        lost: Callable[[Lease], None],
    ) -> None:
        self._store, self._member, self._counts, self._lost = store, member, counts, lost
        self._reported: list[Lease] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="spmd-pool-heartbeats", daemon=True)

    def __enter__(self) -> "Heartbeats":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        # A store that hangs must not hold the end up; a late heartbeat of a worker that has left has no effect.
        self._thread.join(_JOIN_S)

    def send(self) -> None:
        """Send one heartbeat. Raises OSError."""
        member = self._member
        member.counts = self._counts()
        # A copy: the main thread takes and ends leases meanwhile.
        leases = [lease for lease in list(member.leases.values()) if lease not in self._reported]
        # Without pauses: the next heartbeat is the next try.
        for lease in run(self._store, heartbeat(member.worker, member.counts, leases), pauses_s=()):
            logger.warning("The lease of %s was lost: this worker was silent for too long", lease.log.name)
            self._reported.append(lease)
            self._lost(lease)

    def _send_all(self) -> None:
        interval_s = self._member.job.lease_s / _HEARTBEATS_A_LEASE
        while not self._ending.wait(interval_s):
            try:
                self.send()
            except (OSError, PoolError) as error:
                # What ends this world is raised where it works.
                logger.warning("No heartbeat could be sent to the pool (%s)", error)
