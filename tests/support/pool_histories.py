"""Histories of a pool: processes that are added, killed, paused, slowed and asked to end at random. A script.

    pool_histories.py FOLDER FIRST NUMBER AT_ONCE LEASE_S [FLAW | launches]

With `launches` the processes are launches of the demo model under any layout, else answers are digests.
Prints one JSON object with figures of all histories; a failed one leaves its folder and its traceback in it.
"""

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import ranks
from pool_worlds import one_piece, run_world, write_rows
from process_families import family_of, is_stopped
from waiting import wait_until

from spmd_worker.base.config.schema import JobConfig
from spmd_worker.frontends.batch.pool.lease_log import LeaseLog
from spmd_worker.frontends.batch.pool.posix_store import PosixStore
from spmd_worker.frontends.batch.pool.records import Entry, RangeRecord, number_and_entry
from spmd_worker.frontends.batch.pool_world import merge

SUFFIXES = (".jsonl", ".jsonl.zst", ".parquet")
MAX_WORLDS = 6
TICK_S = 0.05
MOST_TICKS = 6000


class History:
    """One pool, its worlds and what is done to them. Each world is a process group."""

    FAULT_CHANCE = 0.25
    """Of a tick."""

    def __init__(self, folder: Path, seed: int, lease_s: float) -> None:
        self.random, self.folder, self.seed = random.Random(seed), folder, seed
        names = ("worlds", "working", "kills", "pauses", "terms", "rows", "computed", "lost")
        self.figures = dict.fromkeys(names, 0)
        self._lease_s = lease_s
        self._tick = 0
        self._running: dict[int, int] = {}
        """Worlds that run, and the tick at which a paused one goes on."""
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
        faults = self._faults()
        self._add()
        while not self._has_ended():
            self._wait("the pool")
            self._reap()
            if faults and self.random.random() < self.FAULT_CHANCE and faults[0]():
                del faults[0]
            if not [pid for pid, until in self._running.items() if not until]:
                self._add()
        while self._running:
            self._wait("a world")
            self._reap()
        self._check()
        return self.figures

    def _faults(self) -> list[Callable[[], bool]]:
        """What is done, in order; one that is not possible yet returns False."""
        return self.random.choices([self._add, self._kill, self._pause, self._terminate], k=self.random.randint(0, 8))

    def _signal(self, pid: int, number: int) -> None:
        os.killpg(pid, number)

    def _wait(self, what: str) -> None:
        self._tick += 1
        assert self._tick < MOST_TICKS, f"{what} does not end"
        time.sleep(TICK_S)

    def _has_ended(self) -> bool:
        return any((self.folder / "pool" / "merged").glob("merge.*")) and b'"end"' in b"".join(
            path.read_bytes() for path in (self.folder / "pool" / "merged").glob("merge.*")
        )

    def _add(self) -> bool:
        if len(self._running) < MAX_WORLDS:
            self.figures["worlds"] += 1
            self._running[self._start()] = 0
        return True

    def _start(self) -> int:
        seed, step_s = self.random.random(), self.random.choice([0.005, 0.02, 0.1])
        pid = os.fork()
        if pid == 0:
            code = 1
            os.setpgid(0, 0)
            try:
                code = run_world(self.job, int(seed * 1e9), self.folder / "computed", step_s)
            except BaseException:
                (self.folder / f"error.{os.getpid()}").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            # Either of the two comes first.
            os.setpgid(pid, pid)
        return pid

    def _victim(self) -> int | None:
        pids = [pid for pid, until in self._running.items() if not until]
        return self.random.choice(pids) if pids else None

    def _kill(self) -> bool:
        if (pid := self._victim()) is not None:
            self.figures["kills"] += 1
            self._signal(pid, signal.SIGKILL)
        return pid is not None

    def _terminate(self) -> bool:
        if (pid := self._victim()) is not None:
            self.figures["terms"] += 1
            self._signal(pid, signal.SIGTERM)
        return pid is not None

    def _pause(self) -> bool:
        if (pid := self._victim()) is not None:
            self.figures["pauses"] += 1
            self._signal(pid, signal.SIGSTOP)
            pause_s = self._lease_s * self.random.choice([0.3, 1.3, 2.0])
            self._running[pid] = self._tick + 1 + int(pause_s / TICK_S)
        return pid is not None

    def _reap(self) -> None:
        for pid, until in list(self._running.items()):
            if until and self._tick >= until:
                self._running[pid] = 0
                with contextlib.suppress(ProcessLookupError):
                    self._signal(pid, signal.SIGCONT)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._running[pid]
                code = os.waitstatus_to_exitcode(status)
                assert self._is_expected(code), (code, self._errors())

    def _errors(self) -> list[str]:
        return [path.read_text() for path in self.folder.glob("error.*")]

    def _is_expected(self, code: int) -> bool:
        return code in (0, 143, -signal.SIGTERM, -signal.SIGKILL)

    def _check(self) -> None:
        output = Path(self.job.output or "")
        assert output.read_bytes() == self._expected(), "not the bytes of one piece"
        assert sorted(path.name for path in self.folder.glob("out*")) == [output.name], "partial files are left"
        self._check_work()

    def _expected(self) -> bytes:
        suffixes = "".join(Path(self.job.output or "").suffixes)
        return one_piece(self.folder / "rows.jsonl", self.folder / f"one{suffixes}")

    def _computed(self) -> list[int]:
        """A number for each time that a row was answered."""
        return [int(row) for row in (self.folder / "computed").read_text().split()]

    def _check_work(self) -> None:
        computed = self._computed()
        self.figures["computed"] = len(computed)
        assert set(computed) == set(range(self.figures["rows"]))
        lost_rows, self.figures["lost"] = self._lost()
        extra = len(computed) - self.figures["rows"]
        assert extra <= lost_rows, f"{extra} rows more than once, but leases with only {lost_rows} were not finished"
        strikes = self.figures["kills"] + self.figures["pauses"] + self.figures["terms"]
        assert extra <= self.job.lease_rows * strikes, (extra, self.job.lease_rows, strikes)

    def _lost(self) -> tuple[int, int]:
        """Unfinished rows of leases that were taken over or handed back, and the number of takeovers."""
        rows = num_lost = 0
        for log, entry in self._entries():
            kind = "" if entry is None else entry.kind
            is_lost = kind == "lease" and log.holder is not None
            if is_lost or kind == "handback":
                rows += log.stop - log.start - log.num_rows_done
            num_lost += is_lost
        return rows, num_lost

    def _entries(self) -> Iterator[tuple[LeaseLog, Entry | None]]:
        """The logs of all ranges: before each later entry, with it, and, with None, at their ends."""
        store = PosixStore(self.folder / "pool")
        entries = {number_and_entry(each.name): each.name for each in store.list("ranges/")}
        log = None
        for (number, entry), name in sorted(entries.items()):
            data = store.read(name) or b""
            if entry == 1:
                if log is not None:
                    yield log, None
                log = LeaseLog.of_range(number, RangeRecord.from_bytes(name, data))
                continue
            assert log is not None
            found = Entry.from_bytes(name, data)
            yield log, found
            log.apply(found)
        if log is not None:
            yield log, None


class LaunchedHistory(History):
    """Worlds are launches of the demo model, which take seconds to start. Faults strike one that is in the middle of a
    lease: it has answered rows that are in no part. It is stopped to know that.
    """

    FAULT_CHANCE = 0.5
    NUM_FAULTS = 3

    LAYOUTS = ((1, ""), (1, ""), (2, "tensor_parallel_size"), (2, "data_parallel_size"), (2, "pipeline_parallel_size"))

    def __init__(self, folder: Path, seed: int, lease_s: float) -> None:
        super().__init__(folder, seed, lease_s)
        self.figures["rows"] *= 3
        rows: list[dict[str, Any]] = [
            {"prompt": f"add {index} 7 =", "max_tokens": 40 + index % 50, "ignore_eos": True, "temperature": index % 2}
            for index in range(self.figures["rows"])
        ]
        rows[13] = {"prompt": 7}
        rows[5] |= {"custom_id": "a"}
        rows[-1] |= {"custom_id": "a"}
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        self._started: list[subprocess.Popen[bytes]] = []
        self._rows_of: dict[int, Path] = {}

    def _faults(self) -> list[Callable[[], bool]]:
        others = self.random.choices([self._kill, self._pause, self._terminate], k=self.NUM_FAULTS - 1)
        return [self._add, self._kill, *others]

    def _signal(self, pid: int, number: int) -> None:
        """Ranks have sessions of their own. SIGTERM is the launcher's to pass on."""
        for each in [pid] if number == signal.SIGTERM else family_of(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)
        if number == signal.SIGTERM:
            self._signal(pid, signal.SIGCONT)

    def _victim(self) -> int | None:
        pid = super()._victim()
        # Ranks that are stopped again and again while they join torchrun's store may not find it for a minute.
        if pid is None or not self._lines(self._rows_of[pid]):
            return None
        self._signal(pid, signal.SIGSTOP)
        wait_until(lambda: all(map(is_stopped, family_of(pid))))
        if self._is_in_a_lease(pid):
            return pid
        self._signal(pid, signal.SIGCONT)
        return None

    def _is_in_a_lease(self, pid: int) -> bool:
        computed = [line.split() for line in self._lines(self._rows_of[pid])]
        worker, rows = (computed[-1][0], {int(row) for _, row in computed}) if computed else ("", set())
        return any(
            entry is None
            and not log.is_over
            and log.holder == worker
            and rows & set(chain(*starmap(range, log.missing())))
            for log, entry in self._entries()
        )

    @staticmethod
    def _lines(path: Path) -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    def _computed(self) -> list[int]:
        # Not those of `_rows_of`: a process id may be used again.
        lines = [line.split() for path in self.folder.glob("computed.*") for line in self._lines(path)]
        self.figures["working"] = len({worker for worker, _ in lines})
        return [int(row) for _, row in lines]

    def _start(self) -> int:
        size, key = self.random.choice(self.LAYOUTS)
        job = {key: getattr(self.job, key) for key in ("pool", "lease_s", "lease_rows", "commit_rows", "commit_s")}
        return self._launch(size, [f"parallel.{key}={size}"] if key else [], self.job.output or "", job).pid

    def _launch(
        self, size: int, layout: Sequence[str], output: str, job: Mapping[str, Any]
    ) -> "subprocess.Popen[bytes]":
        python = [sys.executable] if size == 1 else [*ranks.torchrun(size)]
        words = [*python, str(ranks.SUPPORT / "counted_launch.py"), f"model.path={ranks.REPOSITORY}/scripts/demo/model"]
        words += ["model.dtype=float32", "device=cpu", "cache.num_blocks=512", "executor.timeout_s=60", *layout]
        words += [f"scheduler.max_num_seqs={self.random.choice([4, 16])}", f"job.input={self.job.input}"]
        words += [f"job.output={output}", *(f"job.{key}={value}" for key, value in job.items())]
        number = len(self._started)
        rows = self.folder / f"computed.{number}"
        with open(self.folder / f"log.{number}", "wb") as log:
            environment = {**os.environ, "COMPUTED_ROWS": str(rows)}
            process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=environment)
        self._started.append(process)
        self._rows_of[process.pid] = rows
        return process

    def _is_expected(self, code: int) -> bool:
        # torchrun reports its own end by a signal, and the kill of a rank, as 1.
        return code in (0, 1, 143, -signal.SIGTERM, -signal.SIGKILL) and not self._errors()

    def _errors(self) -> list[str]:
        texts = [path.read_text() for path in self.folder.glob("log.*")]
        return [text[-2000:] for text in texts if "Traceback" in text and "SignalException" not in text]

    def _expected(self) -> bytes:
        output = self.folder / f"one{''.join(Path(self.job.output or '').suffixes)}"
        assert self._launch(1, [], str(output), {}).wait() == 0
        return output.read_bytes()

    def _check_work(self) -> None:
        super()._check_work()
        kills, lost = self.figures["kills"], self.figures["lost"]
        # A killed world held a lease in which rows were missing.
        assert lost >= kills > 0, (lost, kills)


def plant(flaw: str) -> None:
    """Break a rule on purpose."""
    if flaw == "no fencing":
        # Every entry is created, whoever holds the lease.
        def create(store: PosixStore, name: str, data: bytes) -> bool:
            store.touch(name, data)
            return True

        PosixStore.create = create  # type: ignore[method-assign]  # a flaw
    elif flaw == "first part":
        rows_of = merge._rows_of

        def first(store: Any, done: Any) -> Any:
            part = done.parts[0]
            start, stop = part.spans[0][0], part.spans[-1][1]
            try:
                return rows_of(store, replace(done, start=start, stop=stop, parts=(part,)))
            except merge.PoolError:
                return merge.decode_part(part.name, store.read(part.name))

        merge._rows_of = first
    else:
        assert not flaw, flaw


def main() -> None:
    folder, first, number, at_once, lease_s, *flaws = sys.argv[1:]
    logging.disable()
    kind = LaunchedHistory if "launches" in flaws else History
    plant("".join(flaws).removeprefix("launches"))
    pending, running, results = list(range(int(first), int(first) + int(number))), {}, []
    while pending or running:
        while pending and len(running) < int(at_once):
            seed = pending.pop()
            own = Path(folder) / str(seed)
            own.mkdir(parents=True)
            pid = os.fork()
            if pid == 0:
                run_one(kind, own, seed, float(lease_s))
            running[pid] = own
        pid, _ = os.wait()
        own = running.pop(pid)
        results.append(json.loads((own / "result.json").read_text()))
        if results[-1]["error"] is None:
            shutil.rmtree(own)
    figures = {key: sum(each[key] for each in results) for key in results[0] if key not in ("error", "seed")}
    failed = [(each["seed"], each["error"]) for each in results if each["error"] is not None]
    print(json.dumps({"histories": len(results), **figures, "failed": failed}))


def run_one(kind: type[History], folder: Path, seed: int, lease_s: float) -> None:
    history, error = kind(folder, seed, lease_s), None
    try:
        history.run()
    except BaseException:
        error = traceback.format_exc()[-3000:]
        for pid in history._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    (folder / "result.json").write_text(json.dumps({**history.figures, "seed": seed, "error": error}))
    os._exit(0)


if __name__ == "__main__":
    main()
