"""Histories of a pool: processes that are added, killed, paused, slowed and asked to end at random. A script.

    pool_histories.py FOLDER FIRST NUMBER AT_ONCE LEASE_S [FLAW]

Prints one JSON object with figures of all histories; a failed one leaves its folder and its traceback in it.
"""

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from pool_worlds import one_piece, run_world, write_rows

from spmd_worker.base.config.schema import JobConfig
from spmd_worker.frontends.batch.pool import lease_log, protocol
from spmd_worker.frontends.batch.pool.posix_store import PosixStore, open_folder
from spmd_worker.frontends.batch.pool.records import Entry, RangeRecord, number_and_entry
from spmd_worker.frontends.batch.pool_world import merge

SUFFIXES = (".jsonl", ".jsonl.zst", ".parquet")
MAX_WORLDS = 6
TICK_S = 0.05
LIMIT_S = 180.0


class History:
    """One pool, its worlds and what is done to them."""

    def __init__(self, folder: Path, seed: int, lease_s: float) -> None:
        self.random, self.folder, self.seed = random.Random(seed), folder, seed
        self.figures = dict.fromkeys(("worlds", "kills", "pauses", "terms", "rows", "computed", "lost"), 0)
        self._lease_s = lease_s
        self._running: dict[int, float] = {}
        """Worlds that run, and when a paused one goes on."""
        num_rows = self.random.randint(40, 160)
        write_rows(folder / "rows.jsonl", num_rows)
        self.figures["rows"] = num_rows
        output = folder / f"out{SUFFIXES[seed % len(SUFFIXES)]}"
        self.job = JobConfig(
            input=str(folder / "rows.jsonl"),
            output=str(output),
            pool=str(folder / "pool"),
            lease_s=lease_s,
            lease_rows=self.random.choice([8, 16, 32, 64]),
            commit_rows=self.random.choice([1, 4, 1000]),
            commit_s=self.random.choice([0.05, 0.3, 100.0]),
        )

    def run(self) -> dict[str, Any]:
        num_faults = self.random.randint(0, 8)
        until_s = time.monotonic() + LIMIT_S
        self._add()
        while not self._has_ended():
            assert time.monotonic() < until_s, "the pool does not end"
            time.sleep(TICK_S)
            self._reap()
            if num_faults and self.random.random() < 0.25:
                num_faults -= 1
                self.random.choice([self._add, self._kill, self._pause, self._terminate])()
            if not [pid for pid, until in self._running.items() if not until]:
                self._add()
        while self._running:
            assert time.monotonic() < until_s, "a world does not end"
            self._reap()
            time.sleep(TICK_S)
        self._check()
        return self.figures

    def _has_ended(self) -> bool:
        return any((self.folder / "pool" / "merged").glob("merge.*")) and b'"end"' in b"".join(
            path.read_bytes() for path in (self.folder / "pool" / "merged").glob("merge.*")
        )

    def _add(self) -> None:
        if len(self._running) >= MAX_WORLDS:
            return
        self.figures["worlds"] += 1
        seed, step_s = self.random.random(), self.random.choice([0.005, 0.02, 0.1])
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = run_world(self.job, int(seed * 1e9), self.folder / "computed", step_s)
            except BaseException:
                (self.folder / f"error.{os.getpid()}").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        self._running[pid] = 0.0

    def _victim(self) -> int | None:
        pids = [pid for pid, until in self._running.items() if not until]
        return self.random.choice(pids) if pids else None

    def _kill(self) -> None:
        if (pid := self._victim()) is not None:
            self.figures["kills"] += 1
            os.kill(pid, signal.SIGKILL)

    def _terminate(self) -> None:
        if (pid := self._victim()) is not None:
            self.figures["terms"] += 1
            os.kill(pid, signal.SIGTERM)

    def _pause(self) -> None:
        if (pid := self._victim()) is not None:
            self.figures["pauses"] += 1
            os.kill(pid, signal.SIGSTOP)
            self._running[pid] = time.monotonic() + self._lease_s * self.random.choice([0.3, 1.3, 2.0])

    def _reap(self) -> None:
        for pid, until_s in list(self._running.items()):
            if until_s and time.monotonic() >= until_s:
                self._running[pid] = 0.0
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._running[pid]
                code = os.waitstatus_to_exitcode(status)
                errors = [path.read_text() for path in self.folder.glob("error.*")]
                assert code in (0, 143, -signal.SIGTERM, -signal.SIGKILL), (code, errors)

    def _check(self) -> None:
        output = Path(self.job.output or "")
        expected = one_piece(self.folder / "rows.jsonl", self.folder / f"one{''.join(output.suffixes)}")
        assert output.read_bytes() == expected, "not the bytes of one piece"
        assert sorted(path.name for path in self.folder.glob("out*")) == [output.name], "partial files are left"
        computed = (self.folder / "computed").read_text().split()
        self.figures["computed"] = len(computed)
        assert {int(row) for row in computed} == set(range(self.figures["rows"]))
        lost_rows, self.figures["lost"] = self._lost()
        extra = len(computed) - self.figures["rows"]
        assert extra <= lost_rows, f"{extra} rows more than once, but leases with only {lost_rows} were not finished"
        strikes = self.figures["kills"] + self.figures["pauses"] + self.figures["terms"]
        assert extra <= self.job.lease_rows * strikes, (extra, self.job.lease_rows, strikes)

    def _lost(self) -> tuple[int, int]:
        """Unfinished rows of leases that ended by a takeover or were handed back, and the number of takeovers."""
        store = open_folder(self.folder / "pool")
        entries = {number_and_entry(each.name): each.name for each in store.list("ranges/")}
        rows = num_lost = 0
        for (number, entry), name in sorted(entries.items()):
            data = store.read(name) or b""
            if entry == 1:
                log = lease_log.LeaseLog.of_range(number, RangeRecord.from_bytes(name, data))
                continue
            found = Entry.from_bytes(name, data)
            is_lost = found.kind == "lease" and log.holder is not None
            if is_lost or found.kind == "handback":
                rows += log.stop - log.start - log.num_rows_done
            num_lost += is_lost
            log.apply(found)
        return rows, num_lost


def plant(flaw: str) -> None:
    """Break a rule on purpose."""
    if flaw == "no fencing":
        # Every entry is created, whoever holds the lease.
        def create(store: PosixStore, name: str, data: bytes) -> bool:
            store.touch(name, data)
            return True

        PosixStore.create = create  # type: ignore[method-assign]
    elif flaw == "first part":
        rows_of = merge._rows_of

        def first(store: Any, done: Any) -> Any:
            part = min(done.parts[:1] or done.parts, key=lambda each: each.name)
            start, stop = part.spans[0][0], part.spans[-1][1]
            try:
                return rows_of(store, replace(done, start=start, stop=stop, parts=(part,)))
            except merge.PoolError:
                return merge.decode_part(part.name, store.read(part.name))

        merge._rows_of = first
    elif flaw == "dead at once":
        # Every lease may be taken over: rows are computed again without a kill.
        protocol.live_workers = lambda member: iter_value(frozenset({member.worker}))  # type: ignore[assignment]
    else:
        assert not flaw, flaw


def iter_value(value: Any) -> Any:
    return value
    yield


def main() -> None:
    folder, first, number, at_once, lease_s, *flaws = sys.argv[1:]
    logging.disable()
    plant("".join(flaws))
    pending, running, results = list(range(int(first), int(first) + int(number))), {}, []
    while pending or running:
        while pending and len(running) < int(at_once):
            seed = pending.pop()
            own = Path(folder) / str(seed)
            own.mkdir(parents=True)
            pid = os.fork()
            if pid == 0:
                run_one(own, seed, float(lease_s))
            running[pid] = own
        pid, _ = os.wait()
        own = running.pop(pid)
        results.append(json.loads((own / "result.json").read_text()))
        if results[-1]["error"] is None:
            shutil.rmtree(own)
    figures = {key: sum(each[key] for each in results) for key in results[0] if key not in ("error", "seed")}
    failed = [(each["seed"], each["error"]) for each in results if each["error"] is not None]
    print(json.dumps({"histories": len(results), **figures, "failed": failed}))


def run_one(folder: Path, seed: int, lease_s: float) -> None:
    history, error = History(folder, seed, lease_s), None
    try:
        history.run()
    except BaseException:
        error = traceback.format_exc()[-3000:]
        for pid in history._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    (folder / "result.json").write_text(json.dumps({**history.figures, "seed": seed, "error": error}))
    os._exit(0)


if __name__ == "__main__":
    main()
