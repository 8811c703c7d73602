"""Worlds of a pool without an engine: their answers are digests of the rows, and everything else is the product's.

`TurnedWorld` does one thing after another as a test says; `run_world` is a process's life, and `one_piece` the job
without a pool.
"""

import io
import json
import os
import random
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from spmd_worker.base.config.schema import JobConfig, RowLimits
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.job_rows import JobInput
from spmd_worker.frontends.batch.output_file import WrittenOutput, write_lines
from spmd_worker.frontends.batch.pool.driver import run
from spmd_worker.frontends.batch.pool.members import heartbeat
from spmd_worker.frontends.batch.pool.store import Listed, PoolStore
from spmd_worker.frontends.batch.pool_world.held_range import SpansDone
from spmd_worker.frontends.batch.pool_world.pool_index import PoolIndex
from spmd_worker.frontends.batch.pool_world.pool_worker import PoolWorker
from spmd_worker.frontends.batch.pool_world.world import World
from spmd_worker.frontends.batch.progress import Progress
from spmd_worker.frontends.batch.row_source import InputRow
from spmd_worker.frontends.openai.row import RowError
from spmd_worker.frontends.openai.row_writer import RowAnswer, error_result
from spmd_worker.replica.sequence.sampling_params import SamplingParams

DEFAULTS = SamplingParams()
MOST_ROUNDS = 200


def write_rows(path: Path, num_rows: int) -> None:
    """Rows of both shapes, some with the custom_id of an earlier one, some that are no row."""
    lines = []
    for index in range(num_rows):
        row: dict[str, Any] = {"prompt": f"row {index}"}
        if index % 3 == 0:
            row |= {"custom_id": f"id {index * 7 % max(num_rows // 2, 1)}"}
        if index % 5 == 2:
            row = {"custom_id": f"id {index % 20}", "method": "POST", "url": "/v1/completions", "body": row}
            row["body"].pop("custom_id", None)
        if index % 11 == 4:
            row = {"custom_id": f"id {index % 20}", "prompt": 7}
        lines.append(f"{json.dumps(row)}\n")
    path.write_text("".join(lines))


def answer_of(found: InputRow) -> RowAnswer:
    """The answer of a row, which depends on its line and index alone."""
    row = found.row
    if isinstance(row, RowError):
        return error_result(row)
    text = blake2b(found.line, digest_size=8).hexdigest()
    output = {"index": 0, "text": text, "token_ids": [row.index], "finish_reason": "stop", "stop_reason": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    value: dict[str, Any] = {"custom_id": row.custom_id, "index": row.index, "outputs": [output], "usage": usage}
    if row.kind != "plain":
        body = {"choices": [output], "usage": usage}
        value = {"id": f"batch-{row.index}", "custom_id": row.custom_id, "response": {"status_code": 200, "body": body}}
    line = json.dumps({**value, "error": None}).encode() + b"\n"
    return RowAnswer(row.index, line, None, 3, 0, 1)


def one_piece(input_path: Path, output: Path) -> bytes:
    """The output's bytes of the job without a pool."""
    rows = JobInput(RowReader.of(str(input_path)), JobConfig(), RowLimits(), DEFAULTS, SpansDone(()))
    answers = iter(lambda: rows.next_row(), None)
    write_lines((answer_of(found).line for found in answers), output)
    return output.read_bytes()


def world_in(store: PoolStore, job: JobConfig, answers: dict[str, Any] | None = None) -> World:
    reader = RowReader.of(job.input or "")
    index = PoolIndex(store, reader)
    return World(store, job, RowLimits(), reader, index, answers or {"model": "digests"}, {"pid": os.getpid()})


class MemoryStore:
    """A `PoolStore` whose server has the clock `now_s`."""

    def __init__(self) -> None:
        self.objects: dict[str, Listed] = {}
        self.contents: dict[str, bytes] = {}
        self.now = 1000.0
        self.before: Callable[[str, str], object] = lambda kind, name: None
        """Called before each operation that writes; may raise."""

    def create(self, name: str, data: bytes) -> bool:
        self.before("create", name)
        if name in self.objects:
            return False
        self._put(name, data)
        return True

    def read(self, name: str) -> bytes | None:
        return self.contents.get(name)

    def list(self, prefix: str) -> list[Listed]:
        return [self.objects[name] for name in sorted(self.objects) if name.startswith(prefix)]

    def touch(self, name: str, data: bytes) -> None:
        self.before("touch", name)
        self._put(name, data)

    def now_s(self, own: str) -> float:
        self.touch(own, b"")
        return self.now

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)
        self.contents.pop(name, None)

    def _put(self, name: str, data: bytes) -> None:
        self.objects[name], self.contents[name] = Listed(name, len(data), self.now), data


class TurnedWorld:
    """A world whose thread and heartbeats are the test's calls. A dead one is never called again."""

    def __init__(self, store: MemoryStore, job: JobConfig, answers: dict[str, Any] | None = None) -> None:
        self.store, self.job = store, job
        self.world = world_in(store, job, answers)
        self.worker: PoolWorker = self.world._worker
        self.worker.start = lambda: None  # type: ignore[method-assign]  # turns are the test's
        self.rows, self.output = self.world.open_rows(DEFAULTS, progress=Progress(None, io.StringIO(), False))
        self.running: list[InputRow] = []
        self.num_computed = 0
        while self.worker._member is None:
            self.turn()
            time.sleep(0.001)
        heartbeats = self.world._heartbeats
        assert heartbeats is not None
        heartbeats.__exit__(None, None, None)
        self.world._heartbeats = None

    def turn(self) -> None:
        self.worker.turn()

    def beat(self) -> None:
        member = self.worker.member
        for lease in run(self.store, heartbeat(member.worker, {}, list(member.leases.values()))):
            self.worker.suspect(lease)

    def read(self) -> None:
        """Read all rows of the held ranges. They run in the file's order, whichever range's lines were read first."""
        while any(not held.rows.has_ended for held in self.worker.held()):
            found = self.rows.next_row()
            if found is None:
                time.sleep(0.0005)
            else:
                self.running.append(found)
        self.running.sort(key=lambda found: found.row.index)

    def answer(self, num_rows: int | None = None) -> None:
        """Answer the last `num_rows` of the rows that run (None: all)."""
        for _ in range(len(self.running) if num_rows is None else num_rows):
            self.num_computed += 1
            self.output.add(answer_of(self.running.pop()))

    def go_on(self) -> None:
        """One round: whatever is leased is computed and committed."""
        self.beat()
        self.turn()
        self.read()
        self.answer()
        self.turn()

    def finish(self) -> WrittenOutput:
        """Go on until all rows are done, and merge."""
        for _ in range(MOST_ROUNDS):
            if self.rows.has_ended:
                break
            self.go_on()
        assert self.rows.has_ended, "others hold the rest"
        return self.world.write_output(None, {}, lambda doing: None)


def run_world(job: JobConfig, seed: int, computed: Path, step_s: float) -> int:
    """A process's life. Appends the index of each computed row to `computed`. Returns the exit code."""
    generator = random.Random(seed)
    from spmd_worker.frontends.batch.pool.posix_store import open_folder

    world = world_in(open_folder(Path(job.pool or "")), job)
    on_signal(world)
    rows, output = world.open_rows(DEFAULTS, progress=Progress(None, io.StringIO(), False))
    running: list[InputRow] = []
    log = os.open(computed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while not rows.has_ended or running:
        while len(running) < 8 and not rows.has_ended and (found := rows.next_row()) is not None:
            running.append(found)
        time.sleep(step_s)
        generator.shuffle(running)
        for _ in range(generator.randint(0, len(running))):
            found = running.pop()
            os.write(log, b"%d\n" % found.row.index)
            output.add(answer_of(found))
        output.show(0)
    world.wait_for_end()
    world.write_output(None, {}, lambda doing: None)
    world.leave("ended")
    world.close()
    return 0


def on_signal(world: World) -> None:
    """SIGTERM hands back in a thread, as the product does, and exits with 143."""
    import signal
    import threading

    def leave() -> None:
        world.leave("signalled")
        os._exit(143)

    signal.signal(signal.SIGTERM, lambda number, frame: threading.Thread(target=leave, daemon=True).start())
